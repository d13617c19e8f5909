"""Killed from outside: the trainer, or sandboxes under a run that goes on."""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
import uuid

import docker
import episodes
import pytest
import tiny_model
from fakes import IdChat, IdEnvironment, id_task
from sandboxes import SPEC, backend_or_skip

from agentjax.env.sandbox import Call, journal, owner, reap
from agentjax.env.sandbox.engines import Engine
from agentjax.env.sandbox.pool import Pool
from agentjax.rollout.collect import CollectStats, collect
from agentjax.rollout.episode import Limits
from agentjax.rollout.sampling import Sampling

CALL_S = 2.0


def wait_until(condition, seconds=10.0):
  end = time.monotonic() + seconds
  while not condition() and time.monotonic() < end:
    time.sleep(0.05)
  return condition()


# ---- R4: kill -9 the trainer ------------------------------------------------

TRAINER = """
import sys, threading
from agentjax.env.base import InfraError
from agentjax.env.sandbox import Call, SandboxSpec, owner
from agentjax.env.sandbox.pool import Pool
backend, run, busy, seconds = sys.argv[1:]
print(owner.own_name(), flush=True)
pool = Pool(SandboxSpec(pids=32), backend, warm=2, starters=2, run=run)
idle = threading.Event()
def work(n):
  while True:
    with pool.acquire(f'episode-{n}') as sandbox:
      for _ in range(3):
        sandbox.call(Call(code='print(1)'))
        if busy == 'busy':
          script = 'setsid sleep 1234 & sleep 1234'
          sandbox.call(
            Call(argv=['sh', '-c', script], timeout_s=float(seconds)))
      if busy == 'idle':
        idle.wait()
threads = [threading.Thread(target=work, args=(n,), daemon=True)
           for n in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def containers_of(run):
  label = f'{owner.RUN}={run}'
  found = Engine().ask(
    lambda c: c.containers(all=True, filters={'label': label})
  )
  return [c['Names'][0] for c in found]


def groups_of(name):
  return [
    folder
    for pattern in (f'*/agentjax:{name}:*', f'agentjax:{name}:*')
    for folder in pathlib.Path('/sys/fs/cgroup').glob(pattern)
  ]


def processes_in(groups):
  out = []
  for folder in groups:
    with contextlib.suppress(OSError):
      out += (folder / 'cgroup.procs').read_text().split()
  return out


def killed_at_random(backend, busy, points, seed, tmp_path):
  """Kills trainers; the longest time until nothing of one ran any more."""
  rng, slowest = random.Random(seed), 0.0
  state = {**os.environ, 'XDG_STATE_HOME': str(tmp_path)}
  allowed = 5.0 + (CALL_S if busy == 'busy' else 0.0)
  for _ in range(points):
    run = f'kill-{uuid.uuid4().hex[:8]}'
    process = subprocess.Popen(
      [sys.executable, '-c', TRAINER, backend, run, busy, str(CALL_S)],
      stdout=subprocess.PIPE, text=True, env=state,
    )  # fmt: skip
    name = process.stdout.readline().strip()
    time.sleep(rng.uniform(0.2, 3.5))
    process.kill()
    process.wait()
    began = time.monotonic()

    def left(run=run, name=name):
      if backend == 'docker':
        return containers_of(run)
      return processes_in(groups_of(name))

    assert wait_until(lambda: left() == [], allowed), left()  # noqa: B023
    slowest = max(slowest, time.monotonic() - began)
    # And what is no process goes with the reaper: groups, journals.
    done = subprocess.run(
      [sys.executable, '-m', 'agentjax.env.sandbox', 'reap'],
      env=state, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert groups_of(name) == []
    assert list(tmp_path.rglob('*.jsonl')) == []
    assert time.monotonic() - began < allowed + 10
  return slowest


@contextlib.contextmanager
def beside(backend):
  """An unlabelled container, which has to be there at the end."""
  if backend != 'docker':
    yield
    return
  client = docker.APIClient(version='auto')
  host = client.create_host_config(network_mode='none')
  id_ = client.create_container(SPEC.image, ['sleep', '900'], host_config=host)
  try:
    client.start(id_)
    yield
    assert client.inspect_container(id_)['State']['Running']
  finally:
    client.remove_container(id_, force=True)
    client.close()


@pytest.mark.parametrize('busy', ['idle', 'busy'])
def test_r4_the_trainer_is_killed(backend, busy, tmp_path):
  with beside(backend):
    killed_at_random(backend, busy, 1, seed=1, tmp_path=tmp_path)


@pytest.mark.long
@pytest.mark.parametrize('busy', ['idle', 'busy'])
def test_r4_the_trainer_is_killed_20_times(backend, busy, tmp_path):
  with beside(backend):
    slowest = killed_at_random(backend, busy, 20, 4, tmp_path)
  print(
    f'R4: {backend}, {busy}: 20 kills, nothing left, the slowest after '
    f'{slowest:.2f} s'
  )


# ---- R6: sandboxes are killed under a run that goes on ----------------------


def hurt(sandbox, how):
  """Kills, removes or freezes a sandbox, from outside."""
  if sandbox.facts['backend'] == 'docker':
    words = {'kill': ['kill'], 'remove': ['rm', '-f'], 'pause': ['pause']}[how]
    command = ['docker', *words, sandbox.facts['container']]
    subprocess.run(command, capture_output=True)
  else:
    number = signal.SIGSTOP if how == 'pause' else signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):
      os.kill(sandbox.facts['pid'], number)


def hurt_at_random(backend, n, share, seed):
  """Episodes of which a share of the sandboxes is hurt; what came of them."""
  spec = dataclasses.replace(SPEC, grace_s=1.0)
  timeout_s, rng, lock = 1.0, random.Random(seed), threading.Lock()
  chosen = set(rng.sample(range(n), max(3, round(share * n))))
  done = []

  def on_sandbox(sandbox):
    name = sandbox.facts['episode']
    with lock:
      if int(name.removeprefix('seed-')) not in chosen or name in done:
        return
      how = ('kill', 'remove', 'pause')[len(done) % 3]
      done.append(name)
      delay = rng.uniform(0, 0.3)
    threading.Timer(delay, hurt, (sandbox, how)).start()

  with Pool(spec, backend, warm=2, starters=2) as pool:
    outcome = episodes.run(
      pool, range(n), calls=6, threads=3, timeout_s=timeout_s, pause_s=0.1,
      on_sandbox=on_sandbox,
    )  # fmt: skip
  # Each reward is the one of a run that nothing happened to.
  episodes.check(outcome, range(n), calls=6)
  assert len(done) == len(chosen)
  # One may be hurt behind its last call: then nobody needs it any more.
  assert len(chosen) - 2 <= len(outcome.failures) <= len(chosen) + 1
  slowest = max(seconds for _, seconds in outcome.failures)
  assert slowest < timeout_s + spec.grace_s + 2.0
  assert {'Died', 'HostDeadline'} <= {name for name, _ in outcome.failures}
  return outcome, slowest


def test_r6_sandboxes_are_hurt(backend):
  hurt_at_random(backend, 9, 0.33, seed=6)


@pytest.mark.long
def test_r6_a_tenth_of_the_sandboxes_is_hurt(backend):
  outcome, slowest = hurt_at_random(backend, 200, 0.1, seed=7)
  print(
    f'R6: {backend}: 200 episodes, 20 sandboxes hurt, {len(outcome.failures)} '
    f'failures, seen after at most {slowest:.2f} s of 4.00, rewards equal'
  )


class Sandboxed(IdEnvironment):
  """Answers by a sandbox, which is hurt in the first try of some tasks."""

  def __init__(self, pool, unlucky):
    super().__init__(turns=3)
    self.pool, self.unlucky, self.sandbox = pool, unlucky, None

  def reset(self, task):
    self.sandbox = self.pool.acquire(task.id)
    if task.id in self.unlucky:
      self.unlucky.remove(task.id)
      hurt(self.sandbox, 'kill')
    return super().reset(task)

  def step(self, turn):
    code = f'print(sum(map(int, {turn.text!r}.split())))'
    said = self.sandbox.call(Call(code=code, timeout_s=10)).stdout
    assert int(said) == sum(map(int, turn.text.split()))
    return super().step(turn)

  def close(self):
    if self.sandbox is not None:
      self.sandbox.close()


def collected(backend, unlucky):
  tasks = [id_task(f't{i}', [5 + i, 6, 7]) for i in range(3)]
  stats = CollectStats()
  with Pool(SPEC, backend, warm=2) as pool:
    groups = collect(
      tasks, group_size=2, engine=tiny_model.engine(list('aeiou')),
      chat=IdChat(), make_environment=lambda: Sandboxed(pool, unlucky),
      limits=Limits(
        turns=4, turn_tokens=16, model_tokens=48, context=96,
        observation_tokens=8,
      ),
      sampling=Sampling(), seed=0, draw=1, stats=stats,
    )  # fmt: skip
  rewards = [[t.reward for t in g.trajectories] for g in groups]
  tokens = [[t.tokens().tolist() for t in g.trajectories] for g in groups]
  return rewards, tokens, stats


@pytest.mark.long  # it compiles an engine
def test_r6_collect_runs_them_again_and_ends_the_same():
  backend = backend_or_skip('bwrap')
  rewards, tokens, quiet = collected(backend, [])
  assert quiet.retries == 0
  hurt_rewards, hurt_tokens, stats = collected(backend, ['t0', 't2'])
  # One whose first turn was cut at its limit has not met it.
  assert 1 <= stats.retries <= 2 and stats.infra_failures == 0
  assert (hurt_rewards, hurt_tokens) == (rewards, tokens)


def test_the_journal_says_who_had_a_warm_one(tmp_path, monkeypatch):
  backend_or_skip('docker')
  monkeypatch.setenv('XDG_STATE_HOME', str(tmp_path))
  journal._own.cache_clear()
  try:
    with Pool(SPEC, 'docker', warm=1) as pool, pool.acquire('e3') as sandbox:
      lines = journal.own().path.read_text().splitlines()
      said = {
        'event': 'episode', 'name': sandbox.facts['container'], 'episode': 'e3'
      }  # fmt: skip
      assert said in map(json.loads, lines)
    reap()
  finally:
    journal._own.cache_clear()
