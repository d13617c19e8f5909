"""The tensors of a checkpoint's files, by name, read in slices.

Floor 1, model/. `load` reads through `Tensors` alone, so that a directory of
safetensors and a GGUF file (`gguf_file`) look the same to it. This file knows
no model.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping

import numpy as np
from safetensors import safe_open

_FLOATS = ('F64', 'F32', 'F16', 'BF16')


class WeightsError(ValueError):
  """A checkpoint that cannot be loaded; the message says which and why."""


@dataclasses.dataclass(frozen=True)
class Tensors:
  """Names, shapes and places of tensors, and how to read a part of one.

  Attributes:
    shapes: name -> shape.
    files: name -> file that holds it.
    read: (name, one slice a dimension) -> that part, in a float dtype, with
      values and order of rows as Hugging Face stores them.
  """

  shapes: Mapping[str, tuple[int, ...]]
  files: Mapping[str, pathlib.Path]
  read: Callable[[str, tuple[slice, ...]], np.ndarray]


def open_safetensors(directory: pathlib.Path) -> Tensors:
  """Tensors of model.safetensors, or of model.safetensors.index.json.

  Only headers are read here. `read` opens the file anew each time: what it
  mapped is given back to the system before the next.

  Raises:
    WeightsError: there is neither, a file is absent or truncated, a tensor is
      not where the index says, or is quantised.
  """
  shapes, files = {}, {}
  for path, names in _files(directory).items():
    with _open(path) as file:
      held = set(file.keys())
      if absent := sorted((names or held) - held):
        raise WeightsError(
          f'{path} lacks {absent[0]!r}, which the index says it holds: the '
          'index and the shards do not belong together, fetch both again'
        )
      for name in names or held:
        part = file.get_slice(name)
        if part.get_dtype() not in _FLOATS:
          raise WeightsError(
            f'{name!r} in {path} is {part.get_dtype()}: only '
            f'{", ".join(_FLOATS)} are supported, dequantise the checkpoint'
          )
        shapes[name], files[name] = tuple(part.get_shape()), path

  def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
    with _open(files[name]) as file:
      return file.get_slice(name)[index]

  return Tensors(shapes, files, read)


def _files(directory: pathlib.Path) -> dict[pathlib.Path, set[str] | None]:
  """Files -> the tensors to take from each; None is all of them."""
  single = directory / 'model.safetensors'
  if single.exists():
    return {single: None}
  index = directory / 'model.safetensors.index.json'
  if not index.exists():
    raise WeightsError(
      f'{directory} has neither model.safetensors nor {index.name}: name a '
      'directory with one of them, or a .gguf file'
    )
  try:
    weight_map = json.loads(index.read_text('utf-8'))['weight_map']
    if not all(isinstance(shard, str) for shard in weight_map.values()):
      raise TypeError('a shard is no file name')
  except (ValueError, KeyError, TypeError, AttributeError, OSError,
          RecursionError) as error:  # fmt: skip
    raise WeightsError(
      f'{index} is not an index of safetensors ({error!r}): fetch it again'
    ) from error
  files: dict[pathlib.Path, set[str] | None] = {}
  for name, shard in weight_map.items():
    files.setdefault(directory / shard, set()).add(name)
  for path in files:
    if not path.exists():
      raise WeightsError(f'{path} is named in {index.name} but is absent')
  return files


def _open(path: pathlib.Path):
  try:
    return safe_open(path, framework='numpy')
  except Exception as error:  # The library raises several types here.
    raise WeightsError(
      f'{path} ({path.stat().st_size} bytes) is truncated or not safetensors '
      f'({error}): fetch it again'
    ) from error
