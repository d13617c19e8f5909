"""Infrastructure that fails: always an InfraError in time, nothing left."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
from sandboxes import SPEC, backend_or_skip, signal_runner

from agentjax.env import sandbox as sandboxes_module
from agentjax.env.base import InfraError
from agentjax.env.sandbox import (
  Call,
  CallStatus,
  SandboxBug,
  SandboxUnavailable,
  cgroup,
  choose_backend,
  open_sandbox,
  owner,
  reap,
)
from agentjax.env.sandbox.spec import (
  Died,
  EngineUnavailable,
  HostDeadline,
  ImageMissing,
)

OWNER = """
import sys, threading, time
from agentjax.env.sandbox import Call, SandboxSpec, open_sandbox
sandbox = open_sandbox(SandboxSpec(), sys.argv[1], run='kill-test')
busy = Call(argv=['sh', '-c', 'setsid sleep 1234 & sleep 1234'], timeout_s=99)
if sys.argv[2] == 'busy':
  threading.Thread(target=sandbox.call, args=(busy,), daemon=True).start()
  time.sleep(0.3)
print(sandbox.facts.get('container') or sandbox.facts['pid'], flush=True)
time.sleep(99)
"""


def exists(backend, name):
  if backend == 'docker':
    command = ['docker', 'ps', '-aq', '--filter', f'name={name}']
    return bool(subprocess.check_output(command, text=True).strip())
  return pathlib.Path(f'/proc/{name}').exists()


def wait_until(condition, seconds=10.0):
  end = time.monotonic() + seconds
  while not condition() and time.monotonic() < end:
    time.sleep(0.02)
  return condition()


def name_of(sandbox):
  return sandbox.facts.get('container') or sandbox.facts['pid']


@pytest.mark.parametrize('state', ['idle', 'busy'])
def test_nothing_is_left_after_kill_9_of_the_owner(backend, state):
  process = subprocess.Popen(
    [sys.executable, '-c', OWNER, backend, state],
    stdout=subprocess.PIPE,
    text=True,
  )
  name = process.stdout.readline().strip()
  assert exists(backend, name)
  process.kill()
  process.wait()
  # Without the reaper: the end of the stream is enough, in a call too.
  assert wait_until(lambda: not exists(backend, name), 5)
  mine = f':{process.pid}:'

  def running():
    for folder in pathlib.Path('/sys/fs/cgroup').glob('*/agentjax:*'):
      if mine in folder.name and (folder / 'cgroup.procs').read_text():
        return True
    return False

  assert wait_until(lambda: not running(), 5)
  reap()


def test_close_ends_everything_and_may_be_repeated(backend):
  sandbox = open_sandbox(SPEC, backend)
  name = name_of(sandbox)
  assert exists(backend, name)
  sandbox.close()
  assert wait_until(lambda: not exists(backend, name), 5)
  sandbox.close()
  with pytest.raises(SandboxBug, match='closed'):
    sandbox.call(Call(code='1'))


def test_close_from_another_thread_ends_a_call(backend):
  sandbox = open_sandbox(SPEC, backend)
  threading.Timer(0.3, sandbox.close).start()
  with pytest.raises(InfraError):
    sandbox.call(Call(argv=['sleep', '60'], timeout_s=60))


def test_lives_on_when_the_thread_that_opened_it_ends(backend):
  opened = []
  thread = threading.Thread(
    target=lambda: opened.append(open_sandbox(SPEC, backend))
  )
  thread.start()
  thread.join()
  time.sleep(0.3)
  with opened[0] as sandbox:
    assert sandbox.call(Call(code='print(1)')).stdout == '1\n'


def test_killed_from_outside_is_no_doing_of_the_policy(fresh):
  # A limit that was hit in an earlier call explains nothing.
  hog = fresh.call(Call(code='bytearray(1 << 30)'))
  assert hog.status is not CallStatus.OK
  time.sleep(0.05)
  threading.Timer(0.3, signal_runner, (fresh, 'kill', signal.SIGKILL)).start()
  start = time.monotonic()
  with pytest.raises(Died) as died:
    fresh.call(Call(argv=['sleep', '60'], timeout_s=60))
  assert time.monotonic() - start < 10
  if fresh.facts['backend'] == 'bwrap':
    assert 'exit code of bwrap: 137' in str(died.value)
  with pytest.raises(Died):  # and stays so
    fresh.call(Call(code='1'))


def test_a_child_that_was_killed_while_it_waited_costs_nothing():
  """It is forked before its call: the kernel may have needed its memory."""
  backend_or_skip('bwrap')
  with open_sandbox(SPEC, 'bwrap') as sandbox:
    for call in (Call(code='print(1)'), Call(argv=['echo', '1'])):
      runner = sandbox.facts['pid']
      listing = pathlib.Path(f'/proc/{runner}/task/{runner}/children')
      assert wait_until(listing.read_text)
      for pid in listing.read_text().split():
        os.kill(int(pid), signal.SIGKILL)
        state = pathlib.Path(f'/proc/{pid}/stat')
        assert wait_until(lambda s=state: s.read_text().split()[2] == 'Z')
      result = sandbox.call(call)
      assert (result.status, result.stdout) == (CallStatus.OK, '1\n')


def test_frozen_sandbox_is_noticed_by_the_host(backend):
  spec = dataclasses.replace(SPEC, grace_s=0.5)
  with open_sandbox(spec, backend) as sandbox:
    name = name_of(sandbox)
    signal_runner(sandbox, 'pause', signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(HostDeadline):
      sandbox.call(Call(code='print(1)', timeout_s=0.5))
    assert 1.0 <= time.monotonic() - start < 10
  assert wait_until(lambda: not exists(backend, name), 5)


def test_no_descriptor_and_no_thread_is_left(backend):
  def count():
    return len(os.listdir('/proc/self/fd')), threading.active_count()

  with open_sandbox(SPEC, backend):
    pass  # whatever is made once is made now
  before = count()
  for _ in range(3):
    with open_sandbox(SPEC, backend) as sandbox:
      sandbox.call(Call(code='1'))
  assert wait_until(lambda: count() <= before, 3), (count(), before)


def test_engine_that_does_not_answer(monkeypatch):
  monkeypatch.setenv('DOCKER_HOST', 'unix:///nonexistent/docker.sock')
  from agentjax.env.sandbox.docker import check_docker, open_docker

  for refused in (lambda: check_docker(SPEC), lambda: open_docker(SPEC)):
    with pytest.raises(EngineUnavailable, match='DOCKER_HOST'):
      refused()


def test_image_that_is_not_there():
  backend_or_skip('docker')
  from agentjax.env.sandbox.docker import check_docker, open_docker

  spec = dataclasses.replace(SPEC, image='agentjax-none:1')
  for refused in (lambda: check_docker(spec), lambda: open_docker(spec)):
    with pytest.raises(ImageMissing, match='agentjax-none:1.*build'):
      refused()


def test_falls_back_to_bubblewrap(monkeypatch):
  backend_or_skip('bwrap')
  monkeypatch.setenv('DOCKER_HOST', 'unix:///nonexistent/docker.sock')
  assert choose_backend(SPEC) == 'bwrap'


def test_says_why_nothing_can_run(monkeypatch):
  monkeypatch.setenv('DOCKER_HOST', 'unix:///nonexistent/docker.sock')
  monkeypatch.setenv('PATH', '/nonexistent')
  with pytest.raises(SandboxUnavailable) as caught:
    open_sandbox(SPEC)
  text = str(caught.value)
  assert 'docker: no Docker engine' in text
  assert 'install the package bubblewrap' in text
  assert 'calculator' in text
  with pytest.raises(ValueError, match='podman'):
    choose_backend(SPEC, 'podman')


def test_owner_is_judged_only_where_it_is_seen():
  own = owner.own_name()
  place, pid, start = own.split(':')
  assert not owner.is_dead(own)
  assert owner.is_dead(f'{place}:{pid}:1')  # the number is another's now
  assert owner.is_dead(f'{place}:4194303:{start}')
  assert not owner.is_dead(f'elsewhere:4194303:{start}')
  assert not owner.is_dead('') and not owner.is_dead('nonsense')


def test_reaper_takes_the_containers_of_the_dead_alone():
  backend_or_skip('docker')
  place, pid, _ = owner.own_name().split(':')
  labels = {
    'dead': {'agentjax.owner': f'{place}:{pid}:1', 'agentjax.run': 'x'},
    'living': {'agentjax.owner': owner.own_name(), 'agentjax.run': 'x'},
    'foreign': {'agentjax.owner': f'elsewhere:{pid}:1'},
    'unlabelled': {'other': 'label'},
  }
  import docker

  client = docker.APIClient(version='auto')
  ids = {}
  try:
    for name, label in labels.items():
      host = client.create_host_config(network_mode='none')
      ids[name] = client.create_container(
        SPEC.image, ['sleep', '60'], labels=label, host_config=host
      )['Id']
    client.start(ids['dead'])
    assert ids['dead'] in reap()
    left = {found['Id'] for found in client.containers(all=True)}
    assert ids['dead'] not in left
    assert {ids[n] for n in ('living', 'foreign', 'unlabelled')} <= left
  finally:
    for name in set(ids) - {'dead'}:
      client.remove_container(ids[name], force=True)
    client.close()


def test_the_first_sandbox_of_a_process_reaps(backend, monkeypatch):
  calls = []
  monkeypatch.setattr(sandboxes_module, 'reap', lambda: calls.append(1))
  sandboxes_module.reap_once.cache_clear()
  for _ in range(2):
    open_sandbox(SPEC, backend).close()
  assert calls == [1]


def test_reaper_takes_the_groups_of_the_dead_alone(monkeypatch):
  group = cgroup.make(SPEC)
  if group is None:
    pytest.skip('this host does not let us make control groups')
  command = cgroup.inside(group, ['sleep', '60'])
  process = subprocess.Popen(command)
  try:
    assert wait_until(
      lambda: all((f / 'cgroup.procs').read_text() for f in group.folders)
    )
    assert group.folders[0].name not in reap()
    assert process.poll() is None
    # This process alone: others' sandboxes may be running beside this test.
    own = owner.own_name()
    monkeypatch.setattr(owner, 'is_dead', lambda name: name == own)
    assert group.folders[0].name in cgroup.reap_groups()
    assert process.wait(5) == -signal.SIGKILL
    assert not any(folder.exists() for folder in group.folders)
  finally:
    process.kill()
    cgroup.remove(group)


def test_limits_without_control_groups(monkeypatch):
  """On hosts that allow none: each process has its own limits."""
  backend_or_skip('bwrap')
  monkeypatch.setattr(cgroup, 'make', lambda spec: None)
  with open_sandbox(SPEC, 'bwrap') as sandbox:
    assert sandbox.facts['limits'] == 'rlimit'
    hog = sandbox.call(Call(code='bytearray(1 << 30)'))
    assert hog.status is CallStatus.NONZERO
    assert hog.stderr.endswith('MemoryError\n')
    bomb = sandbox.call(Call(code='import os\nwhile True: os.fork()'))
    assert bomb.status is CallStatus.NONZERO
    assert 'Resource temporarily unavailable' in bomb.stderr
    assert bomb.reaped <= SPEC.pids
    assert sandbox.call(Call(code='print(1)')).stdout == '1\n'


def test_many_are_opened_and_used_at_once(backend):
  lines, threads = {}, []

  def work(number):
    with open_sandbox(SPEC, backend) as sandbox:
      sandbox.put({'n': str(number).encode()})
      code = 'print(open("n").read())'
      lines[number] = [sandbox.call(Call(code=code)).stdout for _ in range(5)]

  for number in range(6):
    threads.append(threading.Thread(target=work, args=(number,)))
    threads[-1].start()
  for thread in threads:
    thread.join()
  assert lines == {n: [f'{n}\n'] * 5 for n in range(6)}
