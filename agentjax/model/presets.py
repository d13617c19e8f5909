"""Shapes and options of released models, as data.

Floor 1, model/. A config names one by its dotted name, for instance
`agentjax.model.presets.QWEN2_5_1_5B`. `hf_config` and `gguf_file` read the
same values out of a checkpoint, which is the authority where it disagrees
(base and instruct releases differ in context length and now and then in the
epsilon of their norms; these are the instruct ones). This file knows no
weights.

`vocab_size` counts the ids that the tokenizer has text for; Qwen's tables
have more rows, and those are masked (`padded_vocab`).
"""

from __future__ import annotations

import dataclasses

from agentjax.model.config import ModelConfig, RopeScaling


def _global(n: int):
  return ((('global',), n),)


# ---- SmolLM2 (arXiv:2502.02737) -------------------------------------------

SMOLLM2_135M = ModelConfig(
  vocab_size=49_152,
  width=576,
  layers=_global(30),
  heads=9,
  kv_heads=3,
  head_size=64,
  mlp=1536,
  context=8192,
  rope_theta=100_000.0,
  norm_eps=1e-5,
)
SMOLLM2_360M = dataclasses.replace(
  SMOLLM2_135M,
  width=960,
  layers=_global(32),
  heads=15,
  kv_heads=5,
  mlp=2560,
)
SMOLLM2_1_7B = dataclasses.replace(
  SMOLLM2_135M,
  width=2048,
  layers=_global(24),
  heads=32,
  kv_heads=32,
  mlp=8192,
  rope_theta=130_000.0,
)

# ---- Qwen2.5 (arXiv:2412.15115) -------------------------------------------

QWEN2_5_0_5B = ModelConfig(
  vocab_size=151_665,
  padded_vocab=151_936,
  width=896,
  layers=_global(24),
  heads=14,
  kv_heads=2,
  head_size=64,
  mlp=4864,
  context=32_768,
  rope_theta=1_000_000.0,
  qkv_bias=True,
)
QWEN2_5_1_5B = dataclasses.replace(
  QWEN2_5_0_5B,
  width=1536,
  layers=_global(28),
  heads=12,
  head_size=128,
  mlp=8960,
)
QWEN2_5_3B = dataclasses.replace(
  QWEN2_5_1_5B, width=2048, layers=_global(36), heads=16, mlp=11_008
)
QWEN2_5_7B = dataclasses.replace(
  QWEN2_5_1_5B,
  padded_vocab=152_064,
  width=3584,
  layers=_global(28),
  heads=28,
  kv_heads=4,
  mlp=18_944,
  tied=False,
)
QWEN2_5_14B = dataclasses.replace(
  QWEN2_5_7B, width=5120, layers=_global(48), heads=40, kv_heads=8, mlp=13_824
)
QWEN2_5_32B = dataclasses.replace(QWEN2_5_14B, layers=_global(64), mlp=27_648)

# ---- Qwen3 (arXiv:2505.09388) ---------------------------------------------

QWEN3_0_6B = ModelConfig(
  vocab_size=151_669,
  padded_vocab=151_936,
  width=1024,
  layers=_global(28),
  heads=16,
  kv_heads=8,
  head_size=128,
  mlp=3072,
  context=40_960,
  rope_theta=1_000_000.0,
  qk_norm=True,
)
QWEN3_1_7B = dataclasses.replace(QWEN3_0_6B, width=2048, mlp=6144)
QWEN3_4B = dataclasses.replace(
  QWEN3_0_6B, width=2560, layers=_global(36), heads=32, mlp=9728
)
QWEN3_8B = dataclasses.replace(QWEN3_4B, width=4096, mlp=12_288, tied=False)

# ---- Llama 3.1 and 3.2 (arXiv:2407.21783) ---------------------------------

