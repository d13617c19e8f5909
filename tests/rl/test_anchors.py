"""Anchor states: who is compared with whom, and by how much."""

import functools

import draws
import numpy as np
import pytest
from draws import row

from agentjax.rl import anchors
from agentjax.rl.advantages import group_std


def test_states_by_their_keys():
  assert anchors.same(['x', None, 'y', 'x', None]).tolist() == [0, -1, 1, 0, -1]
  keys = ['the red door', 'the red doors', None, 'a lamp', 'the red door']
  assert anchors.similar(keys).tolist() == [0, 0, -1, 1, 0]
  strict = functools.partial(anchors.similar, threshold=0.99)
  assert strict(keys).tolist() == [0, 1, -1, 2, 0]


def test_one_state_in_two_groups_is_two():
  got = anchors.anchor_labels(
    ['x', 'x', 'x', 'y', None], [0, 1, 0, 1, 1], [1, 1, 0, 1, 1]
  )
  assert got[0] >= 0 and got[1] >= 0 and got[0] != got[1] != got[3]
  assert got[2] == got[4] == -1


def test_returns_of_steps_by_hand():
  got = anchors.step_returns([1.0, 8, 2, 4], ['a', 'b', 'a', 'a'], gamma=0.5)
  assert got.tolist() == [1 + 1 + 1, 8, 2 + 2, 4]
  # Two agents in one step: its first reward counts, and both have its return.
  got = anchors.step_returns(
    [1.0, 9, 2, 4], list('aaaa'), gamma=0.5, step_S=[0, 0, 1, 2]
  )
  assert got.tolist() == [3, 3, 4, 4]


def maze():
  """Two ways through x; the long way is met twice in z."""
  return [
    row([1, 1], 4.0, state_keys=['x', 'y']),
    row([2, 1, 1, 1], 0.0, state_keys=['x', 'z', 'z', None]),
  ]


def test_by_hand():
  a, b = anchors.gigpo(draws.draw(maze()), gamma=0.5, weight=2.0)
  # Episodes: 2 and -2. Returns from x: 2 and 0; from z 0 and 0.
  np.testing.assert_allclose(a, [0, 0, 2 + 2 * 1, 0, 2])
  np.testing.assert_allclose(b[2:], [-4, -4, 0, -2, 0, -2, 0, -2])
  assert anchors.anchor_sizes(draws.draw(maze())) == {1: 1, 2: 2}


def test_the_mean_of_episodes_is_over_trajectories():
  """B2 row 4: over step rows the four steps of the second weigh double."""
  d = draws.draw(maze())
  a, b = anchors.gigpo(d, weight=0.0)
  assert (a[2], b[2]) == (2, -2)
  a, b = anchors.gigpo(d, weight=0.0, episodes=anchors.step_rows)
  np.testing.assert_allclose([a[2], b[2]], [4 - 8 / 6, -8 / 6])


def test_the_spread_of_episodes_and_of_states():
  a, b = anchors.gigpo(draws.draw(maze()), gamma=0.5, scale=group_std, eps=0.0)
  root = np.sqrt(2)
  np.testing.assert_allclose(a, [0, 0, 2 / root, 0, 1 / root])
  np.testing.assert_allclose(b[[2, 5]], [-2 / root, -1 / root])


@pytest.mark.parametrize('episodes', [anchors.trajectories, anchors.step_rows])
def test_one_trajectory_keeps_its_score_if_asked(episodes):
  d = draws.draw([row([2], 3.0, state_keys=['x'])])
  options = {'episodes': episodes}
  assert not anchors.gigpo(d, **options)[0].any()
  raw = anchors.gigpo(d, raw_singletons=True, **options)
  np.testing.assert_allclose(raw[0], [0, 0, 3, 3])
