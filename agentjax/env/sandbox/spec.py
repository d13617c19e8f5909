"""What a sandbox is to its callers: limits, calls, results, errors.

Floor 1, env/sandbox. Tools and verifiers speak to this file only; the
backends (`docker.py`, `bwrap.py`) implement `Sandbox`. What the policy's code
did is a value, `CallResult`; what the infrastructure failed to do is an
exception, a kind of `InfraError`. That split is the whole taxonomy: it
decides what may teach the policy something. Nothing here knows a backend.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentjax.env.base import InfraError
from agentjax.env.sandbox.snapshot import Snapshot

DEFAULT_IMAGE = 'agentjax-python:latest'
_LONGEST_S = 1e6  # of a call; clocks and queues count no further than 1e9


class SandboxUnavailable(InfraError):
  """No backend can run here."""


class EngineUnavailable(InfraError):
  """The container engine does not answer, or answers with an error."""


class EngineForbidden(EngineUnavailable):
  """This user may not speak to the engine."""


class ImageMissing(InfraError):
  """The engine has no such image."""


class RuntimeMissing(InfraError):
  """The engine has no such OCI runtime."""


class DiskPressure(InfraError):
  """The engine's disk is too full to start anything on it."""


class StartFailed(InfraError):
  """The sandbox did not come up."""


class Died(InfraError):
  """The sandbox ended, and not by a limit that the policy hit."""


class ProtocolError(InfraError):
  """The runner's replies cannot be read, or are not the runner's."""


class HostDeadline(InfraError):
  """No reply within the call's timeout and the grace after it."""


class PoolExhausted(InfraError):
  """No sandbox became free in time."""


# What no waiting cures: a person has to do something first.
LASTING = (
  SandboxUnavailable,
  EngineForbidden,
  ImageMissing,
  RuntimeMissing,
  DiskPressure,
)


class SandboxBug(Exception):
  """The caller asked for something that no sandbox does."""


class CallStatus(enum.Enum):
  """How a call ended. All are the policy's doing."""

  OK = 'ok'
  NONZERO = 'nonzero'  # exit code other than 0
  SIGNAL = 'signal'
  TIMEOUT = 'timeout'  # of the call, or of the sandbox within a call
  OOM = 'oom'  # the kernel killed for memory
  PIDS = 'pids'  # refused to fork, and did not end well
  OUTPUT_CAP = 'output_cap'  # killed for what it wrote
  DISK = 'disk'  # filled its file system, and did not end well
  GONE = 'gone'  # nothing was run: the session had ended before


@dataclasses.dataclass(frozen=True)
class SandboxSpec:
  """Limits of a sandbox. There is no network, and no option for one.

  Attributes:
    image: of the Docker backend; needs python3 and /bin/sh only.
    memory_bytes: of all its processes and files together; no swap.
    pids: processes and threads at a time.
    cpus: share of processors.
    tmpfs_bytes, tmpfs_inodes: of `workdir` and of /tmp, each; keep it to at
      most a quarter of the memory, which it counts against.
    nofile: open files of a process.
    output_cap: bytes kept of stdout and of stderr, a quarter of them head.
    output_kill: bytes written after which a call is killed.
    lifetime_s: after which the sandbox ends by itself. In a call this is the
      call's timeout, between calls it is infrastructure: see `check_calls`.
    grace_s: that the host waits longer than a call's own timeout.
    workdir: where calls start; the only place to write to besides /tmp, from
      which nothing can be executed, and /dev/shm, of 16 MiB.
    env: variables of the calls, besides a fixed set.
    uid: of the calls, where the runner is root.
    runtime: OCI runtime of the Docker backend, such as 'runsc' where the
      engine has it; None is the engine's own.
  """

  image: str = DEFAULT_IMAGE
  memory_bytes: int = 512 << 20
  pids: int = 64
  cpus: float = 1.0
  tmpfs_bytes: int = 64 << 20
  tmpfs_inodes: int = 4096
  nofile: int = 256
  output_cap: int = 1 << 20
  output_kill: int = 64 << 20
  lifetime_s: float = 600.0
  grace_s: float = 5.0
  workdir: str = '/task'
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  uid: int = 65534
  runtime: str | None = None

  def __post_init__(self):
    for name in ('memory_bytes', 'pids', 'tmpfs_bytes', 'tmpfs_inodes', 'uid'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'SandboxSpec.{name} is {getattr(self, name)}: it must be at least 1'
        )
    if self.tmpfs_bytes > self.memory_bytes // 4:
      raise ValueError(
        f'SandboxSpec.tmpfs_bytes {self.tmpfs_bytes} is more than a quarter '
        f'of memory_bytes {self.memory_bytes}: full files would starve the '
        'next call of memory'
      )

  def check_calls(self, calls: int, timeout_s: float) -> None:
    """Returns if `calls` of `timeout_s` each end before the sandbox does.

    The seconds in which the policy writes count as well: leave room for them.

    Raises:
      ValueError: they can reach `lifetime_s`.
    """
    longest = calls * timeout_s
    if longest >= self.lifetime_s:
      raise ValueError(
        f'{calls} calls of {timeout_s:g} s can take {longest:g} s, and the '
        f'sandbox ends after lifetime_s {self.lifetime_s:g}: raise '
        f'SandboxSpec.lifetime_s well above {longest:g}, or allow fewer or '
        'shorter calls (max_calls, timeout_s)'
      )

  def runner_limits(self, rlimits: Mapping[str, int]) -> dict[str, Any]:
    """What the runner is told at its start."""
    return {
      'uid': self.uid,
      'workdir': self.workdir,
      'env': {
        'PATH': '/usr/local/bin:/usr/bin:/bin',
        'HOME': self.workdir,
        'LANG': 'C.UTF-8',
        'LC_ALL': 'C.UTF-8',
        'TZ': 'UTC',
        'PYTHONHASHSEED': '0',
        'PYTHONDONTWRITEBYTECODE': '1',
        **self.env,
      },
      'lifetime_s': self.lifetime_s,
      'output_kill': self.output_kill,
      'rlimits': {
        'RLIMIT_CORE': 0,
        'RLIMIT_NOFILE': self.nofile,
        'RLIMIT_FSIZE': self.tmpfs_bytes,
        **rlimits,
      },
    }


