"""Whether a config's programs fit chips that are not there.

    python -m experiments.compile_check --config=F --topology=v5p:2x2x2 \
      [--mesh=fsdp=8] [--engine-mesh=data=4] [--engine-topology=v5p:2x2x1] \
      [--config.key=value ...]

Floor 4. Needs libtpu and no TPU. Reads the sections `policy.config`,
`optimizer`, `learner` and `engine` of a config; any of its keys is changed as
on the command line of `experiments.main`. The learner stands on all chips of
the topology, the engine by default on those of the first host. Prints, for
each program and chip, memory, FLOPs and collectives, and for a step of the
learner what the model itself asks for, which the utilisation is counted by. A
program of the learner has to fit beside all that the learner holds, moments
too; the exit code is 1 where one does not.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
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
  parser.add_argument(
    '--engine-topology',
    help="default: the learner's first host; XLA compiles for one of v5e "
    'only where it is a topology of its own, v5e:2x2',
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
  # The compiler needs no TPU, and a TPU that is there is left alone.
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
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
  for part in (_learner, _engine):
    said, programs = part(args, config, chips)
    print(said)
    found = {}
    for name, lowered in programs.items():
      began = time.monotonic()
      found[name] = ahead.needs(lowered)
      print('\n'.join(found[name].lines(f'{part.__name__[1:]} {name}')))
      print(f'  compiled in {time.monotonic() - began:.0f} s', flush=True)
    # Between its programs a part holds what the largest of them is given: the
    # learner's `apply` is given weights, moments and sums.
    held = max(needs.arguments for needs in found.values())
    for name, needs in found.items():
      all_in_all = held - needs.arguments + needs.bytes
      verdict = 'the memory of this kind of chip is not known'
      if limit is not None:
        fits = all_in_all <= limit
        too_large += not fits
        verdict = f'of {limit / 1e9:.1f} GB: ' + (
          'fits' if fits else 'DOES NOT FIT'
        )
      print(
        f'{part.__name__[1:]} {name}: {all_in_all / 1e9:.2f} GB with all that '
        f'it holds, {verdict}'
      )
  return min(too_large, 1)


def _learner(args, config, chips) -> tuple[str, dict[str, Any]]:
  """What the learner is, in words, and its programs by name."""
  from agentjax.model import ahead, flops
  from agentjax.model.mesh import make_mesh
  from experiments import launch

  model = launch.build(config['policy']['config'], 'config.policy.config')
  axes = args.mesh or {'fsdp': len(chips)}
  learner = launch.build(config['learner'], 'config.learner')(
    model,
    optimizer=launch.build(config['optimizer'], 'config.optimizer'),
    mesh=make_mesh(**axes, devices=chips),
  )
  rows, length = learner.rows, learner.length
  work = flops.of_step(model, rows, length, rows * length) / len(chips)
  said = (
    f'learner on {_said(axes)}, {rows} rows of {length} tokens; if all carry '
    f'loss, the model asks a chip for {work:.2e} FLOPs a micro-batch'
  )
  if peak := ahead.PEAK.get(chips[0].device_kind):
    said += f': {work / peak:.2f} s at its {peak / 1e12:.0f} TFLOP/s'
  return said, learner.lower()


def _engine(args, config, chips) -> tuple[str, dict[str, Any]]:
  """What the engine is, in words, and its programs by name."""
  from agentjax.model import ahead
  from agentjax.model.mesh import make_mesh
  from agentjax.model.stores import best_store
  from agentjax.rollout.programs import Programs
  from experiments import launch

  model = launch.build(config['policy']['config'], 'config.policy.config')
  if args.engine_topology:
    with ahead.chips(args.engine_topology) as chips:
      pass
  first = [c for c in chips if c.process_index == chips[0].process_index]
  axes = args.engine_mesh or {'data': len(first)}
  options = dict(launch.build(config['engine'], 'config.engine').keywords)
  buckets = options.pop('buckets', (16, 64, 256))
  options.pop('stale_kv', None)
  dtype = options.setdefault('dtype', 'float32')
  options['cache_dtype'] = options.get('cache_dtype') or dtype
  options.setdefault('chunk', 16)
  mesh = make_mesh(**axes, devices=first)
  said = (
    f'engine on {_said(axes)}, {options["slots"]} slots of {options["context"]}'
  )
  options.setdefault('store', best_store(model, options['cache_dtype'], mesh))
  programs = Programs(model, _stops(model), mesh=mesh, **options)
  return said, programs.lower(buckets)


def _stops(model):
  """An automaton of the real size of the table's columns, with one stop id."""
  from agentjax.text.stop import StopAutomaton

  pieces = [b'', b''] + [b'x'] * (model.vocab_size - 2)
  return StopAutomaton.build(pieces, [], [1])


def _said(axes: Mapping[str, int]) -> str:
  return ' x '.join(f'{name} {size}' for name, size in axes.items())


if __name__ == '__main__':
  sys.exit(main())
