"""verl's policy losses, as ours.

Its `config` holds the bounds, and under `global_batch_info` the counts of the
whole batch. Every loss takes the correction's weights as one more input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from agentjax.rl import aggregation, losses, masked, regression, surrogates
from agentjax.rl.losses import MAX_LOG_RATIO, PolicyLoss, Tokens
from parity_maps import CannotMap, Case, Result
from parity_maps.aggregation import verl
from parity_maps.tables import flat, graded, moved, share, tokens, weigh

MEAN = 'seq-mean-token-mean'
NAMES = (
  'old_log_prob', 'log_prob', 'advantages', 'response_mask',
  'rollout_is_weights',
)  # fmt: skip


class Config:
  """The `config` of a case; what no reader asked for is refused."""

  def __init__(self, case: Case):
    self.mode = case.options(loss_agg_mode='token-mean', config={})
    self._left = dict(self.mode.config)

  def __call__(self, name: str, default: Any = None) -> Any:
    value = self._left.pop(name, None)
    return default if value is None else value

  def bounds(self, default: float = 0.2) -> tuple[float, float]:
    both = self('clip_ratio', default)
    return self('clip_ratio_low', both), self('clip_ratio_high', both)

  def weighting(self, mask, mode: str | None = None):
    info = self('global_batch_info', {})
    return verl(mode or self.mode.loss_agg_mode, mask, **info)

  def done(self) -> None:
    if self._left:
      raise CannotMap(f'config {sorted(self._left)}')


def _result(
  case: Case,
  loss: Callable[[Any, Tokens], PolicyLoss],
  weighting: aggregation.Weighting,
  *,
  limit: float | None = MAX_LOG_RATIO,
  lower: str = 'dual_N',
  upper: str = 'clipped_N',
) -> Result:
  """Loss, gradient and verl's metrics; extra outputs do no harm."""
  old, new, advantages, mask, weights = case.take(*NAMES)
  given = tokens(mask, old, advantages, weights=weights)
  value, gradient, out = graded(lambda x_N: loss(x_N, given), new, weighting)
  return Result(
    {
      'loss': value,
      'grad_log_prob': gradient,
      'metric_pg_clipfrac': share(getattr(out, upper), given),
      'metric_pg_clipfrac_lower': share(getattr(out, lower), given),
      'metric_ppo_kl': moved(new, given, limit),
    }
  )


def vanilla(case: Case) -> Result:
  config = Config(case)
  low, high = config.bounds()
  loss = functools.partial(
    losses.ppo_clip, clip_low=low, clip_high=high,
    dual_clip=config('clip_ratio_c', 3.0),
  )  # fmt: skip
  weighting = config.weighting(case.inputs['response_mask'])
  config.done()
  return _result(case, loss, weighting)


def gspo(case: Case) -> Result:
  config = Config(case)
  low, high = config.bounds()
  loss = functools.partial(surrogates.gspo, clip_low=low, clip_high=high)
  weighting = config.weighting(case.inputs['response_mask'], MEAN)
  config.done()
  return _result(case, loss, weighting, limit=None)


def cispo(case: Case) -> Result:
  config = Config(case)
  low, high = config.bounds()  # distances from 1: row 9 of B2
  loss = functools.partial(losses.cispo, floor=1 - low, cap=1 + high)
  weighting = config.weighting(case.inputs['response_mask'])
  config.done()
  return _result(case, loss, weighting)


def sapo(case: Case) -> Result:
  config = Config(case)
  loss = functools.partial(
    surrogates.sapo,
    tau_positive=config('tau_pos', 1.0),
    tau_negative=config('tau_neg', 1.05),
  )
  weighting = config.weighting(case.inputs['response_mask'], MEAN)
  config.done()
  return _result(case, loss, weighting)


def dppo(case: Case, loss: Callable, default: float) -> Result:
  config = Config(case)
  low, high = config.bounds(default)
  loss = functools.partial(
    loss, low=low, high=high, cap=config('clip_ratio_c', 20.0)
  )
  weighting = config.weighting(case.inputs['response_mask'])
  config.done()
  return _result(case, loss, weighting)


def geo_mean(case: Case) -> Result:
  config = Config(case)
  low, high = config.bounds()
  loss = functools.partial(surrogates.gmpo, clip_low=low, clip_high=high)
  mask = case.inputs['response_mask']
  config('global_batch_info')  # it takes the mean over all rows: row 11
  config.done()
  weighting = weigh(
    aggregation.sequence_mean_token_mean, mask, count=mask.shape[0]
  )
  return _result(
    case, loss, weighting, limit=None, lower='low_N', upper='high_N'
  )


def gpg(case: Case) -> Result:
  config = Config(case)
  weighting = config.weighting(case.inputs['response_mask'])
  config.done()
  return _result(case, losses.reinforce, weighting)


def dro(case: Case) -> Result:
  config = Config(case)
  loss = functools.partial(
    regression.dro, beta=config('dro_beta', config('pl.dro_beta', 0.1))
  )
  weighting = config.weighting(case.inputs['response_mask'])
  config.done()
  return _result(case, loss, weighting, limit=None)


def clip_cov(case: Case) -> Result:
  config = Config(case)
  low, high = config.bounds()
  loss = functools.partial(
    surrogates.clip_cov, clip_low=low, clip_high=high,
    share=config('pl.clip_cov_ratio', 2e-4),
    low=config('pl.clip_cov_lb', 1.0), high=config('pl.clip_cov_ub', 5.0),
  )  # fmt: skip
  weighting = config.weighting(case.inputs['response_mask'])
  config.done()
  return _result(case, loss, weighting, limit=None)


def kl_cov(case: Case) -> Result:
  config = Config(case)
  loss = functools.partial(
    surrogates.kl_cov,
    share=config('pl.kl_cov_ratio', 2e-4),
    coef=config('pl.ppo_kl_coef', 1.0),
  )
  weighting = config.weighting(case.inputs['response_mask'])
  config.done()
  result = _result(case, loss, weighting)
  old, new, advantages, mask, _ = case.take(*NAMES)
  given = tokens(mask, old, advantages)
  gap = masked.log_ratio(flat(new), given.old, given.mask, None)
  result.outputs |= {'metric_ppo_kl': masked.mean(jnp.abs(gap), given.mask)}
  return result


FUNCTIONS = {
  'compute_policy_loss_vanilla': vanilla,
  'compute_policy_loss_gspo': gspo,
  'compute_policy_loss_cispo': cispo,
  'compute_policy_loss_sapo': sapo,
  'compute_policy_loss_dppo_tv': lambda case: dppo(
    case, surrogates.dppo_tv, 0.2
  ),
  'compute_policy_loss_dppo_kl': lambda case: dppo(
    case, surrogates.dppo_kl, 0.2
  ),
  'compute_policy_loss_geo_mean': geo_mean,
  'compute_policy_loss_gpg': gpg,
  'compute_policy_loss_dro': dro,
  'compute_policy_loss_clip_cov': clip_cov,
  'compute_policy_loss_kl_cov': kl_cov,
}
