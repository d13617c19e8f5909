"""Calls that hang: given up, their place filled, the rest goes on."""

import functools
import subprocess
import sys
import threading
import time

import pytest
from fakes import IdEnvironment
from test_collect import TASKS, assert_same, new_engine, run

from agentjax.rollout.calls import Call, Calls, Hung
from agentjax.rollout.collect import CollectStats
from agentjax.types import Status


@pytest.fixture
def gate():
  """Whatever hangs here goes on at the end of the test."""
  event = threading.Event()
  yield event
  event.set()


def drain(calls):
  out, deadline = [], time.monotonic() + 30
  while calls.n_open:
    assert time.monotonic() < deadline
    out += calls.ended(block=False)
    time.sleep(0.005)
  return out


def test_calls_return_what_they_return_and_raise_what_they_raise():
  calls = Calls(2, 60.0)
  a = calls.submit(Call('a', lambda: 3))
  b = calls.submit(Call('b', lambda: 1 // 0))
  c = calls.submit(Call('c', threading.current_thread))
  out = []
  while calls.n_open:
    out += calls.ended(block=True)
  assert set(out) == {a, b, c}
  assert a.result() == 3 and c.result().daemon
  with pytest.raises(ZeroDivisionError):
    b.result()
  assert calls.ended(block=True) == []  # nothing to wait for


@pytest.mark.parametrize('threads', [1, 3])
def test_no_more_threads_than_asked_for(threads):
  calls, lock, now = Calls(threads, 60.0), threading.Lock(), []
  most = []

  def work():
    with lock:
      now.append(1)
      most.append(len(now))
    time.sleep(0.002)
    with lock:
      now.pop()

  for _ in range(20):
    calls.submit(Call('work', work))
  assert len(drain(calls)) == 20
  assert max(most) <= threads and calls.n_given_up == 0


def test_who_hangs_is_given_up_and_its_place_filled(gate):
  calls, closed = Calls(1, 0.1), threading.Event()
  stuck = calls.submit(Call('stuck', gate.wait, late=closed.set))
  after = calls.submit(Call('after', lambda: 3))
  assert drain(calls) == [stuck, after]
  assert stuck.given_up and after.result() == 3 and calls.n_given_up == 1
  with pytest.raises(Hung, match='stuck did not come back within 0.1 s'):
    stuck.result()
  assert not closed.is_set()
  gate.set()
  assert closed.wait(10)
  assert stuck.value is None and calls.ended(block=False) == []
  assert calls.submit(Call('more', lambda: 4)) and drain(calls)[0].value == 4


def test_a_call_that_waits_for_its_thread_does_not_hang_yet(gate):
  calls = Calls(1, 0.6)
  nap = functools.partial(time.sleep, 0.05)
  many = [calls.submit(Call(str(i), nap)) for i in range(20)]
  assert set(drain(calls)) == set(many)
  assert not any(c.given_up for c in many)


class Hangs(IdEnvironment):
  """One call of the task that is named hangs until the gate opens."""

  def __init__(self, call, gate, made, task='t1'):
    super().__init__()
    self.call, self.gate, self.name = call, gate, task
    self.ended = threading.Event()
    self.task = None
    made.append(self)

  def _hang(self, call):
    if call == self.call and self.task.id == self.name:
      self.gate.wait(60)

  def reset(self, task):
    self.task = task
    self._hang('reset')
    return super().reset(task)

  def step(self, turn):
    self._hang('step')
    return super().step(turn)

  def verify(self, status):
    self._hang('verify')
    return super().verify(status)

  def close(self):
    self._hang('close')
    super().close()
    self.ended.set()


@pytest.mark.parametrize(
  'call, slots, threads',
  [('step', 1, 1), ('step', 4, 2), ('reset', 4, 2), ('verify', 4, 2)],
)
def test_a_call_that_hangs_ends_its_own_episode_alone(
  gate, call, slots, threads
):
  """Three hang, in one or two threads; the others are as they always were."""
  base = run(new_engine(slots))
  made, stats = [], CollectStats()
  groups = run(
    new_engine(slots), make=lambda: Hangs(call, gate, made), in_flight=6,
    tool_threads=threads, tool_seconds=1.0, stats=stats,
  )  # fmt: skip
  assert_same([base[0], base[2]], [groups[0], groups[2]])
  hung = [t for t in groups[1].trajectories if t.error]
  for t in hung:
    assert t.status is Status.INFRA_FAILURE and t.reward is None
    assert f'{call} did not come back within 1.0 s' in t.error
    assert t.info['attempts'] == 1  # a second try would hang as long
  assert stats.calls_given_up == stats.infra_failures == len(hung) > 0
  assert stats.retries == 0
  assert stats.metrics(new_engine(1).stats)['calls_given_up'] == len(hung)
  for t in groups[1].trajectories:
    assert t.status in (Status.INFRA_FAILURE, Status.TOKEN_LIMIT)
  stuck = [e for e in made if e.closed == 0]
  assert len(stuck) == len(hung)
  gate.set()  # they come back after all, are dropped, and closed
  assert all(e.ended.wait(10) for e in stuck)
  assert all(e.closed == 1 for e in made)


def test_a_slot_is_free_while_its_tool_hangs(gate):
  """One slot, one that hangs in it: the others run to their end meanwhile."""
  made, done = [], []

  def on_group(group):
    done.append((group.task.id, gate.is_set()))

  stats = CollectStats()
  groups = run(
    new_engine(1), make=lambda: Hangs('step', gate, made), group_size=1,
    in_flight=1, tool_threads=1, tool_seconds=1.0, on_group=on_group,
    stats=stats,
  )  # fmt: skip
  assert [name for name, _ in done] == ['t0', 't1', 't2']
  assert not any(opened for _, opened in done)
  assert groups[1].trajectories[0].status is Status.INFRA_FAILURE
  assert stats.calls_given_up == 1


def test_a_close_that_hangs_holds_nothing_up_for_ever(gate):
  made, stats = [], CollectStats()
  base = run()
  began = time.monotonic()
  groups = run(
    make=lambda: Hangs('close', gate, made), tool_threads=2, tool_seconds=1.0,
    stats=stats,
  )  # fmt: skip
  assert time.monotonic() - began < 30
  assert_same(base, groups)
  assert stats.calls_given_up == 3 and stats.infra_failures == 0


def test_an_interrupted_collect_waits_no_longer_than_the_bound(gate):
  made = []

  def stop(group):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    run(
      make=lambda: Hangs('step', gate, made, task='t2'), on_group=stop,
      tool_seconds=0.3, in_flight=9,
    )  # fmt: skip
  gate.set()
  assert all(e.ended.wait(10) for e in made if e.task is not None)


def test_bounds_that_are_none():
  for bad in ({'tool_threads': 0}, {'tool_seconds': 0}):
    with pytest.raises(ValueError, match='tool_threads'):
      run(tasks=TASKS[:1], **bad)


def test_a_thread_that_hangs_does_not_keep_the_interpreter():
  code = (
    'import threading\n'
    'from agentjax.rollout.calls import Call, Calls\n'
    'calls = Calls(1, 0.1)\n'
    "calls.submit(Call('stuck', threading.Event().wait))\n"
    'print(calls.ended(block=True)[0].given_up)\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, timeout=60
  )
  assert (done.returncode, done.stdout) == (0, 'True\n'), done.stderr
