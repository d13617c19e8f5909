"""The pool: ready before it is needed, never used twice, honest in figures."""

import os
import subprocess
import sys
import threading
import time

import pytest
from sandboxes import SPEC, backend_or_skip

from agentjax.env import word_problems
from agentjax.env.demonstrate import Act, call, demonstrate
from agentjax.env.sandbox import (
  Call,
  CallStatus,
  SandboxBug,
  SandboxUnavailable,
  open_sandbox,
  pools,
)
from agentjax.env.sandbox import pool as pool_module
from agentjax.env.sandbox.breaker import Breaker, BreakerOpen
from agentjax.env.sandbox.pool import Pool
from agentjax.env.sandbox.pool_stats import Tally, Times
from agentjax.env.sandbox.spec import (
  Died,
  EngineUnavailable,
  ImageMissing,
  PoolExhausted,
)
from agentjax.env.tools import PythonTool

ONE = Call(code='print(1)')


def wait_until(condition, seconds=20.0):
  end = time.monotonic() + seconds
  while not condition() and time.monotonic() < end:
    time.sleep(0.01)
  return condition()


def name_of(sandbox):
  return sandbox.facts.get('container') or sandbox.facts['pid']


@pytest.fixture
def started(monkeypatch):
  """A pool over a fake start, which a test can make fail or wait."""

  class Fake:
    def __init__(self, number):
      self.facts, self.number = {}, number
      self.is_open, self.closed = True, 0

    def call(self, call):
      if call.code == 'die':
        raise Died('gone')
      return call.code

    def close(self):
      self.closed += 1
      self.is_open = False

  class Starts:
    def __init__(self):
      self.made, self.error, self.gate = [], None, threading.Event()
      self.gate.set()
      self.at_once = self.most_at_once = 0
      self.lock = threading.Lock()

    def __call__(self, spec, tag):
      with self.lock:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
      self.gate.wait(20)
      time.sleep(0.01)
      with self.lock:
        self.at_once -= 1
        if self.error is not None:
          raise self.error
        self.made.append(Fake(len(self.made)))
        return self.made[-1]

  starts = Starts()
  monkeypatch.setattr(pool_module.opening, 'starter', lambda *arguments: starts)
  return starts


def test_a_used_sandbox_goes_to_nobody_else(backend):
  with Pool(SPEC, backend, warm=2, starters=2) as pool:
    names, found = [], []
    for i in range(4):
      with pool.acquire(f'episode-{i}') as sandbox:
        names.append(name_of(sandbox))
        assert sandbox.facts['episode'] == f'episode-{i}'
        found += sandbox.get(['mine']).files
        assert sandbox.put({'mine': b'x'}).status is CallStatus.OK
        assert sandbox.call(ONE).stdout == '1\n'
      with pytest.raises(SandboxBug, match='closed'):
        sandbox.call(ONE)
    assert len(set(names)) == 4 and found == []
  stats = pool.stats()
  assert stats.ends['closed'] == 4 and stats.busy == stats.idle == 0


def test_warm_ones_are_there_before_they_are_needed(backend):
  with Pool(SPEC, backend, warm=3) as pool:
    pool.acquire().close()
    assert wait_until(lambda: pool.stats().idle == 3)
    began = time.monotonic()
    held = [pool.acquire() for _ in range(3)]
    assert time.monotonic() - began < 0.2  # a start takes longer
    assert pool.stats().waits == 1  # the first one of all
    assert len({name_of(s) for s in held}) == 3


def test_its_end_ends_all_of_them(backend):
  before = threading.active_count()
  pool = Pool(SPEC, backend, warm=2)
  used = pool.acquire()
  assert wait_until(lambda: pool.stats().idle == 2)
  pool.close()
  with pytest.raises(SandboxBug, match='closed'):
    used.call(ONE)
  with pytest.raises(SandboxBug, match='closed pool'):
    pool.acquire()
  pool.close()
  used.close()
  assert pool.stats().ends == {'shutdown': 3}
  assert wait_until(lambda: threading.active_count() <= before)


def test_what_it_counts(backend):
  with Pool(SPEC, backend, warm=0, run='count') as pool:
    with pool.acquire() as sandbox:
      sandbox.call(ONE)
      sandbox.call(Call(code='while True: pass', timeout_s=0.3))
      sandbox.call(Call(argv=['yes']))
    stats = pool.stats()
  assert stats.kills == {'timeout': 1, 'output_cap': 1}
  assert (stats.starts.count, stats.acquires.count) == (1, 1)
  assert stats.calls.count == 3 and stats.failures == {}
  assert 0 < stats.starts.median_s <= stats.acquires.median_s < 20
  metrics = stats.metrics()
  assert metrics['sandbox_kills'] == 2 and metrics['sandbox_ends_closed'] == 1
  assert all(name.startswith('sandbox_') for name in metrics)
  assert all(isinstance(value, (int, float)) for value in metrics.values())


