"""One size of the learner's benchmark: who runs together, and the ratios.

Benchmarks, under `learner`. Each system has a process of its own, so that its
memory is its own. Systems of a group take turns, repetition by repetition;
groups follow each other, since not all fit into memory at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.model import transformer
from agentjax.rl.token_stats import Head, token_stats
from benchmarks import floor, learner_work, models, ours, peers
from benchmarks import worker_learner_ours as own
from benchmarks.learner_work import Work
from benchmarks.measure import Measurement, interleave, median, speedup
from benchmarks.models import Model
from benchmarks.peers import Peer
from benchmarks.rows import Row

OURS = peers.Spec('ours', 'benchmarks.worker_learner_ours', ())
PEERS = {
  'tunix': dataclasses.replace(
    peers.SPECS['tunix'], worker='benchmarks.worker_learner_tunix'
  ),
  'torch': dataclasses.replace(
    peers.SPECS['hf'], worker='benchmarks.worker_learner_torch'
  ),
}
# tunix at 135M wants 20 GB: it runs when the others are gone.
ALONE = {'10m': (), '135m': ('tunix',)}
# Of the first losses and gradient norms. Float32 sums of 4096 tokens in other
# orders are nearer than that by far; another mask or mean is not.
LOSS_WITHIN, NORM_WITHIN = 1e-3, 1e-2


@dataclasses.dataclass
class Bench:
  """What all rows share.

  Attributes:
    peers: names, of `PEERS`. cache: where environments and models are; None
      if ours runs alone, in this process.
    repetitions, seconds_per_system: see `measure.interleave`.
    rates: FLOPs/s of products, per row. versions: of all systems.
  """

  peers: Sequence[str]
  cache: pathlib.Path | None
  repetitions: int
  seconds_per_system: float = 300.0
  rates: dict[str, float] = dataclasses.field(default_factory=dict)
  versions: dict[str, Any] = dataclasses.field(default_factory=dict)

  def measure_rate(self, row: str) -> None:
    """The best rate of this row's measurements, taken between its groups."""
    self.rates[row] = max(self.rates.get(row, 0.0), floor.product_rate())


def learner(bench: Bench, size: str) -> Row:
  """A GRPO step on 8 rows of 512 tokens, 60 % of them without a loss."""
  row = f'learner_{size}'
  found: dict[str, list[Measurement]] = {}
  first: dict[str, Measurement] = {}
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / 'work.npz'
    config, directory = _write(bench, size, file)
    alone = [name for name in bench.peers if name in ALONE[size]]
    together = [name for name in bench.peers if name not in alone]
    for group in (['ours', *together], *([name] for name in alone)):
      bench.measure_rate(row)
      with _started(bench, group, size, config, directory, file) as steps:
        first |= {name: step() for name, step in steps.items()}  # compiles
        found |= interleave(
          {name: lambda i, s=step: s() for name, step in steps.items()},
          bench.repetitions,
          seconds_per_system=bench.seconds_per_system,
        )
    bench.measure_rate(row)
    flops = learner_work.flops(config, learner_work.read(file).mask)
  remarks = agreement(first, found)
  least = flops.total / bench.rates[row]
  figures = {}
  for name in bench.peers:
    figures[f'{row}_vs_{name}'] = speedup(found, name)
    figures[f'{row}_memory_vs_{name}'] = _more(found['ours']) / _more(
      found[name]
    )
  figures[f'{row}_vs_floor'] = least / median(found['ours'])
  remarks += [_describe(name, found[name]) for name in found]
  remarks.append(
    f'floor: {least:.2f} s, {flops.total / 1e9:.0f} GFLOP (blocks '
    f'{flops.blocks / 1e9:.0f}, head {flops.head / 1e9:.0f}, attention '
    f'{flops.attention / 1e9:.0f}) at {bench.rates[row] / 1e9:.0f} GFLOP/s'
  )
  return Row(found, figures, remarks)


