"""Losses of the policy: pure functions of per-token arrays.

Floor 1, rl/. A loss returns per-token values; `weighted` turns them into the
(sum, count) pair that is reduced over micro-batches, devices and hosts and
divided once. Every function first replaces what the mask hides by zeros, so
that a NaN there reaches neither a value nor a gradient (design promise 2).

Letters: N tokens, flat.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Log-ratios beyond this are clipped: exp(20) is still finite in float32.
MAX_LOG_RATIO = 20.0


class Pair(NamedTuple):
  """A sum and the count that it is to be divided by, once, at the end."""

  sum: jax.Array
  count: jax.Array

  def mean(self) -> jax.Array:
    """sum / count, and 0 for an empty mask."""
    some = self.count > 0
    return jnp.where(some, self.sum / jnp.where(some, self.count, 1.0), 0.0)


def hide(x: jax.Array, mask_N: jax.Array) -> jax.Array:
  """Zeros where the mask is False, also in the gradient."""
  return jnp.where(mask_N, x, jnp.zeros((), x.dtype))


def weighted(x_N: jax.Array, weights_N: jax.Array) -> Pair:
  """Weighted sum, and the sum of weights as its count. Weight 0 hides."""
  mask = weights_N > 0
  return Pair(
    jnp.sum(hide(x_N, mask) * weights_N), jnp.sum(weights_N, dtype=jnp.float32)
  )


def log_ratio(new_N: jax.Array, old_N: jax.Array, mask_N: jax.Array):
  """log pi_new / pi_old where the mask holds, clipped to +-20; else 0."""
  gap = hide(new_N, mask_N) - hide(old_N, mask_N)
  return jnp.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO)


class PolicyLoss(NamedTuple):
  """Per-token loss, and what is worth a metric."""

  loss_N: jax.Array
  clipped_N: jax.Array  # 1 where the clipped term decides


def ppo_clip(
  logprobs_N: jax.Array,
  old_logprobs_N: jax.Array,
  advantages_N: jax.Array,
  mask_N: jax.Array,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
) -> PolicyLoss:
  """max(-A r, -A clip(r, 1 - low, 1 + high)), r = exp(new - old).

  Source: PPO, arXiv:1707.06347, eq. 7; clip_high > clip_low is DAPO's
  clip-higher, arXiv:2503.14476.
  """
  advantages = hide(advantages_N, mask_N)
  ratio = jnp.exp(log_ratio(logprobs_N, old_logprobs_N, mask_N))
  plain = -advantages * ratio
  clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  return PolicyLoss(jnp.maximum(plain, clipped), hide(clipped > plain, mask_N))


def reinforce(
  logprobs_N: jax.Array,
  old_logprobs_N: jax.Array,
  advantages_N: jax.Array,
  mask_N: jax.Array,
) -> PolicyLoss:
  """-A log pi. Source: Williams, 1992."""
  del old_logprobs_N
  loss = -hide(advantages_N, mask_N) * hide(logprobs_N, mask_N)
  return PolicyLoss(loss, jnp.zeros_like(loss))


def cross_entropy(
  logprobs_N: jax.Array,
  old_logprobs_N: jax.Array,
  advantages_N: jax.Array,
  mask_N: jax.Array,
) -> PolicyLoss:
  """-log pi: supervised training on a trajectory's MODEL tokens."""
  del old_logprobs_N, advantages_N
  loss = -hide(logprobs_N, mask_N)
  return PolicyLoss(loss, jnp.zeros_like(loss))
