"""What a program needs on chips that are not there.

Floor 1, model/. XLA's TPU compiler comes with the package libtpu and needs no
TPU: a topology's devices stand in for chips, programs are lowered for them from
shapes alone, and the compiled program says what it needs. Knows no model.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence

import jax

_COLLECTIVE = re.compile(
  r'= (?P<shape>.*?) (?P<name>all-gather|all-reduce|reduce-scatter|all-to-all|'
  r'collective-permute)(-start)?\('
)

# Bytes of high-bandwidth memory of a chip, by JAX's name of its kind. Source:
# Google Cloud's documentation of TPU versions.
HBM = {
  'TPU v4': 32 * 2**30,
  'TPU v5 lite': 16 * 2**30,
  'TPU v5': 95 * 2**30,
  'TPU v5p': 95 * 2**30,
  'TPU v6 lite': 32 * 2**30,
  'TPU7x': 192 * 2**30,
}


class NoCompiler(RuntimeError):
  """libtpu is not installed, or does not know the topology."""


@contextlib.contextmanager
def chips(topology: str) -> Iterator[Sequence[jax.Device]]:
  """The devices of a topology, such as 'v5p:2x2x2', to lower programs for.

  Raises:
    NoCompiler: says why.
  """
  if importlib.util.find_spec('libtpu') is None:
    raise NoCompiler(
      "the TPU compiler is not installed: pip install 'agentjax[tpu]', in an "
      'environment of its own on machines without a TPU'
    )
  # It asks the cloud's metadata server for a TPU otherwise.
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  from jax.experimental import topologies

  # A program for absent chips can be written into the cache, not read back.
  kept = jax.config.jax_enable_compilation_cache
  jax.config.update('jax_enable_compilation_cache', False)
  try:
    try:
      devices = topologies.get_topology_desc(topology, 'tpu').devices
    except Exception as error:  # of several types, by version
      raise NoCompiler(
        f'topology {topology!r}: {error}: give one such as v5p:2x2x2 or v5e:4x4'
      ) from error
    yield devices
  finally:
    jax.config.update('jax_enable_compilation_cache', kept)


@dataclasses.dataclass(frozen=True)
class Needs:
  """Of a compiled program, for each chip.

  Attributes:
    arguments, outputs, temporaries: bytes; outputs without those that take an
      argument's place.
    flops: as XLA counts them: a loop's body once.
    collectives: (kind, shapes) of each one in the program's text.
  """

  arguments: int
  outputs: int
  temporaries: int
  flops: float
  collectives: tuple[tuple[str, str], ...]

  @property
  def bytes(self) -> int:
    return self.arguments + self.outputs + self.temporaries

  def lines(self, name: str, most: int = 12) -> list[str]:
    """For a person: memory, FLOPs, and the commonest collectives."""
    gb = 1e9
    out = [
      f'{name}: {self.arguments / gb:.2f} GB of arguments, '
      f'{self.temporaries / gb:.2f} GB of temporaries, '
      f'{self.outputs / gb:.2f} GB of results a chip; {self.flops:.2e} FLOPs '
      '(the body of a loop once)'
    ]
    counted = collections.Counter(self.collectives).most_common()
    out += [f'  {n} x {kind} {shape[:90]}' for (kind, shape), n in counted]
    if len(counted) > most:
      out[most + 1 :] = [f'  and {len(counted) - most} more kinds']
    return out


def needs(lowered: jax.stages.Lowered) -> Needs:
  """Compiles; what the program needs."""
  program = lowered.compile()
  memory = program.memory_analysis()
  return Needs(
    arguments=memory.argument_size_in_bytes,
    outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    flops=program.cost_analysis()['flops'],
    collectives=tuple(
      (m['name'], m['shape']) for m in _COLLECTIVE.finditer(program.as_text())
    ),
  )
