"""The process of one call, and its pipes.

It is forked before the call is there, as soon as the last one is over, and
waits to be told: that is half of what a call costs. It waits with the policy's
rights, while no process of the policy's runs.
"""

import marshal
import os
import signal

from . import interpreter
from .processes import Become, become_child, become_program, set_signals
from .streams import make_pipe

_CONTROL = 3


class Child:
  """A child that waits for `tell`.

  Raises:
    OSError: the kernel refuses a process.
  """

  def __init__(self, limits):
    pipes = os.pipe(), make_pipe(), make_pipe(), os.pipe()
    theirs = (pipes[0][0], pipes[1][1], pipes[2][1], pipes[3][0])
    self.stdin, self.out, self.err, self.control = (
      *(pipes[0][1], pipes[1][0], pipes[2][0], pipes[3][1]),
    )
    for fd in (self.stdin, self.out, self.err):
      os.set_blocking(fd, False)
    refused = None
    try:  # no `finally`: the child would pass through it
      self.pid = fork(limits, dict(enumerate(theirs)), _wait_and_become)
    except OSError as error:
      refused = error
    for fd in theirs:
      os.close(fd)
    if refused is not None:
      self.close()
      raise refused

  def tell(self, argv, code):
    """Says what to run. One that has been killed meanwhile does not care."""
    data = memoryview(marshal.dumps((argv, code)))
    try:
      while data:
        data = data[os.write(self.control, data) :]
    except BrokenPipeError:
      pass
    os.close(self.control)
    self.control = None

  def has_ended(self):
    """True of one that was killed while it waited."""
    return os.waitpid(self.pid, os.WNOHANG)[0] != 0

  def discard(self):
    """Ends one that has not been told anything."""
    os.kill(self.pid, signal.SIGKILL)
    os.waitpid(self.pid, 0)
    self.close()

  def close(self):
    for fd in (self.stdin, self.out, self.err, self.control):
      if fd is not None:
        os.close(fd)


def fork(limits, fds, become):
  """The pid of a child, which ends up in what `become(limits)` makes of it."""
  pid = os.fork()
  if pid == 0:
    become_child(limits, fds)
    raise Become(become(limits))
  return pid


def _wait_and_become(limits):
  parts = []
  while True:
    part = os.read(_CONTROL, 1 << 16)
    if not part:
      break
    parts.append(part)
  os.close(_CONTROL)
  argv, code = marshal.loads(b''.join(parts))
  set_signals(argv is not None)
  if argv is not None:
    become_program(argv, limits['env'])
  return lambda: interpreter.run_program(code)
