"""Word problems: templates, splits, and an expert with a real sandbox."""

import collections
import dataclasses
import functools
import re

import numpy as np
import pytest
from sandboxes import SPEC, backend_or_skip

from agentjax import audit
from agentjax.env import word_problems
from agentjax.env.base import InfraError
from agentjax.env.demonstrate import demonstrate
from agentjax.env.sandbox import SandboxUnavailable
from agentjax.env.word_templates import TEMPLATES, TEST
from agentjax.types import Status, ToolCall, Turn, Verdict


def numbers_in(tasks):
  return {
    int(n) for t in tasks for n in re.findall(r'\d+', t.messages[-1].content)
  }


def test_splits_share_neither_number_nor_template():
  train = word_problems.tasks('train', 3000)
  test = word_problems.tasks('test', 1000)
  assert not numbers_in(train) & numbers_in(test)
  used = [{t.metadata['template'] for t in ts} for ts in (train, test)]
  assert used[1] == set(TEST) and not used[0] & used[1]
  assert used[0] | used[1] == {t.name for t in TEMPLATES}
  assert len(TEMPLATES) >= 20 and len(used[0]) >= 15


def test_templates_are_all_different():
  for field in ('name', 'text'):
    assert len({getattr(t, field) for t in TEMPLATES}) == len(TEMPLATES)
  for template in TEMPLATES:
    for name in 'abc':
      assert '{' + name + '}' in template.text
      assert '{' + name + '}' in template.expression
    # The first step is a part of the whole.
    assert template.first in template.expression


def test_tasks_are_right():
  for split in word_problems.SPLITS:
    tasks = word_problems.tasks(split, 1000)
    assert len({t.id for t in tasks}) == 1000
    for task in tasks:
      text = task.messages[-1].content
      assert eval(task.metadata['expression']) == int(task.verify['answer']) > 0
      assert eval(task.metadata['first']) > 0
      assert all(10 <= n <= 999 for n in numbers_in([task]))
      assert numbers_in([task]) == set(task.metadata['numbers'])
      assert '{' not in text and text.endswith('?') and len(text) < 160
      assert '/' not in task.id and ' ' not in task.id


def test_tasks_are_a_pure_function():
  tasks = word_problems.tasks('train', 50, seed=3)
  assert tasks == word_problems.tasks('train', 50, seed=3)
  assert tasks[:20] == word_problems.tasks('train', 20, seed=3)
  assert tasks != word_problems.tasks('train', 50, seed=4)
  with pytest.raises(ValueError, match="split 'dev'"):
    word_problems.tasks('dev', 1)


def test_the_expert_succeeds(shared):
  rng = np.random.default_rng(0)
  per_template = collections.Counter()
  tasks = word_problems.tasks('train', 60) + word_problems.tasks('test', 20)
  for task in tasks:
    env = word_problems.environment(sandbox=shared)
    done = demonstrate(env, task, word_problems.expert(rng, task))
    assert done.reward.success and len(done.acts) == 2, done
    per_template[task.metadata['template']] += 1
  assert len(per_template) > 15


def test_flaws(shared):
  rng = np.random.default_rng(0)
  seen = collections.Counter()
  for task in word_problems.tasks('train', 120):
    env = word_problems.environment(sandbox=shared)
    done = demonstrate(env, task, word_problems.expert(rng, task, 1.0))
    first = done.acts[0][1][0].body if done.acts[0][1] else ''
    seen[len(done.acts), done.reward.success, first.split(':')[0]] += 1
  assert seen[3, True, '(no output)'] > 5
  assert seen[3, True, 'error'] > 5
  assert seen[1, False, ''] > 5
  wrong = sum(n for (_, right, _), n in seen.items() if not right)
  assert 40 < wrong < 110


