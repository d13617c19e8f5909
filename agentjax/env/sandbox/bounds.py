"""Functions with a bound on their time, whatever they do with it.

Floor 1, env/sandbox. What asks a container engine for something may hang, and
what ends a sandbox must not be cut off halfway by a person's Ctrl-C: both are
run in a thread of their own, by the monotonic clock. Knows no sandbox.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
  ended = _run(function, seconds, shield=False)
  if ended is None:
    raise Overdue(f'no answer within {seconds:g} s')
  value, error = ended
  if error is not None:
    raise error
  return value


def shielded(seconds: float, function: Callable[[], object]) -> bool:
  """Runs `function` to its end, KeyboardInterrupt or not.

  Waits for it `seconds` at most; False if it has not ended then, in which
  case it goes on in its thread. An interrupt while it runs is raised after
  that, and so is what the function raises.
  """
  ended = _run(function, seconds, shield=True)
  if ended is not None and ended[1] is not None:
    raise ended[1]
  return ended is not None


def _run(function, seconds, shield):
  """(value, error) of a function, or None if it is not done in time."""
  done, once = [], threading.Lock()

  def work():
    if not once.acquire(blocking=False):
      return  # an interrupt had the thread started twice
    try:
      done.append((function(), None))
    except BaseException as error:
      done.append((None, error))

  # A daemon: what hangs shall not keep the interpreter from its end.
  thread = threading.Thread(target=work, name='sandbox-bound', daemon=True)
  deadline = time.monotonic() + seconds
  interrupt = None
  while True:
    try:
      if thread.ident is None:
        thread.start()
      thread.join(max(0.0, deadline - time.monotonic()))
      break
    except KeyboardInterrupt as error:
      if not shield:
        raise
      interrupt = error
    except RuntimeError:
      # An interrupt came between the start and its confirmation.
      if interrupt is None:
        raise
      time.sleep(0.001)
  if interrupt is not None:
    raise interrupt
  return done[0] if done else None
