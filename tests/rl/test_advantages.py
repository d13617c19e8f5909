"""Group baselines against a plain loop, and the cases that bite."""

import numpy as np
import pytest

from agentjax.rl.advantages import grpo, grpo_shuffled, rloo

ALL = np.array([True] * 4)


def test_by_hand():
  a = grpo(np.array([1.0, 0, 0, 1]), np.zeros(4), ALL)
  np.testing.assert_allclose(a, np.array([1, -1, -1, 1]) * 0.5 / 0.57735127)
  a = grpo(np.array([1.0, 0, 0, 0]), np.zeros(4), ALL, normalize_std=False)
  np.testing.assert_allclose(a, [0.75, -0.25, -0.25, -0.25])
  a = rloo(np.array([1.0, 0, 0, 1]), np.zeros(4), ALL)
  np.testing.assert_allclose(a, np.array([2, -2, -2, 2]) / 3)


def test_uneven_shuffled_groups_equal_a_loop():
  rng = np.random.default_rng(0)
  groups = rng.permutation([0] * 3 + [1] * 5 + [2] * 2)
  rewards = rng.normal(size=10)
  got, leave = (
    grpo(rewards, groups, np.ones(10, bool)),
    rloo(rewards, groups, np.ones(10, bool)),
  )
  for i in range(10):
    own = rewards[groups == groups[i]]
    want = (rewards[i] - own.mean()) / (own.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(got[i], want)
    others = (own.sum() - rewards[i]) / (len(own) - 1)
    np.testing.assert_allclose(leave[i], rewards[i] - others)


@pytest.mark.parametrize('estimator', [grpo, rloo])
def test_no_signal_is_exactly_zero(estimator):
  one = estimator(np.array([3.0]), np.zeros(1), ALL[:1])
  assert one[0] == 0  # a group of one: not its raw reward
  same = np.full(4, np.float32(0.1), np.float32)
  assert not estimator(same, np.zeros(4), ALL).any()


@pytest.mark.parametrize('estimator', [grpo, rloo])
def test_an_invalid_row_is_not_there(estimator):
  """Rewards [1, 3, 2, invalid]: as a group of three, whatever it holds."""
  valid = np.array([True, True, True, False])
  for junk in (0.0, 100.0, np.nan):
    got = estimator(np.array([1.0, 3, 2, junk]), np.zeros(4), valid)
    want = estimator(np.array([1.0, 3, 2]), np.zeros(3), valid[:3])
    np.testing.assert_array_equal(got, [*want, 0])


def test_scale_does_not_matter():
  r = np.array([1.0, 4, 2, 2])
  a, b = grpo(r, np.zeros(4), ALL), grpo(1000 * r - 7, np.zeros(4), ALL)
  np.testing.assert_allclose(a, b, rtol=1e-5)


def test_the_shuffled_control_keeps_groups_and_loses_who_did_well():
  rng = np.random.default_rng(0)
  groups = np.repeat(np.arange(200), 8)
  rewards = rng.random(1600).round()
  valid = rng.random(1600) < 0.9
  plain, control = (f(rewards, groups, valid) for f in (grpo, grpo_shuffled))
  for g in range(200):
    own = (groups == g) & valid
    np.testing.assert_allclose(sorted(plain[own]), sorted(control[own]))
  assert not control[~valid].any()
  assert abs(np.corrcoef(plain[valid], control[valid])[0, 1]) < 0.1
  np.testing.assert_array_equal(control, grpo_shuffled(rewards, groups, valid))
