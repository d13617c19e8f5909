"""The command line: `python -m experiments.main --config=F --workdir=W`.

Floor 4. Two flags, and an override for any key of the config file:

  --config=configs/NAME.py[:ARGUMENT]   what to run
  --workdir=DIRECTORY                   a directory or bucket; started again
                                        with the same one, a run goes on
  --config.section.key=value            changes one value of the config

A wrong command line ends with exit code 2 and a message before JAX or
anything else slow is imported, and a wrong config with the same code before
the first step. What a person can put right elsewhere (a workdir in use, a full
disk, a checkpoint of another config, damaged weights, environments that fail)
ends with exit code 1 and a message. A bug keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import ml_collections
from absl import flags
from ml_collections import config_flags

from experiments import overrides


def parse(argv: Sequence[str]) -> tuple[ml_collections.FrozenConfigDict, str]:
  """Reads a command line (its first element is the program's name).

  Returns the config with its overrides, frozen, and the workdir.

  Raises:
    overrides.UsageError: anything is wrong with it; says what, and the remedy.
  """
  rest, changes = overrides.split(argv)
  values = flags.FlagValues()
  config_flags.DEFINE_config_file(
    'config', None, 'What to run.', flag_values=values, sys_argv=list(rest)
  )
  flags.DEFINE_string(
    'workdir', None, 'Where the run lives.', flag_values=values
  )
  try:
    positional = values(rest)[1:]
  except flags.Error as e:
    raise overrides.UsageError(str(e)) from e
  if positional:
    raise overrides.UsageError(
      f'{positional[0]!r} is not a flag: write --config=FILE, --workdir=DIR '
      'or --config.key=value'
    )
  for name, example in (
    ('config', 'configs/quickstart.py'),
    ('workdir', 'runs/quickstart'),
  ):
    # An empty text is what a shell makes of an unset variable.
    if not values[name].present or values[name].value == '':
      raise overrides.UsageError(
        f'--{name} is missing: as in --{name}={example}'
      )
  filename = values['config'].config_filename.split(':', 1)[0]
  if not os.path.isfile(filename):
    raise overrides.UsageError(
      f'--config={filename}: there is no such file; configs stand in configs/'
    )
  config = values['config'].value
  if not isinstance(config, ml_collections.ConfigDict):
    raise overrides.UsageError(
      f'--config={filename}: its get_config returns a '
      f'{type(config).__name__}, not an ml_collections.ConfigDict'
    )
  overrides.apply(config, changes)
  return ml_collections.FrozenConfigDict(config), values['workdir'].value


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command line; returns the exit code."""
  argv = sys.argv if argv is None else argv
  if {'--help', '-h'} & set(argv[1:]):
    print(__doc__)
    return 0
  try:
    config, workdir = parse(argv)
  except overrides.UsageError as e:
    print(f'{e}\n(--help tells how this is called)', file=sys.stderr)
    return 2
  from experiments import launch  # brings JAX: seconds, so only when needed

  try:
    launch.run(config, workdir)
  except launch.ConfigError as e:
    print(e, file=sys.stderr)
    return 2
  except launch.REFUSALS as e:
    print(e, file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
