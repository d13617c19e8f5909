"""Whose fault it was: a value where the policy's, an InfraError where not.

One test for each row of the table of failures, with the fault really made, on
each backend; then hostile programs that try to pass for a fault of the machine.
What `collect` makes of either is in tests/rollout.
"""

import dataclasses
import threading
import time

import hostile_programs
import pytest
from sandboxes import SPEC, backend_or_skip, freeze, kill_runner

from agentjax.env import word_problems
from agentjax.env.base import InfraError
from agentjax.env.sandbox import Call, CallStatus, open_sandbox
from agentjax.env.sandbox.spec import (
  Died,
  EngineUnavailable,
  HostDeadline,
  ImageMissing,
)
from agentjax.types import Status, Task, ToolCall, Turn, Verdict

AGAIN = Call(code='print("again")')


def acted(backend, open_sandbox, *programs, spec=SPEC):
  """What an environment answers to a policy that calls these, in order."""
  environment = word_problems.environment(
    spec=spec, backend=backend, open_sandbox=open_sandbox, timeout_s=1.0,
    max_calls=99,
  )  # fmt: skip
  environment.reset(Task('t', (), {'answer': '1'}))
  try:
    steps = []
    for code in programs:
      call = ToolCall('python', {'code': code})
      steps.append(environment.step(Turn('', Verdict.CALLS, calls=(call,))))
    reward = environment.verify(Status.TURN_LIMIT)
    return [s.observations[0].body for s in steps], reward
  finally:
    environment.close()


# ---- the policy's -----------------------------------------------------------

POLICYS = (
  ('import sys; sys.exit(3)', CallStatus.NONZERO),
  ('1 / 0', CallStatus.NONZERO),
  ('import os; os.kill(os.getpid(), 9)', CallStatus.SIGNAL),
  ('print("a wrong answer")', CallStatus.OK),
  ('import time; time.sleep(99)', CallStatus.TIMEOUT),
  ('import os; os.kill(os.getpid(), 19)', CallStatus.TIMEOUT),
  ('x = []\nwhile True: x.append(bytearray(1 << 22))', CallStatus.OOM),
  ('import os\nwhile True: os.fork()', CallStatus.PIDS),
  ('open("big", "wb").write(bytes(64 << 20))', CallStatus.DISK),
  ('import os\nwhile True: os.write(1, bytes(65536))', CallStatus.OUTPUT_CAP),
)


@pytest.mark.parametrize('code, status', POLICYS)
def test_what_the_policy_did_is_a_value(backend, code, status):
  """And the sandbox goes on: the next call answers."""
  with open_sandbox(SPEC, backend) as sandbox:
    result = sandbox.call(Call(code=code, timeout_s=1.0))
    assert result.status is status and result.alive
    assert sandbox.call(AGAIN).stdout == 'again\n'


def test_it_reads_what_it_did_and_is_paid_nothing(backend):
  spec = dataclasses.replace(SPEC, lifetime_s=600.0)
  programs = [code for code, _ in POLICYS]
  said, reward = acted(backend, None, *programs, 'print("on")', spec=spec)
  assert [s.rsplit('\n', 1)[-1] for s in said] == [
    'error: exit code 3',
    'error: ZeroDivisionError: division by zero',
    'error: ended by signal 9',
    'a wrong answer',
    'error: timed out after 1 s',
    'error: timed out after 1 s',
    'error: out of memory',
    'error: too many processes',
    'error: disk full',
    'error: too much output',
    'on',
  ]
  assert (reward.value, reward.success) == (0.0, False)


