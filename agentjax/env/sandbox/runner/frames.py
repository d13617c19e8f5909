"""Frames between the runner and the host.

A frame is a big-endian uint32 (length of the rest), a uint32 (length of the
header), the header as JSON, and blobs whose lengths the header lists in
`blobs`. Requests carry `id` and `op`; replies carry `id`, `nonce` and facts,
which are judged on the host.
"""

import json
import os
import select
import struct
import time

MAX_FRAME = 64 << 20
_CHUNK = 1 << 16


class Link:
  """Frames over two file descriptors that no child inherits."""

  def __init__(self, fd_in, fd_out):
    self.fd_in, self.fd_out = fd_in, fd_out
    self.buffer = bytearray()
    self.end = None  # monotonic time at which the runner's life is over

  def fill(self):
    """Reads what is there; ends the runner where nothing will come again."""
    data = os.read(self.fd_in, _CHUNK)
    if not data or len(self.buffer) > MAX_FRAME + 8:
      os._exit(0)
    self.buffer += data

  def receive(self):
    """The next request: (header, blobs)."""
    while True:
      frame = self._take()
      if frame is not None:
        return frame
      left = None if self.end is None else self.end - time.monotonic()
      if left is not None and left <= 0:
        os._exit(0)
      if select.select([self.fd_in], [], [], left)[0]:
        self.fill()

  def _take(self):
    if len(self.buffer) < 8:
      return None
    total, head = struct.unpack_from('>II', self.buffer)
    if total > MAX_FRAME:
      os._exit(3)
    if len(self.buffer) < 4 + total:
      return None
    header = json.loads(bytes(self.buffer[8 : 8 + head]).decode())
    blobs, at = [], 8 + head
    for size in header.get('blobs', ()):
      blobs.append(bytes(self.buffer[at : at + size]))
      at += size
    del self.buffer[: 4 + total]
    return header, blobs

  def send(self, header, blobs):
    header = dict(header, blobs=[len(b) for b in blobs])
    head = json.dumps(header).encode()
    rest = struct.pack('>I', len(head)) + head + b''.join(blobs)
    data = memoryview(struct.pack('>I', len(rest)) + rest)
    while data:
      data = data[os.write(self.fd_out, data) :]
