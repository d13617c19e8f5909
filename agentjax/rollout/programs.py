"""The engine's programs, jitted for one mesh, and the arrays they share.

Floor 2, rollout/, under `engine`. Here it is decided how weights, hidden
states and cache are split, and nothing else: `decode` says what is computed.
The programs can be lowered without a device, to see whether they compile for
chips that are not there, and what they need.

Letters: S slots, D width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
  Mesh,
  NamedSharding,
  PartitionSpec,
  SingleDeviceSharding,
)

from agentjax.model import cache, lora, transformer
from agentjax.model import mesh as meshes
from agentjax.model.config import ModelConfig
from agentjax.model.handover import HandOver
from agentjax.rollout import decode
from agentjax.rollout.slots import Slot, make_plan
from agentjax.text.stop import StopAutomaton


class Programs:
  """Layout, extend, chunk, fork and take, for `Engine`'s arguments.

  Raises:
    ValueError: the model or the slots do not divide over the mesh, or the
      automaton is of fewer ids than the model's.
  """

  def __init__(
    self,
    config: ModelConfig,
    stops: StopAutomaton,
    *,
    slots: int,
    context: int,
    chunk: int,
    dtype: str,
    cache_dtype: str,
    mesh: Mesh | None,
    store: Callable[..., cache.Store] = cache.Spans,
    kept: int = 0,
  ):
    if (ids := stops.table.shape[1]) < config.vocab_size:
      raise ValueError(
        f'the stop automaton knows {ids} ids and the model samples '
        f'{config.vocab_size}: build it over the whole vocabulary'
      )
    if mesh is not None:
      meshes.check(config, mesh, slots=slots)
    self._config, self._mesh, self._slots = config, mesh, slots
    self._dtype = jnp.dtype(dtype)
    self.store = store(config, slots, context, jnp.dtype(cache_dtype), mesh)
    # Pinned without a mesh too: arrays that JAX may place as it likes and
    # arrays that it may not (restored ones) would each compile a program.
    self._everywhere = SingleDeviceSharding(jax.local_devices()[0])
    options: dict[str, Any] = {'out_shardings': self._everywhere}
    chunk_options: dict[str, Any] = {'out_shardings': self._everywhere}
    if mesh is not None:
      self._everywhere = NamedSharding(mesh, PartitionSpec())
      state = self._state_shardings()
      options['out_shardings'] = state
      chunk_options['out_shardings'] = (*state, self._everywhere)
    kw = {'config': config, 'dtype': self._dtype}
    layout = functools.partial(transformer.decode_layout, **kw)
    self.layout = (
      jax.jit(layout, out_shardings=self._everywhere)
      if mesh is None
      else HandOver(layout, self._layout_shardings())
    )
    self._factors: dict[Any, Callable] = {}
    self.state = jax.jit(self._zeros, **options)
    self.extend = jax.jit(
      functools.partial(decode.extend, store=self.store, **kw),
      donate_argnums=(1, 2),
      **options,
    )
    self._chunk = jax.jit(
      functools.partial(
        decode.chunk,
        capacity=chunk,
        stops=stops,
        store=self.store,
        kept=kept,
        **kw,
      ),
      donate_argnums=(2, 3),
      **chunk_options,
    )
    self._stops = stops
    self.take = jax.jit(
      functools.partial(decode.take, mesh=mesh),
      out_shardings=self._everywhere,
    )
    self._jit_rows(options)

  def _jit_rows(self, options: dict[str, Any]) -> None:
    """The programs that move a row."""
    self.fork = jax.jit(
      functools.partial(decode.fork, store=self.store),
      donate_argnums=(0, 1),
      static_argnames='n',
      **options,
    )
    self.take_row = jax.jit(
      functools.partial(decode.take_row, store=self.store),
      static_argnames='n',
    )
    self.put_row = jax.jit(
      functools.partial(decode.put_row, store=self.store),
      donate_argnums=(0, 1),
      **options,
    )

  def factors(self, factors: transformer.Params) -> transformer.Params:
    """The layout of attached factors; see `lora.split`."""
    maps = jax.tree.structure(factors)  # which of them have factors
    if maps not in self._factors:
      layout = functools.partial(
        lora.layout, config=self._config, dtype=self._dtype
      )
      self._factors[maps] = (
        jax.jit(layout, out_shardings=self._everywhere)
        if self._mesh is None
        else HandOver(layout, self._factor_shardings(layout, factors))
      )
    return self._factors[maps](factors)

  def chunk(self, layout, hidden_SD, layers, plan):
    """`decode.chunk`; the state is given up."""
    return self._chunk(layout, self._table, hidden_SD, layers, plan)

  def _zeros(self) -> tuple[jax.Array, cache.Cache]:
    """Hidden states and cache of empty slots."""
    hidden = jnp.zeros((self._slots, self._config.width), self._dtype)
    return hidden, self.store.init()

  def _stop_table(self) -> np.ndarray:
    """The automaton's table with a column for every row of the embedding.

    Rows without text are never sampled; their columns leave the state alone.
    """
    from_stops = self._stops.table
    states, columns = from_stops.shape
    columns = min(self._config.padded_vocab, columns)
    state_N1 = np.arange(states, dtype=from_stops.dtype)[:, None]
    table = np.repeat(state_N1, self._config.padded_vocab, 1)
    table[:, :columns] = from_stops[:, :columns]
    return table

  @functools.cached_property
  def _table(self) -> jax.Array:
    return jax.device_put(self._stop_table(), self._everywhere)

  # ---- how arrays are split -----------------------------------------------

  def _sharding(self, axes: Sequence[str], shape: Any) -> NamedSharding:
    spec = meshes.spec(axes, self._mesh, shape.shape)
    return NamedSharding(self._mesh, spec)

  def _state_shardings(self) -> Any:
    hidden, layers = jax.eval_shape(self._zeros)
    return (
      self._sharding(('slots', 'none'), hidden),
      meshes.shardings(self.store.axes(), self._mesh, layers),
    )

  def _layout_shapes(self) -> Any:
    return jax.eval_shape(
      lambda: transformer.decode_layout(
        transformer.init(jax.random.key(0), self._config),
        self._config,
        self._dtype,
      )
    )

  def _layout_shardings(self) -> Any:
    """Layers one by one, split over the tensor axis alone: no fsdp gathers."""
    block = meshes.block_axes(self._config)
    axes = {
      'embed': ('vocab', 'width'),
      'layers': [block] * self._config.n_layers,
      'final_norm': ('width',),
      'head': ('width', 'vocab'),
    }

    return jax.tree.map(
      self._local,
      axes,
      self._layout_shapes(),
      is_leaf=lambda x: isinstance(x, tuple),
    )

  def _local(self, axes: Sequence[str], shape: Any) -> NamedSharding:
    axes = ['none' if a == 'width' else a for a in axes]
    return self._sharding(axes, shape)

  def _factor_shardings(self, layout: Callable, factors: Any) -> Any:
    axes = lora.layout_axes(self._config)

    def place(path, shape):
      keys = (getattr(k, 'key', getattr(k, 'idx', None)) for k in path)
      of = functools.reduce(lambda node, key: node[key], keys, axes)
      return self._local(of, shape)

    return jax.tree.map_with_path(place, jax.eval_shape(layout, factors))

  # ---- ahead of time ------------------------------------------------------

  def lower(self, buckets: Sequence[int]) -> dict[str, jax.stages.Lowered]:
    """The programs that do the work, from shapes alone; needs a mesh."""
    state = _placed(jax.eval_shape(self._zeros), self._state_shardings())
    layout = _placed(self._layout_shapes(), self._layout_shardings())
    number = jax.ShapeDtypeStruct((), np.int32)
    out = {
      f'extend {n}': self.extend.lower(
        layout, *state, number, jax.ShapeDtypeStruct((n,), np.int32), number,
        number,
      )
      for n in buckets
    }  # fmt: skip
    plan = make_plan([Slot() for _ in range(self._slots)], 0, 1)
    out['chunk'] = self._chunk.lower(layout, self._stop_table(), *state, plan)
    out['fork'] = self.fork.lower(
      *state, number, number, jax.ShapeDtypeStruct(
        (self._config.width,), self._dtype
      ), n=self.store.prefixes[-1],
    )  # fmt: skip
    return out


def _placed(shapes: Any, shardings: Any) -> Any:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )
