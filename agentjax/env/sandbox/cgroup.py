"""Control groups for bubblewrap sandboxes, version 1 and version 2.

Floor 1, env/sandbox, used by `bwrap.py` alone. A sandbox's group carries its
owner in its name, so that `reap_groups` can tell what a dead run has left.
Where groups cannot be made (not root, read-only in a container) there are
none, and the backend says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import time
import uuid

from agentjax.env.sandbox import owner
from agentjax.env.sandbox.runner.counters import read_counter
from agentjax.env.sandbox.spec import SandboxSpec

ROOT = pathlib.Path('/sys/fs/cgroup')
_PREFIX = 'agentjax:'
_REMOVE_S = 2.0


@dataclasses.dataclass(frozen=True)
class Cgroup:
  """Folders of one sandbox: one in version 2, one a controller in 1."""

  version: int
  folders: tuple[pathlib.Path, ...]


def make(spec: SandboxSpec) -> Cgroup | None:
  """A new group with the limits of `spec`, or None where that cannot be."""
  version, places = _places()
  name = f'{_PREFIX}{owner.own_name()}:{uuid.uuid4().hex[:8]}'
  folders = tuple(place / name for place in places)
  group = Cgroup(version, folders)
  try:
    for folder in folders:
      folder.mkdir()
    for file, value in _limits(version, spec).items():
      for folder in folders:
        path = folder / file
        if path.exists():
          path.write_text(value)
  except OSError:
    remove(group)
    return None
  return group if folders else None


def inside(group: Cgroup, command: list[str]) -> list[str]:
  """`command`, in the group from its first instruction on."""
  # A shell joins and becomes the command: code between fork and exec of a
  # threaded Python is not safe.
  files = [str(folder / 'cgroup.procs') for folder in group.folders]
  joins = ''.join('echo $$ > "$1"; shift; ' for _ in files)
  return ['/bin/sh', '-ec', f'{joins}exec "$@"', 'sh', *files, *command]


def visible(group: Cgroup) -> list[tuple[str, pathlib.Path]]:
  """(path inside the sandbox, folder to be shown there)."""
  if group.version == 2:
    return [(str(ROOT), group.folders[0])]
  return [(str(folder.parent), folder) for folder in group.folders]


def oom_kills(group: Cgroup) -> int:
  """Kills for memory in the group so far."""
  file = 'memory.events' if group.version == 2 else 'memory.oom_control'
  for folder in group.folders:
    with contextlib.suppress(OSError):
      return read_counter((folder / file).read_text(), 'oom_kill') or 0
  return 0


def remove(group: Cgroup) -> None:
  """Removes the group, whose processes are ending. Never raises."""
  deadline = time.monotonic() + _REMOVE_S
  for folder in group.folders:
    while folder.exists():
      try:
        folder.rmdir()
      except OSError:  # a process is still on its way out
        if time.monotonic() > deadline:
          return  # the reaper's
        time.sleep(0.005)


def reap_groups() -> list[str]:
  """Kills and removes what is in groups of dead owners; their names."""
  version, places = _places()
  names = []
  for place in places:
    for folder in place.glob(f'{_PREFIX}*'):
      name = folder.name
      if not owner.is_dead(name[len(_PREFIX) :].rpartition(':')[0]):
        continue
      for pid in (folder / 'cgroup.procs').read_text().split():
        with contextlib.suppress(ProcessLookupError):
          os.kill(int(pid), 9)
      remove(Cgroup(version, (folder,)))
      names.append(name)
  return sorted(set(names))


def _places() -> tuple[int, list[pathlib.Path]]:
  """(version, folders to make groups in)."""
  control = ROOT / 'cgroup.subtree_control'
  if control.exists():
    enabled = {'memory', 'pids'} <= set(control.read_text().split())
    return 2, [ROOT] if enabled else []
  wanted = [ROOT / name for name in ('memory', 'pids')]
  if not all((place / 'cgroup.procs').exists() for place in wanted):
    return 1, []
  if (ROOT / 'cpu' / 'cpu.cfs_quota_us').exists() or (
    ROOT / 'cpu' / 'cgroup.procs'
  ).exists():
    wanted.append(ROOT / 'cpu')
  return 1, wanted


def _limits(version: int, spec: SandboxSpec) -> dict[str, str]:
  memory, quota = str(spec.memory_bytes), int(spec.cpus * 100_000)
  pids = str(spec.pids + 2)  # bwrap and the runner
  if version == 2:
    return {
      'memory.max': memory,
      'memory.swap.max': '0',
      'pids.max': pids,
      'cpu.max': f'{quota} 100000',
    }
  return {
    'memory.limit_in_bytes': memory,
    'memory.memsw.limit_in_bytes': memory,
    'pids.max': pids,
    'cpu.cfs_quota_us': str(quota),
  }
