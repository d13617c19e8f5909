"""Activations times a weight, with a gradient that suits the processor.

Floor 1, model/, under `transformer`. Left to itself, XLA for CPU transposes
the wide operand of a weight's gradient, inside the loop that computes it: for
an MLP of 1024 over 4096 tokens that cost more than the product. Here the
narrow one is transposed, and first. Knows no layer.

Letters: N tokens, I what is summed over, O what comes out.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from agentjax.model.precision import precision


def _einsum(formula: str, x: jax.Array, w: jax.Array) -> jax.Array:
  return jnp.einsum(formula, x, w.astype(x.dtype), precision=precision(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(formula: str, x: jax.Array, w: jax.Array) -> jax.Array:
  """x [..., I] times w [I, O], in the type of x; I and O may be many axes.

  Args:
    formula: of `einsum`, such as 'bthq,hqd->btd': the axes that are summed
      end x and begin w, in one order, and the others of w end the result.
  """
  return _einsum(formula, x, w)


def _keep(formula, x, w):
  return _einsum(formula, x, w), (x, w)


def _back(formula, residuals, d_y):
  def plain(x, w, d_y):
    return jax.vjp(functools.partial(_einsum, formula), x, w)[1](d_y)

  def narrow(x, w, d_y):
    (d_x,) = jax.vjp(lambda x: _einsum(formula, x, w), x)[1](d_y)
    return d_x, _weight_gradient(formula, x, w, d_y)

  return jax.lax.platform_dependent(*residuals, d_y, cpu=narrow, default=plain)


product.defvjp(_keep, _back)


def _weight_gradient(formula: str, x, w, d_y) -> jax.Array:
  outer = len(set(formula.split('->')[1]) - set(formula.split(',')[0]))
  O = math.prod(w.shape[w.ndim - outer :])
  x_NI, d_y_NO = x.reshape(-1, w.size // O), d_y.reshape(-1, O)
  if w.size // O <= O:
    d_w = _transposed_times(x_NI, d_y_NO)
  else:
    d_w = _transposed_times(d_y_NO, x_NI).T
  return d_w.reshape(w.shape).astype(w.dtype)


def _transposed_times(x_NA: jax.Array, y_NB: jax.Array) -> jax.Array:
  # Behind a barrier: else the transpose is folded back into the product.
  x_AN = jax.lax.optimization_barrier(x_NA.T)
  return jnp.dot(x_AN, y_NB, precision=precision(x_NA))
