"""Where keys and values are stored, and attention over what is there.

Floor 1, model/. A store says how a slot's row lies in memory, writes new
tokens into it and attends over it; `transformer.extend` calls it once a layer
and knows no layout. `Spans`, plain XLA for every backend, stands here; kernels
are in `ragged.Ragged` for TPU and `fused.Fused` for NVIDIA GPUs.

Why rows of slots and no pages, on paper: Qwen2.5-7B in bfloat16 on a v5p host
(4 chips, 380 GB, 11.06 TB/s together), contexts of 32,768. A token's keys and
values are 28 layers x 4 heads x 128 x 2 x 2 B = 57 kB, a full row 1.88 GB; next
to 15.2 GB of weights and a tenth kept free there is room for 326 GB, 173 rows.
A step reads the weights once (1.38 ms) and each row as far as it is filled:

  mean live length      rows: 173 slots           pages of 128: all 326 GB used
   8,192 tokens    81 GB, 8.7 ms, 19.8k tok/s   690 rows, 30.7 ms, 22.5k tok/s
  16,384 tokens   163 GB, 16.1 ms, 10.8k tok/s  346 rows, 30.8 ms, 11.2k tok/s

At these lengths a step is bound by reading the cache, so four times the rows
are 13 % more tokens (4 % at twice the length), each trajectory takes 3.5 times
as long, and four times the sandboxes have to be kept. A fork copies 0.47 GB in
0.09 ms where pages would share it, and a group of 16 with a prompt of 2,048
stores 1.8 GB more. A paused trajectory needs no row: it goes to host memory.
Rows win: the kernel (`model.ragged`) reads live lengths either way.

Letters: B rows, T new tokens, S slots, N positions of a span, H query heads,
K key/value heads, G = H // K, Q head size.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from agentjax.model import mesh as meshes
from agentjax.model.attention import scale_queries
from agentjax.model.config import ModelConfig
from agentjax.model.precision import NEVER, precision

Layer = dict[str, Any]  # of a store: arrays whose leading axis is slots
Cache = list[Layer]


class Fresh(NamedTuple):
  """Where the new tokens of an `extend` stand."""

  start_B: jax.Array  # int32: tokens that the row already holds
  count_B: jax.Array  # int32: how many of the T new ones are real
  slot: jax.Array | None  # None: row b is slot b; else int32[] and B is 1


class Store(Protocol):
  """Layout of a KV cache of `slots` rows of `length` positions.

  Attributes:
    prefixes: ascending lengths, the last one `length`: a row can be read and
      written up to each of them, at the cost of that length.
  """

  prefixes: tuple[int, ...]

  def init(self) -> Cache:
    """An empty cache: arrays that any slot's row is a slice of."""

  def axes(self) -> Cache:
    """Logical axes of each of its arrays."""

  def see(self, fresh: Fresh, T: int) -> Any:
    """What all layers need to know of the new tokens; given to `attend`."""

  def attend(
    self, q_BTHQ, k_BTKQ, v_BTKQ, layer: Layer, kind: str, seen: Any
  ) -> tuple[jax.Array, Layer]:
    """Stores k and v, then attends: [B, T, H, Q] and the layer."""

  def take(self, cache: Cache, slot: jax.Array, n: int) -> Cache:
    """The first n positions of a slot's row; n is one of `prefixes`."""

  def put(self, cache: Cache, slot: jax.Array, row: Cache) -> Cache:
    """The cache with what `take` gave at the start of a slot's row."""


class Seen(NamedTuple):
  """Of `Spans.see`: per span, where it is written and who may see it."""

  fresh: Fresh
  at: tuple[jax.Array, ...]  # int32 [B, T], N where there is nothing to write
  mask: dict[str, tuple[jax.Array, ...]]  # kind -> bool [B, T, N]
  reached: dict[str, tuple[jax.Array, ...]]  # kind -> bool []


