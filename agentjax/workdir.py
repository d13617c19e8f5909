"""One run a workdir: its lock, and the config that it was started with.

Floor 2, over storage. `train` holds the lock while it runs. Knows no run and
no key of a config.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from etils import epath

from agentjax import storage


class WorkdirLocked(RuntimeError):
  """Another process works in this workdir."""


# ---- the config ------------------------------------------------------------


def write_config(
  workdir: epath.PathLike, config: Mapping[str, Any], step: int
) -> list[str]:
  """Writes `config` and the versions that it runs with; returns what changed.

  The first one is config.json. One that differs from the newest there is
  written beside it, as config_<n>.json with the step that it holds from; what
  changed comes back as lines `key: old -> new`.

  Raises:
    storage.Unreadable: a config.json that is damaged.
  """
  here = {
    'config': storage.parse_json(storage.dump_json(config)),
    'from_step': step,
    'versions': _versions(),
  }
  names = _config_names(workdir)
  changes = []
  if names:
    path = epath.Path(workdir) / names[-1]
    there = storage.read_json(path)
    if not isinstance(there, dict) or not {'config', 'versions'} <= set(there):
      raise storage.Unreadable(path, 'not the config of a run')
    for part in ('config', 'versions'):
      changes += _changes(_leaves(there[part]), _leaves(here[part]))
    if not changes:
      return []
  name = f'config_{len(names) + 1}.json' if names else 'config.json'
  storage.write_json(epath.Path(workdir) / name, here)
  return changes


def _config_names(workdir: epath.PathLike) -> list[str]:
  """config.json, config_2.json, ..., as far as there is none missing."""
  there, out = set(storage.names(workdir)), []
  name = 'config.json'
  while name in there:
    out.append(name)
    name = f'config_{len(out) + 1}.json'
  return out


def _versions() -> dict[str, str]:
  out = {'python': platform.python_version()}
  for name in ('agentjax', 'jax'):
    try:
      out[name] = metadata.version(name)
    except metadata.PackageNotFoundError:  # a clone that is not installed
      out[name] = 'not installed'
  return out


def read_config(workdir: epath.PathLike, step: int) -> dict[str, Any]:
  """The config that `step` of a run was made with.

  Raises:
    FileNotFoundError: the workdir has none.
    storage.Unreadable: a damaged file.
  """
  found = None
  for name in _config_names(workdir):
    path = epath.Path(workdir) / name
    there = storage.read_json(path)
    if not isinstance(there, dict) or not {'config', 'from_step'} <= set(there):
      raise storage.Unreadable(path, 'not the config of a run')
    if found is None or there['from_step'] < step:
      found = there['config']
  if found is None:
    raise FileNotFoundError(
      f'{epath.Path(workdir)} has no config.json: name the workdir of a run'
    )
  return found


def _leaves(value: Any, path: str = '') -> dict[str, Any]:
  if not isinstance(value, Mapping):
    return {path: value}
  out = {}
  for key, inner in value.items():
    out |= _leaves(inner, f'{path}.{key}' if path else key)
  return out


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  def said(values: Mapping[str, Any], key: str) -> str:
    return storage.dump_json(values[key]) if key in values else 'nothing'

  return [
    f'{key}: {said(old, key)} -> {said(new, key)}'
    for key in (*old, *(k for k in new if k not in old))
    if said(old, key) != said(new, key)
  ]


# ---- the lock --------------------------------------------------------------


class WorkdirLock:
  """Keeps a second process out of a workdir, as a context manager.

  On a local file system this is flock on `<workdir>/.lock`: the kernel frees
  it when the process ends in any way, kill -9 included, and children made by
  fork do not keep it. A killed process holds it until the kernel has freed its
  memory, so entering waits `patience` seconds for it. On a bucket there is no
  lock: one run a workdir is the launcher's duty there.

  Raises:
    storage.Unusable: no run can live there.
    WorkdirLocked: on entering, if another process holds it and goes on to; the
      message has its pid and host, and what to do.
  """

  def __init__(self, workdir: epath.PathLike, patience: float = 2.0):
    with _usable(workdir):
      self._path = epath.Path(workdir) / '.lock'
    self._patience = patience
    self._file = None

  def __enter__(self) -> WorkdirLock:
    if self._file is not None:
      raise RuntimeError(f'{self._path} is entered twice: make a new lock')
    usable = _usable(self._path.parent)
    if storage.is_bucket(self._path):
      with usable:
        self._path.parent.exists()
      return self
    with usable, storage.full_disk_named(self._path):
      self._path.parent.mkdir(parents=True, exist_ok=True)
      # Opened for append: it must not lose its owner's name before it is ours.
      file = open(self._path, 'a+', encoding='utf-8')
    try:
      if not self._obtain(file):
        file.seek(0)
        owner = file.read().strip() or 'an unnamed process'
        raise WorkdirLocked(
          f'{self._path.parent} is in use by {owner}: wait for it, stop it, or '
          'choose another workdir'
        )
    except BaseException:
      file.close()
      raise
    self._file = file
    _HELD.add(self)
    with contextlib.suppress(OSError):  # the name is a courtesy, the lock holds
      file.truncate(0)
      file.write(f'pid {os.getpid()} on host {socket.gethostname()}\n')
      file.flush()
    return self

  def __exit__(self, *unused) -> None:
    self._close()

  def _obtain(self, file) -> bool:
    import fcntl  # not on every system that can read a workdir

    deadline = time.monotonic() + self._patience
    while True:
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
      except BlockingIOError:
        if time.monotonic() >= deadline:
          return False
        time.sleep(0.02)

  def _close(self) -> None:
    _HELD.discard(self)
    if self._file is not None:
      with contextlib.suppress(OSError):
        self._file.close()
      self._file = None


def _usable(workdir: epath.PathLike):
  return storage.unusable_named(workdir, 'choose another workdir')


# Strong references: a lock is held until its exit, not until it is collected.
_HELD: set[WorkdirLock] = set()


def _close_in_child() -> None:
  # flock belongs to the open file, which a forked child shares: a tool worker
  # that outlives a killed trainer would keep the workdir locked.
  for lock in tuple(_HELD):
    lock._close()


if hasattr(os, 'register_at_fork'):
  os.register_at_fork(after_in_child=_close_in_child)
