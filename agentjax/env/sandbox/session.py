"""A running runner as a Sandbox: what both backends have in common.

Floor 1, env/sandbox. A backend starts the runner somewhere, wraps the stream
to it in a `Channel`, and gives a `stop` function; everything from there on is
the same and lives here. This file does not know where the runner runs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentjax.env.base import InfraError
from agentjax.env.sandbox.channel import Channel
from agentjax.env.sandbox.live import LiveSession
from agentjax.env.sandbox.snapshot import Snapshot
from agentjax.env.sandbox.spec import (
  Call,
  CallResult,
  CallStatus,
  Died,
  Fetched,
  SandboxBug,
  SandboxSpec,
  as_text,
  classify,
)
from agentjax.env.sandbox.transfer import Transfer

_FILES_TIMEOUT_S = 30.0
_MAX_SESSIONS = 8


# In the order in which they need each other.
_RUNNER = ('', 'frames', 'streams', 'counters', 'processes', 'interpreter')
_RUNNER += ('shell', 'children', 'sessions', 'watch', 'serve')
# A child comes back here, with nothing of the runner's on its stack.
_LOADER = """\
import os, sys, types
for name, source in {modules!r}:
  module = types.ModuleType(name)
  module.__package__, module.__path__ = '_runner', []
  sys.modules[name] = module
  exec(compile(source, '<' + name + '>', 'exec'), module.__dict__)
  if '.' in name:
    setattr(sys.modules['_runner'], name.split('.')[1], module)
try:
  sys.modules['_runner.serve'].main()
except sys.modules['_runner.processes'].Become as child:
  then = child.then
