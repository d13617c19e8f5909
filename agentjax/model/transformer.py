"""One decoder for every family: the learner's forward and the engine's.

Floor 1, model/. The block is a Flax NNX module, split once: everything here
is a pure function of (config, parameter tree, arrays). The learner scans the
stacked layers (`forward`); the engine walks them one by one over a KV cache
(`extend`, `decode_layout`), where unrolled layers are twice as fast on CPU.
This file knows no sampling, no loss and no environment.

Letters: B rows, T tokens, S cache rows or keys, V vocabulary, D width, H query
heads, K key/value heads, G = H // K, Q head size, L layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from agentjax.model.attention import Rows, plain
from agentjax.model.cache import Cache, Fresh, Store
from agentjax.model.config import ModelConfig
from agentjax.model.linear import Factored, factored, head_product, linear
from agentjax.model.mesh import constrain
from agentjax.model.precision import NEVER
from agentjax.model.remat import Policy, recomputed
from agentjax.model.rope import rope_tables, rotate

Params = dict[str, Any]


def _rms(x: jax.Array, scale: jax.Array, config: ModelConfig) -> jax.Array:
  """RMS norm over the last axis, in float32."""
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + config.norm_eps)
  scale = scale.astype(jnp.float32)
  return (y * (1.0 + scale if config.norm_offset else scale)).astype(x.dtype)


# ---- the block ------------------------------------------------------------


def _normal(key, shape, fan_in, dtype):
  return (jax.random.normal(key, shape) * fan_in**-0.5).astype(dtype)


class Norm(nnx.Module):
  """Scale of an RMS norm; starts as the identity."""

  def __init__(self, config: ModelConfig, dtype):
    fill = jnp.zeros if config.norm_offset else jnp.ones
    self.scale = nnx.Param(fill((config.width,), dtype))


class Attention(nnx.Module):
  """Projections, optional biases and QK norm, rotary positions."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype):
    D, H, K, Q = config.width, config.heads, config.kv_heads, config.head_size
    init = functools.partial(_normal, dtype=dtype)
    # Projections back into the residual stream start smaller with depth.
    depth = D * 2 * config.n_layers
    self.q = nnx.Param(init(rngs.params(), (D, H, Q), D))
    self.k = nnx.Param(init(rngs.params(), (D, K, Q), D))
    self.v = nnx.Param(init(rngs.params(), (D, K, Q), D))
    self.o = nnx.Param(init(rngs.params(), (H, Q, D), depth))
    if config.qkv_bias:
      self.q_bias = nnx.Param(jnp.zeros((H, Q), dtype))
      self.k_bias = nnx.Param(jnp.zeros((K, Q), dtype))
      self.v_bias = nnx.Param(jnp.zeros((K, Q), dtype))
    if config.qk_norm:
      fill = jnp.zeros if config.norm_offset else jnp.ones
      self.q_norm = nnx.Param(fill((Q,), dtype))
      self.k_norm = nnx.Param(fill((Q,), dtype))

  def project(self, x_BTD, cos, sin, config: ModelConfig):
    """Queries [B, T, H, Q], keys and values [B, T, K, Q]."""
    q = linear('btd,dhq->bthq', x_BTD, self, 'q')
    k = linear('btd,dkq->btkq', x_BTD, self, 'k')
    v = linear('btd,dkq->btkq', x_BTD, self, 'v')
    if config.qkv_bias:
      q = q + self.q_bias[...].astype(q.dtype)
      k = k + self.k_bias[...].astype(k.dtype)
      v = v + self.v_bias[...].astype(v.dtype)
    if config.qk_norm:
      q = _rms(q, self.q_norm[...], config)
      k = _rms(k, self.k_norm[...], config)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


