"""Retrievers made of others: hybrid, and the control that finds anything.

Floor 1, env. It knows no index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from agentjax.env.retrieval.passages import (
  MAX_TOPK,
  Corpus,
  Passage,
  Retriever,
  check_topk,
)


class Hybrid:
  """Joins the rankings of several retrievers. Implements `Retriever`.

  A passage's score is the sum of 1 / (constant + rank) over the rankings in
  which it stands among the first `depth`. Source: reciprocal rank fusion,
  Cormack, Clarke and Buettcher, SIGIR 2009.
  """

  def __init__(
    self,
    retrievers: Sequence[Retriever],
    *,
    depth: int = 50,
    constant: float = 60.0,
  ):
    if not retrievers:
      raise ValueError('no retrievers: there is nothing to join')
    check_topk(depth)
    self._retrievers, self._depth = tuple(retrievers), depth
    self._constant = constant

  def __call__(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
    """See `Retriever`."""
    check_topk(topk)
    depth = min(max(self._depth, topk), MAX_TOPK)
    rankings = [retrieve(queries, depth) for retrieve in self._retrievers]
    return [self._joined(found)[:topk] for found in zip(*rankings, strict=True)]

  def _joined(self, rankings: Sequence[Sequence[Passage]]) -> list[Passage]:
    scores: dict[str, float] = {}
    seen: dict[str, Passage] = {}
    for ranking in rankings:
      for rank, p in enumerate(ranking, 1):
        seen.setdefault(p.id, p)
        scores[p.id] = scores.get(p.id, 0.0) + 1.0 / (self._constant + rank)
    # Sorting keeps equals in the order in which they were seen.
    order = sorted(scores, key=lambda id: -scores[id])
    return [Passage(id, seen[id].contents, scores[id]) for id in order]


class Random:
  """Passages that have nothing to do with the query: the control of a study.

  The same for the same query. Implements `Retriever`.
  """

  def __init__(self, corpus: Corpus, seed: int = 0):
    self._corpus, self._seed = corpus, seed

  def __call__(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
    """See `Retriever`."""
    check_topk(topk)
    return [self._any(query, topk) for query in queries]

  def _any(self, query: str, topk: int) -> list[Passage]:
    text = f'{self._seed} {query}'.encode('utf-8', 'replace')
    rng = np.random.default_rng(list(hashlib.sha256(text).digest()))
    n = min(topk, len(self._corpus))
    return [
      self._corpus[int(i)]
      for i in rng.choice(len(self._corpus), n, replace=False)
    ]
