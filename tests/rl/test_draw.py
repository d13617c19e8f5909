"""A draw is what was recorded, clean, and nothing that was inferred."""

import numpy as np
import pytest
from fakes import task, trajectory

from agentjax.rl import draw_from
from agentjax.rl.draw import (
  MissingData,
  Tree,
  drop_unsampled,
  make,
  move_to_sampled,
)
from agentjax.rl.seam import (
  apart,
  broadcast,
  by_turn,
  joined,
  outcome,
  reward_stream,
  stack,
  step_rewards,
  total,
  unstack,
  whitened,
)
from agentjax.types import Group, Reward, Status

M = np.array([0, 1, 1, 0, 0, 1, 0], bool)


def test_a_misplaced_reward_moves_to_the_last_sampled_token_before_it():
  rewards = np.array([9.0, 0, 1, 2, 4, 8, 16])
  moved, n = move_to_sampled(rewards, M)
  np.testing.assert_array_equal(moved, [0, 0, 7, 0, 0, 24, 0])
  assert n == 4  # the first one had nobody before it, and is gone
  kept, n = drop_unsampled(rewards, M)
  np.testing.assert_array_equal(kept, [0, 0, 1, 0, 0, 8, 0])
  assert n == 4


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('place', [move_to_sampled, drop_unsampled])
def test_what_is_no_number_is_no_reward_where_nothing_was_sampled(place, bad):
  kept, n = place(np.where(M, 1.0, bad), M)
  np.testing.assert_array_equal(kept, M * 1.0)
  assert n == 0


def test_a_draw_of_arrays_counts_what_it_moved():
  d = draw_from.arrays(
    [M, M],
    rewards_B=[1, 2],
    groups_B=['b', 'a'],
    token_rewards=[np.ones(7), np.zeros(7)],
    values=[np.where(M, 3.0, np.nan)] * 2,
    turns_BT=[np.array([9, 0, 0, 9, 9, 1, 9])] * 2,
  )
  assert d.misplaced == 4 and len(d) == 2
  np.testing.assert_array_equal(d.groups_N, [1, 0])
  np.testing.assert_array_equal(d.values[0], M * 3.0)
  np.testing.assert_array_equal(d.turns[0], [-1, 0, 0, -1, -1, 1, -1])
  np.testing.assert_array_equal(d.turn_ends()[1], [2, 5])
  np.testing.assert_array_equal(d.token_rewards[0], [0, 1, 3, 0, 0, 2, 0])
  np.testing.assert_array_equal(total(d), [7, 2])  # one had nobody before it
  np.testing.assert_array_equal(outcome(d), [1, 2])


def test_rewards_stand_at_the_ends_of_turns():
  d = make(
    [10.0],
    [0],
    [M],
    turns=[np.array([-1, 0, 0, -1, -1, 1, -1])],
    turn_rewards=[[1.0, 2.0]],
    token_rewards=[0.5 * M],
  )
  np.testing.assert_array_equal(step_rewards(d)[0], [1, 12])
  np.testing.assert_array_equal(d.turn_rewards[0], [1, 2])
  np.testing.assert_array_equal(
    reward_stream(d)[0], [0, 0.5, 1.5, 0, 0, 12.5, 0]
  )
  np.testing.assert_array_equal(by_turn(d, [[3, 4]])[0], [0, 3, 3, 0, 0, 4, 0])
  np.testing.assert_array_equal(broadcast(d, [2.0])[0], 2 * M)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'rewards': [np.nan]}, 'a valid trajectory has a finite one'),
    ({'rewards': [1.0, 2.0]}, 'rewards has shape'),
    ({'turns': [np.array([0, 1, 1, 0, 0, 1, 0])]}, 'count from 0'),
    ({'turns': [np.array([0, 0, 0, 0, 0, 2, 0])]}, 'count from 0'),
    ({'turns': [np.array([0, 0, 1, 0, 0, 0, 0])]}, 'count from 0'),
    ({'turn_rewards': [[1.0, 2.0]]}, 'turn_rewards of row 0 are 2'),
    ({'values': [np.zeros(6)]}, 'values has shape'),
    ({'token_rewards': [np.zeros(6)]}, 'token_rewards has shape'),
    ({'tree': Tree(np.array([-1, 0]), np.array([0, 0]))}, 'a tree of 2 rows'),
  ],
)
def test_what_does_not_fit_is_refused(change, message):
  given = {'rewards': [1.0], 'groups': [0], 'masks': [M]} | change
  with pytest.raises(ValueError, match=message):
    make(**given)


def test_a_tree_is_one():
  with pytest.raises(ValueError, match='circle'):
    Tree(np.array([1, 0]), np.array([1, 1]))
  with pytest.raises(ValueError, match='row 1 of 2 has row 1'):
    Tree(np.array([-1, 1]), np.array([0, 0]))
  with pytest.raises(ValueError, match='shares 8 tokens'):
    make([0, 0], [0, 0], [M, M], tree=Tree(np.array([-1, 0]), np.array([0, 8])))
  tree = Tree(np.array([2, -1, 1, -1]), np.array([5, 0, 3, 0]))
  np.testing.assert_array_equal(tree.roots(), [1, 1, 1, 3])
  assert tree.order().index(2) < tree.order().index(0)