class Mlp(nnx.Module):
  """Gated linear unit."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype):
    D, F = config.width, config.mlp
    init = functools.partial(_normal, dtype=dtype)
    self.gate = nnx.Param(init(rngs.params(), (D, F), D))
    self.up = nnx.Param(init(rngs.params(), (D, F), D))
    self.down = nnx.Param(init(rngs.params(), (F, D), F * 2 * config.n_layers))

  def __call__(self, x_BTD, config: ModelConfig):
    gate = linear('btd,df->btf', x_BTD, self, 'gate')
    up = linear('btd,df->btf', x_BTD, self, 'up')
    gate, up = (checkpoint_name(a, 'mlp_in') for a in (gate, up))
    if config.activation == 'silu':
      gate = jax.nn.silu(gate)
    else:
      gate = jax.nn.gelu(gate, approximate=True)
    return linear('btf,fd->btd', gate * up, self, 'down')


class Block(nnx.Module):
  """Attention and MLP with pre-norms, and post-norms where configured.

  How keys are stored and seen is the caller's: `see(q, k, v)` returns the
  attention's output and anything that the caller wants back (its cache).
  """

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype=jnp.float32):
    self.attn_norm = Norm(config, dtype)
    self.attn = Attention(config, rngs, dtype)
    self.mlp_norm = Norm(config, dtype)
    self.mlp = Mlp(config, rngs, dtype)
    if config.post_norms:
      self.attn_post_norm = Norm(config, dtype)
      self.mlp_post_norm = Norm(config, dtype)

  def __call__(self, x_BTD, cos, sin, see: Callable, config: ModelConfig):
    x = x_BTD
    h = _rms(x, self.attn_norm.scale[...], config)
    q, k, v = self.attn.project(h, cos, sin, config)
    q, k, v = (checkpoint_name(a, 'qkv') for a in (q, k, v))
    seen, back = see(q, k, v)
    h = linear('bthq,hqd->btd', seen, self.attn, 'o')
    h = checkpoint_name(h, 'attn_out')
    if config.post_norms:
      h = _rms(h, self.attn_post_norm.scale[...], config)
    x = x + h
    h = self.mlp(_rms(x, self.mlp_norm.scale[...], config), config)
    h = checkpoint_name(h, 'mlp_out')
    if config.post_norms:
      h = _rms(h, self.mlp_post_norm.scale[...], config)
    return x + h, back


@functools.cache
def _graph(config: ModelConfig, with_factors: tuple[tuple[str, str], ...]):
  """The structure of a block, split from its parameters.

  Args:
    with_factors: (part, name) of the maps that have factors beside them.
  """

  def make():
    block = Block(config, nnx.Rngs(0))
    for part, name in with_factors:
      for factor in 'ab':
        empty = nnx.Param(jnp.zeros(0))
        setattr(getattr(block, part), f'{name}_{factor}', empty)
    return block

  return nnx.graphdef(nnx.eval_shape(make))


def _apply(params, x, cos, sin, see, config: ModelConfig):
  graph = _graph(config, factored(params))
  return nnx.merge(graph, params)(x, cos, sin, see, config)


# ---- whole model ----------------------------------------------------------


def init(key: jax.Array, config: ModelConfig, dtype=jnp.float32) -> Params:
  """Random parameters; a block's stand stacked along a leading layer axis."""
  keys = jax.random.split(key, len(config.layers) + 2)

  def block(key):
    return nnx.to_pure_dict(nnx.split(Block(config, nnx.Rngs(key), dtype))[1])

  stacks = []
  for (pattern, count), stack_key in zip(config.layers, keys[2:], strict=True):
    layer_keys = jax.random.split(stack_key, (len(pattern), count))
    stacks.append(
      {str(i): jax.vmap(block)(layer_keys[i]) for i in range(len(pattern))}
    )
  V, D = config.padded_vocab, config.width
  fill = jnp.zeros if config.norm_offset else jnp.ones
  params = {
    'embed': {
      'table': (jax.random.normal(keys[0], (V, D)) * 0.02).astype(dtype)
    },
    'stacks': stacks,
    'final_norm': {'scale': fill((D,), dtype)},
  }
  if not config.tied:
    params['head'] = {'kernel': _normal(keys[1], (D, V), D, dtype)}
  return params


def init_shapes(config: ModelConfig, dtype=jnp.float32) -> Params:
  """ShapeDtypeStructs of `init`, without making anything."""
  return jax.eval_shape(lambda: init(jax.random.key(0), config, dtype))


def n_params(config: ModelConfig) -> int:
  """Number of parameters, the head counted once where it is tied."""
  return sum(math.prod(s.shape) for s in jax.tree.leaves(init_shapes(config)))


def _embed(table, tokens_BT, config: ModelConfig, dtype):
  # Of all rows the chip's part of the width, then of its own rows the whole
  # width: activations cross chips, and neither the table nor its gradient.
  tokens_BT = constrain(tokens_BT, 'rows', 'length')
  x = constrain(table[tokens_BT], 'rows', 'length', 'width').astype(dtype)
  if config.embed_scale:
    x = x * jnp.asarray(math.sqrt(config.width), dtype)
  return constrain(x, 'batch', 'length', 'none')


def forward(
  params: Params,
  tokens_BT: jax.Array,
  positions_BT: jax.Array,
  pack_ids_BT: jax.Array,
  config: ModelConfig,
  *,
  dtype=jnp.float32,
  remat: bool | Policy | None = True,
  unroll: bool = False,
  attention: Callable = plain,
  ends_BT: jax.Array | None = None,
) -> jax.Array:
  """Hidden states [B, T, D] after the final norm; the learner's path.

  Args:
    tokens_BT: int32 ids. positions_BT: int32, restarting per packed sequence.
    pack_ids_BT: int32, 0 for padding; a token sees earlier tokens of its row
      with the same id.
    dtype: of compute. remat: what the backward pass computes again; see
      `model.remat`.
    unroll: no scan over layers: faster on CPU, slower to compile.
    attention: an `attention.Attention`, such as `attention.plain`.
    ends_BT: int32, of rows that hold trees: a token sees the tokens at or
      before it whose end lies behind it. None: no tree.
  """
  rows = Rows(pack_ids_BT, positions_BT)
  if ends_BT is not None:
    places = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    places = jnp.broadcast_to(places, tokens_BT.shape)
    rows = rows._replace(places=places, ends=ends_BT)
  # Behind a barrier: XLA would take every cosine again in every layer.
  tables = {
    kind: jax.lax.optimization_barrier(rope_tables(positions_BT, config, kind))
    for kind in set(config.layer_kinds)
  }

  def layer(kind, x, params):
    def see(q, k, v):
      return attention(q, k, v, rows, kind, config), None

    # What is kept of a layer is split over tensor too, and whole inside of it.
    x = checkpoint_name(constrain(x, 'batch', 'between', 'none'), 'block_in')
    x = constrain(x, 'batch', 'length', 'none')
    x, _ = _apply(params, x, *tables[kind], see, config)
    x = constrain(x, 'batch', 'length', 'none')
    return constrain(x, 'batch', 'between', 'none')

  x = _embed(params['embed']['table'], tokens_BT, config, dtype)
  for (pattern, count), stack in zip(
    config.layers, params['stacks'], strict=True
  ):

    def step(x, period, pattern=pattern):
      for i, kind in enumerate(pattern):
        x = layer(kind, x, period[str(i)])
      return x, None

    step = recomputed(step, remat, unroll)
    x, _ = jax.lax.scan(step, x, stack, unroll=count if unroll else 1)
  return _rms(x, params['final_norm']['scale'], config)


