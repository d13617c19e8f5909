"""How far the policy that sampled is from the one that learns: metrics.

Floor 1, rl/. Knows no loss. Numbers for a log, of weights and log-probs that
`correction` uses; all masked, and 0 where there is nothing to be measured.

Letters: N tokens, flat; S sequences.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentjax.rl.masked import (
  MAX_LOG_RATIO,
  divide,
  hide,
  log_ratio,
  mean,
  segment_count,
  segment_mean,
  segment_sum,
)


def effective_sample_size(weights_N, mask_N) -> jax.Array:
  """(sum w)^2 / (n sum w^2): 1 for equal weights, 1 / n if one has them all.

  Source: Kish, 1965.
  """
  w = hide(weights_N, mask_N)
  n = jnp.sum(mask_N, dtype=jnp.float32)
  return divide(jnp.square(jnp.sum(w)), n * jnp.sum(jnp.square(w)))


def rejected_share(kept_N, mask_N) -> jax.Array:
  """Of tokens: how many a rejection took."""
  return mean((~kept_N).astype(jnp.float32), mask_N)


def rejected_sequences(kept_N, mask_N, sequences_N) -> jax.Array:
  """Of trajectories: how many lost a token."""
  some_S = segment_count(mask_N, sequences_N) > 0
  lost_S = segment_count(mask_N & ~kept_N, sequences_N) > 0
  return divide(
    jnp.sum(lost_S, dtype=jnp.float32), jnp.sum(some_S, dtype=jnp.float32)
  )


def spread(x_N, mask_N, *, ddof: int = 0) -> dict[str, jax.Array]:
  """mean, std, min and max of what the mask shows."""
  middle = mean(x_N, mask_N)
  n = jnp.sum(mask_N, dtype=jnp.float32)
  squares = jnp.sum(jnp.square(hide(x_N - middle, mask_N)))
  some = n > 0
  return {
    'mean': middle,
    'std': jnp.sqrt(divide(squares, n - ddof)),
    'min': hide(jnp.min(jnp.where(mask_N, x_N, jnp.inf)), some),
    'max': hide(jnp.max(jnp.where(mask_N, x_N, -jnp.inf)), some),
  }


def outside(x_N, mask_N, *, low: float, high: float) -> dict[str, jax.Array]:
  """Shares below `low` and above `high`."""
  return {
    'low': mean((x_N < low).astype(jnp.float32), mask_N),
    'high': mean((x_N > high).astype(jnp.float32), mask_N),
  }


def per_sequence(x_N, mask_N, sequences_N) -> tuple[jax.Array, jax.Array]:
  """[S]: means of trajectories, and a mask of those that have tokens."""
  count_S = segment_count(mask_N, sequences_N)
  return segment_mean(x_N, mask_N, sequences_N), count_S > 0


def divergences(old_N, behaviour_N, mask_N) -> dict[str, jax.Array]:
  """Of mu, which sampled, to old, over tokens; rho = old / mu.

  kl: mean of -log rho. k3: of rho - 1 - log rho. chi2: of rho^2, less 1.
  """
  gap = log_ratio(old_N, behaviour_N, mask_N, None)
  near = jnp.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  some = jnp.any(mask_N)
  return {
    'kl': mean(-gap, mask_N),
    'k3': mean(jnp.exp(near) - 1 - near, mask_N),
    'chi2': hide(mean(jnp.exp(2 * near), mask_N) - 1, some),
  }


def sequence_chi2(
  old_N, behaviour_N, mask_N, sequences_N, some_S=None
) -> jax.Array:
  """Mean over trajectories of the squared product of rho, less 1.

  Args:
    some_S: which trajectories count; those that have tokens by default.
  """
  gap = log_ratio(old_N, behaviour_N, mask_N, None)
  if some_S is None:
    some_S = segment_count(mask_N, sequences_N) > 0
  total_S = segment_sum(gap, mask_N, sequences_N)
  total_S = jnp.clip(total_S, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  squared = mean(jnp.exp(2 * total_S), some_S)
  return hide(squared - 1, jnp.any(some_S))


def perplexities(
  old_N, behaviour_N, mask_N, sequences_N, some_S=None
) -> dict[str, jax.Array]:
  """Over trajectories, each one's mean log-prob of a token first.

  old, behaviour: means of exp(-mean log-prob), log_old and log_behaviour of
  its logarithm. gap, abs_gap, min_gap, max_gap: of log old - log behaviour
  perplexity; ratio: the mean of its exponential.

  Args:
    some_S: which trajectories count; those that have tokens by default.
  """
  old_S, has_S = per_sequence(old_N, mask_N, sequences_N)
  behaviour_S, _ = per_sequence(behaviour_N, mask_N, sequences_N)
  some_S = has_S if some_S is None else some_S
  gap_S = behaviour_S - old_S
  gaps = spread(gap_S, some_S)
  return {
    'old': mean(jnp.exp(-old_S), some_S),
    'behaviour': mean(jnp.exp(-behaviour_S), some_S),
    'log_old': mean(-old_S, some_S),
    'log_behaviour': mean(-behaviour_S, some_S),
    'gap': gaps['mean'],
    'abs_gap': mean(jnp.abs(gap_S), some_S),
    'min_gap': gaps['min'],
    'max_gap': gaps['max'],
    'ratio': mean(jnp.exp(gap_S), some_S),
  }
