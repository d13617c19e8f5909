"""Sandboxes: where code that a policy wrote is run.

Floor 1, env. `open_sandbox` chooses a backend, `reap` removes what dead runs
left. Callers know `spec.py` and this file; the backends are imported only
where they are used, because the engine's client costs half a second.
"""

from __future__ import annotations

import contextlib
import functools

from agentjax.env.base import InfraError
from agentjax.env.sandbox.snapshot import Entry, Snapshot
from agentjax.env.sandbox.spec import (
  Call,
  CallResult,
  CallStatus,
  Fetched,
  Sandbox,
  SandboxBug,
  SandboxSpec,
  SandboxUnavailable,
  Session,
)

__all__ = [
  'Call',
  'CallResult',
  'CallStatus',
  'Entry',
  'Fetched',
  'Sandbox',
  'SandboxBug',
  'SandboxSpec',
  'SandboxUnavailable',
  'Session',
  'Snapshot',
  'choose_backend',
  'open_sandbox',
  'reap',
]


def choose_backend(spec: SandboxSpec, backend: str = 'auto') -> str:
  """'docker' or 'bwrap': what can run here, Docker first.

  Args:
    backend: 'docker' or 'bwrap' to have this one or none; 'auto'.

  Raises:
    SandboxUnavailable: says of each backend why not, and what to do.
  """
  if backend not in ('auto', 'docker', 'bwrap'):
    raise ValueError(f'backend {backend!r}: choose auto, docker or bwrap')
  reasons = []
  for name in ('docker', 'bwrap'):
    if backend not in ('auto', name):
      continue
    try:
      _check(name, spec)
      return name
    except InfraError as error:
      reasons.append(f'{name}: {error}')
  raise SandboxUnavailable(
    'no sandbox can run here, so no tool that runs code. '
    + '; '.join(reasons)
    + '. On a hosted notebook use an environment without code, such as '
    'arithmetic with its calculator'
  )


def open_sandbox(
  spec: SandboxSpec | None = None,
  backend: str = 'auto',
  run: str = 'none',
  *,
  snapshot: Snapshot | None = None,
) -> Sandbox:
  """Starts a sandbox; close it, or use it in a `with`.

  The first one of a process removes what dead runs have left.

  Args:
    backend: as in `choose_backend`.
    run: names the run in labels, where the backend has them.
    snapshot: whose files are there from the beginning: a fork of the sandbox
      that it is of.

  Raises:
    SandboxUnavailable: no backend. Other kinds of InfraError: the start
      failed. SandboxBug: the snapshot is not one of such a sandbox.
  """
  spec = spec or SandboxSpec()
  chosen = choose_backend(spec, backend)
  _reap_once()
  if chosen == 'docker':
    from agentjax.env.sandbox.docker import open_docker

    sandbox = open_docker(spec, run)
  else:
    from agentjax.env.sandbox.bwrap import open_bwrap

    sandbox = open_bwrap(spec)
  if snapshot is not None:
    try:
      sandbox.restore(snapshot)
    except BaseException:
      sandbox.close()
      raise
  return sandbox


def reap() -> list[str]:
  """Removes containers and control groups of dead owners; their names.

  Touches nothing else: not what has no label of ours, not what belongs to a
  living process, not what belongs to a process that cannot be seen from here.
  Without an engine only control groups are looked at.
  """
  from agentjax.env.sandbox import cgroup

  removed = cgroup.reap_groups()
  try:
    from agentjax.env.sandbox.docker import reap_containers

    return removed + reap_containers()
  except InfraError:
    return removed


@functools.cache
def _reap_once() -> None:
  # What cannot be removed now is the next run's: it harms nobody but the disk.
  with contextlib.suppress(InfraError, OSError):
    reap()


def _check(name: str, spec: SandboxSpec) -> None:
  if name == 'docker':
    from agentjax.env.sandbox.docker import check_docker

    check_docker(spec.image)
  else:
    from agentjax.env.sandbox.bwrap import check_bwrap

    check_bwrap()
