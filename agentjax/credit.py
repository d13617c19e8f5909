"""From a draw's rewards to what the learner is given, and what it says of it.

Floor 3, under `run`. Pure functions of groups and of the options of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from agentjax.learner import Learner
from agentjax.rl.batch import Batch, pack
from agentjax.training import Training
from agentjax.types import Group, Trajectory


def advantages(o: Training, groups: Sequence[Group]) -> np.ndarray:
  """One advantage for each trajectory of a draw, in its order."""
  trajectories = members(groups)
  return o.advantages(
    np.array([t.reward.value if t.reward else 0.0 for t in trajectories]),
    np.array([g.draw * o.groups + i for i, g in enumerate(groups)
              for _ in g.trajectories]),
    np.array([t.status.train_on_tokens and t.reward is not None
              for t in trajectories]),
  )  # fmt: skip


def members(groups: Sequence[Group]) -> list[Trajectory]:
  """The trajectories of all groups, in order."""
  return [t for g in groups for t in g.trajectories]


def by_token(
  groups: Sequence[Group], credit: np.ndarray
) -> dict[str, np.ndarray]:
  """Trajectory id -> float32[T]: its advantage where it carries loss, or 0."""
  return {
    t.id: np.where(t.loss_mask(), a, 0).astype(np.float32)
    for t, a in zip(members(groups), credit, strict=True)
  }


def batches(
  o: Training, learner: Learner, groups: Sequence[Group], credit: np.ndarray
) -> Iterator[Batch]:
  """The minibatches of a draw, one optimizer step each."""
  trajectories = members(groups)
  for part in np.array_split(np.arange(len(trajectories)), o.minibatches):
    yield pack(
      [trajectories[i] for i in part],
      [credit[i] for i in part],
      rows=learner.rows,
      length=learner.length,
      temperature=o.sampling.temperature,
      mask_observations=o.mask_observations,
    )


def metrics(
  o: Training, made: Sequence[Mapping[str, float]], credit: np.ndarray
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
  out['groups_without_signal'] = float(np.mean([not np.any(g) for g in groups]))
  return out
