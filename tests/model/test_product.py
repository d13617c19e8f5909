"""A product with a weight: einsum's value, and einsum's gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.model.product import product

SHAPES = {
  'wide': ('btd,dhq->bthq', (2, 5, 6), (6, 3, 4)),
  'narrow': ('bthq,hqd->btd', (2, 5, 3, 4), (3, 4, 6)),
  'flat': ('btf,fd->btd', (2, 5, 9), (9, 2)),
  'square': ('btd,df->btf', (2, 5, 3), (3, 3)),
}


@pytest.mark.parametrize('name', SHAPES)
def test_values_and_gradients_are_einsums(name):
  formula, *shapes = SHAPES[name]
  rng = np.random.default_rng(0)
  x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
  weights = rng.normal(size=jnp.einsum(formula, x, w).shape)

  def total(function, x, w):
    return jnp.sum(jnp.sin(function(formula, x, w)) * weights)

  got, want = (
    jax.jit(jax.value_and_grad(functools.partial(total, f), (0, 1)))(x, w)
    for f in (product, jnp.einsum)
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
    got,
    want,
  )


def test_a_gradient_has_the_type_of_its_parameter():
  x = jnp.ones((1, 2, 3), jnp.bfloat16)
  w = jnp.ones((3, 4), jnp.float32)
  out, back = jax.vjp(functools.partial(product, 'btd,df->btf'), x, w)
  assert out.dtype == jnp.bfloat16
  assert [g.dtype for g in back(out)] == [jnp.bfloat16, jnp.float32]


def test_the_wide_operand_is_never_transposed():
  """Of 64 tokens and a weight [4, 32], [4, 64] is transposed, not [32, 64]."""

  def gradient(x, w, d_y):
    return jax.vjp(functools.partial(product, 'btd,df->btf'), x, w)[1](d_y)

  text = (
    jax.jit(gradient)
    .lower(jnp.ones((1, 64, 4)), jnp.ones((4, 32)), jnp.ones((1, 64, 32)))
    .compile()
    .as_text()
  )
  assert 'f32[4,64]{1,0}' in text
  assert 'f32[32,64]{1,0}' not in text
