"""`--config.section.key=value` on the command line, checked before a run.

Floor 4. The config file says which keys there are and of what type; an
override may only change a value. A misspelt key that were silently ignored,
or a float that were silently cut to an int, would cost a whole run, so each is
refused with the nearest valid name. Knows ml_collections, no key and no run.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Sequence
from typing import Any

import ml_collections


class UsageError(Exception):
  """The command line is wrong; the message is for the person who wrote it."""


def split(
  argv: Sequence[str], flag: str = 'config'
) -> tuple[list[str], list[tuple[str, str]]]:
  """Parts a command line into other arguments and (path, text) overrides.

  Raises:
    UsageError: an override has no '='.
  """
  rest, found, problems = [], [], []
  for argument in argv:
    name, equals, text = argument.partition('=')
    bare = name.lstrip('-')
    if name == bare or not bare.startswith((f'{flag}.', f'no{flag}.')):
      rest.append(argument)
    elif not equals or bare.startswith('no'):
      path = bare.split('.', 1)[1]
      problems.append(f'{argument}: write --{flag}.{path}=value')
    else:
      found.append((bare[len(flag) + 1 :], text))
  _raise(problems)
  return rest, found


def apply(
  config: ml_collections.ConfigDict, overrides: Sequence[tuple[str, str]]
) -> None:
  """Sets the values of `overrides` in `config`, all of them or none.

  A value is read by the type that stands in the config: text as it is, int,
  float, true or false, and tuples as Python writes them. Where None stands,
  any Python literal will do, and what is none is text; a typed placeholder
  takes its type or None.

  Raises:
    UsageError: unknown keys, sections, or values of a wrong type, all at once.
  """
  values, problems = [], []
  for path, text in overrides:
    try:
      values.append((path, _read(config, path, text)))
    except UsageError as e:
      problems.append(f'--config.{path}={text}: {e}')
  _raise(problems)
  for path, value in values:
    parent, key = _resolve(config, path)
    parent[key] = value


def _raise(problems: Sequence[str]) -> None:
  if problems:
    raise UsageError('\n'.join(problems))


def _read(config: ml_collections.ConfigDict, path: str, text: str) -> Any:
  parent, key = _resolve(config, path)
  old = parent[key]
  if isinstance(old, ml_collections.ConfigDict):
    keys = ', '.join(f'--config.{path}.{k}' for k in old)
    off = text == 'None' and 'steps' in old
    off = f'; --config.{path}.steps=0 switches it off' if off else ''
    raise UsageError(f'{path} is a section: override its keys ({keys}){off}')
  expected = parent.get_type(key)
  if old is None and text == 'None':
    return None
  if old is None and expected is type(None):
    return _literal(text, text)
  if expected in (list, tuple):
    return _read_tuple(old, text)
  return _read_value(expected, text)


def _resolve(
  config: ml_collections.ConfigDict, path: str
) -> tuple[ml_collections.ConfigDict, str]:
  """The section that holds the last name of `path`, and that name."""
  here, walked = config, []
  *sections, key = path.split('.')
  for name in sections:
    if name in here and not isinstance(here[name], ml_collections.ConfigDict):
      leaf = '.'.join([*walked, name])
      raise UsageError(
        f'{leaf} is a value ({here[name]!r}), not a section: write '
        f'--config.{leaf}=value'
      )
    if name not in here:
      break
    here = here[name]
    walked.append(name)
  if len(walked) == len(sections) and key in here:
    return here, key
  unknown = '.'.join([*walked, path.split('.')[len(walked)]])
  raise UsageError(f'there is no key {unknown}{_nearest(config, path)}')


def _nearest(config: ml_collections.ConfigDict, path: str) -> str:
  leaves = _leaves(config)
  section, _, key = path.rpartition('.')
  siblings = [x for x in leaves if x.rpartition('.')[0] == section]
  names = {x.rpartition('.')[2]: x for x in siblings}
  add = 'an option that the config file leaves out has to be added to the file'
  also = ''
  if close := difflib.get_close_matches(key, names, 1):
    guess = names[close[0]]
  elif same := [x for x in leaves if x.rpartition('.')[2] == key]:
    # The right name in the wrong section, or one that the file leaves out.
    also = f' ({add})'
    guess = max(
      same, key=lambda x: difflib.SequenceMatcher(None, x, path).ratio()
    )
  elif not siblings and (
    close := difflib.get_close_matches(path, leaves, 1, cutoff=0.5)
  ):
    guess = close[0]
  else:
    there = siblings or list(config)
    verb = 'is' if len(there) == 1 else 'are'
    return f': there {verb} {", ".join(there)}; {add}'
  return f': did you mean --config.{guess}?{also}'


def _leaves(config: ml_collections.ConfigDict, prefix: str = '') -> list[str]:
  out = []
  for key in config:
    if isinstance(config[key], ml_collections.ConfigDict):
      out += _leaves(config[key], f'{prefix}{key}.')
    else:
      out.append(prefix + key)
  return out


def _read_value(expected: type, text: str) -> Any:
  if expected is str:
    if text == 'None':
      raise UsageError('the value is text and cannot be None')
    return text
  if expected is bool:
    if text.lower() not in ('true', 'false'):
      raise UsageError(f'{text!r} is not a bool: write true or false')
    return text.lower() == 'true'
  if expected in (int, float):
    try:
      return expected(text)
    except ValueError:
      raise UsageError(
        f'{text!r} is not {"an int" if expected is int else "a float"}'
      ) from None
  raise UsageError(
    f'a {expected.__name__} cannot be given on the command line: change the '
    'config file'
  )


def _read_tuple(old: Sequence[Any], text: str) -> Any:
  value = _literal(text, None)
  if not isinstance(value, (list, tuple)):
    raise UsageError(
      f"{text!r} is not a tuple: write it as Python does, as in '(1, 2)' or "
      '\'("a",)\''
    )
  kinds = {type(x) for x in old}
  if kinds == {float}:
    value = [float(x) if type(x) is int else x for x in value]
  # An empty or mixed tuple says nothing of its elements.
  if len(kinds) == 1 and (wrong := [x for x in value if type(x) not in kinds]):
    raise UsageError(
      f'{wrong[0]!r} is not {"an" if kinds == {int} else "a"} '
      f'{kinds.pop().__name__}, as the elements of {old!r} are'
    )
  return type(old)(value)


def _literal(text: str, otherwise: Any) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return otherwise
