"""Low-rank adapters: what is trained beside frozen parameters.

Floor 1, model/. Adapters are a tree of their own, nested as the parameters
are, with two factors `a` and `b` where a linear map `w` stands; only they have
gradients, moments and checkpoints. `attach` puts them beside the maps, in a
tree that `transformer.forward` and the engine run as it is: x w + scale (x a)
b, for which w + scale a b is never formed. In bfloat16 that sum would round
most of a b away, and the sampler and the learner would round it differently.
An engine that holds the frozen parameters takes the factors alone. This file
knows no loss and no optimizer.

Sources: LoRA, arXiv:2106.09685 (section 4.1: a random, b zero, scale
alpha / rank); rsLoRA, arXiv:2312.03732 (scale alpha / sqrt(rank)).

Letters: R rank.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agentjax.model import mesh as meshes
from agentjax.model import transformer
from agentjax.model.checkpoint_names import nest
from agentjax.model.config import ModelConfig
from agentjax.model.linear import Factored

Tree = dict[str, Any]
Path = tuple[str | int, ...]

# Linear map -> (part of its block, how many of its axes it sums over).
LINEARS = {
  'q': ('attn', 1),
  'k': ('attn', 1),
  'v': ('attn', 1),
  'o': ('attn', 2),
  'gate': ('mlp', 1),
  'up': ('mlp', 1),
  'down': ('mlp', 1),
}
HEAD: Path = ('head', 'kernel')


@dataclasses.dataclass(frozen=True)
class LoRA:
  """Shape of adapters.

  Attributes:
    rank: R of every pair of factors.
    alpha: the scale is alpha / rank. rsLoRA's is that of alpha * sqrt(rank).
    targets: of q, k, v, o, gate, up, down, and head where it is not tied. A
      tied head would be untied by factors of its own, and a table that is
      looked up is no linear map: neither can be a target.
    dtype: of the factors; not of compute.

  Raises:
    ValueError: rank or alpha is not above 0; no targets, or one unknown.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...] = tuple(LINEARS)
  dtype: str = 'float32'

  def __post_init__(self):
    whole = isinstance(self.rank, int) and self.rank >= 1
    real = isinstance(self.alpha, numbers.Real) and 0 < self.alpha < math.inf
    if not (whole and real):
      raise ValueError(
        f'lora rank {self.rank!r}, alpha {self.alpha!r}: give a whole rank of '
        'at least 1 and a finite alpha above 0'
      )
    object.__setattr__(self, 'targets', tuple(self.targets))
    known = (*LINEARS, 'head')
    unknown = [t for t in self.targets if t not in known]
    if unknown or not self.targets:
      raise ValueError(
        f'lora targets {self.targets}: choose at least one of {known}'
        + (f', not {unknown[0]!r}' if unknown else '')
      )

  @property
  def scale(self) -> float:
    return self.alpha / self.rank


def _linears(
  config: ModelConfig, targets: Sequence[str]
) -> Iterator[tuple[Path, int]]:
  """Path of each targeted map, and how many of its axes it sums over."""
  for stack, (pattern, _) in enumerate(config.layers):
    for i in range(len(pattern)):
      for name, (part, summed) in LINEARS.items():
        if name in targets:
          yield ('stacks', stack, str(i), part, name), summed
  if 'head' in targets:
    if config.tied:
      raise ValueError(
        "lora targets 'head', which is this model's embedding table (tied): "
        'leave head out of the targets'
      )
    yield HEAD, 1


def _at(tree: Any, path: Path) -> Any:
  return functools.reduce(lambda node, key: node[key], path, tree)


def _cut(of: tuple, path: Path, summed: int) -> tuple[tuple, tuple, tuple]:
  """A map's shape or axes as (layers, summed, made)."""
  layers = int(path[0] == 'stacks')
  return of[:layers], of[layers : layers + summed], of[layers + summed :]


