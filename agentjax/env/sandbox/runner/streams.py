"""What a call writes: two ends of each stream, kept while it is drained.

And what it is fed. Descriptors here are the runner's own ends of pipes, and do
not block.
"""

import os

_CHUNK = 1 << 16


class Capture:
  """Keeps the first and the last bytes of a stream and counts the rest."""

  def __init__(self, cap):
    self.head_cap = cap // 4
    self.tail_cap = cap - self.head_cap
    self.head, self.tail = bytearray(), bytearray()
    self.seen = 0

  def add(self, data):
    self.seen += len(data)
    room = self.head_cap - len(self.head)
    self.head += data[:room]
    self.tail += data[room:]
    if len(self.tail) > 2 * self.tail_cap + _CHUNK:
      del self.tail[: len(self.tail) - self.tail_cap]

  def parts(self):
    """(head, tail, number of bytes dropped between them)."""
    tail = bytes(self.tail[max(0, len(self.tail) - self.tail_cap) :])
    return bytes(self.head), tail, self.seen - len(self.head) - len(tail)


class Mark:
  """Waits for a session's word that its call is over: a line `TOKEN CODE`.

  The token is new for each call. The policy's code can say the word itself,
  and so end its own call early; it cannot say that of another.
  """

  def __init__(self, fd, token):
    self.fd, self.token, self.code = fd, token, None
    self._line = b''

  def read(self):
    """Takes in what is there; False where nothing will come again."""
    try:
      data = os.read(self.fd, _CHUNK)
    except BlockingIOError:
      return True
    *lines, self._line = (self._line + data).split(b'\n')
    self._line = self._line[-256:]
    for line in lines:
      token, _, code = line.partition(b' ')
      if token == self.token.encode() and self.code is None:
        known = code.isdigit() and len(code) < 4
        self.code = int(code) & 0xFF if known else 1
    return bool(data)


def take(fd, capture):
  """One read from `fd`; False at its end."""
  try:
    data = os.read(fd, _CHUNK)
  except BlockingIOError:
    return True
  capture.add(data)
  return bool(data)


def drain(fd, capture=None):
  """Reads `fd` until nothing is there."""
  while True:
    try:
      data = os.read(fd, _CHUNK)
    except BlockingIOError:
      return
    if not data:
      return
    if capture is not None:
      capture.add(data)


def feed(fd, data):
  """Writes what fits; what is left, empty if nobody reads any more."""
  try:
    return data[os.write(fd, data[:_CHUNK]) :]
  except BlockingIOError:
    return data
  except BrokenPipeError:
    return data[:0]


def make_pipe():
  """(read end, write end), which /dev/stdout may open again."""
  ends = os.pipe()
  # It belongs to the runner's uid, and the child may have another.
  os.fchmod(ends[0], 0o666)
  return ends
