"""Runs a study: `python -m experiments.study NAME --workdir=DIR`.

Floor 4. A study is a file in experiments/studies/: a CLAIM, a CONFIG, ARMS and
SEEDS. An arm is a list of overrides, or a function from the first arm's
workdir (of the same seed) to one, for arms that are matched to it. Each arm
and seed is a process of its own; what has a summary.json is not run again. At
the end stands a table in Markdown, for experiments/LOG.md. A study of small
problems has no CONFIG, but a `run(workdir, arm, seed)` and a
`table(root, seeds, arms)` of its own.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from agentjax import storage


def main(argv: Sequence[str] | None = None) -> int:
  """The command line; returns the number of runs that failed."""
  parser = argparse.ArgumentParser(prog='python -m experiments.study')
  parser.add_argument('name', help='a module of experiments/studies')
  parser.add_argument('--workdir', required=True, help='of all its runs')
  parser.add_argument('--seeds', type=int, nargs='*', help='only these')
  parser.add_argument('--arms', nargs='*', help='only these')
  args = parser.parse_args(argv)
  if args.name not in (names := studies()):
    parser.error(f'no study {args.name!r}: choose of {names}')
  study = importlib.import_module(f'experiments.studies.{args.name}')
  root = pathlib.Path(args.workdir) / args.name
  seeds = study.SEEDS if args.seeds is None else args.seeds
  try:
    arms = chosen(study.ARMS, args.arms)
  except ValueError as error:
    parser.error(str(error))
  failed = 0
  for arm in arms:
    for seed in seeds:
      failed += not run(study, root, arm, seed)
  own = getattr(study, 'table', None)
  print(own(root, seeds, arms) if own else table(study, root, seeds, arms))
  return failed


def chosen(arms: Iterable[str], names: Sequence[str] | None) -> list[str]:
  """The arms of these names, in their own order; of None, all.

  What stands behind a dot names an arm too, where no other ends so.

  Raises:
    ValueError: a name of none, or of several.
  """
  if names is None:
    return list(arms)
  found = set()
  for name in names:
    fit = [a for a in arms if a == name or a.endswith(f'.{name}')]
    if name not in fit and len(fit) > 1:
      raise ValueError(f'{name!r} is the end of {", ".join(fit)}: name one')
    if not fit:
      raise ValueError(f'no arm {name!r}: choose of {", ".join(arms)}')
    found.add(name if name in fit else fit[0])
  return [a for a in arms if a in found]


def studies() -> list[str]:
  """The names of all studies."""
  found = pathlib.Path(__file__).with_name('studies').glob('*.py')
  return sorted(p.stem for p in found if p.stem != '__init__')


def run(study: Any, root: pathlib.Path, arm: str, seed: int) -> bool:
  """Runs one arm with one seed, if it is not finished; True if it is then."""
  workdir = root / arm / f'seed_{seed}'
  if (workdir / 'summary.json').exists():
    return True
  if own := getattr(study, 'run', None):
    return own(workdir, arm, seed)
  overrides = study.ARMS[arm]
  if callable(overrides):
    first = next(iter(study.ARMS))
    overrides = overrides(root / first / f'seed_{seed}')
  command = [
    sys.executable,
    '-m',
    'experiments.main',
    f'--config={study.CONFIG}',
    f'--workdir={workdir}',
    f'--config.seed={seed}',
    *(f'--config.{o}' for o in overrides),
  ]
  print(' '.join(command[1:]), flush=True)
  return subprocess.run(command, check=False).returncode == 0


def table(
  study: Any, root: pathlib.Path, seeds: Sequence[int], arms: Sequence[str]
) -> str:
  """The finished runs of these arms as a Markdown table, under the claim."""
  lines = [
    study.CLAIM,
    '',
    '| arm | seed | before | after | n | steps | seconds |',
    '|---|---|---|---|---|---|---|',
  ]
  for arm in arms:
    for seed in seeds:
      path = root / arm / f'seed_{seed}' / 'summary.json'
      if not path.exists():
        lines.append(f'| {arm} | {seed} | not run | | | | |')
        continue
      s = storage.read_json(path)
      cells = [_cell(s['before']), _cell(s['after']), str(s['after']['n'])]
      cells += [str(s['steps']), f'{s["seconds"]:.0f}']
      lines.append(f'| {arm} | {seed} | {" | ".join(cells)} |')
  return '\n'.join(lines)


def _cell(evaluation: dict[str, Any]) -> str:
  low, high = evaluation['pass@1_interval']
  return f'{evaluation["pass@1"]:.3f} [{low:.3f}, {high:.3f}]'


if __name__ == '__main__':
  sys.exit(main())
