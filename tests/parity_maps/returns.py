"""Maps: generalised advantages and returns over tokens.

B2 row 5: over what was not sampled verl, tunix and AReaL skip, as ours does;
OpenRLHF counts each slot as a step, and slime has no mask.
"""

import numpy as np

from agentjax.rl import draw_from, shaping
from agentjax.rl.draw import drop_unsampled
from agentjax.rl.returns import (
  decay,
  gae,
  gae_per_slot,
  returns,
  value_targets,
)
from agentjax.rl.seam import reward_stream

from . import Result, check
from .advantages import areal_kl, by_mask, dense_draw


def verl_gae(case):
  check(
    case,
    ('gamma', 'lam'),
    ('token_level_rewards', 'response_mask', 'values'),
  )
  options = {'gamma': case.args['gamma'], 'lam': case.args['lam']}
  draw = dense_draw(case, values=case.inputs['values'])
  return by_mask(
    case.inputs['response_mask'],
    advantages=gae(draw, **options),
    returns=value_targets(draw, **options),
  )


def plain_draw(case, mask, **others):
  """Rewards and values by token; rewards under the mask are dropped."""
  return draw_from.arrays(
    mask,
    token_rewards=case.inputs['rewards'],
    values=case.inputs['values'],
    place=drop_unsampled,
    **others,
  )


def tunix_gae(case):
  check(case, ('gamma', 'gae_lambda'), ('rewards', 'values', 'mask'))
  options = {'gamma': case.args['gamma'], 'lam': case.args['gae_lambda']}
  mask = case.inputs['mask']
  draw = plain_draw(case, mask)
  return by_mask(
    mask,
    advantages=gae(draw, **options),
    returns=value_targets(draw, **options),
  )


def openrlhf_gae(case):
  check(case, ('gamma', 'lam'), ('rewards', 'values', 'action_mask'))
  options = {'gamma': case.args['gamma'], 'lam': case.args['lam']}
  mask = case.inputs['action_mask']
  draw = plain_draw(case, mask)
  return by_mask(
    mask,
    advantages=gae_per_slot(draw, whiten=False, **options),
    returns=value_targets(draw, per_slot=True, **options),
    cumulative_returns=returns(draw, gamma=options['gamma'], cross=decay),
  )


def slime_gae(case):
  """Two ways of one computation: the size of a chunk has no effect."""
  check(case, ('gamma', 'lam', 'chunk_size'), ('rewards', 'values'))
  options = {'gamma': case.args['gamma'], 'lam': case.args['lam']}
  mask = np.ones(case.inputs['rewards'].shape)
  draw = plain_draw(case, mask)
  advantages = gae(draw, whiten=False, **options)
  targets = value_targets(draw, **options)
  return by_mask(
    mask,
    adv=advantages,
    ret=targets,
    adv_chunked=advantages,
    ret_chunked=targets,
  )


def areal_advantages(case):
  """Everything but `ref_logp` and `values` one slot earlier than ours.

  The last column is none of theirs. The outcome stands on the slot before the
  last attended one, sampled or not, and is dropped where it is not.
  """
  check(
    case,
    ('gamma', 'lam', 'kl_ctl', 'kl_estimator', 'mask_no_eos_with_zero',
     'reward_bias', 'reward_scaling', 'reward_clip'),
    ('rewards', 'loss_mask', 'logprobs', 'ref_logp', 'attention_mask',
     'values'),
  )  # fmt: skip
  x, args = case.inputs, case.args
  mask = np.roll(x['loss_mask'], -1, -1) > 0
  logprobs = np.roll(x['logprobs'], -1, -1)
  length = x['attention_mask'].sum(-1)
  cut = length == mask.shape[1]
  scores = shaping.rescaled(
    x['rewards'],
    bias=args.get('reward_bias', 0.0),
    factor=args.get('reward_scaling', 1.0),
    low=-args.get('reward_clip', np.inf),
    high=args.get('reward_clip', np.inf),
  )
  rows = np.arange(len(mask))
  inner = mask.copy()
  inner[:, -1] = False
  inner[rows, length - 1] = False  # no KL behind the end of a sequence
  ref = x.get('ref_logp', np.zeros(mask.shape))
  dense = areal_kl(case, logprobs, ref, inner)
  unseen = cut & bool(args.get('mask_no_eos_with_zero', False))
  dense[rows, np.maximum(length - 2, 0)] += np.where(unseen, 0.0, scores)
  mask[:, -1] = False
  values = x.get('values', np.zeros(mask.shape))
  draw = draw_from.arrays(
    mask,
    token_rewards=dense,
    values=values,
    place=drop_unsampled,
    bootstrap=np.where(cut, values[:, -1], 0.0),
  )
  options = {'gamma': args['gamma'], 'lam': args['lam']}
  result = by_mask(
    mask,
    advantages=gae(draw, whiten=False, **options),
    returns=value_targets(draw, **options),
    tot_rewards=reward_stream(draw),
  )
  rolled = np.roll(x['loss_mask'], -1, -1)
  return Result({**result.outputs, 'rolled_loss_mask': rolled}, result.where)


FUNCTIONS = {
  'compute_gae_advantage_return': verl_gae,
  'compute_gae_advantages': tunix_gae,
  'get_advantages_and_returns/get_cumulative_returns': openrlhf_gae,
  'vanilla_gae/chunked_gae': slime_gae,
  'PPOActor._compute_advantages': areal_advantages,
}
