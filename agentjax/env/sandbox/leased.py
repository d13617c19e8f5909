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


class LeasedSession:
  """A session in a leased sandbox, whose calls count like any others."""

  def __init__(self, inner: Any, timed: Callable[..., Any]):
    self._inner, self._timed = inner, timed
    self.kind = inner.kind

  @property
  def alive(self) -> bool:
    return self._inner.alive

  def run(self, text: str, timeout_s: float = 30.0) -> CallResult:
    """See `Session.run`."""
    return self._timed(self._inner.run, text, timeout_s)

  def close(self) -> None:
    """See `Session.close`."""
    self._inner.close()


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

  def session(self, kind: str) -> LeasedSession:
    """See `Sandbox.session`."""
    return LeasedSession(self._timed(self._inner.session, kind), self._timed)

  def put_tar(self, data: bytes) -> CallResult:
    """See `Sandbox.put_tar`."""
    return self._timed(self._inner.put_tar, data)

  def get_tar(
    self, paths: Sequence[str], max_bytes: int = 8 << 20
  ) -> tuple[bytes, Mapping[str, str]]:
    """See `Sandbox.get_tar`."""
    return self._timed(self._inner.get_tar, paths, max_bytes)

  def snapshot(self, *arguments: Any) -> Any:
    """See `Sandbox.snapshot`."""
    return self._timed(self._inner.snapshot, *arguments)

  def restore(self, snapshot: Any) -> None:
    """Begins with the files of a snapshot, as `open_sandbox(snapshot=...)`."""
    self._timed(self._inner.restore, snapshot)

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
