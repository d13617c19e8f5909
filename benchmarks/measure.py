"""Repetitions, medians and ratios; what the machine is and what it does.

Benchmarks. Knows no system: a measurement is a function that runs once and
returns what it saw, with its `seconds`. Systems that are compared take turns,
so that a slow minute of the machine falls on all of them.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Measurement = dict[str, Any]


def interleave(
  systems: Mapping[str, Callable[[int], Measurement]],
  repetitions: int,
  *,
  seconds_per_system: float = float('inf'),
  least: int = 3,
  first_run: bool = True,
) -> dict[str, list[Measurement]]:
  """Measures every system `repetitions` times, in turns.

  Each is run once before, for its compilations, and that is not counted; not
  if `first_run` is False, for systems that have compiled all there is.

  Args:
    systems: name -> function of the repetition's number (-1: the first run).
    seconds_per_system: one whose first run says that its repetitions would
      take longer than this is measured less often, but `least` times (or
      `repetitions` times where that is fewer).

  Returns:
    name -> measurements, each with `load`, the machine's 1-minute load
    average before it.
  """
  counts, out = {}, {name: [] for name in systems}
  for name, run in systems.items():
    began = time.perf_counter()
    if first_run:
      run(-1)
    took = time.perf_counter() - began
    affordable = int(min(seconds_per_system / max(took, 1e-9), repetitions))
    counts[name] = max(affordable, min(least, repetitions))
  names = list(systems)
  for i in range(repetitions):
    first = i % len(names)
    for name in names[first:] + names[:first]:
      if i < counts[name]:
        load = os.getloadavg()[0]
        out[name].append({**systems[name](i), 'load': round(load, 2)})
  return out


def median(measurements: Sequence[Measurement], key: str = 'seconds') -> float:
  return statistics.median(m[key] for m in measurements)


def figure(name: str, value: float) -> str:
  """The line by which a ratio is found in the output."""
  return f'figure {name} {value:.3f}'


def read_figures(text: str) -> dict[str, float]:
  """Name -> value of every `figure` line in an output."""
  found = re.findall(r'^figure (\w+) (\d+\.\d+)$', text, re.MULTILINE)
  return {name: float(value) for name, value in found}


def speedup(
  rows: Mapping[str, Sequence[Measurement]],
  other: str,
  ours: str = 'ours',
  key: str = 'seconds',
) -> float:
  """How many times faster ours is than the other, by medians."""
  return median(rows[other], key) / median(rows[ours], key)


def describe_machine() -> dict[str, Any]:
  """Processor, cores, memory, load averages: what numbers depend on."""
  return {
    'processor': _processor(),
    'cores': len(os.sched_getaffinity(0)),
    'memory_gib': round(
      os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30, 1
    ),
    'system': platform.system(),
    'load_before': [round(x, 2) for x in os.getloadavg()],
    'niceness': os.nice(0),
  }


def _processor() -> str:
  try:
    text = pathlib.Path('/proc/cpuinfo').read_text()
  except OSError:
    return platform.processor() or platform.machine()
  for line in text.splitlines():
    if line.startswith('model name'):
      return line.partition(':')[2].strip()
  return platform.machine()


def versions(names: Sequence[str]) -> dict[str, str]:
  """Versions of installed distributions, and of Python."""
  out = {name: importlib.metadata.version(name) for name in names}
  return {'python': platform.python_version(), **out}
