"""Losses of the policy that regress its log-ratio on the advantage.

Floor 1, rl/. Of the seam that `losses` describes. The optimum of a reward with
a KL penalty is pi ~ pi_ref exp(A / beta), so beta log pi / pi_ref is pulled
towards A, without importance sampling: any data will do.

Letters: N tokens, flat; S turns.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from agentjax.rl.losses import PolicyLoss, Tokens, policy_loss
from agentjax.rl.masked import (
  divide,
  hide,
  log_ratio,
  segment_count,
  segment_mean,
  segment_sum,
)


def dro(
  logprobs_N: jax.Array, tokens: Tokens, *, beta: float = 0.1
) -> PolicyLoss:
  """-A log pi + beta / 2 (log pi / pi_old)^2, per token.

  Its gradient is that of (A - beta log-ratio)^2 / 2 beta. The value means
  nothing. Source: DRO, arXiv:2405.19107, eq. 3, with A for r - V.
  """
  gap = log_ratio(logprobs_N, tokens.old, tokens.mask, None)
  advantages = hide(tokens.advantages, tokens.mask)
  own = hide(logprobs_N, tokens.mask)
  return policy_loss(-advantages * own + beta / 2 * jnp.square(gap), tokens)


def webrl(
  logprobs_N: jax.Array,
  tokens: Tokens,
  *,
  beta: float = 1.0,
  total: Callable = segment_sum,
) -> PolicyLoss:
  """(beta log pi / pi_ref - A)^2 of each turn; needs `tokens.reference`.

  The log-ratio of a turn is the sum over its tokens, A their mean. Every
  token carries its turn's loss: aggregate by means over turns.

  Args:
    total: `masked.segment_mean` divides the sum by the turn's length.

  Source: WebRL, arXiv:2411.02337.
  """
  mask, ids = tokens.mask, tokens.turns
  gap = log_ratio(logprobs_N, _reference(tokens), mask, None)
  log_ratios_S = total(gap, mask, ids)
  advantages_S = segment_mean(tokens.advantages, mask, ids)
  loss_S = jnp.square(beta * log_ratios_S - advantages_S)
  return policy_loss(loss_S[ids], tokens)


def webrl_released(
  logprobs_N: jax.Array, tokens: Tokens, *, supervise: bool = False
) -> PolicyLoss:
  """What WebRL's released trainer computes, which is not `webrl`.

  Turns of A < 0 are left out, all others have A = 1. With x the sum of a
  turn's log-ratios over the number of all tokens that are left, its loss is
  smooth_l1(b x - 1) / b, b = min(b0, 1 / |x|), where b0 is 5 for a turn of
  which the reference was sure (0.8 a token) and else 1. Aggregate by means
  over turns, those of A < 0 too; the number of tokens is that of the tokens
  given: of a micro-batch. Read in THUDM/WebRL@fa8439ef, `actor_loss`; its
  advantages are clip(V' - V - 0.05 + r + return, -1, 1).

  Args:
    supervise: adds -log pi e^(1 - p) of these turns, p the policy's mean
      probability of a token; a sum over the batch over that same number.
  """
  mask, ids = tokens.mask, tokens.turns
  reference_N = _reference(tokens)
  length_S = segment_count(mask, ids)
  advantages_S = segment_mean(tokens.advantages, mask, ids)
  kept_S = (length_S > 0) & (advantages_S >= 0)
  count = jnp.maximum(jnp.sum(hide(length_S, kept_S)), 1.0)
  gap = log_ratio(logprobs_N, reference_N, mask, None)
  x_S = segment_sum(gap, mask, ids) / count
  sure_S = jnp.exp(segment_mean(reference_N, mask, ids)) >= 0.8
  size_S = jnp.abs(stop_gradient(x_S))
  most_S = 1 / jnp.where(size_S > 0, size_S, jnp.finfo(jnp.float32).tiny)
  b_S = jnp.minimum(jnp.where(sure_S, 5.0, 1.0), most_S)
  error_S = jnp.abs(b_S * x_S - 1)
  smooth_S = jnp.where(error_S < 1, jnp.square(error_S) / 2, error_S - 0.5)
  loss_S = smooth_S / b_S
  if supervise:
    own_S = segment_sum(logprobs_N, mask, ids)
    sure = jnp.exp(stop_gradient(divide(own_S, length_S)))
    turns = jnp.sum(length_S > 0)
    loss_S -= own_S * jnp.exp(1 - sure) / count * turns
  return policy_loss(hide(loss_S, kept_S)[ids], tokens)


def _reference(tokens: Tokens) -> jax.Array:
  if tokens.reference is None:
    raise ValueError('this loss regresses on a reference policy: give one')
  return tokens.reference
