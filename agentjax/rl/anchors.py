"""Anchor states: steps of a group that begin in the same state are compared.

Floor 1, rl/. An estimator of the seam that `draw` tells: GiGPO. A state is
known by its key; a timestamp or a step counter in the key makes every state
another one, and then no step is compared (`anchor_sizes` shows it).

Letters: N trajectories, S steps of all of them (one a turn).
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from agentjax.rl.advantages import Scale, no_std, standardized
from agentjax.rl.draw import Draw
from agentjax.rl.normalize import labels
from agentjax.rl.seam import (
  Scores,
  apart,
  by_turn,
  joined,
  step_rewards,
  total,
  turn_counts,
)

# Keys of one group's steps -> int[S]: equal numbers, one state; -1, unknown.
Match = Callable[[Sequence], np.ndarray]
# (scores_S, group_S, trajectory_S, normal) -> A_E of each step.
Episodes = Callable[..., np.ndarray]


def same(keys: Sequence) -> np.ndarray:
  """Equal keys are one state."""
  numbers: dict = {}
  return np.array(
    [-1 if k is None else numbers.setdefault(k, len(numbers)) for k in keys],
    int,
  )


def similar(keys: Sequence[str], *, threshold: float = 0.95) -> np.ndarray:
  """Keys that are alike enough are one state, that of the first of them.

  Each key goes to the first state whose first key it resembles, by
  `difflib.SequenceMatcher.ratio`; the order of the keys matters.
  """
  out, firsts = np.full(len(keys), -1), []
  for i, key in enumerate(keys):
    if key is None:
      continue
    for number, first in enumerate(firsts):
      if difflib.SequenceMatcher(None, key, first).ratio() >= threshold:
        out[i] = number
        break
    else:
      out[i] = len(firsts)
      firsts.append(key)
  return out


def trajectories(scores_S, group_S, trajectory_S, normal) -> np.ndarray:
  """Statistics over trajectories, each once (B2 row 4): the default."""
  _, first, back = np.unique(
    trajectory_S, return_index=True, return_inverse=True
  )
  return normal(scores_S[first], group_S[first])[back]


def step_rows(scores_S, group_S, trajectory_S, normal) -> np.ndarray:
  """Over steps, so that long trajectories weigh more. As verl-agent has it."""
  del trajectory_S
  return normal(scores_S, group_S)


def anchor_labels(keys: Sequence, group_S, valid_S, match: Match = same):
  """int[S]: equal numbers, the same state in the same group; -1 unknown."""
  group = labels(group_S, valid_S)
  out, used = np.full(len(group), -1), 0
  for g in range(group.max(initial=-1) + 1):
    rows = np.flatnonzero(group == g)
    number = match([keys[i] for i in rows])
    out[rows] = np.where(number >= 0, number + used, -1)
    used += int(number.max(initial=-1)) + 1
  return out


def step_returns(rewards_S, trajectory_S, *, gamma: float, step_S=None):
  """Discounted rewards to go of steps that stand in the order of time.

  Args:
    step_S: number of each step; rows in a row with the same number are one
      step, with the reward of the first (several agents act at once). None:
      each row is a step.
  """
  out = np.zeros(len(rewards_S))
  for t in np.unique(trajectory_S):
    rows = np.flatnonzero(np.asarray(trajectory_S) == t)
    begins = np.ones(len(rows), bool)
    if step_S is not None:
      number = np.asarray(step_S)[rows]
      begins[1:] = number[1:] != number[:-1]
    carried, to_go = 0.0, []
    for i in rows[begins][::-1]:
      carried = float(rewards_S[i]) + gamma * carried
      to_go.append(carried)
    out[rows] = np.array(to_go[::-1])[np.cumsum(begins) - 1]
  return out


def gigpo_steps(
  scores_S,
  returns_S,
  keys: Sequence,
  group_S,
  trajectory_S,
  valid_S,
  *,
  weight: float = 1.0,
  match: Match = same,
  scale: Scale = no_std,
  episodes: Episodes = trajectories,
  ddof: int = 1,
  eps: float = 1e-6,
  raw_singletons: bool = False,
) -> np.ndarray:
  """float64[S]: A_E + weight * A_S of each step; `gigpo` says what they are.

  Args:
    scores_S: of the trajectory that a step belongs to, the same at all of its
      steps. trajectory_S: which.
    returns_S: discounted rewards to go of the steps.
  """
  options = {'scale': scale, 'ddof': ddof, 'eps': eps}

  def normal(scores, group):
    return standardized(scores, group, raw_singletons=raw_singletons, **options)

  episode = episodes(
    np.asarray(scores_S, np.float64),
    labels(group_S, valid_S),
    np.asarray(trajectory_S),
    normal,
  )
  state = anchor_labels(keys, group_S, valid_S, match)
  return episode + weight * standardized(returns_S, state, **options)


def gigpo(
  draw: Draw,
  *,
  weight: float = 1.0,
  gamma: float = 0.95,
  match: Match = same,
  scale: Scale = no_std,
  episodes: Episodes = trajectories,
  scores: Scores = total,
  ddof: int = 1,
  eps: float = 1e-6,
  raw_singletons: bool = False,
) -> list[np.ndarray]:
  """Group in group: A = A_E + weight * A_S, the same at each token of a turn.

  A_E is the trajectory's score less its group's mean; A_S the turn's
  discounted reward to go less the mean of the turns of the group that began in
  the same state (`state_keys`, compared by `match`); both over `scale`
  (`no_std` or `group_std`). A state that is met once, or not known, has A_S =
  0. Source: GiGPO, arXiv:2505.10978, eq. 3 to 8.

  Args:
    episodes: what the statistics of A_E are over: `trajectories`, `step_rows`.
  """
  counts = turn_counts(draw)
  row = np.repeat(np.arange(len(draw)), counts)
  flat = gigpo_steps(
    scores(draw)[row],
    step_returns(joined(step_rewards(draw)), row, gamma=gamma),
    [key for keys in draw.state_keys for key in keys],
    draw.groups_N[row],
    row,
    draw.valid_N[row],
    weight=weight,
    match=match,
    scale=scale,
    episodes=episodes,
    ddof=ddof,
    eps=eps,
    raw_singletons=raw_singletons,
  )
  return by_turn(draw, apart(flat, counts))


def anchor_sizes(draw: Draw, *, match: Match = same) -> dict[int, int]:
  """How many states were met how often, by how often. For the metrics."""
  counts = turn_counts(draw)
  row = np.repeat(np.arange(len(draw)), counts)
  label = anchor_labels(
    [key for keys in draw.state_keys for key in keys],
    draw.groups_N[row],
    draw.valid_N[row],
    match,
  )
  return dict(sorted(Counter(np.bincount(label[label >= 0])).items()))
