"""Who a sandbox belongs to, for how long, and whether that still holds.

Floor 1, env/sandbox, used by the backends, the journal and the reaper. An
owner is a process named so that the name is never used again: boot, PID
namespace, process id, start time. It is judged only where it can be seen; the
owner of another machine or of another PID namespace is never called dead.

For those there is a lease: after it nobody can need the sandbox any more,
because the runner has ended by itself long before. It is written as Unix
time, for all machines, and as seconds since boot, for this one, because a
clock that a person sets must not end a sandbox that is in use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Mapping

from agentjax.env.sandbox.spec import SandboxSpec

RUN = 'agentjax.run'
OWNER = 'agentjax.owner'
LEASE = 'agentjax.lease'
LEASE_BOOT = 'agentjax.lease.boot'
ROLE = 'agentjax.role'
SPEC = 'agentjax.spec'
EPISODE = 'agentjax.episode'

ROLES = ('agent', 'judge')
# From the end of a sandbox's own lifetime to that of its lease; by Unix time
# as much more as the clocks of two machines may differ.
_MARGIN_S = 120.0
_CLOCKS_S = 7200.0
_FORGET_S = 86_400.0


@dataclasses.dataclass(frozen=True)
class Tag:
  """What a sandbox is marked with, beside its owner and its lease.

  Attributes:
    run: names the run. role: 'agent' or 'judge'.
    episode: empty for one that was started before any episode needed it; the
      journal says then who got it.
  """

  run: str = 'none'
  role: str = 'agent'
  episode: str = ''

  def __post_init__(self):
    if self.role not in ROLES:
      raise ValueError(f'role {self.role!r}: choose one of {ROLES}')


UNTAGGED = Tag()


def labels(spec: SandboxSpec, tag: Tag) -> dict[str, str]:
  """The labels of a sandbox that this process starts now."""
  seconds = spec.lifetime_s + _MARGIN_S
  return {
    RUN: tag.run,
    OWNER: own_name(),
    LEASE: f'{time.time() + seconds + _CLOCKS_S:.0f}',
    LEASE_BOOT: f'{_since_boot() + seconds:.0f}',
    ROLE: tag.role,
    SPEC: spec_hash(spec),
    EPISODE: tag.episode,
  }


def spec_hash(spec: SandboxSpec) -> str:
  """Equal for equal specs, in every process: 12 hexadecimal digits."""
  text = json.dumps(dataclasses.asdict(spec), sort_keys=True, default=str)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_over(labels: Mapping[str, str]) -> bool:
  """True if what has these labels may be removed; False if it is not ours."""
  name = labels.get(OWNER, '')
  return bool(name) and (is_dead(name) or _lease_is_over(labels))


def is_forgotten(labels: Mapping[str, str]) -> bool:
  """True a day after the lease: an engine that is no more is not asked on."""
  end = labels.get(LEASE, '')
  return end.isdigit() and time.time() > int(end) + _FORGET_S


def own_name() -> str:
  """The name of this process."""
  return f'{_place()}:{os.getpid()}:{start_time(os.getpid())}'


def is_dead(owner: str) -> bool:
  """True only if it is certain that this owner has ended."""
  place, _, rest = owner.partition(':')
  pid, _, start = rest.partition(':')
  if place != _place() or not pid.isdigit():
    return False
  return start_time(int(pid)) != start


def lives(owner: str) -> bool:
  """True only if it is certain that this owner is a living process."""
  return owner.partition(':')[0] == _place() and not is_dead(owner)


def start_time(pid: int) -> str | None:
  """When a process began, in the kernel's ticks; None if it has ended."""
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return None
  # The command's name may hold blanks and brackets: count from its end.
  fields = stat.rpartition(')')[2].split()
  return None if fields[0] in 'ZX' else fields[19]


def _lease_is_over(labels: Mapping[str, str]) -> bool:
  now, end = time.time(), labels.get(LEASE, '')
  if LEASE_BOOT in labels and _boot_of(labels[OWNER]) == _boot():
    now, end = _since_boot(), labels[LEASE_BOOT]
  return end.isdigit() and now > int(end)


def _place() -> str:
  return f'{_boot()}.{os.stat("/proc/self/ns/pid").st_ino}'


def _boot() -> str:
  return pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()


def _boot_of(owner: str) -> str:
  return owner.partition(':')[0].partition('.')[0]


def _since_boot() -> float:
  return time.clock_gettime(time.CLOCK_BOOTTIME)
