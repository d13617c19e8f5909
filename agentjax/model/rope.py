"""Rotary positions: tables of angles, and their application.

Floor 1, model/, under `transformer`. `hf_rope` reads what a checkpoint says of
them.

Letters: B rows, T tokens, H heads, Q head size.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from agentjax.model.config import ModelConfig


def rope_tables(
  positions: jax.Array, config: ModelConfig, kind: str
) -> tuple[jax.Array, jax.Array]:
  """Float32 cos and sin [..., Q/2] of integer positions [...].

  Source: RoFormer (arXiv:2104.09864), half-rotation form; Llama 3.1 scaling.
  """
  local = kind == 'local'
  theta = config.rope_theta_local if local else config.rope_theta
  half = config.head_size // 2
  freq = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  scaling = None if local else config.rope_scaling
  if scaling is not None and scaling.kind == 'linear':
    freq = freq / scaling.factor
  elif scaling is not None and scaling.kind == 'llama3':
    turns = scaling.original_context * freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    freq = freq * (smooth + (1.0 - smooth) / scaling.factor)
  elif scaling is not None:
    raise ValueError(f'rope scaling {scaling.kind!r}: choose linear or llama3')
  angle = positions.astype(jnp.float32)[..., None] * freq
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTHQ: jax.Array, cos_BTQ, sin_BTQ) -> jax.Array:
  """Heads turned by their positions, the two halves of each as pairs."""
  a, b = jnp.split(x_BTHQ.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos_BTQ[:, :, None], sin_BTQ[:, :, None]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(
    x_BTHQ.dtype
  )
