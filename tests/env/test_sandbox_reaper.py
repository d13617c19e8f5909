"""What dead runs leave is removed, by label and journal; nothing else is."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import docker
import pytest
from own_engine import own_engine  # noqa: F401
from sandboxes import SPEC, backend_or_skip

from agentjax.env.sandbox import (
  Call,
  cgroup,
  journal,
  open_sandbox,
  owner,
  reap,
  reaper,
)
from agentjax.env.sandbox.bounds import Overdue, shielded, together, within
from agentjax.env.sandbox.engines import Engine
from agentjax.env.sandbox.owner import Tag

pytestmark = pytest.mark.xdist_group('own_engine')

DEAD = owner.own_name().rpartition(':')[0] + ':1'  # our number, another start
ELSEWHERE = 'elsewhere.1:4194303:1'
PAST, FUTURE = str(int(time.time()) - 9000), str(int(time.time()) + 90000)


def wait_until(condition, seconds=10.0):
  end = time.monotonic() + seconds
  while not condition() and time.monotonic() < end:
    time.sleep(0.02)
  return condition()


@pytest.fixture
def state(tmp_path, monkeypatch):
  """A folder of journals of the test's own."""
  monkeypatch.setenv('XDG_STATE_HOME', str(tmp_path))
  journal._own.cache_clear()
  yield journal.folder()
  journal._own.cache_clear()


def labels(name=DEAD, lease=FUTURE, **more):
  return {owner.OWNER: name, owner.LEASE: lease, owner.RUN: 'test', **more}


# ---- what is over ----------------------------------------------------------


def test_what_is_over():
  own = owner.own_name()
  now = time.clock_gettime(time.CLOCK_BOOTTIME)
  for said, over in (
    (labels(DEAD), True),
    (labels(own), False),
    (labels(own, PAST), True),
    (labels(ELSEWHERE), False),
    (labels(ELSEWHERE, PAST), True),
    ({owner.LEASE: PAST}, False),  # not ours at all
    ({'other': 'label'}, False),
    ({}, False),
    (labels(own, 'nonsense'), False),
    # By the clock that nobody sets, where it is the owner's too.
    (labels(own, PAST, **{owner.LEASE_BOOT: f'{now + 60:.0f}'}), False),
    (labels(own, FUTURE, **{owner.LEASE_BOOT: f'{now - 60:.0f}'}), True),
    (labels(ELSEWHERE, FUTURE, **{owner.LEASE_BOOT: '1'}), False),
  ):
    assert owner.is_over(said) is over, said


def test_labels_of_a_sandbox():
  backend_or_skip('docker')
  with open_sandbox(
    SPEC, 'docker', 'my-run', role='judge', episode='e7'
  ) as sandbox:
    said = Engine().ask(
      lambda c: c.inspect_container(sandbox.facts['container'])
    )['Config']['Labels']
  assert said[owner.RUN] == 'my-run' and said[owner.OWNER] == owner.own_name()
  assert said[owner.ROLE] == 'judge' and said[owner.EPISODE] == 'e7'
  assert said[owner.SPEC] == owner.spec_hash(SPEC)
  left = int(said[owner.LEASE]) - time.time()
  assert SPEC.lifetime_s < left < SPEC.lifetime_s + 3 * 3600
  assert owner.spec_hash(SPEC) != owner.spec_hash(
    dataclasses.replace(SPEC, pids=33)
  )
  with pytest.raises(ValueError, match='role .verifier.'):
    Tag(role='verifier')


# ---- the journal -----------------------------------------------------------


def entry(name='agentjax-0123456789abcdef', **changes):
  base = journal.Entry(name, 'docker', 'unix:///x', labels())
  return dataclasses.replace(base, **changes)


def read(path):
  return journal._read(path)


def test_the_journal_is_on_disk_before_the_call_returns(state, monkeypatch):
  synced = []
  real = os.fsync
  monkeypatch.setattr(os, 'fsync', lambda fd: (synced.append(fd), real(fd)))
  kept = journal.own()
  kept.begin(entry('agentjax-' + 'a' * 16))
  kept.begin(entry('agentjax-' + 'b' * 16))
  n = len(synced)
  assert n >= 2
  kept.episode('agentjax-' + 'b' * 16, 'e1')
  assert len(synced) == n
  kept.end('agentjax-' + 'a' * 16)
  kept.end('agentjax-' + 'a' * 16)
  assert len(synced) == n + 1
  (found,) = read(kept.path)
  assert found == entry('agentjax-' + 'b' * 16)
  lines = [json.loads(x) for x in kept.path.read_text().splitlines()]
  assert {'event': 'episode', 'name': found.name, 'episode': 'e1'} in lines
  assert list(journal.others()) == []


def test_a_line_that_was_cut_off_is_passed_over(state):
  kept = journal.own()
  kept.begin(entry())
  with kept.path.open('ab') as file:
    file.write(b'{"event": "begin", "name": "agentjax-ff')
  assert read(kept.path) == [entry()]


