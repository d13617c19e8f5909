"""Meshes and the one table of logical axis rules.

Floor 1, model/. Axes are data, fsdp, tensor, context and expert (the last two
of size 1 for now). Meshes have Auto axes: XLA propagates the shardings, and
constraints stand at layer boundaries only. Nothing else in the project names
a mesh axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from agentjax.model.config import ModelConfig

AXES = ('data', 'fsdp', 'tensor', 'context', 'expert')

# Logical axis of an array -> mesh axes that split it.
RULES: dict[str, str | tuple[str, ...] | None] = {
  'batch': ('data', 'fsdp'),
  'length': 'context',
  'slots': 'data',
  'vocab': 'tensor',
  'width': 'fsdp',
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'mlp': 'tensor',
  'layers': None,
  'head_size': None,
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
    ValueError: there are fewer devices than the axes ask for.
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
  return jax.make_mesh(
    shape, AXES, devices=have[:need], axis_types=(AxisType.Auto,) * len(AXES)
  )


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
