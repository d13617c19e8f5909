"""Masked arithmetic: nothing is 0, and ids bring sums back."""

import jax
import jax.numpy as jnp
import numpy as np
from made import BAD

from agentjax.rl import masked

X = jnp.array([1.0, 2.0, 4.0, 8.0, 16.0])
MASK = jnp.array([1, 0, 1, 1, 0], bool)
IDS = jnp.array([0, 0, 0, 2, 3], jnp.int32)


def test_means_do_not_depend_on_the_split():
  """100 tokens at 2.0 and 900 at 0.5: 0.65 for every split, not 1.25."""
  x = jnp.array([2.0] * 100 + [0.5] * 900)
  for size in (1000, 500, 100):
    pairs = [
      masked.weighted(x[i : i + size], jnp.ones(size))
      for i in range(0, 1000, size)
    ]
    total = jax.tree.map(lambda *p: sum(p), *pairs)
    np.testing.assert_allclose(total.mean(), 0.65, rtol=1e-6)


def test_a_given_count_divides_and_none_of_it_is_zero():
  weights = MASK * 0.5
  assert masked.weighted(X, weights).mean() == 13 / 3
  assert masked.weighted(X, weights, 2).mean() == 3.25
  nothing = masked.weighted(X, jnp.zeros(5))
  assert nothing.mean() == 0 and nothing.count == 0
  gradient = jax.grad(lambda x: masked.weighted(x, jnp.zeros(5)).mean())(X)
  assert not np.asarray(gradient).any()


def test_a_weight_of_zero_hides_whatever_stands_there():
  def mean(x):
    return masked.weighted(3 * x, MASK * 0.5).mean()

  want = jax.value_and_grad(mean)(X)
  for bad in BAD:
    got = jax.value_and_grad(mean)(jnp.where(MASK, X, bad))
    jax.tree.map(np.testing.assert_array_equal, want, got)


def test_segments_by_hand():
  for function, want in (
    (masked.segment_sum, [5, 0, 8, 0, 0]),
    (masked.segment_mean, [2.5, 0, 8, 0, 0]),
    (masked.segment_max, [4, 0, 8, 0, 0]),
  ):
    np.testing.assert_array_equal(function(X, MASK, IDS), want)
    for bad in BAD:
      spoiled = jnp.where(MASK, X, bad)
      np.testing.assert_array_equal(function(spoiled, MASK, IDS), want)
  np.testing.assert_array_equal(
    masked.segment_count(MASK, IDS), [2, 0, 1, 0, 0]
  )
  assert masked.segment_max(-X, MASK, IDS)[0] == -1


def test_ratios_are_clipped_counted_and_left_alone_on_demand():
  new, old = jnp.array([30.0, -1.0, -50.0]), jnp.zeros(3)
  mask = jnp.array([1, 1, 0], bool)
  np.testing.assert_array_equal(masked.log_ratio(new, old, mask), [20, -1, 0])
  np.testing.assert_array_equal(
    masked.log_ratio(new, old, mask, None), [30, -1, 0]
  )
  np.testing.assert_array_equal(masked.beyond(new, old, mask), [1, 0, 0])
  gradient = jax.grad(lambda x: masked.log_ratio(x, old, mask).sum())(new)
  np.testing.assert_array_equal(gradient, [0, 1, 0])
