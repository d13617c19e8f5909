"""Advantages by turn, by hand."""

import draws
import numpy as np
import pytest
from draws import row

from agentjax.rl import turns
from agentjax.rl.advantages import no_std
from agentjax.rl.draw import MissingData


def values_at_ends(ends, turn_lengths=(1, 1)):
  """Values that are junk but at the last token of each turn."""
  r = row(turn_lengths)
  v = np.full(len(r['mask']), 7.0)
  for k, x in enumerate(ends):
    v[np.flatnonzero(r['turns'] == k)[-1]] = x
  return v


def test_turns_of_one_number_are_compared():
  rows = [
    row([1, 2], 4.0, turn_rewards=[1.0, 0.0]),
    row([2], 3.0, turn_rewards=[0.0]),
    row([1, 1, 1], 0.0, turn_rewards=[0.0, 2.0, 8.0]),
  ]
  a, b, c = turns.turn_returns(draws.draw(rows), gamma=0.5, scale=no_std)
  # First turns: 1 + 4/2 = 3, 3 and 0 + 2/2 + 8/4 = 3; second: 4 and 6.
  np.testing.assert_allclose(a, [0, 0, 0, 0, -1, -1])
  np.testing.assert_allclose(b, [0, 0, 0, 0])
  np.testing.assert_allclose(c, [0, 0, 0, 0, 1, 0, 0])


def test_process_supervision_normalises_before_it_sums():
  rows = [
    row([1, 2], 0.0, turn_rewards=[1.0, 0.0]),
    row([1], 5.0, turn_rewards=[0.0]),
  ]
  a, b = turns.process_supervision(draws.draw(rows), scale=no_std)
  # 1, 0 and 5: mean 2.
  np.testing.assert_allclose(a, [0, 0, -3, 0, -2, -2])
  np.testing.assert_allclose(b, [0, 0, 3])


def test_information_gain_of_each_turn_and_the_outcome_of_the_last():
  rows = [
    row([1, 1, 1], 1.0, answer_probs=[0.1, 0.5, 0.4]),
    row([1], 0.0, answer_probs=[0.3]),
  ]
  a, b = turns.igpo(draws.draw(rows), gamma=0.5, scale=no_std)
  # Gains 0.4, -0.1 and outcome 1; outcome 0: mean 0.325.
  g = np.array([0.4, -0.1, 1.0]) - 0.325
  np.testing.assert_allclose(
    a[[2, 4, 6]], [g[0] + g[1] / 2 + g[2] / 4, g[1] + g[2] / 2, g[2]]
  )
  np.testing.assert_allclose(b, [0, 0, -0.325])


def test_multi_turn_grpo_adds_the_turn_where_it_is_not_the_last():
  rows = [
    row([1, 2], 1.0, turn_rewards=[3.0, 0.0]),
    row([1, 1], 0.0, turn_rewards=[1.0, 0.0]),
    row([2], 2.0, turn_rewards=[2.0]),
  ]
  a, b, c = turns.mt_grpo(draws.draw(rows), coef=0.5, scale=no_std)
  # Outcomes 1, 0, 2: mean 1; first turns 3, 1, 2: mean 2; sums 4, 1, 4: 3.
  np.testing.assert_allclose(a, [0, 0, 0 + 0.5, 0, 0, 0])
  np.testing.assert_allclose(b, [0, 0, -1 - 0.5, 0, -1])
  np.testing.assert_allclose(c, [0, 0, 1, 1])


def test_gae_over_turns_by_hand():
  r = row(
    [2, 1],
    1.0,
    turn_rewards=[0.5, 0.0],
    values=values_at_ends([2.0, 4.0], (2, 1)),
  )
  (a,) = turns.turn_gae(draws.draw([r]), gamma=0.5, lam=0.5, whiten=False)
  # Last: 1 - 4; first: 0.5 + 4/2 - 2 = 0.5, and a quarter of -3.
  np.testing.assert_allclose(a, [0, 0, -0.25, -0.25, 0, -3])
  (g,) = turns.turn_value_targets(draws.draw([r]), gamma=0.5, lam=0.5)
  np.testing.assert_allclose(g, [0, 0, 0, 1.75, 0, 1])
  cut = draws.draw([r | {'bootstrap': 2.0}])
  (a,) = turns.turn_gae(cut, gamma=0.5, lam=0.5, whiten=False)
  np.testing.assert_allclose(a, [0, 0, 0, 0, 0, -2])


def test_turns_count_once_when_they_are_whitened():
  rows = [row([5], 1.0), row([1], 0.0), row([1], 0.0)]
  a, b, _ = turns.turn_gae(draws.draw(rows))
  # Mean 1/3, variance 1/3: the five tokens of the first are one turn.
  np.testing.assert_allclose(a[2:], (2 / 3) * np.sqrt(3), rtol=1e-6)
  np.testing.assert_allclose(b[2:], (-1 / 3) * np.sqrt(3), rtol=1e-6)


def test_two_levels_by_hand():
  """Level 1 as above; level 2 inside of each turn, from its return."""
  values = np.array([7.0, 7, 1, 2, 7, 4])
  r = row([2, 1], 1.0, turn_rewards=[0.5, 0.0], values=values)
  (a,) = turns.bi_level_gae(
    draws.draw([r]),
    gamma=1.0,
    lam=0.5,
    turn_gamma=0.5,
    turn_lam=0.5,
    whiten=False,
  )
  # Returns of turns: 1.75 and 1. Last token of the first: 1.75 - 2; before
  # it: 2 - 1 + (1.75 - 2) / 2. The last turn: 1 - 4.
  np.testing.assert_allclose(a, [0, 0, 1 - 0.125, -0.25, 0, -3])
  dense = r | {'token_rewards': np.array([0.0, 0, 1, 0, 0, 0])}
  (b,) = turns.bi_level_gae(
    draws.draw([dense]),
    gamma=1.0,
    lam=0.5,
    turn_gamma=0.5,
    turn_lam=0.5,
    whiten=False,
  )
  np.testing.assert_allclose(b - a, [0, 0, 1, 0, 0, 0])


def test_a_turn_without_a_reward_is_a_turn():
  """Where ends are inferred from rewards it would not be one."""
  v = np.array([7.0, 7, 1, 7, 2])
  d = draws.draw([row([1, 1], 0.0, values=v)])
  (a,) = turns.bi_level_gae(d, whiten=False)
  np.testing.assert_allclose(a, [0, 0, 2 - 1 - 2, 0, -2])


def test_a_critic_is_needed():
  d = draws.draw([row([1])])
  for estimator in (turns.turn_gae, turns.bi_level_gae):
    with pytest.raises(MissingData, match='values'):
      estimator(type(d)(**{**vars(d), 'values': None}))


def test_rewards_of_steps():
  np.testing.assert_allclose(
    turns.steptool_rewards([1, 0, 1], [0.5, 0.5, 1], coef=2.0), [3, 1, 0]
  )
  scores = [0.25, 1.0, 0.5]
  np.testing.assert_allclose(turns.prm_sum(scores), scores)
  np.testing.assert_allclose(turns.prm_min(scores), [0.25, 0, 0])
  delta = turns.prm_delta(scores, start=0.125)
  np.testing.assert_allclose(delta, [0.125, 0.75, -0.5])
  assert delta.sum() == scores[-1] - 0.125
  for aggregate in (turns.prm_sum, turns.prm_min, turns.prm_delta):
    assert aggregate([]).shape == (0,)
