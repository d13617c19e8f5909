"""Meshes and the one table of logical axis rules.

Floor 1, model/. Axes are data, fsdp, tensor, context and expert (the last two
of size 1 for now). Meshes have Auto axes: XLA propagates the shardings, and
constraints stand at layer boundaries only. Nothing else in the project names
a mesh axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from agentjax.model.config import ModelConfig

AXES = ('data', 'fsdp', 'tensor', 'context', 'expert')

# Logical axis of an array -> mesh axes that split it.
RULES: dict[str, str | tuple[str, ...] | None] = {
  'batch': ('data', 'fsdp'),
  'rows': 'data',  # where the parts of fsdp hold parts of the width instead
  'length': 'context',
  'between': ('context', 'tensor'),  # of activations between two layers
  'slots': 'data',
  'vocab': 'tensor',
  'width': 'fsdp',
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'mlp': 'tensor',
  'layers': None,
  'head_size': None,
  'rank': None,
  'none': None,
}


def make_mesh(
  data: int = 1,
  fsdp: int = 1,
  tensor: int = 1,
  devices: Sequence[jax.Device] | None = None,
  local: bool = False,
) -> Mesh:
  """A mesh over `devices` (default: the first data*fsdp*tensor ones).

  Args:
    local: take this process's devices: the mesh of an engine of its own.

  Raises:
    ValueError: there are fewer devices than the axes ask for, or they do not
      lie so.
  """
  shape = (data, fsdp, tensor, 1, 1)
  need = math.prod(shape)
  if devices is None:
    devices = jax.local_devices() if local else jax.devices()
  have = list(devices)
  if need < 1 or need > len(have):
    raise ValueError(
      f'mesh data={data} fsdp={fsdp} tensor={tensor} needs {need} devices, '
      f'there are {len(have)}: lower an axis, or on CPU set '
      f'jax_num_cpu_devices={need}'
    )
  # On TPU this lays neighbours of an axis next to each other.
  types = (AxisType.Auto,) * len(AXES)
  try:
    return jax.make_mesh(shape, AXES, devices=have[:need], axis_types=types)
  except NotImplementedError as error:
    raise ValueError(
      f'mesh data={data} fsdp={fsdp} tensor={tensor} does not lie along the '
      'sides of these chips: let each axis be one side or a product of some, '
      'as fsdp=16 tensor=4 on 4x4x4'
    ) from error


def check(
  config: ModelConfig, mesh: Mesh, *, rows: int = 0, slots: int = 0
) -> None:
  """Refuses a mesh that this model, or its batch, cannot be split over.

  Args:
    rows: of a learner's micro-batch. slots: of an engine.

  Raises:
    ValueError: an axis does not divide what it splits. KV heads that do not
      divide are replicated instead (see `spec`), which costs cache memory.
  """
  for name, size, logical in (
    ('heads', config.heads, 'heads'),
    ('mlp', config.mlp, 'mlp'),
    ('padded_vocab', config.padded_vocab, 'vocab'),
    ('width', config.width, 'width'),
    ('rows', rows, 'batch'),
    ('slots', slots, 'slots'),
  ):
    if size % (by := ways(logical, mesh)):
      axes = ' * '.join(_mesh_axes(logical))
      raise ValueError(
        f'{name} {size} does not divide over {axes} = {by} devices: choose a '
        f'divisor of {size}'
        + (', or load with a padded vocabulary' if 'vocab' in name else '')
      )


def _mesh_axes(logical: str) -> tuple[str, ...]:
  rule = RULES[logical]
  return (rule,) if isinstance(rule, str) else rule or ()


def ways(logical: str, mesh: Mesh) -> int:
  """Into how many parts a mesh splits a logical axis."""
  return math.prod(mesh.shape[name] for name in _mesh_axes(logical))


def spec(
  axes: Sequence[str], mesh: Mesh, shape: Sequence[int] | None = None
) -> PartitionSpec:
  """Mesh axes for an array with these logical axes.

  An axis whose size in `shape` does not divide over its mesh axes is
  replicated: KV heads over a wide tensor axis, or a short batch.
  """
  out = []
  for i, name in enumerate(axes):
    whole = shape is not None and shape[i] % ways(name, mesh)
    out.append(None if whole else RULES[name])
  return PartitionSpec(*out)


def constrain(x: jax.Array, *axes: str) -> jax.Array:
  """Constrains a traced array's sharding under `jax.set_mesh`; else no-op."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or math.prod(mesh.shape.values()) == 1:
    return x
  return jax.lax.with_sharding_constraint(x, spec(axes, mesh, x.shape))


def read_row(x: jax.Array, slot: jax.Array, mesh: Mesh | None) -> jax.Array:
  """Row `slot` of x [S, ...], split over slots, as [1, ...]."""
  if mesh is None or ways('slots', mesh) == 1:
    return jax.lax.dynamic_slice_in_dim(x, slot, 1)

  def read(part, index, slot):
    at, here = _own(part, index, slot)
    row = jax.lax.dynamic_slice_in_dim(part, at, 1)
    return jax.lax.psum(jnp.where(here, row, 0), RULES['slots'])

  return _by_slots(mesh, read, PartitionSpec())(x, slot)


def write_row(
  x: jax.Array, row: jax.Array, slot: jax.Array, mesh: Mesh | None
) -> jax.Array:
  """x [S, ...], split over slots, with `row` [1, ...] at the start of `slot`.

  Each part writes into its own rows, or what stands there already. Left to
  XLA, a slice across parts would gather all of x on every chip.
  """
  if mesh is None or ways('slots', mesh) == 1:
    start = (slot, *(0,) * (x.ndim - 1))
    return jax.lax.dynamic_update_slice(x, row, start)

  def write(part, index, slot, row):
    at, here = _own(part, index, slot)
    start = (at, *(0,) * (part.ndim - 1))
    old = jax.lax.dynamic_slice(part, start, row.shape)
    return jax.lax.dynamic_update_slice(part, jnp.where(here, row, old), start)

  split = PartitionSpec(RULES['slots'])
  return _by_slots(mesh, write, split)(x, slot, row)


