"""More losses of the policy, of the seam that `losses` describes.

Floor 1, rl/. Each is one formula of one paper, in the order of their years.

Letters: N tokens, flat.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from agentjax.rl import losses
from agentjax.rl.losses import PolicyLoss, Ratio, Tokens, policy_loss
from agentjax.rl.masked import (
  hide,
  log_ratio,
  mean,
  segment_mean,
  segment_sum,
)

_LEAST = math.log(1e-8)  # of a trajectory's log-weight, in VESPO


def gspo(
  logprobs_N: jax.Array,
  tokens: Tokens,
  *,
  clip_low: float = 3e-4,
  clip_high: float = 4e-4,
  dual_clip: float | None = None,
  delta: float | None = None,
  log_ratio: Ratio = losses.trajectory_ratio,
) -> PolicyLoss:
  """PPO's clip of one ratio for each trajectory, or for each turn.

  To be aggregated by means over sequences of means over tokens: a mean over
  all tokens would weigh a trajectory by its length. Bounds are the authors'.

  Args:
    log_ratio: `losses.trajectory_ratio`, `losses.turn_ratio`, or
      `losses.mean_ratio` for the sequence form. Source: arXiv:2507.18071.
  """
  return losses.ppo_clip(
    logprobs_N,
    tokens,
    clip_low=clip_low,
    clip_high=clip_high,
    dual_clip=dual_clip,
    delta=delta,
    log_ratio=log_ratio,
  )


def gmpo(
  logprobs_N: jax.Array,
  tokens: Tokens,
  *,
  clip_low: float = 0.4,
  clip_high: float = 0.4,
) -> PolicyLoss:
  """-A exp(mean over the trajectory of clipped log-ratios).

  The clip is on the pessimistic side alone, as PPO's. A is the trajectory's
  mean, and every token carries its trajectory's loss: aggregate by means over
  sequences of means over tokens. Weights enter as their geometric mean.
  Source: GMPO, arXiv:2507.20673.
  """
  mask, ids = tokens.mask, tokens.sequences
  sign = jnp.sign(hide(tokens.advantages, mask))
  gap = log_ratio(logprobs_N, tokens.old, mask, None)
  clipped = jnp.clip(gap, -clip_low, clip_high)
  least = sign * jnp.minimum(sign * gap, sign * clipped)
  mean_log = segment_mean(least, mask, ids)
  ratio = jnp.exp(jnp.minimum(mean_log, losses.MAX_LOG_RATIO))
  loss = -segment_mean(tokens.advantages, mask, ids) * ratio
  if tokens.weights is not None:
    logs = jnp.log(jnp.where(mask, tokens.weights, 1.0))
    loss *= stop_gradient(jnp.exp(segment_mean(logs, mask, ids)))
  out = gap != clipped
  return policy_loss(
    loss[ids],
    tokens._replace(weights=None),
    low_N=out & (sign < 0),
    high_N=out & (sign > 0),
  )


def sapo(
  logprobs_N: jax.Array,
  tokens: Tokens,
  *,
  tau_positive: float = 1.0,
  tau_negative: float = 1.05,
  log_ratio: Ratio = losses.token_ratio,
) -> PolicyLoss:
  """-A 4 sigmoid(tau (r - 1)) / tau: a soft gate in the place of a clip.

  tau is `tau_positive` where A > 0, else `tau_negative`.
  Source: SAPO, arXiv:2511.20347.
  """
  if min(tau_positive, tau_negative) <= 0:
    raise ValueError(
      f'tau_positive {tau_positive}, tau_negative {tau_negative}: give numbers '
      'above 0'
    )
  advantages = hide(tokens.advantages, tokens.mask)
  ratio = jnp.exp(log_ratio(logprobs_N, tokens))
  tau = jnp.where(advantages > 0, tau_positive, tau_negative)
  gate = jax.nn.sigmoid(tau * (ratio - 1)) * 4 / tau
  return policy_loss(-gate * advantages, tokens)


# ---- trust regions of probabilities -----------------------------------------


def dppo_tv(
  logprobs_N: jax.Array,
  tokens: Tokens,
  *,
  low: float = 0.15,
  high: float = 0.15,
  cap: float = 20.0,
) -> PolicyLoss:
  """-A sg(min(r, cap)) log pi, without tokens that moved on too far.

  Too far is pi - pi_old > high where A > 0, and < -low elsewhere: a bound on
  the total variation of "this token or another". Source: DPPO,
  arXiv:2602.04879, Binary-TV.
  """
  moved = jnp.exp(hide(logprobs_N, tokens.mask)) - jnp.exp(
    hide(tokens.old, tokens.mask)
  )
  keep = jnp.where(tokens.advantages > 0, moved <= high, moved >= -low)
  return _trusted(logprobs_N, tokens, keep, cap)


def dppo_kl(
  logprobs_N: jax.Array,
  tokens: Tokens,
  *,
  low: float = 0.05,
  high: float = 0.05,
  cap: float = 20.0,
) -> PolicyLoss:
  """As `dppo_tv`, with the divergence of pi_old to pi for the distance.

  KL of "this token or another"; a token that moves back is never too far.
  Source: DPPO, arXiv:2602.04879, Binary-KL.
  """
  new, old = (hide(x, tokens.mask) for x in (logprobs_N, tokens.old))
  p, q = jnp.exp(new), jnp.exp(old)
  # Float32 has no room between 1 and a probability just below it.
  rest = [jnp.maximum(1 - x, 0.0) + 1e-8 for x in (q, p)]
  divergence = q * (old - new) + (1 - q) * jnp.log(rest[0] / rest[1])
  keep = jnp.where(
    tokens.advantages > 0,
    (divergence <= high) | (p <= q),
    (divergence <= low) | (p >= q),
  )
  return _trusted(logprobs_N, tokens, keep, cap)


def _trusted(logprobs_N, tokens, keep_N, cap) -> PolicyLoss:
  advantages = hide(tokens.advantages, tokens.mask)
  ratio = jnp.exp(losses.token_ratio(logprobs_N, tokens))
  weight = stop_gradient(jnp.minimum(ratio, cap) * keep_N)
  return policy_loss(
    -advantages * weight * hide(logprobs_N, tokens.mask),
    tokens,
    low_N=~keep_N & (advantages <= 0),
    high_N=~keep_N & (advantages > 0),
    dual_N=keep_N & (ratio > cap),
  )


# ---- covariance of log-prob and advantage -----------------------------------


def clip_cov(
  logprobs_N: jax.Array,
  tokens: Tokens,
  *,
  share: float = 2e-4,
  low: float = 1.0,
  high: float = 5.0,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  seed: int = 0,
) -> PolicyLoss:
  """PPO's clip, without a share of the tokens that cost most entropy.

  Of the tokens that PPO does not clip and whose (A - mean A)(log pi - mean log
  pi) lies between `low` and `high`, `share` of all tokens (at least one) lose
  their loss. Which ones hangs on `seed` and on their own log-probs, so that no
  place in a batch matters. Means and the share are those of the tokens given:
  of a micro-batch, unlike all else here. `clipped_N` is what was dropped.
  Source: "The Entropy Mechanism", arXiv:2505.22617, Clip-Cov.
  """
  out = losses.ppo_clip(
    logprobs_N,
    tokens._replace(weights=None),
    clip_low=clip_low,
    clip_high=clip_high,
    log_ratio=functools.partial(losses.token_ratio, limit=None),
  )
  covariance = _covariance(logprobs_N, tokens)
  inside = (covariance > low) & (covariance < high)
  bits = jax.lax.bitcast_convert_type(
    stop_gradient(hide(logprobs_N, tokens.mask)).astype(jnp.float32), jnp.uint32
  )
  key = jax.random.key(seed)
  noise = jax.vmap(lambda b: jax.random.uniform(jax.random.fold_in(key, b)))
  n = jnp.maximum(jnp.floor(share * jnp.sum(tokens.mask)), 1.0)
  drop = _first(noise(bits), inside & tokens.mask & ~out.clipped_N, n)
  advantages = hide(tokens.advantages, tokens.mask)
  return policy_loss(
    jnp.where(drop, 0.0, out.loss_N),
    tokens,
    low_N=drop & (advantages <= 0),
    high_N=drop & (advantages > 0),
  )


def kl_cov(
  logprobs_N: jax.Array,
  tokens: Tokens,
  *,
  share: float = 2e-4,
  coef: float = 1.0,
) -> PolicyLoss:
  """-A r, and coef |log r| more for the tokens that cost most entropy.

  They are the `share` of all tokens (at least one) with the largest covariance
  (see `clip_cov`). Source: arXiv:2505.22617, KL-Cov.
  """
  gap = losses.token_ratio(logprobs_N, tokens, limit=None)
  n = jnp.maximum(jnp.floor(share * jnp.sum(tokens.mask)), 1.0)
  most = _first(-_covariance(logprobs_N, tokens), tokens.mask, n)
  loss = -hide(tokens.advantages, tokens.mask) * jnp.exp(gap)
  return policy_loss(loss + jnp.where(most, coef * jnp.abs(gap), 0.0), tokens)


def _covariance(logprobs_N, tokens) -> jax.Array:
  """(A - mean A)(log pi - mean log pi), constants."""
  mask = tokens.mask
  own = stop_gradient(hide(logprobs_N, mask))
  advantages = hide(tokens.advantages, mask)
  return (advantages - mean(advantages, mask)) * (own - mean(own, mask))


def _first(x_N, among_N, n) -> jax.Array:
  """bool[N]: the n smallest of those that stand in `among_N`."""
  order = jnp.argsort(jnp.where(among_N, x_N, jnp.inf))
  place = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]))
  return among_N & (place < n)


# ---- whole trajectories -----------------------------------------------------


def vespo(
  logprobs_N: jax.Array,
  tokens: Tokens,
  *,
  k_positive: float = 2.0,
  lambda_positive: float = 3.0,
  k_negative: float = 3.0,
  lambda_negative: float = 2.0,
  constant: bool = True,
) -> PolicyLoss:
  """-sg(phi(w)) A log pi, phi(w) = w^k e^(lambda (1 - w)).

  w is the product of a trajectory's ratios, and of its weights if `tokens` has
  any; k and lambda hang on the sign of A. phi is 1 at w = 1 and falls to 0 on
  both sides.

  Args:
    constant: False lets the gradient flow through phi too, as one public
      version does; the paper's phi only weighs it.

  Source: VESPO, arXiv:2602.10693.
  """
  mask, ids = tokens.mask, tokens.sequences
  logs = losses.token_ratio(logprobs_N, tokens)
  if tokens.weights is not None:
    given = jnp.where(mask, tokens.weights, 1.0)
    logs += jnp.clip(jnp.log(given), _LEAST, losses.MAX_LOG_RATIO)
  log_w = segment_sum(logs, mask, ids)[ids]
  log_w = jnp.clip(log_w, _LEAST, losses.MAX_LOG_RATIO)
  advantages = hide(tokens.advantages, mask)
  k = jnp.where(advantages >= 0, k_positive, k_negative)
  rate = jnp.where(advantages >= 0, lambda_positive, lambda_negative)
  phi = jnp.exp(k * log_w + rate * (1 - jnp.exp(log_w)))
  phi = stop_gradient(phi) if constant else phi
  return policy_loss(
    -phi * advantages * hide(logprobs_N, mask), tokens._replace(weights=None)
  )
