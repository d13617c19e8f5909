"""The command line of the audit.

Floor 3. Prints a table for each environment, row by row as it is played. Exit
code 0 where every verdict is ok, 1 where one is not or an exploit was paid, 2
for a wrong command line.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import pkgutil
import sys
import types
from collections.abc import Sequence

import agentjax.env
from agentjax import audit
from agentjax.env.base import InfraError


class UsageError(ValueError):
  """The command line is wrong; says how, and the remedy."""


def environments() -> list[types.ModuleType]:
  """The modules of agentjax.env that state baselines."""
  found = []
  for item in pkgutil.iter_modules(agentjax.env.__path__, 'agentjax.env.'):
    module = importlib.import_module(item.name)
    if hasattr(module, 'BASELINES'):
      found.append(module)
  return found


def named(name: str) -> types.ModuleType:
  """The module of that dotted name.

  Raises:
    UsageError: there is none, or it cannot be imported.
  """
  try:
    return importlib.import_module(name)
  except (ModuleNotFoundError, TypeError, ValueError) as error:
    missing = getattr(error, 'name', None)
    if missing and not f'{name}.'.startswith(f'{missing}.'):
      raise UsageError(f'--env {name} needs {missing}: install it') from error
    known = [m.__name__ for m in environments()]
    tails = {n.rsplit('.', 1)[1]: n for n in known}
    path = name.removesuffix('.py').replace('/', '.')
    near = difflib.get_close_matches(path.rsplit('.', 1)[-1], tails, 1)
    hint = f'did you mean {tails[near[0]]}? ' if near else ''
    raise UsageError(
      f'--env {name}: there is no such module; {hint}'
      f'The package has {", ".join(known)}; one of your own is named by its '
      'dotted name, from a folder on PYTHONPATH'
    ) from error


def run(module: types.ModuleType, n: int, seed: int, threads: int) -> bool:
  """Audits a module and prints its table; True if every verdict is ok.

  Raises:
    UsageError: the module cannot be audited, or has not that many tasks.
    InfraError: its environment cannot run here.
  """
  try:
    subject = audit.subject(module, n=n, seed=seed)
  except (TypeError, ValueError) as error:
    raise UsageError(f'{module.__name__}: {error}') from error
  return audit.show(subject, seed=seed, threads=threads)


def parser() -> argparse.ArgumentParser:
  out = argparse.ArgumentParser(
    prog='python -m agentjax.audit',
    description='Prints what policies without a model earn in an environment, '
    'beside what they are owed.',
    epilog='Without arguments: every environment of the package that can run '
    'here. A config is audited by `python -m experiments.audit`.',
    allow_abbrev=False,
  )
  out.add_argument(
    '--env', action='append', metavar='MODULE',
    help='dotted name, as agentjax.env.arithmetic; may stand several times',
  )  # fmt: skip
  out.add_argument('--n', type=int, default=32, help='tasks (32)')
  out.add_argument('--seed', type=int, default=0, help='of all chance (0)')
  out.add_argument('--threads', type=int, default=4, help='episodes at once')
  out.add_argument(
    '--exploits', metavar='PATH',
    help='a file of exploits to run against the verifier of code; without '
    '--env nothing else is audited then',
  )  # fmt: skip
  out.add_argument(
    '--backend', default='auto', choices=('auto', 'docker', 'bwrap'),
    help='of the sandboxes of the exploits',
  )  # fmt: skip
  return out


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command line; returns the exit code."""
  args = parser().parse_args(argv)
  try:
    return _run(args)
  except UsageError as error:
    print(error, file=sys.stderr)
    return 2


def _run(args: argparse.Namespace) -> int:
  for name, least in (('n', 1), ('seed', 0), ('threads', 1)):
    if getattr(args, name) < least:
      raise UsageError(
        f'--{name} is {getattr(args, name)}: give {least} or more'
      )
  if args.exploits is not None and not os.path.exists(args.exploits):
    raise UsageError(f'--exploits {args.exploits}: there is no such file')
  good, played = True, 0
  chosen = [named(name) for name in args.env or ()]
  if not chosen and args.exploits is None:
    chosen = environments()
  for module in chosen:
    try:
      good = run(module, args.n, args.seed, args.threads) and good
      played += 1
    except InfraError as error:
      print(f'{module.__name__}: left out, it cannot run here: {error}')
      good = good and not args.env
    print()
  code = 0 if good and (played or not chosen) else 1
  if args.exploits is not None:
    from agentjax import exploits

    # Opens sandboxes: only when asked for.
    try:
      code = max(code, exploits.run(args.exploits, backend=args.backend))
    except (ValueError, InfraError) as error:
      raise UsageError(f'--exploits {error}') from error
  return code


if __name__ == '__main__':
  sys.exit(main())
