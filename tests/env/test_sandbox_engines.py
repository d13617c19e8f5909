"""Engines that fail: typed, in time, and another one is used meanwhile."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time

import docker
import episodes
import pytest
from disks import small_disk
from own_engine import OwnEngine, needed, own_engine  # noqa: F401
from requirements import require
from sandboxes import SPEC, backend_or_skip, freeze

from agentjax.env.base import InfraError
from agentjax.env.sandbox import Call, CallStatus, journal, open_sandbox, reap
from agentjax.env.sandbox.docker import open_docker
from agentjax.env.sandbox.engines import Engine, Engines
from agentjax.env.sandbox.owner import UNTAGGED
from agentjax.env.sandbox.pool import Pool
from agentjax.env.sandbox.spec import (
  DiskPressure,
  EngineForbidden,
  EngineUnavailable,
  HostDeadline,
  ImageMissing,
  PoolExhausted,
  RuntimeMissing,
)

FLOOR = 64 << 20

# One engine for all of them, in one process.
pytestmark = pytest.mark.xdist_group('own_engine')


def wait_until(condition, seconds=10.0):
  end = time.monotonic() + seconds
  while not condition() and time.monotonic() < end:
    time.sleep(0.02)
  return condition()


def processes_of(container_id):
  """Processes in the control groups of a container."""
  out = []
  for path in pathlib.Path('/proc').glob('[0-9]*/cgroup'):
    with contextlib.suppress(OSError):
      if container_id in path.read_text():
        out.append(path.parent.name)
  return out


def id_of(engine, sandbox):
  name = sandbox.facts['container']
  return engine.docker('inspect', '-f', '{{.Id}}', name).stdout.strip()


# ---- which engine ----------------------------------------------------------


class Fake(Engine):
  def __init__(self, host, load=0):
    super().__init__(host)
    self.count(load)


def test_the_least_loaded_engine_is_first(monkeypatch):
  engines = Engines(['tcp://a:1', 'tcp://b:1', 'tcp://c:1'])
  for engine, load in zip(engines.all, (2, 1, 3), strict=True):
    engine.count(load)
  assert next(engines.ordered()).host == 'tcp://b:1'
  engines.all[2]._facts = {'NCPU': 64}  # 3 sandboxes on 64 processors
  assert next(engines.ordered()).host == 'tcp://c:1'
  with pytest.raises(ValueError, match='a host stands twice'):
    Engines(['tcp://a:1', 'tcp://a:1'])


def test_one_that_fails_is_left_aside_longer_and_longer():
  engines = Engines(['tcp://a:1', 'tcp://b:1'], base_s=10, most_s=35, seed=3)
  a, b = engines.all
  rests = []
  for _ in range(4):
    engines.note(a, EngineUnavailable('down'))
    rests.append(engines._aside[a].until - time.monotonic())
    assert next(engines.ordered()) is b
  for rest, base in zip(rests, (10, 20, 35, 35), strict=True):
    assert 0.5 * base - 1 < rest < 1.5 * base
  again = Engines(['tcp://a:1'], base_s=10, most_s=35, seed=3)
  again.note(again.all[0], EngineUnavailable('down'))
  assert again._aside[again.all[0]].until - time.monotonic() == (
    pytest.approx(rests[0], abs=0.5)  # the seed decides
  )
  engines.note(b, ImageMissing('none'))
  assert engines.next_try() > 0
  with pytest.raises(InfraError, match='and 1 other engines'):
    list(engines.ordered())
  engines.note(a, None)
  assert next(engines.ordered()) is a


def test_several_engines_share_the_work(own_engine):  # noqa: F811
  backend_or_skip('docker')
  default = Engine().name
  engines = Engines([default, own_engine.host], floor_bytes=FLOOR)
  opened = [open_sandbox(SPEC, 'docker', engines=engines) for _ in range(4)]
  try:
    used = [s.facts['engine'] for s in opened]
    assert sorted(used) == sorted([default, own_engine.host] * 2)
    answers = {s.call(Call(code='print(1)')).stdout for s in opened}
    assert answers == {'1\n'}
  finally:
    for sandbox in opened:
      sandbox.close()
  assert [engine.load for engine in engines.all] == [0, 0]


def test_an_engine_that_is_down_is_passed_over():
  backend_or_skip('docker')
  down = 'unix:///nonexistent/docker.sock'
  engines = Engines([down, Engine().name])
  for _ in range(2):
    began = time.monotonic()
    with open_sandbox(SPEC, 'docker', engines=engines) as sandbox:
      assert sandbox.facts['engine'] == Engine().name
    assert time.monotonic() - began < 20


def test_an_engine_over_tcp():
  backend_or_skip('docker')
  name = Engine().name
  require('a Unix socket', name.startswith('unix://'), name)
  with tcp_to(name.removeprefix('unix://')) as host:
    engines = Engines([host])
    with open_sandbox(SPEC, 'docker', engines=engines) as sandbox:
      assert sandbox.facts['engine'] == host
      assert sandbox.call(Call(code='print(7)')).stdout == '7\n'
      assert sandbox.put({'a': bytes(1 << 20)}).status is CallStatus.OK
      assert sandbox.get(['a']).files == {'a': bytes(1 << 20)}


@contextlib.contextmanager
def tcp_to(path):
  """A TCP port that leads to a Unix socket, as a tunnel does."""
  server = socket.create_server(('127.0.0.1', 0))

  def pump(source, sink):
    with contextlib.suppress(OSError):
      while data := source.recv(1 << 16):
        sink.sendall(data)
    with contextlib.suppress(OSError):
      sink.shutdown(socket.SHUT_WR)

  def serve():
    while True:
      try:
        client, _ = server.accept()
      except OSError:
        return
      engine = socket.socket(socket.AF_UNIX)
      engine.connect(path)
      for pair in ((client, engine), (engine, client)):
        threading.Thread(target=pump, args=pair, daemon=True).start()

  threading.Thread(target=serve, daemon=True).start()
  try:
    yield f'tcp://127.0.0.1:{server.getsockname()[1]}'
  finally:
    server.close()


# ---- R12: what keeps a sandbox from starting is typed, within 5 s -----------


@contextlib.contextmanager
def raises_within(kind, seconds=5.0, match=None):
  began = time.monotonic()
  with pytest.raises(kind, match=match) as caught:
    yield caught
  assert time.monotonic() - began < seconds
  assert isinstance(caught.value, InfraError)


def test_r12_a_full_disk(tmp_path):
  needed()
  data = io.BytesIO()
  with tarfile.open(fileobj=data, mode='w') as tar:
    tar.addfile(tarfile.TarInfo('empty'))
  with small_disk(tmp_path / 'data', 48) as leave:
    engine = OwnEngine(tmp_path / 'data')
    try:
      engine.start()
      subprocess.run(
        ['docker', '-H', engine.host, 'import', '-', 'tiny'],
        input=data.getvalue(), check=True, capture_output=True,
      )  # fmt: skip
      spec = dataclasses.replace(SPEC, image='tiny')
      with raises_within(DiskPressure, match='less than the floor of 5120 MiB'):
        open_docker(spec, UNTAGGED, Engines([engine.host]))
      leave(0)
      unchecked = Engines([engine.host], floor_bytes=0)
      with raises_within(DiskPressure, match='no space left on device'):
        open_docker(spec, UNTAGGED, unchecked)
      with Pool(spec, 'docker', warm=1, hosts=[engine.host]) as pool:
        with raises_within(DiskPressure):
          pool.acquire(deadline_s=60)
      assert engine.docker('ps', '-aq').stdout == ''
    finally:
      engine.end()


def test_r12_an_image_that_is_missing():
  backend_or_skip('docker')
  spec = dataclasses.replace(SPEC, image='agentjax-none:1')
  with raises_within(ImageMissing, match='agentjax-none:1.*build'):
    open_docker(spec)
  with Pool(spec, 'docker', warm=1) as pool:
    with raises_within(InfraError, match='agentjax-none:1.*build'):
      pool.acquire(deadline_s=60)


def test_r12_a_runtime_that_is_missing():
  backend_or_skip('docker')
  spec = dataclasses.replace(SPEC, runtime='no-such-runtime')
  with raises_within(RuntimeMissing, match="no-such-runtime.*'runc'"):
    open_docker(spec)
  with open_docker(dataclasses.replace(SPEC, runtime='runc')) as sandbox:
    assert sandbox.facts['runtime'] == 'runc'
    assert sandbox.facts['userns'] in (True, False)


DENIED = """
import os, sys, time
from agentjax.env.sandbox import SandboxSpec
from agentjax.env.sandbox.docker import open_docker
from agentjax.env.sandbox.engines import Engines
from agentjax.env.sandbox.owner import UNTAGGED
if os.geteuid() == 0:
  os.setgroups([])
  os.setgid(12345)
  os.setuid(12345)
