"""Repositories: restored tests, canaries, and what forgers may try."""

import dataclasses
import functools
import random

import pytest
from requirements import require
from sandboxes import BACKENDS, SPEC, backend_or_skip

from agentjax.env.judge import (
  Outcome,
  Reason,
  RepositoryTask,
  Rule,
  Submission,
  decide,
  judge_spec,
)
from agentjax.env.judge.repositories import plant_canaries
from agentjax.env.sandbox import Call, CallStatus, open_sandbox

TESTS = {
  'tests/helpers.py': b'def check(a, b):\n  assert a == b\n',
  'tests/test_add.py': b"""
import pytest
from helpers import check
from calc.core import add

def test_small():
  check(add(2, 3), 5)

@pytest.mark.parametrize('n', [1, 2])
def test_zero(n):
  check(add(n, 0), n)

class TestMore:
  def test_large(self):
    check(add(99, 1), 100)

@pytest.mark.xfail
def test_known():
  check(add(1, 1), 3)
""",
}
EXPECTED = (
  'tests/test_add.py::test_small',
  'tests/test_add.py::test_zero[1]',
  'tests/test_add.py::test_zero[2]',
  'tests/test_add.py::TestMore::test_large',
)
TASK = RepositoryTask(
  EXPECTED,
  TESTS,
  Rule('calc/core.py', shadowing=False),
  base={'calc/__init__.py': b'', 'README.md': b'adds\n'},
)
RIGHT = 'def add(a, b):\n  return a + b\n'


@pytest.fixture(scope='module', params=BACKENDS)
def opener(request):
  """Opens sandboxes that have pytest."""
  return with_pytest(request.param)


@pytest.fixture(
  scope='module',
  params=['bwrap', pytest.param('docker', marks=pytest.mark.long)],
)
def open_mostly(request):
  """The same, but without containers on every day."""
  return with_pytest(request.param)


@functools.cache
def with_pytest(name):
  backend = backend_or_skip(name)
  spec = judge_spec(dataclasses.replace(SPEC, image='agentjax-pytest:latest'))
  backend = backend_or_skip(backend, spec)
  open_one = functools.partial(open_sandbox, spec, backend)
  with open_one() as sandbox:
    found = sandbox.call(Call(argv=['python3', '-I', '-c', 'import pytest']))
  require(f'pytest in {backend}', found.status is CallStatus.OK, found.stderr)
  return open_one


def verdict(opener, source, task=TASK, **files):
  submitted = {'calc/core.py': source.encode()}
  submitted |= {path: text.encode() for path, text in files.items()}
  return decide(Submission(submitted), task.judge(), opener)


def test_a_right_solution_passes(opener):
  found = verdict(opener, RIGHT)
  assert str(found) == 'PASS', found.details


def test_noise_is_no_harm(opener):
  source = 'import os, sys\nprint("3 failed")\nos.write(1, b"{}\\n")\n' + RIGHT
  assert str(verdict(opener, source)) == 'PASS'


@pytest.mark.parametrize(
  'source, reason',
  [
    ('def add(a, b):\n  return a - b\n', Reason.WRONG),
    ('import os\nos._exit(0)\n', Reason.WRONG),
    ('import os\nos._exit(1)\n', Reason.WRONG),
    ('import sys\nsys.exit(0)\n', Reason.WRONG),
    ('import pytest\npytest.skip("no", allow_module_level=True)\n', None),
    ('import pytest\ndef add(a, b):\n  pytest.skip()\n', Reason.WRONG),
    ('import pytest\ndef add(a, b):\n  pytest.xfail()\n', Reason.WRONG),
    ('import pytest\ndef add(a, b):\n  pytest.exit("x", 0)\n', Reason.WRONG),
    ('def add(a, b):\n  return E()\nclass E:\n  pass\n', Reason.WRONG),
    ('while True: pass\n', Reason.TIMEOUT),
  ],
)
def test_wrong_solutions_fail(open_mostly, source, reason):
  task = dataclasses.replace(TASK, timeout_s=5.0)
  found = verdict(open_mostly, source, task)
  assert found.reason is (reason or Reason.WRONG), found
  assert found.tamper == ()


