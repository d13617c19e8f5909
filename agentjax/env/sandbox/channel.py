"""The host's end of the runner's frames: one socket, one reader thread.

Floor 1, env/sandbox, used by the backends. It knows frames, ids, the nonce
and deadlines; it does not know containers, nor what a reply means.

The reader thread takes in whatever comes at once and always: an attached
stream that nobody reads can block a whole container engine. Deadlines are
kept by the host's monotonic clock, because a frozen sandbox sends no error.
"""

from __future__ import annotations

import json
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.env.sandbox.spec import (
  Died,
  HostDeadline,
  ProtocolError,
  SandboxBug,
)

MAX_FRAME = 64 << 20
_MAX_FOREIGN = 3
_STDERR_KEPT = 4096


class Channel:
  """Requests and replies over a socket to a runner.

  `multiplexed` says that the stream comes in a container engine's packets of
  8 bytes of header, stdout and stderr apart.
  """

  def __init__(self, sock: socket.socket, multiplexed: bool):
    sock.setblocking(True)
    self.nonce = secrets.token_hex(16)
    self.foreign = 0
    self._sock = sock
    self._stderr = bytearray()
    self._replies: queue.SimpleQueue = queue.SimpleQueue()
    self._count = 0
    parse = self._demultiplex() if multiplexed else self._frames()
    next(parse)
    self._reader = threading.Thread(
      target=self._read, args=(parse,), name='sandbox-reader', daemon=True
    )
    self._reader.start()

  def ask(
    self,
    header: Mapping[str, Any],
    blobs: Sequence[bytes] = (),
    *,
    timeout_s: float,
  ) -> tuple[dict[str, Any], list[bytes]]:
    """Sends a request and waits for its reply.

    Raises:
      Died: the stream ended. HostDeadline: no reply in `timeout_s`.
      ProtocolError: the reply cannot be read, or is not the runner's.
      SandboxBug: the request is too big.
    """
    deadline = time.monotonic() + timeout_s
    self._count += 1
    request = dict(header, id=self._count, blobs=[len(b) for b in blobs])
    head = json.dumps(request).encode()
    size = 4 + len(head) + sum(len(b) for b in blobs)
    if size > MAX_FRAME:
      raise SandboxBug(
        f'a request of {size} bytes is above {MAX_FRAME}: send less at once'
      )
    parts = [struct.pack('>II', size, len(head)), head, *blobs]
    self._send(b''.join(parts), deadline)
    while True:
      try:
        reply = self._replies.get(timeout=max(0, deadline - time.monotonic()))
      except queue.Empty:
        raise HostDeadline(
          f'no reply to {header["op"]!r} within {timeout_s:.1f} s'
        ) from None
      if isinstance(reply, Exception):
        self._replies.put(reply)  # for whoever asks next
        raise reply
      facts, out = reply
      if facts.get('id') == self._count and facts.get('nonce') == self.nonce:
        return facts, out
      self.foreign += 1
      if self.foreign >= _MAX_FOREIGN:
        raise ProtocolError(
          f'{self.foreign} replies with a foreign id or nonce: something else '
          'than the runner writes to its stream'
        )

  @property
  def is_open(self) -> bool:
    """False once the stream has ended or broken."""
    return self._reader.is_alive()

  def shutdown(self) -> None:
    """Ends the stream, which ends the runner; wakes the reader. Idempotent."""
    try:
      # close() alone leaves an engine's stream open while a thread reads it.
      self._sock.shutdown(socket.SHUT_RDWR)
    except OSError:
      pass  # the other side was faster
    self._reader.join(timeout=2)
    self._sock.close()

  def stderr(self) -> str:
    """What the runner itself said last: a traceback, if it crashed."""
    return bytes(self._stderr).decode('utf-8', 'replace').strip()

  def _send(self, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    poll = select.poll()
    try:
      poll.register(self._sock, select.POLLOUT)
      while view:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
          raise HostDeadline(f'{len(view)} bytes could not be sent in time')
        try:
          view = view[self._sock.send(view, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
          continue
    except (OSError, ValueError) as error:
      self._reader.join(timeout=1)  # it may still be taking in the reason
      raise Died(f'the sandbox is gone: {error}. {self.stderr()}') from error

  def _read(self, parse) -> None:
    try:
      while data := self._sock.recv(1 << 16):
        parse.send(data)
      reason: Exception = Died(f'the sandbox ended. {self.stderr()}'.strip())
    except OSError as error:
      reason = Died(f'the stream to the sandbox broke: {error}')
    except ProtocolError as error:
      reason = error
    self._replies.put(reason)

  def _frames(self):
    """Coroutine: is sent bytes, puts replies into the queue."""
    buffer = bytearray()
    while True:
      buffer += yield
      while len(buffer) >= 8:
        size, head = struct.unpack_from('>II', buffer)
        if size > MAX_FRAME + (1 << 20) or head > size - 4:
          raise ProtocolError(
            f'a reply claims {size} bytes with a header of {head}'
          )
        if len(buffer) < 4 + size:
          break
        self._replies.put(_decode(bytes(buffer[4 : 4 + size])))
        del buffer[: 4 + size]

  def _demultiplex(self):
    """Coroutine: is sent an engine's packets, passes stdout on."""
    frames = self._frames()
    next(frames)
    buffer = bytearray()
    while True:
      buffer += yield
      while len(buffer) >= 8:
        stream, size = struct.unpack_from('>BxxxI', buffer)
        if stream > 2:
          raise ProtocolError(f'the engine sent a packet of stream {stream}')
        if len(buffer) < 8 + size:
          break
        if stream == 2:
          self._stderr += buffer[8 : 8 + size]
          del self._stderr[:-_STDERR_KEPT]
        else:
          frames.send(bytes(buffer[8 : 8 + size]))
        del buffer[: 8 + size]


def _decode(rest: bytes) -> tuple[dict[str, Any], list[bytes]]:
  (head,) = struct.unpack_from('>I', rest)
  try:
    facts = json.loads(rest[4 : 4 + head].decode())
    sizes = facts['blobs']
  except (ValueError, KeyError, TypeError) as error:
    raise ProtocolError(f'a reply has no readable header: {error}') from error
  blobs, at = [], 4 + head
  for size in sizes:
    blobs.append(rest[at : at + size])
    at += size
  if at != len(rest):
    raise ProtocolError(
      f'a reply of {len(rest)} bytes lists {at} bytes of contents'
    )
  return facts, blobs
