"""What becomes of the reference policy after an update.

Floor 1. A reference that nobody moves is frozen. The others are functions of
(reference, params, step) -> reference, trees of parameters and the number of
the step that was just made; jitted, so that nothing leaves its chips.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def moving_average(
  reference: Any, params: Any, step: jax.Array, *, decay: float
) -> Any:
  """decay * reference + (1 - decay) * params, in float32.

  The averaged anchor of WARP, arXiv:2406.16768, section 3.1.
  """
  del step
  if not 0 <= decay <= 1:
    raise ValueError(f'decay is {decay}: give 0 to 1')

  def mean(old, new):
    wide = old.astype(jnp.float32), new.astype(jnp.float32)
    return (decay * wide[0] + (1 - decay) * wide[1]).astype(old.dtype)

  return jax.tree.map(mean, reference, params)


def renewed(reference: Any, params: Any, step: jax.Array, *, every: int) -> Any:
  """The policy as it is at every `every`-th step, else as it was.

  The previous phase's policy, as WebRL's phases have it, arXiv:2411.02337.
  """
  if every < 1:
    raise ValueError(f'every is {every}: give at least 1')
  now = step % every == 0
  return jax.tree.map(
    lambda old, new: jnp.where(now, new, old), reference, params
  )


def compiled(move: Callable, reference: Any, params: Any) -> Callable:
  """`move` for trees like these, which stay where they are.

  The reference that it is called with is given up.
  """
  placed = jax.tree.map(lambda x: x.sharding, reference)
  program = jax.jit(move, donate_argnums=0, out_shardings=placed)
  return program.lower(reference, params, np.int32(0)).compile()
