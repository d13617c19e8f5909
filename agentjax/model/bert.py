"""A BERT encoder of sentences: texts to vectors of length one.

Floor 1, model. Reads a folder as sentence-transformers and e5 models come
(config.json, model.safetensors, tokenizer.json). The forward pass is a pure
function of a flat dict of arrays; shapes are padded to a few lengths, so that
few programs are compiled. It knows no passages and no search. Source: Devlin
et al., arXiv:1810.04805; mean pooling: Reimers and Gurevych, arXiv:1908.10084.

Letters: B texts, T tokens, D model, H heads, Q head size.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from safetensors.numpy import load_file


@dataclasses.dataclass(frozen=True)
class BertConfig:
  """Sizes, as a config.json names them; others of its keys do not matter."""

  num_hidden_layers: int
  num_attention_heads: int
  hidden_size: int
  max_position_embeddings: int
  layer_norm_eps: float = 1e-12
  hidden_act: str = 'gelu'

  def __post_init__(self):
    if self.hidden_act != 'gelu':
      raise ValueError(f'hidden_act is {self.hidden_act!r}: only gelu is known')


class Encoder:
  """Texts to float32 [n, D], each row of length one.

  Safe to use from many threads, one of which computes at a time.

  Args:
    folder: of the model.
    max_tokens: of a text, the two special ones included; the rest is cut off.
    batch: texts at a time; fewer are padded to a power of two.
  """

  def __init__(
    self, folder: str | pathlib.Path, *, max_tokens: int = 256, batch: int = 32
  ):
    folder = pathlib.Path(folder)
    given = json.loads((folder / 'config.json').read_text('utf-8'))
    if given.get('model_type') != 'bert':
      raise ValueError(
        f'{folder} is a model of type {given.get("model_type")!r}: give one of '
        'type bert'
      )
    names = [f.name for f in dataclasses.fields(BertConfig)]
    self.config = BertConfig(**{k: given[k] for k in names if k in given})
    self.dim = self.config.hidden_size
    self._batch = batch
    self._params = load_file(folder / 'model.safetensors')
    self._params = jax.device_put(_plain_names(self._params))
    self._tokenizer = tokenizers.Tokenizer.from_file(
      str(folder / 'tokenizer.json')
    )
    self._tokenizer.enable_truncation(
      min(max_tokens, self.config.max_position_embeddings)
    )
    self._tokenizer.no_padding()

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    """Vectors of texts, in their order."""
    ids = [e.ids for e in self._tokenizer.encode_batch(list(texts))]
    out = np.zeros((len(ids), self.dim), np.float32)
    # Texts of like lengths together, so that little is padded.
    order = np.argsort([len(i) for i in ids], kind='stable')
    for start in range(0, len(order), self._batch):
      at = order[start : start + self._batch]
      tokens_BT = _padded([ids[i] for i in at])
      out[at] = _encode(self.config, self._params, tokens_BT)[: len(at)]
    return out


def _padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
  """int32 [B, T] of powers of two; -1 where there is no token."""
  longest = max(map(len, rows))
  shape = [1 << (n - 1).bit_length() for n in (len(rows), max(longest, 8))]
  out = np.full(shape, -1, np.int32)
  for i, row in enumerate(rows):
    out[i, : len(row)] = row
  return out


def _plain_names(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Without the prefix that some files have, in float32, weights alone."""
  return {
    name.removeprefix('bert.'): np.asarray(value, np.float32)
    for name, value in params.items()
    if np.issubdtype(value.dtype, np.floating)
  }


@functools.partial(jax.jit, static_argnums=0)
def _encode(config: BertConfig, params: dict, tokens_BT) -> jax.Array:
  """float32 [B, D] of length one; a row without a token is 0."""
  is_token_BT = tokens_BT >= 0
  ids_BT = jnp.maximum(tokens_BT, 0)
  x_BTD = (
    params['embeddings.word_embeddings.weight'][ids_BT]
    + params['embeddings.position_embeddings.weight'][: ids_BT.shape[1]]
    + params['embeddings.token_type_embeddings.weight'][0]
  )
  x_BTD = _norm(config, params, 'embeddings.LayerNorm', x_BTD)
  for i in range(config.num_hidden_layers):
    at = f'encoder.layer.{i}'
    mixed_BTD = _attention(config, params, at, x_BTD, is_token_BT)
    x_BTD = _norm(
      config, params, f'{at}.attention.output.LayerNorm', x_BTD + mixed_BTD
    )
    wide_BTF = _linear(params, f'{at}.intermediate.dense', x_BTD)
    wide_BTF = jax.nn.gelu(wide_BTF, approximate=False)
    narrow_BTD = _linear(params, f'{at}.output.dense', wide_BTF)
    x_BTD = _norm(config, params, f'{at}.output.LayerNorm', x_BTD + narrow_BTD)
  weight_BT1 = is_token_BT[..., None].astype(x_BTD.dtype)
  count_B1 = jnp.maximum(weight_BT1.sum(1), 1.0)
  mean_BD = (x_BTD * weight_BT1).sum(1) / count_B1
  length_B1 = jnp.linalg.norm(mean_BD, axis=-1, keepdims=True)
  return mean_BD / jnp.maximum(length_B1, 1e-12)


def _attention(config, params, at, x_BTD, is_token_BT):
  b, t, d = x_BTD.shape
  heads = config.num_attention_heads

  def split(name):
    y_BTD = _linear(params, f'{at}.attention.self.{name}', x_BTD)
    return y_BTD.reshape(b, t, heads, d // heads)

  q_BTHQ, k_BSHQ, v_BSHQ = (split(name) for name in ('query', 'key', 'value'))
  scores_BHTS = jnp.einsum(
    'BTHQ,BSHQ->BHTS', q_BTHQ, k_BSHQ, precision='highest'
  ) / np.sqrt(d // heads)
  scores_BHTS = jnp.where(is_token_BT[:, None, None], scores_BHTS, -1e9)
  mixed_BTHQ = jnp.einsum(
    'BHTS,BSHQ->BTHQ', jax.nn.softmax(scores_BHTS), v_BSHQ, precision='highest'
  )
  return _linear(
    params, f'{at}.attention.output.dense', mixed_BTHQ.reshape(b, t, d)
  )


def _linear(params, name, x):
  product = jnp.matmul(x, params[f'{name}.weight'].T, precision='highest')
  return product + params[f'{name}.bias']


def _norm(config, params, name, x):
  mean = x.mean(-1, keepdims=True)
  variance = jnp.square(x - mean).mean(-1, keepdims=True)
  scaled = (x - mean) * jax.lax.rsqrt(variance + config.layer_norm_eps)
  return scaled * params[f'{name}.weight'] + params[f'{name}.bias']
