"""Value losses of verl and AReaL, as ours."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from agentjax.rl import aggregation, masked, values
from parity_maps import CannotMap, Case, Result
from parity_maps.aggregation import verl
from parity_maps.tables import flat, graded, shown, table, weigh


def _verl(case: Case) -> Result:
  o = case.options(
    cliprange_value=0.5, loss_agg_mode='token-mean', dp_size=1,
    batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None,
  )  # fmt: skip
  new, returns, old, mask = case.take(
    'vpreds', 'returns', 'values', 'response_mask'
  )
  loss = _loss(old, returns, mask, o.cliprange_value, values.squared)
  options = vars(o)
  del options['cliprange_value']
  weighting = verl(options.pop('loss_agg_mode'), mask, **options)
  value, gradient, _ = graded(lambda x: loss(x).loss_N, new, weighting)
  clipped = loss(flat(new)).clipped_N
  return Result(
    {
      'loss': value,
      'grad_vpreds': gradient,
      'clipfrac': masked.mean(jnp.float32(clipped), shown(mask)),
    }
  )


def _areal(case: Case) -> Result:
  o = case.options(value_eps_clip=None, loss_fn_type='mse')
  new, old, returns, mask = case.take(
    'value', 'old_value', 'target_value', 'loss_mask'
  )
  errors = {'mse': values.squared, 'huber': values.huber}
  if o.loss_fn_type not in errors:
    raise CannotMap(f'loss_fn_type {o.loss_fn_type!r}')
  loss = _loss(old, returns, mask, o.value_eps_clip, errors[o.loss_fn_type])
  weighting = weigh(aggregation.token_mean, mask)
  value, gradient, _ = graded(lambda x: loss(x).loss_N, new, weighting)
  outputs = {
    'loss': value,
    'grad_value': gradient,
    'clip_mask': table(loss(flat(new)).clipped_N, new.shape),
  }
  if o.value_eps_clip is None:
    return Result(outputs)
  # Its clip of an offset rounds where nothing is clipped, and is masked so.
  active = np.abs(new - old) >= o.value_eps_clip
  return Result(outputs, where={'clip_mask': active})


def _loss(old, returns, mask, clip, error):
  def loss(new_N):
    return values.value_loss(
      new_N, flat(old), flat(returns), shown(mask), clip=clip, error=error
    )

  return loss


FUNCTIONS = {
  'compute_value_loss@verl': _verl,
  'ppo_critic_loss_fn@AReaL': _areal,
}
