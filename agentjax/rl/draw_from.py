"""Draws out of what was collected, and out of padded arrays.

Floor 1, rl/. From trajectories a Draw takes what they recorded: which tokens
are MODEL, which segment is which turn, rewards, states, forks. Nothing is
inferred from a reward or from text. A critic's values come from the caller.

Letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentjax.rl.draw import Draw, Place, Tree, make
from agentjax.types import Group, Segment, Source, Status, Trajectory

# Cut by a limit, not at an end of the task: a value follows, if one is known.
CUT = frozenset({Status.TURN_LIMIT, Status.TOKEN_LIMIT})


def groups(
  collected: Sequence[Group],
  *,
  first: int = 0,
  bootstrap: Sequence[float] | None = None,
  **others,
) -> Draw:
  """The draw of all trajectories of these groups, in their order.

  Args:
    first: number of the first group.
    bootstrap: value of each trajectory's last state; taken where a limit cut
      it (`CUT`), 0 elsewhere.
    others: fields of Draw by name that no trajectory records (`values`, ...),
      or in place of what it records (`turn_rewards` of a process reward
      model), and what `draw.make` takes beside them.

  A trajectory is valid if its status may be trained on and it has a reward.
  The first token of a trajectory has no label, as nothing predicts it. A turn
  of which no token is left is none: its reward goes to the turn before.
  """
  trajectories = [t for g in collected for t in g.trajectories]
  turns = [_turns(t) for t in trajectories]
  if bootstrap is not None:
    bootstrap = [
      v if t.status in CUT else 0.0
      for v, t in zip(bootstrap, trajectories, strict=True)
    ]
  return make(
    [t.reward.value if t.reward else 0.0 for t in trajectories],
    [first + i for i, g in enumerate(collected) for _ in g.trajectories],
    [ids >= 0 for ids, *_ in turns],
    valid=[
      t.status.train_on_tokens and t.reward is not None for t in trajectories
    ],
    turns=[ids for ids, *_ in turns],
    state_keys=[keys for _, _, keys, _ in turns],
    misplaced=sum(moved for *_, moved in turns),
    bootstrap=bootstrap,
    **{
      'turn_rewards': [rewards for _, rewards, _, _ in turns],
      'tree': tree(trajectories),
      'parts': _parts(trajectories),
    }
    | others,
  )


def _turns(trajectory: Trajectory):
  """Turn ids [T], rewards and state keys of the turns, rewards that moved."""
  ids = np.full(len(trajectory), -1, np.int32)
  rewards: list[float] = []
  keys: list[str | None] = []
  at = turn = moved = 0
  for segment in trajectory.segments:
    begin, at = max(at, 1), at + len(segment)
    if segment.source is not Source.MODEL:
      continue
    answered = turn < len(trajectory.turn_rewards)
    reward = trajectory.turn_rewards[turn] if answered else 0.0
    known = turn < len(trajectory.state_keys)
    key = trajectory.state_keys[turn] if known else None
    turn += 1
    if begin < at:
      ids[begin:at] = len(rewards)
      rewards.append(reward)
      keys.append(key)
    elif reward:
      moved += 1
      if rewards:
        rewards[-1] += reward
  return ids, rewards, keys, moved


def _parts(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
  """Parts of the reward that every trajectory with a reward has."""
  named = [t.reward.parts for t in trajectories if t.reward]
  shared = set.intersection(*map(set, named)) if named else set()
  return {
    name: np.array(
      [t.reward.parts[name] if t.reward else 0.0 for t in trajectories], float
    )
    for name in sorted(shared)
  }


def tree(trajectories: Sequence[Trajectory]) -> Tree:
  """Who was forked from whom, as far as the parents are in this draw."""
  row = {t.id: i for i, t in enumerate(trajectories)}
  parents = [row.get(t.parent_id, -1) for t in trajectories]
  shared = [
    _shared(t, trajectories[p]) if p >= 0 else 0
    for t, p in zip(trajectories, parents, strict=True)
  ]
  return Tree(np.array(parents, int), np.array(shared, int))


def _shared(a: Trajectory, b: Trajectory) -> int:
  """Tokens of the leading segments that one has from the other.

  A fork is between segments: two that begin alike and go apart were sampled
  twice. So were equal ones behind the past that `a` says it began with.
  """
  n, past = 0, a.info.get('past_tokens')
  for x, y in zip(a.segments, b.segments, strict=False):
    if x is not y and not _same(x, y):
      break
    n += len(x)
  return min(n, past) if past else n


def _same(x: Segment, y: Segment) -> bool:
  return x.source is y.source and all(
    (p is None) == (q is None) and (p is None or np.array_equal(p, q))
    for p, q in (
      (x.tokens, y.tokens),
      (x.logprobs, y.logprobs),
      (x.versions, y.versions),
    )
  )


def arrays(
  mask_BT,
  *,
  rewards_B=None,
  groups_B=None,
  turns_BT=None,
  place: Place | None = None,
  **others,
) -> Draw:
  """A draw of padded arrays; padding is not sampled like anything else.

  Args:
    mask_BT: 1 where the policy sampled. rewards_B: outcomes, 0 if None.
    groups_B: keys of any kind; all are one group if None.
    turns_BT: turn of each sampled token; all one turn if None.
    place, others: as for `draw.make`, with arrays for sequences.
  """
  mask = np.asarray(mask_BT).astype(bool)
  B = len(mask)
  if groups_B is None:
    groups_B = np.zeros(B, int)
  return make(
    np.zeros(B) if rewards_B is None else rewards_B,
    np.unique(np.asarray(groups_B), return_inverse=True)[1],
    mask,
    turns=turns_BT,
    place=place,
    **others,
  )
