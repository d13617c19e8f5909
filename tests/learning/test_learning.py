"""Every algorithm finds the best answer of a small problem, and can fail to.

`each_counts`: in every state another two tokens are right, tasks differ in
their turns, the best return is 1 and a uniform policy has 1/16. The policy is
a table; all else is the library's. What was measured, over 5 seeds, stands
beside each bound; two controls show that a bound is not reached by itself:
advantages with their sign turned, and advantages of other trajectories of the
same group. Where the baseline is not the group's mean (a critic, continuations,
none) a group that did well is still reinforced as a whole, so that a little is
learned from those.
"""

import dataclasses
import functools

import algorithms
import numpy as np
import pytest

from agentjax.rl import draw_from, kl, losses, trees
from experiments import chains, tabular
from experiments.tabular import Algorithm, Settings

SETTINGS = Settings(
  updates=40, group_size=16, steps=4, learning_rate=0.05, critic_rate=0.3
)
UNIFORM = 1 / 16

PROBLEMS = {
  'first_decides': chains.first_decides(),
  'each_counts': chains.each_counts(),
}


@functools.cache
def problem(seed: int) -> chains.Chain:
  return chains.each_counts(seed=seed)


def score(name: str, seed: int, disturb=None) -> float:
  curve = tabular.train(
    problem(seed), algorithms.ALL[name], SETTINGS, seed=seed, disturb=disturb
  )
  assert np.isclose(curve.scores[0], UNIFORM)
  return float(curve.scores[-1])


SOME = (
  'dapo', 'reinforce_plus_plus', 'gspo_turn', 'webrl', 'ppo', 'gigpo', 'treerl',
  'vineppo', 'tis_token',
)  # fmt: skip


@pytest.mark.parametrize('name', SOME)
def test_finds_the_best_answer(name):
  assert score(name, 0) > 0.85


@pytest.mark.parametrize(
  ('name', 'disturb'),
  [
    ('grpo', tabular.shuffled),
    ('grpo', tabular.reversed_sign),
    ('ppo', tabular.shuffled),
  ],
)
def test_controls_do_not(name, disturb):
  assert score(name, 0, disturb) < 0.5


@pytest.mark.long
@pytest.mark.parametrize('name', algorithms.ALL)
def test_finds_the_best_answer_whatever_the_seed(name):
  scores = [score(name, seed) for seed in range(5)]
  print(f'\nscores {name}: {np.round(scores, 3)}')
  # One state of 13 that has learned a wrong answer by heart costs 0.08.
  assert np.median(scores) > 0.9 and min(scores) > 0.7


@pytest.mark.long
@pytest.mark.parametrize('name', algorithms.ALL)
def test_no_control_does_whatever_the_seed(name):
  reverse = [score(name, seed, tabular.reversed_sign) for seed in range(2)]
  shuffle = [score(name, seed, tabular.shuffled) for seed in range(2)]
  print(f'\ncontrols {name}: {np.round(reverse, 3)} {np.round(shuffle, 3)}')
  assert max(reverse) < UNIFORM
  assert max(shuffle) < 0.7


def test_finds_the_one_turn_that_decides():
  curve = tabular.train(
    PROBLEMS['first_decides'], algorithms.ALL['mt_grpo'], SETTINGS, seed=0
  )
  assert curve.scores[0] == pytest.approx(UNIFORM)
  assert curve.scores[-1] > 0.85


# ---- many steps on each draw ------------------------------------------------

MANY = dataclasses.replace(SETTINGS, updates=30, steps=24)
TRUSTED = ['ppo_clip', 'dual_clip', 'gspo', 'dppo_kl']


def after_many_steps(loss, seed: int) -> float:
  algorithm = Algorithm(loss=loss)
  return tabular.train(problem(seed), algorithm, MANY, seed=seed).scores[-1]


def test_a_clip_holds_what_many_steps_would_spoil():
  # Seen: 0.993 and 0.921, where one state has learned a wrong answer by heart.
  free = functools.partial(losses.ppo_clip, clip_low=1.0, clip_high=1e9)
  assert after_many_steps(losses.ppo_clip, 0) > 0.98
  assert after_many_steps(free, 0) < 0.96


@pytest.mark.long
@pytest.mark.parametrize('name', TRUSTED)
def test_a_trust_region_holds_whatever_the_seed(name):
  loss = algorithms.ALL[name].loss
  assert min(after_many_steps(loss, seed) for seed in range(3)) > 0.98


# ---- the problems themselves ------------------------------------------------


def policy(chain, seed=0) -> np.ndarray:
  M = chain.best.shape[2]
  logits = np.random.default_rng(seed).normal(
    size=(chain.states, M, chain.vocabulary)
  )
  p = np.exp(logits)
  return p / p.sum(-1, keepdims=True)


def perfect(chain) -> np.ndarray:
  """The best policy."""
  tasks, K, M = chain.best.shape
  out = np.full((chain.states, M, chain.vocabulary), 0.0)
  for t in range(tasks):
    for k in range(K):
      for first in (0, 1):
        rows = out[chain.state(t, k, first)]
        np.put_along_axis(rows, chain.best[t, k, :, None], 1.0, 1)
  return out


each_problem = pytest.mark.parametrize('name', PROBLEMS)


