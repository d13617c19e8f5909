"""From a config to a run: every section is one call.

Floor 4. A section with the key `call` is a call: the dotted name is resolved,
the other keys are its keyword arguments, and what is itself a section is built
first. A section with the key `function` is that function with its other keys
bound, for whoever calls it later; one with the key `value` is the named thing
itself. A key that the callable does not take is refused with the nearest name.
There is no other rule, and no registry.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import typing
from collections.abc import Collection, Mapping
from typing import Any

from agentjax import storage
from agentjax.checkpoint import DamagedCheckpoint
from agentjax.env.base import InfraError
from agentjax.model.tensors import WeightsError
from agentjax.train import train
from agentjax.training import (
  ConfigError,
  Diverged,
  TooManyFailures,
  Training,
)
from agentjax.workdir import WorkdirLocked

# What ends a run that a person can put right: the message is enough.
REFUSALS = (
  WorkdirLocked,
  storage.WorkdirMismatch,
  storage.StorageFull,
  storage.Unreadable,
  DamagedCheckpoint,
  TooManyFailures,
  Diverged,
  WeightsError,
  InfraError,
)

Unusable = storage.Unusable

_KINDS = ('call', 'function')
_PLAIN_TYPES = (int, float, bool, str)


def build(section: Any, path: str = 'config') -> Any:
  """What a section stands for; anything that is no section is itself.

  Raises:
    ConfigError: a name that does not resolve, a key that is not taken, or a
      value that the callable refuses (ValueError) or cannot read (OSError).
  """
  if isinstance(section, (list, tuple)):
    return type(section)(
      build(item, f'{path}[{i}]') for i, item in enumerate(section)
    )
  if not isinstance(section, Mapping):
    return section
  if 'value' in section:
    if surplus := sorted(set(section) - {'value'}):
      raise ConfigError(f'{path} is a value and takes no {surplus}')
    return resolve(section['value'], f'{path}.value')
  kind = 'call' if 'call' in section else 'function'
  target = None
  if kind in section:
    # First, as what is below may be slow to build.
    target = resolve(section[kind], f'{path}.{kind}')
    given = set(section) - {kind}
    check(target, given, path, complete=kind == 'call', section=section)
  arguments = {
    key: build(value, f'{path}.{key}')
    for key, value in section.items()
    if target is None or key != kind
  }
  if target is None:
    return arguments
  _check_types(target, arguments, path)
  if kind == 'function':
    return functools.partial(target, **arguments) if arguments else target
  try:
    return target(**arguments)
  except (ValueError, OSError) as error:
    raise ConfigError(f'{path}: {error}') from error


def resolve(name: str, path: str) -> Any:
  """The object of a dotted name, such as `agentjax.rl.losses.ppo_clip`."""
  parts = str(name).split('.')
  if not all(p.isidentifier() for p in parts):
    raise ConfigError(
      f'{path} is {name!r}: give a dotted name, such as '
      'agentjax.rl.losses.ppo_clip'
    )
  for n in range(len(parts), 0, -1):
    module_name = '.'.join(parts[:n])
    try:
      found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
      if error.name and not (module_name + '.').startswith(error.name + '.'):
        raise ConfigError(f'{path}: {name} needs {error.name}') from error
      continue
    for part in parts[n:]:
      if not hasattr(found, part):
        near = difflib.get_close_matches(part, dir(found), 1)
        hint = f', nearest is {near[0]}' if near else ''
        raise ConfigError(f'{path}: {name} has no {part!r}{hint}')
      found = getattr(found, part)
    return found
  raise ConfigError(f'{path}: there is no module for {name!r}')


def check(
  target: Any,
  arguments: Collection[str],
  path: str,
  *,
  complete: bool,
  section: Mapping[str, Any],
) -> None:
  """Refuses names of arguments that `target` does not take, or lacks.

  `section`: what they stand in, to be shown without them.
  """
  if not callable(target):
    raise ConfigError(f'{path}: {target!r} cannot be called')
  parameters = inspect.signature(target).parameters
  takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  for key in sorted(arguments):
    if key not in parameters and not takes_all:
      near = difflib.get_close_matches(key, list(parameters), 1)
      hint = f', nearest is {near[0]}' if near else ''
      if path != 'config' and '[' not in path:
        left = {
          k: v for k, v in section.items() if k in parameters or k in _KINDS
        }
        hint += f'; without it: --{path}="{left}"'
      raise ConfigError(f'{path}.{key} is not known{hint}')
  missing = [
    p.name
    for p in parameters.values()
    if p.default is p.empty
    and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    and p.name not in arguments
  ]
  if complete and missing:
    raise ConfigError(f'{path} lacks {missing}')


def _check_types(target: Any, arguments: Mapping[str, Any], path: str) -> None:
  """Refuses what is no number, text or truth value where one is asked for."""
  owner = target.__init__ if inspect.isclass(target) else target
  try:
    hints = typing.get_type_hints(owner)
  except (NameError, TypeError):  # of a callable that says nothing of types
    return
  for key, value in arguments.items():
    wanted = hints.get(key)
    if wanted not in _PLAIN_TYPES:
      continue
    # An int is a float to a person, and a bool is an int to Python alone.
    taken = (int, float) if wanted is float else wanted
    is_bool = isinstance(value, bool)
    if not isinstance(value, taken) or is_bool != (wanted is bool):
      raise ConfigError(
        f'{path}.{key} is {value!r}, a {type(value).__name__}: give a value '
        f'of type {wanted.__name__}'
      )


def training(config: Mapping[str, Any]) -> Training:
  """The run that a config describes."""
  return build({'call': 'agentjax.training.Training', **dict(config.items())})


def run(config: Mapping[str, Any], workdir: str) -> dict[str, Any]:
  """Runs a config in a workdir; returns its summary."""
  values = plain(config)
  try:
    storage.dump_json(values)
  except TypeError as error:
    raise ConfigError(f'the config cannot be recorded: {error}') from error
  return train(workdir, training(values), values)


def plain(config: Any) -> Any:
  """A config as dicts and tuples, whatever ml_collections made of it."""
  if isinstance(config, Mapping) or hasattr(config, 'items'):
    return {k: plain(v) for k, v in config.items()}
  if isinstance(config, (list, tuple)):
    return tuple(plain(v) for v in config)
  return config