os._exit(then())
"""


def runner_program() -> str:
  """The runner, for `python3 -c`: no file has to be mounted.

  Its modules stand in it as text; a loader of a few lines makes them a
  package named _runner.
  """
  modules = []
  for name in _RUNNER:
    text = _source(f'runner/{name or "__init__"}.py')
    modules.append((f'_runner.{name}'.rstrip('.'), text))
  return _LOADER.format(modules=modules)


@functools.cache
def _source(name: str) -> str:
  package = importlib.resources.files('agentjax.env.sandbox')
  return package.joinpath(name).read_text('utf-8')


class RunnerSandbox:
  """A `Sandbox` over a started runner.

  Args:
    stop: ends every process of the sandbox; bounded, never raises.
    hit_limit: called when the sandbox has died in a call, with the wall clock
      at the call's beginning and the kills for memory counted before it; the
      limit that was hit since, by the engine or the kernel, or None.
    said: what is known of a death beside the end of the stream.
  """

  def __init__(
    self,
    spec: SandboxSpec,
    channel: Channel,
    facts: Mapping[str, Any],
    *,
    rlimits: Mapping[str, int],
    stop: Callable[[], None],
    hit_limit: Callable[[float, int], CallStatus | None],
    said: Callable[[], str] = str,
    start_timeout_s: float = 60.0,
  ):
    self.spec = spec
    self.facts = dict(facts)
    self._channel = channel
    self._stop = stop
    self._hit_limit, self._said = hit_limit, said
    self._lock = threading.RLock()
    self._transfer = Transfer(spec, self._carry_files)
    self._closed = False
    self._failure: InfraError | None = None
    self._last_words: CallResult | None = None
    self._oom_kills = 0
    self._sessions: list[LiveSession] = []
    self._count = 0
    hello = {
      'op': 'hello',
      'nonce': channel.nonce,
      'limits': spec.runner_limits(rlimits),
    }
    reply, blobs = self._ask(hello, (), start_timeout_s)
    status, _, _ = classify(reply)
    if status is not CallStatus.OK:
      self.close()
      raise Died(
        f'the runner cannot start children ({status.value}): '
        f'{b"".join(blobs[2:]).decode("utf-8", "replace")}'
      )
    self.facts['python'] = reply['python']
    self.facts['shell'] = reply['shell']
    self.facts['counted'] = sorted(
      name for name, n in reply['counters'].items() if n is not None
    )

  def call(self, call: Call) -> CallResult:
    """See `Sandbox.call`."""
    header = {
      'op': 'run',
      'timeout_s': call.timeout_s,
      'output_cap': self.spec.output_cap,
      'argv': None if call.argv is None else list(call.argv),
    }
    code = (call.code or '').encode('utf-8', 'replace')
    return self._run(header, (call.stdin, code), call.timeout_s)

  def session(self, kind: str) -> LiveSession:
    """See `Sandbox.session`."""
    self._sessions = [s for s in self._sessions if s.alive]
    if len(self._sessions) >= _MAX_SESSIONS:
      raise SandboxBug(
        f'{_MAX_SESSIONS} sessions are open in this sandbox: close one'
      )
    self._count += 1
    cap = self.spec.output_cap
    session = LiveSession(kind, self._count, cap, self._run)
    self._sessions.append(session)
    return session

  def put(self, files: Mapping[str, bytes], mode: int = 0o644) -> CallResult:
    """See `Sandbox.put`."""
    with self._lock:
      return self._transfer.put(files, mode)

  def get(self, paths: Sequence[str], max_bytes: int = 8 << 20) -> Fetched:
    """See `Sandbox.get`."""
    with self._lock:
      return self._transfer.get(paths, max_bytes)

  def put_tar(self, data: bytes) -> CallResult:
    """See `Sandbox.put_tar`."""
    with self._lock:
      return self._transfer.put_tar(data)

  def get_tar(
    self, paths: Sequence[str], max_bytes: int = 8 << 20
  ) -> tuple[bytes, dict[str, str]]:
    """See `Sandbox.get_tar`."""
    with self._lock:
      return self._transfer.get_tar(paths, max_bytes)

  def snapshot(self, max_bytes: int | None = None) -> Snapshot:
    """See `Sandbox.snapshot`."""
    with self._lock:
      return self._transfer.snapshot(max_bytes)

  def restore(self, snapshot: Snapshot) -> None:
    """Makes the files of a snapshot, in a sandbox that has run nothing yet.

    Raises:
      SandboxBug: it is of another workdir, damaged, or does not fit.
    """
    with self._lock:
      self._transfer.restore(snapshot)

  def close(self) -> None:
    """See `Sandbox.close`."""
    if not self._closed:
      self._closed = True
      self._channel.shutdown()
      self._stop()

  def __enter__(self) -> RunnerSandbox:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def _carry_files(self, request, contents, cap) -> tuple[CallResult, bytes]:
    stdin = json.dumps(request).encode() + b'\n' + b''.join(contents)
    code = _source('files.py').encode()
    header = {
      **{'op': 'run', 'argv': None},
      **{'timeout_s': _FILES_TIMEOUT_S, 'output_cap': cap},
    }
    result, out = self._exchange(header, (stdin, code), _FILES_TIMEOUT_S)
    return result, out[0] + out[1]

  def _run(self, header, blobs, timeout_s) -> CallResult:
    return self._exchange(header, blobs, timeout_s)[0]

  def _exchange(self, header, blobs, timeout_s):
    """(result, the blobs that it was made from)."""
    start, began = time.monotonic(), time.time()
    with self._lock:
      if self._last_words:
        return self._last_words, (b'',) * 4
      try:
        reply, out = self._ask(header, blobs, timeout_s)
      except Died:
        limit = self._hit_limit(began, self._oom_kills)
        if limit is None:
          raise
        self._last_words = CallResult(limit, alive=False)
        return dataclasses.replace(
          self._last_words, duration_s=time.monotonic() - start
        ), (b'',) * 4
      self._oom_kills += reply['oom']
    status, code, number = classify(reply)
    dropped = tuple(reply['dropped'])
    result = CallResult(
      status,
      exit=code,
      signal=number or None,
      stdout=as_text(out[0], out[1], dropped[0]),
      stderr=as_text(out[2], out[3], dropped[1]),
      truncated=dropped,
      duration_s=time.monotonic() - start,
      reaped=reply['reaped'],
      alive=reply['alive'],
      session_alive=reply.get('session_alive', True),
    )
    return result, out

  def _ask(self, header, blobs, timeout_s):
    if self._closed:
      raise SandboxBug(f'{header["op"]!r} on a closed sandbox')
    if self._failure:
      raise self._failure
    try:
      reply, out = self._channel.ask(
        header, blobs, timeout_s=timeout_s + self.spec.grace_s
      )
    except InfraError as error:
      if isinstance(error, Died):
        error = Died(f'{error} {self._said()}'.strip())
      self._failure = error
      self._channel.shutdown()
      if not isinstance(error, Died):
        self._stop()
      raise error from None
    if not reply['alive']:  # its lifetime ended in this call
      self._last_words = CallResult(CallStatus.TIMEOUT, alive=False)
    return reply, out
