"""Dense retrieval on the device: exact inner products, sharded over a mesh.

Floor 2: it joins an encoder (model/) and passages (env/), and env/ imports no
JAX. Implements `Retriever`, so that an environment takes it as any other; who
wants it in another process serves it (`env.retrieval.server`). The vectors of a
corpus are computed once and kept beside it.

Letters: B queries, N passages, D vector, K best.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import threading
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from agentjax.env.retrieval.passages import (
  Corpus,
  Passage,
  alone,
  check_topk,
)

_MAX_QUERY_CHARS = 2000
# Texts to float32 [n, D]; `model.bert.Encoder` is one.
Encode = Callable[[Sequence[str]], np.ndarray]


class Dense:
  """Implements `Retriever`. Safe to use from many threads.

  Args:
    corpus: what is searched.
    encode: texts to vectors.
    name: of the encoder, with all that its vectors depend on: kept vectors are
      taken up again by this name.
    folder: of the vectors; by default beside the corpus's file.
    query_prefix, passage_prefix: of e5 models 'query: ' and 'passage: '.
    devices: over which the passages are shared out; all by default.
    block: passages encoded between two writes; a build that was killed goes on
      from the last one.
  """

  def __init__(
    self,
    corpus: Corpus,
    encode: Encode,
    name: str,
    folder: str | os.PathLike | None = None,
    *,
    query_prefix: str = '',
    passage_prefix: str = '',
    devices: Sequence[jax.Device] | None = None,
    block: int = 1024,
  ):
    self.corpus, self._encode = corpus, encode
    self._query_prefix = query_prefix
    self._lock = threading.Lock()
    beside = corpus.path.with_name(f'{corpus.path.name}.dense')
    folder = pathlib.Path(folder or beside)
    with alone(folder):
      vectors = build(
        corpus, encode, folder, prefix=passage_prefix, block=block,
        made_of=[name, passage_prefix, corpus.fingerprint, len(corpus)],
      )  # fmt: skip
    self._index = Index(vectors, devices)

  def __call__(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
    """See `Retriever`. A query without a word finds nothing."""
    check_topk(topk)
    asked = [i for i, q in enumerate(queries) if q.strip()]
    out: list[list[Passage]] = [[] for _ in queries]
    if not asked:
      return out
    texts = [self._query_prefix + queries[i][:_MAX_QUERY_CHARS] for i in asked]
    # One at a time: the device is one, and a program is compiled once.
    with self._lock:
      scores, places = self._index.search(self._encode(texts), topk)
    for i, found, at in zip(asked, scores, places, strict=True):
      out[i] = [
        Passage(p.id, p.contents, float(score))
        for p, score in zip(
          map(self.corpus.__getitem__, at), found, strict=True
        )
      ]
    return out


class Index:
  """Vectors on devices, and the best of them for a query.

  Exact, and the same for any number of devices up to rounding; of equal
  scores the first vector comes first.
  """

  def __init__(
    self, vectors_ND: np.ndarray, devices: Sequence[jax.Device] | None = None
  ):
    devices = jax.devices() if devices is None else devices
    self._mesh = Mesh(np.array(devices), ('passage',), (AxisType.Auto,))
    self._n, self._shards = len(vectors_ND), len(devices)
    rows = NamedSharding(self._mesh, PartitionSpec('passage', None))
    shape = (-(-self._n // self._shards) * self._shards, vectors_ND.shape[1])
    # Each device reads its own rows of what may be a memory map.
    self._vectors = jax.make_array_from_callback(
      shape, rows, lambda at: _rows(vectors_ND, at, shape)
    )

  def search(
    self, queries_BD: np.ndarray, k: int
  ) -> tuple[np.ndarray, list[list[int]]]:
    """(scores [B, K], places of K vectors for each query), best first.

    K is k, or the number of vectors if that is smaller.
    """
    b = len(queries_BD)
    padded = np.zeros((1 << (b - 1).bit_length(), queries_BD.shape[1]))
    padded[:b] = queries_BD
    scores, places = _search(
      self._vectors, padded.astype(np.float32), self._n, k=min(k, self._n),
      mesh=self._mesh,
    )  # fmt: skip
    return np.asarray(scores)[:b], np.asarray(places)[:b].tolist()


def _rows(vectors: np.ndarray, at, shape) -> np.ndarray:
  start, stop, _ = at[0].indices(shape[0])
  out = np.zeros((stop - start, shape[1]), np.float32)
  real = vectors[start:stop]
  out[: len(real)] = real
  return out


@functools.partial(jax.jit, static_argnames=('k', 'mesh'))
def _search(vectors_ND, queries_BD, n, *, k: int, mesh: Mesh):
  """Each device's best, and the best of those."""

  def local(vectors_MD, queries_BD, n):
    m = vectors_MD.shape[0]
    first = jax.lax.axis_index('passage') * m
    scores_BM = jnp.matmul(queries_BD, vectors_MD.T, precision='highest')
    is_real_M = first + jnp.arange(m) < n
    scores_BM = jnp.where(is_real_M, scores_BM, -jnp.inf)
    best_BK, place_BK = jax.lax.top_k(scores_BM, min(k, m))
    return best_BK, first + place_BK

  spec = PartitionSpec
  best, place = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(spec('passage', None), spec(), spec()),
    out_specs=(spec(None, 'passage'), spec(None, 'passage')),
  )(vectors_ND, queries_BD, n)
  # The shards stand in order, so that of equals the first stays the first.
  best_BK, at_BK = jax.lax.top_k(best, k)
  return best_BK, jnp.take_along_axis(place, at_BK, axis=1)


# ---- on disk ----------------------------------------------------------------


def build(
  corpus: Corpus,
  encode: Encode,
  folder: pathlib.Path,
  *,
  made_of: list,
  prefix: str,
  block: int,
) -> np.ndarray:
  """float32 [N, D], memory mapped: the vectors of a corpus, kept in `folder`.

  Block after block in files of their own, each whole or not there; those of
  another corpus or encoder are removed.
  """
  if not len(corpus):
    raise ValueError(f'{corpus.path} holds no passage: there is no index')
  text = json.dumps([*made_of, block])
  note, whole = folder / 'made_of.json', folder / 'vectors.npy'
  folder.mkdir(parents=True, exist_ok=True)
  if not note.exists() or note.read_text('utf-8') != text:
    note.unlink(missing_ok=True)
    for path in folder.glob('*.npy'):
      path.unlink()
    note.write_text(text, 'utf-8')
  if not whole.exists():
    parts = []
    for start in range(0, len(corpus), block):
      path = folder / f'block_{start}.npy'
      if not path.exists():
        stop = min(start + block, len(corpus))
        texts = [prefix + corpus[i].contents for i in range(start, stop)]
        _save(path, encode(texts).astype(np.float32))
      parts.append(path)
    first = np.load(parts[0], mmap_mode='r')
    partial = whole.with_suffix('.partial')
    out = np.lib.format.open_memmap(
      partial, 'w+', np.float32, (len(corpus), first.shape[1])
    )
    for i, path in enumerate(parts):
      part = np.load(path)
      out[i * block : i * block + len(part)] = part
    out.flush()
    os.replace(partial, whole)
    for path in parts:
      path.unlink()
  return np.load(whole, mmap_mode='r')


def _save(path: pathlib.Path, array: np.ndarray) -> None:
  partial = path.with_suffix('.partial')
  with partial.open('wb') as file:
    np.save(file, array)
  os.replace(partial, path)
