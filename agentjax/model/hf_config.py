"""A Hugging Face config.json read as a ModelConfig, and written from one.

Floor 1, model/. Reads the spelling of transformers 4 (rope_theta,
rope_scaling) and of 5 (rope_parameters), and writes the former, which both
load. What no decoder of ours computes is refused by name, never ignored. This
file knows no weights and opens no files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.model.config import ModelConfig, RopeScaling


@dataclasses.dataclass(frozen=True)
class Family:
  """What a model_type implies.

  Attributes:
    architecture: the class that transformers loads it with.
    options: fields of ModelConfig that its code fixes.
    defaults: values that its config.json may leave out.
  """

  architecture: str
  options: Mapping[str, Any]
  defaults: Mapping[str, Any]


_SHARED = {
  'hidden_act': 'silu',
  'rms_norm_eps': 1e-6,
  'rope_theta': 10_000.0,
  'tie_word_embeddings': False,
}
_GEMMA = {
  'post_norms': True,
  'norm_offset': True,
  'embed_scale': True,
  'activation': 'gelu_tanh',
}
_GEMMA_SHARED = _SHARED | {
  'hidden_activation': 'gelu_pytorch_tanh',
  'num_attention_heads': 8,
  'num_key_value_heads': 4,
  'head_dim': 256,
  'query_pre_attn_scalar': 256,
  'sliding_window': 4096,
  'tie_word_embeddings': True,
}

# model_type -> family. The defaults are those of transformers' own classes.
FAMILIES = {
  'llama': Family(
    'LlamaForCausalLM', {}, _SHARED | {'max_position_embeddings': 2048}
  ),
  'qwen2': Family(
    'Qwen2ForCausalLM',
    {'qkv_bias': True},
    _SHARED | {'max_position_embeddings': 32_768, 'max_window_layers': 28},
  ),
  'qwen3': Family(
    'Qwen3ForCausalLM',
    {'qk_norm': True},
    _SHARED
    | {
      'head_dim': 128,
      'max_position_embeddings': 32_768,
      'max_window_layers': 28,
    },
  ),
  'gemma2': Family(
    'Gemma2ForCausalLM',
    _GEMMA,
    _GEMMA_SHARED
    | {
      'vocab_size': 256_000,
      'max_position_embeddings': 8192,
      'attn_logit_softcapping': 50.0,
      'final_logit_softcapping': 30.0,
      'sliding_window_pattern': 2,
    },
  ),
  'gemma3_text': Family(
    'Gemma3ForCausalLM',
    _GEMMA | {'qk_norm': True},
    _GEMMA_SHARED
    | {
      'vocab_size': 262_208,
      'max_position_embeddings': 131_072,
      'rope_theta': 1_000_000.0,
      'rope_local_base_freq': 10_000.0,
      'sliding_window_pattern': 6,
    },
  ),
}

_KINDS = {'full_attention': 'global', 'sliding_attention': 'local'}
_ACTIVATIONS = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu_tanh'}

# Options that change the computation, and the one value that is supported.
_REFUSED = {
  'attention_bias': False,
  'mlp_bias': False,
  'use_bidirectional_attention': False,
  'partial_rotary_factor': 1.0,
  'quantization_config': None,
}


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
  tied = data.get('tie_word_embeddings')
  if data.get('model_type') == 'gemma3' and 'text_config' in data:
    data = {'model_type': 'gemma3_text', **data['text_config']}
    if tied is not None:
      data.setdefault('tie_word_embeddings', tied)
  model_type = data.get('model_type')
  family = FAMILIES.get(model_type)
  if family is None:
    raise ValueError(
      f'model_type {model_type!r} (architectures '
      f'{data.get("architectures")}) is not supported: choose a model of type '
      f'{", ".join(FAMILIES)}'
    )
  # An explicit null of some keys (softcaps) means off, so it is kept.
  data = {**family.defaults, **data}
  _check_options(data, family)
  width, heads = _need(data, 'hidden_size'), _need(data, 'num_attention_heads')
  head_size = data.get('head_dim') or width // heads
  theta, local_theta, scaling = _rope(data)
  layers = group_layers(_layer_kinds(data))
  windowed = any('local' in pattern for pattern, _ in layers)
  if windowed and scaling and model_type != 'gemma3_text':
    raise ValueError(
      f'{model_type} with rope type {scaling.kind!r} and sliding layers is not '
      'supported: local layers are never scaled'
    )
  scalar = data.get('query_pre_attn_scalar') or head_size
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
    window=data['sliding_window'] if windowed else 0,
    norm_eps=data['rms_norm_eps'],
    attn_softcap=data.get('attn_logit_softcapping') or 0.0,
    final_softcap=data.get('final_logit_softcapping') or 0.0,
    query_scale=None if scalar == head_size else scalar**-0.5,
    tied=data['tie_word_embeddings'],
    **family.options,
  )


def _check_options(data: Mapping[str, Any], family: Family) -> None:
  model_type = data['model_type']
  for name, allowed in _REFUSED.items():
    if data.get(name) not in (None, allowed):
      raise ValueError(
        f'{model_type} option {name}={data[name]!r} is not supported: only '
        f'{allowed!r} is'
      )
  activation = data.get('hidden_activation') or data['hidden_act']
  want = family.options.get('activation', 'silu')
  if _ACTIVATIONS.get(activation) != want:
    raise ValueError(
      f'{model_type} activation {activation!r} is not supported: the decoder '
      f'computes {want} for this family'
    )


def _need(data: Mapping[str, Any], name: str) -> Any:
  if data.get(name) is None:
    raise ValueError(f'config.json of a {data["model_type"]} lacks {name!r}')
  return data[name]


def _rope(data: Mapping[str, Any]):
  """(theta, theta of local layers, scaling of global layers)."""
  theta = data['rope_theta']
  local = data.get('rope_local_base_freq', theta)
  scaling = data.get('rope_scaling') or {}
  parameters = data.get('rope_parameters') or {}
  if 'full_attention' in parameters:
    scaling = parameters['full_attention']
    sliding = parameters.get('sliding_attention', {})
    if sliding.get('rope_type', 'default') != 'default':
      raise ValueError(
        f'rope_parameters of sliding attention {dict(sliding)!r} are not '
        "supported: only rope_type 'default' is"
      )
    theta = scaling.get('rope_theta', theta)
    local = sliding.get('rope_theta', local)
  elif parameters:
    scaling = parameters
    theta = parameters.get('rope_theta', theta)
    local = data.get('rope_local_base_freq', theta)
  kind = scaling.get('rope_type', scaling.get('type', 'default'))
  if scaling.get('partial_rotary_factor') not in (None, 1.0):
    raise ValueError(
      f'partial_rotary_factor={scaling["partial_rotary_factor"]} is not '
      'supported: only 1.0 is'
    )
  if kind == 'default':
    return float(theta), float(local), None
  if kind == 'linear':
    scale = RopeScaling('linear', float(scaling['factor']))
  elif kind == 'llama3':
    scale = RopeScaling(
      'llama3',
      float(scaling['factor']),
      float(scaling['low_freq_factor']),
      float(scaling['high_freq_factor']),
      int(scaling['original_max_position_embeddings']),
    )
  else:
    raise ValueError(
      f'rope type {kind!r} is not supported: choose a checkpoint with '
      'default, linear or llama3'
    )
  return float(theta), float(local), scale


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
    return [_KINDS[kind] for kind in kinds]
  every = data.get('_sliding_window_pattern') or data.get(
    'sliding_window_pattern'
  )
  if every:
    return ['local' if (i + 1) % every else 'global' for i in range(n)]
  if data.get('use_sliding_window') and data.get('sliding_window'):
    first = data['max_window_layers']
    return ['local' if i >= first else 'global' for i in range(n)]
  return ['global'] * n


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
