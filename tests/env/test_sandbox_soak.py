"""Many episodes, and many that mean harm: nothing leaks, nobody else suffers.

Short forms of a working day; the long ones print what they measured.
"""

import os
import pathlib
import statistics
import threading
import time
import uuid

import episodes
import pytest
from sandboxes import SPEC

from agentjax.env.sandbox import Call, CallStatus, open_sandbox
from agentjax.env.sandbox.engines import Engine
from agentjax.env.sandbox.owner import RUN
from agentjax.env.sandbox.pool import Pool

PAGE = os.sysconf('SC_PAGE_SIZE')


def rss_mib():
  pages = pathlib.Path('/proc/self/statm').read_text().split()[1]
  return int(pages) * PAGE / 2**20


def zombies():
  """Children of this process that nobody has reaped."""
  out = []
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      fields = path.read_text().rpartition(')')[2].split()
    except OSError:
      continue
    if fields[0] == 'Z' and int(fields[1]) == os.getpid():
      out.append(path.parent.name)
  return out


def counts():
  return len(os.listdir('/proc/self/fd')), threading.active_count()


def left_of(backend, run):
  if backend == 'docker':
    label = f'{RUN}={run}'
    return Engine().ask(
      lambda c: c.containers(all=True, filters={'label': label})
    )
  return [
    p for p in pathlib.Path('/sys/fs/cgroup').glob('*/agentjax:*')
    if f':{os.getpid()}:' in p.name
  ]  # fmt: skip


def slope(points):
  """Least squares: rise for each step."""
  xs, ys = zip(*points, strict=True)
  return statistics.linear_regression(xs, ys).slope


# ---- R8 --------------------------------------------------------------------


def soak(backend, n, per_round):
  run = f'soak-{uuid.uuid4().hex[:8]}'
  with Pool(SPEC, backend, warm=1) as pool:
    pool.acquire().close()  # whatever is made once is made now
  before, points = counts(), []
  others = len(left_of(backend, run))  # of other tests of this process
  with Pool(SPEC, backend, warm=4, run=run) as pool:
    for first in range(0, n, per_round):
      seeds = range(first, min(n, first + per_round))
      outcome = episodes.run(pool, seeds, calls=8, threads=4, timeout_s=20)
      episodes.check(outcome, seeds, calls=8)
      assert outcome.failures == []
      points.append((first, rss_mib()))
    stats = pool.stats()
  end = time.monotonic() + 5
  while counts() > before and time.monotonic() < end:
    time.sleep(0.05)
  assert counts() <= before, (counts(), before)
  assert len(left_of(backend, run)) <= others and zombies() == []
  return points, stats


def test_r8_soak(backend):
  points, stats = soak(backend, 50, 10)
  assert stats.ends['closed'] == 50 and stats.calls.count == 400
  assert points[-1][1] - points[0][1] < 10


@pytest.mark.long
def test_r8_soak_of_1000_episodes(backend):
  began = time.monotonic()
  points, stats = soak(backend, 1000, 50)
  rise = 100 * slope(points[4:])
  assert rise < 1.0
  print(
    f'R8: {backend}: 1000 episodes x 8 calls in '
    f'{time.monotonic() - began:.0f} s, nothing left, RSS slope '
    f'{rise:.3f} MiB/100 episodes; start median {stats.starts.median_s:.3f} '
    f's, acquire median {1000 * stats.acquires.median_s:.2f} ms, call median '
    f'{1000 * stats.calls.median_s:.2f} ms, p95 '
    f'{1000 * stats.calls.p95_s:.2f} ms'
  )


# ---- R3 --------------------------------------------------------------------

BOMB = 'import os\nwhile True: os.fork()'
HOSTILE = {
  'bomb': Call(code=BOMB, timeout_s=2),
  'hog': Call(code='x = bytearray(1 << 30)', timeout_s=10),
  'flood': Call(argv=['yes'], timeout_s=10),
  'fill': Call(
    argv=['sh', '-c', 'head -c 1G /dev/zero > /tmp/x; rm /tmp/x; exit 1'],
    timeout_s=10,
  ),
  # More than the limit; they are removed, as others need the room later.
  'inodes': Call(
    code='import os\nn = 0\ntry:\n  while n < 20_000:\n'
    '    open(f"/tmp/{n}", "w")\n    n += 1\nfinally:\n'
    '  for i in range(n): os.unlink(f"/tmp/{i}")\nraise SystemExit(3)',
    timeout_s=10,
  ),
  'deaf': Call(
    code='import signal, time\nfor s in (1, 2, 15): '
    'signal.signal(s, signal.SIG_IGN)\ntime.sleep(99)',
    timeout_s=0.5,
  ),
  'daemon': Call(
    argv=['sh', '-c', 'setsid nohup sleep 999 & exit 3'], timeout_s=5
  ),
  'kill1': Call(
    code='import os\nfor n in (9, 15, 19):\n  try: os.kill(1, n)\n'
    '  except OSError: pass\nraise SystemExit(3)',
    timeout_s=5,
  ),
  'forge': Call(
    code='open("/proc/1/fd/1", "wb").write(b"x" * 99)', timeout_s=5
  ),
}


