"""What a pool has done and how long it took, as numbers.

Floor 1, env/sandbox, used by the pool. `Tally` counts while it works, from
many threads; `PoolStats` is what it had counted at one moment.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections import Counter
from collections.abc import Mapping

_KEPT = 512


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds of `count` things: the middle, and what 95 of 100 stay below."""

  count: int = 0
  median_s: float = 0.0
  p95_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class PoolStats:
  """Of a pool since it was made.

  Attributes:
    idle, starting, busy: sandboxes now.
    starts: that went well. acquires: that got one. calls: of any kind, the
      runner's reply or a failure.
    waits: acquires that found none idle. exhausted: that got none in time.
    ends: sandboxes that are no more, by reason: closed, failed (in a call),
      lost (while idle), expired (idle for too long), shutdown (of the pool).
    kills: calls that were ended for what they did, by status.
    failures: of starts and calls, by kind of InfraError.
    opened: how often the breaker did.
  """

  idle: int
  starting: int
  busy: int
  starts: Times
  acquires: Times
  calls: Times
  waits: int
  exhausted: int
  ends: Mapping[str, int]
  kills: Mapping[str, int]
  failures: Mapping[str, int]
  opened: int

  def metrics(self) -> dict[str, float]:
    """Under the names of the records; those that are there come and go not."""
    out: dict[str, float] = {
      'sandbox_idle': self.idle,
      'sandbox_busy': self.busy,
      'sandbox_waits': self.waits,
      'sandbox_exhausted': self.exhausted,
      'sandbox_breaker_opened': self.opened,
      'sandbox_kills': sum(self.kills.values()),
      'sandbox_failures': sum(self.failures.values()),
    }
    for name in ('starts', 'acquires', 'calls'):
      times = getattr(self, name)
      out[f'sandbox_{name}'] = times.count
      out[f'sandbox_{name}_median_s'] = times.median_s
      out[f'sandbox_{name}_p95_s'] = times.p95_s
    for name in ('ends', 'kills', 'failures'):
      for reason, count in sorted(getattr(self, name).items()):
        out[f'sandbox_{name}_{reason}'] = count
    return out


class Tally:
  """Counts; thread-safe."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._times = {n: _Reservoir() for n in ('starts', 'acquires', 'calls')}
    self._counts: dict[str, Counter[str]] = {
      name: Counter() for name in ('ends', 'kills', 'failures', 'others')
    }

  def took(self, what: str, seconds: float) -> None:
    """One more start, acquire or call."""
    with self._lock:
      self._times[what].add(seconds)

  def count(self, what: str, reason: str) -> None:
    """One more end, kill or failure, or one of the `others`."""
    with self._lock:
      self._counts[what][reason] += 1

  def stats(self, **now: int) -> PoolStats:
    """`now` are the fields that are no sums."""
    with self._lock:
      counts = {name: dict(c) for name, c in self._counts.items()}
      others = counts.pop('others')
      return PoolStats(
        **{name: r.times() for name, r in self._times.items()},
        **counts,
        waits=others.get('waits', 0),
        exhausted=others.get('exhausted', 0),
        **now,
      )


class _Reservoir:
  """A fair sample of all numbers seen, of a fixed size.

  Algorithm R: Vitter, Random sampling with a reservoir, 1985.
  """

  def __init__(self) -> None:
    self._random = random.Random(0)
    self._kept: list[float] = []
    self._count = 0

  def add(self, value: float) -> None:
    self._count += 1
    if len(self._kept) < _KEPT:
      self._kept.append(value)
      return
    place = self._random.randrange(self._count)
    if place < _KEPT:
      self._kept[place] = value

  def times(self) -> Times:
    if not self._kept:
      return Times()
    ordered = sorted(self._kept)
    last = len(ordered) - 1
    middle = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
    return Times(self._count, middle, ordered[round(0.95 * last)])
