"""One function for each row: what is measured side by side, and its ratios.

Benchmarks, under `engine`. A row gives all measurements, the figures (ratios
above 1 say that ours is faster) and remarks for the reader. It knows the
systems, not how they are repeated (`measure`) nor what is written down.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import floor, models, ours, slow_tools, workloads
from benchmarks.measure import Measurement, interleave, median, speedup
from benchmarks.models import Model
from benchmarks.peers import Peer

RESUME_CONTEXTS = (512, 1024, 2048, 4096, 8192)
AGREEING = 0.75  # of likeliest first tokens; rounding may move a near tie


@dataclasses.dataclass
class Row:
  """What a row found.

  Attributes:
    systems: name -> its measurements. figures: name -> ratio.
    remarks: lines for the reader.
  """

  systems: dict[str, list[Measurement]]
  figures: dict[str, float]
  remarks: list[str]


@dataclasses.dataclass
class Bench:
  """What all rows share.

  Attributes:
    peers: running workers. cache: where models are saved for them.
    repetitions, seconds_per_system, first_run: see `measure.interleave`.
  """

  peers: Mapping[str, Peer]
  cache: pathlib.Path
  repetitions: int
  seconds_per_system: float = 900.0
  first_run: bool = True
  _model: Model | None = None
  _compared: dict[str, int] = dataclasses.field(default_factory=dict)

  def model(self, name: str) -> Model:
    """The model, loaded by the peers too; the former one is forgotten."""
    if self._model is None or self._model.name != name:
      self._model = models.make(name, self.cache if self.peers else None)
      config, directory = self._model.config, str(self._model.directory)
      arguments = {
        'tunix': {'config': models.tunix_config(config)},
        'hf': {'threads': ours.usable_cores()},
      }
      for peer in self.peers.values():
        peer.ask('load', directory=directory, **arguments[peer.name])
    return self._model

  @functools.cached_property
  def rates(self) -> dict[str, float]:
    """Measured once: bytes/s of memory, FLOPs/s of products."""
    return {
      'bytes_per_second': floor.memory_rate(),
      'flops_per_second': floor.product_rate(),
    }

  def measure(
    self, systems: Mapping[str, Callable[[int], Measurement]]
  ) -> dict[str, list[Measurement]]:
    return interleave(
      systems,
      self.repetitions,
      seconds_per_system=self.seconds_per_system,
      first_run=self.first_run,
    )

  def compare_weights(self, model: Model, engine, prompts) -> list[str]:
    """Says of each peer whether it computes what we compute.

    Raises:
      RuntimeError: it does not, so its times would mean nothing.
    """
    prompts = prompts[:8]
    if self._compared.get(model.name, 0) >= len(prompts):
      return []
    self._compared[model.name] = len(prompts)
    remarks = []
    mine = ours.first_tokens(engine, prompts) if self.peers else []
    for name, peer in self.peers.items():
      theirs = peer.ask('first_tokens', prompts=prompts.tolist())['tokens']
      same = sum(a == b for a, b in zip(mine, theirs, strict=True))
      if same < AGREEING * len(mine):
        raise RuntimeError(
          f'{name} finds {theirs} where ours finds {mine}: it does not run '
          f'the same weights of {model.name}'
        )
      remarks.append(f'{name}: same likeliest token at {same}/{len(mine)}')
    return remarks


def decode(bench: Bench, size: str, batch: int) -> Row:
  """Prompts of 128 tokens, 128 new ones each, `batch` at once."""
  model = bench.model(size)
  prompts = workloads.prompts(batch, model.config.vocab_size)
  new = workloads.NEW_TOKENS
  engine = ours.make_engine(model, slots=batch, context=workloads.PROMPT + new)
  least = floor.Floor(model, batch, workloads.PROMPT, new)
  systems = {
    'ours': lambda i: ours.decode(engine, prompts, new, i + 1),
    'floor': lambda i: least.run(),
  }
  for name, peer in bench.peers.items():
    systems[name] = lambda i, peer=peer: peer.ask(
      'decode', prompts=prompts.tolist(), new_tokens=new, seed=i + 1
    )
  remarks = bench.compare_weights(model, engine, prompts)
  found = bench.measure(systems)
  row = f'decode_{size}_b{batch}'
  figures = {f'{row}_vs_{name}': speedup(found, name) for name in bench.peers}
  figures[f'{row}_vs_floor'] = speedup(found, 'floor', key='decode_seconds')
  remarks += [_throughput(name, found[name]) for name in found]
  mine = median(found['ours'], 'decode_seconds')
  remarks += [
    f'ours, decoding alone: {batch * new / mine:.1f} tokens/s; with the '
    f"prompts it is {speedup(found, 'floor'):.3f} of the floor's speed",
    _calculated(bench, model, batch, mine),
  ]
  return Row(found, figures, remarks)


def _throughput(name: str, found: list[Measurement]) -> str:
  seconds = median(found)
  return (
    f'{name}: {found[0]["tokens"] / seconds:.1f} tokens/s in {seconds:.3f} s, '
    f'{median(found, "cpu_seconds") / seconds:.2f} cores busy, '
    f'{len(found)} times'
  )


def _calculated(bench: Bench, model: Model, batch: int, mine: float) -> str:
  live = workloads.PROMPT + workloads.NEW_TOKENS // 2
  cost = floor.cost(model.config, batch, live)
  least = cost.seconds(**bench.rates) * workloads.NEW_TOKENS
  return (
    f'calculated floor: {batch * workloads.NEW_TOKENS / least:.1f} tokens/s '
    f'({cost.bytes / 1e6:.1f} MB and {cost.flops / 1e9:.3f} GFLOP a step, at '
    f'{bench.rates["bytes_per_second"] / 1e9:.1f} GB/s and '
    f'{bench.rates["flops_per_second"] / 1e9:.0f} GFLOP/s); ours decodes at '
    f'{least / mine:.3f} of it'
  )


def multiturn(bench: Bench, turns: int) -> Row:
  """8 trajectories of `turns` turns with observations between (10M)."""
  model = bench.model('10m')
  work = workloads.conversations(turns, model.config.vocab_size)
  context = -(-work.length // max(ours.BUCKETS)) * max(ours.BUCKETS)
  engine = ours.make_engine(model, slots=len(work.prompts), context=context)
  systems = {
    'ours': lambda i: ours.multiturn(engine, work, i + 1, reprefill=False),
    'reprefill': lambda i: ours.multiturn(engine, work, i + 1, reprefill=True),
  }
  if 'tunix' in bench.peers:
    systems['tunix'] = lambda i: bench.peers['tunix'].ask(
      'multiturn',
      prompts=work.prompts.tolist(),
      observations=work.observations.tolist(),
      turn_tokens=work.turn_tokens,
      cache_size=work.padded_length,
      seed=i + 1,
    )
  found = bench.measure(systems)
  row = f'multiturn_{turns}'
  figures = {
    f'{row}_vs_{name}': speedup(found, name) for name in found if name != 'ours'
  }
  processed = [found[s][0]['processed_tokens'] for s in ('ours', 'reprefill')]
  if turns == 16:
    figures[f'{row}_processed_tokens_vs_reprefill'] = (
      processed[0] / processed[1]
    )
  remarks = [_throughput(name, found[name]) for name in found]
  remarks += [
    f'{name}: {found[name][0]["prefilled_tokens"]:,} tokens prefilled, '
    f'{work.prefilled_once:,} suffice'
    for name in found
  ]
  return Row(found, figures, remarks)


def resume(bench: Bench) -> Row:
  """Seconds to the first token after an observation, by context (10M)."""
  model = bench.model('10m')
  ids = workloads.token_ids(
    5, (RESUME_CONTEXTS[-1] + workloads.OBSERVATION,), model.config.vocab_size
  )
  room = 2 * max(ours.BUCKETS)
  engine = ours.make_engine(model, slots=1, context=RESUME_CONTEXTS[-1] + room)
  found = bench.measure(
    {'ours': lambda i: ours.resume(engine, RESUME_CONTEXTS, ids, i + 1)}
  )
  remarks = [
    f'context {n}: {1e3 * median(found["ours"], f"resume_{n}"):.1f} ms for '
    f'{found["ours"][0][f"tokens_{n}"]} tokens'
    for n in RESUME_CONTEXTS
  ]
  return Row(found, {}, remarks)


def tools(bench: Bench, shape: slow_tools.Shape | None = None) -> Row:
  """Tools that take 0.05 to 2 s against tools that take nothing (10M)."""
  shape = shape or slow_tools.Shape()
  model = bench.model('10m')
  vocabulary = model.config.vocab_size
  engine = ours.make_engine(
    model,
    slots=shape.slots,
    context=shape.context,
    stop_ids=slow_tools.stop_ids(vocabulary),
  )

  def run(latency):
    return slow_tools.run(engine, shape, vocabulary, latency, 0)

  found = bench.measure(
    {
      'slow': lambda i: run(slow_tools.LATENCY),
      'fast': lambda i: run((0.0, 0.0)),
    }
  )
  every = found['slow'] + found['fast']
  if len({m['checksum'] for m in every}) > 1:
    raise RuntimeError(
      'the tokens that were sampled depend on how long tools take: the two '
      'runs did different work (design promise 5)'
    )
  remarks = [
    f'{name}: {median(ms, "tokens_per_second"):.1f} tokens/s, occupancy '
    f'{median(ms, "occupancy"):.3f} of the steps that ran, no step for '
    f'{median(ms, "waiting_seconds"):.2f} of {median(ms):.2f} s'
    for name, ms in found.items()
  ]
  cut = every[0]['cut']
  if cut:
    remarks.append(f'{cut} trajectories were ended by a limit')
  key = 'tokens_per_second'
  ratio = median(found['slow'], key) / median(found['fast'], key)
  return Row(found, {'slow_tools_vs_fast': ratio}, remarks)


def all_rows() -> dict[str, Callable[[Bench], Row]]:
  """Name -> row of the full form, in order."""
  rows: dict[str, Callable[[Bench], Any]] = {}

  def decodes(size):
    for batch in workloads.BATCHES:
      rows[f'decode_{size}_b{batch}'] = functools.partial(
        decode, size=size, batch=batch
      )

  decodes('10m')
  for turns in (4, 16):
    rows[f'multiturn_{turns}'] = functools.partial(multiturn, turns=turns)
  rows['resume'] = resume
  rows['slow_tools'] = tools
  decodes('135m')
  return rows


def quick_rows() -> dict[str, Callable[[Bench], Row]]:
  """Name -> row of the quick form: ours alone, under a minute in all."""
  rows = all_rows()
  names = ('decode_10m_b8', 'decode_10m_b32', 'multiturn_4')
  return {name: rows[name] for name in names}