LLAMA3_1_8B = ModelConfig(
  vocab_size=128_256,
  width=4096,
  layers=_global(32),
  heads=32,
  kv_heads=8,
  head_size=128,
  mlp=14_336,
  context=131_072,
  rope_theta=500_000.0,
  rope_scaling=RopeScaling('llama3', factor=8.0),
  norm_eps=1e-5,
  tied=False,
)
LLAMA3_2_1B = dataclasses.replace(
  LLAMA3_1_8B,
  width=2048,
  layers=_global(16),
  head_size=64,
  mlp=8192,
  rope_scaling=RopeScaling('llama3', factor=32.0),
  tied=True,
)
LLAMA3_2_3B = dataclasses.replace(
  LLAMA3_2_1B, width=3072, layers=_global(28), heads=24, head_size=128
)

# ---- Gemma 2 (arXiv:2408.00118) -------------------------------------------

GEMMA2_2B = ModelConfig(
  vocab_size=256_000,
  width=2304,
  layers=((('local', 'global'), 13),),
  heads=8,
  kv_heads=4,
  head_size=256,
  mlp=9216,
  context=8192,
  window=4096,
  attn_softcap=50.0,
  final_softcap=30.0,
  post_norms=True,
  norm_offset=True,
  embed_scale=True,
  activation='gelu_tanh',
)
GEMMA2_9B = dataclasses.replace(
  GEMMA2_2B,
  width=3584,
  layers=((('local', 'global'), 21),),
  heads=16,
  kv_heads=8,
  mlp=14_336,
)

# ---- Gemma 3, text only (arXiv:2503.19786) --------------------------------

_FIVE_TO_ONE = ('local',) * 5 + ('global',)

GEMMA3_270M = ModelConfig(
  vocab_size=262_144,
  width=640,
  layers=((_FIVE_TO_ONE, 3),),
  heads=4,
  kv_heads=1,
  head_size=256,
  mlp=2048,
  context=32_768,
  rope_theta=1_000_000.0,
  window=512,
  qk_norm=True,
  post_norms=True,
  norm_offset=True,
  embed_scale=True,
  activation='gelu_tanh',
)
GEMMA3_1B = dataclasses.replace(
  GEMMA3_270M,
  width=1152,
  layers=((_FIVE_TO_ONE, 4), (('local',), 2)),
  mlp=6912,
)
# The id after the text's 262,144 is the image's; rows beyond it are unused.
GEMMA3_4B = dataclasses.replace(
  GEMMA3_270M,
  padded_vocab=262_208,
  width=2560,
  layers=((_FIVE_TO_ONE, 5), (('local',), 4)),
  heads=8,
  kv_heads=4,
  mlp=10_240,
  context=131_072,
  window=1024,
  rope_scaling=RopeScaling('linear', factor=8.0),
)

# ---- tiny models, one per family, for tests and smoke runs ----------------

TINY_LLAMA = ModelConfig(
  vocab_size=96,
  width=32,
  layers=_global(3),
  heads=4,
  kv_heads=2,
  head_size=8,
  mlp=64,
  context=256,
)
TINY_LLAMA3 = dataclasses.replace(
  TINY_LLAMA,
  rope_theta=10_000.0,
  rope_scaling=RopeScaling('llama3', factor=8.0, original_context=16),
  tied=False,
)
TINY_QWEN2 = dataclasses.replace(TINY_LLAMA, qkv_bias=True)
TINY_QWEN3 = dataclasses.replace(TINY_LLAMA, head_size=16, qk_norm=True)
TINY_GEMMA2 = dataclasses.replace(
  TINY_LLAMA,
  layers=((('local', 'global'), 2),),
  window=8,
  query_scale=24.0**-0.5,
  attn_softcap=50.0,
  final_softcap=30.0,
  post_norms=True,
  norm_offset=True,
  embed_scale=True,
  activation='gelu_tanh',
)
TINY_GEMMA3 = dataclasses.replace(
  TINY_GEMMA2,
  layers=((_FIVE_TO_ONE, 1), (('local',), 2)),
  rope_theta=1_000_000.0,
  rope_scaling=RopeScaling('linear', factor=8.0),
  attn_softcap=0.0,
  final_softcap=0.0,
  qk_norm=True,
)


def tiny(**changes) -> ModelConfig:
  """`TINY_LLAMA` with `changes`: `tiny(heads=2, tied=False)`.

  Raises:
    TypeError: a change is no field of ModelConfig.
  """
  return dataclasses.replace(TINY_LLAMA, **{'padded_vocab': 0, **changes})
