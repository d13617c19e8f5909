"""Numbers of a draw: what came of its trajectories, and what they cost.

Floor 2. Functions of records; they know no engine and no run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentjax.types import Group, Status, Trajectory

TAMPER = 'tamper'  # parts of a reward whose names begin so are flags

# What hangs on how fast things went: another run of the same seed has others.
_TIMED = frozenset(
  {'slot_occupancy', 'rows_parked', 'parked_bytes', 'calls_given_up'}
)

# The totals of a run that has done nothing yet.
NOTHING = {
  'seconds': 0.0,
  'tokens_sampled': 0,
  'tokens_prefilled': 0,
  'tokens_expected': 0,
  'tokens_reprefill': 0,
  'max_logprob_gap': 0.0,
  'compilations_after_warmup': 0,
  'skipped_updates': 0,
}


def is_clock(name: str) -> bool:
  """Whether a metric or a total tells of time, and not of what was done."""
  timed = name in _TIMED or name.startswith('sandbox_')
  return timed or name.startswith('seconds') or name.endswith('per_second')


def outcome(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Means over a draw; reward and success over those whose reward counts."""
  scored = [t for t in trajectories if t.reward is not None]
  n = max(1, len(scored))
  return {
    'reward': sum(t.reward.value for t in scored) / n,
    'success': sum(t.reward.success for t in scored) / n,
    'unscored': len(trajectories) - len(scored),
    'mask_rate': sum(t.status is Status.INFRA_FAILURE for t in trajectories)
    / len(trajectories),
    'tampered': sum(map(tampered, scored)),
    'turns': sum(len(t.turns) for t in trajectories) / len(trajectories),
    'model_tokens': sum(t.model_tokens for t in trajectories)
    / len(trajectories),
  }


def add_cost(
  totals: dict[str, float], groups: Sequence[Group], engine: Any, reprefill: int
) -> None:
  """Adds to a run's totals what a draw cost, and what it should have cost.

  Args:
    engine: its counts, `tokens_sampled` and `tokens_prefilled`. reprefill:
      tokens that it would have run without a KV state over tool calls.
  """
  totals['tokens_expected'] += expected_prefill(groups)
  totals['tokens_sampled'] += engine.tokens_sampled
  totals['tokens_prefilled'] += engine.tokens_prefilled
  totals['tokens_reprefill'] += reprefill


def tampered(trajectory: Trajectory) -> bool:
  """Whether its verifier says so, in a part of the reward."""
  parts = trajectory.reward.parts if trajectory.reward else {}
  return any(v for name, v in parts.items() if name.startswith(TAMPER))


def expected_prefill(groups: Sequence[Group]) -> int:
  """Tokens that a draw has the engine run beside those that it samples.

  Each group's prompt once, or each past that its trajectories went on from,
  and each observation that a turn came after. An episode that is run again
  after an InfraError costs its own once more.
  """
  total = 0
  for g in groups:
    pasts: dict[bytes, int] = {}
    for t in g.trajectories:
      if not t.turns:
        continue
      past = t.info.get('past_tokens', 0) or len(t.segments[0])
      pasts[t.tokens()[:past].tobytes()] = past
      ends = np.cumsum([len(s) for s in t.segments])
      # Behind the last turn an observation is never run.
      total += sum(
        len(s)
        for s, end in zip(t.segments[:-1], ends, strict=False)
        if s.stop is None and end > past
      )
    total += sum(pasts.values())
  return total


def interval(per_task: Sequence[float]) -> tuple[float, float, float]:
  """Mean over tasks and a 95 % interval that respects tasks as the unit.

  Wilson's interval with the design effect of clustering: the effective number
  of trials is what gives the observed variance of the mean.
  """
  x = np.asarray(per_task, np.float64)
  mean, n = float(x.mean()), len(x)
  spread = float(x.var(ddof=1)) if n > 1 else mean * (1 - mean)
  trials = n
  if 0 < mean < 1 and spread > 0:
    trials = n * mean * (1 - mean) / spread
  low, high = wilson(mean, trials)
  return mean, low, high


def wilson(p: float, n: float, z: float = 1.959964) -> tuple[float, float]:
  """Wilson's score interval of a proportion. Source: Wilson 1927."""
  centre = (p + z * z / (2 * n)) / (1 + z * z / n)
  half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
  return max(0.0, centre - half), min(1.0, centre + half)
