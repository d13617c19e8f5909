"""The loop of a peer's process: one JSON line in, one JSON line out.

Benchmarks, inside a peer's own virtual environment: this file and the two
workers import nothing of ours and no JAX of ours. A worker keeps its model
loaded between requests, so that repetitions of several systems can be
interleaved, and blocks on its input while others are measured.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def serve(
  requests: Mapping[str, Callable[..., dict[str, Any]]],
  packages: tuple[str, ...],
) -> None:
  """Answers requests until the input ends.

  A request is {"do": name, ...keyword arguments}; its answer is what the
  function returned, or {"error": traceback}. First of all the versions of
  `packages` are sent.
  """
  answers = os.fdopen(os.dup(1), 'w')
  # Whatever libraries print goes to the log, never between the answers.
  os.dup2(2, 1)

  def answer(message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message) + '\n')
    answers.flush()

  answer(
    {'versions': {name: importlib.metadata.version(name) for name in packages}}
  )
  for line in sys.stdin:
    request = json.loads(line)
    try:
      answer(requests[request.pop('do')](**request))
    except Exception:  # reported to the benchmark, which stops there
      answer({'error': traceback.format_exc()})


class Clock:
  """Seconds of wall time and of all threads' CPU time since it was made."""

  def __init__(self):
    self._wall, self._cpu = time.perf_counter(), time.process_time()

  def read(self) -> dict[str, float]:
    return {
      'seconds': time.perf_counter() - self._wall,
      'cpu_seconds': time.process_time() - self._cpu,
    }
