"""Dense retrieval: exact, whatever the number of devices; built once."""

import hashlib
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from agentjax.dense import Dense, Index
from agentjax.env.retrieval.passages import Corpus, Passage, write_corpus


class Toy:
  """Texts to vectors that depend on the text; counts what it encodes."""

  def __init__(self):
    self.seen = []

  def __call__(self, texts):
    self.seen += texts
    return np.stack([self._one(t) for t in texts])

  def _one(self, text):
    seed = list(hashlib.sha256(text.encode()).digest())
    v = np.random.default_rng(seed).normal(size=16)
    return (v / np.linalg.norm(v)).astype(np.float32)


@pytest.fixture
def corpus(tmp_path):
  return write_corpus(
    tmp_path / 'c.jsonl',
    [Passage(f'p{i}', f'"{i}"\ntext {i}') for i in range(37)],
  )


def by_hand(vectors, queries, k):
  scores = queries @ vectors.T
  order = np.argsort(-scores, axis=1, kind='stable')[:, :k]
  return np.take_along_axis(scores, order, 1), order.tolist()


@pytest.mark.parametrize(('n', 'k'), [(37, 5), (8, 8), (3, 10), (1, 1)])
def test_the_best_are_those_of_plain_arithmetic(n, k):
  rng = np.random.default_rng(n)
  vectors = rng.normal(size=(n, 16)).astype(np.float32)
  queries = rng.normal(size=(3, 16)).astype(np.float32)
  scores, places = Index(vectors).search(queries, k)
  wanted = by_hand(vectors, queries, k)
  np.testing.assert_allclose(scores, wanted[0], rtol=1e-5, atol=1e-5)
  assert places == wanted[1]


SHARDED = """
import numpy as np, jax
from agentjax.dense import Index
assert jax.device_count() == 8
for n in (37, 5, 64):
  rng = np.random.default_rng(n)
  vectors = rng.normal(size=(n, 16)).astype(np.float32)
  vectors[n // 2] = vectors[0]  # equals, on two devices
  queries = np.stack([vectors[0], vectors[-1]])
  for k in (1, 3, 5):
    one = Index(vectors, jax.devices()[:1]).search(queries, k)
    all8 = Index(vectors).search(queries, k)
    np.testing.assert_allclose(one[0], all8[0], rtol=1e-6)
    assert one[1] == all8[1], (n, k, one, all8)
    assert all8[1][0][:2] == [0, n // 2][:k], all8
print('same')
"""


def test_eight_devices_find_what_one_finds():
  environment = os.environ | {
    'PYTHONPATH': os.pathsep.join(sys.path),
    'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
    'JAX_PLATFORMS': 'cpu',
  }
  done = subprocess.run(
    [sys.executable, '-c', SHARDED],
    env=environment,
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert done.stdout == 'same\n', done.stderr


def test_passages_come_back_with_their_scores(corpus):
  find = Dense(corpus, Toy(), 'toy', passage_prefix='passage: ',
               query_prefix='passage: ')  # fmt: skip
  asked = [corpus[i].contents for i in (4, 30)]
  found = find([asked[0], ' ', asked[1]], 3)
  assert [f[0].id for f in (found[0], found[2])] == ['p4', 'p30']
  assert found[1] == [] and len(found[0]) == 3
  assert found[0][0].score == pytest.approx(1.0, abs=1e-5)
  assert found[0][0].contents == asked[0]
  assert find([], 3) == []
  with pytest.raises(ValueError, match='topk'):
    find(['a'], 0)


def test_vectors_are_computed_once(corpus):
  toy = Toy()
  first = Dense(corpus, toy, 'toy')(['text'], 5)
  assert len(toy.seen) == 38
  assert Dense(corpus, toy, 'toy')(['text'], 5) == first
  assert len(toy.seen) == 39
  assert {p.name for p in corpus.path.parent.glob('c.jsonl.dense/*')} == {
    'made_of.json', 'vectors.npy',
  }  # fmt: skip


@pytest.mark.parametrize('change', ['name', 'prefix', 'corpus'])
def test_other_vectors_are_not_taken_up(corpus, change):
  toy = Toy()
  Dense(corpus, toy, 'toy')
  if change == 'corpus':
    corpus = write_corpus(corpus.path, [Passage('q', '"x"\ny')] * 40)
  name = 'other' if change == 'name' else 'toy'
  prefix = 'passage: ' if change == 'prefix' else ''
  Dense(corpus, toy, name, passage_prefix=prefix)
  assert len(toy.seen) == 37 + len(corpus)


def test_a_build_that_was_killed_goes_on(corpus):
  class Killed(Toy):
    def __call__(self, texts):
      if len(self.seen) >= 20:
        raise KeyboardInterrupt
      return super().__call__(texts)

  killed, toy = Killed(), Toy()
  with pytest.raises(KeyboardInterrupt):
    Dense(corpus, killed, 'toy', block=10)
  (corpus.path.parent / 'c.jsonl.dense/block_20.partial').write_bytes(b'half')
  find = Dense(corpus, toy, 'toy', block=10)
  assert len(killed.seen) == 20 and len(toy.seen) == 17
  whole = Dense(corpus, Toy(), 'toy', corpus.path.parent / 'elsewhere')
  assert find(['text'], 37) == whole(['text'], 37)


def test_many_threads_get_their_own_answers(corpus):
  find, found = Dense(corpus, Toy(), 'toy'), {}

  def ask(i):
    found[i] = find([corpus[i].contents], 1)[0][0].id

  threads = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
  for t in threads:
    t.start()
  for t in threads:
    t.join(60)
  assert found == {i: f'p{i}' for i in range(20)}


def test_an_empty_corpus_has_no_index(tmp_path):
  path = tmp_path / 'c.jsonl'
  path.write_text('')
  with pytest.raises(ValueError, match='no passage'):
    Dense(Corpus(path), Toy(), 'toy')