def write_in_row(
  write: Callable,
  x: jax.Array,
  slot: jax.Array,
  mesh: Mesh | None,
  at: jax.Array,
  new: jax.Array,
  *,
  beyond: int,
) -> jax.Array:
  """x [S, ...], split over slots, with new values at places of one row.

  Args:
    write: write(x, at, new, slot) drops what it is told to put at `beyond`.
  """
  if mesh is None or ways('slots', mesh) == 1:
    return write(x, at, new, slot)

  def own(part, index, slot, at, new):
    row, here = _own(part, index, slot)
    return write(part, jnp.where(here, at, beyond), new, row)

  split = PartitionSpec(RULES['slots'])
  return _by_slots(mesh, own, split)(x, slot, at, new)


def _own(part, index, slot) -> tuple[jax.Array, jax.Array]:
  """A valid place in this part, and whether it is the slot's."""
  at = slot - index[0] * part.shape[0]
  return jnp.clip(at, 0, part.shape[0] - 1), (at >= 0) & (at < part.shape[0])


def _by_slots(mesh: Mesh, function: Callable, out: PartitionSpec) -> Callable:
  """Calls function(part, [index of the part], ...) on each part of the slots.

  Other mesh axes stay XLA's. The index is an argument because XLA:TPU has no
  partition id where it splits the rest by itself.
  """
  split = PartitionSpec(RULES['slots'])

  def call(x, *rest):
    index = jnp.arange(ways('slots', mesh))
    return jax.shard_map(
      function,
      mesh=mesh,
      in_specs=(split, split, *(PartitionSpec(),) * len(rest)),
      out_specs=out,
      axis_names={RULES['slots']},
    )(x, index, *rest)

  return call


def by_slots(function: Callable, mesh: Mesh | None, *arrays, out) -> jax.Array:
  """Calls a kernel on each device's part of arrays.

  Args:
    function: called as (own, *parts); `own(slot)` is the place of a slot in
      the device's part, and whether it is there.
    arrays: (array, logical axes). out: logical axes of the result.
  """
  values, axes = zip(*arrays, strict=True)
  if mesh is None:
    return function(lambda slot: (slot, jnp.bool_(True)), *values)

  def call(index, *parts):
    rows = parts[0].shape[0]

    def own(slot):
      at = slot - index[0] * rows
      return jnp.clip(at, 0, rows - 1), (at >= 0) & (at < rows)

    return function(own, *parts)

  specs = [spec(a, mesh, x.shape) for x, a in zip(values, axes, strict=True)]
  # The kernel is not differentiated, and cannot say how its result varies.
  return jax.shard_map(
    call,
    mesh=mesh,
    in_specs=(PartitionSpec(RULES['slots']), *specs),
    out_specs=spec(out, mesh),
    check_vma=False,
  )(jnp.arange(ways('slots', mesh)), *values)


def sum_over_slots(x: jax.Array, mesh: Mesh | None) -> jax.Array:
  """Inside of `by_slots`: the sum of all parts' x."""
  return x if mesh is None else jax.lax.psum(x, RULES['slots'])


def block_axes(config: ModelConfig) -> dict[str, Any]:
  """Logical axes of one block's parameters, without the layers axis."""
  norm = {'scale': ('width',)}
  attn = {
    'q': ('width', 'heads', 'head_size'),
    'k': ('width', 'kv_heads', 'head_size'),
    'v': ('width', 'kv_heads', 'head_size'),
    'o': ('heads', 'head_size', 'width'),
  }
  if config.qkv_bias:
    attn |= {
      'q_bias': ('heads', 'head_size'),
      'k_bias': ('kv_heads', 'head_size'),
      'v_bias': ('kv_heads', 'head_size'),
    }
  if config.qk_norm:
    attn |= {'q_norm': ('none',), 'k_norm': ('none',)}
  axes = {
    'attn_norm': norm,
    'mlp_norm': norm,
    'attn': attn,
    'mlp': {
      'gate': ('width', 'mlp'),
      'up': ('width', 'mlp'),
      'down': ('mlp', 'width'),
    },
  }
  if config.post_norms:
    axes |= {'attn_post_norm': norm, 'mlp_post_norm': norm}
  return axes


def param_axes(config: ModelConfig) -> dict[str, Any]:
  """Logical axes of every parameter: the tree of `transformer.init`."""
  block = jax.tree.map(
    lambda axes: ('layers', *axes), block_axes(config), is_leaf=_is_axes
  )
  axes = {
    'embed': {'table': ('vocab', 'width')},
    'stacks': [
      {str(i): block for i in range(len(pattern))}
      for pattern, _ in config.layers
    ],
    'final_norm': {'scale': ('width',)},
  }
  if not config.tied:
    axes['head'] = {'kernel': ('width', 'vocab')}
  return axes


def shardings(axes: Any, mesh: Mesh, shapes: Any) -> Any:
  """NamedShardings for a tree of logical axes and a tree of arrays/shapes."""
  return jax.tree.map(
    lambda a, s: NamedSharding(mesh, spec(a, mesh, s.shape)),
    axes,
    shapes,
    is_leaf=_is_axes,
  )


def _is_axes(x: Any) -> bool:
  return isinstance(x, tuple) and all(isinstance(a, str) for a in x)
