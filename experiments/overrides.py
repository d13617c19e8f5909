"""`--config.section.key=value` on the command line, checked before a run.

Floor 4. The config file says which keys there are and of what type; an
override changes a value, or says with a + that it adds one. A misspelt key
that were silently ignored, or a float that were silently cut to an int, would
cost a whole run, so each is refused with the nearest valid name. Knows
ml_collections, no key and no run.
"""

from __future__ import annotations

import ast
import copy
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
  """Sets the values of `overrides` in `config` in order, all of them or none.

  A value is read by the type that stands in the config: text as it is, int,
  float, true or false, and tuples as Python writes them. Where None stands,
  any Python literal will do, and what is none is text; a typed placeholder
  takes its type or None. A section is given whole, as the file writes it: as
  a dict of Python, which replaces all that it had. `+` before the last name
  adds a key that the file leaves out, of any literal.

  Raises:
    UsageError: unknown keys, sections, or values of a wrong type, all at once.
  """
  trial, problems = copy.deepcopy(config), []
  for path, text in overrides:
    try:
      _set(trial, path, text)
    except UsageError as e:
      problems.append(f'--config.{path}={text}: {e}')
  _raise(problems)
  for path, text in overrides:
    _set(config, path, text)


def _raise(problems: Sequence[str]) -> None:
  if problems:
    raise UsageError('\n'.join(problems))


def _set(config: ml_collections.ConfigDict, path: str, text: str) -> None:
  *sections, last = path.split('.')
  if not last.startswith('+'):
    parent, key = _resolve(config, path)
    old, value = parent[key], _read(parent, key, path, text)
    if isinstance(old, ml_collections.ConfigDict):
      # In its place: a section that stands twice in the file changes twice, as
      # it does where one of its keys is changed.
      with old.unlocked():
        for name in list(old):
          del old[name]
        old.update(value)
    else:
      parent[key] = value
    return
  here, key = _section(config, sections), last[1:]
  if key in here:
    bare = '.'.join([*sections, key])
    raise UsageError(f'{bare} is there already: write --config.{bare}=value')
  if not key.isidentifier():
    raise UsageError(f'{key!r} is no name of a key')
  with here.unlocked():
    here[key] = _written(_literal(text, text))


def _written(value: Any) -> Any:
  """A value of the command line as ml_collections has it."""
  if not isinstance(value, dict):
    return value
  if wrong := [k for k in value if not isinstance(k, str)]:
    raise UsageError(f'{wrong[0]!r} is no name of a key')
  return ml_collections.ConfigDict({k: _written(v) for k, v in value.items()})


def _read(
  parent: ml_collections.ConfigDict, key: str, path: str, text: str
) -> Any:
  old = parent[key]
  if isinstance(old, ml_collections.ConfigDict):
    return _read_section(old, path, text)
  expected = parent.get_type(key)
  if old is None and text == 'None':
    return None
  if old is None and expected is type(None):
    return _written(_literal(text, text))
  if expected in (list, tuple):
    return _read_tuple(old, text)
  return _read_value(expected, text)


_KINDS = ('call', 'function', 'value')


def _read_section(
  old: ml_collections.ConfigDict, path: str, text: str
) -> ml_collections.ConfigDict:
  """All of a section that stands in the config."""
  kinds = [k for k in _KINDS if k in old]
  value = _literal(text, None)
  if isinstance(value, dict) and (not kinds or set(_KINDS) & set(value)):
    return _written(value)
  keys = ', '.join(f'--config.{path}.{k}' for k in old)
  example = "{'key': value}"
  if kinds:
    example = f"{{'{kinds[0]}': '{old[kinds[0]]}', 'option': value}}"
  off = text == 'None' and 'steps' in old
  off = f'; --config.{path}.steps=0 switches it off' if off else ''
  raise UsageError(
    f'{path} is a section: override its keys ({keys}), or give all of it, as '
    f'in --config.{path}="{example}"{off}'
  )


def _section(
  config: ml_collections.ConfigDict, names: Sequence[str]
) -> ml_collections.ConfigDict:
  """The section of that path."""
  here = config
  for i, name in enumerate(names):
    path = '.'.join(names[: i + 1])
    if name not in here:
      raise UsageError(f'there is no key {path}{_nearest(config, path)}')
    if not isinstance(here[name], ml_collections.ConfigDict):
      raise UsageError(
        f'{path} is a value ({here[name]!r}), not a section: write '
        f'--config.{path}=value'
      )
    here = here[name]
  return here


def _resolve(
  config: ml_collections.ConfigDict, path: str
) -> tuple[ml_collections.ConfigDict, str]:
  """The section that holds the last name of `path`, and that name."""
  *sections, key = path.split('.')
  for n in range(len(sections)):
    if sections[n] not in _section(config, sections[:n]):
      raise UsageError(
        f'there is no key {".".join(sections[: n + 1])}{_nearest(config, path)}'
      )
  here = _section(config, sections)
  if key not in here:
    raise UsageError(f'there is no key {path}{_nearest(config, path)}')
  return here, key


def _nearest(config: ml_collections.ConfigDict, path: str) -> str:
  """What may have been meant by a path that is not there."""
  here, walked = config, []
  for name in path.split('.'):
    names = list(here) if isinstance(here, ml_collections.ConfigDict) else []
    close = [name] if name in names else difflib.get_close_matches(name, names)
    if not close:
      break
    walked.append(close[0])
    here = here[close[0]]
  else:
    return f': did you mean --config.{".".join(walked)}?'
  *sections, key = [*walked, name]
  add = (
    'an option that the file leaves out is added by --config.'
    f'{"".join(f"{s}." for s in sections)}+{key or "name"}=value'
  )
  # The right name in the wrong section, or one that the file leaves out.
  leaves = [x for x in _leaves(config) if x.rpartition('.')[2] == name]
  if same := leaves if path.count('.') == len(walked) else []:
    guess = max(
      same, key=lambda x: difflib.SequenceMatcher(None, x, path).ratio()
    )
    return f': did you mean --config.{guess}? ({add})'
  verb = 'is' if len(names) == 1 else 'are'
  there = ', '.join('.'.join([*sections, x]) for x in names)
  return f': there {verb} {there}; {add}'


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
