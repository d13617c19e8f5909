"""A sandbox that an episode has got from a pool.

Floor 1, env/sandbox. It is the sandbox inside, and tells the pool what every
call took and how it ended. Closing it destroys the sandbox inside: nothing is
ever used by two episodes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentjax.env.base import InfraError
from agentjax.env.sandbox.spec import (
  Call,
  CallResult,
  CallStatus,
  Fetched,
  Sandbox,
  SandboxSpec,
)

_KILLS = (
  CallStatus.TIMEOUT,
  CallStatus.OOM,
  CallStatus.PIDS,
  CallStatus.OUTPUT_CAP,
  CallStatus.DISK,
)


class Leased:
  """Implements `Sandbox`.

  Args:
    spec: that was asked for; the one inside may live longer.
    called: told of each call: seconds, its kill or '', its failure or None.
    ended: told once, when nothing is left of the one inside: the reason.
  """

  def __init__(
    self,
    inner: Sandbox,
    spec: SandboxSpec,
    facts: Mapping[str, Any],
    *,
    called: Callable[[float, str, InfraError | None], None],
    ended: Callable[[Leased, str], None],
  ):
    self.spec = spec
    self.facts = {**inner.facts, **facts}
    self._inner = inner
    self._called, self._ended = called, ended
    self._lock = threading.Lock()
    self._over = False
    self._reason = 'closed'

  def call(self, call: Call) -> CallResult:
    """See `Sandbox.call`."""
    return self._timed(self._inner.call, call)

  def put(self, files: Mapping[str, bytes], mode: int = 0o644) -> CallResult:
    """See `Sandbox.put`."""
    return self._timed(self._inner.put, files, mode)

  def get(self, paths: Sequence[str], max_bytes: int = 8 << 20) -> Fetched:
    """See `Sandbox.get`."""
    return self._timed(self._inner.get, paths, max_bytes)

  def close(self, reason: str = '') -> None:
    """See `Sandbox.close`; `reason` is the pool's, for its counts."""
    with self._lock:
      if self._over:
        return
      self._over = True
    try:
      self._inner.close()
    finally:
      self._ended(self, reason or self._reason)

  def __enter__(self) -> Leased:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def _timed(self, function: Callable[..., Any], *arguments: Any) -> Any:
    began = time.monotonic()
    try:
      result = function(*arguments)
    except InfraError as error:
      self._reason = 'failed'
      self._called(time.monotonic() - began, '', error)
      raise
    status = getattr(result, 'status', None)
    kill = status.value if status in _KILLS else ''
    self._called(time.monotonic() - began, kill, None)
    return result
