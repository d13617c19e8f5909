"""The policy's sandbox, with what a judge will ask about it.

Floor 1, env/judge. Tools use it as any `Sandbox`. It is opened at the first
call, with the task's files in it, and remembers what was run and how the last
call ended; `hand_in` ends it. It knows neither tools nor tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentjax.env.base import InfraError
from agentjax.env.judge.judgement import Reason, failed
from agentjax.env.judge.submission import Rule, Submission, take
from agentjax.env.sandbox import (
  Call,
  CallResult,
  CallStatus,
  Fetched,
  Opener,
  Sandbox,
  SandboxSpec,
  Session,
  Snapshot,
)


class Workplace:
  """Implements `Sandbox`, for one episode.

  Args:
    open_sandbox: opens a fresh one with the limits of `spec`.
    given: files that the policy finds in its folder.
  """

  def __init__(
    self, spec: SandboxSpec, open_sandbox: Opener, given: Mapping[str, bytes]
  ):
    self.spec = spec
    self._open, self._given = open_sandbox, dict(given)
    self._sandbox: Sandbox | None = None
    self._closed = False
    self._last: CallResult | None = None
    self._commands: list[str] = []
    self._sessions: list[Session] = []

  @property
  def facts(self) -> Mapping[str, Any]:
    """See `Sandbox`; empty before the first call."""
    return {} if self._sandbox is None else self._sandbox.facts

  def call(self, call: Call) -> CallResult:
    """See `Sandbox`."""
    said = call.code if call.argv is None else ' '.join(call.argv)
    return self._remember(said or '', self._opened().call(call))

  def session(self, kind: str) -> Session:
    """See `Sandbox`."""
    session = _Remembered(self._opened().session(kind), self._remember)
    self._sessions.append(session)
    return session

  def put(self, files: Mapping[str, bytes], mode: int = 0o644) -> CallResult:
    """See `Sandbox`."""
    return self._opened().put(files, mode)

  def get(self, paths: Sequence[str], max_bytes: int = 8 << 20) -> Fetched:
    """See `Sandbox`."""
    return self._opened().get(paths, max_bytes)

  def put_tar(self, data: bytes) -> CallResult:
    """See `Sandbox`."""
    return self._opened().put_tar(data)

  def get_tar(
    self, paths: Sequence[str], max_bytes: int = 8 << 20
  ) -> tuple[bytes, Mapping[str, str]]:
    """See `Sandbox`."""
    return self._opened().get_tar(paths, max_bytes)

  def snapshot(self, max_bytes: int | None = None) -> Snapshot:
    """See `Sandbox`."""
    return self._opened().snapshot(max_bytes)

  def hand_in(self, rule: Rule) -> Submission:
    """What the policy hands in; its sandbox is dead afterwards.

    Raises:
      InfraError: of the sandbox.
    """
    try:
      if self._sandbox is None:
        return Submission({}, failed(Reason.MISSING, 'no call was made'))
      for session in self._sessions:
        session.close()  # frozen, it would still take room from the look
      return take(
        self._sandbox,
        rule,
        self._given,
        last=self._last,
        commands=self._commands,
      )
    finally:
      self.close()

  def close(self) -> None:
    """See `Sandbox`."""
    self._closed = True
    if self._sandbox is not None:
      self._sandbox.close()

  def __enter__(self) -> Workplace:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def _remember(self, said: str, result: CallResult) -> CallResult:
    self._commands.append(said)
    self._last = result
    return result

  def _opened(self) -> Sandbox:
    if self._closed:
      raise InfraError('the sandbox of this episode was closed')
    if self._sandbox is None:
      self._sandbox = self._open()
      put = self._sandbox.put(self._given)
      if put.status is not CallStatus.OK:
        raise InfraError(
          f'the files of the task do not fit the sandbox: {put.stderr}'
        )
    return self._sandbox


class _Remembered:
  """A session whose calls are remembered."""

  def __init__(
    self, session: Session, remember: Callable[[str, CallResult], CallResult]
  ):
    self.kind = session.kind
    self._session, self._remember = session, remember

  @property
  def alive(self) -> bool:
    return self._session.alive

  def run(self, text: str, timeout_s: float = 30.0) -> CallResult:
    return self._remember(text, self._session.run(text, timeout_s))

  def close(self) -> None:
    self._session.close()