@dataclasses.dataclass(frozen=True)
class Spans:
  """A row in spans of doubling length; spans that nobody needs cost nothing.

  Span i is read only if some row has a token in it (and, in layers with a
  window, a window over it). So the cost follows the longest live row, within
  a factor of two, and what other rows need changes no bit: a span that a row
  has no token in leaves its running softmax exactly as it was (online softmax,
  Milakov and Gimelshein, arXiv:1805.02867). A single program over dynamic
  lengths would have to copy what it slices; spans are read where they are.

  Keys lie [S, K, Q, N] and values [S, K, N, Q]: both products read the row as
  it lies, which on CPU is 2 to 3 times faster than [S, N, K, Q].
  """

  config: ModelConfig
  slots: int
  length: int
  dtype: Any = jnp.float32
  mesh: Mesh | None = None
  first: int = 256

  @functools.cached_property
  def prefixes(self) -> tuple[int, ...]:
    return doubling(self.first, self.length)

  @property
  def _bounds(self) -> list[tuple[int, int]]:
    return list(itertools.pairwise((0, *self.prefixes)))

  def init(self) -> Cache:
    S, K, Q = self.slots, self.config.kv_heads, self.config.head_size

    def layer():
      sizes = [end - start for start, end in self._bounds]
      return {
        'k': tuple(jnp.zeros((S, K, Q, n), self.dtype) for n in sizes),
        'v': tuple(jnp.zeros((S, K, n, Q), self.dtype) for n in sizes),
      }

    return [layer() for _ in range(self.config.n_layers)]

  def axes(self) -> Cache:
    part = (('slots', 'kv_heads', 'none', 'none'),) * len(self.prefixes)
    return [{'k': part, 'v': part} for _ in range(self.config.n_layers)]

  def see(self, fresh: Fresh, T: int) -> Seen:
    t = jnp.arange(T)
    position_BT = fresh.start_B[:, None] + t
    real_BT = t < fresh.count_B[:, None]
    end_B = jnp.where(fresh.count_B > 0, fresh.start_B + fresh.count_B, 0)
    # The first position that anybody still sees through a window.
    near = jnp.where(
      fresh.count_B > 0, fresh.start_B - self.config.window + 1, self.length
    ).min()
    at, mask, reached = [], {}, {}
    kinds = set(self.config.layer_kinds)
    for kind in kinds:
      mask[kind], reached[kind] = [], []
    for start, end in self._bounds:
      inside = real_BT & (position_BT >= start) & (position_BT < end)
      at.append(jnp.where(inside, position_BT - start, end - start))
      s = jnp.arange(start, end)
      visible = s <= position_BT[:, :, None]
      for kind in kinds:
        if kind == 'local':
          close = position_BT[:, :, None] - s < self.config.window
          mask[kind].append(visible & close)
          reached[kind].append((end_B.max() > start) & (near < end))
        else:
          mask[kind].append(visible)
          reached[kind].append(end_B.max() > start)
    return Seen(
      fresh,
      tuple(at),
      {kind: tuple(x) for kind, x in mask.items()},
      {kind: tuple(x) for kind, x in reached.items()},
    )

  def attend(self, q_BTHQ, k_BTKQ, v_BTKQ, layer, kind, seen):
    slot = seen.fresh.slot
    layer = {
      'k': self._write(layer['k'], k_BTKQ, -1, seen),
      'v': self._write(layer['v'], v_BTKQ, -2, seen),
    }
    B, T, H, Q = q_BTHQ.shape
    K = self.config.kv_heads
    q = scale_queries(q_BTHQ, self.config)
    q = q.reshape(B, T, K, H // K, Q).transpose(0, 2, 3, 1, 4)
    q = q.reshape(B, K, -1, Q)
    carry = (
      jnp.full(q.shape[:3], NEVER),
      jnp.zeros(q.shape[:3]),
      jnp.zeros(q.shape),
    )
    for i, mask_BTN in enumerate(seen.mask[kind]):

      def look(carry, k, v, mask_BTN):
        if slot is not None:
          k, v = (meshes.read_row(x, slot, self.mesh) for x in (k, v))
        return _look(carry, q, k, v, mask_BTN, self.config)

      operands = (carry, layer['k'][i], layer['v'][i], mask_BTN)
      if i == 0 and kind == 'global':  # every live row is in the first span
        carry = look(*operands)
      else:
        carry = jax.lax.cond(
          seen.reached[kind][i], look, lambda carry, *_: carry, *operands
        )
    _, total, out = carry
    out = (out / total[..., None]).astype(q_BTHQ.dtype)
    out = out.reshape(B, K, H // K, T, Q).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, H, Q), layer

  def _write(self, spans, new_BTKQ, axis: int, seen: Seen) -> tuple:
    """Each span with its new tokens; positions are the given axis."""
    slot = seen.fresh.slot

    def write(span, at_BT):
      new = new_BTKQ.astype(span.dtype)
      if slot is None:
        return jax.vmap(set_positions, (None, 0, 0, 0))(axis, span, at_BT, new)
      return meshes.write_in_row(
        functools.partial(set_positions, axis),
        span, slot, self.mesh, at_BT[0], new[0], beyond=span.shape[axis],
      )  # fmt: skip

    return tuple(
      write(span, at) for span, at in zip(spans, seen.at, strict=True)
    )

  def take(self, cache: Cache, slot: jax.Array, n: int) -> Cache:
    spans = self.prefixes.index(n) + 1
    return [
      {
        name: tuple(meshes.read_row(x, slot, self.mesh) for x in parts[:spans])
        for name, parts in layer.items()
      }
      for layer in cache
    ]

  def put(self, cache: Cache, slot: jax.Array, row: Cache) -> Cache:
    def parts(old, new):
      write = [
        meshes.write_row(x, r, slot, self.mesh)
        for x, r in zip(old, new, strict=False)
      ]
      return (*write, *old[len(new) :])

    return [
      {name: parts(layer[name], new[name]) for name in layer}
      for layer, new in zip(cache, row, strict=True)
    ]


def doubling(first: int, last: int) -> tuple[int, ...]:
  """first, 2 * first, ... below `last`, and then `last`."""
  out = [first]
  while out[-1] < last:
    out.append(2 * out[-1])
  return (*out[:-1], last)


def set_positions(axis: int, x, at_T, new_TKQ, *row) -> jax.Array:
  """New tokens at positions of a row, or of row `row` of x; others dropped."""
  whole = slice(None)
  at = (*row, whole, whole, at_T) if axis == -1 else (*row, whole, at_T, whole)
  if not row:  # one index alone leaves its axis where it is
    new_TKQ = new_TKQ.transpose((1, 2, 0) if axis == -1 else (1, 0, 2))
  return x.at[at].set(new_TKQ, mode='drop')


def set_tokens(x, at_T, new_TKQ, *row) -> jax.Array:
  """As `set_positions`, where positions are the first axis of a row."""
  return x.at[(*row, at_T)].set(new_TKQ, mode='drop')


def _look(carry, q_BKRQ, k_BKQN, v_BKNQ, mask_BTN, config):
  """One step of an online softmax: (largest, total, output) over more keys.

  R = G * T queries of a head. What is masked adds exactly nothing, once the
  row has seen a key; before that it adds what the first key wipes out.
  """
  largest, total, out = carry
  dtype = q_BKRQ.dtype
  scores = jnp.einsum(
    'bkrq,bkqn->bkrn',
    q_BKRQ,
    k_BKQN.astype(dtype),
    precision=precision(q_BKRQ),
    preferred_element_type=jnp.float32,
  )
  if config.attn_softcap:
    scores = config.attn_softcap * jnp.tanh(scores / config.attn_softcap)
  B, K, R, N = scores.shape
  T = mask_BTN.shape[1]
  scores = jnp.where(
    mask_BTN[:, None, None], scores.reshape(B, K, R // T, T, N), NEVER
  ).reshape(B, K, R, N)
  new = jnp.maximum(largest, scores.max(-1))
  fade = jnp.exp(largest - new)
  weights = jnp.exp(scores - new[..., None])
  seen = jnp.einsum(
    'bkrn,bknq->bkrq',
    weights.astype(dtype),
    v_BKNQ.astype(dtype),
    precision=precision(q_BKRQ),
    preferred_element_type=jnp.float32,
  )
  return new, total * fade + weights.sum(-1), out * fade[..., None] + seen
