"""What decoding costs at least on this machine, measured and calculated.

Benchmarks. The measured floor runs a step's necessary work and nothing else,
in one jitted loop over the engine's own layouts: every product with a weight,
the two attention products over the live length, and one exponential pass over
the logits. No norm, rotation, mask, softmax, sampling, write or host. The
calculated floor divides bytes and FLOPs by rates that are measured here.

Letters: B sequences, T tokens, N cached positions, V vocabulary, D width, H
query heads, K key/value heads, Q head size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.model import transformer
from agentjax.model.config import ModelConfig
from benchmarks.measure import Measurement
from benchmarks.models import Model
from benchmarks.worker import Clock


class Floor:
  """The measured floor of `batch` sequences.

  Args:
    prompt, new_tokens: lengths. The live length of a step is its mean over
      the new tokens, so that all steps together read what real ones read.
  """

  def __init__(self, model: Model, batch: int, prompt: int, new_tokens: int):
    self._steps, self._batch, self._config = new_tokens, batch, model.config
    self._layout = jax.jit(
      functools.partial(
        transformer.decode_layout, config=model.config, dtype=jnp.float32
      )
    )(model.params)
    live = prompt + new_tokens // 2
    self._cache = _random_cache(model.config, batch, live)
    self._prompt_cache = _random_cache(model.config, 1, prompt)
    rng = np.random.default_rng(0)
    width = model.config.width
    self._x = jnp.asarray(rng.normal(size=(batch, 1, width)), jnp.float32)
    self._prompt = jnp.asarray(rng.normal(size=(1, prompt, width)), jnp.float32)

    self._prefill(1)  # compiles
    self._decode(1)

  def run(self) -> Measurement:
    """`decode_seconds` of all steps; `seconds` with the prompts' products."""
    clock = Clock()
    self._prefill(self._batch)
    prefill = clock.read()['seconds']
    x = self._decode(self._steps)
    out = clock.read()
    if not np.isfinite(x).all():
      raise RuntimeError('the floor overflowed: its time means nothing')
    return {
      **out,
      'decode_seconds': out['seconds'] - prefill,
      'tokens': self._steps * self._batch,
    }

  def _prefill(self, times: int) -> jax.Array:
    return jax.block_until_ready(
      _loop(
        self._layout,
        self._prompt_cache,
        self._prompt,
        times,
        config=self._config,
        logits=False,
      )
    )

  def _decode(self, steps: int) -> jax.Array:
    return jax.block_until_ready(
      _loop(
        self._layout,
        self._cache,
        self._x,
        steps,
        config=self._config,
        logits=True,
      )
    )


@functools.partial(jax.jit, static_argnames=('config', 'logits'))
def _loop(layout, cache, x_BTD, steps, *, config, logits):
  def body(_, x):
    y = _products(layout, cache, x, config)
    if logits:
      z = transformer.unembed(layout['head'], y[:, -1], config)
      y = y + jnp.exp(z - 8.0).sum(-1)[:, None, None]
    # The next step depends on all of this one, and stays what it was.
    return x + 1e-9 * y

  return jax.lax.fori_loop(0, steps, body, x_BTD)


def _products(layout, cache, x_BTD, config: ModelConfig):
  """All products of a pass; sums stand for what lies between them."""
  einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
  B, T, _ = x_BTD.shape
  H, K, Q = config.heads, config.kv_heads, config.head_size
  x = x_BTD
  for layer, (k_BKQN, v_BKNQ) in zip(layout['layers'], cache, strict=True):
    attn, mlp = layer['attn'], layer['mlp']
    q = einsum('btd,dhq->bthq', x, attn['q'])
    new = einsum('btd,dkq->btkq', x, attn['k']) + einsum(
      'btd,dkq->btkq', x, attn['v']
    )
    q = q.reshape(B, T, K, H // K, Q).transpose(0, 2, 3, 1, 4)
    scores = einsum('bkrq,bkqn->bkrn', q.reshape(B, K, -1, Q), k_BKQN)
    seen = einsum('bkrn,bknq->bkrq', scores, v_BKNQ)
    seen = seen.reshape(B, K, H // K, T, Q).transpose(0, 3, 1, 2, 4)
    seen = (seen + new[:, :, :, None]).reshape(B, T, H, Q)
    x = x + einsum('bthq,hqd->btd', seen, attn['o'])
    inner = einsum('btd,df->btf', x, mlp['gate']) + einsum(
      'btd,df->btf', x, mlp['up']
    )
    x = x + einsum('btf,fd->btd', inner, mlp['down'])
  return x


def _random_cache(config: ModelConfig, batch: int, length: int):
  """Per layer keys [B, K, Q, N] and values [B, K, N, Q].

  Small numbers, so that sums over many layers without a norm stay finite.
  """
  rng = np.random.default_rng(1)
  K, Q = config.kv_heads, config.head_size

  def array(*shape):
    return jnp.asarray(rng.normal(scale=0.01, size=shape), jnp.float32)

  return [
    (array(batch, K, Q, length), array(batch, K, length, Q))
    for _ in range(config.n_layers)
  ]


# ---- calculated ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cost:
  """Of decoding one token in each of B sequences, float32."""

  bytes: int  # weights once, cached keys and values, logits
  flops: int

  def seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
    """No step is faster than its memory, nor than its arithmetic."""
    return max(self.bytes / bytes_per_second, self.flops / flops_per_second)


def cost(config: ModelConfig, batch: int, live: int) -> Cost:
  """Bytes and FLOPs of a decode step over `live` cached positions."""
  D, H, K, Q = config.width, config.heads, config.kv_heads, config.head_size
  layer = D * Q * (2 * H + 2 * K) + 3 * D * config.mlp
  weights = config.n_layers * layer + D * config.padded_vocab
  cached = 2 * batch * live * K * Q * config.n_layers
  attention = 2 * batch * live * H * Q * config.n_layers
  return Cost(
    4 * (weights + cached + batch * config.padded_vocab),
    2 * (batch * weights + attention),
  )


def memory_rate(megabytes: int = 512, repetitions: int = 5) -> float:
  """Bytes/s that all cores together read from memory; the best seen."""
  cores = len(os.sched_getaffinity(0))
  rows = megabytes * 2**20 // (4 * 4096 * cores)
  parts = np.ones((cores, rows * 4096), np.float32)
  with ThreadPoolExecutor(cores) as pool:
    # numpy's sum lets go of the interpreter lock and reads in order.
    host = parts.nbytes / _best(
      lambda: list(pool.map(np.sum, parts)), repetitions
    )
  x = jnp.asarray(parts.reshape(-1, 4096))
  vector = jnp.ones(4096)
  product = jax.jit(lambda x, v: x @ v)
  device = parts.nbytes / _best(
    lambda: product(x, vector).block_until_ready(), repetitions
  )
  return max(host, device)


def product_rate(size: int = 2048, repetitions: int = 5) -> float:
  """FLOPs/s of a float32 product of square matrices; the best seen."""
  x = jnp.ones((size, size))
  product = jax.jit(lambda x: x @ x)
  best = _best(lambda: product(x).block_until_ready(), repetitions)
  return 2 * math.pow(size, 3) / best


def _best(run, repetitions: int) -> float:
  run()
  best = float('inf')
  for _ in range(repetitions):
    began = time.perf_counter()
    run()
    best = min(best, time.perf_counter() - began)
  return best
