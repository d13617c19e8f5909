"""Whether a config's programs fit chips that are not there.

    python -m experiments.compile_check --config=F --topology=v5p:2x2x2 \
      [--mesh=fsdp=8] [--engine-mesh=data=4] [--config.key=value ...]

Floor 4. Needs libtpu and no TPU. Reads the sections `policy.config`,
`optimizer`, `learner` and `engine` of a config; any of its keys is changed as
on the command line of `experiments.main`. The learner stands on all chips of
the topology, the engine by default on those of the first host. Prints, for
each program and chip, memory, FLOPs and collectives; the exit code is 1 where
one does not fit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments import main as command_line
from experiments import overrides


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Any]:
  """The flags of this program, and the config that the others make."""
  parser = argparse.ArgumentParser(
    prog='python -m experiments.compile_check',
    description=__doc__.split('\n')[0],
    epilog='All other flags are those of experiments.main: --config=FILE and '
    '--config.key=value.',
    allow_abbrev=False,
  )
  parser.add_argument('--topology', required=True, help='as in v5p:2x2x2')
  parser.add_argument(
    '--mesh', type=_axes, help='of the learner; default: fsdp over all chips'
  )
  parser.add_argument(
    '--engine-mesh', type=_axes, help="default: data over one host's chips"
  )
  args, rest = parser.parse_known_args(argv)
  try:
    config, _ = command_line.parse(
      ['compile_check', *rest, '--workdir=nowhere']
    )
  except overrides.UsageError as error:
    parser.error(str(error))
  for name in ('policy', 'optimizer', 'learner', 'engine'):
    if name not in config:
      parser.error(f'the config has no section {name}')
  return args, config.to_dict()


def _axes(text: str) -> dict[str, int]:
  """'data=2,tensor=4' as a dict."""
  pairs = [part.split('=') for part in text.split(',')]
  if any(len(p) != 2 or not p[1].isdigit() for p in pairs):
    raise argparse.ArgumentTypeError(f'{text!r}: write data=2,fsdp=2,tensor=2')
  axes = {name: int(size) for name, size in pairs}
  if wrong := set(axes) - {'data', 'fsdp', 'tensor'}:
    raise argparse.ArgumentTypeError(
      f'{sorted(wrong)}: axes are data, fsdp and tensor'
    )
  return axes


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command line; the number of programs that do not fit, or 2."""
  args, config = parse(sys.argv[1:] if argv is None else argv)
  # These bring JAX: seconds, so only when needed.
  from agentjax.model import ahead
  from agentjax.training import ConfigError

  try:
    with ahead.chips(args.topology) as chips:
      print(f'{args.topology}: {len(chips)} x {chips[0].device_kind}')
      return _check(args, config, chips)
  except (ahead.NoCompiler, ConfigError, ValueError) as error:
    print(error, file=sys.stderr)
    return 2


def _check(args, config, chips) -> int:
  from agentjax.model import ahead

  limit = ahead.HBM.get(chips[0].device_kind)
  too_large = 0
  for name, lowered in _programs(args, config, chips):
    began = time.monotonic()
    found = ahead.needs(lowered)
    for line in found.lines(name):
      print(line)
    verdict = 'the memory of this kind of chip is not known'
    if limit is not None:
      fits = found.bytes <= limit
      too_large += not fits
      verdict = (
        f'{found.bytes / 1e9:.2f} of {limit / 1e9:.1f} GB: '
        f'{"fits" if fits else "DOES NOT FIT"}'
      )
    print(f'  {verdict} ({time.monotonic() - began:.0f} s)', flush=True)
  return min(too_large, 1)


def _programs(args, config, chips) -> Iterator[tuple[str, Any]]:
  """(name, lowered program) of the learner and of the engine."""
  from agentjax.model.mesh import make_mesh
  from agentjax.model.stores import best_store
  from agentjax.rollout.programs import Programs
  from experiments import launch

  model = launch.build(config['policy']['config'], 'config.policy.config')
  axes = args.mesh or {'fsdp': len(chips)}
  learner = launch.build(config['learner'], 'config.learner')(
    model,
    optimizer=launch.build(config['optimizer'], 'config.optimizer'),
    mesh=make_mesh(**axes, devices=chips),
  )
  print(f'learner on {_said(axes)}, {learner.rows} rows of {learner.length}')
  for name, lowered in learner.lower().items():
    yield f'learner {name}', lowered
  first = [c for c in chips if c.process_index == chips[0].process_index]
  axes = args.engine_mesh or {'data': len(first)}
  options = dict(launch.build(config['engine'], 'config.engine').keywords)
  buckets = options.pop('buckets', (16, 64, 256))
  options.pop('stale_kv', None)
  dtype = options.setdefault('dtype', 'float32')
  options['cache_dtype'] = options.get('cache_dtype') or dtype
  options.setdefault('chunk', 16)
  mesh = make_mesh(**axes, devices=first)
  print(
    f'engine on {_said(axes)}, {options["slots"]} slots of {options["context"]}'
  )
  options.setdefault('store', best_store(model, options['cache_dtype'], mesh))
  programs = Programs(model, _stops(model), mesh=mesh, **options)
  for name, lowered in programs.lower(buckets).items():
    yield f'engine {name}', lowered


def _stops(model):
  """An automaton of the real size of the table's columns, with one stop id."""
  from agentjax.text.stop import StopAutomaton

  pieces = [b'', b''] + [b'x'] * (model.vocab_size - 2)
  return StopAutomaton.build(pieces, [], [1])


def _said(axes: Mapping[str, int]) -> str:
  return ' x '.join(f'{name} {size}' for name, size in axes.items())


if __name__ == '__main__':
  sys.exit(main())
