"""Credit of a draw: through an estimator, to tokens and metrics."""

import dataclasses
import functools

import numpy as np
import pytest
import tiny_run
from fakes import trajectory

from agentjax import credit
from agentjax.rl import advantages, returns, trees, turns
from agentjax.training import ConfigError
from agentjax.types import Group, Status


def collected():
  rewards = (1.0, 0.0, 0.0, 1.0)
  made = [
    trajectory(
      [('p', [5, 6]), ('m', [7]), ('o', [8, 9]), ('m', [10, 11])],
      reward=r,
      sample=i,
    ).append(turn_rewards=(float(i == 1), 0.0))
    for i, r in enumerate(rewards)
  ]
  made[3] = made[3].append(status=Status.INFRA_FAILURE)
  return [Group(made[0].task, 0, tuple(made))]


def training(**changes):
  return dataclasses.replace(tiny_run.training(), **changes)


def test_tokens_have_the_credit_of_their_turn():
  groups = collected()
  plain = credit.advantages(training(advantages=advantages.dr_grpo), groups)
  np.testing.assert_allclose(plain[0], np.array([0, 0, 2, 0, 0, 2, 2]) / 3)
  assert not plain[3].any()  # not valid
  estimator = functools.partial(
    turns.process_supervision, scale=advantages.no_std
  )
  by_turn = credit.advantages(training(advantages=estimator), groups)
  # Turn rewards 0 1, 1 0, 0 0: mean 1/3.
  np.testing.assert_allclose(
    by_turn[1], np.array([0, 0, 1, 0, 0, -1, -1]) / 3, atol=1e-12
  )
  given = credit.by_id(groups, by_turn)
  assert list(given) == [t.id for t in groups[0].trajectories]
  assert all(a.dtype == np.float32 for a in given.values())


def test_a_group_without_signal_is_counted():
  o = training(group_size=2)
  made = [{'loss': 1.0, 'loss_tokens': 3, 'max_ratio': 1.0,
           'skipped_updates': 0, 'max_logprob_gap': 0.0}]  # fmt: skip
  given = [np.zeros(3), np.zeros(2), np.array([0.0, 1.0]), np.zeros(1)]
  assert credit.metrics(o, made, given)['groups_without_signal'] == 0.5


def test_the_ablation_gives_observations_the_credit_around_them():
  a = np.array([0.0, 0, 3, 0, 0, 5, 0])
  sampled = np.array([0, 0, 1, 0, 0, 1, 0], bool)
  between = credit._also_between
  np.testing.assert_array_equal(between(a, sampled), [3, 3, 3, 3, 3, 5, 5])
  none = np.zeros(3)
  np.testing.assert_array_equal(between(none, none > 0), none)


@pytest.mark.parametrize(
  ('estimator', 'message'),
  [(returns.gae, 'needs values'), (trees.vineppo, 'needs turn_values')],
)
def test_an_estimator_that_lacks_its_data_is_refused(estimator, message):
  with pytest.raises(ConfigError, match=message):
    training(advantages=estimator)


def test_a_group_of_one_needs_an_estimator_without_a_baseline():
  with pytest.raises(ConfigError, match='group_size is 1'):
    training(advantages=turns.turn_returns, group_size=1)
  training(advantages=advantages.reinforce_plus_plus, group_size=1)
