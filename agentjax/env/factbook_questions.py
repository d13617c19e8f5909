"""Questions about the Factbook, of one and of two hops, with exact answers.

Floor 1, env. One hop names a country and asks for a fact of it. Two hops name
it by another fact: the capital of the country whose highest point is Tahat.
Every value in a question is one country's alone, so that it has one answer,
and countries are split, so that no country, and no value of one, stands in
both train and test. A scripted expert answers by searching.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import re
from collections.abc import Iterator

import numpy as np

from agentjax.env import factbook
from agentjax.env.demonstrate import Act, Expert, call
from agentjax.env.factbook import RELATIONS, Country, Relation
from agentjax.env.search_r1 import normalize
from agentjax.types import Message, Task

SPLITS = ('train', 'test')
_TITLE = re.compile(r'Doc \d+\(Title: "(.+?): [^"]*"\) (.*)')
# A country that is named so in a question; 'Gaza, Gaza Strip' is not.
_NAME = re.compile(r"[^\W\d_][\w'’.\- ]*")
FLAWS = ('answers_without_searching', 'first_hop_only', 'wrong_passage')


def tasks(
  split: str,
  n: int | None = None,
  seed: int = 0,
  *,
  hops: int = 2,
  words: int = 100,
  prompt: str = '{question}',
) -> list[Task]:
  """`n` different questions, or all, in an order of `seed`.

  Ids begin with 'factbook-', and are the same whatever n and seed.

  Args:
    words: of the corpus's passages, in which the gold ones are named.
    prompt: around the question.

  Raises:
    ValueError: unknown split or hops, or not that many questions.
  """
  if split not in SPLITS or hops not in (1, 2):
    raise ValueError(
      f'split {split!r}, hops {hops}: choose one of {SPLITS}, and 1 or 2'
    )
  made = _made(split, hops, words)
  n = len(made) if n is None else n
  if not 0 <= n <= len(made):
    raise ValueError(
      f'{n} questions of {hops} hops in {split}: there are {len(made)}'
    )
  order = np.random.default_rng([seed, hops]).permutation(len(made))
  return [_worded(made[i], prompt) for i in order[:n]]


def _worded(task: Task, prompt: str) -> Task:
  text = prompt.format(question=task.metadata['question'])
  return Task(task.id, (Message('user', text),), task.verify, task.metadata)


def held_out(country: Country) -> bool:
  """Whether a country belongs to the test split: about one in four."""
  digest = hashlib.sha256(f'country {country.code}'.encode()).digest()
  return digest[0] < 64


@functools.cache
def facts() -> dict[str, dict[str, str]]:
  """country code -> relation -> value, of the values that tell a country.

  Such a value is that country's alone among all of all relations, is in no
  other country's field however that is written, and is no country's name.
  """
  found = {
    c.code: {r.name: v for r in RELATIONS if (v := factbook.value(c, r))}
    for c in factbook.countries()
  }
  # Over relations too: the capital of one may be a mountain of another.
  count = collections.Counter(
    said
    for of in found.values()
    for said in {normalize(v) for v in of.values()}
  )
  names = {c.code: normalize(c.name) for c in factbook.countries()}
  taken = collections.Counter(names.values())
  return {
    code: {
      name: value
      for name, value in of.items()
      if (said := normalize(value))
      and count[said] == 1
      and not taken[said]
      and f' {said} ' not in f' {names[code]} '
      and names[code] not in said  # Mexico City, Paraguayos
      and _countries_with(name, said) == 1
    }
    for code, of in found.items()
  }


def _countries_with(relation: str, said: str) -> int:
  """In how many countries' fields of a relation a normalized value stands."""
  return sum(f' {said} ' in f' {text} ' for text in _fields(relation))


@functools.cache
def _fields(relation: str) -> tuple[str, ...]:
  (place,) = (r.place[:2] for r in RELATIONS if r.name == relation)
  return tuple(
    normalize(text)
    for c in factbook.countries()
    if (text := c.fields.get(place))
  )


