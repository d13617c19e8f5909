"""Losses of the policy: pure functions of per-token arrays.

Floor 1, rl/. The seam: a loss is a function

    loss(logprobs_N, tokens, **options) -> PolicyLoss

of the current log-probs and of what is known of the tokens. It returns values
per token and no mean: `rl.aggregation` says how they are weighted, and
`masked.weighted` makes the (sum, count) pair that is reduced over
micro-batches, devices and hosts and divided once. How far the policy has moved
is a function too, passed in as `log_ratio`: per token, or one for each
trajectory or turn. More losses stand in `surrogates` and `regression`.

Letters: N tokens, flat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from agentjax.rl.masked import (
  MAX_LOG_RATIO,
  hide,
  log_ratio,
  segment_mean,
)


class Tokens(NamedTuple):
  """What a loss is told of each token, [N] each; the mask hides the rest.

  Attributes:
    mask: bool, True where the policy sampled the token.
    old: log-probs that the ratio is against, of the proximal policy.
    advantages: A, constants.
    sequences: int32 in [0, N), one for each trajectory.
    turns: int32 in [0, N), one for each turn of each trajectory.
    weights: what the off-policy correction multiplies a token's loss by, or
      None for 1 everywhere.
    behaviour: log-probs of the policy that sampled, where it is not `old`.
    reference: log-probs of a reference policy, for losses that regress on it.
  """

  mask: jax.Array
  old: jax.Array
  advantages: jax.Array
  sequences: jax.Array
  turns: jax.Array
  weights: jax.Array | None = None
  behaviour: jax.Array | None = None
  reference: jax.Array | None = None


class PolicyLoss(NamedTuple):
  """Per-token loss, and bool[N] that are worth a metric each.

  A clip counts where it decides: where the clipped term is the larger one.
  """

  loss_N: jax.Array
  clipped_N: jax.Array  # by the lower bound or by the upper one
  low_N: jax.Array  # by the lower bound
  high_N: jax.Array  # by the upper bound
  dual_N: jax.Array  # by the bound on the ratio itself
  weights_N: jax.Array  # float32, of the off-policy correction; 1 without one


Ratio = Callable[[jax.Array, Tokens], jax.Array]


def policy_loss(
  loss_N: jax.Array,
  tokens: Tokens,
  *,
  low_N: jax.Array | None = None,
  high_N: jax.Array | None = None,
  dual_N: jax.Array | None = None,
) -> PolicyLoss:
  """What every loss returns: masked, and times the correction's weights."""
  weights = tokens.mask.astype(jnp.float32)
  if tokens.weights is not None:
    weights = stop_gradient(hide(tokens.weights, tokens.mask))
    loss_N *= weights
  none = jnp.zeros(loss_N.shape, bool)
  low, high, dual = (
    none if x is None else hide(x, tokens.mask) for x in (low_N, high_N, dual_N)
  )
  return PolicyLoss(
    hide(loss_N, tokens.mask), low | high, low, high, dual, weights
  )


# ---- how far the policy has moved -------------------------------------------


def token_ratio(
  logprobs_N: jax.Array,
  tokens: Tokens,
  *,
  limit: float | None = MAX_LOG_RATIO,
) -> jax.Array:
  """log pi / pi_old of each token, clipped to +-limit."""
  return log_ratio(logprobs_N, tokens.old, tokens.mask, limit)


def trajectory_ratio(
  logprobs_N: jax.Array, tokens: Tokens, *, cap: float = 10.0
) -> jax.Array:
  """log s of the token's trajectory, with the gradient of its own log-prob.

  s = exp(mean over the trajectory of log pi / pi_old), never clipped per
  token, which would change it; only s as a whole is, above `cap`. Source:
  GSPO, arXiv:2507.18071, eq. 7 and the token form of its section 4.3.
  """
  return _shared_ratio(logprobs_N, tokens, tokens.sequences, cap)


def turn_ratio(
  logprobs_N: jax.Array, tokens: Tokens, *, cap: float = 10.0
) -> jax.Array:
  """As `trajectory_ratio`, with means over turns: one s for each turn."""
  return _shared_ratio(logprobs_N, tokens, tokens.turns, cap)


