"""The two models that every system runs, with the same random weights.

Benchmarks. Llama type, float32, tied embeddings. They are written once, as
safetensors, in the layout that `transformers` reads; peers load that file and
ours are the arrays that it was written from.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax

from agentjax.model import hf_config, save, transformer
from agentjax.model.config import ModelConfig

_SHARED = {
  'head_size': 64,
  'context': 16_384,
  'norm_eps': 1e-5,
  # tunix's Llama rotates with this base, whatever its config says.
  'rope_theta': 1_000_000.0,
}

MODELS = {
  '10m': ModelConfig(
    vocab_size=16_384,
    width=256,
    layers=((('global',), 6),),
    heads=4,
    kv_heads=2,
    mlp=1024,
    **_SHARED,
  ),
  '135m': ModelConfig(
    vocab_size=49_152,
    width=576,
    layers=((('global',), 30),),
    heads=9,
    kv_heads=3,
    mlp=1536,
    **_SHARED,
  ),
}


@dataclasses.dataclass(frozen=True)
class Model:
  """A model with its weights, in memory and in `directory`."""

  name: str
  config: ModelConfig
  params: Any
  directory: pathlib.Path | None


def make(name: str, cache: pathlib.Path | None) -> Model:
  """The model `name`; saved under `cache` if that is given.

  Raises:
    KeyError: there is no such model.
  """
  config = MODELS[name]
  params = jax.jit(transformer.init, static_argnums=1)(
    jax.random.key(0), config
  )
  if cache is None:
    return Model(name, config, params, None)
  directory = cache / 'models' / name
  written = directory / 'written.json'  # last of all, with what it is of
  want = {'config': hf_config.to_hf_config(config), 'jax': jax.__version__}
  if not (written.exists() and json.loads(written.read_text()) == want):
    written.unlink(missing_ok=True)
    save.save_params(directory, params, config)
    written.write_text(json.dumps(want))
  return Model(name, config, params, directory)


def tunix_config(config: ModelConfig) -> dict[str, Any]:
  """Keyword arguments of tunix's Llama `ModelConfig`, its dtypes apart."""
  return {
    'num_layers': config.n_layers,
    'vocab_size': config.vocab_size,
    'embed_dim': config.width,
    'hidden_dim': config.mlp,
    'num_heads': config.heads,
    'head_dim': config.head_size,
    'num_kv_heads': config.kv_heads,
    'rope_theta': int(config.rope_theta),
    'norm_eps': config.norm_eps,
    'weight_tying': config.tied,
  }
