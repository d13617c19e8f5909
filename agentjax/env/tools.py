"""The tools: a calculator, and Python in a sandbox.

Floor 1, env. A tool is given arguments that a policy wrote and returns text
that it reads. What the policy did wrong is `ToolError`; a program of its own
that fails is no error of the call, but something to read. Neither tool knows
an environment.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from agentjax.env import integers
from agentjax.env import sandbox as sandboxes
from agentjax.env.base import ToolError
from agentjax.env.sandbox import (
  Call,
  CallResult,
  CallStatus,
  Opener,
  Sandbox,
  SandboxSpec,
  choose_backend,
)
from agentjax.env.sandbox.replay import Recording
from agentjax.sandbox_record import SandboxRecord
from agentjax.types import ToolSpec

_MAX_CODE = 20_000
# Everything below the blank but tab and line feed, and delete.
_UNPRINTABLE = {code: '\ufffd' for code in (*range(9), *range(11, 32), 127)}


class Calculator:
  """Integers, `+ - *` and brackets; `max_operations` of them in one call.

  The expression has a bounded length, so that numbers stay small.
  """

  def __init__(self, max_operations: int = 1):
    if max_operations < 1:
      raise ValueError(f'max_operations is {max_operations}: at least 1')
    self.max_operations = max_operations
    number = 'one operation' if max_operations == 1 else 'operations'
    self.spec = ToolSpec(
      'calculator',
      f'Computes {number} (+, - or *) on integers, for example 12*34.',
      {
        'type': 'object',
        'properties': {'expression': {'type': 'string'}},
        'required': ['expression'],
      },
    )

  def __call__(self, arguments: Mapping[str, Any]) -> str:
    """See `Tool`."""
    text = text_argument(arguments, 'expression', integers.MAX_CHARS)
    try:
      return str(integers.evaluate(text, max_operations=self.max_operations))
    except ValueError as error:
      raise ToolError(str(error)) from None


class PythonTool:
  """Runs Python code in a sandbox that is opened at the first call.

  Files stay from call to call, variables do not.

  Args:
    spec, backend: of the sandbox, as in `open_sandbox`.
    timeout_s: of one call.
    max_chars: of the text that comes back.
    sandbox: an open one to use instead, which stays the caller's to close.
    open_sandbox: opens one instead, such as a Pool; `spec` and `backend` have
      no meaning then.

  Raises:
    SandboxUnavailable: no sandbox can run here; at construction, so that a
      run ends before it starts. What `open_sandbox` raises comes with a call.
  """

  def __init__(
    self,
    spec: SandboxSpec | None = None,
    backend: str = 'auto',
    *,
    timeout_s: float = 10.0,
    max_chars: int = 2000,
    sandbox: Sandbox | None = None,
    open_sandbox: Opener | None = None,
  ):
    if sandbox is not None and open_sandbox is not None:
      raise ValueError('sandbox and open_sandbox: give at most one of them')
    self._shared = sandbox
    self._own: Recording | None = None
    if sandbox is None and open_sandbox is None:
      spec = spec or SandboxSpec()
      open_sandbox = functools.partial(
        sandboxes.open_sandbox, spec, choose_backend(spec, backend)
      )
    self._open = open_sandbox
    self._timeout_s = timeout_s
    self._max_chars = max_chars
    self.spec = ToolSpec(
      'python',
      'Runs Python code and returns what it prints.',
      {
        'type': 'object',
        'properties': {'code': {'type': 'string'}},
        'required': ['code'],
      },
    )

  def __call__(self, arguments: Mapping[str, Any]) -> str:
    """See `Tool`."""
    code = text_argument(arguments, 'code', _MAX_CODE)
    sandbox = self._shared or self._own
    if sandbox is None:
      sandbox = self._own = Recording(self._open())
    result = sandbox.call(Call(code=code, timeout_s=self._timeout_s))
    return readable(result, self._timeout_s, self._max_chars)

  def sandbox_records(self) -> tuple[SandboxRecord, ...]:
    """What passed between this tool and the sandbox that it opened."""
    return () if self._own is None else (self._own.record(),)

  def close(self) -> None:
    """Closes the sandbox that this tool opened. Idempotent, never raises."""
    if self._own is not None:
      self._own.close()


def text_argument(arguments: Any, name: str, max_chars: int) -> str:
  """The one argument `name` of a call.

  Raises:
    ToolError: there are others, it is absent, not text, empty or too long.
  """
  if not isinstance(arguments, Mapping) or set(arguments) != {name}:
    raise ToolError(f'give exactly one argument: {name}')
  text = arguments[name]
  if not isinstance(text, str) or not text.strip():
    raise ToolError(f'{name} must be non-empty text')
  if len(text) > max_chars:
    raise ToolError(f'{name} has {len(text)} characters, at most {max_chars}')
  return text


def readable(result: CallResult, timeout_s: float, max_chars: int) -> str:
  """What a policy reads of a call: its output, and how it failed if it did.

  Of an exception the last line alone. Valid text of at most `max_chars`
  characters, in which control characters became U+FFFD.
  """
  failures = {
    CallStatus.TIMEOUT: f'timed out after {timeout_s:g} s',
    CallStatus.OOM: 'out of memory',
    CallStatus.PIDS: 'too many processes',
    CallStatus.OUTPUT_CAP: 'too much output',
    CallStatus.DISK: 'disk full',
    CallStatus.SIGNAL: f'ended by signal {result.signal}',
  }
  output = result.stdout.rstrip('\n')
  if result.status is CallStatus.OK:
    return bounded(output or '(no output)', max_chars)
  said = result.stderr.strip().rsplit('\n', 1)[-1]
  reason = failures.get(result.status)
  if reason is None:
    reason = said or f'exit code {result.exit}'
  if not result.alive:
    reason += '; the sandbox is gone'
  reason = bounded(f'error: {reason}', max(max_chars // 2, 40))
  if not output:
    return bounded(reason, max_chars)
  room = max(max_chars - len(reason) - 1, 0)
  return bounded(f'{bounded(output, room)}\n{reason}', max_chars)


def bounded(text: str, max_chars: int) -> str:
  """`text` without control characters, its middle left out if too long."""
  text = text.translate(_UNPRINTABLE)
  text = text.encode('utf-8', 'replace').decode('utf-8')  # lone surrogates
  if len(text) <= max_chars:
    return text
  # The mark's own length depends on the number in it by a digit at most.
  mark = f'\n[... {len(text)} characters, cut ...]\n'
  room = max_chars - len(mark)
  if room < 2:
    return text[:max_chars]
  head = room // 2
  return text[:head] + mark + text[len(text) - (room - head) :]
