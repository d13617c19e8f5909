"""The command line: `python -m experiments.main --config=F --workdir=W`.

Floor 4. Two flags, and an override for any key of the config file:

  --config=configs/NAME.py[:ARGUMENT]   what to run
  --workdir=DIRECTORY                   a directory or bucket; started again
                                        with the same one, a run goes on
  --config.section.key=value            changes one value of the config
  --config.section="{'call': ...}"      a whole section, as the file writes it
  --config.section.+key=value           adds one that the file leaves out

A wrong command line ends with exit code 2 and a message before JAX or
anything else slow is imported, and a wrong config with the same code before
the first step; so does a workdir that cannot be one. What a person can put
right elsewhere (a workdir in use, a full disk, damaged files, a checkpoint of
another config, damaged weights, environments that fail) ends with exit code 1
and a message, and Ctrl-C with 130. A bug keeps its traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence

import ml_collections
from absl import flags
from ml_collections import config_flags

from experiments import overrides

STOPPED = 130  # by a person: 128 and the number of SIGINT


def parse(argv: Sequence[str]) -> tuple[ml_collections.FrozenConfigDict, str]:
  """Reads a command line (its first element is the program's name).

  Returns the config with its overrides, frozen, and the workdir.

  Raises:
    overrides.UsageError: anything is wrong with it; says what, and the remedy.
  """
  rest, changes = overrides.split(argv)
  with _config_file_named(rest):
    return _parse(rest, changes)


def _parse(rest, changes) -> tuple[ml_collections.FrozenConfigDict, str]:
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
    first = e  # of the config file itself, which the library wraps in pages
    while first.__context__ is not None:
      first = first.__context__
    if 'parsing config file' in str(e):
      raise first from None
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
  # The library keeps what the file could not open until somebody asks.
  if isinstance(
    error := getattr(config, '__dict__', {}).get('_error'), OSError
  ):
    raise error
  if not isinstance(config, ml_collections.ConfigDict):
    raise overrides.UsageError(
      f'--config={filename}: its get_config returns a '
      f'{type(config).__name__}, not an ml_collections.ConfigDict'
    )
  overrides.apply(config, changes)
  return ml_collections.FrozenConfigDict(config), values['workdir'].value


@contextlib.contextmanager
def _config_file_named(rest: Sequence[str]) -> Iterator[None]:
  """What a config file raises, as a usage error with its file and line."""
  try:
    yield
  except overrides.UsageError:
    raise
  except Exception as error:  # the file is a program: anything may come
    said = [a.split('=', 1)[-1] for a in rest if not a.startswith('--workdir')]
    found = [
      (*x.split(':', 1), '')[:2]
      for x in said[1:]
      if os.path.isfile(x.split(':', 1)[0])
    ]
    if not found:
      raise
    where, chosen = found[0]
    if chosen and isinstance(error, ValueError):  # it has no such variant
      said = f'--config={where}:{chosen}: {error}'
      raise overrides.UsageError(said) from None
    lines = [
      frame.lineno
      for frame in traceback.extract_tb(error.__traceback__)
      if os.path.abspath(frame.filename) == os.path.abspath(where)
    ]
    if isinstance(error, SyntaxError) and error.lineno:
      lines = [error.lineno]
    line = f', line {lines[-1]}' if lines else ''
    raise overrides.UsageError(
      f'--config={where}{line}: {type(error).__name__}: {error}: a config is a '
      'Python file with a function get_config that returns a ConfigDict'
    ) from error


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command line; returns the exit code."""
  argv = sys.argv if argv is None else argv
  if {'--help', '-h'} & set(argv[1:]):
    print(__doc__)
    return 0
  try:
    return _run(argv)
  except KeyboardInterrupt as e:  # `train` says in it where it stopped
    print(str(e) or 'stopped', file=sys.stderr)
    return STOPPED


def _run(argv: Sequence[str]) -> int:
  try:
    config, workdir = parse(argv)
  except overrides.UsageError as e:
    print(f'{e}\n(--help tells how this is called)', file=sys.stderr)
    return 2
  from experiments import launch  # brings JAX: seconds, so only when needed

  try:
    launch.run(config, workdir)
  except (launch.ConfigError, launch.Unusable) as e:
    print(e, file=sys.stderr)
    return 2
  except launch.REFUSALS as e:
    print(e, file=sys.stderr)
    return 1
  return 0


def _end(code: int) -> None:
  """Ends the process; after a stop nothing is printed behind its line.

  Orbax's threads, of a save that was cut off, print tracebacks while the
  interpreter goes down.
  """
  if code == STOPPED:
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
  sys.exit(code)


if __name__ == '__main__':
  _end(main())
