"""The weights that an engine runs, and the version that names them.

Floor 2, rollout/, under `engine`. They are laid out for decoding once, when
they come in. What becomes of KV states of other weights is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from agentjax.model import transformer
from agentjax.model.config import ModelConfig


class Weights:
  """The weights of one version at a time.

  Args:
    config: of the model. layout: makes what decoding reads of parameters.

  Attributes:
    version: -1 before the first `load`. layout: None until then.
  """

  def __init__(
    self, config: ModelConfig, layout: Callable[[transformer.Params], Any]
  ):
    self._shapes = transformer.init_shapes(config)
    self._lay_out = layout
    self.version, self.layout = -1, None

  def load(self, params: transformer.Params, version: int) -> None:
    """Takes the weights of `version`.

    Raises:
      ValueError: the version is no number for one, or they are parameters of
        another model.
    """
    if not 0 <= version < 2**31:
      raise ValueError(f'version {version}: give 0 to 2^31 - 1')
    want = jax.tree.map(lambda x: x.shape, self._shapes)
    if (has := jax.tree.map(np.shape, params)) != want:
      raise ValueError(
        f'these are not parameters of this model: it has {want}, they have '
        f'{has}'
      )
    self.layout = self._lay_out(params)
    self.version = int(version)

  def needed(self) -> None:
    """Raises RuntimeError if there are none yet."""
    if self.layout is None:
      raise RuntimeError(
        'the engine has no weights: call load(params, version)'
      )