@dataclasses.dataclass(frozen=True)
class Call:
  """A program to run: `argv`, or Python source `code`; exactly one of them.

  Code runs in a fork of the runner's interpreter, as `__main__`, as if given
  to `python3 -c`, a few times faster. Files stay from call to call;
  processes do not.
  """

  argv: Sequence[str] | None = None
  code: str | None = None
  stdin: bytes = b''
  timeout_s: float = 30.0

  def __post_init__(self):
    if (self.argv is None) == (self.code is None):
      raise SandboxBug('a Call has either argv or code: give exactly one')
    if self.argv is not None and (isinstance(self.argv, str) or not self.argv):
      raise SandboxBug(
        f'Call.argv is {self.argv!r}: give a non-empty list of words'
      )
    check_timeout('Call.timeout_s', self.timeout_s)


@dataclasses.dataclass(frozen=True)
class CallResult:
  """How a call ended.

  Attributes:
    exit: exit code, or None if it did not exit by itself.
    stdout, stderr: valid text; bytes that are not UTF-8 become U+FFFD. Where
      bytes were left out, a line says how many.
    truncated: bytes left out of stdout and of stderr.
    duration_s: by the host's clock.
    reaped: processes that the call left behind, and which were killed.
    alive: False if the call took the sandbox with it.
    session_alive: False if the session that the call was for has ended.
  """

  status: CallStatus
  exit: int | None = None
  signal: int | None = None
  stdout: str = ''
  stderr: str = ''
  truncated: tuple[int, int] = (0, 0)
  duration_s: float = 0.0
  reaped: int = 0
  alive: bool = True
  session_alive: bool = True


@dataclasses.dataclass(frozen=True)
class Fetched:
  """Files out of a sandbox; `refused` says why of each that is not there."""

  files: Mapping[str, bytes]
  refused: Mapping[str, str]


class Session(Protocol):
  """An interpreter in a sandbox that lives on from call to call.

  Of kind 'python', variables, imports and threads live on; of kind 'shell'
  (bash where the sandbox has it, else sh) the folder, variables, functions and
  options do. Two sessions share files and nothing else. Between its calls the
  interpreter is frozen. Processes that it started do not outlive their call,
  background jobs too. stdin is empty: who reads from it meets its end.

  What a Python call does not catch is shown on stderr, with the policy's own
  lines alone, and its exit code is 1; SystemExit ends the call with its code.
  In a shell, `exit` ends the session as well.

  Attributes:
    kind: 'python' or 'shell'.
    alive: False once its interpreter has ended: by itself, by a call that had
      to be killed (TIMEOUT, OOM, OUTPUT_CAP), or killed by another's call. It
      does not come back; another session may be opened.
  """

  kind: str
  alive: bool

  def run(self, text: str, timeout_s: float = 30.0) -> CallResult:
    """Runs lines of the policy's, as `Sandbox.call` does.

    Of a session that has ended: GONE, with the reason in `stderr`.
    """

  def close(self) -> None:
    """Ends the interpreter. Idempotent, never raises."""


