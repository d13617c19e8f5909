"""Numbers of a draw: what came of its trajectories, and what they cost.

Floor 2. Pure functions of records; they know no engine and no run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentjax.types import Group, Status, Trajectory

# What hangs on how fast things went: another run of the same seed has others.
_TIMED = frozenset(
  {'slot_occupancy', 'rows_parked', 'parked_bytes', 'calls_given_up'}
)


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
    'turns': sum(len(t.turns) for t in trajectories) / len(trajectories),
    'model_tokens': sum(t.model_tokens for t in trajectories)
    / len(trajectories),
  }


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
