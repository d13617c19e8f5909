"""Sandboxes whose calls are recorded, and sandboxes made of such a record.

Floor 1, env/sandbox. `Recording` stands before a sandbox of any backend and
writes down each request with what came of it; `Replaying` serves such a record
without any engine, byte for byte. The record is a value of
`agentjax.sandbox_record`. No backend is known here, no environment and no
file.

A recorded result is the truth: nothing learns from running it again, which
`verification.py` does.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentjax import sandbox_record
from agentjax.env.base import InfraError
from agentjax.env.sandbox import operations
from agentjax.env.sandbox.snapshot import Snapshot
from agentjax.env.sandbox.spec import (
  Call,
  CallResult,
  Fetched,
  Sandbox,
  SandboxSpec,
  Session,
)
from agentjax.sandbox_record import Operation, SandboxRecord

# The first operation of a sandbox that was opened with a snapshot.
RESTORE = 'restore'
# Of contents that one record keeps. What is over it is kept as a hash.
MAX_BYTES = 4 << 20


class Diverged(InfraError):
  """A replayed sandbox was asked something else than the recorded one.

  A kind of InfraError although no machine failed: nothing that was asked of
  the policy explains it, so that an episode that meets it must end without a
  reward, and that is the class which promises it.

  Attributes:
    index: of the operation. expected, got: what was recorded and asked, short.
  """

  def __init__(self, index: int, expected: str, got: str):
    super().__init__(
      f'operation {index} of a replayed sandbox diverged: recorded is '
      f'{expected}, asked for was {got}'
    )
    self.index, self.expected, self.got = index, expected, got


class NoResult(InfraError):
  """The record cannot serve this: it was over its bound, or never answered."""


class Recording:
  """A `Sandbox` that passes everything on to another and writes it down.

  Args:
    sandbox: an open one; closing this closes it.
    max_bytes: of bytes and long texts that the record keeps, in the order in
      which they come; each that has no more room is kept as its hash, and a
      replay says that it cannot serve it.
    begun_from: the snapshot that it was opened with, if it was.
  """

  def __init__(
    self,
    sandbox: Sandbox,
    max_bytes: int = MAX_BYTES,
    begun_from: Snapshot | None = None,
  ):
    self.spec, self.facts = sandbox.spec, sandbox.facts
    self._sandbox = sandbox
    self._spec = dataclasses.asdict(sandbox.spec)
    self._chain = sandbox_record.first_link(self._spec)
    self._blobs = sandbox_record.Blobs(max_bytes)
    self._operations: list[Operation] = []
    self._sessions = 0
    self._lock = threading.Lock()  # the order of the record is that of calls
    self._open: Operation | None = None  # has not come back yet
    if begun_from is not None:
      self.ask(RESTORE, operations.to_json(begun_from), dict, dict)

  def record(self) -> SandboxRecord:
    """What has passed so far; from any thread, also while a call hangs."""
    unanswered, answered = self._open, tuple(self._operations)
    # It may have come back between the two.
    if unanswered and unanswered.chain not in {o.chain for o in answered[-1:]}:
      answered = (*answered, unanswered)
    return SandboxRecord(
      self._spec, dict(self.facts), answered, dict(self._blobs.kept)
    )

  def call(self, call: Call) -> CallResult:
    """See `Sandbox.call`."""
    return self.ask(
      'call', operations.call(call), lambda: self._sandbox.call(call)
    )

  def session(self, kind: str) -> RecordedSession:
    """See `Sandbox.session`."""
    session = self.ask(
      'session',
      {'kind': kind},
      lambda: self._sandbox.session(kind),
      lambda opened: {'alive': opened.alive},
    )
    self._sessions += 1
    return RecordedSession(self, session, self._sessions - 1)

  def put(self, files: Mapping[str, bytes], mode: int = 0o644) -> CallResult:
    """See `Sandbox.put`."""
    return self.ask(
      'put', operations.put(files, mode), lambda: self._sandbox.put(files, mode)
    )

  def get(self, paths: Sequence[str], max_bytes: int = 8 << 20) -> Fetched:
    """See `Sandbox.get`."""
    return self.ask(
      'get',
      operations.get(paths, max_bytes),
      lambda: self._sandbox.get(paths, max_bytes),
    )

  def put_tar(self, data: bytes) -> CallResult:
    """See `Sandbox.put_tar`."""
    return self.ask(
      'put_tar', {'data': data}, lambda: self._sandbox.put_tar(data)
    )

  def get_tar(
    self, paths: Sequence[str], max_bytes: int = 8 << 20
  ) -> tuple[bytes, Mapping[str, str]]:
    """See `Sandbox.get_tar`."""
    request = operations.get(paths, max_bytes)
    return self.ask(
      'get_tar', request, lambda: self._sandbox.get_tar(paths, max_bytes)
    )

  def snapshot(self, max_bytes: int | None = None) -> Snapshot:
    """See `Sandbox.snapshot`."""
    request = {'max_bytes': max_bytes}
    return self.ask(
      'snapshot', request, lambda: self._sandbox.snapshot(max_bytes)
    )

  def close(self) -> None:
    """See `Sandbox.close`."""
    self._sandbox.close()

  def __enter__(self) -> Recording:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def ask(
    self,
    name: str,
    request: Any,
    run: Callable[[], Any],
    as_json: Callable[[Any], Any] = operations.to_json,
  ) -> Any:
    """Runs one operation and writes it down, also if it raises."""
    with self._lock:
      request = sandbox_record.pack(request, self._blobs.add)
      self._chain = sandbox_record.link(self._chain, name, request)
      self._open = Operation(name, request, self._chain)
      start = time.monotonic()
      try:
        value = run()
      except BaseException as error:
        took = time.monotonic() - start
        self._answered(took, error=(type(error).__name__, str(error)))
        raise
      packed = sandbox_record.pack(as_json(value), self._blobs.add)
      took = getattr(value, 'duration_s', time.monotonic() - start)
      self._answered(took, result=packed)
      return value

  def _answered(self, took: float, **came: Any) -> None:
    whole = dataclasses.replace(self._open, duration_s=took, **came)
    self._operations.append(whole)
    self._open = None


class RecordedSession:
  """A `Session` of a `Recording`, by the number of its opening."""

  def __init__(self, recording: Recording, session: Session, number: int):
    self.kind = session.kind
    self._recording, self._session = recording, session
    self._number = number

  @property
  def alive(self) -> bool:
    """See `Session`."""
    return self._session.alive

  def run(self, text: str, timeout_s: float = 30.0) -> CallResult:
    """See `Session.run`."""
    request = operations.session_run(self._number, text, timeout_s)
    return self._recording.ask(
      'session.run', request, lambda: self._session.run(text, timeout_s)
    )

  def close(self) -> None:
    """See `Session.close`."""
    if self.alive:
      request = {'session': self._number}
      self._recording.ask(
        'session.close', request, self._session.close, lambda _: {}
      )

  def __enter__(self) -> RecordedSession:
    return self

  def __exit__(self, *exc) -> None:
    self.close()


class Replaying:
  """A `Sandbox` that is a record: what is asked of it must be what was.

  Raises, of every method but `close`:
    Diverged: another request than the recorded one. NoResult: the right one,
      whose result is not in the record. What the recorded sandbox raised.
  """

  def __init__(self, record: SandboxRecord):
    self.spec = SandboxSpec(**record.spec)
    self.facts = dict(record.facts)
    self._record = record
    self._chain = sandbox_record.first_link(record.spec)
    self._index = self._sessions = 0
    self._lock = threading.Lock()
    if record.operations and record.operations[0].name == RESTORE:
      # Nobody asks for it: what it began with was there from the beginning.
      self._chain, self._index = record.operations[0].chain, 1

  @property
  def left(self) -> int:
    """Operations that were recorded and not asked for yet."""
    return len(self._record.operations) - self._index

  def call(self, call: Call) -> CallResult:
    """See `Sandbox.call`."""
    return self.ask('call', operations.call(call))

  def session(self, kind: str) -> ReplayingSession:
    """See `Sandbox.session`."""
    alive = self.ask('session', {'kind': kind})['alive']
    self._sessions += 1
    return ReplayingSession(self, kind, self._sessions - 1, alive)

  def put(self, files: Mapping[str, bytes], mode: int = 0o644) -> CallResult:
    """See `Sandbox.put`."""
    return self.ask('put', operations.put(files, mode))

  def get(self, paths: Sequence[str], max_bytes: int = 8 << 20) -> Fetched:
    """See `Sandbox.get`."""
    return self.ask('get', operations.get(paths, max_bytes))

  def put_tar(self, data: bytes) -> CallResult:
    """See `Sandbox.put_tar`."""
    return self.ask('put_tar', {'data': data})

  def get_tar(
    self, paths: Sequence[str], max_bytes: int = 8 << 20
  ) -> tuple[bytes, Mapping[str, str]]:
    """See `Sandbox.get_tar`."""
    return self.ask('get_tar', operations.get(paths, max_bytes))

  def snapshot(self, max_bytes: int | None = None) -> Snapshot:
    """See `Sandbox.snapshot`."""
    return self.ask('snapshot', {'max_bytes': max_bytes})

  def close(self) -> None:
    """See `Sandbox.close`; there is nothing to end."""

  def __enter__(self) -> Replaying:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def ask(self, name: str, request: Any) -> Any:
    """The recorded answer to the next request, if it is this one."""
    with self._lock:
      index, operation = self._index, self._expected(name, request)
      if operation.error is not None:
        raise operations.raised(*operation.error)
      if operation.result is None:
        raise NoResult(f'operation {index} ({name}) had no result yet')
      try:
        found = sandbox_record.unpack(operation.result, self._record.blobs)
      except sandbox_record.NotKept as error:
        raise NoResult(f'operation {index} ({name}): {error}') from error
      return operations.from_json(name, found, operation.duration_s)

  def _expected(self, name: str, request: Any) -> Operation:
    """The next operation; the record goes on only if it is the one asked."""
    blobs = sandbox_record.Blobs(sys.maxsize)
    asked = sandbox_record.pack(request, blobs.add)
    if not self.left:
      raise Diverged(self._index, 'nothing more', f'a {name}')
    operation = self._record.operations[self._index]
    chain = sandbox_record.link(self._chain, name, asked)
    if chain != operation.chain:
      was, now = operation.name, name
      if was == now:
        seen = {**self._record.blobs, **blobs.kept}
        field, a, b = next(
          operations.differences(operation.request, asked, seen)
        )
        was, now = f'{was} with {field} {a}', f'{field} {b}'
      raise Diverged(self._index, was, now)
    self._chain, self._index = chain, self._index + 1
    return operation


class ReplayingSession:
  """A `Session` of a `Replaying`, by the number of its opening."""

  def __init__(self, replaying: Replaying, kind: str, number: int, alive: bool):
    self.kind, self.alive = kind, alive
    self._replaying, self._number = replaying, number

  def run(self, text: str, timeout_s: float = 30.0) -> CallResult:
    """See `Session.run`."""
    request = operations.session_run(self._number, text, timeout_s)
    result = self._replaying.ask('session.run', request)
    self.alive = self.alive and result.alive and result.session_alive
    return result

  def close(self) -> None:
    """See `Session.close`."""
    if self.alive:
      self.alive = False
      self._replaying.ask('session.close', {'session': self._number})

  def __enter__(self) -> ReplayingSession:
    return self

  def __exit__(self, *exc) -> None:
    self.close()


class ReplayingOpener:
  """Opens the sandboxes of an episode again, in the order of their opening."""

  def __init__(self, records: Sequence[SandboxRecord]):
    self._records = records
    self.opened: list[Replaying] = []

  def __call__(self) -> Replaying:
    """The next one.

    Raises:
      Diverged: no more were opened when it was recorded.
    """
    n = len(self.opened)
    if n >= len(self._records):
      raise Diverged(0, f'{n} sandboxes', 'one more')
    self.opened.append(Replaying(self._records[n]))
    return self.opened[-1]
