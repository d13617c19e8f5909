"""Advantages of trajectories by hand, and the cases that bite."""

import functools

import draws
import numpy as np
import pytest
from draws import numbers, row

from agentjax.rl import advantages as adv
from agentjax.rl.draw import MissingData
from agentjax.rl.returns import carry, decay, reset
from agentjax.rl.seam import total


def of(estimator, rewards, groups=None, valid=None, **options):
  """One number a trajectory, each of one token."""
  n = len(rewards)
  groups = np.zeros(n, int) if groups is None else groups
  valid = np.ones(n, bool) if valid is None else valid
  d = draws.draw(
    [
      row([1], r, group=int(g), valid=bool(v), parts={'a': r, 'b': 0.0})
      for r, g, v in zip(rewards, groups, valid, strict=True)
    ]
  )
  return np.array(numbers(estimator(d, **options), d))


def test_by_hand():
  np.testing.assert_allclose(
    of(adv.grpo, [1.0, 0, 0, 1]), np.array([1, -1, -1, 1]) * 0.5 / 0.57735127
  )
  for centred in (
    of(adv.dr_grpo, [1.0, 0, 0, 0]),
    of(adv.grpo, [1.0, 0, 0, 0], scale=adv.no_std),
  ):
    np.testing.assert_allclose(centred, [0.75, -0.25, -0.25, -0.25])
  np.testing.assert_allclose(
    of(adv.rloo, [1.0, 0, 0, 1]), np.array([2, -2, -2, 2]) / 3
  )


def test_scales_by_hand():
  """Groups [0, 2] and [6, 10]: stds sqrt(2), sqrt(8); of all, sqrt(59/3)."""
  rewards, groups = [0.0, 2, 6, 10], [0, 0, 1, 1]
  centred = np.array([-1.0, 1, -2, 2])
  run = functools.partial(of, adv.grpo, rewards, groups, eps=0.0)
  np.testing.assert_allclose(run(), centred / np.sqrt([2, 2, 8, 8]))
  np.testing.assert_allclose(run(ddof=0), centred / np.array([1, 1, 2, 2]))
  np.testing.assert_allclose(
    run(scale=adv.batch_std), centred / np.sqrt(59 / 3)
  )
  np.testing.assert_allclose(
    run(scale=adv.within_std), centred / np.sqrt(10 / 3)
  )
  floored = functools.partial(adv.group_std, least=2.0)
  np.testing.assert_allclose(
    run(scale=floored), centred / np.array([2, 2, np.sqrt(8), np.sqrt(8)])
  )