began = time.monotonic()
try:
  open_docker(SandboxSpec(), UNTAGGED, Engines([sys.argv[1]]))
except Exception as error:
  print(time.monotonic() - began < 5, type(error).__name__, error)
"""


def test_r12_permission_denied(own_engine):  # noqa: F811
  # Of the file system, for whoever is not root.
  os.chmod(own_engine.folder, 0o755)
  os.chmod(own_engine.host.removeprefix('unix://'), 0o660)
  done = subprocess.run(
    [sys.executable, '-c', DENIED, own_engine.host],
    capture_output=True, text=True, cwd='/',
    env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
  )  # fmt: skip
  assert done.stdout.startswith('True EngineForbidden permission denied')
  assert 'Join its group' in done.stdout
  assert issubclass(EngineForbidden, EngineUnavailable)


def test_r12_an_engine_that_takes_and_never_answers(tmp_path):
  server = socket.socket(socket.AF_UNIX)
  server.bind(str(tmp_path / 's'))
  server.listen(64)
  with raises_within(EngineUnavailable, 5.5):
    open_docker(SPEC, UNTAGGED, Engines([f'unix://{tmp_path}/s']))
  server.close()


# ---- an engine that hangs or dies under way --------------------------------


def test_a_hanging_engine_costs_a_deadline_and_no_more(own_engine):  # noqa: F811
  backend_or_skip('docker')
  spec = dataclasses.replace(SPEC, grace_s=0.5)
  hosts = [own_engine.host, Engine().name]
  engines = Engines(hosts, floor_bytes=FLOOR, base_s=100)
  sandbox = open_docker(spec, UNTAGGED, Engines(hosts[:1], floor_bytes=FLOOR))
  ignores = (
    'import signal, time\n'
    'for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(600)'
  )
  try:
    id_ = id_of(own_engine, sandbox)
    threading.Timer(0.3, own_engine.signal, (signal.SIGSTOP,)).start()
    began = time.monotonic()
    with pytest.raises(HostDeadline):
      sandbox.call(Call(code=ignores, timeout_s=1.5))
    assert time.monotonic() - began < 1.5 + 0.5 + 6
    sandbox.close()
    # Nothing of it runs, while the engine still hangs.
    assert wait_until(lambda: processes_of(id_) == [], 2)
    began = time.monotonic()
    with open_docker(spec, UNTAGGED, engines) as other:  # goes on elsewhere
      assert other.facts['engine'] == hosts[1]
      assert other.call(Call(code='print(1)')).stdout == '1\n'
    assert time.monotonic() - began < 15
    hung = engines._aside[engines.all[0]]
    assert hung.failures == 1
    with open_docker(spec, UNTAGGED, engines) as other:
      assert other.facts['engine'] == hosts[1]
    assert hung.failures == 1  # it is left aside, and was not asked again
  finally:
    own_engine.signal(signal.SIGCONT)
  # What could not be removed is, as soon as it can be.
  assert wait_until(own_engine.answers, 10)
  reap()
  assert wait_until(lambda: own_engine.docker('ps', '-aq').stdout == '')
  assert sandbox.facts['container'] not in {
    entry.name for entry in journal.own().open()
  }


@pytest.mark.long
def test_a_hanging_engine_gives_out_nothing_that_is_idle(own_engine):  # noqa: F811
  with Pool(
    SPEC, 'docker', warm=2, hosts=[own_engine.host], floor_bytes=FLOOR
  ) as pool:
    pool.acquire().close()
    assert wait_until(lambda: pool.stats().idle == 2)
    own_engine.signal(signal.SIGSTOP)
    try:
      assert wait_until(lambda: pool.stats().idle == 0, 15)
      with raises_within(PoolExhausted, match='hangs|no Docker engine'):
        pool.acquire(deadline_s=1)
    finally:
      own_engine.signal(signal.SIGCONT)
    with pool.acquire(deadline_s=30) as sandbox:
      assert sandbox.call(Call(code='print(1)')).stdout == '1\n'
  assert pool.stats().ends['lost'] == 2


def killing(engine, pool, times, alone, every_s, down_s):
  """Kills an engine that is at work and starts it again, a number of times."""
  for _ in range(times):
    time.sleep(every_s)
    assert wait_until(lambda: pool.stats().busy >= 3, 60)
    engine.kill(alone=alone)
    time.sleep(down_s)
    engine.start()


def dies_under_way(engine, times, n, *, alone, every_s, down_s):
  spec = dataclasses.replace(SPEC, grace_s=2.0)
  with Pool(
    spec, 'docker', warm=2, hosts=[engine.host], floor_bytes=FLOOR,
    deadline_s=180,
  ) as pool:  # fmt: skip
    args = (engine, pool, times, alone, every_s, down_s)
    killer = threading.Thread(target=killing, args=args)
    killer.start()
    try:
      outcome = episodes.run(
        pool, range(n), threads=4, retries=2 * times, pause_s=0.1
      )
    finally:
      killer.join()
    episodes.check(outcome, range(n))
    assert len(outcome.failures) >= times
    stats = pool.stats()
  assert stats.acquires.count >= n + 1
  reap([engine.host])
  assert wait_until(lambda: engine.docker('ps', '-aq').stdout == '', 30)
  return outcome, stats


def test_r5_the_engine_is_killed(own_engine):  # noqa: F811
  dies_under_way(own_engine, 1, 16, alone=False, every_s=1.5, down_s=0.5)


@pytest.mark.long
def test_r5_the_engine_is_killed_5_times(own_engine):  # noqa: F811
  began = time.monotonic()
  outcome, stats = dies_under_way(
    own_engine, 5, 600, alone=True, every_s=8, down_s=10
  )
  print(
    f'R5: 600 episodes, 5 kills of the engine, {len(outcome.failures)} '
    f'failures, 0 lost, 0 twice, breaker opened {stats.opened} times, '
    f'{time.monotonic() - began:.0f} s'
  )


# ---- R7: a stream that nobody reads ----------------------------------------


def seconds_to_list(engine, timeout_s=3.0):
  began = time.monotonic()
  with contextlib.suppress(Exception):
    engine.ask(lambda client: client.containers(all=True), timeout_s)
  return time.monotonic() - began


def test_r7_replies_that_nobody_waits_for_do_not_hang_the_engine(
  own_engine,  # noqa: F811
):
  engine = Engine(own_engine.host)
  engines = Engines([own_engine.host], floor_bytes=FLOOR)
  with open_docker(SPEC, UNTAGGED, engines) as sandbox:
    # As if whoever asked had been given up: nobody takes the replies.
    request = {
      'op': 'run', 'argv': ['head', '-c', '30000000', '/dev/zero'],
      'timeout_s': 20, 'output_cap': 30_000_000,
    }  # fmt: skip
    for _ in range(3):
      with pytest.raises(HostDeadline):
        sandbox._channel.ask(request, (b'', b''), timeout_s=0.01)
    slowest = 0.0
    for _ in range(10):
      slowest = max(slowest, seconds_to_list(engine))
      time.sleep(0.1)
    assert slowest < 1.0
  assert seconds_to_list(engine) < 1.0


def test_r7_shutdown_frees_an_engine_that_an_unread_stream_holds(
  own_engine,  # noqa: F811
):
  """The fault itself, and what `Channel.shutdown` is for."""
  engine = Engine(own_engine.host)
  client = docker.APIClient(base_url=own_engine.host, version='auto')
  host = client.create_host_config(network_mode='none', auto_remove=True)
  name = client.create_container(SPEC.image, ['yes'], host_config=host)['Id']
  params = {'stdout': 1, 'stream': 1}
  unread = client.attach_socket(name, params=params)._sock
  client.start(name)
  try:
    time.sleep(0.5)
    client.inspect_container  # noqa: B018
    threading.Thread(target=seconds_to_list, args=(engine,)).start()
    unread.shutdown(socket.SHUT_RDWR)
    began = time.monotonic()
    Engine(own_engine.host).ask(
      lambda c: c.remove_container(name, force=True), 10
    )
    assert time.monotonic() - began < 5
    assert seconds_to_list(engine) < 1.0
  finally:
    client.close()


# ---- the walls of a container ----------------------------------------------


def test_what_the_engine_was_told(own_engine):  # noqa: F811
  engines = Engines([own_engine.host], floor_bytes=FLOOR)
  spec = dataclasses.replace(SPEC, nofile=100)
  with open_docker(spec, UNTAGGED, engines) as sandbox:
    said = json.loads(
      own_engine.docker('inspect', sandbox.facts['container']).stdout
    )[0]
  host = said['HostConfig']
  assert host['NetworkMode'] == 'none' and host['ReadonlyRootfs']
  assert host['CapDrop'] == ['ALL'] and not host['Privileged']
  assert sorted(host['CapAdd']) == ['KILL', 'SETGID', 'SETUID']
  assert 'no-new-privileges' in host['SecurityOpt']
  assert host['Memory'] == host['MemorySwap'] == SPEC.memory_bytes
  assert host['PidsLimit'] == SPEC.pids + 1
  assert host['OomScoreAdj'] == 500 and not host['OomKillDisable']
  assert host['CpuQuota'] / host['CpuPeriod'] == SPEC.cpus
  limits = {u['Name']: (u['Soft'], u['Hard']) for u in host['Ulimits']}
  size = SPEC.tmpfs_bytes
  assert limits == {
    'core': (0, 0), 'nofile': (100, 100), 'fsize': (size, size)
  }  # fmt: skip
  assert host['AutoRemove'] and host['LogConfig']['Type'] == 'none'
  assert not host['Binds'] and not said['Mounts'] and host['PidMode'] == ''
  assert host['IpcMode'] == 'private' and not host['Devices']


INSIDE = """
import errno, os, resource, signal
lines = [l.split(':', 1) for l in open('/proc/self/status')]
status = {k: v.strip() for k, v in lines}
print(status['NoNewPrivs'], status['CapEff'], status['Seccomp'])
print(open('/proc/self/oom_score_adj').read().strip())
opened = []
try:
  while True: opened.append(os.open('/dev/null', 0))
