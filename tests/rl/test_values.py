"""The critic's loss by hand, its masks and its metric."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from made import BAD, made

from agentjax.rl import values

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
ONES = jnp.ones(4, bool)


def test_the_clip_is_pessimistic():
  new = jnp.array([1.0, 1.0, 0.1, -1.0])
  returns = jnp.array([2.0, 0.0, 0.0, 0.0])
  out = values.value_loss(new, jnp.zeros(4), returns, ONES, clip=0.5)
  # Clipped to 0.5, 0.5, 0.1, -0.5.
  close(out.loss_N, [1.5**2 / 2, 1 / 2, 0.1**2 / 2, 1 / 2])
  np.testing.assert_array_equal(out.clipped_N, [1, 0, 0, 0])
  gradient = jax.grad(
    lambda x: values.value_loss(
      x, jnp.zeros(4), returns, ONES, clip=0.5
    ).loss_N.sum()
  )(new)
  close(gradient, [0, 1, 0.1, -1])
  plain = values.value_loss(new, jnp.zeros(4), returns, ONES)
  close(plain.loss_N, jnp.square(new - returns) / 2)


def test_huber_is_a_square_and_then_its_tangent():
  huber = functools.partial(values.huber, delta=2.0)
  close(huber(jnp.array([1.0, -2.0, 5.0])), [0.5, 2.0, 2 * 5 - 2])
  gradient = jax.vmap(jax.grad(huber))(jnp.array([1.0, -1.5, 5.0, -5.0]))
  close(gradient, [1.0, -1.5, 2.0, -2.0])


def test_what_the_mask_hides_has_no_effect():
  new, tokens = made()
  old, returns = tokens.old, tokens.reference

  def total(new, old, returns):
    loss = values.value_loss(new, old, returns, tokens.mask, clip=0.2)
    return loss.loss_N.sum()

  value, gradient = jax.value_and_grad(total)(new, old, returns)
  for bad in BAD:
    spoiled = [jnp.where(tokens.mask, x, bad) for x in (new, old, returns)]
    value2, gradient2 = jax.value_and_grad(total)(*spoiled)
    assert value == value2
    np.testing.assert_array_equal(gradient, gradient2)
  none = values.value_loss(new, old, returns, jnp.zeros(24, bool), clip=0.2)
  assert not none.loss_N.any() and not none.clipped_N.any()


def test_turn_ends_are_the_last_sampled_tokens():
  mask = jnp.array([1, 1, 0, 1, 0, 0, 1], bool)
  turns = jnp.array([0, 0, 0, 1, 1, 2, 3], jnp.int32)
  np.testing.assert_array_equal(
    values.turn_ends(mask, turns), [0, 1, 0, 1, 0, 0, 1]
  )


def test_explained_variance():
  returns = jnp.array([1.0, 2.0, 3.0, np.nan])
  mask = jnp.array([1, 1, 1, 0], bool)
  explained = functools.partial(
    values.explained_variance, returns_N=returns, mask_N=mask
  )
  close(explained(returns + 5), 1)
  close(explained(jnp.zeros(4)), 0)
  close(explained(-returns), -3)
  close(explained(jnp.array([1.0, 2, 2, 9])), 1 - (2 / 9) / (2 / 3))
  assert values.explained_variance(returns, jnp.ones(4), mask) == 0
  assert values.explained_variance(returns, returns, jnp.zeros(4, bool)) == 0
