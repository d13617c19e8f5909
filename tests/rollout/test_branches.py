"""Branches go on from where their parents were, and cost what is new."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from fakes import IdChat, IdEnvironment, trajectory
from test_collect import LIMITS, TASKS, new_engine

from agentjax import tally
from agentjax.evaluate import failure_rate
from agentjax.rl import draw_from, trees
from agentjax.rollout import branches
from agentjax.rollout.sampling import Sampling
from agentjax.types import Group, Observation, Reward, Source, Status


def collected(branch, engine=None, **kw):
  engine = engine or new_engine()
  options = {
    'engine': engine, 'chat': IdChat(), 'limits': LIMITS, 'seed': 0, 'draw': 5,
    'make_environment': IdEnvironment, 'sampling': Sampling(), 'group_size': 2,
  } | kw  # fmt: skip
  return branches.collected(TASKS, branch, **options)


def test_a_state_is_the_past_of_a_turn():
  parts = [('p', [5, 6]), ('f', [1]), ('m', [7]), ('o', [8, 9]), ('f', [1]),
           ('m', [10, 11])]  # fmt: skip
  t = dataclasses.replace(
    trajectory(parts), turn_rewards=(0.5, 1.0), state_keys=('a', 'b')
  )
  first, second = branches.cut(t, 0, 3), branches.cut(t, 1, 4)
  assert first.tokens().tolist() == [5, 6] and first.turn_rewards == ()
  assert second.tokens().tolist() == [5, 6, 1, 7, 8, 9]
  assert second.turn_rewards == (0.5,) and second.state_keys == ('a',)
  for cut, branch in ((first, 3), (second, 4)):
    assert cut.status is Status.RUNNING and cut.reward is None
    assert (cut.parent_id, cut.branch) == (t.id, branch)


def test_leaves_share_their_past_and_run_only_what_is_new():
  engine = new_engine()
  plain = collected(None).groups
  found = collected(functools.partial(branches.grow, forks=2), engine)
  assert found.found == {} and found.tried == []
  n_leaves = 0
  for group, before in zip(found.groups, plain, strict=True):
    by_id = {t.id: t for t in group.trajectories}
    assert len(by_id) == len(group.trajectories)
    old, new = group.trajectories[:2], group.trajectories[2:]
    for t, u in zip(old, before.trajectories, strict=True):
      np.testing.assert_array_equal(t.tokens(), u.tokens())
    for leaf in new:
      parent = by_id[leaf.parent_id]
      past = leaf.info['past_tokens']
      np.testing.assert_array_equal(
        leaf.tokens()[:past], parent.tokens()[:past]
      )
      kept = [s.source for s in leaf.segments].index(Source.OBSERVATION)
      assert past > sum(len(s) for s in leaf.segments[:kept])
      assert leaf.status is not Status.RUNNING
      n_leaves += 1
    tree = draw_from.tree(group.trajectories)
    assert (tree.parents_N[2:] >= 0).all()
    assert [n for n in tree.shared_N[2:]] == [
      leaf.info['past_tokens'] for leaf in new
    ]
  grown = [t for g in plain for t in g.trajectories if len(t.turns) > 1]
  assert n_leaves == 2 * len(grown) > 0
  # Leaves are other trajectories than their parents, and than each other.
  texts = {t.tokens().tobytes() for g in found.groups for t in g.trajectories}
  assert len(texts) > sum(len(g.trajectories) for g in plain)
  # Promise 3: the draw's prompts and observations, and each past once.
  cost = tally.expected_prefill(plain) + tally.expected_prefill([
    Group(g.task, 5, g.trajectories[2:]) for g in found.groups
  ])  # fmt: skip
  assert engine.stats.tokens_prefilled == cost


def test_branches_are_the_same_whatever_the_slots():
  grow = functools.partial(branches.grow, forks=2)
  a, b = collected(grow), collected(grow, in_flight=9)
  for x, y in zip(a.groups, b.groups, strict=True):
    for t, u in zip(x.trajectories, y.trajectories, strict=True):
      assert t.id == u.id
      np.testing.assert_array_equal(t.tokens(), u.tokens())


def test_the_value_of_a_state_is_the_mean_of_its_continuations():
  """With rewards by hand: what comes of each continuation is its branch."""
  parts = [('p', [5]), ('m', [7]), ('o', [8]), ('m', [9]), ('o', [8]),
           ('m', [9])]  # fmt: skip
  made = [
    dataclasses.replace(
      trajectory(parts[:n], 'a', sample=i), turn_rewards=(0.0,) * (n // 2),
      state_keys=(None,) * (n // 2),
    )
    for i, n in enumerate([6, 2])
  ]  # fmt: skip
  made.append(dataclasses.replace(trajectory([], 'a'), sample=2))
  group = Group(made[0].task, 0, tuple(made))
  asked = []

  def go_on(prefixes):
    (own,) = prefixes
    asked.extend(own)
    ended = [
      t.append(status=Status.DONE, reward=Reward(float(t.branch), True))
      if t.branch < 5
      else t.append(status=Status.INFRA_FAILURE)
      for t in own
    ]
    return [Group(group.task, 0, tuple(ended))]

  found = branches.state_values([group], go_on, continuations=2)
  # Branches 1, 2 of the prompt, 3, 4 of turn 1; those of turn 2 fail.
  assert [t.branch for t in asked] == [1, 2, 3, 4, 5, 6]
  assert [len(t) for t in asked] == [1, 1, 3, 3, 5, 5]
  np.testing.assert_allclose(found.found['turn_values'][0], [1.5, 3.5, 3.5])
  np.testing.assert_allclose(found.found['turn_values'][1], [1.5])
  assert found.found['turn_values'][2].shape == (0,)
  assert found.groups == [group] and len(found.tried[0].trajectories) == 6


def test_values_of_a_real_draw_fit_its_estimator():
  engine = new_engine()
  found = collected(
    functools.partial(branches.state_values, continuations=2), engine
  )
  draw = draw_from.groups(found.groups, **found.found)
  credit = trees.vineppo(draw)
  assert any(np.any(a) for a in credit)
  members = [t for g in found.groups for t in g.trajectories]
  for t, own in zip(members, found.found['turn_values'], strict=True):
    assert own.shape == (len(t.turns),)
  cost = tally.expected_prefill([*found.groups, *found.tried])
  assert engine.stats.tokens_prefilled == cost


class Moody(IdEnvironment):
  """Never answers the same turn alike."""

  asked = itertools.count()

  def step(self, turn):
    step = super().step(turn)
    more = Observation(str(2 + next(self.asked) % 30))
    return dataclasses.replace(step, observations=(*step.observations, more))


class Renamed(IdEnvironment):
  """Says the same in another state."""

  asked = itertools.count()

  def step(self, turn):
    key = str(next(self.asked))
    return dataclasses.replace(super().step(turn), state_key=key)


@pytest.mark.parametrize('environment', [Moody, Renamed])
def test_a_branch_whose_past_comes_out_otherwise_is_an_error(environment):
  found = collected(
    functools.partial(branches.state_values, continuations=1),
    make_environment=environment,
  )
  # Branch 1 goes on from the prompt, of which nothing is replayed.
  behind = [t for g in found.tried for t in g.trajectories if t.branch > 1]
  assert behind
  for t in behind:
    assert t.status is Status.ENVIRONMENT_ERROR and t.reward is None
    assert 'OtherwiseThanRecorded: turn 0 of 5/' in t.error
  # They are counted, and no state has a value of theirs.
  assert failure_rate(found.tried) > 0
  for values in found.found['turn_values']:
    assert len(set(values.tolist())) == 1
  grown = collected(branches.grow, make_environment=environment)
  leaves = [t for g in grown.groups for t in g.trajectories[2:]]
  assert leaves and not any(t.status.train_on_tokens for t in leaves)


def test_the_baseline_is_the_greedy_trajectory_of_the_task():
  engine = new_engine()
  found = collected(branches.greedy_answers, engine)
  alone = collected(None, sampling=Sampling(temperature=0.0), group_size=1)
  rewards = [g.trajectories[0].reward.value for g in alone.groups]
  assert found.found['baselines_N'] == [r for r in rewards for _ in range(2)]
  assert len({*rewards}) > 1
  ids = {t.id for g in (*found.groups, *found.tried) for t in g.trajectories}
  assert len(ids) == 3 * 3
  cost = tally.expected_prefill([*found.groups, *found.tried])
  assert engine.stats.tokens_prefilled == cost


def test_what_is_found_has_the_same_names_where_there_is_nothing():
  for branch, names in (
    (branches.grow, set()),
    (branches.state_values, {'turn_values'}),
    (branches.greedy_answers, {'baselines_N'}),
  ):
    assert set(branch([], lambda prefixes, **_: []).found) == names


def test_numbers_below_one_are_refused():
  for branch, name in (
    (functools.partial(branches.grow, forks=0), 'forks is 0'),
    (
      functools.partial(branches.state_values, continuations=0),
      'continuations is 0',
    ),
  ):
    with pytest.raises(ValueError, match=name):
      branch([], None)
