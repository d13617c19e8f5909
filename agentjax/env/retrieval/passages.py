"""Passages, what finds them, and a corpus of them on disk.

Floor 1, env. A corpus is a file as Search-R1 releases it: one JSON object a
line, with `id` and `contents`, the first line of which is the title in quotes.
It is read where it lies: 21 million passages need no memory but their places.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

_PLACES = '.places.npy'
MAX_TOPK = 100


@dataclasses.dataclass(frozen=True)
class Passage:
  """One passage; `score` says how well it fitted the query, larger is better.

  `contents` is the title, a line feed, and the text.
  """

  id: str
  contents: str
  score: float = 0.0

  @property
  def title(self) -> str:
    """The first line, as it stands: with quotes in released corpora."""
    return self.contents.partition('\n')[0]

  @property
  def text(self) -> str:
    return self.contents.partition('\n')[2]


class Retriever(Protocol):
  """Finds passages. Called from many threads at once."""

  def __call__(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
    """At most `topk` passages for each query, best first.

    Fewer where fewer fit; none for a query that says nothing.

    Raises:
      InfraError: the passages cannot be had.
    """


def as_text(passages: Sequence[Passage]) -> str:
  """As a policy reads them: `Doc 1(Title: ...) ...`, one a line."""
  return ''.join(
    f'Doc {i}(Title: {p.title}) {p.text}\n' for i, p in enumerate(passages, 1)
  )


def check_topk(topk: int) -> None:
  """Refuses a number of passages that nobody can mean.

  Raises:
    ValueError: not between 1 and `MAX_TOPK`.
  """
  if isinstance(topk, bool) or not isinstance(topk, int):
    raise ValueError(f'topk is {topk!r}: give a whole number')
  if not 1 <= topk <= MAX_TOPK:
    raise ValueError(f'topk is {topk}: give 1 to {MAX_TOPK}')


# ---- on disk ----------------------------------------------------------------


class Corpus(Sequence):
  """The passages of a JSONL file, read one by one as they are asked for.

  Where each line begins is kept beside the file, in `NAME.places.npy`, memory
  mapped, and found anew when the file is another. Safe to use from many
  threads: a read has no position that they share.

  Raises:
    ValueError: at reading, a line is no passage.
    OSError: there is no such file.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = pathlib.Path(path)
    self._file = self.path.open('rb')  # closed with the last reference
    self._places = _places(self.path)

  def __len__(self) -> int:
    return len(self._places) - 1

  def __getitem__(self, index: int) -> Passage:
    if not 0 <= index < len(self):
      raise IndexError(f'passage {index} of {len(self)} in {self.path}')
    start, end = int(self._places[index]), int(self._places[index + 1])
    return self._passage(
      os.pread(self._file.fileno(), end - start, start), index
    )

  def __iter__(self) -> Iterator[Passage]:
    with self.path.open('rb') as file:
      for index, line in enumerate(file):
        yield self._passage(line, index)

  def _passage(self, line: bytes, index: int) -> Passage:
    try:
      data = json.loads(line)
      id, contents = data['id'], data['contents']
      if not isinstance(contents, str) or isinstance(id, (dict, list)):
        raise TypeError('contents is no text, or id is no name')
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(
        f'{self.path}, line {index + 1} is no passage '
        f'({type(error).__name__}: {error}): give an object with id and '
        'contents'
      ) from error
    return Passage(str(id), contents)

  @property
  def fingerprint(self) -> str:
    """Changes with the file: its size and the time of its last change."""
    stat = self.path.stat()
    return f'{stat.st_size}-{stat.st_mtime_ns}'


def write_corpus(
  path: str | os.PathLike, passages: Iterable[Passage]
) -> Corpus:
  """Writes passages as a released corpus; all of them, or no file."""
  path = pathlib.Path(path)
  partial = path.with_name(f'{path.name}.{os.getpid()}.partial')
  with partial.open('w', encoding='utf-8') as file:
    for p in passages:
      line = {'id': p.id, 'contents': p.contents}
      file.write(json.dumps(line, ensure_ascii=False) + '\n')
  os.replace(partial, path)
  return Corpus(path)


def _places(path: pathlib.Path) -> np.ndarray:
  """int64[n + 1]: where each line begins, and the end."""
  kept = path.with_name(path.name + _PLACES)
  stat = path.stat()
  if kept.is_file():
    places = np.load(kept, mmap_mode='r')
    fresh = kept.stat().st_mtime_ns >= stat.st_mtime_ns
    if fresh and len(places) and places[-1] == stat.st_size:
      return places
  starts = [0]
  with path.open('rb') as file:
    for line in file:
      starts.append(starts[-1] + len(line))
  places = np.array(starts, np.int64)
  partial = kept.with_name(f'{kept.name}.{os.getpid()}.partial.npy')
  try:
    np.save(partial, places)
    os.replace(partial, kept)
  except OSError:  # a corpus in a folder that is not ours to write
    partial.unlink(missing_ok=True)
    return places
  return np.load(kept, mmap_mode='r')


@contextlib.contextmanager
def alone(folder: pathlib.Path) -> Iterator[None]:
  """Who builds in `folder`: one at a time, of all threads and processes."""
  with folder.with_name(f'{folder.name}.lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
