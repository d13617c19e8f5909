"""Means and spreads against plain loops, and the numbers that bite."""

import numpy as np
import pytest

from agentjax.rl.normalize import (
  centre,
  labels,
  moments,
  normalize,
  spread,
  together,
  varies,
  whiten,
)


def test_uneven_shuffled_groups_equal_a_loop():
  rng = np.random.default_rng(0)
  label = rng.permutation([0] * 3 + [4] * 5 + [2] * 2 + [-1] * 2)
  x = rng.normal(size=12)
  x[label < 0] = np.nan
  got, others, scale = (
    centre(x, label),
    centre(x, label, leave_one_out=True),
    spread(centre(x, label), label),
  )
  for i, g in enumerate(label):
    if g < 0:
      assert got[i] == others[i] == 0 and scale[i] == 1
      continue
    own = x[label == g]
    np.testing.assert_allclose(got[i], x[i] - own.mean())
    rest = (own.sum() - x[i]) / (len(own) - 1)
    np.testing.assert_allclose(others[i], x[i] - rest)
    np.testing.assert_allclose(scale[i], own.std(ddof=1))


@pytest.mark.parametrize('loo', [False, True])
def test_equals_and_singletons_are_exactly_zero(loo):
  same = np.full(7, np.float32(0.1), np.float32)
  assert not centre(same, together(same > 0), leave_one_out=loo).any()
  one = np.array([3.0])
  assert centre(one, np.array([0]), leave_one_out=loo) == 0
  raw = centre(one, np.array([0]), leave_one_out=loo, raw_singletons=True)
  assert raw == 3


def test_what_differs_by_rounding_alone_does_not_differ():
  label = np.array([0, 0, 1, 1, 2, 2])
  x = np.array([1e5, 1e5 + 0.01, 1.0, 1.0 + 1e-5, 1e-9, 0.0])
  assert varies(x, label).tolist() == [False, False, True, True, False, False]


def test_normalisation_at_two_levels():
  """Of [1, 3], [5, 9]: centred by group, over the spread of all four."""
  x, group = np.array([1.0, 3, 5, 9]), np.array([0, 0, 1, 1])
  everyone = together(np.ones(4))
  np.testing.assert_allclose(
    normalize(x, group, everyone, eps=0.0),
    np.array([-1, 1, -2, 2]) / np.sqrt(10 / 3),
  )
  np.testing.assert_allclose(
    normalize(x, None, group, ddof=0, eps=0.0),
    x / np.sqrt([5, 5, 53, 53]),
  )
  np.testing.assert_array_equal(normalize(x, everyone, None), x - 4.5)
  # Leave-one-out: the spread is around what was taken off.
  np.testing.assert_allclose(
    normalize(x, group, group, leave_one_out=True, eps=0.0),
    np.array([-2, 2, -4, 4]) / np.sqrt([8, 8, 32, 32]),
  )


def test_labels_are_numbers_of_groups_and_none_where_not_valid():
  got = labels(['b', 'a', 'b', 'c'], [True, True, False, True])
  assert got.tolist() == [1, 0, -1, 2]


def test_whitening_by_hand():
  x, mask = np.array([1.0, 2, np.nan, 3]), np.array([1, 1, 0, 1], bool)
  np.testing.assert_allclose(whiten(x, mask), [-1, 0, 0, 1], atol=1e-7)
  np.testing.assert_allclose(
    whiten(x, mask, keep_mean=True), [1, 2, 0, 3], atol=1e-7
  )
  np.testing.assert_allclose(
    whiten(x, mask, ddof=0, eps=0.0), np.array([-1, 0, 0, 1]) * np.sqrt(1.5)
  )
  np.testing.assert_allclose(
    whiten(x, mask, least=4.0, eps=0.0), [-0.5, 0, 0, 0.5]
  )
  # Statistics of the first and the last alone: mean 2, variance 2.
  over = np.array([1, 0, 0, 1], bool)
  np.testing.assert_allclose(
    whiten(x, mask, over=over, eps=0.0), np.array([-1, 0, 0, 1]) / np.sqrt(2)
  )
  assert moments(x, mask) == (2.0, 1.0)


def test_whitening_of_one_or_none():
  assert whiten([5.0, np.nan], [True, False]).tolist() == [0, 0]
  assert whiten([np.nan, np.inf], [False, False]).tolist() == [0, 0]
  assert moments([np.nan], [False]) == (0.0, 0.0)
