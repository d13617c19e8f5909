"""A tiny random model and an engine over it, shared by the rollout tests."""

import dataclasses
import functools

import jax
import numpy as np

from agentjax.model import transformer
from agentjax.model.config import ModelConfig
from agentjax.rollout.engine import Engine
from agentjax.text.stop import StopAutomaton

CONFIG = ModelConfig(
  vocab_size=40,
  padded_vocab=48,
  width=32,
  layers=((('local', 'global'), 1), (('global',), 1)),
  heads=4,
  kv_heads=2,
  head_size=8,
  mlp=64,
  context=128,
  window=12,
  qk_norm=True,
)
# One stack of global layers: compiles in half the time.
PLAIN = dataclasses.replace(CONFIG, layers=((('global',), 2),), qk_norm=False)
STOP_ID = 1
BYTES = [b'', b''] + [bytes([97 + i % 26]) * (1 + i // 26) for i in range(38)]


@functools.cache
def params(seed: int = 0, config: ModelConfig = CONFIG):
  # Larger embeddings than at init: a distribution that is not nearly flat.
  out = transformer.init(jax.random.key(seed), config)
  return {
    **out,
    'embed': {'table': out['embed']['table'] * 20},
  }


def engine(stop_strings=(), loaded=True, config=CONFIG, **kw) -> Engine:
  stops = StopAutomaton.build(BYTES, stop_strings, [STOP_ID])
  options = {'slots': 4, 'context': 96, 'chunk': 8, 'buckets': (4, 16)} | kw
  out = Engine(config, stops, **options)
  if loaded:
    out.load(params(config=config), 0)
  return out


def tokens(seed: int, n: int) -> np.ndarray:
  return np.random.default_rng(seed).integers(2, 40, n).astype(np.int32)