def test_all_of_the_protocol_is_counted(backend):
  with Pool(SPEC, backend, warm=0) as pool:
    with pool.acquire() as sandbox:
      session = sandbox.session('python')
      assert session.run('x = 6').status is CallStatus.OK
      assert session.run('print(x * 7)').stdout == '42\n' and session.alive
      slow = session.run('while True: pass', timeout_s=0.3)
      assert slow.status is CallStatus.TIMEOUT and not session.alive
      session.close()
      sandbox.put({'a/b': b'kept'})
      data, refused = sandbox.get_tar(['a'])
      assert refused == {} and sandbox.put_tar(data).exit == 0
      snapshot = sandbox.snapshot()
    with pool.acquire() as fork:
      fork.restore(snapshot)
      assert fork.get(['a/b']).files == {'a/b': b'kept'}
  stats = pool.stats()
  assert stats.calls.count == 10 and stats.kills == {'timeout': 1}


def test_many_threads(backend):
  with Pool(SPEC, backend, warm=2, starters=4) as pool:
    lines = {}

    def work(n):
      with pool.acquire(str(n)) as sandbox:
        lines[n] = sandbox.call(Call(code=f'print({n})')).stdout

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(60)
    assert lines == {n: f'{n}\n' for n in range(8)}


# ---- logic, over a start that does as it is told ---------------------------


def test_no_more_starts_at_once_than_allowed(started):
  with Pool(SPEC, warm=12, starters=3) as pool:
    pool.acquire().close()
    assert wait_until(lambda: pool.stats().idle == 12)
    assert started.most_at_once == 3
    time.sleep(0.1)
    assert len(started.made) == 13


def given_up(pool):
  with pytest.raises(PoolExhausted):
    pool.acquire(deadline_s=2)


def test_acquire_has_a_deadline_and_the_line_an_end(started, monkeypatch):
  real, step = time.time, [0.0]

  def stepping():  # R17: the clock on the wall is nobody's business
    step[0] = 3600.0 if step[0] <= 0 else -3600.0
    return real() + step[0]

  monkeypatch.setattr(time, 'time', stepping)
  started.gate.clear()
  with Pool(SPEC, warm=0, starters=1, most=2, deadline_s=30) as pool:
    for _ in range(2):
      threading.Thread(target=given_up, args=(pool,), daemon=True).start()
    assert wait_until(lambda: pool._waiting == 2)
    began = time.monotonic()
    with pytest.raises(PoolExhausted, match='2 callers wait.*raise most'):
      pool.acquire()
    assert time.monotonic() - began < 1
    assert wait_until(lambda: pool._waiting == 0)
    began = time.monotonic()
    with pytest.raises(PoolExhausted, match='no sandbox within 0.3 s'):
      pool.acquire(deadline_s=0.3)
    assert 0.3 <= time.monotonic() - began < 1
    started.gate.set()
    assert pool.stats().exhausted >= 2


def test_what_died_or_grew_old_while_idle_is_not_handed_out(started):
  with Pool(SPEC, warm=2, starters=1, idle_s=60) as pool:
    first = pool.acquire()
    assert wait_until(lambda: pool.stats().idle == 2)
    dead = started.made[1]
    dead.is_open = False
    assert pool.acquire()._inner is started.made[2]
    assert wait_until(lambda: pool.stats().idle == 2)
    old = [s for _, s in pool._idle]
    pool._idle = pool_module.deque((0.0, s) for s in old)
    fresh = pool.acquire()
    assert fresh._inner not in old
    assert wait_until(lambda: all(s.closed for s in [dead, *old]))
    assert pool.stats().ends == {'lost': 1, 'expired': 2}
    first.close()


def test_one_that_nobody_asks_any_more_falls_asleep(started, monkeypatch):
  monkeypatch.setattr(pool_module, '_WATCH_S', 0.05)
  with Pool(SPEC, warm=2, starters=1, idle_s=0.5) as pool:
    pool.acquire().close()
    assert wait_until(lambda: pool.stats().idle == 2)
    assert wait_until(lambda: pool.stats().ends.get('expired') == 2)
    time.sleep(0.3)
    assert pool.stats().idle == 0 and len(started.made) == 3
    pool.acquire().close()
    assert wait_until(lambda: pool.stats().idle == 2)


def test_an_outage_is_waited_for(started):
  started.error = EngineUnavailable('restarting')
  with Pool(SPEC, warm=1, starters=2) as pool:
    threading.Timer(1.5, lambda: setattr(started, 'error', None)).start()
    began = time.monotonic()
    with pool.acquire(deadline_s=20):
      assert 1.4 < time.monotonic() - began < 10
    assert pool.stats().failures['EngineUnavailable'] >= 1


def test_what_no_waiting_cures_is_said_at_once(started):
  started.error = ImageMissing('build it')
  with Pool(SPEC, warm=1) as pool:
    for _ in range(2):  # the second one while nothing is tried
      began = time.monotonic()
      with pytest.raises(ImageMissing, match='build it'):
        pool.acquire(deadline_s=30)
      assert time.monotonic() - began < 3
    started.error = None
    time.sleep(1.1)
    pool.acquire(deadline_s=30).close()
  started.error = ValueError('a bug')
  with Pool(SPEC, warm=1) as pool, pytest.raises(ValueError, match='a bug'):
    pool.acquire(deadline_s=30)


