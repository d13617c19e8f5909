"""Penalties by hand, and groups that teach nothing."""

import draws
import numpy as np
import pytest
from draws import row

from agentjax.rl import draw, shaping


def test_the_overlong_penalty_grows_over_the_buffer():
  got = shaping.overlong_penalty(
    [10, 80, 90, 100, 120], limit=100, buffer=20, factor=2.0
  )
  np.testing.assert_allclose(got, [0, 0, -1, -2, -4])
  bounded = shaping.overlong_penalty([120], limit=100, buffer=20, lowest=-1.0)
  assert bounded == [-1]


@pytest.mark.parametrize('buffer', [0, 1, 100])
def test_any_buffer_is_finite(buffer):
  got = shaping.overlong_penalty([0, 100, 101], limit=100, buffer=buffer)
  assert np.isfinite(got).all() and got[0] == 0 and got[2] < 0
  assert (got[1] == 0) == (buffer == 0)


def test_lengths_count_the_policy_or_everything():
  d = draws.draw([row([2, 3], gap=4), row([])])
  assert shaping.policy_tokens(d).tolist() == [5, 0]
  assert shaping.all_tokens(d).tolist() == [9, 0]


def test_rewards_are_rescaled_and_clipped():
  got = shaping.rescaled([-3.0, 0, 1], bias=1.0, factor=2.0, low=-1.0, high=3.0)
  assert got.tolist() == [-1, 2, 3]


def test_groups_are_filtered_by_their_outcome():
  """All wrong with a varying bonus for form: still nothing to learn."""
  groups = np.array([0, 0, 1, 1, 2, 3, 3])
  verdict = np.array([0.0, 0, 0, 1, 1, 1, 0])
  valid = np.array([1, 1, 1, 1, 1, 1, 0], bool)
  keep = shaping.informative(verdict, groups, valid)
  assert keep.tolist() == [False, False, True, True, False, False, False]
  shaped = verdict + np.linspace(0, 0.5, 7)
  assert shaping.informative(shaped, groups, valid)[0]
  assert shaping.group_shares(verdict, groups, valid) == {
    'zero_variance_groups': 0.75,
    'singleton_groups': 0.5,
  }
  assert shaping.group_shares([], [], [])['singleton_groups'] == 0


def test_an_overlong_trajectory_loses_reward_in_the_draw():
  masks = [np.ones(n) for n in (3, 5, 6, 8)]
  d = draw.make([1.0, 1.0, 1.0, 0.0], [0, 0, 0, 0], masks,
                 valid=[True, True, True, False])  # fmt: skip
  out = shaping.overlong(d, limit=6, buffer=2)
  np.testing.assert_allclose(out.rewards_N, [1, 0.5, 0, 0])
  np.testing.assert_allclose(d.rewards_N, [1, 1, 1, 0])
