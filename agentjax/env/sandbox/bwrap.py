"""Sandboxes as bubblewrap processes: no daemon, no image, this host's /usr.

Floor 1, env/sandbox: the embedded fallback where no Docker engine answers.
Namespaces of its own for processes, network, IPC, host name and mounts; /usr
read-only and nothing else of the host's files; sized tmpfs to write to.

As root, calls run under another uid, and a cgroup limits memory, processes
and processor where this host lets us make one; `facts['limits']` says so.
Otherwise limits are per process (rlimits): a hog meets MemoryError instead of
the status OOM, and nothing counts refused forks. Without root, calls have the
runner's uid, and `seccomp.py` keeps them off it. Weaker than a container in
that /proc shows the host's memory and processors.

bwrap cannot limit the inodes of what it mounts, and an empty file takes memory
too: `unshare` makes a mount name space before, in which the writable folders
are mounted with both limits, to be bound from there. Nothing of it is seen on
the host, nor left there.

bwrap's --die-with-parent is not used: it follows the thread that started it,
and ends the sandbox when a pool's thread ends. The end of the stream does its
work: the runner is PID 1, and takes every process with it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence

from agentjax.env.base import InfraError
from agentjax.env.sandbox import cgroup, seccomp
from agentjax.env.sandbox.channel import Channel
from agentjax.env.sandbox.session import RunnerSandbox, runner_program
from agentjax.env.sandbox.spec import (
  CallStatus,
  SandboxSpec,
  SandboxUnavailable,
  StartFailed,
)

_STOP_S = 3.0
# Hides the host's, in a name space of the sandbox's own.
_BASE = '/dev/shm'
_MOUNT = f"""
mount -t tmpfs -o size=64k,mode=0700 none {_BASE}
mkdir {_BASE}/work {_BASE}/tmp {_BASE}/shm
mount -t tmpfs -o "$1" none {_BASE}/work
mount -t tmpfs -o "$2" none {_BASE}/tmp
mount -t tmpfs -o "$3" none {_BASE}/shm
shift 3
exec "$@"
"""
# Counted in no namespace, so that RLIMIT_NPROC is each sandbox's own.
_FIRST_UID = 1_700_000_000


def check_bwrap() -> None:
  """Returns if bubblewrap can make namespaces here.

  Raises:
    SandboxUnavailable: it is not installed, or not allowed to.
  """
  for program, package in (
    ('bwrap', 'bubblewrap'),
    ('unshare', 'util-linux'),
    ('mount', 'mount or util-linux'),
  ):
    if shutil.which(program) is None:
      raise SandboxUnavailable(
        f'{program} is not installed: install the package {package}'
      )
  filter_fd, passed = _filter()
  command = [*_namespaces(), *_root(), '--proc', '/proc', *passed, '/bin/true']
  try:
    done = subprocess.run(
      _with_folders(SandboxSpec(), command),
      capture_output=True,
      timeout=20,
      stdin=subprocess.DEVNULL,
      pass_fds=filter_fd,
    )
  except (OSError, subprocess.TimeoutExpired) as error:
    raise SandboxUnavailable(f'bubblewrap does not start: {error}') from error
  finally:
    _close(filter_fd)
  if done.returncode:
    raise SandboxUnavailable(
      'bubblewrap cannot make namespaces here: '
      f'{done.stderr.decode("utf-8", "replace").strip()}'
    )


def open_bwrap(spec: SandboxSpec) -> RunnerSandbox:
  """Starts bubblewrap with the runner in it; `spec.image` has no meaning.

  Raises:
    StartFailed, and what the first exchange with the runner raises.
  """
  group = cgroup.make(spec)
  ours, theirs = socket.socketpair()
  info_read, info_write = os.pipe()
  errors = tempfile.TemporaryFile()
  filter_fd, passed = _filter()
  command = _command(spec, group, info_write, passed)
  try:
    process = subprocess.Popen(
      command,
      stdin=theirs,
      stdout=theirs,
      stderr=errors,
      pass_fds=[info_write, *filter_fd],
      start_new_session=True,
    )
  except OSError as error:
    ours.close()
    os.close(info_read)
    _drop(group)
    raise StartFailed(f'bubblewrap does not start: {error}') from error
  finally:
    theirs.close()
    _close([info_write, *filter_fd])
  pidfd, pid = _child(info_read)
  state = _Process(process, pidfd, group, errors)
  if pid is None:
    ours.close()
    state.stop()
    raise StartFailed(f'bubblewrap gave up: {state.said()}')
  channel = Channel(ours, multiplexed=False)
  facts = {
    'backend': 'bwrap',
    'pid': pid,
    'limits': 'cgroup' if group else 'rlimit',
  }
  rlimits = {} if group else {'RLIMIT_AS': spec.memory_bytes}
  if not group:
    rlimits['RLIMIT_NPROC'] = spec.pids
  try:
    return RunnerSandbox(
      spec if os.geteuid() else _with_own_uid(spec, pid),
      channel,
      facts,
      rlimits=rlimits,
      stop=state.stop,
      hit_limit=state.hit_limit,
      said=state.last_words,
    )
  except InfraError as error:
    channel.shutdown()
    state.stop()
    raise StartFailed(f'{error} {state.said()}'.strip()) from error


class _Process:
  """The bwrap process, PID 1 below it, and their cgroup."""

  def __init__(self, process, pidfd, group, errors):
    self.process, self.pidfd = process, pidfd
    self.group, self.errors = group, errors
    self.stopped = False
    self.lock = threading.Lock()
    self.last = ''

  def stop(self) -> None:
    with self.lock:  # a descriptor closed twice may be somebody else's
      if self.stopped:
        return
      self.stopped = True
    if self.pidfd is not None:
      try:  # PID 1 of the namespace: the kernel kills the rest with it
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
      except ProcessLookupError:
        pass  # the end of the stream was enough
      os.close(self.pidfd)
    else:
      self.process.kill()
    try:
      self.process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
      self.process.kill()
    _drop(self.group)
    self.last = self.said()
    self.errors.close()

  def said(self) -> str:
    if self.errors.closed:
      return self.last
    self.errors.seek(0)
    return self.errors.read(4096).decode('utf-8', 'replace').strip()

  def last_words(self) -> str:
    """How bwrap ended, and what the runner wrote of it."""
    try:
      code = self.process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
      code = 'none yet'
    return f'(exit code of bwrap: {code}) {self.said()}'.strip()

  def hit_limit(self, began: float, kills: int) -> CallStatus | None:
    """OOM if the kernel counted more than `kills` in this cgroup."""
    counted = 0 if self.group is None else cgroup.oom_kills(self.group)
    return CallStatus.OOM if counted > kills else None


def _filter() -> tuple[list[int], list[str]]:
  """([descriptor to pass and to close], options of bwrap); may be empty."""
  fd = seccomp.open_program()
  return ([], []) if fd is None else ([fd], ['--seccomp', str(fd)])


def _close(fds: Sequence[int]) -> None:
  for fd in fds:
    os.close(fd)


def _drop(group: cgroup.Cgroup | None) -> None:
  if group is not None:
    cgroup.remove(group)


def _with_own_uid(spec: SandboxSpec, pid: int) -> SandboxSpec:
  return dataclasses.replace(spec, uid=_FIRST_UID + pid)


def _child(info_read: int) -> tuple[int | None, int | None]:
  """(pidfd, pid) of PID 1 as the host sees it; None if bwrap gave up."""
  with os.fdopen(info_read) as info:
    text = info.read()
  try:
    pid = json.loads(text)['child-pid']
    return os.pidfd_open(pid), pid
  except (ValueError, KeyError, ProcessLookupError):
    return None, None


def _command(spec, group, info_write: int, passed) -> list[str]:
  folders = sorted([(spec.workdir, f'{_BASE}/work'), ('/tmp', f'{_BASE}/tmp')])
  command = [
    *_namespaces(),
    *('--info-fd', str(info_write), *passed),
    *_root(),
    *('--proc', '/proc', '--dev', '/dev', '--bind', f'{_BASE}/shm', '/dev/shm'),
    *('--remount-ro', '/dev'),
    *(word for to, of in folders for word in ('--bind', of, to)),
    *(*_counters(group), '--remount-ro', '/', '--chdir', '/', '--clearenv'),
    *('--setenv', 'PATH', '/usr/local/bin:/usr/bin:/bin'),
    *('--setenv', 'LANG', 'C.UTF-8', '--setenv', 'TZ', 'UTC'),
    *('--setenv', 'PYTHONHASHSEED', '0'),
    *(_python(), '-s', '-B', '-c', runner_program()),
  ]
  command = _with_folders(spec, command)
  return cgroup.inside(group, command) if group else command


def _with_folders(spec: SandboxSpec, command: list[str]) -> list[str]:
  """`command`, in a mount name space that has the writable folders."""
  own = [] if os.geteuid() == 0 else ['--user', '--map-root-user']
  limits = f'nr_inodes={spec.tmpfs_inodes},mode=1777,nosuid,nodev'
  size = f'size={spec.tmpfs_bytes},{limits}'
  mounts = [size, f'{size},noexec', f'size={16 << 20},{limits},noexec']
  return [
    *('unshare', '--mount', *own, '/bin/sh', '-ec', _MOUNT, 'sh'),
    *(*mounts, *command),
  ]


def _namespaces() -> list[str]:
  out = ['bwrap', '--unshare-pid', '--unshare-net', '--unshare-ipc']
  out += ['--unshare-uts', '--unshare-cgroup-try', '--as-pid-1']
  out += ['--hostname', 'sandbox', '--new-session', '--cap-drop', 'ALL']
  if os.geteuid() == 0:
    # No user namespace: the runner can then give its children another uid.
    for capability in ('CAP_SETUID', 'CAP_SETGID', 'CAP_KILL'):
      out += ['--cap-add', capability]
    return out
  return [
    *out,
    *('--unshare-user', '--disable-userns'),
    *('--uid', '65534', '--gid', '65534'),
  ]


def _root() -> list[str]:
  """The host's programs, read-only, and nothing of its data."""
  out = ['--ro-bind', '/usr', '/usr']
  for name in ('/bin', '/sbin', '/lib', '/lib32', '/lib64'):
    path = pathlib.Path(name)
    if path.is_symlink():
      out += ['--symlink', os.readlink(name), name]
    elif path.exists():
      out += ['--ro-bind', name, name]
  out += ['--perms', '0755', '--dir', '/etc']
  for name in ('ld.so.cache', 'alternatives'):
    out += ['--ro-bind-try', f'/etc/{name}', f'/etc/{name}']
  prefix = os.path.realpath(sys.base_prefix)
  if _python() != '/usr/bin/python3' and not prefix.startswith('/usr'):
    for parent in reversed(pathlib.Path(prefix).parents):
      if str(parent) != '/':  # as bwrap makes them, calls could not pass
        out += ['--perms', '0755', '--dir', str(parent)]
    out += ['--ro-bind', prefix, prefix]
  return out


def _python() -> str:
  if os.access('/usr/bin/python3', os.X_OK):
    return '/usr/bin/python3'
  return os.path.realpath(sys.executable)


def _counters(group) -> list[str]:
  """Shows the sandbox its own cgroup where a container would see it."""
  out = []
  for where, path in cgroup.visible(group) if group else ():
    out += ['--ro-bind', str(path), where]
  return out
