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
import numpy as np
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
) -> Mesh:
  """A mesh over `devices` (default: the first data*fsdp*tensor ones).

  Raises:
    ValueError: there are fewer devices than the axes ask for.
  """
  shape = (data, fsdp, tensor, 1, 1)
  need = math.prod(shape)
  have = list(jax.devices() if devices is None else devices)
  if need < 1 or need > len(have):
    raise ValueError(
      f'mesh data={data} fsdp={fsdp} tensor={tensor} needs {need} devices, '
      f'there are {len(have)}: lower an axis, or on CPU set '
      f'jax_num_cpu_devices={need}'
    )
  grid = np.array(have[:need]).reshape(shape)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check(config: ModelConfig, mesh: Mesh) -> None:
  """Refuses a mesh that this model cannot be split over.

  Raises:
    ValueError: an axis does not divide what it splits. KV heads that do not
      divide are replicated instead (see `spec`), which costs cache memory.
  """
  tensor, fsdp = mesh.shape['tensor'], mesh.shape['fsdp']
  for name, size, by in (
    ('heads', config.heads, tensor),
    ('mlp', config.mlp, tensor),
    ('padded_vocab', config.padded_vocab, tensor),
    ('width', config.width, fsdp),
  ):
    if size % by:
      raise ValueError(
        f'{name} {size} does not divide over a mesh axis of size {by}: choose '
        f'a divisor of {size}'
        + (', or load with a padded vocabulary' if 'vocab' in name else '')
      )


def spec(
  axes: Sequence[str], mesh: Mesh, shape: Sequence[int] | None = None
) -> PartitionSpec:
  """Mesh axes for an array with these logical axes.

  An axis whose size in `shape` does not divide over its mesh axes is
  replicated: KV heads over a wide tensor axis, or a short batch.
  """
  out = []
  for i, name in enumerate(axes):
    rule = RULES[name]
    names = (rule,) if isinstance(rule, str) else rule
    ways = math.prod(mesh.shape[n] for n in names) if names else 1
    if shape is not None and shape[i] % ways:
      rule = None
    out.append(rule)
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
