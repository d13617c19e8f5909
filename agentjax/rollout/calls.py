"""Calls of environments in threads, each with a bound on its time.

Floor 2, rollout/, under `collect`. A tool that hangs cannot be stopped from
outside, so it is left alone: its call is given up, another thread takes the
place of its own, and what it returns in the end is dropped. The threads are
daemons; none of them keeps the interpreter from its end. This file knows no
episode and no engine.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from agentjax.env.base import InfraError


class Hung(InfraError):
  """A call was given up: it did not come back within its bound."""


@dataclasses.dataclass(eq=False)
class Call:
  """One call, and what came of it.

  Attributes:
    name: for people. owner: whose call it is; None if nobody waits for it.
    late: called in its thread if it returns after it was given up.
    began: `time.monotonic()` when a thread took it.
    came_back: it returned or raised, within its bound. given_up: it did not.
  """

  name: str
  function: Callable[[], Any]
  owner: Any = None
  late: Callable[[], Any] = lambda: None
  began: float = 0.0
  came_back: bool = False
  given_up: bool = False
  value: Any = None
  error: BaseException | None = None

  def result(self) -> Any:
    """What it returned; raises what it raised."""
    if self.error is not None:
      raise self.error
    return self.value

  @property
  def is_over(self) -> bool:
    return self.came_back or self.given_up


class Calls:
  """Runs calls in at most `threads` threads, each for at most `seconds`.

  `submit` and `ended` are for one thread.

  Attributes:
    n_given_up: calls that hung.
  """

  def __init__(self, threads: int, seconds: float):
    if threads < 1 or not seconds > 0:
      raise ValueError(
        f'tool_threads {threads}, tool_seconds {seconds}: give 1 or more, and '
        'a positive number'
      )
    self._threads, self._seconds = threads, seconds
    self._ended: queue.SimpleQueue[Call] = queue.SimpleQueue()
    self._lock = threading.Lock()  # of the next three
    self._queued: deque[Call] = deque()
    self._running: dict[Call, None] = {}
    self._busy = 0  # threads that were not given up
    self.n_given_up = 0

  @property
  def n_open(self) -> int:
    """Calls that `ended` has not returned yet."""
    with self._lock:
      return len(self._queued) + len(self._running) + self._ended.qsize()

  def submit(self, call: Call) -> Call:
    """Runs a call as soon as there is a thread; `ended` returns it then."""
    with self._lock:
      self._queued.append(call)
      self._staff()
    return call

  def ended(self, block: bool) -> list[Call]:
    """Calls that ended, those given up among them; waits for one if asked to.

    It waits for nothing where there is no open call.
    """
    out = self._give_up()
    while True:
      wait = block and not out and self.n_open > 0
      try:
        # It looks for those that hang now and then, too.
        out.append(self._ended.get(wait, min(self._seconds, 1.0)))
      except queue.Empty:
        out += self._give_up()
        if out or not block or not self.n_open:
          return out

  def _staff(self) -> None:
    """Starts threads for what is queued, as many as there may be."""
    while self._queued and self._busy < self._threads:
      self._busy += 1
      threading.Thread(
        target=self._work, args=(self._take(),), name='agentjax-tool',
        daemon=True,
      ).start()  # fmt: skip

  def _take(self) -> Call | None:
    """The next call, if there is one; it counts as running from here on."""
    if not self._queued:
      return None
    call = self._queued.popleft()
    call.began = time.monotonic()
    self._running[call] = None
    return call

  def _work(self, call: Call | None) -> None:
    """A thread: one call after another, until none is queued."""
    while call is not None:
      value, error = _outcome(call.function)
      with self._lock:
        if not call.given_up:
          call.value, call.error, call.came_back = value, error, True
          del self._running[call]
          self._ended.put(call)
          call = self._take()
          if call is None:
            self._busy -= 1
          continue
      _outcome(call.late)
      return  # somebody else has its place

  def _give_up(self) -> list[Call]:
    """Calls that run for too long; other threads take their place."""
    now = time.monotonic()
    with self._lock:
      late = [c for c in self._running if now - c.began > self._seconds]
      for call in late:
        call.given_up = True
        call.error = Hung(
          f'{call.name} did not come back within {self._seconds} s: it is left '
          'alone, and what it returns is dropped; raise tool_seconds if it '
          'needs longer'
        )
        del self._running[call]
        self._busy -= 1
      self._staff()
    self.n_given_up += len(late)
    return late


def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
  """What a function returned, and what it raised."""
  try:
    return function(), None
  except BaseException as error:  # SystemExit too: no tool ends a run
    return None, error