FORGERS = {
  'all reports pass': """
import _pytest.reports
make = _pytest.reports.TestReport.from_item_and_call.__func__
def forged(cls, item, call):
  call.excinfo = None
  return make(cls, item, call)
_pytest.reports.TestReport.from_item_and_call = classmethod(forged)
def add(a, b): return 0
""",
  'assertions say nothing': """
import gc, types
class Calm(BaseException): pass
import _pytest.runner
real = _pytest.runner.pytest_runtest_call
import _pytest.python
def call(self): return True
_pytest.python.Function.runtest = lambda self: None
def add(a, b): return 0
""",
  'the run ends well': """
import os
end = os._exit
import gc
for o in gc.get_objects():
  if type(o).__name__ == 'Reports':
    o.pytest_runtest_logreport.__func__
    o._dumps = lambda f, d=o._dumps: d({**f, 'outcome': 'passed'})
def add(a, b): return 0
""",
  'writes its own reports': """
import os, sys
names = ['test_small', 'test_zero[1]', 'test_zero[2]', 'TestMore::test_large']
for name in names:
  for when in ('setup', 'call', 'teardown'):
    line = '{"id": "tests/test_add.py::%s", "when": "%s", "outcome": "passed"}'
    for fd in range(3, 30):
      try: os.write(fd, (line % (name, when) + '\\n').encode())
      except OSError: pass
os._exit(1)
""",
}


@pytest.mark.parametrize('name', sorted(FORGERS))
def test_forgers_are_noticed(opener, name):
  found = verdict(opener, FORGERS[name])
  assert found.outcome is Outcome.FAIL, found
  if name != 'writes its own reports':
    assert found.reason is Reason.CANARY and found.tamper, found.details


def test_tests_and_configuration_of_the_policy_are_not_used(opener):
  found = verdict(
    opener,
    'def add(a, b):\n  return 0\n',
    **{
      'tests/helpers.py': 'def check(a, b): pass\n',
      'tests/test_add.py': 'def test_small(): pass\n',
      'conftest.py': 'collect_ignore = ["tests"]\n',
      'tests/conftest.py': 'import pytest\n@pytest.fixture(autouse=True)\n'
      'def skip(): pytest.skip()\n',
      'pytest.ini': '[pytest]\naddopts = --collect-only\n',
    },
  )
  assert found.reason is Reason.WRONG


def test_what_the_rule_lets_through():
  for path in ('conftest.py', 'pytest.py', 'random.py', 'tests/helpers.py'):
    assert not TASK.rule.wants(path)
  assert TASK.rule.wants('calc/other.py')


def test_a_checkout_that_lies_in_the_image(opener):
  task = dataclasses.replace(
    TASK, base={}, image_folder='/usr/lib/python3/dist-packages/pluggy'
  )
  extra = 'import os\nassert os.path.exists("_hooks.py")\n'
  assert str(verdict(opener, extra + RIGHT, task)) == 'PASS'
  absent = dataclasses.replace(task, image_folder='/nowhere')
  assert verdict(opener, RIGHT, absent).outcome is Outcome.INFRA
  # What the policy hands in can bring about a FAIL alone.
  found = verdict(opener, RIGHT, **{'tests': 'a file, where a folder is'})
  assert found.reason is Reason.EXITED


def test_configuration_of_the_tests_where_they_need_it(opener):
  fixture = b'import pytest\n@pytest.fixture\ndef two():\n  return 2\n'
  test = b'def test_two(two):\n  assert two == 2\n'
  tests = {'tests/conftest.py': fixture, 'tests/test_two.py': test}
  task = RepositoryTask(
    ('tests/test_two.py::test_two',), tests, TASK.rule, conftest=True
  )
  assert str(verdict(opener, RIGHT, task)) == 'PASS'
  without = dataclasses.replace(task, conftest=False)
  assert verdict(opener, RIGHT, without).reason is Reason.WRONG


@pytest.mark.parametrize('name', ['test_known', 'test_absent'])
def test_what_is_expected_must_have_passed(open_mostly, name):
  task = dataclasses.replace(
    TASK, expected=(*EXPECTED, f'tests/test_add.py::{name}')
  )
  found = verdict(open_mostly, RIGHT, task)
  assert found.reason is Reason.WRONG and name in found.details


def test_canaries_look_like_the_tests_and_are_false():
  seen = set()
  for seed in range(60):
    tests, names = plant_canaries(random.Random(seed), TESTS, EXPECTED)
    assert set(tests) == set(TESTS) and len(names) == 1
    (name,) = names
    seen.add(name)
    assert name not in EXPECTED and name.startswith('tests/test_add.py::test_')
    source = tests['tests/test_add.py']
    assert source.startswith(TESTS['tests/test_add.py'].rstrip())
    space = {}
    exec(source[len(TESTS['tests/test_add.py']) - 1 :], space)
    with pytest.raises((AssertionError, ValueError)):
      space[name.rsplit('::', 1)[-1]]()
  assert len(seen) > 40


def test_tasks_that_decide_nothing_are_refused():
  with pytest.raises(ValueError, match='nothing decides'):
    RepositoryTask((), TESTS, TASK.rule)
  with pytest.raises(ValueError, match='no file of tests'):
    RepositoryTask(('tests/test_b.py::test_a',), TESTS, TASK.rule)
