"""Recursions against plain loops, by hand, and at their known limits."""

import draws
import numpy as np
import pytest
from draws import equal, example, row

from agentjax.rl import returns
from agentjax.rl.seam import broadcast


def plain_gae(r, gamma, lam):
  """Over the sampled tokens of one row alone, as if there were no others."""
  at = np.flatnonzero(r['mask'])
  rewards = r['token_rewards'][at].copy()
  for k, turn in enumerate(r['turn_rewards']):
    rewards[np.flatnonzero(r['turns'][at] == k)[-1]] += turn
  rewards[-1] += r['reward']
  values = [*r['values'][at], r['bootstrap']]
  out, a = np.zeros(len(r['mask'])), 0.0
  for j in reversed(range(len(at))):
    a = rewards[j] + gamma * values[j + 1] - values[j] + gamma * lam * a
    out[at[j]] = a
  return out


@pytest.mark.parametrize(('gamma', 'lam'), [(1.0, 1.0), (0.9, 0.7), (0.5, 0.0)])
def test_gae_equals_a_loop_over_what_was_sampled(gamma, lam):
  rows = example()
  d = draws.draw(rows)
  want = [plain_gae(r, gamma, lam) for r in rows]
  options = {'gamma': gamma, 'lam': lam}
  equal(returns.gae(d, whiten=False, **options), want)
  targets = [
    np.where(m, a + v, 0)
    for m, a, v in zip(d.masks, want, d.values, strict=True)
  ]
  equal(returns.value_targets(d, **options), targets)
  flat = np.concatenate([a[m] for a, m in zip(want, d.masks, strict=True)])
  white = [
    np.where(m, (a - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8), 0)
    for m, a in zip(d.masks, want, strict=True)
  ]
  equal(returns.gae(d, **options), white)


def test_by_hand():
  """Rewards 0 and 1, values 1 and 2, an observation between, gamma 1/2."""
  r = row([1, 1], 1.0, values=np.array([9.0, 9, 1, 9, 2]))
  d = draws.draw([r])
  options = {'gamma': 0.5, 'lam': 0.5, 'whiten': False}
  # delta: 0 + 1/2 * 2 - 1 = 0 and 1 - 2 = -1.
  np.testing.assert_allclose(returns.gae(d, **options)[0], [0, 0, -0.25, 0, -1])
  # Cut, and worth 4 from there on: 1 + 1/2 * 4 - 2 = 1.
  cut = draws.draw([r | {'bootstrap': 4.0}])
  np.testing.assert_allclose(returns.gae(cut, **options)[0], [0, 0, 0.25, 0, 1])
  # Each slot a step: delta 0 + 0 - 1, then the hole 1/2 * 2, then 1 - 2.
  np.testing.assert_allclose(
    returns.gae_per_slot(d, **options)[0],
    [0, 0, -1 + 0.25 * (1 + 0.25 * -1), 0, -1],
  )


def test_without_values_and_discount_gae_is_the_outcome():
  rows = [
    r
    | {
      'values': np.zeros(len(r['mask'])),
      'token_rewards': np.zeros(len(r['mask'])),
      'turn_rewards': [0.0] * len(r['turn_rewards']),
      'bootstrap': 0.0,
    }
    for r in example()
  ]
  d = draws.draw(rows)
  want = broadcast(d, d.rewards_N)
  equal(returns.gae(d, whiten=False), want)
  equal(returns.returns(d), want)


def test_crossings_by_hand():
  d = draws.draw([row([1, 2], 8.0, gap=2)])
  for cross, first in (
    (returns.carry, 2.0),
    (returns.decay, 0.5),
    (returns.reset, 0.0),
  ):
    got = returns.returns(d, gamma=0.5, cross=cross)[0]
    np.testing.assert_allclose(got, [0, 0, first, 0, 0, 4, 8])


def test_rewards_go_to_what_came_before_them_alone():
  r = row([2, 1], 0.0, turn_rewards=[3.0, 5.0])
  got = returns.returns(draws.draw([r]))[0]
  np.testing.assert_allclose(got, [0, 0, 8, 8, 0, 5])


def test_an_end_hides_what_follows():
  ends = np.array([[False, True, False]])
  ones = np.ones((1, 3))
  got = returns.generalized(
    ones, 2 * ones, ones, [0.0], gamma=1.0, lam=1.0, ends_NT=ends
  )
  # Last: 1 - 2; at the end: 1 - 2, as if it were the last; before: 1 + 2 - 2.
  np.testing.assert_allclose(got, [[1 - 1, -1, -1]])