class Sandbox(Protocol):
  """A place where the policy's code runs; used by one episode, then closed.

  Methods may be called from any thread, and one at a time runs. All but
  `close` raise `InfraError` where the infrastructure failed, after which the
  sandbox is of no use any more.
  """

  spec: SandboxSpec
  facts: Mapping[str, Any]

  def call(self, call: Call) -> CallResult:
    """Runs a program, and kills what it leaves behind."""

  def session(self, kind: str) -> Session:
    """Opens a session of `kind` 'python' or 'shell'; at most 8 at a time.

    Where the policy has used up the processes or the memory, it is one that
    has ended already.
    """

  def put(self, files: Mapping[str, bytes], mode: int = 0o644) -> CallResult:
    """Writes files, paths relative to workdir, with the policy's own rights.

    The status is OK, or DISK or NONZERO with the reason in `stderr`.
    """

  def get(self, paths: Sequence[str], max_bytes: int = 8 << 20) -> Fetched:
    """Reads regular files; no link is followed; `max_bytes` in all."""

  def put_tar(self, data: bytes) -> CallResult:
    """Unpacks an archive into workdir, with the policy's own rights.

    Modes become 0644 or 0755. The status is as in `put`.

    Raises:
      SandboxBug: the archive is none that may be unpacked: see `archive.read`.
    """

  def get_tar(
    self, paths: Sequence[str], max_bytes: int = 8 << 20
  ) -> tuple[bytes, Mapping[str, str]]:
    """Files and whole folders below workdir ('.' is all of it) as an archive.

    Regular files and folders, in the order of their paths, with modes 0644 or
    0755; no link is followed; `max_bytes` of contents. Besides it, why of each
    path that is not in it.
    """

  def snapshot(self, max_bytes: int | None = None) -> Snapshot:
    """All files and folders of workdir and /tmp, to compare or to go on from.

    `open_sandbox(snapshot=...)` opens another sandbox that begins with them.
    `max_bytes` of contents in all, twice `tmpfs_bytes` if None; what is above
    it stands in `refused`.
    """

  def close(self) -> None:
    """Ends every process. Idempotent, bounded, never raises."""

  def __enter__(self) -> Sandbox: ...

  def __exit__(self, *exc) -> None: ...


def check_timeout(name: str, seconds: float) -> None:
  """Raises SandboxBug if `seconds` is no time to wait."""
  if not 0 < seconds <= _LONGEST_S:
    raise SandboxBug(
      f'{name} is {seconds}: must be above 0, and at most {_LONGEST_S:g}'
    )


def classify(facts: Mapping[str, Any]) -> tuple[CallStatus, int | None, int]:
  """(status, exit code, signal or 0) from what the runner counted.

  Evidence are the runner's and the kernel's counters alone, never text. A
  limit explains a bad end; a call that ended well is OK whatever it met.
  """
  if facts['end'] == 'gone':
    return CallStatus.GONE, None, 0
  wait = facts['wait']
  code = os.WEXITSTATUS(wait) if os.WIFEXITED(wait) else None
  number = os.WTERMSIG(wait) if os.WIFSIGNALED(wait) else 0
  if facts['end'] == 'output':
    return CallStatus.OUTPUT_CAP, None, number
  if facts['end'] == 'exit' and code == 0:
    return CallStatus.OK, 0, 0
  if facts['oom'] > 0:
    return CallStatus.OOM, code, number
  if facts['pids'] > 0:
    return CallStatus.PIDS, code, number
  if facts['end'] == 'timeout':
    return CallStatus.TIMEOUT, None, number
  if facts['disk_full'] or number == signal.SIGXFSZ:
    return CallStatus.DISK, code, number
  if number:
    return CallStatus.SIGNAL, None, number
  return CallStatus.NONZERO, code, 0


def as_text(head: bytes, tail: bytes, dropped: int) -> str:
  """Two ends of a stream as valid text, a line between them if bytes lack.

  A character that the cut went through is dropped, not mangled.
  """
  if not dropped:
    return (head + tail).decode('utf-8', 'replace')
  for back in range(1, min(4, len(head)) + 1):
    if head[-back] >= 0xC0:  # the last character starts here: is it whole?
      width = 2 + (head[-back] >= 0xE0) + (head[-back] >= 0xF0)
      head = head[:-back] if width > back else head
      break
  skip = 0
  while skip < min(3, len(tail)) and 0x80 <= tail[skip] < 0xC0:
    skip += 1
  return (
    head.decode('utf-8', 'replace')
    + f'\n[... {dropped} bytes left out ...]\n'
    + tail[skip:].decode('utf-8', 'replace')
  )
