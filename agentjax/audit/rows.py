"""The table of an audit: what each policy earned, and what it may earn.

Floor 3, under `audit`. A stated baseline is the mean reward that a policy is
owed at most; the gold policy is owed it at least. What is said against one is
said by an interval, so that luck alone seldom says it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from agentjax import tally
from agentjax.audit.play import Played
from agentjax.types import Status

GOLD = 'gold'
OK = 'ok'
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Row:
  """A policy and a way of playing it.

  Attributes:
    n: episodes. failed: those without a reward; the rest is of the others.
    reward: mean; low, high: 95 % interval. success: share.
    stated: baseline. statuses: how many ended how.
    verdict: 'ok', or what is wrong. error: the first traceback.
  """

  policy: str
  way: str
  n: int
  failed: int
  reward: float
  low: float
  high: float
  success: float
  stated: float
  statuses: dict[str, int]
  verdict: str
  error: str | None = None


def row(
  policy: str,
  way: str,
  played: Sequence[Played],
  stated: float,
  above: float | None = None,
) -> Row:
  """What came of a policy's episodes.

  Args:
    stated: its baseline. above: what the gold policy must be better than.
  """
  rewards = [p.reward.value for p in played if p.reward is not None]
  successes = [p.reward.success for p in played if p.reward is not None]
  mean, low, high = _interval(rewards)
  verdict = OK
  if error := next((p.error for p in played if p.error), None):
    broken = sum(p.error is not None for p in played)
    verdict = f'FAILED {broken} of {len(played)}'
  elif any(p.forged for p in played):
    verdict = 'FORGED'
  elif not rewards:
    verdict = 'NO REWARD'
  elif policy != GOLD:
    verdict = 'EXCEEDED' if low > stated + _ROUNDING else OK
  elif high < stated - _ROUNDING:
    verdict = 'BELOW'
  elif above is not None and not mean > above:
    verdict = 'NOT ABOVE NULL'
  counts = collections.Counter(p.status.value for p in played)
  return Row(
    policy, way, len(played), len(played) - len(rewards), mean, low, high,
    float(np.mean(successes)) if successes else 0.0, stated,
    dict(sorted(counts.items())), verdict, error,
  )  # fmt: skip


def _interval(rewards: Sequence[float]) -> tuple[float, float, float]:
  """Mean and 95 % interval: Wilson's of rewards from 0 to 1, else normal."""
  if not rewards:
    return 0.0, 0.0, 0.0
  if 0 <= min(rewards) and max(rewards) <= 1:
    return tally.interval(rewards)
  mean, n = float(np.mean(rewards)), len(rewards)
  half = 1.959964 * float(np.std(rewards, ddof=n > 1)) / n**0.5
  return mean, mean - half, mean + half


HEAD = (
  f'{"policy":<9} {"way":<7} {"episodes":>8} {"reward":>7} '
  f'{"95 % interval":>16} {"success":>8} {"stated":>9}  verdict'
)


def line(row: Row) -> str:
  """A row as text, under `HEAD`."""
  sign = '>=' if row.policy == GOLD else '<='
  ended = ''
  if set(row.statuses) != {Status.DONE.value}:
    counts = (f'{k} {n}' for k, n in row.statuses.items())
    ended = f' ({", ".join(counts)})'
  return (
    f'{row.policy:<9} {row.way:<7} {row.n:>8} {row.reward:>7.3f} '
    f'{f"[{row.low:.3f}, {row.high:.3f}]":>16} {row.success:>8.3f} '
    f'{f"{sign} {row.stated:.3g}":>9}  {row.verdict}{ended}'
  )


def table(rows: Sequence[Row]) -> str:
  return '\n'.join([HEAD, *map(line, rows)])
