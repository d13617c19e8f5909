"""Going on again from where trajectories have been: trees, and state values.

Floor 2, rollout/. A state is a trajectory cut before one of its turns; an
episode that begins with it is brought there by replaying its acts, runs only
tokens that no other has run, and is a branch of its own. This file decides
where to branch; who runs the branches is given to it as

    go_on(prefixes: lists of trajectories, one a group, **other options of
      `collect`) -> their Groups.

Letters: K turns of a trajectory.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from agentjax.rollout.collect import collect
from agentjax.rollout.sampling import Sampling
from agentjax.types import Group, Source, Status, Task, Trajectory

GoOn = Callable[..., list[Group]]


@dataclasses.dataclass(frozen=True)
class Branched:
  """A draw after its branches.

  Attributes:
    groups: what is learned from.
    found: fields of `rl.draw.Draw` by name, one entry a trajectory of these
      groups, in order; the same names where there are none.
    tried: groups of branches that nothing is learned from, for their cost.
  """

  groups: list[Group]
  found: Mapping[str, list] = dataclasses.field(default_factory=dict)
  tried: list[Group] = dataclasses.field(default_factory=list)


def collected(
  tasks: Sequence[Task], branch: Callable[..., Branched] | None, **options
) -> Branched:
  """A draw of `collect` with these options, and its branches, if any."""
  groups = collect(tasks, **options)
  if branch is None:
    return Branched(groups)

  def go_on(prefixes, **changes):
    return collect(tasks, prefixes=prefixes, **options | changes)

  return branch(groups, go_on)


def cut(trajectory: Trajectory, turn: int, branch: int) -> Trajectory:
  """The past of turn `turn` (from 0), as the beginning of a new branch.

  Before the first turn of all it is the prompt.
  """
  starts = [
    i for i, s in enumerate(trajectory.segments) if s.source is Source.MODEL
  ]
  at = starts[turn]
  # What is put into the model's mouth belongs to the turn that it begins.
  if at and trajectory.segments[at - 1].source is Source.FORCED:
    at -= 1
  return dataclasses.replace(
    trajectory,
    segments=trajectory.segments[:at],
    status=Status.RUNNING,
    reward=None,
    turn_rewards=trajectory.turn_rewards[:turn],
    state_keys=trajectory.state_keys[:turn],
    branch=branch,
    parent_id=trajectory.id,
    error=None,
    info={},
    sandboxes=(),
  )


def state_values(
  groups: Sequence[Group], go_on: GoOn, *, continuations: int = 4
) -> Branched:
  """The mean reward of fresh continuations from each state of a draw.

  All trajectories of a group begin in one state, which has one value; each
  other turn's is its own. Where no continuation came to a reward the value is
  that of the state before. Source: VinePPO, arXiv:2410.01679, section 4.
  """
  if continuations < 1:
    raise ValueError(f'continuations is {continuations}: give at least 1')
  prefixes, states = [], []
  for g, group in enumerate(groups):
    own: list[Trajectory] = []
    for i, t in enumerate(group.trajectories):
      for k in _turns(t):
        if k == 0 and any(s[:2] == (g, -1) for s in states):
          continue
        states.append((g, -1 if k == 0 else i, k))
        own += [
          cut(t, k, 1 + k * continuations + n) for n in range(continuations)
        ]
    prefixes.append(own)
  tried = go_on(prefixes)
  means: dict[tuple[int, int, int], float | None] = {}
  used = [0] * len(groups)
  for state in states:
    g = state[0]
    ended = tried[g].trajectories[used[g] : used[g] + continuations]
    used[g] += continuations
    rewards = [t.reward.value for t in ended if t.reward is not None]
    means[state] = float(np.mean(rewards)) if rewards else None
  values = []
  for g, group in enumerate(groups):
    for i, t in enumerate(group.trajectories):
      before, own = 0.0, []
      for k in _turns(t):
        found = means[g, -1 if k == 0 else i, k]
        before = before if found is None else found
        own.append(before)
      values.append(np.array(own))
  return Branched(list(groups), {'turn_values': values}, tried)


def _turns(trajectory: Trajectory) -> list[int]:
  """Numbers of the turns that have tokens."""
  return [k for k, turn in enumerate(trajectory.turns) if len(turn)]


def greedy_answers(groups: Sequence[Group], go_on: GoOn) -> Branched:
  """The reward of one greedy trajectory of each task, as a baseline.

  0 where it came to no reward. Source: ReMax, arXiv:2310.10505, algorithm 1.
  """
  first = [[_begun(g)] for g in groups]
  tried = go_on(first, sampling=Sampling(temperature=0.0))
  baselines = []
  for group, own in zip(groups, tried, strict=True):
    reward = own.trajectories[0].reward
    value = 0.0 if reward is None else reward.value
    baselines += [value] * len(group.trajectories)
  return Branched(list(groups), {'baselines_N': baselines}, tried)


def _begun(group: Group) -> Trajectory:
  """A trajectory of nothing yet, which no sample of the group is."""
  return Trajectory(group.task, draw=group.draw, branch=1)


def grow(
  groups: Sequence[Group], go_on: GoOn, *, forks: int = 1, seed: int = 0
) -> Branched:
  """A tree of each trajectory: `forks` new leaves from turns after its first.

  Which turns is drawn, keyed by the trajectory and `seed`; one of a single
  turn stays alone. Source: Tree-GRPO, arXiv:2509.21240, section 3.2, with one
  round of expansion.
  """
  if forks < 1:
    raise ValueError(f'forks is {forks}: give at least 1')
  prefixes = []
  for group in groups:
    own = []
    for t in group.trajectories:
      if len(t.turns) < 2 or not t.status.reward_trustworthy:
        continue
      rng = np.random.default_rng([seed, zlib.crc32(t.id.encode())])
      turns = rng.integers(1, len(t.turns), forks)
      own += [cut(t, int(k), 1 + n) for n, k in enumerate(turns)]
    prefixes.append(own)
  grown = go_on(prefixes)
  return Branched([
    dataclasses.replace(a, trajectories=(*a.trajectories, *b.trajectories))
    for a, b in zip(groups, grown, strict=True)
  ])  # fmt: skip
