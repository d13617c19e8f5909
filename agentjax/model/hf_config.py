"""A Hugging Face config.json read as a ModelConfig, and written from one.

Floor 1, model/. Reads the spelling of transformers 4 (rope_theta,
rope_scaling) and of 5 (rope_parameters), and writes the former, which both
load. What no decoder of ours computes is refused by name, never ignored, and so
is what transformers would ignore in a model of this type. `hf_families.py` has
the tables, `hf_rope.py` the rotary part. This file knows no weights and opens
no files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.model.config import ModelConfig, RopeScaling
from agentjax.model.hf_families import FAMILIES, READ_BY, check_options
from agentjax.model.hf_rope import number, read_rope

_KINDS = {'full_attention': 'global', 'sliding_attention': 'local'}


def group_layers(
  kinds: Sequence[str],
) -> tuple[tuple[tuple[str, ...], int], ...]:
  """`ModelConfig.layers` for the kinds of the layers, in order.

  The shortest repeated pattern and what is left of it; runs of one kind where
  nothing is repeated.
  """
  n = len(kinds)
  for period in range(1, n // 2 + 1):
    if all(kinds[i] == kinds[i % period] for i in range(n)):
      whole = n // period
      head = ((tuple(kinds[:period]), whole),)
      return head + _runs(kinds[whole * period :])
  return _runs(kinds)


def _runs(kinds: Sequence[str]):
  runs: list[list] = []
  for kind in kinds:
    if runs and runs[-1][0] == (kind,):
      runs[-1][1] += 1
    else:
      runs.append([(kind,), 1])
  return tuple((pattern, count) for pattern, count in runs)


def from_hf_config(data: Mapping[str, Any]) -> ModelConfig:
  """The ModelConfig of a config.json, its vocabulary unpadded.

  Of a multimodal Gemma 3 it is the text model's.

  Raises:
    ValueError: an architecture or option that the decoder does not compute,
      or a key that is missing; the message names it.
  """
  if data.get('model_type') == 'gemma3' and 'text_config' in data:
    whole = ('tie_word_embeddings', 'quantization_config')
    above = {n: data[n] for n in whole if data.get(n) is not None}
    data = {**above, 'model_type': 'gemma3_text', **data['text_config']}
  model_type = data.get('model_type')
  family = FAMILIES.get(model_type)
  if family is None:
    raise ValueError(
      f'model_type {model_type!r} (architectures '
      f'{data.get("architectures")}) is not supported: choose a model of type '
      f'{", ".join(FAMILIES)}'
    )
  check_options(data, family)
  defaults = family.defaults
  theta, local_theta, scaling = read_rope(
    data, defaults['rope_theta'], defaults.get('rope_local_base_freq')
  )
  # An explicit null of some keys (softcaps) means off, so it is kept.
  data = {**defaults, **data}
  width, heads = _need(data, 'hidden_size'), _need(data, 'num_attention_heads')
  head_size = data.get('head_dim') or width // heads
  layers = group_layers(_layer_kinds(data))
  windowed = any('local' in pattern for pattern, _ in layers)
  if windowed and scaling and model_type != 'gemma3_text':
    raise ValueError(
      f'{model_type} with rope type {scaling.kind!r} and sliding layers is not '
      'supported: local layers are never scaled'
    )
  scalar = head_size
  if 'query_pre_attn_scalar' in defaults:
    scalar = number(data, 'query_pre_attn_scalar')
  return ModelConfig(
    vocab_size=_need(data, 'vocab_size'),
    width=width,
    layers=layers,
    heads=heads,
    kv_heads=data.get('num_key_value_heads') or heads,
    head_size=head_size,
    mlp=_need(data, 'intermediate_size'),
    context=_need(data, 'max_position_embeddings'),
    rope_theta=theta,
    # Without local layers it has no effect: left at its default, so that
    # equal models have equal configs.
    rope_theta_local=local_theta if windowed else 10_000.0,
    rope_scaling=scaling,
    window=_need(data, 'sliding_window') if windowed else 0,
    norm_eps=number(data, 'rms_norm_eps'),
    attn_softcap=data.get('attn_logit_softcapping') or 0.0,
    final_softcap=data.get('final_logit_softcapping') or 0.0,
    query_scale=None if scalar == head_size else scalar**-0.5,
    tied=_flag(data, 'tie_word_embeddings'),
    **family.options,
  )


def _need(data: Mapping[str, Any], name: str) -> Any:
  if data.get(name) is None:
    raise ValueError(f'config.json of a {data["model_type"]} lacks {name!r}')
  return data[name]


def _flag(data: Mapping[str, Any], name: str) -> bool:
  if not isinstance(data[name], bool):
    raise ValueError(f'{name}={data[name]!r} must be true or false')
  return data[name]


def _layer_kinds(data: Mapping[str, Any]) -> list[str]:
  n = _need(data, 'num_hidden_layers')
  if data.get('layer_types'):
    kinds = data['layer_types']
    unknown = set(kinds) - set(_KINDS)
    if unknown or len(kinds) != n:
      raise ValueError(
        f'layer_types {sorted(set(kinds))} of {len(kinds)} layers, with '
        f'num_hidden_layers={n}: only {sorted(_KINDS)} are supported, one a '
        'layer'
      )
    if 'sliding_attention' in kinds:
      _check_windows(data)
    return [_KINDS[kind] for kind in kinds]
  every = data.get('_sliding_window_pattern') or data.get(
    'sliding_window_pattern'
  )
  if every:
    return ['local' if (i + 1) % every else 'global' for i in range(n)]
  if data.get('use_sliding_window') and data.get('sliding_window'):
    first = number(data, 'max_window_layers')
    return ['local' if i >= first else 'global' for i in range(n)]
  return ['global'] * n


def _check_windows(data: Mapping[str, Any]) -> None:
  """Refuses layer_types with windows that the family's code would not have."""
  model_type = data['model_type']
  if model_type not in READ_BY['sliding_window']:
    raise ValueError(
      f'layer_types of a {model_type} has sliding_attention, and models of '
      'this type have no windows'
    )
  switched = model_type in READ_BY['use_sliding_window']
  if switched and data.get('use_sliding_window') is not True:
    raise ValueError(
      'layer_types has sliding_attention, but use_sliding_window='
      f'{data.get("use_sliding_window")!r}: set it to true, or have '
      'full_attention only'
    )


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
  """A config.json that transformers loads; padding is not in it.

  Raises:
    ValueError: no supported architecture computes this config; the message
      names the fields that would be lost.
  """
  model_type = _family_of(config)
  local = 'local' in config.layer_kinds
  data = {
    'architectures': [FAMILIES[model_type].architecture],
    'model_type': model_type,
    'vocab_size': config.vocab_size,
    'hidden_size': config.width,
    'num_hidden_layers': config.n_layers,
    'num_attention_heads': config.heads,
    'num_key_value_heads': config.kv_heads,
    'head_dim': config.head_size,
    'intermediate_size': config.mlp,
    'max_position_embeddings': config.context,
    'rms_norm_eps': config.norm_eps,
    'rope_theta': config.rope_theta,
    'rope_scaling': _scaling_to_hf(config.rope_scaling),
    'tie_word_embeddings': config.tied,
  }
  names = {kind: name for name, kind in _KINDS.items()}
  if model_type != 'llama':
    data['layer_types'] = [names[kind] for kind in config.layer_kinds]
    data['sliding_window'] = config.window if local else None
  if model_type.startswith('qwen'):
    data |= {'hidden_act': 'silu', 'use_sliding_window': local}
    data['max_window_layers'] = config.layer_kinds.count('global')
  elif model_type == 'llama':
    data |= {'hidden_act': 'silu', 'mlp_bias': False}
  else:
    scale = config.query_scale
    scalar = config.head_size if scale is None else scale**-2
    if math.isclose(scalar, round(scalar)):
      scalar = round(scalar)
    data |= {
      'hidden_activation': 'gelu_pytorch_tanh',
      'query_pre_attn_scalar': scalar,
      'attn_logit_softcapping': config.attn_softcap or None,
      'final_logit_softcapping': config.final_softcap or None,
    }
  if model_type == 'gemma3_text':
    data['rope_local_base_freq'] = config.rope_theta_local
  _check_inverse(data, config)
  return data


