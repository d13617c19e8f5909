"""Makes tests/model/data: random tiny models and what transformers says.

Run where torch and transformers are installed; the tests themselves need
neither: `python tests/make_model_fixtures.py [--out tests/model/data]`.
Each fixture is a directory that transformers wrote (config.json and
safetensors, one of them sharded) beside expected.npz: token ids [1, T] and
float32 logits [1, T, V].
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np
import torch
import transformers

T = 40  # longer than the sliding window and than the original context

_SHAPE = {
  'vocab_size': 96,
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 8,
  'max_position_embeddings': 256,
  'pad_token_id': 0,
  'bos_token_id': 1,
  'eos_token_id': 2,
}
_LLAMA3 = {
  'rope_type': 'llama3',
  'rope_theta': 10_000.0,
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 16,
}
_GEMMA3_ROPE = {
  'sliding_attention': {'rope_type': 'default', 'rope_theta': 10_000.0},
  'full_attention': {
    'rope_type': 'linear',
    'factor': 8.0,
    'rope_theta': 1_000_000.0,
  },
}

# name -> (config class, changes to _SHAPE)
MODELS = {
  'llama': ('LlamaConfig', {'tie_word_embeddings': True}),
  'llama_untied': ('LlamaConfig', {'tie_word_embeddings': False}),
  'llama3': (
    'LlamaConfig',
    {
      'tie_word_embeddings': True,
      'rope_parameters': _LLAMA3,
      'rms_norm_eps': 1e-5,
    },
  ),
  'qwen2': ('Qwen2Config', {'tie_word_embeddings': True}),
  'qwen2_untied': (
    'Qwen2Config',
    {
      'tie_word_embeddings': False,
      'rope_parameters': {'rope_type': 'linear', 'factor': 4.0},
    },
  ),
  'qwen2_window': (
    'Qwen2Config',
    {
      'use_sliding_window': True,
      'sliding_window': 8,
      'max_window_layers': 1,
      'rope_parameters': {'rope_type': 'default', 'rope_theta': 50_000.0},
      'tie_word_embeddings': True,
    },
  ),
  'qwen3': ('Qwen3Config', {'head_dim': 16, 'tie_word_embeddings': True}),
  'gemma2': (
    'Gemma2Config',
    {
      'num_hidden_layers': 4,
      'sliding_window': 8,
      'query_pre_attn_scalar': 24,
      # Low enough to bend scores and logits of this size.
      'attn_logit_softcapping': 5.0,
      'final_logit_softcapping': 3.0,
    },
  ),
  'gemma3': (
    'Gemma3TextConfig',
    {
      'num_hidden_layers': 8,
      'num_key_value_heads': 1,
      'sliding_window': 8,
      'rope_parameters': _GEMMA3_ROPE,
    },
  ),
}


def build(name: str, seed: int) -> torch.nn.Module:
  """A random float32 model; norms, biases and weights are all random."""
  config_class, changes = MODELS[name]
  config = getattr(transformers, config_class)(**{**_SHAPE, **changes})
  config._attn_implementation = 'eager'  # the one that computes softcaps
  model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for path, weight in model.named_parameters():
      noise = torch.randn(weight.shape, generator=generator)
      if 'norm' in path:
        weight.add_(0.3 * noise)
      else:
        weight.copy_(0.25 * noise)
  return model


def expected(model: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
  """Random ids and the logits that transformers computes for them."""
  ids = np.random.default_rng(seed).integers(0, 96, (1, T))
  with torch.no_grad():
    logits = model(torch.from_numpy(ids), use_cache=False).logits
  return {'tokens': ids.astype(np.int32), 'logits': logits.numpy()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  here = pathlib.Path(__file__).parent
  parser.add_argument('--out', type=pathlib.Path, default=here / 'model/data')
  out = parser.parse_args().out
  for seed, name in enumerate(MODELS):
    model = build(name, seed)
    shard = '48KB' if name == 'llama_untied' else '5GB'
    model.save_pretrained(out / name, max_shard_size=shard)
    (out / name / 'generation_config.json').unlink()
    np.savez_compressed(out / name / 'expected.npz', **expected(model, seed))
    print(name, sorted(p.name for p in (out / name).iterdir()))


if __name__ == '__main__':
  main()
