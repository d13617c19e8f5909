"""pass@1, pass@k and their intervals, checked by hand."""

import itertools

import numpy as np
import pytest
import tiny_model
from fakes import IdChat, IdEnvironment, id_task, task, trajectory

from agentjax.evaluate import (
  EVALUATION_DRAW,
  evaluate,
  failure_rate,
  pass_at_k,
  rows,
  score,
)
from agentjax.rollout.episode import Limits
from agentjax.rollout.sampling import Sampling
from agentjax.tally import wilson
from agentjax.types import Group, Status


def group(name, *outcomes):
  """Trajectories that ended with a success (1), a failure (0), or a status."""
  made = []
  for outcome in outcomes:
    if isinstance(outcome, Status):
      t = trajectory([('p', [1])], name, status=outcome)
      made.append(t.append(reward=None))
    else:
      made.append(trajectory([('p', [1])], name, reward=float(outcome)))
  return Group(task(name), 0, tuple(made))


@pytest.mark.parametrize('n', [1, 3, 5])
def test_pass_at_k_is_the_share_of_draws_with_a_success(n):
  for c, k in itertools.product(range(n + 1), range(1, n + 1)):
    draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(np.mean([max(d) for d in draws]))


def test_pass_at_k_over_tasks_by_hand():
  found = score([group('a', 1, 0, 0, 0), group('b', 1, 1, 0, 0)])
  assert found.pass_at[1][0] == pytest.approx((1 / 4 + 1 / 2) / 2)
  # Of 6 pairs, 3 hold a's success and 5 one of b's.
  assert found.pass_at[2][0] == pytest.approx((3 / 6 + 5 / 6) / 2)
  assert found.pass_at[4][0] == 1.0
  assert sorted(found.pass_at) == [1, 2, 4]
  assert found.n == 8 and found.tasks == 2
  assert found.reward == pytest.approx(3 / 8)


def test_infrastructure_counts_as_a_failure_and_what_we_stopped_not_at_all():
  found = score(
    [
      group('a', 1, Status.INFRA_FAILURE),
      group('b', Status.ENVIRONMENT_ERROR, Status.PROMPT_TOO_LONG),
      group('c', 1, Status.ABORTED),
      group('d', Status.ABORTED, Status.ABORTED),
    ]
  )
  assert found.pass_at[1][0] == pytest.approx((1 / 2 + 0 + 1) / 3)
  assert found.n == 5 and found.tasks == 3
  assert found.reward == 1.0  # of the two that have one
  assert found.statuses == {
    'done': 2,
    'infra_failure': 1,
    'environment_error': 1,
    'prompt_too_long': 1,
    'aborted': 3,
  }
  # One of c's was stopped, so that there is no pass@2 over all tasks.
  assert sorted(found.pass_at) == [1]


def test_failure_rate():
  groups = [group('a', 1, Status.INFRA_FAILURE), group('b', 0, Status.ABORTED)]
  assert failure_rate(groups) == 1 / 4
  assert failure_rate([group('a', Status.ENVIRONMENT_ERROR)]) == 1.0
  assert failure_rate([]) == 0.0


def test_wilson_by_hand():
  # 8 of 10, as tables of the interval have it.
  assert wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
  assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
  assert wilson(1.0, 20)[1] == 1.0


def test_the_interval_is_over_tasks_not_over_trajectories():
  single = score([group(f't{i}', i % 2) for i in range(40)]).pass_at[1]
  assert single == pytest.approx((0.5, *wilson(0.5, 39)))
  # Ten times the samples of tasks that always end alike tell nothing new.
  copies = score([group(f't{i}', *[i % 2] * 10) for i in range(40)]).pass_at[1]
  assert copies == pytest.approx(single)
  # Where tasks are alike and samples differ, they do.
  mixed = score([group(f't{i}', *[0, 1] * 4, i % 2) for i in range(40)])
  low, high = mixed.pass_at[1][1:]
  assert 0.4 < low < 0.5 < high < 0.6


def test_intervals_hold_the_truth_as_often_as_they_say():
  rng = np.random.default_rng(0)
  held = []
  for _ in range(400):
    p = rng.beta(2, 2, 60)  # of each task; 0.5 on average
    wins = rng.random((60, 4)) < p[:, None]
    _, low, high = score(
      [group(f't{i}', *row.astype(int)) for i, row in enumerate(wins)]
    ).pass_at[1]
    held.append(low <= 0.5 <= high)
  assert 0.92 <= np.mean(held) <= 0.98


def test_as_it_stands_in_files():
  found = score([group('a', 1, 0)])
  p, low, high = found.pass_at[1]
  assert found.to_json() == {
    'pass@1': 0.5,
    'pass@1_interval': [low, high],
    'pass@2': 1.0,
    'pass@2_interval': list(found.pass_at[2][1:]),
    'n': 2,
    'tasks': 1,
    'reward': 0.5,
    'statuses': {'done': 2},
  }
  assert str(found) == f'pass@1 0.500 [{low:.3f}, {high:.3f}] of 2'
  evaluations = {
    'before': {'step': 3, **found.to_json()},
    'after': {'step': 9, **found.to_json()},
  }
  (row,) = rows(evaluations, 9)
  assert row['when'] == 'after' and row['success'] == p
  assert (row['low'], row['high']) == (low, high) and 'step' not in row


def test_evaluating_shares_no_key_with_training():
  engine = tiny_model.engine(stop_strings=list('aeiou'))
  options = {
    'engine': engine,
    'chat': IdChat(),
    'make_environment': IdEnvironment,
    'limits': Limits(turns=2, turn_tokens=8, model_tokens=16, context=64),
    'sampling': Sampling(),
    'seed': 0,
  }
  tasks = [id_task('a', [5, 6, 7]), id_task('b', [8, 9])]
  found, groups = evaluate(tasks, samples=3, **options)
  assert found.n == 6 and found.tasks == 2
  assert {g.draw for g in groups} == {EVALUATION_DRAW}
  again, _ = evaluate(tasks, samples=3, **options)
  assert again == found
