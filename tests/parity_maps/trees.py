"""Maps: anchor states and trees.

B2 row 3: the episode's group of one, and a tree of one leaf, keep the raw
score in the public functions. B2 row 4: verl-agent's mean is over step rows,
DrMAS's over trajectories.
"""

import functools

import numpy as np

from agentjax.rl import anchors, draw_from
from agentjax.rl.advantages import group_std, grpo, no_std
from agentjax.rl.draw import Tree
from agentjax.rl.trees import tree_grpo, tree_grpo_2norm

from . import CannotMap, Result, check
from .advantages import by_mask


def match_of(case):
  if not case.args.get('enable_similarity', False):
    return anchors.same
  threshold = case.args.get('similarity_thresh', 0.95)
  return functools.partial(anchors.similar, threshold=threshold)


def keys_of(case):
  """Of any type that can be told apart: a row of an array is a tuple."""
  return [
    tuple(k.ravel()) if isinstance(k, np.ndarray) else k.item()
    for k in case.inputs['anchor_obs']
  ]


SIMILAR = ('enable_similarity', 'similarity_thresh')


def step_groups(case):
  """The partition, numbered by first appearance."""
  check(case, (*SIMILAR, 'summarize'), ('anchor_obs', 'index'))
  index = case.inputs['index']
  label = anchors.anchor_labels(
    keys_of(case), index, np.ones(len(index), bool), match_of(case)
  )
  return Result({'group_id': anchors.same(label.tolist())})


def step_returns(case):
  """DrMAS: rows with one step number, one after the other, are one step."""
  check(case, ('gamma',), ('rewards', 'traj_uid', 'env_step'))
  rewards, uid = case.inputs['rewards'], case.inputs['traj_uid']
  gamma = case.args['gamma']
  return Result(
    {
      'returns': anchors.step_returns(rewards, uid, gamma=gamma),
      'returns_drmas': anchors.step_returns(
        rewards, uid, gamma=gamma, step_S=case.inputs['env_step']
      ),
    }
  )


def gigpo(case):
  check(
    case,
    ('epsilon', 'step_advantage_w', 'mode', *SIMILAR,
     'compute_mean_std_cross_steps', 'group_by_agent_id'),
    ('token_level_rewards', 'step_rewards', 'response_mask', 'anchor_obs',
     'index', 'traj_index'),
  )  # fmt: skip
  x, args = case.inputs, case.args
  scales = {'mean_norm': no_std, 'mean_std_norm': group_std}
  mode = args.get('mode', 'mean_norm')
  if mode not in scales:
    raise CannotMap(f'mode {mode!r}')
  drmas = 'DrMAS' in case.source
  over_steps = args.get(
    'group_by_agent_id' if drmas else 'compute_mean_std_cross_steps', not drmas
  )
  pairs = np.stack([x['index'].astype(str), x['traj_index'].astype(str)], 1)
  trajectory = np.unique(pairs, axis=0, return_inverse=True)[1].ravel()
  scores = np.asarray(x['token_level_rewards'], np.float64).sum(-1)
  if not over_steps:
    first = np.unique(trajectory, return_index=True)[1]
    if not np.allclose(scores[first][trajectory], scores):
      raise CannotMap('steps of one trajectory with different scores')
  steps = anchors.gigpo_steps(
    scores,
    x['step_rewards'],
    keys_of(case),
    x['index'],
    trajectory,
    np.ones(len(scores), bool),
    weight=args.get('step_advantage_w', 1.0),
    match=match_of(case),
    scale=scales[mode],
    episodes=anchors.step_rows if over_steps else anchors.trajectories,
    eps=args.get('epsilon', 1e-6),
    raw_singletons=True,
  )
  mask = x['response_mask']
  tokens = np.broadcast_to(steps[:, None], mask.shape)
  return by_mask(mask, advantages=tokens)


def tree(case):
  check(
    case,
    ('epsilon',),
    ('token_level_rewards', 'eos_mask', 'uid', 'tree_uid'),
  )
  x = case.inputs
  mask = x['eos_mask']
  first, back = np.unique(
    x['tree_uid'], return_index=True, return_inverse=True
  )[1:]
  roots = first[back]
  parents = np.where(roots == np.arange(len(roots)), -1, roots)
  common = {'rewards_B': np.sum(x['token_level_rewards'], -1, dtype=float)}
  draw = draw_from.arrays(
    mask,
    groups_B=x['uid'],
    tree=Tree(parents, np.zeros(len(parents), int)),
    **common,
  )
  options = {'eps': case.args.get('epsilon', 1e-6), 'raw_singletons': True}
  of_tree = draw_from.arrays(mask, groups_B=x['tree_uid'], **common)
  return by_mask(
    mask,
    inter=grpo(draw, **options),
    intra=grpo(of_tree, **options),
    advantages=tree_grpo(draw, **options),
    advantages_2norm=tree_grpo_2norm(draw, **options),
  )


FUNCTIONS = {
  'build_step_group': step_groups,
  'compute_step_discounted_returns': step_returns,
  'compute_gigpo_outcome_advantage': gigpo,
  "adv_estimator 'tree' (inter+intra) and 'tree_2norm'": tree,
}