def head_kernel(params: Params) -> jax.Array | Factored:
  """The head as [D, V], or with the factors that stand beside it."""
  if 'head' not in params:
    return constrain(params['embed']['table'], 'vocab', 'width').T
  head = params['head']
  kernel = constrain(head['kernel'], 'width', 'vocab')
  if 'kernel_a' in head:
    return Factored(kernel, head['kernel_a'], head['kernel_b'])
  return kernel


def whole_head(kernel: jax.Array | Factored) -> jax.Array | Factored:
  """`head_kernel`, gathered over the chips that split its width."""
  if isinstance(kernel, Factored):
    return kernel._replace(kernel_DV=whole_head(kernel.kernel_DV))
  return constrain(kernel, 'none', 'vocab')


@functools.cache
def finisher(config: ModelConfig) -> Callable[[jax.Array], jax.Array]:
  """What becomes of float32 products with the head: soft-cap, `NEVER` on
  padding. The same object for the same config."""

  def finish(logits):
    if config.final_softcap:
      logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
    if config.padded_vocab > config.vocab_size:
      has_text = jnp.arange(config.padded_vocab) < config.vocab_size
      logits = jnp.where(has_text, logits, NEVER)
    return logits

  return finish


def unembed(kernel, hidden: jax.Array, config: ModelConfig) -> jax.Array:
  """Float32 logits [..., V] of hidden states [..., D]; `NEVER` on padding.

  Args:
    kernel: of `head_kernel`.
  """
  return finisher(config)(head_product(kernel, hidden))


def logits(params: Params, hidden, config: ModelConfig) -> jax.Array:
  """`unembed` with the model's own head."""
  return unembed(head_kernel(params), hidden, config)


# ---- the engine's path ----------------------------------------------------


def unstack(stacks: list, config: ModelConfig) -> list[Params]:
  """The layers one by one, in order."""
  layers = []
  for (pattern, count), stack in zip(config.layers, stacks, strict=True):
    for n in range(count):
      for i in range(len(pattern)):
        layers.append(jax.tree.map(lambda a, n=n: a[n], stack[str(i)]))
  return layers


def decode_layout(params: Params, config: ModelConfig, dtype) -> Params:
  """Parameters as the engine reads them: layers one by one, head as [D, V]."""
  out = {
    'embed': params['embed']['table'],
    'layers': unstack(params['stacks'], config),
    'final_norm': params['final_norm']['scale'],
    'head': head_kernel(params),
  }
  return jax.tree.map(lambda a: a.astype(dtype), out)


def extend(
  layout: Params,
  tokens_BT: jax.Array,
  fresh: Fresh,
  cache: Cache,
  store: Store,
  config: ModelConfig,
  *,
  dtype=jnp.float32,
) -> tuple[jax.Array, Cache]:
  """Runs T new tokens a row on top of the cache.

  Args:
    tokens_BT: int32; only the first count_B of a row are real.
    fresh: where they stand. Keys and values of real tokens are written into
      the cache, and nothing else.
    store: layout of the cache.

  Returns:
    Hidden states [B, T, D] after the final norm, and the cache.
  """
  T = tokens_BT.shape[1]
  positions = fresh.start_B[:, None] + jnp.arange(T)
  # Behind a barrier: XLA would take every cosine again in every layer.
  tables = {
    kind: jax.lax.optimization_barrier(rope_tables(positions, config, kind))
    for kind in set(config.layer_kinds)
  }
  seen = store.see(fresh, T)
  x = _embed(layout['embed'], tokens_BT, config, dtype)
  new_cache = []
  for kind, params, layer in zip(
    config.layer_kinds, layout['layers'], cache, strict=True
  ):

    def see(q, k, v, layer=layer, kind=kind):
      return store.attend(q, k, v, layer, kind, seen)

    x, layer = _apply(params, x, *tables[kind], see, config)
    new_cache.append(layer)
  return _rms(x, layout['final_norm'], config), new_cache