def test_the_breaker_opens_and_closes_again(started):
  breaker = Breaker(10, 0.2, base_s=0.6)
  with Pool(SPEC, warm=0, starters=1, breaker=breaker) as pool:
    for _ in range(3):
      with pool.acquire() as sandbox, pytest.raises(Died):
        sandbox.call(Call(code='die'))
    with pytest.raises(BreakerOpen, match='3 of the last 10.*3 Died.*20%'):
      pool.acquire(deadline_s=0.05)
    made = len(started.made)
    pool.acquire(deadline_s=5).close()  # it waits until the rest is over
    assert len(started.made) == made + 1
    assert pool.stats().opened == 1
    assert pool.stats().failures == {'Died': 3}


def test_the_breaker_counts_the_last_ones_alone():
  breaker = Breaker(50, 0.2, base_s=20)
  for _ in range(4):  # 10 of any 50 are not more than a fifth
    for _ in range(10):
      breaker.note(Died('x'))
    for _ in range(40):
      breaker.note(None)
  assert breaker.opened == 0 and breaker.rest() == 0
  for _ in range(11):
    breaker.note(Died('x'))
  assert breaker.opened == 1 and 9 <= breaker.rest() <= 30
  with pytest.raises(ValueError, match='window 0'):
    Breaker(0)


def test_times_are_a_middle_and_a_high_end():
  tally = Tally()
  for n in range(101):
    tally.took('calls', float(n))
  stats = tally.stats(idle=0, starting=0, busy=0, opened=0)
  assert stats.calls == Times(101, 50.0, 95.0) and stats.starts == Times()
  for _ in range(20_000):
    tally.took('calls', 7.0)
  assert tally.stats(idle=0, starting=0, busy=0, opened=0).calls.median_s == 7


def test_options_are_checked():
  with pytest.raises(ValueError, match='warm 4, starters 0'):
    Pool(SPEC, starters=0)
  with pytest.raises(ValueError, match='role .verifier.'):
    Pool(SPEC, role='verifier')


# ---- where it is used ------------------------------------------------------


def test_word_problems_share_a_pool(backend):
  (task,) = word_problems.tasks('train', 1)
  try:
    for _ in range(3):
      env = word_problems.environment(warm=2, spec=SPEC, backend=backend)

      def expert():
        yield call('python', code=f'print({task.metadata["expression"]})')
        yield Act(answer=task.verify['answer'])

      done = demonstrate(env, task, expert())
      assert done.reward.success
    assert pools.shared(SPEC, backend, 2).stats().ends == {'closed': 3}
    assert pools.metrics()['sandbox_acquires'] == 3
    assert pools.shared(SPEC, backend, 2) is pools.shared(SPEC, backend, 2)
  finally:
    pools.close()
  assert pools.metrics() == {}


def test_a_tool_opens_what_it_is_told_to():
  backend = backend_or_skip('bwrap')
  opened = []

  def opener():
    opened.append(open_sandbox(SPEC, backend))
    return opened[-1]

  tool = PythonTool(open_sandbox=opener)
  assert opened == []
  assert tool({'code': 'print(2)'}) == tool({'code': 'print(2)'}) == '2'
  tool.close()
  assert len(opened) == 1
  with pytest.raises(ValueError, match='at most one'):
    PythonTool(open_sandbox=opener, sandbox=opened[0])
  with Pool(SPEC, backend, warm=0) as pool:
    tool = PythonTool(open_sandbox=pool)
    assert tool({'code': 'print(3)'}) == '3'
    tool.close()


def test_nowhere_to_run(monkeypatch):
  monkeypatch.setenv('DOCKER_HOST', 'unix:///nonexistent/docker.sock')
  monkeypatch.setenv('PATH', '/nonexistent')
  with Pool(SPEC, warm=1) as pool, pytest.raises(SandboxUnavailable):
    pool.acquire(deadline_s=30)


def test_a_fleet_without_ray_says_what_to_install(monkeypatch):
  from agentjax.env.sandbox import fleet

  monkeypatch.setattr(fleet, 'ray', None)
  with pytest.raises(SandboxUnavailable, match=r'agentjax\[fleet\]'):
    open_sandbox(SPEC, 'fleet')


EXIT = """
import sys
from agentjax.env.sandbox import SandboxSpec
from agentjax.env.sandbox.pool import Pool
pool = Pool(SandboxSpec(), sys.argv[1], warm=2)
sandbox = pool.acquire()
print(sandbox.facts.get('container') or sandbox.facts['pid'], flush=True)
"""


def test_it_is_closed_when_the_process_ends(backend, tmp_path):
  state = {**os.environ, 'XDG_STATE_HOME': str(tmp_path)}
  done = subprocess.run(
    [sys.executable, '-c', EXIT, backend],
    capture_output=True, text=True, timeout=60, env=state,
  )  # fmt: skip
  assert done.returncode == 0 and done.stderr == ''
  if backend == 'bwrap':
    assert not os.path.exists(f'/proc/{done.stdout.strip()}')
  # Everything has ended, and the journal with it.
  assert list(tmp_path.rglob('*.jsonl')) == []