def init(key: jax.Array, config: ModelConfig, lora: LoRA) -> Tree:
  """Fresh adapters: a normal with variance 1 / fan-in, b zero.

  So the first policy is the frozen one, to the bit.
  """
  shapes = transformer.init_shapes(config)
  out = {}
  for n, (path, summed) in enumerate(_linears(config, lora.targets)):
    layers, inner, outer = _cut(_at(shapes, path).shape, path, summed)
    normal = jax.random.normal(
      jax.random.fold_in(key, n), (*layers, *inner, lora.rank)
    )
    a = normal * math.prod(inner) ** -0.5
    out[*path, 'a'] = a.astype(lora.dtype)
    out[*path, 'b'] = jnp.zeros((*layers, lora.rank, *outer), lora.dtype)
  return nest(out)


def init_shapes(config: ModelConfig, lora: LoRA) -> Tree:
  """ShapeDtypeStructs of `init`, without making anything."""
  return jax.eval_shape(lambda: init(jax.random.key(0), config, lora))


def axes(config: ModelConfig, lora: LoRA) -> Tree:
  """Logical axes of adapters: those of the map's own side, the rank whole."""
  of, out = meshes.param_axes(config), {}
  for path, summed in _linears(config, lora.targets):
    layers, inner, outer = _cut(_at(of, path), path, summed)
    out[*path, 'a'] = (*layers, *inner, 'rank')
    out[*path, 'b'] = (*layers, 'rank', *outer)
  return nest(out)


def count(adapters: Tree) -> int:
  """Numbers in all factors."""
  return sum(math.prod(x.shape) for x in jax.tree.leaves(adapters))


# ---- beside the frozen parameters -----------------------------------------


def attach(frozen: Tree | None, adapters: Tree, *, scale: float) -> Tree:
  """Parameters with `w_a` and `w_b` beside each adapted `w`; b is scaled.

  Differentiated with respect to `adapters` alone, no product for a gradient
  of a frozen map is computed.

  Args:
    frozen: nothing is copied of it. None: the factors alone, as an engine
      takes them that was given the rest before.
    adapters: of `init`. scale: of `LoRA`.

  Raises:
    ValueError: a pair of factors fits no map at its place.
  """

  def put(node, name, a, b):
    node = dict(node)
    if frozen is not None:
      _check_pair(node.get(name), a, b, name)
    return node | {f'{name}_a': a, f'{name}_b': b * float(scale)}

  return _with_pairs(frozen, adapters, put)


def merge(frozen: Tree, adapters: Tree, *, scale: float) -> Tree:
  """Plain parameters, w + scale a b in the type of w: to hand a policy on.

  Raises:
    ValueError: a pair of factors fits no map at its place.
  """

  def put(node, name, a, b):
    w = node.get(name)
    layers = _check_pair(w, a, b, name)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    ab = jnp.matmul(
      a.reshape(*layers, -1, a.shape[-1]),
      b.reshape(*layers, a.shape[-1], -1),
      precision=jax.lax.Precision.HIGHEST,
    )
    return dict(node) | {
      name: (w + float(scale) * ab.reshape(w.shape)).astype(w.dtype)
    }

  return _with_pairs(frozen, adapters, put)


def _with_pairs(tree: Any, adapters: Any, put) -> Any:
  """`tree` with put(node, name, a, b) for each node over a pair of factors."""
  if isinstance(adapters, Sequence):
    trees = [None] * len(adapters) if tree is None else tree
    if len(trees) != len(adapters):
      raise ValueError(
        f'lora adapters for {len(adapters)} stacks of layers, the parameters '
        f'have {len(trees)}: give those that the adapters were made for'
      )
    pairs = zip(trees, adapters, strict=True)
    return [_with_pairs(t, a, put) for t, a in pairs]
  out = dict(tree or {})
  for name, node in adapters.items():
    if isinstance(node, Mapping) and set(node) == {'a', 'b'}:
      out = put(out, name, node['a'], node['b'])
    else:
      out[name] = _with_pairs(out.get(name), node, put)
  return out


