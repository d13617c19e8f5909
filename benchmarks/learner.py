"""The learner beside its peers and beside the floor: one command.

    python -m benchmarks.learner [--quick] [--only=REGEX] [--prepare]

Benchmarks, on top. The full form takes about 20 minutes on two cores, makes
the peers' virtual environments at first, and leaves a dated JSON file; the
quick form takes a minute, runs ours against the floor alone and leaves
nothing; `--prepare` makes the environments and the models, and ends. Each
ratio is a line `figure NAME VALUE`. benchmarks/README.md says what they mean.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import (
  command,
  learner_rows,
  learner_work,
  measure,
  models,
  peers,
)
from benchmarks.engine import CACHE
from benchmarks.learner_rows import Bench
from benchmarks.rows import Row


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """The command line; wrong ones end the program with what to do."""
  parser = command.parser(
    'python -m benchmarks.learner',
    quick='ours alone at 10M, in a minute',
    peers=learner_rows.PEERS,
    seconds=300.0,
  )
  parser.add_argument(
    '--prepare', action='store_true', help='make what is needed, run nothing'
  )
  args = command.parsed(parser, argv, learner_rows.PEERS)
  if args.quick:
    args.peers = []
  if args.repetitions is None:
    args.repetitions = 3 if args.quick else 5
  if args.repetitions < 1:
    parser.error(f'--repetitions={args.repetitions}: give at least 1')
  sizes = ['10m'] if args.quick else list(models.MODELS)
  try:
    args.sizes = [s for s in sizes if re.search(args.only, f'learner_{s}')]
  except re.error as error:
    parser.error(f'--only={args.only}: {error}')
  if not args.sizes:
    rows = ', '.join(f'learner_{s}' for s in sizes)
    parser.error(f'--only={args.only} fits none of {rows}')
  return args


def report(
  argv: Sequence[str],
  bench: Bench,
  machine: dict[str, Any],
  done: dict[str, Row],
  complete: bool,
) -> dict[str, Any]:
  """Everything that a run found, as JSON-able data."""
  return {
    'command': ' '.join(['python -m benchmarks.learner', *argv]),
    'complete': complete,
    'machine': {**machine, 'flops_per_second': bench.rates},
    'versions': bench.versions,
    'workload': {
      'rows': learner_work.ROWS,
      'parts': learner_work.spans(),
      'settings': learner_work.SETTINGS,
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


def prepare(args: argparse.Namespace) -> None:
  """Makes the peers' environments and the models they read."""
  for name in args.peers:
    peers.install(learner_rows.PEERS[name], CACHE)
  for size in args.sizes:
    models.make(size, CACHE)
  print(f'prepared: {CACHE}')


def main(argv: Sequence[str]) -> None:
  args = parse(argv)
  if args.prepare:
    return prepare(args)
  now = datetime.datetime.now(datetime.UTC)
  machine = measure.describe_machine()
  print(f'{now:%Y-%m-%d %H:%M} UTC, {machine}', flush=True)
  bench = Bench(
    args.peers,
    None if args.quick else CACHE,
    args.repetitions,
    args.seconds_per_system,
  )
  done: dict[str, Row] = {}
  try:
    for size in args.sizes:
      name, began = f'learner_{size}', time.perf_counter()
      row = done[name] = learner_rows.learner(bench, size)
      print(f'\n{name} ({time.perf_counter() - began:.0f} s)')
      for remark in row.remarks:
        print(f'  {remark}')
      for figure, value in row.figures.items():
        print(measure.figure(figure, value), flush=True)
  finally:
    if done and not args.quick:
      complete = len(done) == len(args.sizes)
      found = report(argv, bench, machine, done, complete)
      args.results.mkdir(parents=True, exist_ok=True)
      file = args.results / f'{now:%Y-%m-%dT%H%M}-learner.json'
      file.write_text(
        json.dumps({'date': now.isoformat(), **found}, indent=1) + '\n'
      )
      print(f'\nwritten: {file}')


if __name__ == '__main__':
  main(sys.argv[1:])
