"""A store for NVIDIA GPUs: rows of slots under cuDNN's fused attention.

Floor 1, model/, beside `cache`. `jax.nn.dot_product_attention` reaches cuDNN:
a decode step reads of each row what its length says, a prompt's tokens read
the shortest prefix of their row that holds them. Its other implementation,
plain XLA, computes the same anywhere; tests compare the two stores by it.

Letters: B rows, T new tokens, S slots, N positions, H query heads, K key/value
heads, Q head size.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from agentjax.model import mesh as meshes
from agentjax.model.cache import Cache, Fresh, doubling, set_tokens
from agentjax.model.config import ModelConfig

WIDEST = 128  # head size that cuDNN takes on every GPU since Ampere


class Seen(NamedTuple):
  fresh: Fresh
  at_BT: jax.Array  # int32, N where there is nothing to write
  end_B: jax.Array  # int32, at least 1
  position_BT: jax.Array  # int32


@dataclasses.dataclass(frozen=True)
class Fused:
  """Keys and values of a layer lie [S, N, K, Q], as cuDNN wants them."""

  config: ModelConfig
  slots: int
  length: int
  dtype: Any = jnp.bfloat16
  mesh: Mesh | None = None
  first: int = 256
  implementation: Literal['cudnn', 'xla'] = 'cudnn'

  @staticmethod
  def fits(config: ModelConfig, dtype: Any, mesh: Mesh | None) -> bool:
    """Whether cuDNN can serve this model: 16 bits, heads of at most 128 that
    divide over the mesh, and neither windows nor soft-caps."""
    ways = 1 if mesh is None else meshes.ways('kv_heads', mesh)
    return (
      jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
      and config.head_size <= WIDEST
      and config.head_size % 8 == 0
      and set(config.layer_kinds) == {'global'}
      and not config.attn_softcap
      and config.kv_heads % ways == 0
    )

  @functools.cached_property
  def prefixes(self) -> tuple[int, ...]:
    return doubling(self.first, self.length)

  def init(self) -> Cache:
    shape = (self.slots, self.length, self.config.kv_heads,
             self.config.head_size)  # fmt: skip

    def layer():
      return {name: jnp.zeros(shape, self.dtype) for name in ('k', 'v')}

    return [layer() for _ in range(self.config.n_layers)]

  def axes(self) -> Cache:
    row = ('slots', 'none', 'kv_heads', 'none')
    return [{'k': row, 'v': row} for _ in range(self.config.n_layers)]

  def see(self, fresh: Fresh, T: int) -> Seen:
    if fresh.slot is None and T != 1:
      raise ValueError(f'{T} tokens of all slots at once: give 1, or one slot')
    t = jnp.arange(T)
    position = fresh.start_B[:, None] + t
    at = jnp.where(t < fresh.count_B[:, None], position, self.length)
    # A slot without a new token attends to its first position, for nobody.
    end = jnp.where(fresh.count_B > 0, fresh.start_B + fresh.count_B, 1)
    return Seen(fresh, at, end, position)

  def attend(self, q_BTHQ, k_BTKQ, v_BTKQ, layer, kind, seen: Seen):
    del kind  # there is one, see `fits`
    slot = seen.fresh.slot
    k = self._write(layer['k'], k_BTKQ, seen)
    v = self._write(layer['v'], v_BTKQ, seen)
    q = q_BTHQ.astype(self.dtype)
    if slot is None:
      out = self._attention(q, k, v, key_value_seq_lengths=seen.end_B)
    else:
      out = self._attend_row(q, k, v, seen)
    return out.astype(q_BTHQ.dtype), {'k': k, 'v': v}

  def _attend_row(self, q_BTHQ, k_SNKQ, v_SNKQ, seen: Seen) -> jax.Array:
    """One slot's tokens, over the shortest prefix that holds them."""
    k, v = (
      meshes.read_row(x, seen.fresh.slot, self.mesh) for x in (k_SNKQ, v_SNKQ)
    )

    def look(n):
      mask_BTN = jnp.arange(n) <= seen.position_BT[..., None]
      return lambda: self._attention(
        q_BTHQ, k[:, :n], v[:, :n], mask=mask_BTN[:, None]
      )

    which = jnp.searchsorted(jnp.asarray(self.prefixes), seen.end_B[0])
    return jax.lax.switch(which, [look(n) for n in self.prefixes])

  def _attention(self, q, k, v, **mask) -> jax.Array:
    return jax.nn.dot_product_attention(
      q, k, v,
      scale=self.config.query_scale,  # None is one over the root of Q
      implementation=self.implementation,
      **mask,
    )  # fmt: skip

  def _write(self, x_SNKQ, new_BTKQ, seen: Seen) -> jax.Array:
    new = new_BTKQ.astype(self.dtype)
    if seen.fresh.slot is None:
      return jax.vmap(set_tokens)(x_SNKQ, seen.at_BT, new)
    return meshes.write_in_row(
      set_tokens, x_SNKQ, seen.fresh.slot, self.mesh, seen.at_BT[0], new[0],
      beyond=self.length,
    )  # fmt: skip

  def take(self, cache: Cache, slot: jax.Array, n: int) -> Cache:
    return [
      {
        name: meshes.read_row(x, slot, self.mesh)[:, :n]
        for name, x in layer.items()
      }
      for layer in cache
    ]

  def put(self, cache: Cache, slot: jax.Array, row: Cache) -> Cache:
    return [
      {
        name: meshes.write_row(layer[name], new[name], slot, self.mesh)
        for name in layer
      }
      for layer, new in zip(cache, row, strict=True)
    ]
