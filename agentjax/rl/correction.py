"""Off-policy correction: weights and rejections of tokens that are not ours.

Floor 1, rl/. Three policies: mu, which sampled (`behaviour`), the proximal
one, which the update starts from (`old`), and pi. rho = old / mu says how far
the data is off; it is known before the update, so it is a constant, and its
logarithm is never clipped before something is made of it. Every function is
of (log_rho_N, mask_N, sequences_N): a weight goes into `Tokens.weights`, a
bool of what is kept to `aggregation.over_original` or `over_effective` (or,
times the weights, counts as the original).

A level says what stands for a token: itself, or its whole trajectory. The
product over a trajectory is its importance weight, and explodes with its
length; the mean of the logarithms (the geometric mean) is for filters alone.

Letters: N tokens, flat; S sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from agentjax.rl.losses import PolicyLoss, Tokens, reinforce
from agentjax.rl.masked import (
  MAX_LOG_RATIO,
  divide,
  hide,
  log_ratio,
  segment_count,
  segment_max,
  segment_mean,
  segment_sum,
)

Level = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def log_rho(old_N, behaviour_N, mask_N) -> jax.Array:
  """log pi_old / mu where the mask holds, a constant, not clipped; else 0."""
  return stop_gradient(log_ratio(old_N, behaviour_N, mask_N, None))


# ---- levels -----------------------------------------------------------------


def token(x_N, mask_N, sequences_N) -> jax.Array:
  """Each token for itself."""
  del sequences_N
  return hide(x_N, mask_N)


def sequence_sum(x_N, mask_N, sequences_N) -> jax.Array:
  """The sum over its trajectory: of log rho, the log of the product."""
  return hide(segment_sum(x_N, mask_N, sequences_N)[sequences_N], mask_N)


def sequence_mean(x_N, mask_N, sequences_N) -> jax.Array:
  """The mean over its trajectory: of log rho, the log of a geometric mean."""
  return hide(segment_mean(x_N, mask_N, sequences_N)[sequences_N], mask_N)


def sequence_max(x_N, mask_N, sequences_N) -> jax.Array:
  """The maximum over its trajectory."""
  return hide(segment_max(x_N, mask_N, sequences_N)[sequences_N], mask_N)


def sequence_min(x_N, mask_N, sequences_N) -> jax.Array:
  """The minimum over its trajectory."""
  return -sequence_max(-x_N, mask_N, sequences_N)


# ---- weights ----------------------------------------------------------------


def importance(
  log_rho_N, mask_N, sequences_N, *, level: Level = token,
  limit: float | None = MAX_LOG_RATIO,
) -> jax.Array:  # fmt: skip
  """rho at a level, its logarithm clipped to +-limit; 0 under the mask."""
  logs = stop_gradient(level(log_rho_N, mask_N, sequences_N))
  if limit is not None:
    logs = jnp.clip(logs, -limit, limit)
  return hide(jnp.exp(logs), mask_N)


def truncated(
  log_rho_N, mask_N, sequences_N, *, level: Level = token, high: float = 2.0,
  low: float = 0.0, limit: float | None = MAX_LOG_RATIO,
) -> jax.Array:  # fmt: skip
  """min(rho, high), and at least `low`: truncated importance sampling.

  Source: Ionides, 2008; for language models Yao et al., 2025, "Your Efficient
  RL Framework Secretly Brings You Off-Policy RL Training".
  """
  _check_bounds('truncated', max(low, 0.0), high)
  rho = importance(log_rho_N, mask_N, sequences_N, level=level, limit=limit)
  return hide(jnp.clip(rho, low, high), mask_N)


def icepop(
  log_rho_N, mask_N, sequences_N, *, level: Level = token, low: float = 0.5,
  high: float = 5.0, limit: float | None = MAX_LOG_RATIO,
) -> jax.Array:  # fmt: skip
  """rho where low <= rho <= high, else 0. IcePop, of Ring-1T, 2510.18855."""
  _check_bounds('icepop', low, high)
  rho = importance(log_rho_N, mask_N, sequences_N, level=level, limit=limit)
  return hide(rho, (rho >= low) & (rho <= high))


def _check_bounds(name: str, low: float, high: float) -> None:
  """Bounds of a ratio, which no token could keep otherwise."""
  if not 0 <= low <= high or not high > 0:
    raise ValueError(
      f'{name} with low {low} and high {high}: give bounds of a ratio, 0 <= '
      'low <= high and high above 0'
    )


def mean_weight(weights_N, mask_N) -> jax.Array:
  """The mean over tokens."""
  return divide(
    jnp.sum(hide(weights_N, mask_N)), jnp.sum(mask_N, dtype=jnp.float32)
  )


def mean_sequence_weight(weights_N, mask_N, sequences_N) -> jax.Array:
  """The mean over trajectories of their means over tokens."""
  some_S = segment_count(mask_N, sequences_N) > 0
  means_S = segment_mean(weights_N, mask_N, sequences_N)
  return divide(jnp.sum(means_S), jnp.sum(some_S, dtype=jnp.float32))


def normalized(weights_N, mean) -> jax.Array:
  """Weights over their mean, of the whole batch; as they are if it is 0."""
  mean = stop_gradient(mean)
  return jnp.where(mean > 0, divide(weights_N, mean), weights_N)


# ---- rejections: bool[N] of what is kept ------------------------------------


def keep_ratio(
  log_rho_N, mask_N, sequences_N, *, low: float, high: float,
  level: Level = token,
) -> jax.Array:  # fmt: skip
  """low <= rho <= high at a level: bounds of rho = old / mu itself."""
  _check_bounds('keep_ratio', low, high)
  logs = stop_gradient(level(log_rho_N, mask_N, sequences_N))
  low, high = (jnp.log(jnp.float32(x)) for x in (low, high))
  return mask_N & (logs >= low) & (logs <= high)


def keep_divergence(
  log_rho_N, mask_N, sequences_N, *, divergence: Callable, high: float,
  low: float = -jnp.inf, level: Level = token,
) -> jax.Array:  # fmt: skip
  """low <= a divergence of log rho <= high at a level.

  Args:
    divergence: `k1`, `k2`, `k3` or `k3_reverse`, of log rho.
  """
  if not low <= high:
    raise ValueError(
      f'keep_divergence with low {low} and high {high}: give low <= high'
    )
  x_N = divergence(hide(log_rho_N, mask_N))
  x_N = stop_gradient(level(x_N, mask_N, sequences_N))
  return mask_N & (x_N >= low) & (x_N <= high)


def k1(log_rho_N) -> jax.Array:
  """log rho."""
  return log_rho_N


def k2(log_rho_N) -> jax.Array:
  """(log rho)^2 / 2."""
  return jnp.square(log_rho_N) / 2


def k3(log_rho_N, *, limit: float | None = MAX_LOG_RATIO) -> jax.Array:
  """rho - 1 - log rho: of KL(mu || old), as tokens that mu sampled ask for."""
  logs = log_rho_N if limit is None else jnp.clip(log_rho_N, -limit, limit)
  return jnp.exp(logs) - 1 - logs


def k3_reverse(log_rho_N, *, limit: float | None = MAX_LOG_RATIO) -> jax.Array:
  """1 / rho - 1 + log rho: of KL(old || mu), if old had sampled the tokens."""
  return k3(-log_rho_N, limit=limit)


def keep_opsm(
  logprobs_N, behaviour_N, advantages_N, mask_N, sequences_N, *, delta: float
) -> jax.Array:
  """All but trajectories of A < 0 whose mean log mu / pi exceeds `delta`.

  Off-policy sequence masking. Source: DeepSeek-V3.2, arXiv:2512.02556.
  """
  gap = stop_gradient(log_ratio(behaviour_N, logprobs_N, mask_N, None))
  far = sequence_mean(gap, mask_N, sequences_N) > delta
  return mask_N & ~(far & (advantages_N < 0))


def keep_second_moment(
  log_rho_N, mask_N, sequences_N=None, *, high: float = 0.04
) -> jax.Array:
  """As many tokens as have a mean (log rho)^2 of at most `high`.

  The largest go first. Of the whole batch: of a part it keeps another set.
  Source: M2PO, arXiv:2510.01161.
  """
  del sequences_N
  size = jnp.where(mask_N, jnp.square(hide(log_rho_N, mask_N)), jnp.inf)
  order = jnp.argsort(size)
  place = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]))
  upto = jnp.cumsum(size[order]) / jnp.arange(1, order.shape[0] + 1)
  return mask_N & (place < jnp.sum(upto <= high))


def keep_fresh(
  versions_N, mask_N, sequences_N, *, now: int, bound: int,
  level: Level = token,
) -> jax.Array:  # fmt: skip
  """What was sampled at most `bound` versions of the policy ago.

  Args:
    versions_N: int, of the policy that sampled each token. now: of pi.
    level: `token`; `sequence_max` drops a trajectory for its oldest token,
      `sequence_min` keeps it for its newest.
  """
  if not bound >= 0:
    raise ValueError(f'keep_fresh with bound {bound}: give 0 or more versions')
  age = (now - versions_N).astype(jnp.float32)
  return mask_N & (level(age, mask_N, sequences_N) <= bound)


# ---- the proximal policy without its forward pass ---------------------------


def proximal_share(versions_N, *, now: int) -> jax.Array:
  """How much of the way from mu to pi the proximal policy has gone: [0, 1].

  (v_prox - v_mu) / (v_pi - v_mu), v_prox = now - 1; 0 where nothing sampled
  (version < 0). Source: AReaL, https://github.com/areal-project/AReaL/pull/600.
  """
  age = (now - versions_N).astype(jnp.float32)
  share = jnp.clip(divide(age - 1, age), 0.0, 1.0)
  return hide(share, versions_N >= 0)


def proximal_geometric(logprobs_N, behaviour_N, mask_N, share_N) -> jax.Array:
  """log mu + share (log pi - log mu), a constant."""
  gap = stop_gradient(log_ratio(logprobs_N, behaviour_N, mask_N, None))
  return hide(behaviour_N, mask_N) + share_N * gap


def proximal_arithmetic(logprobs_N, behaviour_N, mask_N, share_N) -> jax.Array:
  """log((1 - share) mu + share pi), a constant."""
  new = stop_gradient(hide(logprobs_N, mask_N))
  mixed = jnp.logaddexp(
    hide(behaviour_N, mask_N) + jnp.log1p(-share_N), new + jnp.log(share_N)
  )
  return hide(stop_gradient(mixed), mask_N)


# ---- in a loss --------------------------------------------------------------


def decoupled(
  logprobs_N: jax.Array, tokens: Tokens, *, loss: Callable, weigh: Callable
) -> PolicyLoss:
  """A loss whose ratio is pi / old, times weights of old / mu.

  Needs `tokens.behaviour`, mu's log-probs. Where they are `old`, rho is 1.

  Args:
    loss: of the seam, such as `losses.ppo_clip`.
    weigh: (log_rho_N, mask_N, sequences_N) -> weights_N, such as `truncated`.

  Source: Hilton et al., arXiv:2110.00641; AReaL, arXiv:2505.24298.
  """
  if tokens.behaviour is None:
    raise ValueError('a decoupled loss needs the log-probs of who sampled')
  rho = log_rho(tokens.old, tokens.behaviour, tokens.mask)
  weights = weigh(rho, tokens.mask, tokens.sequences)
  return loss(logprobs_N, tokens._replace(weights=weights))


def reweighted(
  logprobs_N: jax.Array,
  tokens: Tokens,
  *,
  loss: Callable = reinforce,
  weigh: Callable = truncated,
) -> PolicyLoss:
  """A loss without a ratio, times constant weights of pi / old.

  For REINFORCE where `old` is who sampled. A loss that has the ratio already
  would have it twice.
  """
  rho = log_rho(logprobs_N, tokens.old, tokens.mask)
  weights = weigh(rho, tokens.mask, tokens.sequences)
  return loss(logprobs_N, tokens._replace(weights=weights))
