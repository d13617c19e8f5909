"""Sandboxes on a Ray cluster: that they are such, and the cluster's faults.

The suite of all backends is run on it by `test_sandbox_fleet_suite.py`.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
import time

import pytest
from fleets import backend, cluster, needed  # noqa: F401
from sandboxes import SPEC

from agentjax.env.sandbox import (
  Call,
  CallStatus,
  SandboxBug,
  open_sandbox,
  owner,
  reap,
)
from agentjax.env.sandbox.pool import Pool
from agentjax.env.sandbox.spec import (
  Died,
  ImageMissing,
  SandboxUnavailable,
  StartFailed,
)

pytestmark = pytest.mark.xdist_group('fleet')


def wait_until(condition, seconds=10.0):
  end = time.monotonic() + seconds
  while not condition() and time.monotonic() < end:
    time.sleep(0.05)
  return condition()


def test_a_call_there_is_as_a_call_here(backend):  # noqa: F811
  with open_sandbox(SPEC, backend, role='judge') as sandbox:
    assert sandbox.call(Call(code='print(6 * 7)')).stdout == '42\n'
    wrong = sandbox.call(Call(argv=['sh', '-c', 'exit 3']))
    assert (wrong.status, wrong.exit) == (CallStatus.NONZERO, 3)
    slow = sandbox.call(Call(argv=['sleep', '60'], timeout_s=0.3))
    assert slow.status is CallStatus.TIMEOUT
    assert sandbox.put({'a/b': b'kept'}).status is CallStatus.OK
    found = sandbox.get(['a/b', 'none'])
    assert found.files == {'a/b': b'kept'} and set(found.refused) == {'none'}
    with pytest.raises(SandboxBug, match='path'):
      sandbox.get(['../x'])
  with pytest.raises(SandboxBug, match='closed'):
    sandbox.call(Call(code='1'))


def everything(sandbox):
  """What the protocol has beside calls, and what of it goes on elsewhere."""
  with_state = sandbox.session('python')
  assert with_state.run('x = 6').status is CallStatus.OK
  assert with_state.run('print(x * 7)').stdout == '42\n'
  with_state.close()
  assert sandbox.session('shell').run('echo $((1 + 1))').stdout == '2\n'
  assert sandbox.put({'a/b': b'kept'}).status is CallStatus.OK
  data, refused = sandbox.get_tar(['a'])
  assert data and refused == {}
  assert sandbox.put_tar(data).status is CallStatus.OK
  return sandbox.snapshot()


def test_all_of_the_protocol(backend):  # noqa: F811
  with open_sandbox(SPEC, backend) as sandbox:
    snapshot = everything(sandbox)
  with open_sandbox(SPEC, backend, snapshot=snapshot) as fork:
    assert fork.get(['a/b']).files == {'a/b': b'kept'}


def test_it_spreads_over_the_machines(backend):  # noqa: F811
  opened = [open_sandbox(SPEC, backend, 'fleet-test') for _ in range(4)]
  try:
    used = [sandbox.facts['fleet'] for sandbox in opened]
    assert sorted(used.count(node) for node in set(used)) == [2, 2]
    said = {s.call(Call(code='print(1)')).stdout for s in opened}
    assert said == {'1\n'}
  finally:
    for sandbox in opened:
      sandbox.close()


def pid_of(sandbox):
  name = sandbox.facts.get('container')
  if name is None:
    return sandbox.facts['pid']
  command = ['docker', 'inspect', '-f', '{{.State.Pid}}', name]
  return int(subprocess.check_output(command, text=True))


def lives(pid):
  return owner.start_time(pid) is not None


def test_an_actor_that_dies_is_infrastructure(backend):  # noqa: F811
  import ray

  sandbox = open_sandbox(SPEC, backend)
  pid = pid_of(sandbox)
  ray.kill(sandbox._machine.actor)
  with pytest.raises(Died, match='the actor that held the sandbox is gone'):
    sandbox.call(Call(code='print(1)'))
  with pytest.raises(Died):
    sandbox.call(Call(code='print(1)'))
  assert wait_until(lambda: not lives(pid))
  sandbox.close()
  # Another actor takes the place of that one.
  held = [open_sandbox(SPEC, backend) for _ in range(2)]
  assert {s.call(Call(code='print(1)')).stdout for s in held} == {'1\n'}
  for sandbox in held:
    sandbox.close()


def test_its_end_is_the_end_of_the_sandbox(backend):  # noqa: F811
  sandbox = open_sandbox(SPEC, backend)
  pid = pid_of(sandbox)
  assert lives(pid)
  sandbox.close()
  sandbox.close()
  assert wait_until(lambda: not lives(pid))


def test_what_no_machine_can_give(cluster):  # noqa: F811
  from agentjax.env.sandbox.fleet import open_fleet

  with pytest.raises(SandboxUnavailable, match="resource 'unobtainium'"):
    open_fleet(SPEC, resource='unobtainium')
  with pytest.raises(StartFailed, match='no reply of the fleet'):
    open_fleet(
      dataclasses.replace(SPEC, grace_s=-9.99), start_timeout_s=0.0
    ).close()
  with pytest.raises(ImageMissing, match='agentjax-none'):
    open_fleet(
      dataclasses.replace(SPEC, image='agentjax-none:1'), backend='docker'
    )


def test_a_pool_of_them(backend):  # noqa: F811
  with Pool(SPEC, backend, warm=1, starters=1) as pool:
    for i in range(2):
      with pool.acquire(f'e{i}') as sandbox:
        assert sandbox.call(Call(code=f'print({i})')).stdout == f'{i}\n'
        assert sandbox.facts['fleet']


DRIVER = """
import sys
from agentjax.env.sandbox import Call, SandboxSpec, open_sandbox
held = [open_sandbox(SandboxSpec(), 'fleet') for _ in range(2)]
print(*[s.facts.get('container') or s.facts['pid'] for s in held], flush=True)
script = 'setsid sleep 1234 & sleep 1234'
held[0].call(Call(argv=['sh', '-c', script], timeout_s=600))
"""


def test_nothing_is_left_after_kill_9_of_the_driver():
  needed()
  process = subprocess.Popen(
    [sys.executable, '-c', DRIVER],
    stdout=subprocess.PIPE, text=True,
    env={**os.environ, 'RAY_ADDRESS': ''},
  )  # fmt: skip
  names = process.stdout.readline().split()
  assert len(names) == 2
  time.sleep(0.5)
  process.kill()
  process.wait()

  def left():
    command = ['docker', 'ps', '-aq', '--filter', f'name={names[0]}']
    if names[0].startswith('agentjax'):
      return subprocess.check_output(command, text=True).split()
    return [n for n in names if pathlib.Path(f'/proc/{n}').exists()]

  assert wait_until(lambda: left() == [], 20)
  reap()
