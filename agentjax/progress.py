"""One line that tells how a run goes.

Floor 2. On a terminal the line is rewritten; in a log file a new one comes
every few seconds, so that a night's run stays readable. It knows only the
numbers that it is given, and its own clock.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TextIO


class Progress:
  """Prints the state of a run of `total` steps, as a context manager.

  Args:
    total: number of steps, those before a resume included.
    stream: where to print; stderr if None.
    every: seconds between lines where the stream is no terminal; the first
      and the last step are always printed, and any that skips an update.
    clock: seconds that only go forward.
  """

  def __init__(
    self,
    total: int,
    *,
    stream: TextIO | None = None,
    every: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._total = total
    self._stream = sys.stderr if stream is None else stream
    self._every = every
    self._clock = clock
    self._terminal = self._stream.isatty()
    self._start = self._last = self._paced = clock()
    self._printed = -math.inf
    self._done = self._skipped = 0
    self._width = 0

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *unused) -> None:
    if self._terminal and self._width:
      self._stream.write('\n')
      self._stream.flush()

  def begin(self) -> None:
    """Tells that steps come next: what was before them is not their pace."""
    self._last = self._paced = self._clock()
    self._done = 0

  def done(self) -> None:
    """Tells that nothing is left to do."""
    self.note(f'done in {_duration(self._clock() - self._start)}')

  def note(self, text: str) -> None:
    """Prints a line of its own, where the rewritten one does not cover it."""
    wipe = f'\r{"":<{self._width}}\r' if self._terminal else ''
    self._stream.write(f'{wipe}{text}\n')
    self._stream.flush()
    self._width = 0

  def update(
    self,
    step: int,
    *,
    reward: float | None = None,
    success: float | None = None,
    kl: float | None = None,
    tokens: int | None = None,
    skipped: int = 0,
  ) -> None:
    """Tells that step number `step` (from 1) is done.

    `tokens` counts those of this step alone, `skipped` the updates of the
    whole run that came to nothing. What is None or 0 skipped is not shown. The
    time left is reckoned from the steps since `begin`.
    """
    now = self._clock()
    self._done += 1
    parts = [f'step {step}/{self._total}']
    for name, value, form in (
      ('reward', reward, '.3f'),
      ('success', success, '.1%'),
      ('kl', kl, '.2g'),
    ):
      if value is not None:
        parts.append(f'{name} {float(value):{form}}')
    if tokens is not None:
      rate = tokens / max(now - self._last, 1e-9)
      parts.append(f'{rate:,.0f} tokens/s')
    if skipped:
      parts.append(f'{skipped} updates skipped')
    if step < self._total:
      left = (now - self._paced) / self._done * (self._total - step)
      parts.append(f'{_duration(left)} left')
    else:
      parts.append('the last step')
    self._last = now
    always = step in (1, self._total) or skipped > self._skipped
    self._skipped = skipped
    self._print('  '.join(parts), now, always)

  def _print(self, line: str, now: float, always: bool) -> None:
    if self._terminal:
      # Spaces wipe the rest of a longer line before it.
      self._stream.write(f'\r{line:<{self._width}}')
      self._width = len(line)
    elif always or now - self._printed >= self._every:
      self._stream.write(f'{line}\n')
      self._printed = now
    else:
      return
    self._stream.flush()


def _duration(seconds: float) -> str:
  """59 as '59s', 61 as '1m01s', 3700 as '1h01m'."""
  seconds = round(seconds)
  if seconds < 60:
    return f'{seconds}s'
  if seconds < 3600:
    return f'{seconds // 60}m{seconds % 60:02d}s'
  return f'{seconds // 3600}h{seconds % 3600 // 60:02d}m'