def agreement(
  first: dict[str, Measurement], found: dict[str, list[Measurement]]
) -> list[str]:
  """Says how near the peers' losses and gradient norms are to ours.

  Raises:
    RuntimeError: one is not near at the first step, so that it computes
      something else and its times would mean nothing.
  """
  remarks, mine = [], first['ours']
  for name, theirs in first.items():
    if name == 'ours':
      continue
    loss = abs(theirs['loss'] - mine['loss'])
    norm = abs(theirs['grad_norm'] / mine['grad_norm'] - 1)
    if not (loss <= LOSS_WITHIN and norm <= NORM_WITHIN):
      raise RuntimeError(
        f'{name} finds a loss of {theirs["loss"]} and a gradient norm of '
        f'{theirs["grad_norm"]}, ours {mine["loss"]} and {mine["grad_norm"]}: '
        'they do not take the same step'
      )
    later = abs(found[name][0]['loss'] - found['ours'][0]['loss'])
    remarks.append(
      f'{name}: loss within {loss:.1e} of ours ({mine["loss"]:.5f}) at the '
      f'first step and {later:.1e} at the third, gradient norm within '
      f'{norm:.1e} of it'
    )
  return remarks


def _more(found: list[Measurement]) -> float:
  """Bytes that a step needed above what was there before it."""
  return max(1, median(found, 'peak_bytes') - median(found, 'before_bytes'))


def _describe(name: str, found: list[Measurement]) -> str:
  seconds = median(found)
  return (
    f'{name}: {seconds:.2f} s, {median(found, "cpu_seconds") / seconds:.2f} '
    f'cores busy, {len(found)} times; {_more(found) / 2**30:.2f} GiB above '
    f'{median(found, "before_bytes") / 2**30:.2f} GiB before'
  )


def _write(bench: Bench, size: str, file: pathlib.Path):
  """The work, written; the model's config and directory."""
  model = models.make(size, bench.cache if bench.peers else None)
  given = learner_work.make(model.config.vocab_size)
  given.near(logprobs(model, given)).save(file)
  return model.config, model.directory


def logprobs(model: Model, given: Work) -> np.ndarray:
  """float32[B, T]: of each token under the model; 0 for the first."""

  @jax.jit
  def compute(params, tokens_BT):
    B, T = tokens_BT.shape
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    hidden = transformer.forward(
      params, tokens_BT, positions, jnp.ones_like(tokens_BT), model.config
    )
    head = Head(
      hidden[:, :-1].reshape(B * (T - 1), -1), transformer.head_kernel(params)
    )
    stats = token_stats(
      head,
      tokens_BT[:, 1:].reshape(-1),
      jnp.ones(B * (T - 1)),
      finish=transformer.finisher(model.config),
      chunk=512,
    )
    return jnp.pad(stats.logprobs_N.reshape(B, T - 1), ((0, 0), (1, 0)))

  return np.asarray(compute(model.params, given.tokens))


@contextlib.contextmanager
def _started(bench: Bench, group, size, config, directory, file):
  """Name -> a function that takes one step, of systems that are loaded."""
  shared = {'work': str(file), 'settings': learner_work.SETTINGS}
  arguments = {
    'ours': {'model': size},
    'tunix': {
      'directory': str(directory),
      'config': models.tunix_config(config),
    },
    'torch': {'directory': str(directory), 'threads': ours.usable_cores()},
  }
  steps: dict[str, Callable[[], Measurement]] = {}
  with contextlib.ExitStack() as stack:
    for name in group:
      if bench.cache is None:
        own.load(**arguments[name], **shared)
        steps[name] = own.step
        continue
      peer = Peer(OURS if name == 'ours' else PEERS[name], bench.cache)
      stack.callback(peer.close)
      bench.versions[name] = peer.versions
      peer.ask('load', **arguments[name], **shared)
      steps[name] = functools.partial(peer.ask, 'step')
    yield steps
