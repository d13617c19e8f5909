"""Heads beside the vocabulary's: the value of a state.

Floor 1, model/. A head reads the decoder's hidden state, in float32. Knows no
loss and no reward.

Letters: D width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from agentjax.model.config import ModelConfig


def init_value(config: ModelConfig) -> dict[str, jax.Array]:
  """A head that says 0 of every state: the baseline of no critic at all."""
  return {'kernel': jnp.zeros(config.width), 'bias': jnp.zeros(())}


def value(head: dict[str, Any], hidden_D: jax.Array) -> jax.Array:
  """float32 [...] of hidden states [..., D]."""
  hidden = hidden_D.astype(jnp.float32)
  # Not a matrix product: TPUs would round its float32 operands.
  return jnp.sum(hidden * head['kernel'], -1) + head['bias']


def value_axes() -> dict[str, tuple[str, ...]]:
  """Logical axes of the head's parameters."""
  return {'kernel': ('none',), 'bias': ()}
