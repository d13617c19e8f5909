"""What the model types of transformers fix, default to, and do not have.

Floor 1, model/, the tables of `hf_config.py`. This file knows neither layers
nor weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


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
  'rms_norm_eps': 1e-6,
  'rope_theta': 10_000.0,
  'tie_word_embeddings': False,
}
_SILU = _SHARED | {'hidden_act': 'silu'}
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
    'LlamaForCausalLM', {}, _SILU | {'max_position_embeddings': 2048}
  ),
  'qwen2': Family(
    'Qwen2ForCausalLM',
    {'qkv_bias': True},
    _SILU | {'max_position_embeddings': 32_768, 'max_window_layers': 28},
  ),
  'qwen3': Family(
    'Qwen3ForCausalLM',
    {'qk_norm': True},
    _SILU
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

_ACTIVATIONS = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu_tanh'}

# Options that change the computation, and the value that does not; null is
# always let through. From clip_qkv on they are other architectures', which
# files of a model_type here may carry.
_REFUSED = {
  'attention_bias': False,
  'mlp_bias': False,
  'use_bidirectional_attention': False,
  'partial_rotary_factor': 1.0,
  'quantization_config': None,
  'clip_qkv': None,
  'rotary_pct': 1.0,
  'rotary_dim': None,
  'residual_multiplier': 1.0,
  'embedding_multiplier': 1.0,
  'attention_multiplier': None,
  'logits_scaling': 1.0,
  'logit_scale': 1.0,
  'scale_emb': 1.0,
  'scale_depth': None,
  'dim_model_base': None,
  'use_qk_norm': False,
  'qk_layernorm': False,
  'use_parallel_residual': False,
  'parallel_attn': False,
  'alibi': False,
  'use_mrope': False,
  'num_experts': 0,
  'num_local_experts': 0,
  'n_routed_experts': 0,
  'no_rope_layers': None,
  'attention_chunk_size': None,
}

# Options of some families. Elsewhere transformers ignores them, so that a file
# which sets one means another model than it gets.
_GEMMAS = ('gemma2', 'gemma3_text')
READ_BY = {
  'attn_logit_softcapping': ('gemma2',),
  'final_logit_softcapping': _GEMMAS,
  'query_pre_attn_scalar': _GEMMAS,
  'rope_local_base_freq': ('gemma3_text',),
  'sliding_window': ('qwen2', 'qwen3', *_GEMMAS),
  'use_sliding_window': ('qwen2', 'qwen3'),
  'sliding_window_pattern': ('gemma3_text',),
  '_sliding_window_pattern': ('gemma3_text',),
}


def check_options(data: Mapping[str, Any], family: Family) -> None:
  """Returns if nothing in a config.json needs what no decoder here computes.

  Raises:
    ValueError: names the option, and what is supported.
  """
  model_type = data['model_type']
  for name, allowed in _REFUSED.items():
    if data.get(name) not in (None, allowed):
      raise ValueError(
        f'{model_type} option {name}={data[name]!r} is not supported: only '
        f'{allowed!r} is'
      )
  for name, families in READ_BY.items():
    # A default is what the family's code fixes.
    neutral = (None, False, family.defaults.get(name))
    if model_type not in families and data.get(name) not in neutral:
      raise ValueError(
        f'{model_type} option {name}={data[name]!r} is not supported: models '
        f'of this type have none, only {", ".join(families)} do'
      )
  want = family.options.get('activation', 'silu')
  for name in ('hidden_act', 'hidden_activation'):
    value = data.get(name)
    is_read = name in family.defaults and name in data
    if (is_read or value is not None) and _ACTIVATIONS.get(value) != want:
      raise ValueError(
        f'{model_type} activation {name}={value!r} is not supported: the '
        f'decoder computes {want} for this family'
      )