def test_the_journal_does_not_grow_for_ever(state, monkeypatch):
  monkeypatch.setattr(journal, '_COMPACT_LINES', 20)
  kept = journal.own()
  kept.begin(entry('agentjax-' + 'a' * 16))
  for _ in range(25):
    kept.begin(entry())
    kept.end(entry().name)
  assert len(kept.path.read_bytes().splitlines()) <= 21
  assert [e.name for e in read(kept.path)] == ['agentjax-' + 'a' * 16]
  assert [p.name for p in state.iterdir()] == [kept.path.name]


def test_the_journal_ends_with_what_is_in_it(state):
  kept = journal.own()
  kept.begin(entry())
  kept.close()
  assert kept.path.exists()
  kept.end(entry().name)
  assert not kept.path.exists()


def test_without_a_journal_sandboxes_start_all_the_same(
  state, monkeypatch, caplog
):
  state.parent.parent.joinpath('file').write_text('')
  monkeypatch.setenv('XDG_STATE_HOME', str(state.parent.parent / 'file'))
  journal._own.cache_clear()
  backend = backend_or_skip('bwrap')
  for _ in range(2):
    with open_sandbox(SPEC, backend) as sandbox:
      assert sandbox.call(Call(code='print(1)')).stdout == '1\n'
  assert caplog.text.count('set XDG_STATE_HOME') == 1


def test_a_sandbox_stands_in_the_journal_while_it_lives(backend, state):
  with open_sandbox(SPEC, backend, 'my-run'):
    (found,) = read(journal.own().path)
    assert found.backend == backend
    assert found.labels[owner.OWNER] == owner.own_name()
  assert read(journal.own().path) == []


# ---- what is removed, and what is not --------------------------------------


@pytest.fixture
def container():
  """Makes containers with labels, and removes those that are left."""
  backend_or_skip('docker')
  client = docker.APIClient(version='auto')
  made = []

  def make(said, start=True, name=None):
    host = client.create_host_config(network_mode='none')
    id_ = client.create_container(
      SPEC.image, ['sleep', '600'], labels=said, host_config=host, name=name
    )['Id']
    made.append(id_)
    if start:
      client.start(id_)
    return id_

  yield make
  for id_ in made:
    with contextlib.suppress(docker.errors.APIError):
      client.remove_container(id_, force=True)
  client.close()


def living():
  found = Engine().ask(lambda client: client.containers(all=True))
  return {container['Id'] for container in found}


def test_r18_another_trainer_is_not_touched(container, state):
  other = subprocess.Popen(['sleep', '600'])
  try:
    place = owner.own_name().partition(':')[0]
    theirs = f'{place}:{other.pid}:{owner.start_time(other.pid)}'
    over = {container(labels(DEAD)), container(labels(ELSEWHERE, PAST))}
    stays = {
      container(labels(theirs)),
      container(labels(owner.own_name())),
      container(labels(ELSEWHERE)),
      container({'other': 'label'}),
      container({owner.LEASE: PAST}, start=False),
      container({}, start=False),
    }
    reap()  # or another process's, which was a moment faster
    assert living() & over == set() and stays <= living()
  finally:
    other.kill()
    other.wait()
  # Now it is dead, and the rest still stays.
  reap()
  assert len(stays - living()) == 1