def _check_pair(w, a, b, name: str) -> tuple[int, ...]:
  """Refuses factors that do not fit `w`; returns (layers,) or ()."""
  if w is None:
    raise ValueError(
      f'lora factors for {name!r}, which these parameters lack: give those '
      'that the adapters were made for'
    )
  n = a.ndim + b.ndim - 2 - w.ndim  # axes of a stack: in a, in b and in w
  rank, summed = a.shape[-1], a.ndim - 1
  fit = ((*w.shape[:summed], rank), (*w.shape[:n], rank, *w.shape[summed:]))
  if n not in (0, 1) or (a.shape, b.shape) != fit:
    raise ValueError(
      f'lora factors {a.shape} and {b.shape} do not fit {name!r} of shape '
      f'{w.shape}: give the parameters that the adapters were made for'
    )
  return w.shape[:n]


# ---- for the engine -------------------------------------------------------


def split(params: Tree) -> tuple[Tree, Tree]:
  """What `attach` put together: plain parameters, and the factors alone.

  Either may be empty.

  Raises:
    ValueError: these are adapters that were not attached.
  """
  plain, factors = {}, {}
  for path, leaf in jax.tree.leaves_with_path(params):
    keys = tuple(getattr(k, 'key', getattr(k, 'idx', None)) for k in path)
    if keys[-1] in ('a', 'b'):
      raise ValueError(
        'adapters without their scale: give lora.attach(None, adapters, '
        'scale=...)'
      )
    (factors if _is_factor(keys[-1]) else plain)[keys] = leaf
  return nest(plain), nest(factors)


def _is_factor(name: str) -> bool:
  return name.endswith(('_a', '_b'))


def check(factors: Tree, shapes: Tree) -> None:
  """Refuses attached factors that do not fit a model's parameters.

  Raises:
    ValueError: a pair fits no map at its place.
  """

  def walk(node, of):
    if isinstance(node, Sequence):
      for i, child in enumerate(node):
        walk(child, of[i] if i < len(of) else {})
      return
    for name, child in node.items():
      if not _is_factor(name):
        walk(child, of.get(name, {}))
      elif name.endswith('_a'):
        w = name.removesuffix('_a')
        _check_pair(of.get(w), child, node[f'{w}_b'], w)

  walk(factors, shapes)


def layout(factors: Tree, config: ModelConfig, dtype: Any) -> Tree:
  """Attached factors as the engine reads them; see `beside`."""
  out = dict(factors)
  if 'stacks' in out:
    out['layers'] = transformer.unstack(out.pop('stacks'), config)
  return jax.tree.map(lambda x: x.astype(dtype), out)


def layout_axes(config: ModelConfig) -> Tree:
  """Logical axes of everything that `layout` may hold."""
  of, block = meshes.block_axes(config), {}
  for name, (part, summed) in LINEARS.items():
    block.setdefault(part, {}).update(_pair_axes(name, of[part][name], summed))
  head = _pair_axes('kernel', ('width', 'vocab'), 1)
  return {'layers': [block] * config.n_layers, 'head': head}


def _pair_axes(name: str, of: tuple[str, ...], summed: int) -> Tree:
  return {
    f'{name}_a': (*of[:summed], 'rank'),
    f'{name}_b': ('rank', *of[summed:]),
  }


def beside(plain: Tree, factors: Tree) -> Tree:
  """A layout of `transformer.decode_layout` and one of factors, as one.

  No array is copied.
  """
  out = dict(plain)
  if 'layers' in factors:
    out['layers'] = [
      layer | {part: layer[part] | more[part] for part in more}
      for layer, more in zip(plain['layers'], factors['layers'], strict=True)
    ]
  if 'head' in factors:
    head = factors['head']
    out['head'] = Factored(plain['head'], head['kernel_a'], head['kernel_b'])
  return out
