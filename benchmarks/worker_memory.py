"""Time and memory of one call, inside the process that makes it.

Benchmarks; imported by peers' workers, and so by itself: it imports nothing
but the standard library and `worker`. Linux alone.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from benchmarks.worker import Clock


def measured(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
  """What the call returns, its seconds, and the process's memory.

  `before_bytes` is resident before it, `peak_bytes` the most that was resident
  until its end. The kernel's mark of the peak is set back before the call.
  """
  pathlib.Path('/proc/self/clear_refs').write_text('5')
  before = _status('VmRSS')
  clock = Clock()
  found = call()
  return {
    **clock.read(),
    'before_bytes': before,
    'peak_bytes': _status('VmHWM'),
    **found,
  }


def _status(field: str) -> int:
  """Bytes of a field of /proc/self/status."""
  for line in pathlib.Path('/proc/self/status').read_text().splitlines():
    name, _, value = line.partition(':')
    if name == field:
      return int(value.split()[0]) * 1024
  raise RuntimeError(f'/proc/self/status has no {field}: Linux is needed')
