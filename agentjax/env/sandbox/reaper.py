"""Removes what dead runs have left, and nothing else.

Floor 1, env/sandbox. The last of the nets under a sandbox, and a command:

    python -m agentjax.env.sandbox reap [--host HOST ...]

What may go is marked as ours, and its owner is certainly dead or its lease is
over (`owner.is_over`). Containers are found by label, on every engine that is
named here or in a journal; if an engine's list fails or hangs, by the names
in journals. Control groups and processes of bubblewrap carry their owner in
their name and in the journal; their mounts end with them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from agentjax.env.base import InfraError
from agentjax.env.sandbox import after, cgroup, journal, owner
from agentjax.env.sandbox.bounds import Overdue, within
from agentjax.env.sandbox.journal import Entry

EVERY_S = 60.0
_ENGINE_S = 60.0
_LIST_S = 10.0
_NAME = re.compile(r'agentjax-[0-9a-f]{16}')
_log = logging.getLogger(__name__)


def reap(hosts: Sequence[str] = ()) -> list[str]:
  """Removes what is over; the names of what was removed.

  Touches nothing else: not what has no label of ours, not what belongs to a
  living process or to one that cannot be seen from here, unless its lease is
  over. Engines that do not answer are passed over: what they have is the next
  run's, and harms nobody but the disk.

  Args:
    hosts: of engines, besides that of DOCKER_HOST and those in journals.
  """
  removed = cgroup.reap_groups()
  over = _over()
  for entry in over:
    if entry.backend == 'bwrap' and _kill(entry):
      removed.append(entry.name)
  default = os.environ.get('DOCKER_HOST') or 'unix:///var/run/docker.sock'
  left: set[str] = set()
  for host in dict.fromkeys([default, *hosts, *(e.engine for e in over)]):
    if not host:  # of bubblewrap
      continue
    names = {e.name for e in over if e.engine == host}
    known = None if host == default else host
    try:
      gone, still = within(_ENGINE_S, functools.partial(_sweep, known, names))
    except (InfraError, Overdue) as error:
      _log.info('the engine %s is not reaped: %s', host, error)
      gone, still = [], names
    removed += gone
    left |= still
  _forget({e.name for e in over if e.name not in left or _is_old(e)})
  return sorted(set(removed))


def reap_after_this_process() -> None:
  """Has a process of its own reap as soon as this one has ended.

  For what no end of a stream reaches: a container that was made and not yet
  started when this process was killed. Once for each process; where it cannot
  be, the next run reaps.
  """
  with contextlib.suppress(OSError):
    _begin_after(os.getpid())


@functools.cache
def _begin_after(pid: int) -> None:
  path = os.pathsep.join(p for p in sys.path if p)
  program, log = pathlib.Path(after.__file__), str(journal.own().path)
  python = [sys.executable, '-m', 'agentjax.env.sandbox', 'reap']
  process = subprocess.Popen(
    [sys.executable, '-I', '-S', str(program), str(pid), log, *python],
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    env={**os.environ, 'PYTHONPATH': path},
    start_new_session=True,  # a Ctrl-C is not for it
  )

  def done() -> None:
    if os.getpid() == pid and not journal.own().open():
      process.kill()
      process.wait()

  atexit.register(done)


class Reaper:
  """Reaps now and then, in a daemon thread, until it is stopped."""

  def __init__(self, hosts: Sequence[str] = (), every_s: float = EVERY_S):
    self._hosts, self._every_s = tuple(hosts), every_s
    self._stop = threading.Event()
    self._thread = threading.Thread(
      target=self._work, name='sandbox-reaper', daemon=True
    )
    self._thread.start()

  def stop(self) -> None:
    """Ends the thread; does not wait for an engine that hangs."""
    self._stop.set()
    self._thread.join(1.0)

  def _work(self) -> None:
    while not self._stop.wait(self._every_s):
      try:
        for name in reap(self._hosts):
          _log.warning('reaped: %s', name)
      except Exception:  # of the file system: the next round may be luckier
        _log.exception('reaping failed')


def _over() -> list[Entry]:
  """What stands in journals and may go."""
  found = [e for e in journal.own().open() if owner.is_over(e.labels)]
  found += journal.own().doomed()
  for _, _, entries in journal.others():
    found += [e for e in entries if owner.is_over(e.labels)]
  return found


def _is_old(entry: Entry) -> bool:
  return owner.is_forgotten(entry.labels)


def _forget(gone: set[str]) -> None:
  """Takes what is gone out of the journals, and journals out of the way."""
  for entry in journal.own().open():
    if entry.name in gone:
      journal.own().end(entry.name)
  for path, name, entries in journal.others():
    if owner.lives(name):
      continue  # it writes there
    dead = owner.is_dead(name)
    if (dead or entries) and all(e.name in gone for e in entries):
      path.unlink(missing_ok=True)


def _kill(entry: Entry) -> bool:
  """Kills the first process of a sandbox, and so all; False if none lives."""
  if not entry.pid or owner.start_time(entry.pid) != entry.pid_start:
    return False
  try:
    fd = os.pidfd_open(entry.pid)
  except OSError:
    return False
  try:
    # The number may have been another's by the time it was opened.
    if owner.start_time(entry.pid) != entry.pid_start:
      return False
    signal.pidfd_send_signal(fd, signal.SIGKILL)
  except OSError:
    return False
  finally:
    os.close(fd)
  return True


def _sweep(host: str | None, names: set[str]) -> tuple[list[str], set[str]]:
  """(ids removed, names of those that could not be) of one engine.

  What is over by its labels, or if the engine cannot list it, `names`.
  """
  from agentjax.env.sandbox.docker import remove
  from agentjax.env.sandbox.engines import ERRORS, Engine

  engine = Engine(host)
  try:
    # Not containers.list(): it inspects each, and fails if one goes meanwhile.
    wanted = [
      (found['Names'][0].lstrip('/'), found['Id'])
      for found in engine.ask(_labelled, _LIST_S)
      if owner.is_over(found['Labels'])
    ]
  except (*ERRORS, InfraError) as error:
    # A container whose stream nobody reads can hang the list, and the list
    # alone. The names are ours: they were drawn at random for these.
    wanted = [(name, name) for name in names if _NAME.fullmatch(name)]
    if not wanted:
      raise engine.typed(error, '') from error
  gone, still = [], set()
  for name, id_ in wanted:
    try:
      remove(engine, id_)
      gone.append(id_)
    except (*ERRORS, InfraError) as error:
      _log.info('%s is not removed: %s', name, error)
      still.add(name)
  return gone, still


def _labelled(client: Any) -> list[dict[str, Any]]:
  return client.containers(all=True, filters={'label': owner.OWNER})
