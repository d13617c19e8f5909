"""Turns of every kind, and what the environment makes of them."""

import json
import threading

import pytest

from agentjax.env import arithmetic
from agentjax.env.base import InfraError, ToolError
from agentjax.env.tool_environment import ToolEnvironment
from agentjax.types import (
  Message,
  Status,
  Task,
  ToolCall,
  ToolSpec,
  Turn,
  Verdict,
)

TASK = Task(
  't',
  (Message('user', '(47*12)+85='),),
  {'answer': 649},
  {'numbers': [47, 12, 85], 'operators': ['*', '+']},
)


def calls(*pairs):
  made = tuple(ToolCall(name, arguments) for name, arguments in pairs)
  return Turn('', Verdict.CALLS, calls=made)


def calculate(*expressions):
  return calls(*(('calculator', {'expression': e}) for e in expressions))


def answer(text):
  return Turn(text or '', Verdict.ANSWER, answer=text)


def malformed(problem='no closing brace'):
  return Turn('{', Verdict.MALFORMED, problem=problem)


def started(**options):
  env = arithmetic.environment(**options)
  opening = env.reset(TASK)
  assert [m.content for m in opening.messages] == ['(47*12)+85=']
  assert [t.name for t in opening.tools] == ['calculator']
  return env


def bodies(step):
  return [o.body for o in step.observations]


def test_two_calls_and_an_answer():
  env = started()
  first = env.step(calculate('47*12'))
  assert (bodies(first), first.status) == (['564'], None)
  assert first.observations[0].name == 'calculator'
  assert first.observations[0].role == 'tool'
  assert bodies(env.step(calculate('564+85'))) == ['649']
  last = env.step(answer(' 649 '))
  assert (last.observations, last.status) == ((), Status.DONE)
  reward = env.verify(Status.DONE)
  assert (reward.value, reward.success) == (1.0, True)
  assert reward.parts == {'answered': 1.0, 'calls': 2.0, 'failures': 0.0}
  env.close()
  env.close()


@pytest.mark.parametrize('text', ['650', '', None, '649 649', '564'])
def test_wrong_or_missing_answers_score_nothing(text):
  env = started()
  assert env.step(answer(text)).status is Status.DONE
  reward = env.verify(Status.DONE)
  assert (reward.value, reward.success) == (0.0, False)


def test_the_right_answer_scores_only_as_an_answer():
  env = started()
  env.step(calculate('564+85'))  # read, but never said
  for status in (Status.TURN_LIMIT, Status.TOKEN_LIMIT, Status.DONE):
    assert not env.verify(status).success
  env = started()
  env.step(answer('649'))
  assert not env.verify(Status.TOKEN_LIMIT).success


def test_parallel_calls_are_answered_each_in_order():
  env = started(max_calls=3)
  turn = calculate('1+1', 'oops', '2+2', '3+3')
  step = env.step(turn)
  assert bodies(step) == [
    '2',
    'error: only integers, brackets and + - *',
    '4',
    'error: no calls left, answer now',
  ]
  assert step.status is None


def test_unknown_tools_are_observations():
  env = started()
  step = env.step(calls(('calc', {'expression': '1+1'})))
  assert bodies(step) == ['error: no such tool, there is: calculator']
  assert step.observations[0].name is None  # not the policy's own text
  assert step.status is None
  assert env.step(answer('649')).status is Status.DONE
  assert env.verify(Status.DONE).success


@pytest.mark.parametrize(
  'turn, status',
  [
    (calculate('x'), Status.TOOL_FAILURE),
    (calls(('calc', {})), Status.TOOL_FAILURE),
    (calls(('calculator', {'a': 1})), Status.TOOL_FAILURE),
    (malformed(), Status.PARSE_FAILURE),
    (Turn('', Verdict.TRUNCATED), Status.PARSE_FAILURE),
  ],
)
def test_failures_are_forgiven_up_to_a_limit(turn, status):
  env = started(max_failures=2)
  for _ in range(2):
    step = env.step(turn)
    assert step.status is None and bodies(step)[0].startswith('error: ')
  step = env.step(turn)
  assert step.status is status and len(step.observations) == 1
  assert not env.verify(status).success
  with pytest.raises(RuntimeError, match='not running'):
    env.step(turn)


def test_malformed_turns_are_told_their_problem():
  assert bodies(started().step(malformed())) == ['error: no closing brace']


def test_calls_without_end_end():
  env = started(max_calls=2, max_failures=3)
  statuses = [env.step(calculate('1+1')).status for _ in range(6)]
  assert statuses == [None] * 5 + [Status.TOOL_FAILURE]


def test_state_keys_name_what_has_happened():
  def keys(*turns):
    env = started()
    return [env.step(turn).state_key for turn in turns]

  a = keys(calculate('47*12'), calculate('564+85'), answer('649'))
  b = keys(calculate('47*12'), calculate('1+1'), answer('649'))
  assert a[:2] == b[:2] and a[2] != b[2] and len(set(a)) == 3
  assert keys(malformed(), answer(''))[1] != keys(answer(''))[0]


def test_the_policy_cannot_break_its_environment():
  """Whatever JSON can say is a legal turn."""
  for value in json.loads('[null, 1e999, [], {}, "", {"a": {"b": [1]}}, true]'):
    for name in ('calculator', '', 'x' * 9999, '\ud800'):
      step = started().step(calls((name, value)))
      assert bodies(step)[0].startswith('error: ')
  assert bodies(started().step(calls())) == []


class Broken:
  spec = ToolSpec('broken', '', {})

  def __init__(self, error):
    self.error = error

  def __call__(self, arguments):
    raise self.error


def test_only_tool_errors_are_the_policys():
  turn = calls(('broken', {}))

  def env_of(error):
    env = ToolEnvironment([Broken(error)], lambda task, text: True)
    env.reset(TASK)
    return env

  assert bodies(env_of(ToolError('mind the gap')).step(turn)) == [
    'error: mind the gap'
  ]
  for error in (InfraError('gone'), ZeroDivisionError('a bug')):
    with pytest.raises(type(error)):
      env_of(error).step(turn)


def test_one_environment_is_one_episode():
  env = started()
  with pytest.raises(RuntimeError, match='one episode'):
    env.reset(TASK)
  with pytest.raises(RuntimeError, match='not running'):
    arithmetic.environment().step(answer('1'))
  with pytest.raises(ValueError, match='twice'):
    ToolEnvironment([Broken(None), Broken(None)], lambda task, text: True)


def test_many_at_once_do_not_mix():
  results = {}

  def play(number):
    env = started(max_calls=50)
    results[number] = [
      bodies(env.step(calculate(f'{number}*{i}')))[0] for i in range(30)
    ]

  threads = [threading.Thread(target=play, args=(n,)) for n in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert results == {n: [str(n * i) for i in range(30)] for n in range(8)}
