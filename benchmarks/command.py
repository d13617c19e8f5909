"""The command line that the benchmarks have in common.

Benchmarks, under the commands. Knows no row.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Collection, Sequence

from benchmarks.peers import ROOT


def alone(
  prog: str, *, quick: str, repetitions: str
) -> argparse.ArgumentParser:
  """A parser of the flags of a benchmark without peers; help of two of them."""
  out = argparse.ArgumentParser(prog=prog)
  out.add_argument('--quick', action='store_true', help=quick)
  out.add_argument('--only', default='', help='regex of rows to run')
  out.add_argument('--repetitions', type=int, help=repetitions)
  out.add_argument(
    '--results',
    type=pathlib.Path,
    default=ROOT / 'benchmarks' / 'results',
    help='folder for the JSON file of the full form',
  )
  return out


def parser(
  prog: str, *, quick: str, peers: Collection[str], seconds: float
) -> argparse.ArgumentParser:
  """A parser of their flags, for one that may add its own.

  Args:
    quick: help of --quick. peers: default of --peers. seconds: default of
      --seconds-per-system.
  """
  out = alone(prog, quick=quick, repetitions='default 5, or 3 with --quick')
  out.add_argument(
    '--peers',
    default=','.join(peers),
    help='comma-separated, of: %(default)s; empty for none',
  )
  out.add_argument(
    '--seconds-per-system',
    type=float,
    default=seconds,
    help='a system that needs longer in a row is measured less often, at '
    'least 3 times (default %(default)s)',
  )
  return out


def parsed(
  parser: argparse.ArgumentParser, argv: Sequence[str], known: Collection[str]
) -> argparse.Namespace:
  """The flags; a peer that is not known ends the program with what to do."""
  args = parser.parse_args(argv)
  args.peers = [name for name in args.peers.split(',') if name]
  if unknown := set(args.peers) - set(known):
    parser.error(f'no peer is called {sorted(unknown)}')
  return args
