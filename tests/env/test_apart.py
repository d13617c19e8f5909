"""Functions in processes that may be killed."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from agentjax.env.apart import Apart, Exhausted
from agentjax.env.base import InfraError

HERE = 'tests_apart_functions'
FUNCTIONS = """
import os, signal, time, sys

def add(a, b):
  print('noise')
  return a + b

def power(a, b):
  return len(str(a ** b))

def hoard(n):
  return len([0] * n)

def nap(s):
  time.sleep(s)

def die(number):
  os.kill(os.getpid(), number)

def die_once(path, number):
  try:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL))
  except FileExistsError:
    return 'second time'
  os.kill(os.getpid(), number)

def fail():
  raise KeyError('a fault')

def nest(n):
  return nest(n + 1)

def long():
  return 'x' * (2 << 20)

def pid():
  return os.getpid()
"""


@pytest.fixture
def apart(tmp_path, monkeypatch):
  (tmp_path / f'{HERE}.py').write_text(FUNCTIONS)
  monkeypatch.syspath_prepend(tmp_path)
  made = []

  def make(name, **options):
    options = {'workers': 1, 'cpu_s': 1, 'wall_s': 60} | options
    made.append(Apart(f'{HERE}:{name}', **options))
    return made[-1]

  yield make
  for one in made:
    one.close()


def test_values_come_back_whatever_is_printed(apart):
  add = apart('add')
  assert add(1, 2) == 3 and add('ä', '\ud800') == 'ä\ud800'


def test_one_process_serves_many_calls(apart):
  pid = apart('pid')
  assert pid() == pid() != os.getpid()


def test_endless_work_in_c_is_ended_and_the_next_call_is_served(apart):
  power = apart('power')
  began = time.monotonic()
  with pytest.raises(Exhausted, match='processor time'):
    power(9, 9**9)
  assert time.monotonic() - began < 30
  assert power(2, 10) == 4


def test_memory_is_bounded(apart):
  with pytest.raises(Exhausted, match='memory'):
    apart('hoard', memory_bytes=1 << 30)(1 << 28)


def test_endless_recursion_is_the_argument_s_doing(apart):
  with pytest.raises(Exhausted, match='nested'):
    apart('nest')(0)


def test_waiting_without_work_is_the_infrastructure_s(apart):
  with pytest.raises(InfraError, match='used no processor'):
    apart('nap', wall_s=2)(60)


def test_a_crash_is_tried_again_and_then_the_argument_s_doing(apart, tmp_path):
  once = apart('die_once')
  assert once(str(tmp_path / 'a'), signal.SIGSEGV) == 'second time'
  with pytest.raises(Exhausted, match='SIGSEGV'):
    apart('die')(signal.SIGSEGV)


def test_kills_from_outside_are_the_infrastructure_s(apart, tmp_path):
  once = apart('die_once')
  assert once(str(tmp_path / 'a'), signal.SIGKILL) == 'second time'
  with pytest.raises(InfraError, match='outside'):
    apart('die')(signal.SIGKILL)


def test_a_fault_of_the_function_is_neither(apart):
  fail = apart('fail')
  with pytest.raises(RuntimeError, match='a fault'):
    fail()
  with pytest.raises(RuntimeError, match='bytes'):
    apart('long')()


@pytest.mark.parametrize(
  ('function', 'options', 'says'),
  [
    ('no_such_module:f', {}, 'no_such_module'),
    (f'{HERE}:no_such_function', {}, 'no_such_function'),
    (f'{HERE}:pid', {'imports': ['no_such_package']}, 'no_such_package'),
  ],
)
def test_a_function_that_is_not_there_is_no_answer(
  apart, function, options, says
):
  """A grader whose package is missing must not make every answer wrong."""
  with Apart(function, workers=1, **options) as missing:
    for _ in range(2):
      with pytest.raises(RuntimeError, match=f'does not start(.|\n)*{says}'):
        missing()


def test_no_more_processes_than_workers_and_each_call_its_own_answer(apart):
  add, found = apart('add', workers=2), {}

  def ask(i):
    found[i] = add(i, 1000)

  threads = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
  for t in threads:
    t.start()
  assert len(add._running) <= 2
  for t in threads:
    t.join(60)
  assert found == {i: i + 1000 for i in range(20)}


def test_waiting_for_a_worker_has_an_end(apart):
  nap = apart('nap', wall_s=3)
  thread = threading.Thread(
    target=lambda: pytest.raises(InfraError, nap, 60), daemon=True
  )
  thread.start()
  time.sleep(0.2)
  nap._wall_s = 0.5
  with pytest.raises(InfraError, match='came free'):
    nap(0)
  thread.join(30)


def test_closing_ends_the_workers_and_refuses_calls(apart):
  pid = apart('pid')
  process = pid()
  pid.close()
  pid.close()
  with pytest.raises(ProcessLookupError):
    os.kill(process, 0)
  with pytest.raises(RuntimeError, match='closed'):
    pid()


def test_workers_end_with_whoever_started_them(tmp_path):
  (tmp_path / f'{HERE}.py').write_text(FUNCTIONS)
  code = (
    'import os, sys, signal\n'
    f'sys.path.insert(0, {str(tmp_path)!r})\n'
    'from agentjax.env.apart import Apart\n'
    f'print(Apart("{HERE}:pid")(), flush=True)\n'
    'os.kill(os.getpid(), signal.SIGKILL)'
  )
  done = subprocess.run(
    [sys.executable, '-c', code],
    env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
    capture_output=True,
    text=True,
    timeout=60,
  )
  worker = int(done.stdout)
  for _ in range(100):
    if not os.path.exists(f'/proc/{worker}'):
      return
    with open(f'/proc/{worker}/stat') as file:
      if file.read().rsplit(')', 1)[1].split()[0] == 'Z':
        return  # ended; whoever inherited it has yet to take note
    time.sleep(0.1)
  raise AssertionError(f'worker {worker} is alive')


def test_bad_bounds_are_refused():
  with pytest.raises(ValueError, match='above 0'):
    Apart('a:b', workers=0)