def calm(sandboxes, stop, pause_s):
  """Calls that mean no harm, one sandbox a thread: (seconds, lost)."""
  seconds, lost, lock = [], [], threading.Lock()

  def work(n, sandbox):
    while not stop.is_set():
      began = time.monotonic()
      try:
        said = sandbox.call(Call(code=f'print({n})', timeout_s=20)).stdout
        took = time.monotonic() - began
        with lock:
          seconds.append(took)
          if said != f'{n}\n':
            lost.append(said)
      except Exception as error:
        with lock:
          lost.append(repr(error))
        return
      time.sleep(pause_s)

  threads = [
    threading.Thread(target=work, args=pair) for pair in enumerate(sandboxes)
  ]
  for thread in threads:
    thread.start()
  return threads, seconds, lost


def p95(values):
  return sorted(values)[round(0.95 * (len(values) - 1))]


def hostile(backend, n, n_hostile, rounds, quiet_s):
  """(p95 when all is quiet, p95 beside the hostile, RSS growth in MiB)."""
  kinds = list(HOSTILE)
  with Pool(SPEC, backend, warm=0, most=64) as pool:
    held = [pool.acquire() for _ in range(n)]
    good, bad = held[n_hostile:], held[:n_hostile]
    before = rss_mib()
    stop = threading.Event()
    threads, quiet, lost = calm(good, stop, 0.2)
    time.sleep(quiet_s)
    stop.set()
    for thread in threads:
      thread.join()
    assert lost == []
    stop = threading.Event()
    threads, beside, lost = calm(good, stop, 0.2)
    ends, lock = [], threading.Lock()

    def harm(number):
      sandbox = bad[number]
      for i in range(number, rounds * len(kinds), n_hostile):
        kind = kinds[i % len(kinds)]
        result = sandbox.call(HOSTILE[kind])
        assert result.alive
        with lock:
          ends.append((kind, result.status))

    workers = [
      threading.Thread(target=harm, args=(i,)) for i in range(n_hostile)
    ]
    for worker in workers:
      worker.start()
    for worker in workers:
      worker.join()
    stop.set()
    for thread in threads:
      thread.join()
    grown = rss_mib() - before
    for sandbox in held:
      assert sandbox.call(Call(code='print(1)')).stdout == '1\n'
  assert lost == []
  assert len(ends) == rounds * len(kinds)
  wrong = [(k, s) for k, s in ends if s is CallStatus.OK]
  assert wrong == []
  return p95(quiet), p95(beside), grown, len(beside)


def test_r3_hostile_neighbours(backend):
  quiet, beside, grown, _ = hostile(backend, 8, 2, 1, quiet_s=2)
  assert grown < 50
  # Two busy processors of a test machine: that it does not stand still.
  assert beside < max(10 * quiet, 0.5)


@pytest.mark.long
def test_r3_hostile_neighbours_of_32(backend):
  quiet, beside, grown, n = hostile(backend, 32, 4, 50, quiet_s=15)
  print(
    f'R3: {backend}: 450 hostile calls in 4 of 32 sandboxes; {n} calls of the '
    f'others, 0 lost; p95 {1000 * quiet:.1f} ms quiet, {1000 * beside:.1f} ms '
    f'beside them ({beside / quiet:.2f} times), RSS {grown:+.1f} MiB'
  )
  assert grown < 50
  assert beside < 3 * quiet


# ---- R10 -------------------------------------------------------------------


def test_r10_warm_ones_are_quick(backend):
  times = []
  with Pool(SPEC, backend, warm=4) as pool:
    pool.acquire().close()
    for _ in range(8):
      end = time.monotonic() + 30
      while pool.stats().idle < 2 and time.monotonic() < end:
        time.sleep(0.02)
      began = time.monotonic()
      sandbox = pool.acquire()
      times.append(time.monotonic() - began)
      sandbox.close()
  assert statistics.median(times) < 0.005


@pytest.mark.long
def test_r10_cold_ones_and_32(backend):
  cold = []
  for _ in range(10):
    began = time.monotonic()
    with open_sandbox(SPEC, backend) as sandbox:
      sandbox.call(Call(argv=['true']))
      cold.append(time.monotonic() - began)
  with Pool(SPEC, backend, warm=32) as pool:
    began = time.monotonic()
    pool.acquire().close()
    while pool.stats().idle < 32 and time.monotonic() - began < 60:
      time.sleep(0.02)
    many = time.monotonic() - began
  print(
    f'R10: {backend}: cold median {statistics.median(cold):.3f} s, 32 warm '
    f'in {many:.2f} s, load {os.getloadavg()[0]:.1f}'
  )
  assert statistics.median(cold) < 0.8 and many < 15
