"""Policy losses of OpenRLHF and slime, as ours."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.rl import aggregation, correction, losses
from parity_maps import CannotMap, Case, Result
from parity_maps.tables import flat, graded, moved, share, table, tokens, weigh


def openrlhf(case: Case) -> Result:
  o = case.options(
    clip_eps_low=0.2, clip_eps_high=0.2, dual_clip=None, token_level_loss=True,
    policy_loss_type='ppo', enable_vllm_is_correction=False,
    vllm_is_truncated_threshold=None, vllm_is_correction_type='tis',
  )  # fmt: skip
  new, old, advantages, mask, rollout = case.take(
    'log_probs', 'old_log_probs', 'advantages', 'action_mask',
    'rollout_log_probs',
  )  # fmt: skip
  given = tokens(mask, old, advantages)
  if o.policy_loss_type == 'ppo':
    ratio = losses.token_ratio
    if o.enable_vllm_is_correction:
      rho = correction.log_rho(given.old, flat(rollout), given.mask)
      given = given._replace(weights=_weights(o, rho, given))
  elif o.policy_loss_type == 'gspo':
    ratio = functools.partial(losses.mean_ratio, cap=None)  # row 21 of B2
  else:
    raise CannotMap(f'policy_loss_type {o.policy_loss_type!r}')
  by_sequence = not o.token_level_loss or o.policy_loss_type == 'gspo'
  # Its sequence form takes the sampler's policy for the old one.
  against = given
  if o.policy_loss_type == 'gspo' and o.enable_vllm_is_correction:
    against = given._replace(old=flat(rollout))
  loss = functools.partial(
    losses.ppo_clip, clip_low=o.clip_eps_low, clip_high=o.clip_eps_high,
    dual_clip=o.dual_clip, log_ratio=ratio,
  )  # fmt: skip
  aggregate = (
    aggregation.sequence_mean_token_mean
    if by_sequence
    else aggregation.token_mean
  )
  weighting = weigh(aggregate, mask)
  value, gradient, out = graded(lambda x: loss(x, against), new, weighting)
  outputs = {
    'loss': value,
    'grad_log_probs': gradient,
    'clip_ratio': share(out.clipped_N, given),
    'ppo_kl': moved(new, given, None),
  }
  if rollout is not None:
    outputs['vllm_kl'] = moved(old, tokens(mask, rollout, advantages), None)
  return Result(outputs)


def _weights(o, rho, given):
  if not o.vllm_is_truncated_threshold:
    raise CannotMap('a correction without its thresholds')
  low, high = o.vllm_is_truncated_threshold
  at = rho, given.mask, given.sequences
  if o.vllm_is_correction_type == 'tis':
    return correction.truncated(*at, low=low, high=high, limit=None)
  if o.vllm_is_correction_type == 'icepop':
    return correction.icepop(*at, low=low, high=high, limit=None)
  if o.vllm_is_correction_type == 'seq-mask-tis':
    kept = correction.keep_ratio(
      *at, level=correction.sequence_mean, low=low, high=high
    )
    return jnp.where(kept, correction.importance(*at, limit=None), 0.0)
  raise CannotMap(f'vllm_is_correction_type {o.vllm_is_correction_type!r}')


def _slime(case: Case, loss) -> Result:
  """Per-token losses of a table without a mask; the gradient of their sum."""
  old, new, advantages = case.take('old_log_probs', 'log_probs', 'advantages')
  given = tokens(np.ones(new.shape), old, advantages)
  out = loss(flat(new), given)
  gradient = jax.grad(lambda x: loss(x, given).loss_N.sum())(flat(new))
  return Result(
    {
      'pg_losses': table(out.loss_N, new.shape),
      'clipfrac': table(out.clipped_N, new.shape).astype(np.float32),
      'grad': table(gradient, new.shape),
    }
  )


_UNCLIPPED = functools.partial(losses.token_ratio, limit=None)


def slime(case: Case) -> Result:
  o = case.options(eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=None)
  return _slime(case, functools.partial(
    losses.ppo_clip, clip_low=o.eps_clip, clip_high=o.eps_clip_high,
    dual_clip=o.eps_clip_c, log_ratio=_UNCLIPPED,
  ))  # fmt: skip


def slime_cispo(case: Case) -> Result:
  o = case.options(eps_clip=1.0, eps_clip_high=0.2)
  return _slime(case, functools.partial(
    losses.cispo, floor=1 - o.eps_clip, cap=1 + o.eps_clip_high,
    log_ratio=_UNCLIPPED,
  ))  # fmt: skip


FUNCTIONS = {
  'PolicyLoss@OpenRLHF': openrlhf,
  'compute_policy_loss@slime': slime,
  'compute_cispo_loss@slime': slime_cispo,
}
