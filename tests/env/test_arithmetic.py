"""Arithmetic: tasks, splits, and experts that really act."""

import collections
import re
import time

import numpy as np
import pytest

from agentjax import audit
from agentjax.env import arithmetic
from agentjax.env.demonstrate import Act, demonstrate
from agentjax.types import Status


def numbers_in(tasks):
  return {
    int(n) for t in tasks for n in re.findall(r'\d+', t.messages[-1].content)
  }


@pytest.mark.parametrize('calls', [1, 2])
def test_splits_share_no_operand(calls):
  train = arithmetic.tasks('train', 3000, seed=1, calls=calls)
  test = arithmetic.tasks('test', 500, seed=1, calls=calls)
  assert not numbers_in(train) & numbers_in(test)
  # Every number of a split is used, so that the test above can fail.
  assert numbers_in(train) == set(arithmetic.operands('train'))
  assert numbers_in(test) == set(arithmetic.operands('test'))


def test_operands_are_a_fixed_partition():
  train, test = (set(arithmetic.operands(s)) for s in arithmetic.SPLITS)
  assert train | test == set(range(10, 100)) and not train & test
  wide = [set(arithmetic.operands(s, 999)) for s in arithmetic.SPLITS]
  assert wide[0] | wide[1] == set(range(10, 1000)) and not wide[0] & wide[1]
  assert train <= wide[0] and test <= wide[1]
  assert sorted(test) == [
    14, 21, 23, 28, 30, 34, 40, 41, 46, 48, 49, 50, 51, 52, 55, 61, 64, 78, 82,
    88, 96, 99,
  ]  # fmt: skip
  with pytest.raises(ValueError, match="split 'dev'"):
    arithmetic.operands('dev')


@pytest.mark.parametrize('calls', [1, 2])
def test_tasks_are_right_and_unambiguous(calls):
  tasks = arithmetic.tasks('train', 2000, calls=calls)
  assert len({t.id for t in tasks}) == len(tasks)
  assert len({t.messages[-1].content for t in tasks}) == len(tasks)
  pattern = {1: r'\d\d[-+*]\d\d=', 2: r'\(\d\d[-+*]\d\d\)[-+*]\d\d='}[calls]
  for task in tasks:
    text = task.messages[-1].content
    assert re.fullmatch(pattern, text)
    assert task.verify['answer'] == eval(text[:-1]) >= 0
    if calls == 2:
      assert eval(text[1 : text.index(')')]) >= 0
    assert '/' not in task.id and ' ' not in task.id
  forms = collections.Counter(
    re.sub(r'\d', '', t.messages[-1].content) for t in tasks
  )
  assert len(forms) == {1: 3, 2: 9}[calls]
  assert min(forms.values()) > len(tasks) / 15


def test_tasks_are_a_pure_function():
  tasks = arithmetic.tasks('train', 50, seed=3)
  assert tasks == arithmetic.tasks('train', 50, seed=3)
  assert tasks[:20] == arithmetic.tasks('train', 20, seed=3)
  assert tasks != arithmetic.tasks('train', 50, seed=4)
  assert arithmetic.tasks('train', 0) == []
  # A change here is a change of every recorded experiment.
  assert [t.messages[0].content for t in arithmetic.tasks('train', 3)] == [
    '(35*45)+29=',
    '(72+54)*92=',
    '(20*33)-37=',
  ]


def test_more_tasks_than_there_are():
  with pytest.raises(ValueError, match='ask for fewer'):
    arithmetic.tasks('test', 1300, calls=1)
  with pytest.raises(ValueError, match='calls is 3'):
    arithmetic.tasks('test', 1, calls=3)


@pytest.mark.parametrize(
  ('options', 'said'),
  [
    ({'n': -1}, 'n is -1: give 0 or more'),
    ({'n': 3, 'seed': -1}, 'seed is -1: give 0 or more'),
    ({'n': 4096, 'least': 9, 'most': 8}, 'least 9 exceeds most 8: swap them'),
    ({'n': 4096, 'least': 999_999}, 'found 0 different tasks'),
    ({'n': 3, 'largest': 9}, "largest is 9: split 'train' has no operand"),
  ],
)
def test_no_such_tasks_are_refused_at_once(options, said):
  began = time.process_time()
  with pytest.raises(ValueError, match=said):
    arithmetic.tasks('train', **options)
  assert time.process_time() - began < 5