def test_the_command_says_what_it_removed(container, state):
  for _ in range(5):  # another process's reaper may be faster, once or twice
    over = container(labels(DEAD))
    done = subprocess.run(
      [sys.executable, '-m', 'agentjax.env.sandbox', 'reap'],
      capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.splitlines()[-1].endswith(' removed')
    assert over not in living()
    if over in done.stdout.splitlines():
      break
  assert over in done.stdout.splitlines()


def test_when_the_list_hangs_the_journal_names_them(
  container, state, monkeypatch
):
  place, pid, _ = owner.own_name().split(':')
  # Labels that no reaper of another process goes by: the journal says it all.
  name = 'c' * 16
  ours = container({'other': 'label'}, name=f'agentjax-{name}')
  unnamed = container({'other': 'label'}, name='somebody-elses')
  dead = state / f'{place}:{pid}:1.jsonl'
  state.mkdir(parents=True)
  lines = [
    {'event': 'begin', **dataclasses.asdict(entry(n, engine=Engine().name))}
    for n in (f'agentjax-{name}', 'somebody-elses', 'agentjax-' + 'd' * 16)
  ]
  dead.write_text('\n'.join(map(json.dumps, lines)))

  def hangs(client):
    raise OSError('timed out')

  monkeypatch.setattr(reaper, '_labelled', hangs)
  assert f'agentjax-{name}' in reap()
  assert ours not in living() and unnamed in living()
  assert not dead.exists()


def test_an_engine_that_is_no_more_is_asked_for_a_day(state):
  state.mkdir(parents=True)
  path = state / f'{DEAD}.jsonl'
  long_ago = str(int(time.time()) - 100_000)
  for lease, stays in ((PAST, True), (long_ago, False)):
    gone = entry(engine='unix:///nonexistent.sock', labels=labels(DEAD, lease))
    line = {'event': 'begin', **dataclasses.asdict(gone)}
    path.write_text(json.dumps(line))
    assert reap() == [] and path.exists() == stays


def test_a_container_that_was_made_and_never_started(tmp_path):
  """No end of a stream reaches it: what is left behind looks after it."""
  backend_or_skip('docker')
  done = subprocess.run([sys.executable, '-c', HALF_MADE], timeout=60)
  assert done.returncode == -signal.SIGKILL

  def left():
    label = f'{owner.RUN}=half-made'
    return Engine().ask(
      lambda c: c.containers(all=True, filters={'label': label})
    )

  assert wait_until(lambda: left() == [], 10)


HALF_MADE = """
import os, signal
from agentjax.env.sandbox import docker, open_sandbox
docker._attach = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
open_sandbox(None, 'docker', 'half-made')
"""


def test_a_journal_of_the_living_stays(state):
  other = subprocess.Popen(['sleep', '600'])
  try:
    place = owner.own_name().partition(':')[0]
    theirs = f'{place}:{other.pid}:{owner.start_time(other.pid)}'
    state.mkdir(parents=True)
    path = state / f'{theirs}.jsonl'
    line = {'event': 'begin', **dataclasses.asdict(entry())}
    line['labels'] = labels(theirs)
    path.write_text(json.dumps(line))
    reap()
    assert path.exists()
  finally:
    other.kill()
    other.wait()


def test_a_process_of_a_dead_owner_is_killed_and_no_other(state):
  """Bubblewrap without control groups: the journal alone knows it."""
  left, other = (subprocess.Popen(['sleep', '600']) for _ in range(2))
  try:
    state.mkdir(parents=True)
    lines = []
    for process, start in (
      (left, owner.start_time(left.pid)),
      (other, '1'),  # the number was given to somebody else since
    ):
      name = f'bwrap-{process.pid}-{start}'
      made = entry(
        name, backend='bwrap', engine='', pid=process.pid, pid_start=start
      )
      lines.append({'event': 'begin', **dataclasses.asdict(made)})
    path = state / f'{DEAD}.jsonl'
    path.write_text('\n'.join(map(json.dumps, lines)))
    assert f'bwrap-{left.pid}-{owner.start_time(left.pid)}' in reap()
    assert left.wait(5) == -signal.SIGKILL
    assert other.poll() is None and not path.exists()
  finally:
    for process in (left, other):
      process.kill()
      process.wait()


def test_a_thread_reaps_now_and_then(container, state):
  over = container(labels(DEAD), start=False)
  looking = reaper.Reaper(every_s=0.1)
  try:
    assert wait_until(lambda: over not in living(), 20)
  finally:
    looking.stop()


# ---- cleaning up is not cut off --------------------------------------------

INTERRUPTED = """
import os, signal, sys, threading, time
from agentjax.env.sandbox import SandboxSpec, open_sandbox, session
sandbox = open_sandbox(SandboxSpec(), sys.argv[1])
print(sandbox.facts.get('container') or sandbox.facts['pid'], flush=True)
end = sandbox._stop
def slow():
  os.kill(os.getpid(), signal.SIGINT)
  time.sleep(0.5)
  end()
  print('ended', flush=True)
sandbox._stop = slow
try:
  sandbox.close()
  print('not interrupted')
except KeyboardInterrupt:
  print('interrupted', flush=True)
"""


def test_an_interrupt_does_not_cut_off_the_end(backend):
  done = subprocess.run(
    [sys.executable, '-c', INTERRUPTED, backend],
    capture_output=True, text=True, timeout=60,
  )  # fmt: skip
  name, *rest = done.stdout.split('\n')
  assert rest == ['ended', 'interrupted', ''], done.stderr
  if backend == 'docker':
    found = Engine().ask(lambda c: c.containers(all=True))
    assert f'/{name}' not in {n for c in found for n in c['Names']}
  else:
    assert not pathlib.Path(f'/proc/{name}').exists()


def test_bounds():
  assert within(5, lambda: 7) == 7
  with pytest.raises(ZeroDivisionError):
    within(5, lambda: 1 / 0)
  began = time.monotonic()
  with pytest.raises(Overdue, match='within 0.1 s'):
    within(0.1, lambda: time.sleep(5))
  assert not shielded(0.1, lambda: time.sleep(5))
  assert time.monotonic() - began < 2
  assert shielded(5, lambda: None)
  done = []
  together(3, [lambda n=n: done.append(n) for n in range(10)])
  assert sorted(done) == list(range(10))
  together(3, [])


def test_a_group_that_is_left_behind(state, monkeypatch):
  group = cgroup.make(SPEC)
  if group is None:
    pytest.skip('this host does not let us make control groups')
  own = owner.own_name()
  monkeypatch.setattr(owner, 'is_dead', lambda name: name == own)
  threads = threading.active_count()
  assert group.folders[0].name in cgroup.reap_groups()
  assert not any(folder.exists() for folder in group.folders)
  assert threading.active_count() == threads
