"""Corpora on disk, BM25, hybrids and the control, from many threads."""

import importlib.util
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from requirements import require

from agentjax.env.retrieval.combined import Hybrid, Random
from agentjax.env.retrieval.lexical import Bm25, best
from agentjax.env.retrieval.passages import (
  Corpus,
  Passage,
  as_text,
  write_corpus,
)

TEXTS = [
  ('France', 'The capital is Paris, on the river Seine.'),
  ('Chad', 'The capital is N’Djamena; the lake is Lake Chad.'),
  ('Nepal', 'Mount Everest, 8,849 metres, is the highest point.'),
  ('China', 'Mount Everest stands on the border; the capital is Beijing.'),
]
PASSAGES = [
  Passage(str(i), f'"{title}"\n{text}') for i, (title, text) in enumerate(TEXTS)
]


@pytest.fixture
def corpus(tmp_path):
  return write_corpus(tmp_path / 'corpus.jsonl', PASSAGES)


@pytest.fixture
def bm25(corpus):
  need_bm25s()
  return Bm25(corpus)


def need_bm25s():
  require(
    'bm25s',
    importlib.util.find_spec('bm25s') is not None,
    "pip install 'agentjax[data]'",
  )


def ids(found):
  return [[p.id for p in passages] for passages in found]


# ---- corpora ----------------------------------------------------------------


def test_a_corpus_comes_back(corpus):
  assert list(corpus) == PASSAGES == [corpus[i] for i in range(4)]
  assert corpus[3].title == '"China"' and corpus[0].text == TEXTS[0][1]
  line = json.loads(corpus.path.read_text('utf-8').splitlines()[1])
  assert line == {'id': '1', 'contents': PASSAGES[1].contents}
  with pytest.raises(IndexError, match='passage 4 of 4'):
    corpus[4]


def test_a_file_that_changed_is_read_anew(corpus):
  write_corpus(corpus.path, PASSAGES[:2])
  assert [p.id for p in Corpus(corpus.path)] == ['0', '1']
  assert list(corpus[i] for i in range(4)) == PASSAGES  # who has it open


@pytest.mark.parametrize(
  'line',
  ['', '[]', '{"id": 1}', '{"id": 1, "contents": 2}', '{"contents": ""}'],
)
def test_a_line_that_is_no_passage_is_named(tmp_path, line):
  path = tmp_path / 'c.jsonl'
  path.write_text('{"id": 7, "contents": "a\\nb"}\n' + line + '\n')
  corpus = Corpus(path)
  assert corpus[0] == Passage('7', 'a\nb')
  with pytest.raises(ValueError, match='line 2 is no passage'):
    corpus[1]


def test_a_folder_that_is_not_ours_is_read_as_well(tmp_path):
  path = write_corpus(tmp_path / 'c.jsonl', PASSAGES).path
  (tmp_path / 'c.jsonl.places.npy').unlink()
  (tmp_path / 'c.jsonl.places.npy').mkdir()  # nothing can be kept there
  assert len(Corpus(path)) == 4


def test_passages_as_text():
  text = as_text(PASSAGES[:2])
  assert text.startswith('Doc 1(Title: "France") The capital is Paris')
  assert text.count('\n') == 2 and 'Doc 2(Title: "Chad")' in text


# ---- BM25 -------------------------------------------------------------------


def test_what_fits_best_comes_first(bm25):
  found = bm25(['capital of France', 'highest mount everest'], 3)
  assert ids(found)[0][0] == '0' and ids(found)[1][0] == '2'
  scores = [p.score for p in found[0]]
  assert scores == sorted(scores, reverse=True) and scores[-1] > 0
  assert found[0][0].contents == PASSAGES[0].contents


def test_queries_that_say_nothing_find_nothing(bm25):
  assert bm25(['', 'the of', 'zzzz', '?!'], 3) == [[], [], [], []]
  assert bm25([], 3) == []
  assert len(bm25(['capital ' * 100_000], 3)[0]) == 3


@pytest.mark.parametrize('topk', [0, -1, 101, True, 2.0])
def test_a_number_of_passages_that_nobody_means(bm25, topk):
  with pytest.raises(ValueError, match='topk'):
    bm25(['capital'], topk)


