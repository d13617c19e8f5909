"""The host's end of a session: an interpreter that lives on over calls.

Floor 1, env/sandbox, made by `session.py`. It knows that its interpreter can
end and remembers why; how calls are carried is `RunnerSandbox`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentjax.env.base import InfraError
from agentjax.env.sandbox.spec import (
  CallResult,
  CallStatus,
  SandboxBug,
  check_timeout,
)

KINDS = ('python', 'shell')
_OPEN_TIMEOUT_S = 10.0
# (header, blobs, timeout_s) -> result
Carry = Callable[[Mapping[str, Any], Sequence[bytes], float], CallResult]


class LiveSession:
  """A `Session` that a runner keeps under `number`."""

  def __init__(self, kind: str, number: int, output_cap: int, carry: Carry):
    if kind not in KINDS:
      raise SandboxBug(f'session kind {kind!r}: choose python or shell')
    self.kind = kind
    self._number, self._output_cap, self._carry = number, output_cap, carry
    self._why = ''
    self._ask('open', (), _OPEN_TIMEOUT_S)

  @property
  def alive(self) -> bool:
    """See `Session`."""
    return not self._why

  def run(self, text: str, timeout_s: float = 30.0) -> CallResult:
    """See `Session.run`."""
    check_timeout('timeout_s', timeout_s)
    if not self.alive:
      return self._gone()
    return self._ask('say', (text.encode('utf-8', 'replace'),), timeout_s)

  def close(self) -> None:
    """See `Session.close`."""
    if self.alive:
      self._why = 'closed'
      with contextlib.suppress(InfraError, SandboxBug):  # gone with all else
        self._carry(self._header('close', 0.0), (), _OPEN_TIMEOUT_S)

  def __enter__(self) -> LiveSession:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def _ask(self, op, blobs, timeout_s) -> CallResult:
    result = self._carry(self._header(op, timeout_s), blobs, timeout_s)
    if result.status is CallStatus.GONE:
      self._why = 'another call ended it'
      return self._gone()
    if not (result.alive and result.session_alive):
      exited = result.status in (CallStatus.OK, CallStatus.NONZERO)
      code = f'exit code {result.exit}'
      self._why = code if exited else result.status.value
    return result

  def _header(self, op, timeout_s) -> dict[str, Any]:
    return {
      'op': op,
      'session': self._number,
      'kind': self.kind,
      'timeout_s': timeout_s,
      'output_cap': self._output_cap,
    }

  def _gone(self) -> CallResult:
    return CallResult(
      CallStatus.GONE,
      stderr=f'the session is gone ({self._why}): open a new one\n',
      session_alive=False,
    )
