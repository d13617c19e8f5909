"""GGUF files as a ModelConfig and as tensors in Hugging Face's convention.

Floor 1, model/. Two conventions differ: files of the llama architecture
interleave the two halves of each head's query and key rows, and Gemma's norm
scales are stored with 1 added. Both are undone in `read`. Weights come out
dequantised, float32. This file knows no sharding and no parameter tree; the
vocabulary in the same file is read by `text`.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from agentjax.model.config import ModelConfig, RopeScaling
from agentjax.model.hf_config import FAMILIES, group_layers
from agentjax.model.tensors import Tensors, WeightsError

# GGUF architecture -> key of FAMILIES.
_ARCHITECTURES = {
  'llama': 'llama',
  'qwen2': 'qwen2',
  'qwen3': 'qwen3',
  'gemma2': 'gemma2',
  'gemma3': 'gemma3_text',
}

# Every how many layers one is global; files need not say.
_GLOBAL_EVERY = {'gemma2': 2, 'gemma3': 6}

# The 27B models alone scale queries by (width / heads) ** -0.5, which files
# need not say either: (architecture, layers).
_SCALED_BY_WIDTH = (('gemma2', 46), ('gemma3', 62))

_ROPE_FACTORS = 'rope_freqs.weight'


def open_reader(path: pathlib.Path) -> gguf.GGUFReader:
  """The package's reader of a whole, unsplit file.

  Raises:
    WeightsError: the file is absent, truncated, not GGUF, or one of several.
  """
  if not path.exists():
    raise WeightsError(f'{path} does not exist')
  try:
    reader = gguf.GGUFReader(path)
  except Exception as error:  # A cut file fails in many ways in the package.
    raise WeightsError(
      f'{path} ({path.stat().st_size} bytes) is truncated or not GGUF '
      f'({error}): fetch it again'
    ) from error
  count = reader.fields.get('split.count')
  if count is not None and count.contents() > 1:
    raise WeightsError(
      f'{path} is one of {count.contents()} files: merge them with '
      '`llama-gguf-split --merge`'
    )
  return reader


def open_tensors(path: pathlib.Path) -> Tensors:
  """Tensors of the file at `path`; see `open_reader` for errors."""
  reader = open_reader(path)
  held = {t.name: t for t in reader.tensors if t.name != _ROPE_FACTORS}
  architecture = _architecture(reader)
  head_size = _head_size(_fields(reader, architecture))

  def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
    tensor = held[name]
    # Quantisation blocks run along the last dimension: rows can be taken
    # before dequantising, columns only after.
    try:
      rows = gguf.quants.dequantize(tensor.data[index[0]], tensor.tensor_type)
    except NotImplementedError as error:
      raise WeightsError(
        f'{name!r} in {path} is {tensor.tensor_type.name}, which the gguf '
        'package cannot dequantise: convert the file to Q8_0 or F16'
      ) from error
    rows = rows.astype(np.float32, copy=False)
    if architecture == 'llama' and name.endswith(_ROTATED):
      rows = _halves(rows, head_size)
    if architecture.startswith('gemma') and name.endswith('norm.weight'):
      rows = rows - 1.0
    return rows[(slice(None), *index[1:])]

  shapes = {n: tuple(int(x) for x in t.shape[::-1]) for n, t in held.items()}
  return Tensors(shapes, dict.fromkeys(held, path), read)


_ROTATED = ('attn_q.weight', 'attn_k.weight')


def _halves(rows: np.ndarray, head_size: int) -> np.ndarray:
  """Rows (2i, 2i + 1) of each head to rows (i, i + Q / 2)."""
  heads = rows.reshape(-1, head_size // 2, 2, *rows.shape[1:])
  return heads.swapaxes(1, 2).reshape(rows.shape)


# ---- configuration --------------------------------------------------------


def _architecture(reader: gguf.GGUFReader) -> str:
  field = reader.fields.get('general.architecture')
  architecture = field.contents() if field else None
  if architecture not in _ARCHITECTURES:
    raise ValueError(
      f'GGUF architecture {architecture!r} is not supported: choose a model '
      f'of {", ".join(_ARCHITECTURES)}'
    )
  return architecture


def _fields(reader: gguf.GGUFReader, architecture: str) -> dict[str, Any]:
  """Fields of the architecture, without its name before them."""
  start = f'{architecture}.'
  return {
    key.removeprefix(start): field.contents()
    for key, field in reader.fields.items()
    if key.startswith(start)
  }


def _need(fields: Mapping[str, Any], name: str) -> Any:
  if name not in fields:
    raise ValueError(f'GGUF file lacks the field {name!r}: convert it again')
  value = fields[name]
  if isinstance(value, list):
    raise ValueError(
      f'GGUF field {name}={value} differs by layer, which is not supported'
    )
  return value


def _head_size(fields: Mapping[str, Any]) -> int:
  heads = _need(fields, 'attention.head_count')
  size = fields.get(
    'attention.key_length', _need(fields, 'embedding_length') // heads
  )
  for name in ('attention.value_length', 'rope.dimension_count'):
    if fields.get(name, size) != size:
      raise ValueError(
        f'GGUF field {name}={fields[name]} is not the head size {size}: this '
        'is not supported'
      )
  return size


def from_gguf(reader: gguf.GGUFReader) -> ModelConfig:
  """The ModelConfig of a GGUF file, its vocabulary unpadded.

  Raises:
    ValueError: an architecture or option that the decoder does not compute,
      or a field that is missing; the message names it.
  """
  architecture = _architecture(reader)
  fields = _fields(reader, architecture)
  tensors = {t.name: t for t in reader.tensors}
  if fields.get('expert_count', 0):
    raise ValueError(
      f'GGUF field expert_count={fields["expert_count"]}: mixtures of experts '
      'are not supported'
    )
  heads, width = (
    _need(fields, 'attention.head_count'),
    _need(fields, 'embedding_length'),
  )
  layers = group_layers(_layer_kinds(architecture, fields))
  by_width = (architecture, _need(fields, 'block_count')) in _SCALED_BY_WIDTH
  windowed = any('local' in pattern for pattern, _ in layers)
  gemma2 = architecture == 'gemma2'
  gemma3 = architecture == 'gemma3'
  theta = fields.get('rope.freq_base', 1_000_000.0 if gemma3 else 10_000.0)
  return ModelConfig(
    vocab_size=int(tensors['token_embd.weight'].shape[-1]),
    width=width,
    layers=layers,
    heads=heads,
    kv_heads=_need(fields, 'attention.head_count_kv'),
    head_size=_head_size(fields),
    mlp=_need(fields, 'feed_forward_length'),
    context=_need(fields, 'context_length'),
    rope_theta=_decimal(theta),
    rope_theta_local=_decimal(theta if gemma2 else 10_000.0),
    rope_scaling=_rope_scaling(fields, tensors),
    window=_need(fields, 'attention.sliding_window') if windowed else 0,
    norm_eps=_decimal(_need(fields, 'attention.layer_norm_rms_epsilon')),
    attn_softcap=fields.get('attn_logit_softcapping', 50.0 if gemma2 else 0.0),
    final_softcap=fields.get(
      'final_logit_softcapping', 30.0 if gemma2 else 0.0
    ),
    query_scale=(width / heads) ** -0.5 if by_width else None,
    tied='output.weight' not in tensors,
    **FAMILIES[_ARCHITECTURES[architecture]].options,
  )


def _decimal(x: float) -> float:
  """A float32 of the file as the decimal number that it was written from."""
  return float(f'{x:.6g}')


def _layer_kinds(architecture: str, fields: Mapping[str, Any]) -> list[str]:
  n = _need(fields, 'block_count')
  pattern = fields.get('attention.sliding_window_pattern')
  if isinstance(pattern, list):
    return ['local' if local else 'global' for local in pattern]
  every = pattern or _GLOBAL_EVERY.get(architecture)
  if every is None:
    if fields.get('attention.sliding_window'):
      raise ValueError(
        'GGUF field attention.sliding_window='
        f'{fields["attention.sliding_window"]} of a {architecture} is not '
        'supported: which layers it holds for is not in the file'
      )
    return ['global'] * n
  return ['local' if (i + 1) % every else 'global' for i in range(n)]


def _rope_scaling(
  fields: Mapping[str, Any], tensors: Mapping[str, Any]
) -> RopeScaling | None:
  kind = fields.get('rope.scaling.type', 'none')
  if kind not in ('none', 'linear'):
    raise ValueError(
      f'GGUF field rope.scaling.type={kind!r} is not supported: only none, '
      'linear and the factors of Llama 3 are'
    )
  if _ROPE_FACTORS in tensors:
    tensor = tensors[_ROPE_FACTORS]
    theta = fields.get('rope.freq_base', 10_000.0)
    return _llama3_scaling(np.asarray(tensor.data, np.float64), theta)
  if kind == 'none' or fields.get('rope.scaling.factor', 1.0) == 1.0:
    return None
  return RopeScaling('linear', float(fields['rope.scaling.factor']))


def _llama3_scaling(factors: np.ndarray, theta: float) -> RopeScaling:
  """What divides each frequency, [Q / 2], back to the rule that made it.

  The file has the factors, not the rule; released models of Llama 3.1 and 3.2
  share all of it but the largest factor.
  """
  scaling = RopeScaling('llama3', float(round(factors.max(), 4)))
  freq = theta ** (-np.arange(len(factors)) / len(factors))
  turns = scaling.original_context * freq / (2 * math.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
  want = 1.0 / (smooth + (1.0 - smooth) / scaling.factor)
  if not np.allclose(factors, want, rtol=1e-3):
    raise ValueError(
      f'{_ROPE_FACTORS} {factors.tolist()} is not the scaling of Llama 3.1 '
      f'with factor {scaling.factor}: load the safetensors instead'
    )
  return scaling
