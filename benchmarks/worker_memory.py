"""Time of one call, and memory of one, inside the process that makes it.

Benchmarks; peers' workers import it, so it needs nothing but the standard
library and `worker`. Memory is read as Linux tells it.
"""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Callable
from typing import Any

from benchmarks.worker import Clock


def timed(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
  """What the call returns, with its `seconds` and `cpu_seconds`."""
  clock = Clock()
  found = call()
  return {**clock.read(), **found}


def held(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
  """What the call returns, with the process's memory; not to be timed.

  `before_bytes` is resident before it, `peak_bytes` the most that was resident
  until its end. Freed memory is given back first: else it would count as held
  before, in a process whose allocator keeps it.
  """
  ctypes.CDLL(None).malloc_trim(0)
  pathlib.Path('/proc/self/clear_refs').write_text('5')  # the peak's mark
  before = _status('VmRSS')
  found = call()
  return {'before_bytes': before, 'peak_bytes': _status('VmHWM'), **found}


def _status(field: str) -> int:
  """Bytes of a field of /proc/self/status."""
  for line in pathlib.Path('/proc/self/status').read_text().splitlines():
    name, _, value = line.partition(':')
    if name == field:
      return int(value.split()[0]) * 1024
  raise RuntimeError(f'/proc/self/status has no {field}: Linux is needed')
