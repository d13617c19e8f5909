"""When to stop asking: a rate of infrastructure failures that is too high.

Floor 1, env/sandbox, used by the pool. It sees successes and failures and the
monotonic clock; it knows no sandbox.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque

from agentjax.env.base import InfraError


class BreakerOpen(InfraError):
  """Too many sandboxes failed lately; nothing is started for a while."""


class Breaker:
  """Opens when more than `most` of the last `window` outcomes are failures.

  An open one rests, begins with an empty window again, and rests twice as
  long if it has to open once more before a whole window went well.

  Args:
    base_s, most_s: the first rest and the longest, times a random factor from
      0.5 to 1.5.
    seed: of that factor.
  """

  def __init__(
    self,
    window: int = 50,
    most: float = 0.2,
    *,
    base_s: float = 5.0,
    most_s: float = 30.0,
    seed: int = 0,
  ):
    if window < 1 or not 0 < most <= 1:
      raise ValueError(
        f'window {window}, most {most}: give 1 or more, and a share above 0'
      )
    self.window, self.most = window, most
    self._base_s, self._most_s = base_s, most_s
    self._random = random.Random(seed)
    self._lock = threading.Lock()
    self._last: deque[str] = deque(maxlen=window)  # '' or a kind of failure
    self._in_a_row = 0
    self._until = 0.0
    self._seen: Counter[str] = Counter()
    self.opened = 0

  def note(self, error: InfraError | None) -> None:
    """One start or call went well, or failed."""
    with self._lock:
      self._last.append('' if error is None else type(error).__name__)
      kinds = Counter(filter(None, self._last))
      if sum(kinds.values()) > self.most * self.window:
        rest = min(self._base_s * 2**self._in_a_row, self._most_s)
        self._until = time.monotonic() + rest * self._random.uniform(0.5, 1.5)
        self._in_a_row += 1
        self.opened += 1
        self._seen = kinds
        self._last.clear()
      elif not kinds and len(self._last) == self.window:
        self._in_a_row = 0

  def rest(self) -> float:
    """Seconds for which nothing is to be started; 0 if it is closed."""
    return max(0.0, self._until - time.monotonic())

  def error(self) -> BreakerOpen:
    """What to tell whoever waited in vain."""
    failed = sum(self._seen.values())
    kinds = ', '.join(f'{n} {name}' for name, n in self._seen.most_common())
    return BreakerOpen(
      f'{failed} of the last {self.window} or fewer starts and calls failed by '
      f'infrastructure ({kinds}), more than {self.most:.0%}: nothing is '
      f'started for {self.rest():.0f} s more. Look at the engine and its disk, '
      'or start fewer at once'
    )