def _family_of(config: ModelConfig) -> str:
  if config.post_norms:
    return 'gemma3_text' if config.qk_norm else 'gemma2'
  if config.qk_norm:
    return 'qwen3'
  return 'qwen2' if config.qkv_bias else 'llama'


def _scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
  if scaling is None:
    return None
  data = {'rope_type': scaling.kind, 'factor': scaling.factor}
  if scaling.kind == 'llama3':
    data |= {
      'low_freq_factor': scaling.low_freq_factor,
      'high_freq_factor': scaling.high_freq_factor,
      'original_max_position_embeddings': scaling.original_context,
    }
  return data


def _check_inverse(data: Mapping[str, Any], config: ModelConfig) -> None:
  """Refuses a config that would come back as another one."""
  back = dataclasses.asdict(from_hf_config(data))
  want = dataclasses.asdict(
    dataclasses.replace(
      config,
      padded_vocab=config.vocab_size,
      layers=group_layers(config.layer_kinds),
    )
  )
  lost = {
    name: (want[name], back[name])
    for name in want
    if not _same(want[name], back[name])
  }
  if lost:
    raise ValueError(
      f'no {data["model_type"]} config.json says this (field: (ours, what '
      f'would be read back)): {lost}'
    )


def _same(a: Any, b: Any) -> bool:
  if isinstance(a, float) and isinstance(b, float):
    return math.isclose(a, b)
  return a == b
