"""Functions with a bound on their time, whatever they do with it.

Floor 1, env/sandbox. What asks a container engine for something may hang, and
what ends a sandbox must not be cut off halfway by a person's Ctrl-C: both are
run in a thread of their own, by the monotonic clock. Knows no sandbox.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar('T')


class Overdue(Exception):
  """A function did not come back in time; its thread is left to itself."""


def within(seconds: float, function: Callable[[], T]) -> T:
  """What `function` returns or raises, if it does so in time.

  Raises:
    Overdue: it did not. It goes on in its thread, and what it does there is
      dropped: give it timeouts of its own too, so that it ends some time.
  """
  outcome = _run(function, seconds, shield=False)
  if outcome is None:
    raise Overdue(f'no answer within {seconds:g} s')
  value, error = outcome
  if error is not None:
    raise error
  return value


def shielded(seconds: float, function: Callable[[], object]) -> bool:
  """Runs `function` to its end, KeyboardInterrupt or not.

  Waits for it `seconds` at most; False if it has not ended then, in which
  case it goes on in its thread. An interrupt while it runs is raised after
  that, and so is what the function raises.
  """
  outcome = _run(function, seconds, shield=True)
  if outcome is not None and outcome[1] is not None:
    raise outcome[1]
  return outcome is not None


def together(threads: int, functions: Iterable[Callable[[], object]]) -> None:
  """Runs all `functions`, which raise nothing, in at most `threads` at once."""
  left = deque(functions)

  def work() -> None:
    while left:
      try:
        function = left.popleft()
      except IndexError:
        return
      function()

  others = [
    threading.Thread(target=work, name='sandbox-bound', daemon=True)
    for _ in range(threads - 1)
  ]
  for thread in others:
    _start(thread, work)
  work()
  for thread in others:
    if thread.ident is not None:
      thread.join()


def _run(function, seconds, shield):
  """(value, error) of a function, or None if it is not done in time."""
  done, once, ended = [], threading.Lock(), threading.Event()

  def work():
    if not once.acquire(blocking=False):
      return  # an interrupt had the thread started twice
    try:
      done.append((function(), None))
    except BaseException as error:
      done.append((None, error))
    ended.set()

  # A daemon: what hangs shall not keep the interpreter from its end.
  thread = threading.Thread(target=work, name='sandbox-bound', daemon=True)
  deadline = time.monotonic() + seconds
  interrupt = None
  while True:
    try:
      if thread.ident is None:
        _start(thread, work)
      # Not join(): an interrupt makes it take a living thread for an ended one.
      ended.wait(max(0.0, deadline - time.monotonic()))
      break
    except KeyboardInterrupt as error:
      if not shield:
        raise
      interrupt = error
  if interrupt is not None:
    raise interrupt
  return done[0] if done else None


def _start(thread: threading.Thread, work: Callable[[], None]) -> None:
  """Starts a thread; does its work here where no more can be had."""
  try:
    thread.start()
  except RuntimeError:  # at the interpreter's end, or an interrupted start
    work()
