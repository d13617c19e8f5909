"""Who a sandbox belongs to, and whether that process still lives.

Floor 1, env/sandbox, used by the backends and by `reap`. An owner is a
process named so that the name is never used again: boot, PID namespace,
process id, start time. It is judged only where it can be seen; the owner of
another machine or of another PID namespace is never called dead.
"""

from __future__ import annotations

import os
import pathlib


def own_name() -> str:
  """The name of this process."""
  return f'{_place()}:{os.getpid()}:{_start_time(os.getpid())}'


def is_dead(owner: str) -> bool:
  """True only if it is certain that this owner has ended."""
  place, _, rest = owner.partition(':')
  pid, _, start = rest.partition(':')
  if place != _place() or not pid.isdigit():
    return False
  return _start_time(int(pid)) != start


def _place() -> str:
  boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
  return f'{boot}.{os.stat("/proc/self/ns/pid").st_ino}'


def _start_time(pid: int) -> str | None:
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return None
  # The command's name may hold blanks and brackets: count from its end.
  fields = stat.rpartition(')')[2].split()
  return None if fields[0] in 'ZX' else fields[19]