def test_what_is_missing_is_named():
  with pytest.raises(MissingData, match='needs values'):
    make([1.0], [0], [M], logprobs=[M * 1.0]).need('logprobs', 'values')


def test_stack_and_apart_are_there_and_back():
  ragged = [np.arange(3.0), np.zeros(0), np.arange(5.0)]
  for again in (
    unstack(stack(ragged), ragged),
    apart(joined(ragged), [3, 0, 5]),
  ):
    for a, b in zip(ragged, again, strict=True):
      np.testing.assert_array_equal(a, b)
  assert stack([]).shape == (0, 0) and apart(joined([]), []) == []


def test_whitening_is_over_sampled_tokens_of_valid_trajectories():
  d = make([0] * 3, [0] * 3, [M, M, M[:2]], valid=[True, False, True])
  a, b, c = whitened(d, [M * [0, 1, 2, 0, 0, 3, 0], M * 99.0, [7.0, 6.0]])
  # Of 1, 2, 3 and 6: mean 3, variance 14 / 3.
  std = np.sqrt(14 / 3)
  np.testing.assert_allclose(a, M * [0, -2, -1, 0, 0, 0, 0] / std, atol=1e-7)
  assert not b.any()
  np.testing.assert_allclose(c, [0, 3 / std])


# ---- from trajectories ------------------------------------------------------


def group(*trajectories, draw=3):
  return Group(task(), draw, trajectories)


def test_turns_are_the_model_segments():
  t = trajectory(
    [('p', [1]), ('f', [2]), ('m', [3, 4]), ('o', [5, 6]), ('m', [7])],
    reward=0.5,
  ).append(turn_rewards=(0.25,), state_keys=('s',))
  d = draw_from.groups([group(t)], first=9)
  np.testing.assert_array_equal(d.turns[0], [-1, -1, 0, 0, -1, -1, 1])
  np.testing.assert_array_equal(d.masks[0], t.loss_mask())
  # The environment has not answered the last turn, as a limit cut it.
  np.testing.assert_array_equal(d.turn_rewards[0], [0.25, 0])
  assert d.state_keys[0] == ('s', None)
  assert d.rewards_N[0] == 0.5 and d.groups_N[0] == 9 and d.valid_N[0]
  assert d.misplaced == 0 and d.values is None
  scored = draw_from.groups([group(t)], turn_rewards=[[1.0, 2.0]])
  assert scored.turn_rewards[0].tolist() == [1, 2]


def test_turns_without_a_label_are_none():
  """An empty turn, and a first token that nothing predicts."""
  t = trajectory([('m', [1]), ('o', [2]), ('m', [3]), ('m', []), ('m', [4])])
  t = t.append(turn_rewards=(1.0, 2.0, 4.0, 8.0), state_keys=tuple('abcd'))
  d = draw_from.groups([group(t)])
  np.testing.assert_array_equal(d.turns[0], [-1, -1, 0, 1])
  np.testing.assert_array_equal(d.turn_rewards[0], [6, 8])
  assert d.state_keys[0] == ('b', 'd') and d.misplaced == 2


def test_what_may_not_be_learned_from_is_not_valid():
  good = trajectory([('p', [1]), ('m', [2])])
  bad = [
    good.append(status=Status.INFRA_FAILURE),
    good.append(status=Status.DONE, reward=None),
  ]
  d = draw_from.groups([group(good), group(*bad)])
  assert d.valid_N.tolist() == [True, False, False]
  assert d.groups_N.tolist() == [0, 1, 1]
  assert d.masks[1].any() and not d.masks_valid()[1].any()


def test_a_value_follows_only_where_a_limit_cut():
  whole = trajectory([('p', [1]), ('m', [2])])
  cut = whole.append(status=Status.TURN_LIMIT)
  d = draw_from.groups(
    [group(whole, cut)],
    bootstrap=[5.0, 6.0],
    values=[np.array([0.0, 1.0])] * 2,
  )
  assert d.bootstrap_N.tolist() == [0, 6]
  assert d.values[0].tolist() == [0, 1]


def test_parts_are_those_that_every_reward_has():
  a, b = (trajectory([('p', [1]), ('m', [2])]) for _ in range(2))
  a = a.append(reward=Reward(1.0, parts={'x': 1.0, 'y': 2.0}))
  b = b.append(reward=Reward(1.0, parts={'x': 3.0}))
  lost = b.append(status=Status.INFRA_FAILURE, reward=None)
  d = draw_from.groups([group(a, b, lost)])
  assert list(d.parts) == ['x'] and d.parts['x'].tolist() == [1, 3, 0]


def test_a_fork_shares_whole_segments_with_its_parent():
  first = trajectory([('p', [1, 2]), ('m', [3]), ('o', [4]), ('m', [5, 6])])
  fork = trajectory([('p', [1, 2]), ('m', [3]), ('o', [4]), ('m', [5, 7])])
  # The same tokens sampled twice: other log-probs, nothing shared behind them.
  other = trajectory([('p', [1, 2]), ('m', [3])], logprob=-2.0)
  fork = fork.append(branch=1, parent_id=first.id)
  other = other.append(branch=2, parent_id=fork.id)
  alone = first.append(sample=1, parent_id='of another draw')
  d = draw_from.groups([group(first, fork, other, alone)])
  assert d.tree.parents_N.tolist() == [-1, 0, 1, -1]
  assert d.tree.shared_N.tolist() == [0, 4, 2, 0]