def test_a_runner_that_dies_of_the_policys_memory_is_the_policys(backend):
  """The kernel's own counters say so, and the episode is over."""
  with open_sandbox(SPEC, backend) as sandbox:
    if 'oom' not in sandbox.facts['counted']:
      pytest.skip('nothing counts kills for memory here')
    # One child is killed for memory; then the runner is, as the kernel may.
    script = 'python3 -c "bytearray(1 << 30)"; echo over > over; sleep 60'
    threading.Timer(3.0, kill_runner, (sandbox,)).start()
    call = Call(argv=['sh', '-c', script], timeout_s=60)
    result = sandbox.call(call)
    assert (result.status, result.alive) == (CallStatus.OOM, False)
    assert result.stdout == ''
    for again in (sandbox.call(AGAIN), sandbox.put({'x': b''})):
      assert (again.status, again.alive) == (CallStatus.OOM, False)
    assert sandbox.get(['x']).refused == {'x': 'the sandbox is gone'}


def test_the_end_of_its_lifetime_in_a_call_is_the_policys(backend):
  spec = dataclasses.replace(SPEC, lifetime_s=1.0)
  with open_sandbox(spec, backend) as sandbox:
    result = sandbox.call(Call(argv=['sleep', '60'], timeout_s=50))
    assert (result.status, result.alive) == (CallStatus.TIMEOUT, False)


# ---- the infrastructure's ---------------------------------------------------


@pytest.mark.parametrize('when', ['in a call', 'between calls'])
def test_a_runner_that_dies_for_no_reason_is_infrastructure(backend, when):
  with open_sandbox(SPEC, backend) as sandbox:
    assert sandbox.call(AGAIN).exit == 0
    if when == 'in a call':
      threading.Timer(0.3, kill_runner, (sandbox,)).start()
    else:
      kill_runner(sandbox)
      time.sleep(0.2)
    with pytest.raises(Died):
      sandbox.call(Call(argv=['sleep', '30'], timeout_s=30))
    for ask in (
      lambda: sandbox.call(AGAIN),
      lambda: sandbox.put({'x': b''}),
      lambda: sandbox.get(['x']),
    ):
      with pytest.raises(InfraError):
        ask()


def test_a_frozen_sandbox_is_infrastructure(backend):
  spec = dataclasses.replace(SPEC, grace_s=0.5)
  with open_sandbox(spec, backend) as sandbox:
    freeze(sandbox)
    with pytest.raises(HostDeadline):
      sandbox.call(Call(code='print(1)', timeout_s=0.3))


def test_no_engine_and_no_image_are_infrastructure(monkeypatch):
  spec = dataclasses.replace(SPEC, image='agentjax-none:1')
  backend_or_skip('docker')
  with pytest.raises(InfraError, match='agentjax-none:1'):
    open_sandbox(spec, 'docker')
  monkeypatch.setenv('DOCKER_HOST', 'unix:///nonexistent/docker.sock')
  with pytest.raises(InfraError, match='DOCKER_HOST'):
    open_sandbox(SPEC, 'docker')
  for error in (Died, HostDeadline, EngineUnavailable, ImageMissing):
    assert issubclass(error, InfraError)


def test_an_environment_passes_it_on_and_never_as_an_observation(backend):
  def opened():
    sandbox = open_sandbox(SPEC, backend)
    threading.Timer(0.3, kill_runner, (sandbox,)).start()
    return sandbox

  with pytest.raises(InfraError):
    acted(backend, opened, 'import time; time.sleep(.9)', 'print(1)')


# ---- a 0 never becomes a mask ----------------------------------------------


def attack(backend, calls):
  """Runs hostile calls, several in one sandbox; what did not go as it must."""
  wrong, sandbox, used = [], None, 0
  try:
    for i, call in enumerate(calls):
      if sandbox is None:
        sandbox, used = open_sandbox(SPEC, backend), 0
      try:
        found = _after(sandbox, call)
        used += 1
      except InfraError as error:
        found = f'{type(error).__name__}: {error}'
      if found:
        source = call.code or call.argv[-1]
        wrong.append(f'{i}: {found}\n{source[len(hostile_programs.HEAD) :]}')
      if found is not None or used == 15:
        sandbox.close()
        sandbox = None
  finally:
    if sandbox is not None:
      sandbox.close()
  return wrong


