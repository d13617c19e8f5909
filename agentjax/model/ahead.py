"""What a program needs on chips that are not there.

Floor 1, model/. XLA's TPU compiler comes with the package libtpu and needs no
TPU: a topology's devices stand in for chips, programs are lowered for them from
shapes alone, and the compiled program says what it needs. Knows no model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence

import jax

# Of the text of a compiled program.
_COMPUTATION = re.compile(r'(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$')
_CALLED = re.compile(r'(?:calls|to_apply|body|condition)=%?([\w.\-]+)')
_LOOP = re.compile(r' while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)')
_LIMIT = re.compile(r'= s32\[\]\S* constant\((\d+)\)')
_COLLECTIVE = re.compile(
  r'= (?P<shape>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|'
  r'collective-permute)(?P<start>-start)?\('
)
_ARRAY = re.compile(r'\b([a-z]+\d*[a-z\d]*)\[([\d,]*)\]')

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

# FLOP/s of products of bfloat16 numbers of a chip, from the same source.
PEAK = {
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5': 459e12,
  'TPU v5p': 459e12,
  'TPU v6 lite': 918e12,
  'TPU7x': 2307e12,
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
  # It lets one process have the machine's chips; compiling asks for none.
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
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
class Collective:
  """One that the program runs `times` times.

  Attributes:
    bytes: of its result on a chip, whole before it is scattered; once.
  """

  kind: str
  shape: str
  bytes: int
  times: int


def collectives(text: str) -> tuple[Collective, ...]:
  """Those of a compiled program's text, each once.

  A loop's body counts as often as its condition's only number says; the
  compiler may cut a collective into pieces, which share a channel.
  """
  lines: dict[str, list[str]] = {}
  entry = name = ''
  for line in text.splitlines():
    if head := _COMPUTATION.match(line):
      name = head['name']
      lines[name] = []
      entry = name if head['entry'] else entry
    elif name:
      lines[name].append(line)
  times = dict.fromkeys(lines, 0) | {entry: 1}
  for name in reversed(lines):  # who calls stands behind what it calls
    for line in lines[name]:
      called = _CALLED.findall(line)
      if loop := _LOOP.search(line):
        limits = _LIMIT.findall('\n'.join(lines.get(loop[1], ())))
        called += [loop[2]] * (int(limits[0]) - 1 if len(limits) == 1 else 0)
      for other in called:
        times[other] = times.get(other, 0) + times[name]
  found: dict[str, Collective] = {}
  for name, body in lines.items():
    for line in body:
      if match := _COLLECTIVE.search(line):
        kind = match['kind']
        if name.startswith('all-reduce-scatter'):
          kind = 'reduce-scatter'
        channel = re.search(r'channel_id=(\d+)', line)
        one = Collective(
          kind, match['shape'], _bytes(match['shape'], match['start']),
          max(times[name], 1),
        )  # fmt: skip
        found.setdefault(channel[1] if channel else line, one)
  return tuple(found.values())


def _bytes(shape: str, started: str | None) -> int:
  """Of all arrays, or where operands stand beside results, of the largest."""
  sizes = [
    math.prod(map(int, filter(None, dims.split(','))))
    * max(1, int((re.search(r'\d+', kind) or [8])[0]) // 8)
    for kind, dims in _ARRAY.findall(re.sub(r'\{[^{}]*\}', '', shape))
  ]
  return max(sizes, default=0) if started else sum(sizes)


@dataclasses.dataclass(frozen=True)
class Needs:
  """Of a compiled program, for each chip.

  Attributes:
    arguments, outputs, temporaries: bytes; outputs without those that take an
      argument's place.
    host: bytes of temporaries in the memory of the chip's host.
    flops: as XLA counts them: a loop's body once.
    text: the compiled program.
  """

  arguments: int
  outputs: int
  temporaries: int
  host: int
  flops: float
  collectives: tuple[Collective, ...]
  text: str = dataclasses.field(repr=False)

  @property
  def bytes(self) -> int:
    return self.arguments + self.outputs + self.temporaries

  def lines(self, name: str, most: int = 8) -> list[str]:
    """For a person: memory, FLOPs, and the largest collectives."""
    gb = 1e9
    host = f', {self.host / gb:.2f} GB on its host' if self.host else ''
    out = [
      f'{name}: {self.arguments / gb:.2f} GB of arguments, '
      f'{self.temporaries / gb:.2f} GB of temporaries, '
      f'{self.outputs / gb:.2f} GB of results a chip{host}; '
      f'{self.flops:.2e} FLOPs (the body of a loop once)'
    ]
    sums: dict[tuple[str, str], list[int]] = {}
    for c in self.collectives:
      shape = re.sub(r'\{[^{}]*\}|/\*.*?\*/', '', c.shape)
      total = sums.setdefault((c.kind, shape), [0, 0])
      total[0] += c.times
      total[1] += c.times * c.bytes
    largest = sorted(sums.items(), key=lambda item: -item[1][1])
    if largest:
      n, size = (sum(x) for x in zip(*sums.values(), strict=True))
      out.append(f'  {size / gb:.2f} GB in {n} collectives, loops unrolled')
    for (kind, shape), (n, size) in largest[:most]:
      out.append(f'  {size / gb:8.3f} GB  {n} x {kind} {shape[:60]}')
    if len(largest) > most:
      out.append(f'  and {len(largest) - most} more kinds')
    return out


def needs(lowered: jax.stages.Lowered) -> Needs:
  """Compiles; what the program needs."""
  program = lowered.compile()
  memory = program.memory_analysis()
  text = program.as_text()
  return Needs(
    arguments=memory.argument_size_in_bytes,
    outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    host=memory.host_temp_size_in_bytes,
    flops=program.cost_analysis()['flops'],
    collectives=collectives(text),
    text=text,
  )