def mean_ratio(
  logprobs_N: jax.Array, tokens: Tokens, *, cap: float | None = 10.0
) -> jax.Array:
  """log s of the token's trajectory, with the gradient of the mean itself.

  The sequence form of GSPO, arXiv:2507.18071, eq. 7. With one advantage for a
  trajectory, in a mean over its tokens, its gradient is the token form's.
  """
  gap = log_ratio(logprobs_N, tokens.old, tokens.mask, None)
  mean = segment_mean(gap, tokens.mask, tokens.sequences)[tokens.sequences]
  mean = hide(mean, tokens.mask)
  return mean if cap is None else jnp.minimum(mean, cap)


def _shared_ratio(logprobs_N, tokens, ids_N, cap) -> jax.Array:
  gap = log_ratio(logprobs_N, tokens.old, tokens.mask, None)
  mean = stop_gradient(segment_mean(gap, tokens.mask, ids_N)[ids_N])
  own = hide(logprobs_N, tokens.mask)
  return jnp.minimum(hide(mean, tokens.mask) + own - stop_gradient(own), cap)


# ---- losses -----------------------------------------------------------------


def ppo_clip(
  logprobs_N: jax.Array,
  tokens: Tokens,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
  delta: float | None = None,
  log_ratio: Ratio = token_ratio,
) -> PolicyLoss:
  """max(-A r, -A clip(r, 1 - low, 1 + high)), r = exp(log_ratio).

  Args:
    clip_low, clip_high: PPO, arXiv:1707.06347, eq. 7; clip_high > clip_low is
      DAPO's clip-higher, arXiv:2503.14476.
    dual_clip: c > 1: where A < 0 the loss is at most -A c. Ye et al.,
      arXiv:1912.09729.
    delta: r in the unclipped term is at most this, for either sign of A: the
      two-sided clip of INTELLECT-2, arXiv:2505.07291.
  """
  if not (clip_low >= 0 and clip_high >= 0):
    raise ValueError(
      f'clip_low is {clip_low}, clip_high {clip_high}: give distances from a '
      'ratio of 1, 0 or more'
    )
  if dual_clip is not None and not dual_clip > 1:
    raise ValueError(f'dual_clip is {dual_clip}: give a number above 1')
  advantages = hide(tokens.advantages, tokens.mask)
  ratio = jnp.exp(log_ratio(logprobs_N, tokens))
  free = ratio if delta is None else jnp.minimum(ratio, delta)
  plain = -advantages * free
  clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  effective = clipped > plain
  loss = jnp.maximum(plain, clipped)
  dual = None
  if dual_clip is not None:
    bound = -advantages * dual_clip
    dual = (advantages < 0) & (loss > bound)
    loss = jnp.where(advantages < 0, jnp.minimum(loss, bound), loss)
  return policy_loss(
    loss,
    tokens,
    low_N=effective & (advantages < 0),
    high_N=effective & (advantages > 0),
    dual_N=dual,
  )


def reinforce(logprobs_N: jax.Array, tokens: Tokens) -> PolicyLoss:
  """-A log pi, times the weights that `tokens` may hold. Williams, 1992.

  Also the loss of GPG, arXiv:2504.02546, whose own part is its advantages.
  The value means nothing; its gradient does.
  """
  advantages = hide(tokens.advantages, tokens.mask)
  return policy_loss(-advantages * hide(logprobs_N, tokens.mask), tokens)


def cispo(
  logprobs_N: jax.Array,
  tokens: Tokens,
  *,
  cap: float = 5.0,
  floor: float = 0.0,
  log_ratio: Ratio = token_ratio,
) -> PolicyLoss:
  """-sg(clip(r, floor, cap)) A log pi: every token keeps a gradient.

  Bounds are those of the ratio itself, where others give their distances from
  1: an upper distance of 0.28 is a cap of 1.28. The value means nothing.
  Source: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5, which has no floor.
  """
  advantages = hide(tokens.advantages, tokens.mask)
  ratio = jnp.exp(log_ratio(logprobs_N, tokens))
  kept = stop_gradient(jnp.clip(ratio, floor, cap))
  return policy_loss(
    -kept * advantages * hide(logprobs_N, tokens.mask),
    tokens,
    low_N=ratio < floor,
    high_N=ratio > cap,
  )


def cross_entropy(logprobs_N: jax.Array, tokens: Tokens) -> PolicyLoss:
  """-log pi: supervised training on a trajectory's MODEL tokens."""
  return policy_loss(-hide(logprobs_N, tokens.mask), tokens)
