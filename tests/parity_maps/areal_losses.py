"""AReaL's actor losses, as ours: decoupled, with rejection, at two levels."""

from __future__ import annotations

import functools
import types

import jax.numpy as jnp
import numpy as np

from agentjax.rl import aggregation, correction, losses, mismatch, surrogates
from agentjax.rl.masked import hide
from parity_maps import CannotMap, Case, Result
from parity_maps.tables import (
  flat,
  graded,
  row_mean_advantages,
  table,
  tokens,
  weigh,
)

DIVERGENCES = {
  'kl_k1': correction.k1,
  'kl_k2': correction.k2,
  # KL(proximal || behaviour), though the behaviour policy sampled.
  'kl_k3': functools.partial(correction.k3_reverse, limit=None),
}
LEVELS = {
  'sum': correction.sequence_sum,
  'mean': correction.sequence_mean,
  'max': correction.sequence_max,
}


def actor(case: Case) -> Result:
  o = case.options(
    eps_clip=0.2, eps_clip_higher=None, c_clip=None, rejection_sampling=None,
    importance_sampling_level='token',
  )  # fmt: skip
  new, proximal, behaviour, advantages, mask = case.take(
    'logprobs', 'proximal_logprobs', 'old_logprobs', 'advantages', 'loss_mask'
  )
  given = tokens(mask, proximal, advantages)
  kept, extra = given.mask, {}
  if o.rejection_sampling:
    rho = correction.log_rho(given.old, flat(behaviour), given.mask)
    kept, weights, share = _rejection(o.rejection_sampling, rho, given)
    given = given._replace(weights=weights)
    extra = {
      'behave_imp_weight': table(weights, new.shape),
      'filtered_fraction': share,
    }
  given = given._replace(mask=kept)
  given, ratio = _level(o.importance_sampling_level, given)
  high = o.eps_clip if o.eps_clip_higher is None else o.eps_clip_higher
  loss = functools.partial(
    losses.ppo_clip, clip_low=o.eps_clip, clip_high=high, dual_clip=o.c_clip,
    log_ratio=ratio,
  )  # fmt: skip
  # The count is that before any rejection: row 15 of B2.
  weighting = weigh(aggregation.token_mean, mask, kept)
  value, gradient, out = graded(lambda x: loss(x, given), new, weighting)
  moved = hide(jnp.exp(ratio(flat(new), given)), given.mask)
  return Result({
    'loss': value,
    'grad_logprobs': gradient,
    'importance_weight': table(moved, new.shape),
    'clip_mask': table(out.clipped_N, new.shape),
    'dual_clip_mask': table(out.dual_N, new.shape),
  } | extra)  # fmt: skip


def _level(level: str, given):
  """Tokens and a ratio; a sequence has one ratio and one advantage: row 20."""
  if level == 'token':
    return given, functools.partial(losses.token_ratio, limit=None)
  if level == 'sequence':
    ratio = functools.partial(losses.mean_ratio, cap=None)
    return row_mean_advantages(given), ratio
  raise CannotMap(f'importance_sampling_level {level!r}')


def _rejection(config: dict, rho, given):
  """What is kept, the weights, and the share that was touched."""
  o = types.SimpleNamespace(
    **{'level': 'token', 'metric': 'ratio', 'action': 'mask', 'agg': 'sum',
       'upper': None, 'lower': None} | config
  )  # fmt: skip
  if o.upper is None or set(config) - {
    'level', 'metric', 'action', 'agg', 'upper', 'lower'
  }:  # fmt: skip
    raise CannotMap(f'rejection_sampling {config}')
  at = rho, given.mask, given.sequences
  kept = _kept(o, *at)
  by_mean = o.metric == 'ratio' and o.level == 'sequence'
  level = correction.sequence_mean if by_mean else correction.token
  raw = correction.importance(*at, level=level, limit=None)
  if o.action == 'mask':
    weights = hide(raw, kept)
    return kept, weights, mismatch.rejected_share(kept, given.mask)
  if o.action != 'clamp':
    raise CannotMap(f'action {o.action!r}')
  weights = correction.truncated(
    *at, level=level, high=o.upper, low=o.lower or 0.0, limit=None
  )
  if o.level == 'sequence':
    weights = jnp.where(kept, raw, weights)
  touched = mismatch.rejected_share(weights == raw, given.mask)
  return given.mask, weights, touched


def _kept(o, rho, mask, sequences):
  if o.level not in ('token', 'sequence'):
    raise CannotMap(f'level {o.level!r}')
  level = correction.token
  if o.level == 'sequence':
    if o.agg not in LEVELS:
      raise CannotMap(f'agg {o.agg!r}')
    level = LEVELS[o.agg]
  if o.metric == 'ratio':
    return correction.keep_ratio(
      rho, mask, sequences, level=level, high=o.upper, low=o.lower or 0.0
    )
  if o.metric not in DIVERGENCES:
    raise CannotMap(f'metric {o.metric!r}')
  return correction.keep_divergence(
    rho, mask, sequences, level=level, divergence=DIVERGENCES[o.metric],
    high=o.upper, low=-np.inf if o.lower is None else o.lower,
  )  # fmt: skip


def sapo(case: Case) -> Result:
  o = case.options(tau_pos=1.0, tau_neg=1.05, importance_sampling_level='token')
  new, old, advantages, mask = case.take(
    'logprobs', 'old_logprobs', 'advantages', 'loss_mask'
  )
  given = tokens(mask, old, advantages)
  given, ratio = _level(o.importance_sampling_level, given)
  loss = functools.partial(
    surrogates.sapo, tau_positive=o.tau_pos, tau_negative=o.tau_neg,
    log_ratio=ratio,
  )  # fmt: skip
  weighting = weigh(aggregation.token_mean, mask)
  value, gradient, _ = graded(lambda x: loss(x, given), new, weighting)
  return Result({'loss': value, 'grad_logprobs': gradient})


def proximal(case: Case) -> Result:
  o = case.options(current_version=None, method=None)
  behaviour, new, versions = case.take('old_logp', 'logprobs', 'versions')
  shape = new.shape
  new, behaviour = flat(new), flat(behaviour)
  part = correction.proximal_share(
    flat(versions.astype(np.int32)), now=o.current_version
  )
  everywhere = jnp.ones(new.shape, bool)
  made = {
    'loglinear': correction.proximal_geometric,
    'linear': correction.proximal_arithmetic,
  }
  out = {k: f(new, behaviour, everywhere, part) for k, f in made.items()}
  out['rollout'] = behaviour
  return Result({k: table(x, shape) for k, x in out.items()})


FUNCTIONS = {
  'ppo_actor_loss_fn@AReaL': actor,
  'sapo_loss_fn@AReaL': sapo,
  'compute_prox_logp_approximations@AReaL': proximal,
}