def test_uneven_shuffled_groups_equal_a_loop():
  rng = np.random.default_rng(0)
  groups = rng.permutation([0] * 3 + [1] * 5 + [2] * 2)
  rewards = rng.normal(size=10)
  got, leave = (of(f, rewards, groups) for f in (adv.grpo, adv.rloo))
  for i in range(10):
    own = rewards[groups == groups[i]]
    want = (rewards[i] - own.mean()) / (own.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(got[i], want)
    others = (own.sum() - rewards[i]) / (len(own) - 1)
    np.testing.assert_allclose(leave[i], rewards[i] - others)


RAW = [adv.grpo, adv.dr_grpo, adv.rloo, adv.opo, adv.gpg]


@pytest.mark.parametrize('estimator', RAW)
def test_a_group_of_one_keeps_its_reward_if_asked(estimator):
  """B2 row 3, both sides of it; the group beside it is not touched."""
  rewards, groups = [3.0, 1, 2], [0, 1, 1]
  plain = of(estimator, rewards, groups)
  raw = of(estimator, rewards, groups, raw_singletons=True)
  assert plain[0] == 0 and raw[0] == pytest.approx(3, rel=1e-5)
  np.testing.assert_array_equal(plain[1:], raw[1:])


@pytest.mark.parametrize('estimator', [adv.grpo, adv.rloo])
def test_an_invalid_row_is_not_there(estimator):
  """Rewards [1, 3, 2, invalid]: as a group of three, whatever it holds."""
  for junk in (0.0, 100.0, np.nan):
    got = of(
      estimator, [1.0, 3, 2, junk], valid=np.array([True, True, True, False])
    )
    np.testing.assert_array_equal(got, [*of(estimator, [1.0, 3, 2]), 0])


def test_leave_one_out_of_equal_others_is_bounded():
  """[1, 1, 1, 0]: the others of the last one are equal."""
  np.testing.assert_allclose(
    of(adv.rloo, [1.0, 1, 1, 0]), [1 / 3, 1 / 3, 1 / 3, -1]
  )


def test_scale_does_not_matter():
  r = np.array([1.0, 4, 2, 2])
  a, b = of(adv.grpo, r), of(adv.grpo, 1000 * r - 7)
  np.testing.assert_allclose(a, b, rtol=1e-5)


def test_long_trajectories_weigh_no_more():
  """Of 1 and 9 turns, rewards 0 and 1: the baseline is one half."""
  d = draws.draw([row([2], 0.0), row([3] * 9, 1.0)])
  assert numbers(adv.dr_grpo(d), d) == [-0.5, 0.5]


def test_scores_may_count_turn_and_token_rewards():
  rows = [
    row([1, 2], 1.0, turn_rewards=[2.0, 3.0]),
    row([1], 0.0, token_rewards=np.array([0.0, 0, -4])),
  ]
  d = draws.draw(rows)
  assert numbers(adv.dr_grpo(d), d) == [0.5, -0.5]
  assert numbers(adv.dr_grpo(d, scores=total), d) == [5, -5]


def test_the_shuffled_control_keeps_groups_and_loses_who_did_well():
  rng = np.random.default_rng(0)
  groups = np.repeat(np.arange(60), 8)
  rewards = rng.random(480).round()
  valid = rng.random(480) < 0.9
  plain, control = (
    of(f, rewards, groups, valid) for f in (adv.grpo, adv.grpo_shuffled)
  )
  for g in range(60):
    own = (groups == g) & valid
    np.testing.assert_allclose(sorted(plain[own]), sorted(control[own]))
  assert not control[~valid].any()
  assert abs(np.corrcoef(plain[valid], control[valid])[0, 1]) < 0.15
  again = of(adv.grpo_shuffled, rewards, groups, valid)
  np.testing.assert_array_equal(control, again)


def test_reinforce_plus_plus_reaches_every_turn():
  """Mask [1, 1, 0, 0, 1, 1], reward 1 at the end: all returns are 1."""
  rows = [row([2, 2], 1.0, gap=2), row([2, 2], 0.0, gap=2)]
  d = draws.draw(rows)
  a, b = adv.reinforce_plus_plus(d)
  mask = rows[0]['mask']
  # Eight tokens, half 1 and half 0: variance 2 / 7.
  np.testing.assert_allclose(a[mask], 0.5 / np.sqrt(2 / 7))
  np.testing.assert_allclose(b[mask], -0.5 / np.sqrt(2 / 7))
  forgot, _ = adv.reinforce_plus_plus(d, cross=reset)
  assert (forgot[2:4] < 0).all() and (forgot[6:] > 0).all()
  same, _ = adv.reinforce_plus_plus(d, gamma=1.0, cross=decay)
  np.testing.assert_allclose(same, a)
  assert carry(3.0, 0.5) == 3 and decay(3.0, 0.5) == 1.5


def test_the_whitened_baseline_weighs_tokens():
  """Centred to +-1/2 by group; three tokens against one."""
  d = draws.draw([row([3], 1.0), row([1], 0.0)])
  got = numbers(adv.reinforce_plus_plus_baseline(d), d)
  # Mean 1/4, deviations 1/4 three times and -3/4: variance 1/4.
  np.testing.assert_allclose(got, [0.5, -1.5], rtol=1e-6)


def test_remax_takes_off_the_greedy_reward():
  rows = [
    row([1, 2], 1.0, baseline=0.25, turn_rewards=[4.0, 0.0]),
    row([1], 0.0, baseline=1.0),
  ]
  a, b = adv.remax(draws.draw(rows))
  np.testing.assert_allclose(a, [0, 0, 4.75, 0, 0.75, 0.75])
  np.testing.assert_allclose(b, [0, 0, -1])


def test_the_optimal_baseline_weighs_by_length():
  d = draws.draw([row([3], 1.0), row([1], 0.0), row([1, 1], 0.5)])
  # (3 * 1 + 1 * 0 + 2 * 0.5) / 6
  np.testing.assert_allclose(
    numbers(adv.opo(d), d), np.array([1, 0, 0.5]) - 4 / 6
  )


def test_gpg_makes_up_for_rewards_of_zero():
  got = of(adv.gpg, [1.0, 0, 0, 0], divisor=2.0)
  np.testing.assert_allclose(got, np.array([0.75, -0.25, -0.25, -0.25]) * 4 / 2)
  assert not of(adv.gpg, [0.0, 0, 0]).any()


def test_the_best_of_k_alone_gets_its_lead():
  got = of(adv.pass_at_k, [0.0, 3, 1, 2, 2], [0, 0, 0, 1, 1], scale=adv.no_std)
  np.testing.assert_array_equal(got, [0, 2, 0, 0, 0])
  std = np.std([0, 3, 1], ddof=1) + 1e-6
  np.testing.assert_allclose(of(adv.pass_at_k, [0.0, 3, 1]), [0, 2 / std, 0])


def test_parts_count_by_their_weights_and_not_by_their_spread():
  rows = [
    row([1], 0.0, parts={'a': a, 'b': b})
    for a, b in ((0, 0), (100, 0), (0, 1), (100, 1))
  ]
  d = draws.draw(rows)
  got = numbers(adv.gdpo(d), d)
  np.testing.assert_allclose(
    got, np.array([-1, 0, 0, 1]) * np.sqrt(1.5), atol=1e-5
  )
  lone = numbers(adv.gdpo(d, weights={'b': 2.0}), d)
  np.testing.assert_allclose(
    lone, np.array([-1, -1, 1, 1]) * np.sqrt(3 / 4), rtol=1e-5
  )
  with pytest.raises(MissingData, match='weighs .*c'):
    adv.gdpo(d, weights={'c': 1.0})