def _after(sandbox, call):
  """'' if the sandbox is gone by the policy's doing, None if all is well."""
  result = sandbox.call(call)
  if not result.alive:
    return ''
  again = sandbox.call(AGAIN)
  if again.stdout != 'again\n':
    return f'the next call: {again}'
  # These may be refused, as its files are its own, but they answer.
  assert sandbox.put({'probe/x': b'1'}).status in CallStatus
  found = sandbox.get(['probe/x'])
  assert set(found.files) | set(found.refused) == {'probe/x'}
  script = 'find /task /tmp /dev/shm -mindepth 1 -delete'
  sandbox.call(Call(argv=['sh', '-c', script], timeout_s=10))
  return None


def test_no_hostile_program_passes_for_infrastructure(backend):
  wrong = attack(backend, hostile_programs.programs(90))
  assert wrong == [], '\n'.join(wrong)


@pytest.mark.long
@pytest.mark.parametrize('seed', range(1, 4))
def test_no_hostile_program_does_whatever_the_seed(backend, seed):
  wrong = attack(backend, hostile_programs.programs(200, seed))
  assert wrong == [], '\n'.join(wrong)


HOSTILE_TALK = (
  'import os, signal\nos.kill(1, signal.SIGKILL)',
  'import os\nfor fd in range(3, 64):\n  try: os.write(fd, b"x" * 99)\n'
  '  except OSError: pass',
  'import os; os.closerange(3, 64)',
  'import os; os.kill(os.getpid(), 19)',
  'import sys; sys.stdout = sys.stderr = None; 1 / 0',
  'import sys; sys.excepthook = 7; 1 / 0',
  'import os\nwhile True: os.fork()',
  'x = []\nwhile True: x.append(bytearray(1 << 22))',
  'import os\nwhile True: os.write(2, bytes(65536))',
  'import builtins; del builtins.exec, builtins.compile',
  'import os; os.pread = os.read = os.write = None',
  'import signal\nfor n in range(1, 65):\n  try: signal.signal(n, None)\n'
  '  except (OSError, TypeError, ValueError): pass',
  'import threading, os, time\nthreading.Thread(target=lambda: '
  '(time.sleep(.1), os._exit(3))).start()',
)


@pytest.mark.parametrize('code', HOSTILE_TALK)
def test_no_hostile_session_passes_for_infrastructure(shared, code):
  with shared.session('python') as session:
    session.run('x = 1')
    first = session.run(code, timeout_s=0.5)
    second = session.run('print("again")', timeout_s=5.0)
    if session.alive:
      assert second.status is not CallStatus.GONE
    assert first.alive and second.alive
  with shared.session('python') as other:
    assert other.run('print("again")').stdout == 'again\n'
  assert shared.call(AGAIN).stdout == 'again\n'


def test_it_cannot_outlast_the_hosts_deadline_by_being_slow(backend):
  """All that a call can do to be late stays a timeout, well within the grace.

  A busy child, a stopped one, one that floods, and one whose death takes long
  because of what it holds.
  """
  spec = dataclasses.replace(SPEC, grace_s=4.0)
  codes = (
    'while True: pass',
    'import os; os.kill(os.getpid(), 19)',
    'import os\nfor _ in range(30):\n  if os.fork() == 0:\n'
    '    while True: os.sched_yield()\nwhile True: pass',
    'import mmap; m = mmap.mmap(-1, 100 << 20); m.write(bytes(100 << 20))\n'
    'import time; time.sleep(99)',
  )
  with open_sandbox(spec, backend) as sandbox:
    for code in codes:
      result = sandbox.call(Call(code=code, timeout_s=0.3))
      assert result.status is CallStatus.TIMEOUT and result.alive
    assert sandbox.call(AGAIN).stdout == 'again\n'


def test_every_attack_is_a_program():
  for kind in (*hostile_programs.KINDS, hostile_programs.ENDS):
    for fragment in kind:
      compile(hostile_programs.HEAD + fragment, 'attack', 'exec')
