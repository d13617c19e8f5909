"""The time of a call: feeds and drains its process until it is over."""

import os
import select
import time

from .processes import reap
from .streams import drain, feed, take


class Watched:
  """How a call ended, before anything is killed.

  Attributes:
    end: 'exit', 'timeout' or 'output'; a session's word counts as an exit.
    status: wait status, or None where the process was not seen to end.
    ended: {pid: wait status} of all who ended meanwhile.
  """

  def __init__(self, end, status, ended):
    self.end, self.status, self.ended = end, status, ended


class Feed:
  """Bytes for a child's stdin, and the pipe to it, closed when all is sent."""

  def __init__(self, fd, data):
    self.fd, self.data = fd, memoryview(data)
    if not data:
      self.close()

  def write(self):
    """Writes what fits; False once nothing is left."""
    self.data = feed(self.fd, self.data)
    if not self.data:
      self.close()
    return bool(self.data)

  def close(self):
    if self.fd is not None:
      os.close(self.fd)
    self.fd = None


def watch(link, wake, pid, streams, deadline, output_kill, source):
  """Waits for the end of a call.

  Args:
    link: whose end of file ends the runner. wake: what SIGCHLD writes to.
    streams: {descriptor: Capture}, drained all the time.
    output_kill: bytes in all of them that end the call.
    source: Feed of a program's stdin, or Mark of a session.
  """
  ended = {}

  def woken():
    drain(wake)
    ended.update(reap())
    return True

  def host():
    link.fill()  # ends the runner if the host is gone
    return True

  poll, calls = select.poll(), {link.fd_in: host, wake: woken}
  for fd, capture in streams.items():
    calls[fd] = _reader(fd, capture)
  marks = not isinstance(source, Feed)
  if marks:
    calls[source.fd] = source.read
  for fd in calls:
    poll.register(fd, select.POLLIN)
  if not marks and source.fd is not None:
    calls[source.fd] = source.write
    poll.register(source.fd, select.POLLOUT)
  while True:
    left = deadline - time.monotonic()
    for fd, _ in poll.poll(max(0.0, left * 1000)):
      if not calls[fd]():
        poll.unregister(fd)
    if pid in ended:
      return Watched('exit', ended[pid], ended)
    if marks and source.code is not None:
      return Watched('exit', source.code << 8, ended)
    if sum(c.seen for c in streams.values()) > output_kill:
      return Watched('output', None, ended)
    if time.monotonic() >= deadline:
      return Watched('timeout', None, ended)


def _reader(fd, capture):
  return lambda: take(fd, capture)