def test_system_message():
  (task,) = arithmetic.tasks('test', 1, system='Use the tool.')
  assert [m.role for m in task.messages] == ['system', 'user']


@pytest.mark.parametrize('calls', [1, 2])
def test_the_expert_succeeds(calls):
  rng = np.random.default_rng(0)
  for task in arithmetic.tasks('train', 200, calls=calls):
    done = demonstrate(
      arithmetic.environment(), task, arithmetic.expert(rng, task)
    )
    assert done.reward.success and done.status is Status.DONE
    assert len(done.acts) == calls + 1
    assert done.reward.parts['calls'] == calls
    # What is answered was read, not known.
    (observation,) = done.acts[-2][1]
    assert done.acts[-1][0] == Act(answer=observation.body)


@pytest.mark.parametrize('calls', [1, 2])
def test_flaws_are_of_many_kinds_and_some_are_put_right(calls):
  rng = np.random.default_rng(0)
  seen = collections.Counter()
  successes = 0
  for task in arithmetic.tasks('train', 600, calls=calls):
    done = demonstrate(
      arithmetic.environment(), task, arithmetic.expert(rng, task, 1.0)
    )
    successes += done.reward.success
    errors = [o.body for _, os in done.acts for o in os if 'error' in o.body]
    seen[(len(done.acts), done.reward.success, *errors)] += 1
    assert done.status is Status.DONE
    if errors:
      assert done.reward.success
  assert 0.1 < successes / 600 < 0.9
  assert seen[(1, False)] > 20  # answers without calling
  kinds = {key[2:] for key in seen}
  assert ('error: cannot read the expression',) in kinds
  assert ('error: no such tool, there is: calculator',) in kinds
  if calls == 2:
    assert ('error: 2 operations, at most 1 a call',) in kinds
    assert seen[(2, False)] > 20  # answers the first result


def test_flaws_come_as_often_as_they_are_asked_for():
  rng = np.random.default_rng(0)
  plain = 0
  tasks = arithmetic.tasks('train', 500)
  for task in tasks:
    env = arithmetic.environment()
    done = demonstrate(env, task, arithmetic.expert(rng, task, 0.3))
    plain += [len(done.acts), done.reward.success] == [3, True]
  # Some flaws change nothing, such as the order of a sum.
  assert 0.65 < plain / 500 < 0.80


def test_demonstrations_are_a_function_of_the_generator():
  (task,) = arithmetic.tasks('train', 1)

  def acts(seed):
    rng = np.random.default_rng(seed)
    return [
      demonstrate(
        arithmetic.environment(), task, arithmetic.expert(rng, task, 0.5)
      ).acts
      for _ in range(20)
    ]

  assert acts(0) == acts(0) != acts(1)


def test_expert_that_stops_too_early():
  def silent():
    return
    yield

  (task,) = arithmetic.tasks('train', 1)
  with pytest.raises(RuntimeError, match='after 0 acts'):
    demonstrate(arithmetic.environment(), task, silent())


def test_results_stay_within_bounds():
  for task in arithmetic.tasks('test', 300, least=10, most=9999):
    a, b, c = task.metadata['numbers']
    first, second = task.metadata['operators']
    on_the_way = eval(f'{a}{first}{b}')  # our own text, not a policy's
    assert 10 <= on_the_way <= 9999
    assert task.verify['answer'] == eval(f'({a}{first}{b}){second}{c}')
    assert 10 <= task.verify['answer'] <= 9999
  with pytest.raises(ValueError, match='results of 0 to 5 in split'):
    arithmetic.tasks('test', 10, calls=2, most=5)


@pytest.mark.parametrize('calls', [1, 2])
def test_policies_without_a_model_earn_what_they_are_owed(calls):
  tasks = [
    task
    for split in arithmetic.SPLITS
    for task in arithmetic.tasks(split, 100, calls=calls)
  ]
  audit.check(arithmetic, tasks=tasks)
