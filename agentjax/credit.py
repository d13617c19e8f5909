"""From a draw's rewards to what the learner is given, and what it says of it.

Floor 3, under `run`. Pure functions of groups and of the options of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from agentjax.learner import Learner
from agentjax.rl import draw_from
from agentjax.rl.batch import Batch, pack
from agentjax.training import Training
from agentjax.types import Group, Trajectory


def advantages(o: Training, groups: Sequence[Group]) -> list[np.ndarray]:
  """float64[T] of each trajectory of a draw, in its order."""
  first = groups[0].draw * o.groups if groups else 0
  return o.advantages(draw_from.groups(groups, first=first))


def members(groups: Sequence[Group]) -> list[Trajectory]:
  """The trajectories of all groups, in order."""
  return [t for g in groups for t in g.trajectories]


def by_id(
  groups: Sequence[Group], credit: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
  """Trajectory id -> float32[T]: its advantages, 0 where it has no loss."""
  return {
    t.id: a.astype(np.float32)
    for t, a in zip(members(groups), credit, strict=True)
  }


def batches(
  o: Training,
  learner: Learner,
  groups: Sequence[Group],
  credit: Sequence[np.ndarray],
) -> Iterator[Batch]:
  """The minibatches of a draw, one optimizer step each."""
  trajectories = members(groups)
  if not o.mask_observations:
    credit = [
      _also_between(a, t.loss_mask())
      for a, t in zip(credit, trajectories, strict=True)
    ]
  for part in np.array_split(np.arange(len(trajectories)), o.minibatches):
    yield pack(
      [trajectories[i] for i in part],
      [credit[i] for i in part],
      rows=learner.rows,
      length=learner.length,
      temperature=o.sampling.temperature,
      mask_observations=o.mask_observations,
    )


def _also_between(advantages: np.ndarray, sampled: np.ndarray) -> np.ndarray:
  """Tokens that were not sampled get what the last sampled one before them has.

  For the ablation that trains on them; before the first it is the first's.
  """
  at = np.where(sampled, np.arange(len(sampled)), -1)
  # The first token has no label, and so no advantage.
  at[:1] = -1
  if (at < 0).all():
    return advantages
  before = np.maximum.accumulate(at)
  return advantages[np.where(before < 0, np.argmax(at >= 0), before)]


def metrics(
  o: Training,
  made: Sequence[Mapping[str, float]],
  credit: Sequence[np.ndarray],
) -> dict[str, float]:
  """Of the updates of one draw together."""
  out = {k: float(np.mean([m[k] for m in made])) for k in made[0]}
  out['loss_tokens'] = sum(m['loss_tokens'] for m in made)
  out['max_ratio'] = max(m['max_ratio'] for m in made)
  out['skipped_updates'] = made[-1]['skipped_updates']
  # The gap between sampler and learner is one only before weights move.
  out['max_logprob_gap'] = made[0]['max_logprob_gap']
  groups = [
    credit[i : i + o.group_size] for i in range(0, len(credit), o.group_size)
  ]
  out['groups_without_signal'] = float(
    np.mean([not any(np.any(a) for a in g) for g in groups])
  )
  return out
