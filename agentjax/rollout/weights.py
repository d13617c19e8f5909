"""The weights that an engine runs, and the version that names them.

Floor 2, rollout/, under `engine`. They are laid out for decoding once, when
they come in. What becomes of KV states of other weights is not known here.

A version names its weights, and all records and KV states rely on it. So the
version that is loaded takes no other weights: the very same arrays are nothing
to do, and other arrays are laid out and compared, bit by bit. No sum over the
weights is made at each load, and so a version that comes back after another
one is believed.

The factors of adapters may come alone: then they alone are moved, and laid
beside what is here already.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from agentjax.model import lora, transformer
from agentjax.model.config import ModelConfig


class Weights:
  """The weights of one version at a time.

  Args:
    config: of the model. layout: makes what decoding reads of parameters.
    factors: makes it of the factors that `lora.split` finds among them.

  Attributes:
    version: -1 before the first `load`. layout: None until then.
  """

  def __init__(
    self,
    config: ModelConfig,
    layout: Callable[[transformer.Params], Any],
    factors: Callable[[transformer.Params], Any],
  ):
    self._shapes = transformer.init_shapes(config)
    self._lay_out, self._lay_out_factors = layout, factors
    self.version, self.layout = -1, None
    self._plain: Any = None  # the layout without factors
    self._loaded: list[Callable[[], Any]] = []  # to the arrays of this version

  def load(self, params: transformer.Params, version: int) -> None:
    """Takes the weights of `version`; see `Engine.load`.

    Raises:
      ValueError: the version is no number for one, or that of other weights;
        or they are parameters of another model.
      RuntimeError: factors alone, and nothing to lay them beside.
    """
    if version == self.version and self._are_loaded(params):
      return
    if not 0 <= version < 2**31:
      raise ValueError(f'version {version}: give 0 to 2^31 - 1')
    given, factors = lora.split(params)
    if factors and not given:
      self.needed()
    else:
      self._check(given)
    lora.check(factors, self._shapes)
    plain = self._lay_out(given) if given else self._plain
    layout = plain
    if factors:
      layout = lora.beside(plain, self._lay_out_factors(factors))
    if version == self.version and not _same_bits(layout, self.layout):
      raise ValueError(
        f'version {version} is loaded, with other weights: KV states and '
        'tokens of both would pass for the same; give these a new version'
      )
    self._plain, self.layout, self.version = plain, layout, int(version)
    self._loaded = [
      # What is not JAX's may be written over, and so is never the very same.
      weakref.ref(x) if isinstance(x, jax.Array) else lambda: None
      for x in jax.tree.leaves(params)
    ]

  def _check(self, params: transformer.Params) -> None:
    want = jax.tree.map(lambda x: x.shape, self._shapes)
    if (has := jax.tree.map(np.shape, params)) != want:
      raise ValueError(
        f'these are not parameters of this model: it has {want}, they have '
        f'{has}'
      )

  def _are_loaded(self, params: transformer.Params) -> bool:
    """Whether these are the very arrays that were loaded."""
    leaves = jax.tree.leaves(params)
    return len(leaves) == len(self._loaded) and all(
      loaded() is x for x, loaded in zip(leaves, self._loaded, strict=True)
    )

  def needed(self) -> None:
    """Raises RuntimeError if there are none yet."""
    if self.layout is None:
      raise RuntimeError(
        'the engine has no weights: call load(params, version)'
      )


def _same_bits(a: Any, b: Any) -> bool:
  """Whether two layouts are equal here, on the host; NaN equals itself."""

  def bits(x: jax.Array) -> list[bytes]:
    return [np.asarray(s.data).tobytes() for s in x.addressable_shards]

  if jax.tree.structure(a) != jax.tree.structure(b):
    return False
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return all(x is y or bits(x) == bits(y) for x, y in pairs)
