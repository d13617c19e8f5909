"""A linear map, and the low-rank correction that may stand beside it.

Floor 1, model/, under `transformer`. A map `w` of a block may have `w_a` and
`w_b` beside it (`lora.attach` puts them there): then it is w + a b, which is
never formed. This file knows no layer and no training.

Letters: D width, R rank, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentjax.model.precision import precision
from agentjax.model.product import product


class Factored(NamedTuple):
  """A head that stands for kernel + a b."""

  kernel_DV: jax.Array
  a_DR: jax.Array
  b_RV: jax.Array


def linear(formula: str, x: jax.Array, module: Any, name: str) -> jax.Array:
  """x through the map `name` of a module, and through its factors if any.

  (x a) b costs R (in + out) products a token where a b would cost R in out.
  """
  y = product(formula, x, getattr(module, name)[...])
  a = getattr(module, f'{name}_a', None)
  if a is None:
    return y
  down, up = _through(formula)
  b = getattr(module, f'{name}_b')
  return y + product(up, product(down, x, a[...]), b[...])


@functools.cache
def _through(formula: str) -> tuple[str, str]:
  """Formulas of x a and of its product with b, of that of x w.

  'bthq,hqd->btd' gives 'bthq,hqr->btr' and 'btr,rd->btd'.
  """
  x, rest = formula.split(',')
  w, out = rest.split('->')
  inner = ''.join(c for c in w if c in x)
  outer = ''.join(c for c in w if c not in x)
  rows = ''.join(c for c in x if c not in w)
  return f'{x},{inner}r->{rows}r', f'{rows}r,r{outer}->{out}'


def factored(block: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
  """(part, name) of the maps in a block's parameters that have factors."""
  return tuple(
    (part, name[:-2])
    for part in sorted(block)
    for name in sorted(block[part])
    if name.endswith('_a')
  )


def head_product(kernel: jax.Array | Factored, hidden: jax.Array) -> jax.Array:
  """Float32 products [..., V] of hidden states [..., D] with a head."""

  def logits(x, w):
    return jnp.einsum(
      '...d,dv->...v',
      x,
      w.astype(x.dtype),
      precision=precision(x),
      preferred_element_type=jnp.float32,
    )

  if not isinstance(kernel, Factored):
    return logits(hidden, kernel)
  low = logits(hidden, kernel.a_DR).astype(hidden.dtype)
  return logits(hidden, kernel.kernel_DV) + logits(low, kernel.b_RV)
