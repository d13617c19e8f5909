"""Parameters to a directory that transformers and `load` read.

Floor 1, model/. For handing a trained policy on; training resumes from
`checkpoint`, not from here. This file knows no optimizer and no mesh.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from agentjax.model import checkpoint_names as names
from agentjax.model import lora
from agentjax.model.config import ModelConfig
from agentjax.model.hf_config import to_hf_config


def save_params(
  directory: str | os.PathLike,
  params: Mapping[str, Any],
  config: ModelConfig,
  *,
  dtype: Any = None,
  max_shard_bytes: int = 4_000_000_000,
) -> None:
  """Writes config.json and safetensors, in shards where they are large.

  Rows of the vocabulary beyond `config.vocab_size` are not written. Every
  array must be addressable by this process. One shard at a time is held in
  host memory beside the parameters.

  Args:
    directory: local; made if absent. Its weights, if any, are replaced.
    dtype: of the files; None: as the parameters are.

  Raises:
    ValueError: no architecture of transformers computes this config, or an
      array is not of the shape that `config` says.
  """
  directory = pathlib.Path(directory)
  description = to_hf_config(config)
  leaves = names.leaves(config, names.hf_names(config))
  _check(params, leaves, config)
  directory.mkdir(parents=True, exist_ok=True)
  for old in (
    *directory.glob('model*.safetensors*'),
    directory / 'config.json',
  ):
    old.unlink(missing_ok=True)
  weight_map, total = {}, 0
  files = _plan(params, leaves, config, dtype, max_shard_bytes)
  tensors = _tensors(params, leaves, config, dtype)
  for file, count in files.items():
    shard = dict(itertools.islice(tensors, count))
    save_file(shard, directory / file, metadata={'format': 'pt'})
    weight_map.update(dict.fromkeys(shard, file))
    total += sum(tensor.nbytes for tensor in shard.values())
    description['torch_dtype'] = str(next(iter(shard.values())).dtype)
  if len(files) > 1:
    index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
    _write_json(directory / 'model.safetensors.index.json', index)
  _write_json(directory / 'config.json', description)


def _plan(
  params, leaves: list[names.Leaf], config: ModelConfig, dtype, limit: int
) -> dict[str, int]:
  """File -> how many of the tensors, in order, it holds."""
  sizes = names.sizes(config) | {'V': config.vocab_size}
  counts, held = [0], 0
  for leaf in leaves:
    width = np.dtype(dtype or _at(params, leaf.path).dtype).itemsize
    size = math.prod(leaf.tensor_shape(sizes)) * width
    for _ in leaf.tensors:
      if counts[-1] and held + size > limit:
        counts.append(0)
        held = 0
      counts[-1] += 1
      held += size
  if len(counts) == 1:
    return {'model.safetensors': counts[0]}
  return {
    f'model-{i:05d}-of-{len(counts):05d}.safetensors': count
    for i, count in enumerate(counts, 1)
  }


def _tensors(
  params, leaves: list[names.Leaf], config: ModelConfig, dtype
) -> Iterator[tuple[str, np.ndarray]]:
  """(name, tensor), an array of the tree at a time."""
  sizes = names.sizes(config)
  for leaf in leaves:
    array = np.asarray(_at(params, leaf.path))
    for i, name in enumerate(leaf.tensors):
      part = array[i] if leaf.stacked else array
      order = [leaf.target.index(c) for c in ''.join(leaf.source)]
      part = part.transpose(order).reshape(leaf.tensor_shape(sizes))
      if leaf.source[0] == 'V':
        part = part[: config.vocab_size]
      # Always a copy: a view would keep the whole stack in the shard.
      yield name, np.array(part, dtype or part.dtype, order='C')


def _check(params, leaves: list[names.Leaf], config: ModelConfig) -> None:
  if lora.split(params)[1]:
    raise ValueError(
      'parameters with adapters beside them: give lora.merge(frozen, adapters, '
      'scale=...), for a file of transformers holds plain ones'
    )
  sizes = names.sizes(config)
  for leaf in leaves:
    have, want = _at(params, leaf.path).shape, leaf.array_shape(sizes)
    if have != want:
      raise ValueError(
        f'parameter {"/".join(map(str, leaf.path))} has shape {have}, the '
        f'config says {want}'
      )


def _at(tree, path):
  for key in path:
    tree = tree[key]
  return tree


def _write_json(path: pathlib.Path, data) -> None:
  path.write_text(json.dumps(data, indent=2, sort_keys=True) + '\n')
