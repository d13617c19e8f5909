"""The audit of a config: its tasks, environment, chat and limits, no model.

    python -m experiments.audit --config=F [--n=64] [--seed=0] [--threads=4] \
      [--config.key=value ...]

Floor 4. Policies without a model play what the config would train on, with its
own chat and limits, and so does the expert of the environment's module if it
has one; the baselines are those that the module states (`agentjax.audit`).
Exit code 0 where every verdict is ok, 1 where one is not, 2 for a wrong
command line or config.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from experiments import main as command_line
from experiments import overrides

NEEDED = ('chat', 'make_environment', 'tasks', 'limits')


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
  """The flags of this program, and the config that the others make."""
  parser = argparse.ArgumentParser(
    prog='python -m experiments.audit',
    description=__doc__.split('\n')[0],
    epilog='All other flags are those of experiments.main: --config=FILE and '
    '--config.key=value.',
    allow_abbrev=False,
  )
  parser.add_argument('--n', type=int, default=64, help='tasks (64)')
  parser.add_argument('--seed', type=int, default=0, help='of all chance (0)')
  parser.add_argument('--threads', type=int, default=4, help='episodes at once')
  args, rest = parser.parse_known_args(argv)
  for name, least in (('n', 1), ('seed', 0), ('threads', 1)):
    if getattr(args, name) < least:
      parser.error(f'--{name} is {getattr(args, name)}: give {least} or more')
  try:
    config, _ = command_line.parse(['audit', *rest, '--workdir=nowhere'])
  except overrides.UsageError as error:
    parser.error(str(error))
  for name in NEEDED:
    if name not in config:
      parser.error(f'the config has no section {name}')
  return args, config.to_dict()


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command line; returns the exit code."""
  args, config = parse(sys.argv[1:] if argv is None else argv)
  # These bring JAX: seconds, so only when needed.
  from agentjax import audit
  from agentjax.env.base import InfraError
  from agentjax.training import ConfigError

  try:
    subject = _subject(args, config)
    good = audit.show(subject, seed=args.seed, threads=args.threads)
  except ConfigError as error:
    print(error, file=sys.stderr)
    return 2
  except InfraError as error:
    print(error, file=sys.stderr)
    return 1
  return 0 if good else 1


def _subject(args: argparse.Namespace, config: dict[str, Any]):
  """What the config would train on, `n` tasks spread over all."""
  from agentjax import audit
  from experiments import launch

  built = {n: launch.build(config[n], f'config.{n}') for n in NEEDED}
  tasks = built['tasks']
  n = min(args.n, len(tasks))
  make = built['make_environment']
  module = sys.modules[getattr(make, 'func', make).__module__]
  return audit.Subject(
    name=f'{module.__name__}, as in the config',
    tasks=[tasks[i * len(tasks) // n] for i in range(n)],
    make_environment=make,
    expert=getattr(module, 'expert', None),
    baselines=getattr(module, 'BASELINES', {}),
    chat=built['chat'],
    limits=built['limits'],
  )


if __name__ == '__main__':
  sys.exit(main())
