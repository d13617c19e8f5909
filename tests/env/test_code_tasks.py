"""Code tasks: problems, their right solutions, and episodes with a judge."""

import functools

import numpy as np
import pytest
from sandboxes import SPEC

from agentjax.env import code_tasks
from agentjax.env.base import InfraError
from agentjax.env.code_problems import FAMILIES, TEST, TRAIN
from agentjax.env.demonstrate import Act, call, demonstrate
from agentjax.env.judge import Journal, nothing_if_tampered
from agentjax.env.sandbox import open_sandbox
from agentjax.types import Status

RIGHT = {
  # family: (numbers, arguments, answer), worked out by hand
  'weighted': ({'k': 3, 'm': 5}, (2, -1), 1),
  'clamp': ({'low': -2, 'high': 7}, (9,), 7),
  'multiples': ({'k': 3}, ([3, 4, -6, 0],), 3),
  'rotate': ({'k': 4}, ([1, 2, 3],), [2, 3, 1]),
  'shift': ({'k': 2}, ('xyz A!',), 'zab A!'),
  'digits': ({'k': 16}, (0x1F,), 16),
  'chunks': ({'k': 2}, ([1, 2, 3],), [[1, 2], [3]]),
  'every': ({'k': 1, 'm': 2}, ([5, 6, 7, 8],), [6, 8]),
}


def test_right_answers():
  assert set(RIGHT) == set(FAMILIES)
  for name, (numbers, arguments, answer) in RIGHT.items():
    task = FAMILIES[name].task(numbers)
    assert task.reference(*arguments) == answer
    assert set(numbers) == set(FAMILIES[name].ranges)


def test_splits_share_no_family():
  train = code_tasks.tasks('train', 200)
  test = code_tasks.tasks('test', 40)
  used = [{t.verify['family'] for t in tasks} for tasks in (train, test)]
  assert used == [{f.name for f in TRAIN}, {f.name for f in TEST}]
  assert len({t.id for t in train}) == 200


def test_tasks_are_a_pure_function():
  tasks = code_tasks.tasks('train', 50, seed=3)
  assert tasks == code_tasks.tasks('train', 50, seed=3)
  assert tasks[:20] == code_tasks.tasks('train', 20, seed=3)
  assert tasks != code_tasks.tasks('train', 50, seed=4)
  for arguments in (('dev', 1), ('train', -1), ('test', 1000)):
    with pytest.raises(ValueError):
      code_tasks.tasks(*arguments)


def test_no_right_answer_but_the_visible_ones_is_in_a_policys_reach():
  for task in (*code_tasks.tasks('train', 40), *code_tasks.tasks('test', 40)):
    given = code_tasks.given_files(task)
    source = FAMILIES[task.verify['family']].source(task.verify['values'])
    body = source.split('\n', 1)[1]
    assert all(body.encode() not in data for data in given.values())
    assert set(given) == {'solution.py', 'tests/test_solution.py'}
    for data in given.values():
      compile(data, 'given', 'exec')


@pytest.fixture
def make(backend):
  open_one = functools.partial(open_sandbox, SPEC, backend)
  return functools.partial(
    code_tasks.environment,
    spec=SPEC,
    open_policy=open_one,
    open_judge=open_one,
  )


def play(environment, task, *codes):
  def acts():
    for code in codes:
      yield call('python', code=code)
    yield Act(answer='done')

  return demonstrate(environment, task, acts()).reward


def test_the_expert_is_right(make):
  rng = np.random.default_rng(0)
  tasks = {t.verify['family']: t for t in code_tasks.tasks('train', 100)}
  tasks |= {t.verify['family']: t for t in code_tasks.tasks('test', 50)}
  for task in tasks.values():
    done = demonstrate(make(), task, code_tasks.expert(rng, task))
    assert done.reward.value == 1.0 and done.reward.success, task.id
    assert done.reward.parts['tampered'] == 0.0


def test_flaws_are_wrong(make):
  (task,) = code_tasks.tasks('train', 1)
  expert = code_tasks.expert(np.random.default_rng(0), task, flaws=1.0)
  reward = demonstrate(make(), task, expert).reward
  assert reward.value == 0.0 and not reward.success
  assert reward.parts['failed: wrong'] == 1.0


def test_the_policy_finds_a_stub_and_tests(make):
  (task,) = code_tasks.tasks('train', 1)
  code = """
import sys
sys.path[:0] = ['.', 'tests']
try:
  import test_solution
  test_solution.test_1()
except NotImplementedError:
  print('stub')
"""
  environment = make()
  environment.reset(task)
  step = environment.step(call('python', code=code).as_turn())
  assert step.observations[0].body == 'stub'
  environment.close()


def test_nothing_written_earns_nothing(make):
  (task,) = code_tasks.tasks('train', 1)
  reward = play(make(), task)
  assert reward.value == 0.0 and reward.parts['failed: missing'] == 1.0
  assert play(make(), task, 'print(1)').parts['failed: raised'] == 1.0


def test_tampering_is_recorded_and_can_cost_the_reward(make):
  (task,) = code_tasks.tasks('train', 1)
  source = FAMILIES[task.verify['family']].source(task.verify['values'])
  write = f'open("solution.py", "w").write({source!r})'
  edit = 'open("tests/test_solution.py", "a").write("# seen")'
  reward = play(make(), task, write, edit)
  assert (reward.value, reward.success) == (1.0, True)
  assert reward.parts['tampered'] == reward.parts['tampered: tests'] == 1.0
  reward = play(make(pay=nothing_if_tampered), task, write, edit)
  assert (reward.value, reward.success) == (0.0, True)


def test_the_verdict_is_settled_once_and_what_lies_there_counts(make, tmp_path):
  (task,) = code_tasks.tasks('train', 1)
  source = FAMILIES[task.verify['family']].source(task.verify['values'])
  environment = make(journal=str(tmp_path))
  environment.reset(task)
  write = call('python', code=f'open("solution.py", "w").write({source!r})')
  environment.step(write.as_turn())
  first = environment.verify(Status.TURN_LIMIT)
  assert first.value == 1.0
  with pytest.raises(InfraError, match='closed'):
    environment.step(write.as_turn())  # its sandbox is dead
  again = environment.verify(Status.TURN_LIMIT)
  assert (again.value, again.success) == (first.value, first.success)
  environment.close()
  assert len(list(tmp_path.rglob('*.json'))) == 1
  assert Journal(tmp_path)


def test_sandboxes_that_do_not_start_are_no_reward(make):
  def down():
    raise InfraError('engine down')

  (task,) = code_tasks.tasks('train', 1)
  environment = make(open_judge=down)
  with pytest.raises(InfraError, match='engine down'):
    play(environment, task, 'print(1)')
