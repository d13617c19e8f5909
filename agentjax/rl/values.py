"""The critic's loss, where it is taken, and how well it predicts.

Floor 1, rl/. A value at a label's position is that of the state BEFORE the
token. Returns are constants: raw advantage + value, before any whitening.
Masked like the policy's loss, and aggregated by the same functions.

Letters: N tokens, flat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from agentjax.rl.masked import divide, hide, mean, segment_max


class ValueLoss(NamedTuple):
  """Per-token loss, and bool[N]: where the clipped term decides."""

  loss_N: jax.Array
  clipped_N: jax.Array


def squared(error_N: jax.Array) -> jax.Array:
  """error^2 / 2."""
  return jnp.square(error_N) / 2


def huber(error_N: jax.Array, *, delta: float = 10.0) -> jax.Array:
  """error^2 / 2 up to `delta`, and from there on its tangent. Huber, 1964."""
  size = jnp.abs(error_N)
  inside = jnp.minimum(size, delta)
  return inside * (size - inside / 2)


def value_loss(
  values_N: jax.Array,
  old_values_N: jax.Array,
  returns_N: jax.Array,
  mask_N: jax.Array,
  *,
  clip: float | None = None,
  error: Callable[[jax.Array], jax.Array] = squared,
) -> ValueLoss:
  """max(error(v - R), error(clip(v, v_old +- clip) - R)).

  Source: PPO's public implementation (Dhariwal et al., 2017); None for `clip`
  is plain regression.
  """
  values, old, returns = (
    hide(x, mask_N) for x in (values_N, old_values_N, returns_N)
  )
  old, returns = stop_gradient(old), stop_gradient(returns)
  plain = error(values - returns)
  if clip is None:
    return ValueLoss(plain, jnp.zeros(plain.shape, bool))
  near = error(jnp.clip(values, old - clip, old + clip) - returns)
  return ValueLoss(jnp.maximum(plain, near), hide(near > plain, mask_N))


def turn_ends(mask_N: jax.Array, turns_N: jax.Array) -> jax.Array:
  """bool[N]: the last token of each turn: the mask of a critic of turns.

  Turn-wise credit reads the critic there alone, so it is trained there alone.
  """
  place = jnp.arange(mask_N.shape[0], dtype=jnp.float32)
  return mask_N & (place == segment_max(place, mask_N, turns_N)[turns_N])


def explained_variance(
  values_N: jax.Array, returns_N: jax.Array, mask_N: jax.Array
) -> jax.Array:
  """1 - var(R - V) / var(R) where the mask holds; 0 where R does not vary.

  1 is a perfect critic, 0 one no better than the mean, below 0 a worse one.
  """

  def variance(x_N):
    centred = hide(x_N, mask_N) - mean(x_N, mask_N)
    return mean(jnp.square(centred), mask_N)

  error = hide(returns_N, mask_N) - hide(values_N, mask_N)
  of_returns = variance(returns_N)
  return hide(1 - divide(variance(error), of_returns), of_returns > 0)
