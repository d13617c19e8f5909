"""DAPO's vectors, of the public recipe."""

from __future__ import annotations

import numpy as np

from agentjax.env import dapo
from agentjax.rl import draw, shaping
from agentjax.rl.normalize import labels
from vector_maps import differences


def _overlong(case):
  n = case['response_len']
  drawn = draw.make([case['base_score']], [0], [np.ones(n, bool)])
  options = {
    'limit': case['max_resp_len'],
    'buffer': case['overlong_buffer_len'],
    'factor': case['penalty_factor'],
  }
  (penalty,) = shaping.overlong_penalty(shaping.policy_tokens(drawn), **options)
  (reward,) = shaping.overlong(drawn, **options).rewards_N
  # A reward of the whole trajectory stands on its last sampled token.
  at_end = np.zeros(n)
  at_end[-1] = reward
  placed, _ = draw.move_to_sampled(at_end, drawn.masks[0])
  position = int(np.flatnonzero(placed)[-1]) if reward else n - 1
  return differences(
    case,
    {
      'overlong_reward': float(penalty),
      'reward': float(reward),
      'reward_position': position,
      'overlong_flag': bool(penalty < 0),
    },
  )


def _dynamic_sampling(case):
  # 'nan' is text, as JSON has no such number.
  metric = np.array([float(x) for x in case['metric']])
  groups = np.array(case['uid'])
  kept = shaping.released_informative(metric, groups, np.ones(len(metric)))
  at = np.flatnonzero(kept)
  uids = list(dict.fromkeys(groups[at].tolist()))
  assert len(uids) == len(set(labels(groups, kept)[at]))
  wanted = case | {'kept_uids': sorted(case['kept_uids'])}
  return differences(
    wanted,
    {
      'kept_uids': sorted(uids),
      'kept_traj_idxs': at.tolist(),
      'num_prompt_in_batch': len(uids),
    },
  )


def _math_answer(case):
  said, golden = case['solution'], case['gt']
  ours = {
    'minerva': dapo.released_answer_line(said, golden),
    'strict_box': dapo.released_box(said, golden),
  }
  shown = {
    name: {
      'score': 1.0 if v.right else -1.0, 'acc': v.right, 'pred': v.answer,
    }
    for name, v in ours.items()
  }  # fmt: skip
  return differences(case, shown)


SECTIONS = {
  'overlong': _overlong,
  'dynamic_sampling': _dynamic_sampling,
  'math_answer': _math_answer,
}