@functools.cache
def _made(split: str, hops: int, words: int) -> tuple[Task, ...]:
  out = []
  for country in factbook.countries():
    if held_out(country) != (split == 'test'):
      continue
    if not _NAME.fullmatch(country.name):
      continue
    own = [r for r in RELATIONS if r.name in facts()[country.code]]
    for asked in own:
      keys = [None] if hops == 1 else [r for r in own if r != asked]
      out += [_task(country, key, asked, words) for key in keys]
  return tuple(task for task in out if task is not None)


def _task(
  country: Country, key: Relation | None, asked: Relation, words: int
) -> Task | None:
  """A question, or None where a value is cut apart by the passages, or the
  answer stands in the question (aircraft of Sweden are SE, its sites .se)."""
  of = facts()[country.code]
  who = key.names.format(v=of[key.name]) if key else country.name
  through = f'-{key.name}' if key else ''
  wanted = [(key, of[key.name])] if key else []
  wanted.append((asked, of[asked.name]))
  gold = [_gold(country, r, v, words) for r, v in wanted]
  question = asked.asks.format(x=who)
  answer = normalize(of[asked.name])
  if None in gold or f' {answer} ' in f' {normalize(question)} ':
    return None
  return Task(
    f'factbook-{country.code}{through}-{asked.name}',
    (Message('user', question),),
    verify={'answers': [of[asked.name]]},
    metadata={
      'question': question,
      'hops': len(wanted),
      'country': country.name,
      'relations': [r.name for r, _ in wanted],
      'values': [v for _, v in wanted],
      'gold': gold,
    },
  )


def _gold(
  country: Country, relation: Relation, value: str, words: int
) -> str | None:
  """The id of the first passage of the relation's field with the value."""
  for passage in factbook.pieces(country, relation.place[:2], words):
    if value in passage.text:
      return passage.id
  return None


# ---- a scripted expert ------------------------------------------------------


def expert(rng: np.random.Generator, task: Task, flaws: float = 0.0) -> Expert:
  """Answers `task` by searching, but with probability `flaws` has one flaw.

  It knows the question alone and reads the rest: where the search does not
  find what it needs, it answers as well as it can. Run it by `demonstrate`.
  """
  flaw = FLAWS[rng.integers(len(FLAWS))] if rng.random() < flaws else None
  return _act_out(rng, task, flaw)


def _act_out(rng, task: Task, flaw: str | None) -> Iterator[Act]:
  by_name = {r.name: r for r in RELATIONS}
  *keys, asked = (by_name[name] for name in task.metadata['relations'])
  if flaw == 'answers_without_searching':
    others = [of[asked.name] for of in facts().values() if asked.name in of]
    others = [v for v in others if v not in task.verify['answers']]
    guess = others[rng.integers(len(others))]
    yield Act(answer=guess, thought='I think I know.')
    return
  country = None if keys else task.metadata['country']
  for key in keys:
    value = task.metadata['values'][0]
    thought = f'I need {key.names.format(v=value)}.'
    (found,) = yield call(
      'search', thought=thought, query=key.query.format(v=value)
    )
    read = _documents(found)
    country = next((name for name, text in read if value in text), None)
    if flaw == 'wrong_passage' and read:
      country = read[-1][0]
    if country is None:
      yield Act(answer='unknown', thought='I did not find it.')
      return
    if flaw == 'first_hop_only':
      yield Act(answer=country, thought=f'It is {country}.')
      return
  what = asked.query.format(v=country)
  thought = asked.asks.format(x=country)
  (found,) = yield call('search', thought=thought, query=what)
  answer = _read_value(asked, country, found) or 'unknown'
  yield Act(answer=answer, thought=f'{country}: {answer}.')


def _documents(text: str) -> list[tuple[str, str]]:
  """(country, text) of each passage as a policy reads it."""
  return _TITLE.findall(text)


def _read_value(asked: Relation, country: str, found: str) -> str | None:
  """What the passages say of the relation, as the Factbook writes it."""
  label = f'{asked.place[2]}: ' if len(asked.place) > 2 else ''
  for name, text in _documents(found):
    at = text.find(label)
    if name == country and at >= 0:
      # Up to where the field's next entry may begin.
      said = text[at + len(label) :].partition('; ')[0]
      if value := asked.read(said):
        return value
  return None
