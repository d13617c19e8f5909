"""Credit of a draw: through an estimator, to tokens and metrics."""

import dataclasses
import functools

import numpy as np
import pytest
import tiny_run
from fakes import trajectory

from agentjax import credit
from agentjax.rl import advantages, aggregation, returns, turns
from agentjax.training import ConfigError
from agentjax.types import Group, Reward, Status


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


class Says:
  """A learner that says what it is told to."""

  rows, length, trees, kept = 2, 16, False, 0

  def __init__(self, critic=None, corrects=False):
    self.critic, self.corrects = critic, corrects
    self.asked = []

  def logprobs(self, params, batch):
    self.asked.append(params)
    return np.where(batch.weights > 0, params, 0.0).astype(np.float32)

  def values(self, state, batch):
    return np.where(batch.pack_ids > 0, batch.positions + 1.0, 0.0)

  def keep(self, batch, version):
    assert version == 7
    # Takes the token 10 of everybody.
    return (batch.weights > 0) & (batch.tokens != 10)


class State:
  params = -2.0


def given(o, groups, learner=None, **more):
  learner = learner or Says()
  policies = credit.Policies(learner, State(), version=7, **more)
  return credit.credit(o, policies, groups)


def minibatches(o, groups, found, learner=None):
  return list(credit.batches(o, learner or Says(), groups, found))


def test_tokens_have_the_credit_of_their_turn():
  groups = collected()
  plain = given(training(advantages=advantages.dr_grpo), groups).advantages
  np.testing.assert_allclose(plain[0], np.array([0, 0, 2, 0, 0, 2, 2]) / 3)
  assert not plain[3].any()  # not valid
  estimator = functools.partial(
    turns.process_supervision, scale=advantages.no_std
  )
  by_turn = given(training(advantages=estimator), groups)
  # Turn rewards 0 1, 1 0, 0 0: mean 1/3.
  np.testing.assert_allclose(
    by_turn.advantages[1], np.array([0, 0, 1, 0, 0, -1, -1]) / 3, atol=1e-12
  )
  named = credit.by_id(groups, by_turn)
  assert list(named) == [t.id for t in groups[0].trajectories]
  assert all(a.dtype == np.float32 for a in named.values())


def test_a_group_without_signal_is_counted():
  groups = collected() + collected()
  same = [t.append(reward=Reward(1.0, True)) for t in groups[1].trajectories]
  groups[1] = Group(groups[1].task, 0, tuple(same))
  found = given(training(advantages=advantages.dr_grpo), groups)
  assert found.metrics['groups_without_signal'] == 0.5


def test_weights_are_of_the_aggregation_over_a_minibatch():
  """Three trajectories of three tokens each; the fourth is not valid."""
  groups = collected()
  o = training(aggregation=aggregation.sequence_mean_token_mean, minibatches=2)
  first, second = minibatches(o, groups, given(o, groups))
  assert first.counts.sum() == 2 and second.counts.sum() == 1
  for batch in (first, second):
    kept = batch.weights[batch.weights > 0]
    np.testing.assert_allclose(kept, 1 / 3, rtol=1e-6)
  assert sum((b.weights > 0).sum() for b in (first, second)) == 9


def test_a_rejected_token_counts_in_the_original_scale_alone():
  groups = collected()
  learner = Says(corrects=True)
  for rejected, count in (
    (aggregation.over_original, 9),
    (aggregation.over_effective, 6),
  ):
    o = training(rejected=rejected, minibatches=1)
    found = given(o, groups, learner)
    (batch,) = minibatches(o, groups, found, learner)
    assert batch.counts.sum() == count
    assert (batch.weights > 0).sum() == 6
    assert 10 not in batch.tokens[batch.weights > 0]
    np.testing.assert_allclose(found.metrics['rejected_tokens'], 1 / 3)
    assert found.metrics['rejected_trajectories'] == 1.0


def test_unselected_trajectories_are_in_neither_sum_nor_count():
  groups = collected()
  o = training(minibatches=1, select=lambda r, g, v: r > 0.5)
  found = given(o, groups)
  (batch,) = minibatches(o, groups, found)
  # Of the two with a reward of 1 one is an infrastructure failure.
  assert batch.counts.sum() == 3 and (batch.weights > 0).sum() == 3
  assert found.metrics['chosen'] == 0.25