except OSError as error:
  print(errno.errorcode[error.errno], len(opened) <= 97)
for fd in opened: os.close(fd)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
  with open('/dev/shm/big', 'wb') as file:
    for _ in range(64): file.write(bytes(1 << 20)); file.flush()
except OSError as error:
  print(errno.errorcode[error.errno])
for name in ('RLIMIT_CORE', 'RLIMIT_NOFILE', 'RLIMIT_FSIZE'):
  print(resource.getrlimit(getattr(resource, name)))
for path in ('memory/memory.memsw.limit_in_bytes', 'memory.swap.max'):
  path = '/sys/fs/cgroup/' + path
  if os.path.exists(path): print(open(path).read().strip())
"""


def test_what_the_policy_meets(own_engine):  # noqa: F811
  engines = Engines([own_engine.host], floor_bytes=FLOOR)
  spec = dataclasses.replace(SPEC, nofile=100, tmpfs_bytes=8 << 20)
  with open_docker(spec, UNTAGGED, engines) as sandbox:
    result = sandbox.call(Call(code=INSIDE))
    assert result.stderr == ''
    lines = result.stdout.splitlines()
    assert lines[:2] == ['1 0000000000000000 2', '1000']
    assert lines[2:4] == ['EMFILE True', 'EFBIG']
    size = 8 << 20
    assert lines[4:7] == ['(0, 0)', '(100, 100)', f'({size}, {size})']
    assert lines[7] in (str(SPEC.memory_bytes), '0')
    killed = sandbox.call(
      Call(argv=['sh', '-c', 'head -c 20000000 /dev/zero > /dev/shm/big'])
    )
    assert killed.status is not CallStatus.OK


# ---- R17: the clock on the wall --------------------------------------------


def test_r17_a_clock_that_steps_by_an_hour_changes_no_deadline(
  backend, monkeypatch
):
  real, step = time.time, [0.0]

  def stepping():
    step[0] = 3600.0 if step[0] <= 0 else -3600.0  # back and forth
    return real() + step[0]

  monkeypatch.setattr(time, 'time', stepping)
  spec = dataclasses.replace(SPEC, grace_s=0.5, lifetime_s=60.0)
  with Pool(spec, backend, warm=1, starters=1) as pool:
    sandbox = pool.acquire(deadline_s=30)
    for _ in range(3):
      assert sandbox.call(Call(code='print(1)')).stdout == '1\n'
    slow = sandbox.call(Call(argv=['sleep', '60'], timeout_s=0.5))
    assert slow.status is CallStatus.TIMEOUT and 0.5 <= slow.duration_s < 5
    assert reap() == []  # the lease of a living owner is by another clock
    assert sandbox.call(Call(code='print(2)')).stdout == '2\n'
    freeze(sandbox)
    began = time.monotonic()
    with pytest.raises(HostDeadline):
      sandbox.call(Call(code='print(1)', timeout_s=0.5))
    assert 1.0 <= time.monotonic() - began < 8
    sandbox.close()
    assert pool.stats().calls.p95_s < 30
    # What the engine saw is found by its own clock.
    hog = pool.acquire(deadline_s=30)
    if backend == 'docker':
      assert hog._inner._hit_limit(time.monotonic(), 0) is None
      began = time.monotonic()
      assert hog.call(Call(code='bytearray(1 << 30)')).status is CallStatus.OOM
      assert hog._inner._hit_limit(began - 0.5, 0) is CallStatus.OOM
      assert time.monotonic() - began < 15
    hog.close()