def test_the_index_is_built_once_and_memory_mapped(bm25, corpus):
  made = {p: p.stat().st_mtime_ns for p in bm25.folder.iterdir()}
  again = Bm25(corpus)
  assert {p: p.stat().st_mtime_ns for p in bm25.folder.iterdir()} == made
  assert isinstance(again._index.scores['data'], np.memmap)
  assert again(['capital'], 4) == bm25(['capital'], 4)


def test_another_corpus_or_other_parameters_have_another_index(bm25, corpus):
  before = bm25(['capital'], 4)
  assert Bm25(corpus, k1=2.0)(['capital'], 4) != before
  write_corpus(corpus.path, PASSAGES[2:])
  assert ids(Bm25(Corpus(corpus.path))(['capital'], 4)) == [['3']]
  assert bm25(['capital'], 4) == before  # it has its files still


def test_no_half_index_is_read(bm25, corpus):
  (bm25.folder / 'corpus.txt').unlink()  # as a build that was killed leaves it
  (bm25.folder / 'data.csc.index.npy').write_bytes(b'half')
  assert ids(Bm25(corpus)(['france'], 1)) == [['0']]


def test_many_build_and_many_ask_at_once(corpus):
  need_bm25s()
  found, errors, made = [], [], set()

  def ask():
    try:
      bm25 = Bm25(corpus)
      made.add((bm25.folder / 'corpus.txt').stat().st_ino)
      found.append(ids(bm25(['france', 'nepal'], 1)))
    except Exception as error:
      errors.append(error)

  threads = [threading.Thread(target=ask) for _ in range(8)]
  for t in threads:
    t.start()
  for t in threads:
    t.join(60)
  assert not errors and found == [[['0'], ['2']]] * 8
  assert len(made) == 1  # one built, the others waited
  assert not list(corpus.path.parent.glob('*.partial*'))


def test_it_loads_no_jax(corpus):
  need_bm25s()
  code = (
    'import sys\n'
    'from agentjax.env.retrieval.lexical import Bm25\n'
    'from agentjax.env.retrieval.passages import Corpus\n'
    f'Bm25(Corpus({str(corpus.path)!r}))(["france"], 2)\n'
    'print([m for m in sys.modules if m.split(".")[0] == "jax"])\n'
    'import jax.numpy\n'
    'print(jax.numpy.arange(3).sum())'
  )
  done = subprocess.run(
    [sys.executable, '-c', code],
    env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.stdout == '[]\n3\n', done.stderr


def test_best_of_equals_are_the_first():
  scores = np.array([0.0, 2.0, 1.0, 2.0, 1.0, 1.0], np.float32)
  assert best(scores, 3).tolist() == [1, 3, 2]
  assert best(scores, 5).tolist() == [1, 3, 2, 4, 5]
  assert best(scores, 9).tolist() == [1, 3, 2, 4, 5]
  assert best(np.zeros(4), 2).tolist() == []


# ---- others -----------------------------------------------------------------


class Listed:
  """A retriever that finds what it is told."""

  def __init__(self, corpus, order):
    self._found = [corpus[i] for i in order]

  def __call__(self, queries, topk):
    return [self._found[:topk] for _ in queries]


def test_a_hybrid_joins_rankings(corpus):
  one, two = Listed(corpus, [0, 1, 2]), Listed(corpus, [3, 1])
  (found,) = Hybrid([one, two])(['x'], 3)
  assert [p.id for p in found] == ['1', '0', '3']
  assert found[0].score == pytest.approx(2 / 62)
  assert found[1].score == pytest.approx(1 / 61)
  (found,) = Hybrid([one, two], depth=1)(['x'], 1)
  assert [p.id for p in found] == ['0']
  with pytest.raises(ValueError, match='nothing to join'):
    Hybrid([])


def test_the_control_finds_anything_and_the_same_again(corpus):
  control = Random(corpus, seed=1)
  found = control(['a', 'b', 'a'], 2)
  assert found[0] == found[2] and all(len(f) == 2 for f in found)
  assert len({p.id for p in found[0]}) == 2
  assert control(['a'], 100)[0] != Random(corpus, seed=2)(['a'], 100)[0]
