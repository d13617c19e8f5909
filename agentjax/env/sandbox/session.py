"""A running runner as a Sandbox: what both backends have in common.

Floor 1, env/sandbox. A backend starts the runner somewhere, wraps the stream
to it in a `Channel`, and gives a `stop` function; everything from there on is
the same and lives here. This file does not know where the runner runs.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentjax.env.base import InfraError
from agentjax.env.sandbox.bounds import shielded
from agentjax.env.sandbox.channel import Channel
from agentjax.env.sandbox.spec import (
  Call,
  CallResult,
  CallStatus,
  Died,
  Fetched,
  ProtocolError,
  SandboxBug,
  SandboxSpec,
  as_text,
  classify,
)

_FILES_TIMEOUT_S = 30.0
_CLOSE_S = 8.0  # the reader's end, and twice what a backend takes at most
_MAX_FETCH = 60 << 20


def runner_program() -> str:
  """The runner's source, for `python3 -c`: no file has to be mounted."""
  return _source('runner.py')


def _source(name: str) -> str:
  package = importlib.resources.files('agentjax.env.sandbox')
  return package.joinpath(name).read_text('utf-8')


class RunnerSandbox:
  """A `Sandbox` over a started runner.

  Args:
    stop: ends every process of the sandbox; bounded, never raises.
    hit_limit: called when the sandbox has died in a call, with the monotonic
      time of the call's beginning and the kills for memory counted before it;
      the limit that was hit since, by the engine or the kernel, or None.
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
    self._lock = threading.Lock()
    self._closed = False
    self._failure: InfraError | None = None
    self._last_words: CallResult | None = None
    self._oom_kills = 0
    self._files_code = _source('files.py').encode()
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

  def put(self, files: Mapping[str, bytes], mode: int = 0o644) -> CallResult:
    """See `Sandbox.put`."""
    request = {
      'op': 'put',
      'files': [[_checked(path), len(data)] for path, data in files.items()],
      'mode': mode,
    }
    stdin = json.dumps(request).encode() + b'\n' + b''.join(files.values())
    header = self._files_header(4096)
    return self._run(header, (stdin, self._files_code), _FILES_TIMEOUT_S)

  def get(self, paths: Sequence[str], max_bytes: int = 8 << 20) -> Fetched:
    """See `Sandbox.get`."""
    if max_bytes > _MAX_FETCH:
      raise SandboxBug(f'max_bytes {max_bytes} is above {_MAX_FETCH}')
    request = {
      'op': 'get',
      'paths': [_checked(path) for path in paths],
      'max_bytes': max_bytes,
    }
    stdin = json.dumps(request).encode() + b'\n'
    header = self._files_header(max_bytes + 1024 * (1 + len(paths)))
    with self._lock:
      if self._last_words:
        return Fetched({}, {p: 'the sandbox is gone' for p in paths})
      reply, blobs = self._ask(
        header, (stdin, self._files_code), _FILES_TIMEOUT_S
      )
    status, _, _ = classify(reply)
    if status is not CallStatus.OK:
      return Fetched({}, {p: f'not read: {status.value}' for p in paths})
    return _split(paths, blobs[0] + blobs[1])

  @property
  def is_open(self) -> bool:
    """False if it was closed, failed, or its stream is known to have ended."""
    return not (self._closed or self._failure) and self._channel.is_open

  def close(self) -> None:
    """See `Sandbox.close`."""
    if not self._closed:
      shielded(_CLOSE_S, self._end)

  def __enter__(self) -> RunnerSandbox:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def _end(self) -> None:
    self._closed = True
    self._channel.shutdown()
    self._stop()

  def _files_header(self, cap: int) -> dict[str, Any]:
    return {
      'op': 'run',
      'argv': None,
      'timeout_s': _FILES_TIMEOUT_S,
      'output_cap': cap,
    }

  def _run(self, header, blobs, timeout_s) -> CallResult:
    start = time.monotonic()
    with self._lock:
      if self._last_words:
        return self._last_words
      try:
        reply, out = self._ask(header, blobs, timeout_s)
      except Died:
        limit = self._hit_limit(start, self._oom_kills)
        if limit is None:
          raise
        self._last_words = CallResult(limit, alive=False)
        return dataclasses.replace(
          self._last_words, duration_s=time.monotonic() - start
        )
      self._oom_kills += reply['oom']
    status, code, number = classify(reply)
    dropped = tuple(reply['dropped'])
    return CallResult(
      status,
      exit=code,
      signal=number or None,
      stdout=as_text(out[0], out[1], dropped[0]),
      stderr=as_text(out[2], out[3], dropped[1]),
      truncated=dropped,
      duration_s=time.monotonic() - start,
      reaped=reply['reaped'],
      alive=reply['alive'],
    )

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


def _checked(path: str) -> str:
  parts = path.split('/')
  if not path or '\0' in path or {'', '.', '..'} & set(parts):
    raise SandboxBug(
      f'path {path!r}: give one relative to workdir, without . and ..'
    )
  return path


def _split(paths: Sequence[str], data: bytes) -> Fetched:
  try:
    line, rest = data.split(b'\n', 1)
    sizes = json.loads(line)
    if len(sizes) != len(paths):
      raise ValueError(f'{len(sizes)} answers to {len(paths)} paths')
  except ValueError as error:
    raise ProtocolError(f'files came back unreadable: {error}') from error
  files, refused, at = {}, {}, 0
  for path, size in zip(paths, sizes, strict=True):
    if isinstance(size, str):
      refused[path] = size
    else:
      files[path] = rest[at : at + size]
      at += size
  return Fetched(files, refused)
