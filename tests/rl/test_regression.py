"""Regression losses: their minimum, their steps, and what was released."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.rl import masked, regression
from agentjax.rl.losses import Tokens

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)

MASK = jnp.array([1, 1, 0, 1, 1, 1], bool)
TURNS = jnp.array([0, 0, 0, 1, 1, 2], jnp.int32)
ADVANTAGES = jnp.array([0.5, 0.5, 9.0, -0.5, -0.5, 1.0])


def tokens(**more):
  zeros = jnp.zeros(6)
  given = {'old': zeros, 'reference': zeros, 'advantages': ADVANTAGES} | more
  return Tokens(
    mask=MASK, sequences=jnp.zeros(6, jnp.int32), turns=TURNS, **given
  )


def test_dro_has_the_gradient_of_the_regression_it_stands_for():
  new = jnp.array([0.3, -0.2, 5.0, 0.1, 0.7, -1.0])
  beta = 0.3

  def square(new):
    gap = masked.log_ratio(new, tokens().old, MASK)
    return jnp.sum(MASK * (ADVANTAGES - beta * gap) ** 2) / (2 * beta)

  ours = jax.grad(
    lambda x: regression.dro(x, tokens(), beta=beta).loss_N.sum()
  )(new)
  close(ours, jax.grad(square)(new))


def test_webrl_is_a_square_of_sums_over_turns():
  new = jnp.array([0.1, 0.2, 5.0, 0.3, -0.1, 0.4])
  out = regression.webrl(new, tokens(), beta=2.0)
  want = [(0.6 - 0.5) ** 2, (0.4 + 0.5) ** 2, (0.8 - 1.0) ** 2]
  close(out.loss_N, np.array(want)[TURNS] * MASK)
  out = regression.webrl(new, tokens(), beta=2.0, total=masked.segment_mean)
  close(out.loss_N[3], (0.2 + 0.5) ** 2)
  # Its minimum is the optimum of a reward with a KL: pi = ref e^(A / beta).
  best = jnp.array([0.25, 0.0, 0.0, -0.25, 0.0, 0.5])
  close(regression.webrl(best, tokens(), beta=2.0).loss_N, np.zeros(6))
  with pytest.raises(ValueError, match='reference policy'):
    regression.webrl(new, tokens(reference=None))


def test_webrl_as_released_by_hand():
  """Turn 1 has A < 0 and is left out: 3 tokens are left."""
  new = jnp.array([0.2, 0.1, 5.0, 0.3, -0.1, -0.6])
  reference = jnp.array([0.0, 0.0, 0.0, 0.0, 0.0, -3.0])
  out = regression.webrl_released(new, tokens(reference=reference))
  # x: 0.3 / 3 and 2.4 / 3. b: min(5, 10), as p_ref is 1, and min(1, 1.25).
  x = np.array([0.1, 0.8])
  b = np.array([5.0, 1.0])
  want = 0.5 * (b * x - 1) ** 2 / b
  close(out.loss_N, [want[0], want[0], 0, 0, 0, want[1]])
  gradient = jax.grad(lambda x: regression.webrl_released(
    x, tokens(reference=reference)).loss_N[5])(new)  # fmt: skip
  close(gradient, [0, 0, 0, 0, 0, (b * x - 1)[1] / 3])


def test_webrl_as_released_is_a_tangent_where_it_is_far_off():
  """x of -0.18 against 1: |b x - 1| exceeds 1, and the square ends."""
  new = jnp.array([0.0, 0.0, 5.0, 0.3, -0.1, -0.9])
  reference = jnp.array([-2.0, -2.0, 0.0, 0.0, 0.0, 0.0])
  given = tokens(reference=reference, advantages=jnp.ones(6))
  out = regression.webrl_released(new, given)
  # 5 tokens are left; b0 is 5 for the last turn, and 1 / |x| is 5.6.
  x, b = -0.9 / 5, 5.0
  close(out.loss_N[5], (abs(b * x - 1) - 0.5) / b)


def test_webrl_as_released_takes_supervision_too():
  new = jnp.full(6, -1.0)
  plain = regression.webrl_released(new, tokens())
  more = regression.webrl_released(new, tokens(), supervise=True)
  e = np.exp(1 - np.exp(-1))
  # Over turns, of which there are three: 3 tokens' worth over 3 tokens.
  extra = np.array([2 * e, 0, 1 * e]) / 3 * 3
  close(more.loss_N - plain.loss_N, extra[TURNS] * MASK)
