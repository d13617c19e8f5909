"""BM25 over a corpus: built once, memory mapped, shared by all episodes.

Floor 1, env. The index is that of `bm25s` (extra `data`), kept in a folder
beside the corpus. Whoever opens it first builds it, in a folder of its own
that takes its place when it is whole, while others wait: it is built once, and
nobody reads half of one. Queries are answered by NumPy in the caller's thread.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import threading
from collections.abc import Sequence

import numpy as np

from agentjax.env.retrieval.passages import (
  Corpus,
  Passage,
  alone,
  check_topk,
)

_MADE = 'corpus.txt'  # written last: the corpus that the index is of
_METHOD = 'bm25s lucene, english stopwords, no stemmer, version 1'
_MAX_QUERY_CHARS = 2000
_IMPORT = threading.Lock()


class Bm25:
  """Implements `Retriever`. Safe to use from many threads.

  Of passages that fit alike the one that stands first in the corpus comes
  first; those that share no word with the query do not come.

  Args:
    corpus: what is searched.
    folder: of the index; by default beside the corpus's file. One that was
      built of another corpus, or otherwise, is built anew.
    k1, b: of BM25; by default those of pyserini, with which Search-R1's
      index of words is searched.
  """

  def __init__(
    self,
    corpus: Corpus,
    folder: str | os.PathLike | None = None,
    *,
    k1: float = 0.9,
    b: float = 0.4,
  ):
    if not len(corpus):
      raise ValueError(f'{corpus.path} holds no passage: there is no index')
    self.corpus = corpus
    beside = corpus.path.with_name(f'{corpus.path.name}.bm25')
    self.folder = pathlib.Path(folder) if folder else beside
    made_of = f'{_METHOD}\nk1 {k1} b {b}\n{corpus.fingerprint}\n'
    if not _is_made(self.folder, made_of):
      with alone(self.folder):
        if not _is_made(self.folder, made_of):
          _build(corpus, self.folder, made_of, k1, b)
    self._library = _bm25s()
    self._index = self._library.BM25.load(
      self.folder, mmap=True, show_progress=False, backend='numpy'
    )

  def __call__(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
    """See `Retriever`."""
    check_topk(topk)
    return [self._find(query[:_MAX_QUERY_CHARS], topk) for query in queries]

  def _find(self, query: str, topk: int) -> list[Passage]:
    (words,) = _words(self._library, [query])
    ids = self._index.get_tokens_ids(words)
    if not ids:
      return []
    scores = self._index.get_scores_from_ids(ids)
    return [self._scored(int(i), float(scores[i])) for i in best(scores, topk)]

  def _scored(self, index: int, score: float) -> Passage:
    p = self.corpus[index]
    return Passage(p.id, p.contents, score)


def best(scores: np.ndarray, k: int) -> np.ndarray:
  """int[<=k]: places of the largest scores above 0, equal ones in order."""
  k = min(k, len(scores))
  bar = np.partition(scores, len(scores) - k)[len(scores) - k]
  # All that might be among them, so that the order decides between equals.
  candidates = np.flatnonzero((scores >= bar) & (scores > 0))
  order = np.argsort(-scores[candidates], kind='stable')
  return candidates[order[:k]]


def _words(library, texts: list[str]) -> list[list[str]]:
  return library.tokenize(
    texts, stopwords='en', return_ids=False, show_progress=False
  )


def _is_made(folder: pathlib.Path, made_of: str) -> bool:
  made = folder / _MADE
  return made.exists() and made.read_text('utf-8') == made_of


def _build(
  corpus: Corpus, folder: pathlib.Path, made_of: str, k1: float, b: float
) -> None:
  library = _bm25s()
  partial = folder.with_name(f'{folder.name}.partial')
  shutil.rmtree(partial, ignore_errors=True)
  tokens = library.tokenize(
    [p.contents for p in corpus], stopwords='en', show_progress=False
  )
  index = library.BM25(method='lucene', k1=k1, b=b, backend='numpy')
  index.index(tokens, show_progress=False)
  index.save(partial, show_progress=False)
  (partial / _MADE).write_text(made_of, 'utf-8')
  # Who has an index of another corpus open keeps its files.
  shutil.rmtree(folder, ignore_errors=True)
  os.replace(partial, folder)


def _bm25s():
  """The library, without the JAX that it would import and start.

  It asks for `jax.lax` to choose the largest scores, and runs it at import: a
  tool worker would pay for that in memory, and take a TPU for itself.
  """
  with _IMPORT:
    if 'bm25s' in sys.modules:
      return sys.modules['bm25s']
    name = 'jax.lax' if 'jax' in sys.modules else 'jax'
    before = sys.modules.get(name)
    sys.modules[name] = None
    try:
      import bm25s
    except ImportError as error:
      raise ImportError(
        "BM25 needs bm25s: pip install 'agentjax[data]'"
      ) from error
    finally:
      if before is None:
        del sys.modules[name]
      else:
        sys.modules[name] = before
    return bm25s
