"""What this process has started, on disk before it is started.

Floor 1, env/sandbox. When an engine's list hangs, or a backend has no list,
the journal still knows the names. One file a process, so that nobody waits
for anybody's lock: <state>/agentjax/sandboxes/<owner>.jsonl, <state> being
$XDG_STATE_HOME or ~/.local/state. Lines are appended, and on disk before the
call returns; a reader takes the lines that are whole.

A line is {"event": "begin", "name", "backend", "engine", "labels", ...},
{"event": "end", "name"}, or, for people, {"event": "episode", "name",
"episode"}: who got a sandbox that was started ahead of need.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import logging
import os
import pathlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from agentjax.env.sandbox import owner

_SUFFIX = '.jsonl'
# Lines after which the file is written anew, without what has ended.
_COMPACT_LINES = 4096
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Entry:
  """A sandbox that was begun and is not known to have ended.

  `pid` and `pid_start` name its first process, where there is no engine to
  ask; 0 and ''.
  """

  name: str
  backend: str
  engine: str
  labels: Mapping[str, str]
  pid: int = 0
  pid_start: str = ''


def folder() -> pathlib.Path:
  """Where journals of this user are."""
  state = os.environ.get('XDG_STATE_HOME') or '~/.local/state'
  return pathlib.Path(state).expanduser() / 'agentjax' / 'sandboxes'


class Journal:
  """The journal of one process; thread-safe.

  Where it cannot be written, a line in the log says so once and sandboxes are
  started all the same: labels, and the ends of streams, are enough for all
  but an engine that hangs.
  """

  def __init__(self, path: pathlib.Path):
    self.path = path
    self._lock = threading.Lock()
    self._open: dict[str, Entry] = {}
    self._doomed: set[str] = set()
    self._file = None
    self._lines = 0
    self._failed = self._closing = False

  def begin(self, entry: Entry) -> None:
    """To be called before `entry` is started."""
    with self._lock:
      self._open[entry.name] = entry
      self._write({'event': 'begin', **dataclasses.asdict(entry)})

  def end(self, name: str) -> None:
    """To be called when nothing is left of it. Idempotent."""
    with self._lock:
      self._doomed.discard(name)
      if self._open.pop(name, None) is not None:
        self._write({'event': 'end', 'name': name})
        self._tidy()  # at the exit, where pools may be closed after this

  def episode(self, name: str, episode: str) -> None:
    """Notes who has got a sandbox; not worth waiting for the disk."""
    with self._lock:
      if name in self._open:
        line = {'event': 'episode', 'name': name, 'episode': episode}
        self._write(line, sync=False)

  def doom(self, name: str) -> None:
    """Notes that it is to go and could not be removed: the reaper's now."""
    with self._lock:
      self._doomed.add(name)

  def doomed(self) -> list[Entry]:
    """What is to go and is not known to have gone."""
    with self._lock:
      return [e for name, e in self._open.items() if name in self._doomed]

  def open(self) -> list[Entry]:
    """What has begun and not ended."""
    with self._lock:
      return list(self._open.values())

  def close(self) -> None:
    """Removes the file as soon as nothing is open; else it is the reaper's."""
    with self._lock:
      self._closing = True
      self._tidy()

  def _tidy(self) -> None:
    if self._closing and not self._open and self._file is not None:
      self._file.close()
      self._file = None
      self.path.unlink(missing_ok=True)

  def _write(self, line: Mapping[str, Any], sync: bool = True) -> None:
    try:
      if self._file is None or self._lines >= _COMPACT_LINES:
        self._renew()
      self._file.write(json.dumps(line).encode() + b'\n')
      self._lines += 1
      if sync:
        os.fsync(self._file.fileno())
    except OSError as error:
      if not self._failed:
        _log.warning(
          'the journal of sandboxes %s cannot be written (%s): set '
          'XDG_STATE_HOME to a folder that can', self.path, error,
        )  # fmt: skip
      self._failed = True

  def _renew(self) -> None:
    """Opens a file with what is open now, in the place of the old one."""
    self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = self.path.with_suffix('.new')
    file = new.open('wb', buffering=0)
    for entry in self._open.values():
      line = {'event': 'begin', **dataclasses.asdict(entry)}
      file.write(json.dumps(line).encode() + b'\n')
    os.fsync(file.fileno())
    new.replace(self.path)
    if self._file is not None:
      self._file.close()
    self._file, self._lines = file, len(self._open)


def own() -> Journal:
  """The journal of this process."""
  return _own(os.getpid())


@functools.cache
def _own(pid: int) -> Journal:  # by pid, as a fork has its own
  name = owner.own_name()
  journal = Journal(folder() / f'{name}{_SUFFIX}')
  atexit.register(lambda: os.getpid() == pid and journal.close())
  return journal


def others() -> Iterator[tuple[pathlib.Path, str, list[Entry]]]:
  """(file, owner, what is open) of each journal here but this process's."""
  for path in sorted(folder().glob(f'*{_SUFFIX}')):
    name = path.name.removesuffix(_SUFFIX)
    if name == owner.own_name():
      continue
    try:
      yield path, name, _read(path)
    except OSError:
      continue  # its owner was faster


def _read(path: pathlib.Path) -> list[Entry]:
  entries: dict[str, Entry] = {}
  names = {field.name for field in dataclasses.fields(Entry)}
  for line in path.read_bytes().split(b'\n'):
    try:
      said = json.loads(line)
      if said['event'] == 'begin':
        entry = Entry(**{k: v for k, v in said.items() if k in names})
        entries[entry.name] = entry
      elif said['event'] == 'end':
        entries.pop(said['name'], None)
    except (ValueError, KeyError, TypeError):
      continue  # cut off by the end of its writer
  return list(entries.values())
