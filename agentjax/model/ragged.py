"""A store for TPU: rows of slots under JAX's ragged paged attention kernel.

Floor 1, model/, beside `cache`. The kernel (Pallas, ships with JAX) reads of
each row the pages that are filled, so a step costs the sum of the live lengths
and not slots times the longest. It wants pages: a row is a run of its own
pages, the page table is a constant, and nothing else of paging is here.

Letters: B rows, T new tokens, S slots, N positions, K key/value heads, Q head
size, P pages of a row.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from agentjax.model import mesh as meshes
from agentjax.model.cache import Cache, Fresh, doubling, set_tokens
from agentjax.model.config import ModelConfig

LANES = 128  # of a TPU vector: head sizes that are no multiple do not tile
KV_PAGES, QUERIES = 4, 32  # of a block of the kernel


class Seen(NamedTuple):
  fresh: Fresh
  at_BT: jax.Array  # int32, N where there is nothing to write
  end_B: jax.Array  # int32, at least 1
  count_B: jax.Array  # int32, at least 1


@dataclasses.dataclass(frozen=True)
class Ragged:
  """Keys and values of a layer lie [S, N, 2K, Q], a head's two side by side."""

  config: ModelConfig
  slots: int
  length: int
  dtype: Any = jnp.bfloat16
  mesh: Mesh | None = None
  page: int = 128

  @staticmethod
  def fits(config: ModelConfig, dtype: Any, mesh: Mesh | None) -> bool:
    """Whether the kernel can serve this model: bfloat16, whole lanes, and
    key/value heads that divide over the mesh."""
    ways = 1 if mesh is None else meshes.ways('kv_heads', mesh)
    return (
      config.head_size % LANES == 0
      and jnp.dtype(dtype) == jnp.bfloat16
      and config.kv_heads % ways == 0
    )

  @property
  def _pages(self) -> int:
    return -(-self.length // self.page)

  @functools.cached_property
  def prefixes(self) -> tuple[int, ...]:
    return doubling(2 * self.page, self._pages * self.page)

  def init(self) -> Cache:
    shape = (self.slots, self._pages * self.page, 2 * self.config.kv_heads,
             self.config.head_size)  # fmt: skip
    return [
      {'kv': jnp.zeros(shape, self.dtype)} for _ in range(self.config.n_layers)
    ]

  def axes(self) -> Cache:
    row = ('slots', 'none', 'kv_heads', 'none')
    return [{'kv': row} for _ in range(self.config.n_layers)]

  def see(self, fresh: Fresh, T: int) -> Seen:
    if fresh.slot is None and T != 1:
      raise ValueError(f'{T} tokens of all slots at once: give 1, or one slot')
    t = jnp.arange(T)
    at = jnp.where(
      t < fresh.count_B[:, None],
      fresh.start_B[:, None] + t,
      self._pages * self.page,
    )
    end_B = fresh.start_B + fresh.count_B
    # A slot without a new token attends to its first position, for nobody.
    end_B = jnp.where(fresh.count_B > 0, end_B, 1)
    return Seen(fresh, at, end_B, jnp.maximum(fresh.count_B, 1))

  def attend(self, q_BTHQ, k_BTKQ, v_BTKQ, layer, kind, seen: Seen):
    B, T, K, Q = k_BTKQ.shape
    new = jnp.stack([k_BTKQ, v_BTKQ], 3).reshape(B, T, 2 * K, Q)
    new = new.astype(self.dtype)
    kv, slot = layer['kv'], seen.fresh.slot
    if slot is None:
      kv = jax.vmap(set_tokens)(kv, seen.at_BT, new)
    else:
      kv = meshes.write_in_row(
        set_tokens,
        kv,
        slot,
        self.mesh,
        seen.at_BT[0],
        new[0],
        beyond=kv.shape[1],
      )
    attend = functools.partial(self._attend, kind=kind, all_slots=slot is None)
    slot = jnp.int32(0) if slot is None else slot
    rows = 'slots' if seen.fresh.slot is None else 'none'
    heads = (rows, 'none', 'heads', 'none')
    out = meshes.by_slots(
      attend,
      self.mesh,
      (kv, ('slots', 'none', 'kv_heads', 'none')),
      (q_BTHQ, heads),
      (seen.end_B, (rows,)),
      (seen.count_B, (rows,)),
      (slot, ()),
      out=heads,
    )
    return out, {'kv': kv}

  def _attend(self, own, kv, q, end, count, slot, *, kind, all_slots):
    """On one device: its part of the slots and of the heads."""
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as rpa

    config, P = self.config, self._pages
    pages = kv.reshape(-1, self.page, *kv.shape[2:])
    if all_slots:
      table = jnp.arange(kv.shape[0] * P).reshape(-1, P)
      queries, starts = q[:, 0], jnp.arange(kv.shape[0] + 1)
    else:
      row, here = own(slot)
      table = (row * P + jnp.arange(P))[None]
      queries, starts = q[0], jnp.stack([jnp.int32(0), count[0]])
    scale = config.query_scale
    out = rpa.ragged_paged_attention(
      queries,
      pages,
      end,
      table.astype(jnp.int32),
      starts.astype(jnp.int32),
      jnp.array([table.shape[0]], jnp.int32),
      sm_scale=config.head_size**-0.5 if scale is None else scale,
      sliding_window=config.window if kind == 'local' else None,
      soft_cap=config.attn_softcap or None,
      num_kv_pages_per_block=min(KV_PAGES, P),
      num_queries_per_block=min(QUERIES, queries.shape[0]),
    )
    if all_slots:
      return out[:, None]
    return meshes.sum_over_slots(jnp.where(here, out, 0), self.mesh)[None]

  def take(self, cache: Cache, slot: jax.Array, n: int) -> Cache:
    return [
      {'kv': meshes.read_row(layer['kv'], slot, self.mesh)[:, :n]}
      for layer in cache
    ]

  def put(self, cache: Cache, slot: jax.Array, row: Cache) -> Cache:
    return [
      {'kv': meshes.write_row(layer['kv'], new['kv'], slot, self.mesh)}
      for layer, new in zip(cache, row, strict=True)
    ]
