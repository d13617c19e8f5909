"""Attention of the learner over packed rows: four ways, one meaning.

Floor 1, model/. `plain` writes down all scores of a row; `in_blocks` those of
some queries at a time, and again in the backward pass; `causal` leaves out the
keys that no query of a block may see, which is best on CPU; `splash` is JAX's
kernel for TPU, which writes down none. A token sees the earlier tokens of its
own sequence, in layers with a window the near ones. Knows no parameters.

Letters: B rows, T tokens, C queries of a block, S keys, H query heads, K
key/value heads, G = H // K, Q head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from agentjax.model import mesh as meshes
from agentjax.model.config import ModelConfig
from agentjax.model.precision import NEVER, precision

LANES = 128  # of a TPU vector
LONG = 2048  # tokens of a row from which scores are not written down at once


class Rows(NamedTuple):
  """Which sequence each token of a row belongs to, and where in it it is."""

  pack_ids: jax.Array  # int32 [B, T], 0 for padding
  positions: jax.Array  # int32 [B, T], restarting per sequence
  # Of rows that hold trees, int32 [B, T]: each token's place, and the first
  # place behind all that may see it.
  places: jax.Array | None = None
  ends: jax.Array | None = None


# (q [B,T,H,Q], k and v [B,T,K,Q], rows, kind of layer, config) -> [B,T,H,Q]
Attention = Callable[..., jax.Array]


def scale_queries(q: jax.Array, config: ModelConfig) -> jax.Array:
  """Queries as the scores want them."""
  scale = config.query_scale
  scale = config.head_size**-0.5 if scale is None else scale
  return q * jnp.asarray(scale, q.dtype)


def attend(
  q_BTHQ: jax.Array,
  k_BSKQ: jax.Array,
  v_BSKQ: jax.Array,
  mask_BTS: jax.Array,
  config: ModelConfig,
) -> jax.Array:
  """Grouped-query attention, softmax in float32; returns [B, T, H, Q].

  `mask_BTS` is True where a query may see a key. A query that sees no key
  returns a finite value that nothing may use.
  """
  B, T, H, Q = q_BTHQ.shape
  K = k_BSKQ.shape[2]
  q = scale_queries(q_BTHQ, config).reshape(B, T, K, H // K, Q)
  scores = jnp.einsum(
    'btkgq,bskq->bkgts',
    q,
    k_BSKQ.astype(q.dtype),
    precision=precision(q),
    preferred_element_type=jnp.float32,
  )
  if config.attn_softcap:
    scores = config.attn_softcap * jnp.tanh(scores / config.attn_softcap)
  scores = jnp.where(mask_BTS[:, None, None], scores, NEVER)
  weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
  out = jnp.einsum(
    'bkgts,bskq->btkgq', weights, v_BSKQ.astype(q.dtype), precision=precision(q)
  )
  return out.reshape(B, T, H, Q)


def _mask(queries: Rows, keys: Rows, kind: str, config) -> jax.Array:
  """bool [B, C, S]: which keys each query may see."""
  far = queries.positions[:, :, None] - keys.positions[:, None]
  if keys.ends is None:
    mask = queries.pack_ids[:, :, None] == keys.pack_ids[:, None]
    # Within a sequence the order of positions is the order of tokens.
    mask &= far >= 0
  else:
    behind = queries.places[:, :, None]
    mask = (keys.places[:, None] <= behind) & (behind < keys.ends[:, None])
  return mask & (far < config.window) if kind == 'local' else mask


def plain(q, k, v, rows: Rows, kind: str, config: ModelConfig) -> jax.Array:
  """All scores at once: [B, H, T, T] of them."""
  out = attend(q, k, v, _mask(rows, rows, kind, config), config)
  return checkpoint_name(out, 'seen')


def in_blocks(
  q, k, v, rows: Rows, kind: str, config: ModelConfig, *, block: int = 512
) -> jax.Array:
  """Scores of `block` queries at a time, again in the backward pass.

  So [B, H, C, T] of them exist at once.
  """
  B, T = rows.pack_ids.shape
  n = -(-T // block)

  def split(x):
    """[B, T, ...] -> [n, B, C, ...]; what is padded sees padding."""
    pad = ((0, 0), (0, n * block - T)) + ((0, 0),) * (x.ndim - 2)
    return jnp.moveaxis(
      jnp.pad(x, pad).reshape(B, n, block, *x.shape[2:]), 1, 0
    )

  @jax.checkpoint
  def look(args):
    q, queries = args
    return attend(q, k, v, _mask(queries, rows, kind, config), config)

  out = jax.lax.map(look, (split(q), jax.tree.map(split, rows)))
  out = jnp.moveaxis(out, 0, 1).reshape(B, n * block, *q.shape[2:])[:, :T]
  return checkpoint_name(out, 'seen')


def causal(
  q, k, v, rows: Rows, kind: str, config: ModelConfig, *, block: int = 128
) -> jax.Array:
  """Scores of `block` queries at a time, over the keys that they may see.

  Later keys of a row are left out, and in layers with a window those before
  it: about half of all scores where a row has many blocks. The backward pass
  takes them again from queries, keys, output and log-sum-exp. The blocks are
  not a loop: their scores may exist at once, in one layer.

  Source: the backward pass is that of FlashAttention, arXiv:2205.14135,
  appendix B.2.
  """
  B, T, H, Q = q.shape
  K = k.shape[2]
  q = scale_queries(q, config).reshape(B, T, K, H // K, Q)
  # In a tree what is near in its own sequence may stand far away.
  look = _causal(kind, config, block, rows.ends is not None)
  out = look(
    q.transpose(0, 2, 3, 1, 4), *(x.transpose(0, 2, 1, 3) for x in (k, v)), rows
  )
  return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, Q)


@functools.cache
def _causal(
  kind: str, config: ModelConfig, block: int, trees: bool
) -> Callable:
  """The operation on q [B,K,G,T,Q], k and v [B,K,T,Q], with its gradient."""

  def spans(T):
    for start in range(0, T, block):
      queries = slice(start, min(start + block, T))
      near = kind == 'local' and not trees
      first = max(0, start - config.window + 1) if near else 0
      yield queries, slice(first, queries.stop)

  def scores(q, k, rows, queries, keys):
    s = _product('bkgcq,bksq->bkgcs', q[..., queries, :], k[:, :, keys])
    if config.attn_softcap:
      s = config.attn_softcap * jnp.tanh(s / config.attn_softcap)
    see, seen = (
      jax.tree.map(lambda x, part=part: x[:, part], rows)
      for part in (queries, keys)
    )
    mask = _mask(see, seen, kind, config)[:, None, None]
    return jnp.where(mask, s, NEVER)

  def forward(q, k, v, rows):
    outs, totals = [], []
    for queries, keys in spans(q.shape[3]):
      s = scores(q, k, rows, queries, keys)
      top = s.max(-1, keepdims=True)
      p = jnp.exp(s - top)
      total = p.sum(-1, keepdims=True)
      out = _product('bkgcs,bksq->bkgcq', p.astype(q.dtype), v[:, :, keys])
      outs.append((out / total).astype(q.dtype))
      totals.append((top + jnp.log(total))[..., 0])
    out, log_total = jnp.concatenate(outs, 3), jnp.concatenate(totals, 3)
    # By these names a remat policy keeps them, and the scores are taken twice
    # instead of three times.
    return checkpoint_name(out, 'seen'), checkpoint_name(log_total, 'seen')

  @jax.custom_vjp
  def look(q, k, v, rows):
    return forward(q, k, v, rows)[0]

  def keep(q, k, v, rows):
    out, log_total = forward(q, k, v, rows)
    return out, (q, k, v, rows, out, log_total)

  def backward(residuals, d_out):
    # Behind a barrier: where layers are unrolled XLA would keep the scores of
    # the forward pass instead.
    q, k, v, rows, out, log_total = jax.lax.optimization_barrier(residuals)
    far = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1)
    d_q = []
    # Of keys and values as [B, K, Q, T]: so products transpose the narrow
    # queries, and never scores.
    d_k, d_v = (
      jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2]), jnp.float32)
      for x in (k, v)
    )
    for queries, keys in spans(q.shape[3]):
      s = scores(q, k, rows, queries, keys)
      p = jnp.exp(s - log_total[..., queries, None])
      d_o = d_out[..., queries, :]
      d_s = _product('bkgcq,bksq->bkgcs', d_o, v[:, :, keys])
      d_s = p * (d_s - far[..., queries, None])
      if config.attn_softcap:
        d_s *= 1 - jnp.where(s > NEVER, s / config.attn_softcap, 0) ** 2
      p, d_s = p.astype(q.dtype), d_s.astype(q.dtype)
      d_q.append(_product('bkgcs,bksq->bkgcq', d_s, k[:, :, keys]))
      d_k = d_k.at[..., keys].add(
        _product('bkgcq,bkgcs->bkqs', q[..., queries, :], d_s)
      )
      d_v = d_v.at[..., keys].add(_product('bkgcq,bkgcs->bkqs', d_o, p))
    d_q = jnp.concatenate(d_q, 3).astype(q.dtype)
    d_k, d_v = (x.swapaxes(2, 3).astype(k.dtype) for x in (d_k, d_v))
    return d_q, d_k, d_v, None

  look.defvjp(keep, backward)
  return look


def _product(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """In float32, whatever is multiplied."""
  return jnp.einsum(
    formula,
    x,
    y,
    precision=precision(x),
    preferred_element_type=jnp.float32,
  )


def splash(
  q, k, v, rows: Rows, kind: str, config: ModelConfig, *,
  block: int = 512, interpret: bool = False,
) -> jax.Array:  # fmt: skip
  """JAX's splash attention for TPU, on each chip's rows and heads.

  Source: jax.experimental.pallas.ops.tpu.splash_attention.
  """
  if rows.ends is not None:
    raise ValueError('splash attention knows no trees: use plain or in_blocks')
  mesh = jax.sharding.get_abstract_mesh()
  alone = mesh.empty
  H, K = q.shape[2], k.shape[2]
  if not alone and K % meshes.ways('kv_heads', mesh):
    # Heads that do not divide are repeated, so that each chip has its own.
    k, v = (jnp.repeat(x, H // K, 2) for x in (k, v))
  call = functools.partial(
    _splash, kind=kind, config=config, block=block, interpret=interpret
  )
  if alone:
    return call(q, k, v, rows.pack_ids)
  heads = ('batch', 'none', 'heads', 'none')
  specs = [meshes.spec(heads, mesh, x.shape) for x in (q, k, v)]
  ids = meshes.spec(('batch', 'none'), mesh, rows.pack_ids.shape)
  # The kernel cannot say how its result varies over the mesh.
  return jax.shard_map(
    call, in_specs=(*specs, ids), out_specs=specs[0], check_vma=False
  )(q, k, v, rows.pack_ids)


def _splash(q, k, v, pack_ids_BT, *, kind, config, block, interpret):
  from jax.experimental.pallas.ops.tpu import splash_attention as sa

  T, H = q.shape[1:3]
  if kind == 'local':
    mask = sa.LocalMask((T, T), (config.window - 1, 0), 0)
  else:
    mask = sa.CausalMask((T, T))
  size = min(block, T)
  kernel = sa.make_splash_mha_single_device(
    sa.MultiHeadMask([mask] * H),
    block_sizes=sa.BlockSizes(
      block_q=size, block_kv=size, block_kv_compute=size,
      block_q_dkv=size, block_kv_dkv=size, block_kv_dkv_compute=size,
      block_q_dq=size, block_kv_dq=size,
    ),
    attn_logits_soft_cap=config.attn_softcap or None,
    residual_checkpoint_name='seen',  # its result, and log-sum-exp
    interpret=interpret,
  )  # fmt: skip

  def heads_first(x):
    return x.transpose(0, 2, 1, 3)

  out = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, sa.SegmentIds(ids, ids)))(
    heads_first(scale_queries(q, config)),
    heads_first(k),
    heads_first(v),
    pack_ids_BT,
  )
  return heads_first(out).astype(q.dtype)


def best_attention(
  config: ModelConfig, length: int, mesh: Mesh | None, trees: bool = False
) -> Attention:
  """The way for rows of `length` tokens on the devices at hand.

  The kernel needs whole vectors of tokens, and a head size that it tiles; it
  knows no `trees`.
  """
  devices = jax.devices() if mesh is None else mesh.devices.flat
  tiles = length % LANES == 0 and config.head_size % 64 == 0
  if devices[0].platform == 'tpu' and tiles and not trees:
    fits = next(b for b in (512, 256, LANES) if length % b == 0)
    return functools.partial(splash, block=fits)
  if length > LONG:
    return in_blocks
  # Elsewhere a program of many small products gains nothing.
  return causal if devices[0].platform == 'cpu' else plain
