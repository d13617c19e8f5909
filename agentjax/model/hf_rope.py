"""The rotary positions of a config.json, in either spelling.

Floor 1, model/, the part of `hf_config.py` that reads rope_theta and
rope_scaling (transformers 4) and rope_parameters (5). Every key either has its
effect or is refused by name. This file knows no model types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from agentjax.model.config import RopeScaling

# What each type needs. Keys beyond these and `_ALWAYS` may be null or neutral.
_NEEDED = {
  'default': (),
  'linear': ('factor',),
  'llama3': (
    'factor',
    'low_freq_factor',
    'high_freq_factor',
    'original_max_position_embeddings',
  ),
}
# The original length has no effect but in llama3.
_ALWAYS = (
  'rope_type',
  'type',
  'rope_theta',
  'original_max_position_embeddings',
)
_NEUTRAL = {'factor': 1.0, 'partial_rotary_factor': 1.0}
_GLOBAL, _LOCAL = 'full_attention', 'sliding_attention'


def number(data: Mapping[str, Any], name: str) -> float:
  """The value of `name`.

  Raises:
    ValueError: it is no number above 0, or absent.
  """
  value = data.get(name)
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if not (is_number and 0 < value < math.inf):
    raise ValueError(f'{name}={value!r} must be a number above 0')
  return value


def read_rope(
  data: Mapping[str, Any], theta: float, local_theta: float | None
) -> tuple[float, float, RopeScaling | None]:
  """(theta, theta of local layers, scaling of global layers).

  Args:
    data: a config.json without defaults.
    theta, local_theta: defaults; the latter is None where the architecture
      rotates local layers as it does the others.

  Raises:
    ValueError: names what cannot be read or computed, or contradicts itself.
  """
  scaling = _mapping(data, 'rope_scaling')
  parameters = _mapping(data, 'rope_parameters')
  local = {}
  if {_GLOBAL, _LOCAL} & set(parameters):
    if local_theta is None or set(parameters) - {_GLOBAL, _LOCAL}:
      raise ValueError(
        f'rope_parameters of {sorted(parameters)} are not supported: only '
        f'gemma3_text has them by layer type, of {_GLOBAL} and {_LOCAL}'
      )
    local = _mapping(parameters, _LOCAL)
    parameters = _mapping(parameters, _GLOBAL)
  read = _scaling(parameters, 'rope_parameters')
  if scaling:
    older = _scaling(scaling, 'rope_scaling')
    if parameters and older != read:
      raise ValueError(
        f'rope_scaling={dict(scaling)} and rope_parameters={dict(parameters)} '
        'say different things: remove one of them'
      )
    read = older
  if _scaling(local, f'rope_parameters of {_LOCAL}') is not None:
    raise ValueError(
      f'rope_parameters of {_LOCAL} {dict(local)} are not supported: only '
      "rope_type 'default' is"
    )
  sources = ((data, 'rope_theta'), (parameters, 'rope_theta'))
  theta = _one(theta, *sources, (scaling, 'rope_theta'))
  if local_theta is None:
    return theta, theta, read
  sources = ((data, 'rope_local_base_freq'), (local, 'rope_theta'))
  return theta, _one(local_theta, *sources), read


def _mapping(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
  value = data.get(name)
  if value is None:
    return {}
  if not isinstance(value, Mapping):
    raise ValueError(f'{name}={value!r} must be an object or null')
  return value


def _one(default: float, *sources: tuple[Mapping[str, Any], str]) -> float:
  """The number that all sources which have it agree on."""
  found = [(n, float(number(data, n))) for data, n in sources if n in data]
  if len({value for _, value in found}) > 1:
    said = ', '.join(f'{n}={value}' for n, value in found)
    raise ValueError(f'{said}: these must be equal, remove all but one')
  return found[0][1] if found else float(default)


def _scaling(said: Mapping[str, Any], where: str) -> RopeScaling | None:
  """The scaling of one object, called `where` in messages."""
  kinds = [said[n] for n in ('rope_type', 'type') if said.get(n) is not None]
  if len(kinds) > 1 and kinds[0] != kinds[1]:
    raise ValueError(
      f'{where} has the types {said["rope_type"]!r} and {said["type"]!r}: '
      'remove the wrong one'
    )
  kind = kinds[0] if kinds else 'default'
  if not isinstance(kind, str) or kind not in _NEEDED:
    raise ValueError(
      f'{where} of type {kind!r} is not supported: choose a checkpoint with '
      f'{", ".join(_NEEDED)}'
    )
  for name, value in said.items():
    if name in _ALWAYS or name in _NEEDED[kind] or value is None:
      continue
    if value != _NEUTRAL.get(name):
      lacks = '' if kinds else ' has no rope_type, so that it'
      raise ValueError(
        f'{where} {dict(said)}{lacks} is not supported: {name} has no effect '
        f'in rope type {kind!r}'
      )
  for name in _NEEDED[kind]:
    if said.get(name) is None:
      raise ValueError(f'{where} {dict(said)} of type {kind!r} lacks {name!r}')
  try:
    values = [number(said, name) for name in _NEEDED[kind]]
  except ValueError as error:
    raise ValueError(f'{where}: {error}') from None
  if kind == 'default':
    return None
  if kind == 'linear':
    return RopeScaling('linear', float(values[0]))
  return RopeScaling('llama3', *map(float, values[:3]), int(values[3]))
