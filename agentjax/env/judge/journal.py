"""One verdict an episode: the first one is final.

Floor 1, env/judge. A policy that has seen its verdict, or a run that was
killed and goes on, may ask again: what was settled is what it gets. Each
verdict is a file of its own, named by the episode, because a bucket knows no
append. This file knows what a judgement looks like, not how one is reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable

from etils import epath

from agentjax import storage
from agentjax.env.judge.judgement import Judgement


class Journal:
  """Verdicts in a folder, which may be in a bucket.

  On a file system the first verdict wins over any number of threads and
  processes, and stands on the disk before anybody is told of it. A bucket
  cannot make an object only if there is none, so there an episode must have
  one judge at a time.
  """

  def __init__(self, folder: epath.PathLike):
    self._folder = epath.Path(folder)

  def once(self, episode: str, judge: Callable[[], Judgement]) -> Judgement:
    """The verdict of `episode`: the settled one, else `judge`'s.

    An exception of `judge` settles nothing.
    """
    found = self.get(episode)
    return found or self.settle(episode, judge())

  def get(self, episode: str) -> Judgement | None:
    """What is settled.

    Raises:
      storage.Unreadable: the file is not what `settle` writes.
    """
    path = self._path(episode)
    if not path.exists():
      return None
    data = storage.read_json(path)
    try:
      if data['episode'] != episode:
        raise ValueError(f'it is of episode {data["episode"]!r}')
      return Judgement.from_json(data['judgement'])
    except (KeyError, TypeError, ValueError) as error:
      raise storage.Unreadable(path, f'no verdict ({error})') from error

  def settle(self, episode: str, judgement: Judgement) -> Judgement:
    """Makes `judgement` final unless there is one; what is final.

    Raises:
      storage.StorageFull: nothing is settled.
    """
    path = self._path(episode)
    record = {'episode': episode, 'judgement': judgement.to_json()}
    if storage.is_bucket(path):
      if not path.exists():
        storage.write_json(path, record)
    else:
      _write_first(path, record)
    final = self.get(episode)
    assert final is not None
    return final

  def _path(self, episode: str) -> epath.Path:
    name = hashlib.sha256(episode.encode('utf-8', 'surrogatepass')).hexdigest()
    return self._folder / name[:2] / f'{name[2:34]}.json'


def _write_first(path: epath.Path, record) -> None:
  """Writes a whole file under `path` if nothing is there yet."""
  mine = path.parent / f'{path.name}.{os.getpid()}-{os.urandom(4).hex()}'
  storage.write_json(mine, record)
  try:
    # A link is made only where there is no file: the first one stays.
    with contextlib.suppress(FileExistsError):
      os.link(mine, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
      os.fsync(folder)  # the name too, before anybody is told
    finally:
      os.close(folder)
  finally:
    storage.remove(mine)
