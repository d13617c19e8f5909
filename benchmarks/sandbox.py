"""What a call in a sandbox costs, in each backend and beside `docker run`.

    python -m benchmarks.sandbox [--quick] [--only=REGEX] [--repetitions=N]

Benchmarks, on top. Medians of single calls through the runner, of sandboxes
that are open; backends take turns call by call, and so does, less often, a
container of its own for each call. The full form takes two minutes and leaves
a dated JSON file; the quick form takes half a minute and leaves nothing. Each
figure is a line `figure NAME VALUE`. benchmarks/README.md says what they mean.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from agentjax.env.base import InfraError
from agentjax.env.sandbox import (
  Call,
  CallResult,
  CallStatus,
  Sandbox,
  SandboxSpec,
  choose_backend,
  open_sandbox,
)
from benchmarks import command, measure
from benchmarks.measure import Measurement, interleave, median

BACKENDS = ('docker', 'bwrap')
ROWS = ('exec_true', 'fork_python', 'session_python', 'session_shell', 'open')
_RUNS, _OPENS = 15, 10  # of those that take half a second each


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """The command line; wrong ones end the program with what to do."""
  parser = command.alone(
    'python -m benchmarks.sandbox',
    quick='in half a minute',
    repetitions='calls; default 2000, or 300 with --quick',
  )
  args = parser.parse_args(argv)
  if args.repetitions is None:
    args.repetitions = 300 if args.quick else 2000
  if args.repetitions < 1:
    parser.error(f'--repetitions={args.repetitions}: give at least 1')
  try:
    args.rows = [row for row in ROWS if re.search(args.only, row)]
  except re.error as error:
    parser.error(f'--only={args.only}: {error}')
  if not args.rows:
    parser.error(f'--only={args.only} fits none of {", ".join(ROWS)}')
  return args


def timed(call: Callable[[], CallResult]) -> Callable[[int], Measurement]:
  """A measurement of one call, which must end well."""

  def once(_: int) -> Measurement:
    began = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - began
    if result.status is not CallStatus.OK:
      sys.exit(f'a call did not end well: {result}')
    return {'seconds': seconds}

  return once


def callee(row: str, sandbox: Sandbox) -> Callable[[int], Measurement]:
  """What a row repeats in one sandbox."""
  if row == 'exec_true':
    return timed(lambda: sandbox.call(Call(argv=['true'])))
  if row == 'fork_python':
    return timed(lambda: sandbox.call(Call(code='x = 6 * 7')))
  session = sandbox.session('python' if row == 'session_python' else 'shell')
  text = 'x = 6 * 7' if row == 'session_python' else 'x=$((6 * 7))'
  return timed(lambda: session.run(text))


def opening(backend: str) -> Callable[[int], Measurement]:
  """From nothing to the answer of a first call; the end is not counted."""

  def once(_: int) -> Measurement:
    began = time.perf_counter()
    with open_sandbox(SandboxSpec(), backend) as sandbox:
      sandbox.call(Call(argv=['true']))
      return {'seconds': time.perf_counter() - began}

  return once


def docker_run(_: int) -> Measurement:
  """A container for one call, as the command line makes it."""
  command = ['docker', 'run', '--rm', '--network=none', SandboxSpec().image]
  began = time.perf_counter()
  subprocess.run([*command, 'true'], check=True, capture_output=True)
  return {'seconds': time.perf_counter() - began}


def run(args, backends: Sequence[str]) -> dict[str, dict]:
  """{row: {system: its measurements}}."""
  found = {}
  for row in args.rows:
    with contextlib.ExitStack() as stack:
      if row == 'open':
        systems = {name: opening(name) for name in backends}
        repetitions = min(args.repetitions, _OPENS)
      else:
        systems = {
          name: callee(
            row, stack.enter_context(open_sandbox(SandboxSpec(), name))
          )
          for name in backends
        }
        repetitions = args.repetitions
      found[row] = interleave(systems, repetitions)
      if row == 'exec_true' and 'docker' in backends:
        # In the same minute, and the sandboxes once more between its runs.
        few = min(args.repetitions, _RUNS)
        found['docker_run'] = interleave(
          {'docker': systems['docker'], 'run': docker_run}, few
        )
  return found


def figures(found: dict[str, dict]) -> dict[str, float]:
  """Name -> value: milliseconds of a call, and ratios of them."""
  out = {}
  for row, systems in found.items():
    for name, measurements in systems.items():
      if row != 'docker_run' or name == 'run':
        label = 'docker_run' if name == 'run' else f'{name}_{row}'
        out[f'sandbox_{label}_ms'] = 1000 * median(measurements)
  for row, systems in found.items():
    if set(systems) == set(BACKENDS):
      ratio = measure.speedup(systems, 'docker', 'bwrap')
      out[f'sandbox_{row}_bwrap_vs_docker'] = ratio
  if 'docker_run' in found:
    run_s = median(found['docker_run']['run'])
    out['sandbox_call_vs_docker_run'] = run_s / median(
      found['exec_true']['docker']
    )
  return out


def main(argv: Sequence[str]) -> None:
  args = parse(argv)
  now = datetime.datetime.now(datetime.UTC)
  machine = measure.describe_machine()
  print(f'{now:%Y-%m-%d %H:%M} UTC, {machine}', flush=True)
  backends = []
  for name in BACKENDS:
    try:
      backends.append(choose_backend(SandboxSpec(), name))
    except InfraError as error:
      print(f'without {name}: {error}')
  if not backends:
    sys.exit('no sandbox can run here: there is nothing to measure')
  found = run(args, backends)
  values = figures(found)
  for name, value in values.items():
    print(measure.figure(name, value))
  if not args.quick:
    loads = [m['load'] for s in found.values() for ms in s.values() for m in ms]
    report = {
      'date': now.isoformat(),
      'command': ' '.join(['python -m benchmarks.sandbox', *argv]),
      'machine': machine,
      'load': [min(loads), max(loads)],
      'figures': values,
      'repetitions': {
        row: {name: len(ms) for name, ms in systems.items()}
        for row, systems in found.items()
      },
    }
    args.results.mkdir(parents=True, exist_ok=True)
    file = args.results / f'{now:%Y-%m-%dT%H%M}-sandbox.json'
    file.write_text(json.dumps(report, indent=1) + '\n')
    print(f'\nwritten: {file}')


if __name__ == '__main__':
  main(sys.argv[1:])