def test_an_episode_of_its_own_sandbox(backend):
  (task,) = word_problems.tasks('test', 1)
  env = word_problems.environment(spec=SPEC, backend=backend, timeout_s=1)

  def step(code):
    call = ToolCall('python', {'code': code})
    result = env.step(Turn('', Verdict.CALLS, calls=(call,)))
    return result.observations[0].body

  env.reset(task)
  assert step('open("note", "w").write("kept")') == '(no output)'
  assert step('print(open("note").read())') == 'kept'
  assert step('while 1: pass') == 'error: timed out after 1 s'
  answer = f'{int(task.verify["answer"]):,}.0'
  turn = Turn(answer, Verdict.ANSWER, answer=answer)
  assert env.step(turn).status is Status.DONE
  assert env.verify(Status.DONE).success
  env.close()
  env.close()


def test_a_lost_sandbox_is_infrastructure(backend):
  (task,) = word_problems.tasks('test', 1)
  env = word_problems.environment(spec=SPEC, backend=backend)
  env.reset(task)
  call = ToolCall('python', {'code': 'print(1)'})
  turn = Turn('', Verdict.CALLS, calls=(call,))
  assert env.step(turn).observations[0].body == '1'
  tool = env._tools['python']
  tool._own._sandbox._channel.shutdown()
  with pytest.raises(InfraError):
    env.step(turn)
  env.close()


def test_a_spent_sandbox_is_the_policys(backend):
  (task,) = word_problems.tasks('test', 1)
  spec = dataclasses.replace(SPEC, lifetime_s=1.5)
  env = word_problems.environment(
    spec=spec, backend=backend, max_calls=1, timeout_s=1
  )
  env._tools['python']._timeout_s = 60
  env._max_calls = 2
  env.reset(task)
  for code in ('while 1: pass', 'print(1)'):
    call = ToolCall('python', {'code': code})
    (seen,) = env.step(Turn('', Verdict.CALLS, calls=(call,))).observations
    assert seen.body.startswith('error: timed out')
    assert seen.body.endswith('the sandbox is gone')
  assert not env.verify(Status.TOOL_FAILURE).success
  env.close()


def test_calls_that_can_outlast_the_sandbox_are_refused(shared):
  spec = dataclasses.replace(SPEC, lifetime_s=40.0)
  with pytest.raises(ValueError, match='4 calls of 10 s.*lifetime_s 40'):
    word_problems.environment(spec=spec)
  with pytest.raises(ValueError, match='60 calls of 10 s.*lifetime_s 600'):
    word_problems.environment(max_calls=60)
  with pytest.raises(ValueError, match='lifetime_s 600: raise'):
    word_problems.environment(sandbox=shared, timeout_s=200)


def test_no_such_tasks_are_refused():
  with pytest.raises(ValueError, match='n is -1: give 0 or more'):
    word_problems.tasks('train', -1)
  with pytest.raises(ValueError, match='seed is -1: give 0 or more'):
    word_problems.tasks('train', 1, seed=-1)


def test_refuses_where_no_code_can_run(monkeypatch):
  monkeypatch.setenv('DOCKER_HOST', 'unix:///nonexistent/docker.sock')
  monkeypatch.setenv('PATH', '/nonexistent')
  with pytest.raises(SandboxUnavailable, match='arithmetic'):
    word_problems.environment()
  assert word_problems.tasks('train', 1)


def test_default_backend_runs():
  backend_or_skip('auto')
  (task,) = word_problems.tasks('train', 1)
  rng = np.random.default_rng(0)
  done = demonstrate(
    word_problems.environment(), task, word_problems.expert(rng, task)
  )
  assert done.reward.success


def test_policies_without_a_model_earn_what_they_are_owed(shared):
  make = functools.partial(word_problems.environment, sandbox=shared)
  audit.check(word_problems, n=32, make_environment=make)


def test_policies_without_a_model_in_sandboxes_of_their_own(backend):
  make = functools.partial(
    word_problems.environment, spec=SPEC, backend=backend
  )
  audit.check(word_problems, n=2, make_environment=make)
