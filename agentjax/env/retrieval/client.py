"""A retriever behind a URL: any server that speaks the released protocol.

Floor 1, env. A server that is slow, gone or garbles is the infrastructure's
trouble: it is asked again, a bounded number of times within a bounded time,
and then the episode fails as `InfraError`; nothing of it becomes a reward.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import threading
import time
import urllib.parse
from collections.abc import Sequence

from agentjax.env.base import InfraError
from agentjax.env.retrieval import wire
from agentjax.env.retrieval.passages import Passage, check_topk

_MAX_ANSWER = 64 << 20


class Remote:
  """Asks a server. Implements `Retriever`; safe to use from many threads.

  Args:
    url: such as http://host:8000/retrieve.
    timeout_s: of one attempt, from connecting to the last byte.
    attempts: at most. Between them it waits, `backoff_s` at first and twice as
      long each time, half of it by chance, so that clients do not come back
      together.
    at_once: requests under way; further callers wait for `wait_s` at most.

  All in all a call takes at most wait_s + attempts * timeout_s + backoff_s *
  (2 ** (attempts - 1) - 1) seconds.
  """

  def __init__(
    self,
    url: str,
    *,
    timeout_s: float = 10.0,
    attempts: int = 3,
    backoff_s: float = 0.5,
    at_once: int = 16,
    wait_s: float = 60.0,
  ):
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ('http', 'https') or not parts.hostname:
      raise ValueError(
        f'retrieval url {url!r}: give http://host:port{wire.PATH}'
      )
    if min(timeout_s, attempts, at_once) <= 0 or min(backoff_s, wait_s) < 0:
      raise ValueError(
        f'timeout_s {timeout_s}, attempts {attempts}, at_once {at_once}, '
        f'backoff_s {backoff_s}, wait_s {wait_s}: give numbers above 0'
      )
    self._url, self._parts = url, parts
    self._timeout_s, self._attempts = timeout_s, attempts
    self._backoff_s, self._wait_s = backoff_s, wait_s
    self._places = threading.BoundedSemaphore(at_once)
    self._chance = random.Random()  # decides when, never what

  def __call__(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
    """See `Retriever`."""
    check_topk(topk)
    if not queries:
      return []
    if not self._places.acquire(timeout=self._wait_s):
      raise InfraError(
        f'{self._url}: no place among the requests under way in '
        f'{self._wait_s:g} s'
      )
    try:
      return self._ask(wire.request(queries, topk), len(queries), topk)
    finally:
      self._places.release()

  def _ask(self, body: bytes, n: int, topk: int) -> list[list[Passage]]:
    for attempt in range(self._attempts):
      if attempt:
        longest = self._backoff_s * 2 ** (attempt - 1)
        time.sleep(longest * (1 + self._chance.random()) / 2)
      try:
        return wire.read_answer(self._exchange(body), n, topk)
      except (OSError, http.client.HTTPException, wire.Garbled) as error:
        trouble = f'{type(error).__name__}: {error}'
    raise InfraError(
      f'{self._url} failed {self._attempts} times, at last by {trouble}'
    )

  def _exchange(self, body: bytes) -> bytes:
    """One attempt: the answer's body, all of it within `timeout_s`."""
    kind = (
      http.client.HTTPSConnection
      if self._parts.scheme == 'https'
      else http.client.HTTPConnection
    )
    connection = kind(
      self._parts.hostname, self._parts.port, timeout=self._timeout_s
    )
    # A server that sends a byte a second is as slow as one that sends none,
    # and the timeout of a socket is one of each byte.
    cut = threading.Timer(self._timeout_s, _shut, [connection])
    cut.daemon = True
    cut.start()
    try:
      path = self._parts.path or '/'
      if self._parts.query:
        path += f'?{self._parts.query}'
      headers = {'Content-Type': 'application/json'}
      connection.request('POST', path, body, headers)
      response = connection.getresponse()
      if response.status != 200:
        raise wire.Garbled(f'status {response.status}')
      answer = response.read(_MAX_ANSWER + 1)
      if len(answer) > _MAX_ANSWER:
        raise wire.Garbled(f'an answer of more than {_MAX_ANSWER} bytes')
      if response.length:  # what was announced and did not come
        raise wire.Garbled(f'{response.length} bytes are missing')
      return answer
    finally:
      cut.cancel()
      connection.close()


def _shut(connection: http.client.HTTPConnection) -> None:
  """Ends a connection under whoever reads from it."""
  with contextlib.suppress(OSError, AttributeError):
    connection.sock.shutdown(socket.SHUT_RDWR)
