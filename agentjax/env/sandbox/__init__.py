"""Sandboxes: where code that a policy wrote is run.

Floor 1, env. `open_sandbox` chooses a backend, `reap` removes what dead runs
left. Callers know `spec.py` and this file; the backends are imported only
where they are used, because the engine's client costs half a second.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from agentjax.env.base import InfraError
from agentjax.env.sandbox.owner import Tag
from agentjax.env.sandbox.reaper import reap, reap_after_this_process
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

if TYPE_CHECKING:
  from agentjax.env.sandbox.engines import Engines

# Whatever needs a sandbox takes one of these: a partial of `open_sandbox`, or
# a Pool.
Opener = Callable[[], Sandbox]

__all__ = [
  'Call',
  'CallResult',
  'CallStatus',
  'Entry',
  'Fetched',
  'Opener',
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


def choose_backend(
  spec: SandboxSpec, backend: str = 'auto', engines: Engines | None = None
) -> str:
  """'docker' or 'bwrap': what can run here, Docker first.

  Args:
    backend: 'docker' or 'bwrap' to have this one or none; 'auto'.
    engines: of the Docker backend; None is the one of DOCKER_HOST.

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
      _check(name, spec, engines)
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
  role: str = 'agent',
  episode: str = '',
  engines: Engines | None = None,
) -> Sandbox:
  """Starts a sandbox; close it, or use it in a `with`.

  The first one of a process removes what dead runs have left.

  Args:
    backend: as in `choose_backend`; or 'fleet', for the machines of a Ray
      cluster.
    run, role, episode: into labels and journal; role is agent or judge.
    engines: of the Docker backend; None is the one of DOCKER_HOST.
    snapshot: whose files are there from the beginning: a fork of the sandbox
      that it is of.

  Raises:
    SandboxUnavailable: no backend. Other kinds of InfraError: the start
      failed, or Docker was asked for and something is wrong with it.
    SandboxBug: the snapshot is not one of such a sandbox.
  """
  spec = spec or SandboxSpec()
  start = starter(spec, backend, engines)
  sandbox = start(spec, Tag(run, role, episode))
  if snapshot is not None:
    try:
      sandbox.restore(snapshot)
    except BaseException:
      sandbox.close()
      raise
  return sandbox


def starter(
  spec: SandboxSpec, backend: str = 'auto', engines: Engines | None = None
) -> Callable[[SandboxSpec, Tag], Sandbox]:
  """What starts sandboxes like `spec`, by a backend that can; once chosen.

  Raises:
    SandboxUnavailable: no backend.
  """
  if backend == 'fleet':
    from agentjax.env.sandbox.fleet import open_fleet

    return open_fleet
  # A start on Docker says itself what it lacks, in kinds of its own.
  docker = backend == 'docker'
  chosen = backend if docker else choose_backend(spec, backend, engines)
  reap_once()
  if chosen == 'docker':
    from agentjax.env.sandbox.docker import open_docker

    return functools.partial(open_docker, engines=engines)
  from agentjax.env.sandbox.bwrap import open_bwrap

  return open_bwrap


@functools.cache
def reap_once() -> None:
  """Once in a process: reaps, and sees to it that this is done after it."""
  # What cannot be removed now is the next run's: it harms nobody but the disk.
  with contextlib.suppress(InfraError, OSError):
    reap()
  reap_after_this_process()


def _check(name: str, spec: SandboxSpec, engines: Engines | None) -> None:
  if name == 'docker':
    from agentjax.env.sandbox.docker import check_docker

    check_docker(spec, engines)
  else:
    from agentjax.env.sandbox.bwrap import check_bwrap

    check_bwrap()
