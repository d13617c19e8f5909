"""Masked arithmetic: what losses, corrections and metrics are made of.

Floor 1, rl/. Knows no loss. Every function first replaces what the mask hides
by zeros, before anything is done to it, so that a NaN there reaches neither a
value nor a gradient (design promise 2); a mean over nothing is 0. Sums over
sequences take ids in [0, N), so that no shape but the tokens' is compiled.

Letters: N tokens, flat; S sequences (or turns), of which there are N places.
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
    return divide(self.sum, self.count)


def divide(total: jax.Array, count: jax.Array) -> jax.Array:
  """total / count, and 0 where the count is 0; so is its gradient there."""
  some = count > 0
  return jnp.where(some, total / jnp.where(some, count, 1.0), 0.0)


def hide(x: jax.Array, mask_N: jax.Array) -> jax.Array:
  """Zeros where the mask is False, also in the gradient."""
  return jnp.where(mask_N, x, jnp.zeros((), x.dtype))


def weighted(
  x_N: jax.Array, weights_N: jax.Array, count: jax.Array | float | None = None
) -> Pair:
  """Weighted sum over `count`, the sum of weights by default. Weight 0 hides.

  What `rl.aggregation` makes for a whole optimizer batch fits here: its
  weights split over micro-batches, its count stands once.
  """
  total = jnp.sum(hide(x_N, weights_N > 0) * weights_N)
  if count is None:
    count = jnp.sum(weights_N, dtype=jnp.float32)
  return Pair(total, jnp.asarray(count, jnp.float32))


def mean(x_N: jax.Array, mask_N: jax.Array) -> jax.Array:
  """The mean of what the mask shows."""
  return divide(jnp.sum(hide(x_N, mask_N)), jnp.sum(mask_N, dtype=jnp.float32))


def log_ratio(
  new_N: jax.Array,
  old_N: jax.Array,
  mask_N: jax.Array,
  limit: float | None = MAX_LOG_RATIO,
) -> jax.Array:
  """log pi_new / pi_old where the mask holds, clipped to +-limit; else 0.

  Where it is clipped its gradient is 0. None leaves it alone: an average over
  a sequence must be taken before any clip, which would change it.
  """
  gap = hide(new_N, mask_N) - hide(old_N, mask_N)
  return gap if limit is None else jnp.clip(gap, -limit, limit)


def beyond(
  new_N: jax.Array,
  old_N: jax.Array,
  mask_N: jax.Array,
  limit: float = MAX_LOG_RATIO,
) -> jax.Array:
  """bool[N]: where `log_ratio` clips; its mean is worth a metric."""
  return jnp.abs(log_ratio(new_N, old_N, mask_N, None)) > limit


# ---- over sequences or turns ------------------------------------------------


def segment_sum(
  x_N: jax.Array, mask_N: jax.Array, ids_N: jax.Array
) -> jax.Array:
  """[S]: sums over what the mask shows, by id; [ids_N] brings them back."""
  return jax.ops.segment_sum(
    hide(x_N, mask_N), ids_N, num_segments=x_N.shape[0]
  )


def segment_count(mask_N: jax.Array, ids_N: jax.Array) -> jax.Array:
  """float32[S]: how many tokens the mask shows of each id."""
  return segment_sum(jnp.ones(mask_N.shape, jnp.float32), mask_N, ids_N)


def segment_mean(
  x_N: jax.Array, mask_N: jax.Array, ids_N: jax.Array
) -> jax.Array:
  """[S]: means over what the mask shows, by id; 0 where it shows nothing."""
  return divide(segment_sum(x_N, mask_N, ids_N), segment_count(mask_N, ids_N))


def segment_max(
  x_N: jax.Array, mask_N: jax.Array, ids_N: jax.Array
) -> jax.Array:
  """[S]: maxima over what the mask shows, by id; 0 where it shows nothing."""
  shown = jnp.where(mask_N, x_N, -jnp.inf)
  most = jax.ops.segment_max(shown, ids_N, num_segments=x_N.shape[0])
  return hide(most, segment_count(mask_N, ids_N) > 0)
