"""The engine beside its peers and beside the floor: one command.

    python -m benchmarks.engine [--quick] [--only=REGEX]

Benchmarks, on top. The full form takes about an hour on two cores, makes the
peers' virtual environments at first, and leaves a dated JSON file; the quick
form takes a minute, runs no peer and leaves nothing. Each ratio is printed as
a line `figure NAME VALUE`. benchmarks/README.md says what they mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import command, measure, peers, rows, slow_tools, workloads
from benchmarks.peers import ROOT

CACHE = ROOT / '.cache' / 'benchmarks'
OURS = ('jax', 'jaxlib', 'flax', 'numpy')


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """The command line; wrong ones end the program with what to do."""
  parser = command.parser(
    'python -m benchmarks.engine',
    quick='ours alone, in a minute',
    peers=peers.SPECS,
    seconds=900.0,
  )
  args = command.parsed(parser, argv, peers.SPECS)
  if args.repetitions is None:
    args.repetitions = 3 if args.quick else 5
  if args.repetitions < 1:
    parser.error(f'--repetitions={args.repetitions}: give at least 1')
  table = rows.quick_rows() if args.quick else rows.all_rows()
  try:
    args.rows = {n: f for n, f in table.items() if re.search(args.only, n)}
  except re.error as error:
    parser.error(f'--only={args.only}: {error}')
  if not args.rows:
    parser.error(f'--only={args.only} fits none of {", ".join(table)}')
  return args


def run(
  bench: rows.Bench,
  table: Mapping[str, Callable[[rows.Bench], rows.Row]],
  done: dict[str, rows.Row],
) -> None:
  """Runs rows in order and prints each; what is finished stands in `done`."""
  for name, row in table.items():
    began = time.perf_counter()
    done[name] = row(bench)
    took = time.perf_counter() - began
    print(f'\n{name} ({took:.0f} s)')
    for remark in done[name].remarks:
      print(f'  {remark}')
    for figure, value in done[name].figures.items():
      print(measure.figure(figure, value), flush=True)


def report(
  argv: Sequence[str],
  bench: rows.Bench,
  machine: Mapping[str, Any],
  done: Mapping[str, rows.Row],
  complete: bool,
) -> dict[str, Any]:
  """Everything that a run found, as JSON-able data."""
  return {
    'command': ' '.join(['python -m benchmarks.engine', *argv]),
    'complete': complete,
    'machine': {**machine, **bench.rates},
    'versions': {
      'ours': measure.versions(OURS),
      **{name: peer.versions for name, peer in bench.peers.items()},
    },
    'workload': {
      'prompt': workloads.PROMPT,
      'new_tokens': workloads.NEW_TOKENS,
      'trajectories': workloads.TRAJECTORIES,
      'turn_tokens': workloads.TURN_TOKENS,
      'observation': workloads.OBSERVATION,
      'slow_tools': dataclasses.asdict(slow_tools.Shape()),
      'mean_turn': slow_tools.MEAN_TURN,
      'latency_seconds': slow_tools.LATENCY,
    },
    'figures': {k: v for row in done.values() for k, v in row.figures.items()},
    'rows': {
      name: {
        'remarks': row.remarks,
        'median_seconds': {
          s: measure.median(ms) for s, ms in row.systems.items()
        },
        'repetitions': row.systems,
      }
      for name, row in done.items()
    },
  }


def main(argv: Sequence[str]) -> None:
  args = parse(argv)
  now = datetime.datetime.now(datetime.UTC)
  machine = measure.describe_machine()
  print(f'{now:%Y-%m-%d %H:%M} UTC, {machine}')
  running = {} if args.quick else peers.start(args.peers, CACHE)
  done: dict[str, rows.Row] = {}
  try:
    bench = rows.Bench(
      running,
      CACHE,
      args.repetitions,
      args.seconds_per_system,
      first_run=not args.quick,  # ours compile when they are made
    )
    try:
      run(bench, args.rows, done)
    finally:
      if done and not args.quick:
        found = report(argv, bench, machine, done, len(done) == len(args.rows))
        args.results.mkdir(parents=True, exist_ok=True)
        file = args.results / f'{now:%Y-%m-%dT%H%M}-engine.json'
        file.write_text(
          json.dumps({'date': now.isoformat(), **found}, indent=1) + '\n'
        )
        print(f'\nwritten: {file}')
  finally:
    for peer in running.values():
      peer.close()


if __name__ == '__main__':
  main(sys.argv[1:])
