"""Success on held-out tasks: pass@1 and pass@k with intervals.

Floor 3. Evaluation is `collect` with other tasks and no learning: the same
engine, chat, environments and sampler as in training. Draws are counted from
a number of their own, so that an evaluation shares no sampling key with
training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentjax.records import task_to_json
from agentjax.rollout.collect import collect
from agentjax.tally import interval
from agentjax.types import Group, Status, Task

# Draws of evaluations; training draws count up from 0.
EVALUATION_DRAW = 1 << 30


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What came of it. Intervals are 95 %.

  Attributes:
    pass_at: k -> (estimate, low, high).
    n: trajectories counted. tasks: tasks. statuses: how many ended how.
    reward: mean over trajectories that have one.
  """

  pass_at: dict[int, tuple[float, float, float]]
  n: int
  tasks: int
  statuses: dict[str, int]
  reward: float

  def __str__(self) -> str:
    p, low, high = self.pass_at[1]
    return f'pass@1 {p:.3f} [{low:.3f}, {high:.3f}] of {self.n}'

  def to_json(self) -> dict[str, Any]:
    """As it stands in summary.json."""
    out: dict[str, Any] = {}
    for k, (estimate, low, high) in self.pass_at.items():
      out[f'pass@{k}'] = estimate
      out[f'pass@{k}_interval'] = [low, high]
    return out | {
      'n': self.n,
      'tasks': self.tasks,
      'reward': self.reward,
      'statuses': self.statuses,
    }


def evaluate(
  tasks: Sequence[Task], *, samples: int = 1, draw: int = 0, **options
) -> tuple[Evaluation, list[Group]]:
  """Runs `samples` trajectories of each task; `options` are `collect`'s."""
  groups = collect(
    tasks, group_size=samples, draw=EVALUATION_DRAW + draw, **options
  )
  return score(groups), groups


def score(groups: Sequence[Group]) -> Evaluation:
  """Counts successes. A trajectory without a reward counts as a failure,
  except where its status is not counted at all."""
  counted = [
    [
      bool(t.reward and t.reward.success)
      for t in g.trajectories
      if t.status.count_in_evaluation
    ]
    for g in groups
  ]
  counted = [c for c in counted if c]
  statuses: dict[str, int] = {}
  for g in groups:
    for t in g.trajectories:
      statuses[t.status.value] = statuses.get(t.status.value, 0) + 1
  rewards = [t.reward.value for g in groups for t in g.trajectories if t.reward]
  fewest = min((len(c) for c in counted), default=0)
  pass_at = {}
  k = 1
  while k <= fewest:
    pass_at[k] = interval([pass_at_k(len(c), sum(c), k) for c in counted])
    k *= 2
  return Evaluation(
    pass_at,
    sum(len(c) for c in counted),
    len(counted),
    statuses,
    float(np.mean(rewards)) if rewards else 0.0,
  )


def fingerprint(tasks: Sequence[Task]) -> str:
  """Tells one set of tasks from another."""
  text = json.dumps([task_to_json(t) for t in tasks], sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def rows(
  evaluations: Mapping[str, Mapping[str, Any]], step: int
) -> list[dict[str, Any]]:
  """Rows for the recorder: of the evaluations by name, those of `step`."""
  out = []
  for when, values in evaluations.items():
    if values['step'] == step:
      low, high = values['pass@1_interval']
      row = {'name': 'held-out', 'when': when, 'success': values['pass@1']}
      row |= {'low': low, 'high': high, **values}
      del row['step']  # the record has its own
      out.append(row)
  return out


def pass_at_k(n: int, c: int, k: int) -> float:
  """Unbiased estimate from n samples of which c succeeded.

  1 - C(n - c, k) / C(n, k). Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.
  """
  return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def failure_rate(groups: Sequence[Group]) -> float:
  """Share of trajectories that the policy had no part in the end of."""
  bad = (Status.INFRA_FAILURE, Status.ENVIRONMENT_ERROR)
  all_ = [t for g in groups for t in g.trajectories]
  return sum(t.status in bad for t in all_) / max(1, len(all_))