@each_problem
def test_the_best_answer_is_known(name):
  chain = PROBLEMS[name]
  rng = np.random.default_rng(0)
  tasks_N = np.repeat(np.arange(len(chain.best)), 500)
  assert chain.score(perfect(chain)) == 1
  got = chains.sample(rng, chain, perfect(chain), tasks_N).rewards_N.mean()
  assert np.isclose(got, 1 - (chain.luck or 0), atol=0.03)
  # No other does better, and a uniform one as badly as it should.
  uniform = np.full_like(perfect(chain), 1 / chain.vocabulary)
  assert np.isclose(chain.score(uniform), UNIFORM)
  got = chains.sample(rng, chain, uniform, tasks_N).rewards_N.mean()
  luck = chain.luck or 0
  assert np.isclose(got, luck + (1 - 2 * luck) * UNIFORM, atol=0.03)


@each_problem
def test_expected_outcomes_are_those_of_many_continuations(name):
  chain = PROBLEMS[name]
  rng = np.random.default_rng(1)
  probs = policy(chain)
  sampled = chains.sample(rng, chain, probs, np.arange(4))
  means, used = chains.mean_continuations(rng, chain, probs, sampled, 4000)
  exact = chains.expected_outcome(chain, probs, sampled)
  there = sampled.there_NK
  np.testing.assert_allclose(means[there], exact[there], atol=0.03)
  lengths = chain.lengths
  assert used >= 4000 * (lengths * (lengths + 1) // 2).sum()


@each_problem
@pytest.mark.parametrize('leaves', [1, 2, 4])
def test_trajectories_and_arrays_make_the_same_draw(name, leaves):
  chain, rng = PROBLEMS[name], np.random.default_rng(2)
  probs, tasks_N = policy(chain), np.repeat(np.arange(4), 4)
  if leaves == 1:
    sampled = chains.sample(rng, chain, probs, tasks_N)
  else:
    sampled = chains.forked(rng, chain, probs, tasks_N, leaves)
  arrays = chains.slots(chain, sampled)
  by_arrays = chains.draw(chain, sampled, arrays)
  by_groups = draw_from.groups(chains.groups(chain, sampled))
  np.testing.assert_array_equal(by_arrays.rewards_N, by_groups.rewards_N)
  np.testing.assert_array_equal(by_arrays.groups_N, by_groups.groups_N)
  np.testing.assert_array_equal(
    by_arrays.tree.parents_N, by_groups.tree.parents_N
  )
  names = ('masks', 'turns', 'turn_rewards', 'state_keys')
  for field in names:
    for x, y in zip(
      getattr(by_arrays, field), getattr(by_groups, field), strict=True
    ):
      np.testing.assert_array_equal(x[: len(y)], y)
  if leaves > 1:
    # A fork that says the same once more is no other row to `groups`.
    kept = by_groups.tree.shared_N >= by_arrays.tree.shared_N
    assert kept.all() and max(map(np.max, trees.multiplicity(by_arrays))) > 1


def test_what_stands_between_turns_is_hidden():
  chain = PROBLEMS['each_counts']
  sampled = chains.sample(
    np.random.default_rng(3), chain, policy(chain), np.arange(4)
  )
  arrays = chains.slots(chain, sampled)
  assert np.isnan(arrays['logprobs'][~arrays['mask']]).any()
  per_turn = chain.best.shape[2] * chain.lengths[sampled.tasks_N]
  np.testing.assert_array_equal(arrays['mask'].sum(1), per_turn)
  assert not arrays['mask'][:, : chains.PROMPT].any()


def test_seeds_and_forks_are_what_they_say():
  chain, probs = PROBLEMS['first_decides'], policy(PROBLEMS['first_decides'])
  rows = chains.forked(
    np.random.default_rng(4), chain, probs, np.repeat(np.arange(4), 4), 4
  )
  for i, (p, n) in enumerate(zip(rows.parents_N, rows.kept_N, strict=True)):
    assert (p < 0) == (i % 4 == 0) and (n > 0) == (p >= 0)
    if p >= 0:
      np.testing.assert_array_equal(
        rows.actions_NKM[i, :n], rows.actions_NKM[p, :n]
      )
      # The first turn decides, so that luck alone tells them apart.
      assert rows.right_NK[i, 0] == rows.right_NK[p, 0]
  again = chains.forked(
    np.random.default_rng(4), chain, probs, np.repeat(np.arange(4), 4), 4
  )
  np.testing.assert_array_equal(rows.actions_NKM, again.actions_NKM)
  turns = sum(
    6 if p < 0 else 6 - n
    for p, n in zip(rows.parents_N, rows.kept_N, strict=True)
  )
  assert rows.turns_sampled == turns


def test_the_kl_is_told_who_sampled():
  told = []

  def gradient(*args, old_N=None):
    told.append(old_N is not None)
    return kl.ratio_gradient(*args, old_N=old_N)

  algorithm = Algorithm(kl_coef=0.1, kl_gradient=gradient)
  settings = dataclasses.replace(SETTINGS, updates=1, group_size=4)
  tabular.train(problem(0), algorithm, settings, seed=0)
  assert told and all(told)


def test_a_lag_is_one(monkeypatch):
  seen = []
  real = chains.sample

  def spy(rng, chain, probs, tasks_N, **more):
    seen.append(probs)
    return real(rng, chain, probs, tasks_N, **more)

  monkeypatch.setattr(chains, 'sample', spy)
  stale = algorithms.ALL['tis_token']
  settings = dataclasses.replace(SETTINGS, updates=6, group_size=4)
  tabular.train(problem(0), stale, settings, seed=0)
  # The first table has 1 + lag updates, and every other one.
  changed = [
    not np.array_equal(a, b) for a, b in zip(seen, seen[1:], strict=False)
  ]
  assert changed == [False] * 3 + [True] * 2
