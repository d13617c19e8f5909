"""Numbers that the forward pass and the cache share.

Floor 1, model/.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Added to scores that may not be seen, and to logits of ids without text:
# finite, so that a row that sees nothing gives no NaN.
NEVER = -1e30


def precision(x: jax.Array):
  """Highest for float32 (TPU and GPU would round to bfloat16), else default."""
  return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
