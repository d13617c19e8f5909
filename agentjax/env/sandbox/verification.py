"""Records of sandboxes run again on live ones: what comes out otherwise.

Floor 1, env/sandbox. It says how far a backend, an image or a machine is the
one that was recorded. The recorded results stay the truth: nothing learns from
these. No backend is known here: how to open a sandbox is given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable

from agentjax import sandbox_record
from agentjax.env.base import InfraError
from agentjax.env.sandbox import operations
from agentjax.env.sandbox.replay import RESTORE, Recording
from agentjax.env.sandbox.snapshot import Snapshot
from agentjax.env.sandbox.spec import (
  Sandbox,
  SandboxBug,
  SandboxSpec,
  Session,
)
from agentjax.sandbox_record import Operation, SandboxRecord

# Sandboxes fix the hash seed, the time zone, the locale, the host's name, the
# user and the environment. They cannot fix these, and a program that prints
# them differs when it is run again:
VARIES = (
  'the clock, and how long anything takes',
  'process ids and the order in which processes run',
  'addresses in memory (ASLR), and what is made of them: id(), default reprs',
  'random numbers of the kernel: os.urandom, uuid4, unseeded generators',
  'the order in which a folder is listed, and inode numbers',
  'processors, memory and kernel as /proc shows them',
  'what a program wrote before a limit of time or memory struck',
)


@dataclasses.dataclass(frozen=True)
class Difference:
  """One thing that came out otherwise. `expected` and `got` are short."""

  index: int
  name: str
  field: str
  expected: str
  got: str

  def __str__(self) -> str:
    return (
      f'{self.index} {self.name}.{self.field}: {self.expected} -> {self.got}'
    )


@dataclasses.dataclass(frozen=True)
class Verified:
  """What a re-execution found.

  Attributes:
    compared: operations that were run again. Those at which the recorded
      sandbox itself failed are not.
  """

  compared: int = 0
  differences: tuple[Difference, ...] = ()

  @property
  def differing(self) -> int:
    """Operations that differ in anything."""
    return len({d.index for d in self.differences})


def verify(
  record: SandboxRecord, open_sandbox: Callable[..., Sandbox]
) -> Verified:
  """Runs a record again on a live sandbox; what came out otherwise.

  All but durations and the number of processes left behind is compared;
  contents that were over the record's bound by their hash.

  Args:
    open_sandbox: opens one with the limits of the record, which it is called
      with; and with `snapshot` where the recorded one began with files.

  Raises:
    InfraError: no sandbox could be opened. A failure later on is a difference.
  """
  found: list[Difference] = []
  again: list[tuple[int, Operation]] = []
  todo, begun_from = [], None
  for i, was in enumerate(record.operations):
    if was.result is None:  # the recorded sandbox had failed
      continue
    try:
      request = sandbox_record.unpack(was.request, record.blobs)
    except sandbox_record.NotKept as error:
      found.append(Difference(i, was.name, 'request', 'kept', str(error)))
      continue
    again.append((i, was))
    if was.name == RESTORE:
      begun_from = operations.snapshot_from_json(request)
    else:
      todo.append((was.name, request))
  spec = SandboxSpec(**record.spec)
  new = _performed(open_sandbox, spec, begun_from, todo)
  seen = {**record.blobs, **new.blobs}
  for (i, was), now in zip(again, new.operations, strict=True):
    if now.error is not None:
      said = ': '.join(now.error)
      found.append(Difference(i, was.name, 'error', 'none', said))
      continue
    found += [
      Difference(i, was.name, *difference)
      for difference in operations.differences(was.result, now.result, seen)
    ]
  n = sum(o.result is not None for o in record.operations)
  return Verified(n, tuple(sorted(found, key=lambda d: d.index)))


def _performed(
  open_sandbox: Callable[..., Sandbox],
  spec: SandboxSpec,
  begun_from: Snapshot | None,
  requests: list[tuple[str, dict]],
) -> SandboxRecord:
  """The record of these requests, made anew."""
  options = {} if begun_from is None else {'snapshot': begun_from}
  opened = open_sandbox(spec, **options)
  sessions: list[Session] = []
  with Recording(opened, sys.maxsize, begun_from) as live:
    for name, request in requests:
      with contextlib.suppress(InfraError, SandboxBug):  # it is written down
        operations.perform(live, sessions, name, request)
    return live.record()