def test_values_stand_before_their_token_and_bootstrap_the_cut():
  groups = collected()
  cut = groups[0].trajectories[1].append(status=Status.TURN_LIMIT)
  made = (groups[0].trajectories[0], cut)
  groups = [Group(cut.task, 0, made)]
  o = training(
    advantages=functools.partial(returns.gae, whiten=False, lam=0.0),
    group_size=2, minibatches=1,
  )  # fmt: skip
  learner = Says(critic='a critic')
  found = given(o, groups, learner)
  # After token t the value is t + 1, before it t; sampled are 2, 5 and 6.
  np.testing.assert_allclose(found.columns['values'][0], np.arange(7))
  ended, was_cut = found.advantages
  np.testing.assert_allclose(ended[[2, 5, 6]], [5 - 2, 6 - 5, 1 - 6])
  np.testing.assert_allclose(was_cut[[2, 5, 6]], [5 - 2 + 1, 1, 7 - 6])
  (batch,) = minibatches(o, groups, found, learner)
  shown = batch.weights > 0
  np.testing.assert_allclose(batch.values[shown], [2, 5, 6, 2, 5, 6])
  assert not batch.returns[~shown].any()
  np.testing.assert_allclose(batch.returns[0, 6], 1.0)  # lambda 1: the reward


def test_the_kl_of_a_reward_is_at_sampled_tokens_alone():
  groups = collected()
  o = training(
    advantages=functools.partial(returns.returns), use_reference=True,
    reward_kl_coef=0.5, minibatches=1,
  )  # fmt: skip
  found = given(o, groups, reference=-3.0, kl_coef=0.5)
  # k1 = -2 - -3 = 1 a token, three tokens, reward 1 at the last one.
  np.testing.assert_allclose(
    found.advantages[0], [0, 0, -0.5, 0, 0, 0, 0.5], atol=1e-6
  )
  assert found.metrics['kl'] == 1.0


def test_the_proximal_policy_is_asked_only_if_its_word_is_wanted():
  groups, learner = collected(), Says()
  o = training(minibatches=1)
  (batch,) = minibatches(o, groups, given(o, groups, learner), learner)
  assert learner.asked == []
  np.testing.assert_array_equal(batch.old, batch.logprobs)
  o = training(minibatches=1, recompute_old=True)
  (batch,) = minibatches(o, groups, given(o, groups, learner), learner)
  assert learner.asked == [-2.0]
  shown = batch.weights > 0
  np.testing.assert_array_equal(batch.old[shown], -2.0)
  assert not np.any(batch.logprobs[shown] == -2.0)


def test_the_ablation_gives_observations_the_credit_around_them():
  a = np.array([0.0, 0, 3, 0, 0, 5, 0])
  sampled = np.array([0, 0, 1, 0, 0, 1, 0], bool)
  between = credit._also_between
  np.testing.assert_array_equal(between(a, sampled), [3, 3, 3, 3, 3, 5, 5])
  none = np.zeros(3)
  np.testing.assert_array_equal(between(none, none > 0), none)


def test_an_update_without_tokens_has_no_part_in_the_metrics():
  one = {'kl': 0.4, 'loss_tokens': 30.0, 'max_ratio': 2.0,
         'skipped_updates': 0.0, 'max_logprob_gap': 0.1}  # fmt: skip
  two = one | {'kl': 0.1, 'loss_tokens': 10.0, 'max_ratio': 3.0}
  none = dict.fromkeys(one, 0.0)
  found = given(training(), collected())
  made = credit.metrics([one, none, two], found)
  np.testing.assert_allclose(made['kl'], (0.4 * 30 + 0.1 * 10) / 40)
  assert made['loss_tokens'] == 40 and made['max_ratio'] == 3
  assert credit.metrics([none], found)['kl'] == 0


def test_a_group_of_one_needs_an_estimator_without_a_baseline():
  with pytest.raises(ConfigError, match='group_size is 1'):
    training(advantages=turns.turn_returns, group_size=1)
  training(advantages=advantages.reinforce_plus_plus, group_size=1)
