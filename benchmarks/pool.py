"""What a sandbox costs that is ready, one that is not, and many at once.

    python -m benchmarks.pool [--quick] [--only=REGEX] [--many=32]

Benchmarks, on top. For each backend: `acquire` of a pool that has idle ones; a
start from nothing to the first answer; `--many` of them into a pool; the
memory of each. Beside it, for Docker, `docker run --rm`. The full form takes a
few minutes and leaves a dated JSON file; the quick form takes half a minute
and leaves nothing. Each figure is a line `figure NAME VALUE`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence

from agentjax.env.base import InfraError
from agentjax.env.sandbox import (
  Call,
  Sandbox,
  SandboxSpec,
  choose_backend,
  open_sandbox,
)
from agentjax.env.sandbox.pool import Pool
from benchmarks import command, measure

BACKENDS = ('docker', 'bwrap')


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """The command line; wrong ones end the program with what to do."""
  parser = command.alone(
    'python -m benchmarks.pool',
    quick='in half a minute',
    repetitions='default 40, or 8 with --quick',
  )
  parser.add_argument('--many', type=int, help='default 32, or 8 with --quick')
  args = parser.parse_args(argv)
  args.many = args.many or (8 if args.quick else 32)
  args.repetitions = args.repetitions or (8 if args.quick else 40)
  if args.many < 1 or args.repetitions < 1:
    parser.error('--many and --repetitions: give at least 1')
  args.backends = [b for b in BACKENDS if re.search(args.only, b)]
  return args


def wait_for(pool: Pool, idle: int, seconds: float = 120.0) -> None:
  """Until so many are idle; ends the program if that does not come."""
  end = time.monotonic() + seconds
  while pool.stats().idle < idle:
    if time.monotonic() > end:
      sys.exit(f'{pool.stats()} after {seconds:g} s: wanted {idle} idle ones')
    time.sleep(0.005)


def warm_acquire(backend: str, repetitions: int) -> list[float]:
  """Seconds until an episode has one of a pool in which some are idle."""
  out = []
  with Pool(SandboxSpec(), backend, warm=4) as pool:
    pool.acquire().close()
    for _ in range(repetitions):
      wait_for(pool, 2)
      began = time.perf_counter()
      sandbox = pool.acquire()
      out.append(time.perf_counter() - began)
      sandbox.close()
  return out


def cold_start(backend: str, repetitions: int) -> list[float]:
  """Seconds from nothing to the answer of a first call; not the end."""
  out = []
  for _ in range(repetitions):
    began = time.perf_counter()
    with open_sandbox(SandboxSpec(), backend) as sandbox:
      sandbox.call(Call(argv=['true']))
      out.append(time.perf_counter() - began)
  return out


def many(backend: str, n: int) -> tuple[float, float]:
  """(seconds until `n` are warm, MiB of each)."""
  with Pool(SandboxSpec(), backend, warm=n, most=2 * n) as pool:
    began = time.perf_counter()
    pool.acquire().close()
    wait_for(pool, n)
    seconds = time.perf_counter() - began
    held = [pool.acquire() for _ in range(n)]
    for sandbox in held:
      sandbox.call(Call(code='x = 1'))
    return seconds, sum(map(memory_mib, held)) / n


def memory_mib(sandbox: Sandbox) -> float:
  """Of its processes and of what the engine keeps for it alone.

  Proportional set size: a page that many share counts as its part in each.
  """
  pids, mark = [], mark_of(sandbox)
  for path in pathlib.Path('/proc').glob('[0-9]*'):
    with contextlib.suppress(OSError):
      text = (path / 'cgroup').read_text()
      words = (path / 'cmdline').read_bytes().decode('utf-8', 'replace')
      if mark in text or mark in words:
        pids.append(path)
  total = 0
  for path in pids:
    with contextlib.suppress(OSError):
      text = (path / 'smaps_rollup').read_text()
      total += int(re.search(r'^Pss: +(\d+) kB', text, re.MULTILINE)[1])
  return total / 1024


def mark_of(sandbox: Sandbox) -> str:
  """What control groups and command lines of its processes hold."""
  if sandbox.facts['backend'] == 'docker':
    command = ['docker', 'inspect', '-f', '{{.Id}}', sandbox.facts['container']]
    return subprocess.check_output(command, text=True).strip()
  text = pathlib.Path(f'/proc/{sandbox.facts["pid"]}/cgroup').read_text()
  return re.search(r'agentjax:\S+', text)[0] if 'agentjax:' in text else text


def docker_run(repetitions: int) -> list[float]:
  """Seconds of a container for one call, as the command line makes it."""
  out = []
  command = ['docker', 'run', '--rm', '--network=none', SandboxSpec().image]
  for _ in range(repetitions):
    began = time.perf_counter()
    subprocess.run([*command, 'true'], check=True, capture_output=True)
    out.append(time.perf_counter() - began)
  return out


def figures(name: str, args: argparse.Namespace) -> dict[str, float]:
  """What was measured of one backend, by name."""
  middle = lambda values: sorted(values)[len(values) // 2]  # noqa: E731
  seconds, mib = many(name, args.many)
  cold = cold_start(name, max(3, args.repetitions // 4))
  out = {
    f'{name}_warm_acquire_ms': 1e3
    * middle(warm_acquire(name, args.repetitions)),
    f'{name}_cold_start_s': middle(cold),
    f'{name}_{args.many}_warm_s': seconds,
    f'{name}_memory_mib_each': mib,
  }
  if name == 'docker':
    run = middle(docker_run(max(3, args.repetitions // 4)))
    out['docker_run_s'] = run
    out['docker_run_vs_warm_acquire'] = run / (
      1e-3 * out['docker_warm_acquire_ms']
    )
  return out


def main(argv: Sequence[str] | None = None) -> int:
  args = parse(sys.argv[1:] if argv is None else argv)
  found: dict[str, float] = {}
  machine = measure.describe_machine()
  for backend in args.backends:
    try:
      choose_backend(SandboxSpec(), backend)
    except InfraError as error:
      print(f'{backend} is left out: {error}')
      continue
    measured = figures(backend, args)
    for name, value in measured.items():
      print(measure.figure(f'pool_{name}', value), flush=True)
    found |= measured
  print(f'load {os.getloadavg()[0]:.2f}')
  if not args.quick and found:
    now = datetime.datetime.now(datetime.UTC)
    path = args.results / f'{now:%Y-%m-%dT%H%M}-pool.json'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({'machine': machine, **found}, indent=1) + '\n')
    print(f'written: {path}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
