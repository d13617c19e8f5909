"""Drawing on until groups teach something, with bounds."""

import numpy as np
import pytest

from agentjax.refill import NothingToLearn, refill, refuse_short, teaches
from agentjax.rl.shaping import informative
from agentjax.types import Group, Reward, Status, Task, Trajectory


def group(name, outcomes, status=Status.DONE, values=None):
  task = Task(name, ())
  values = values or [float(o) for o in outcomes]
  return Group(
    task,
    0,
    tuple(
      Trajectory(task, status=status, reward=Reward(v, bool(o)), sample=i)
      for i, (o, v) in enumerate(zip(outcomes, values, strict=True))
    ),
  )


def source(*draws):
  left = list(draws)

  def draw():
    return left.pop(0)

  draw.left = left
  return draw


def names(groups):
  return [g.task.id for g in groups]


def test_groups_are_replaced_and_the_surplus_is_told():
  draw = source(
    [group('a', [1, 1]), group('b', [0, 1])],
    [group('c', [0, 0]), group('d', [0, 0])],
    [group('e', [1, 0]), group('f', [0, 1])],
    [group('g', [0, 1])],
  )
  got = refill(draw, wanted=2)
  assert (names(got.groups), got.draws) == (['b', 'e'], 3)
  assert names(got.left_out) == ['a', 'c', 'd']
  assert names(got.surplus) == ['f']
  assert sorted(names(got.collected)) == ['a', 'b', 'c', 'd', 'e', 'f']
  assert len(draw.left) == 1


def test_a_source_without_variance_ends_in_bounded_time():
  calls = []

  def draw():
    calls.append(1)
    return [group('a', [0, 0]), group('b', [1, 1])]

  with pytest.raises(NothingToLearn, match='7 draws of 14 groups'):
    refill(draw, wanted=2, most_draws=7)
  assert len(calls) == 7


def test_a_short_draw_is_what_there_is_or_the_end():
  draws = [[group('a', [0, 1])], [group('b', [1, 1])]]
  got = refill(source(*draws), wanted=2, most_draws=2)
  assert names(got.groups) == ['a']
  with pytest.raises(NothingToLearn, match='1 of 2'):
    refuse_short(got, 2)
  assert refuse_short(got, 1) is got


def test_what_teaches():
  assert teaches(group('a', [0, 1]))
  assert not teaches(group('a', [1]))
  assert not teaches(group('a', []))
  # Equal outcomes, rewards apart by a penalty; and equal floats.
  failures = group('a', [0, 0], values=[-1.0, -1.5])
  assert not teaches(failures)
  assert teaches(failures, metric=lambda t: t.reward.value)
  sevens = group('a', [0, 0, 0], values=[0.7] * 3)
  assert not teaches(sevens, metric=lambda t: t.reward.value)


def test_failures_of_the_infrastructure_are_no_outcome():
  broken = group('a', [0], Status.INFRA_FAILURE).trajectories
  good = group('a', [1, 1])
  assert not teaches(Group(good.task, 0, good.trajectories + broken))


def test_it_chooses_as_the_loss_does():
  """`shaping.informative`, which leaves groups out without drawing others."""
  rng = np.random.default_rng(0)
  for _ in range(50):
    outcomes = rng.integers(0, 2, rng.integers(1, 5))
    zeros, ones = np.zeros(len(outcomes), int), np.ones(len(outcomes), bool)
    assert (
      teaches(group('a', outcomes)) == informative(outcomes, zeros, ones).all()
    )


def test_bounds_below_one_are_refused():
  with pytest.raises(ValueError, match='at least 1'):
    refill(lambda: [], wanted=0)
