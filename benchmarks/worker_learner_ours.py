"""Our learner's step, as a worker of the benchmark.

Runs in the environment of the benchmark, in a process of its own, so that its
memory can be told from others'; the quick form calls it where it is. A step is
`Learner.update` as training calls it, from a packed batch to metrics on the
host. Layers are scanned. The backward pass has what all products made at 10M
(`remat.keep_products`); at 135M, where that is 2.6 GiB, the MLP's are
made again (`keep_projections`). `shares` has the batch's.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from agentjax import optimizers
from agentjax.learner import Learner
from agentjax.model import remat
from agentjax.rl import losses
from agentjax.rl.batch import Batch, pack
from agentjax.types import Segment, Source, Status, Stop, Task, Trajectory
from benchmarks import learner_work, models, worker, worker_memory

OPTIONS = {
  '10m': {'remat': remat.keep_products},
  '135m': {'remat': remat.keep_projections, 'chunk': 512},
}

_step: Any = None


def load(model: str, work: str, settings: dict) -> dict[str, Any]:
  """Makes the model (its weights are the benchmark's) and the batch."""
  global _step
  _step = None  # of a former one nothing may stay in memory
  given = learner_work.read(work)
  made = models.make(model, None)
  learner, state = make(made, given, settings)
  del made
  batch = packed(given)

  def step() -> dict[str, float]:
    nonlocal state
    state, metrics = learner.update(state, batch)
    jax.block_until_ready(state)
    return {'loss': metrics['loss'], 'grad_norm': metrics['grad_norm']}

  _step = step
  return {}


def make(
  model: models.Model, given: learner_work.Work, settings: dict, **options: Any
):
  """A learner of one micro-batch, with `options`, and its state."""
  rows, length = given.tokens.shape
  # The next percent: as many tokens may carry loss as there are.
  share = -(-100 * int(given.mask.sum()) // given.mask.size) / 100
  learner = Learner(
    model.config,
    optimizer=optimizers.adamw(
      settings['learning_rate'],
      weight_decay=settings['weight_decay'],
      b1=settings['b1'],
      b2=settings['b2'],
      eps=settings['eps'],
      max_grad_norm=settings['max_grad_norm'],
    ),
    loss=functools.partial(
      losses.ppo_clip, clip_low=settings['clip'], clip_high=settings['clip']
    ),
    rows=rows,
    length=length,
    shares=(share, 1.0),
    **OPTIONS[model.name] | options,
  )
  return learner, learner.init(model.params)


def packed(given: learner_work.Work) -> Batch:
  """The work as trajectories, as a user packs them."""
  trajectories = [trajectory(given, row) for row in range(len(given.tokens))]
  return pack(
    trajectories,
    list(given.advantages),
    rows=len(trajectories),
    length=given.tokens.shape[1],
  )


def trajectory(given: learner_work.Work, row: int) -> Trajectory:
  segments, start = [], 0
  for i, (sampled, n) in enumerate(learner_work.spans()):
    part = slice(start, start + n)
    tokens, start = given.tokens[row, part], start + n
    if sampled:
      logprobs = given.logprobs[row, part]
      segments.append(
        Segment(
          Source.MODEL,
          tokens,
          logprobs,
          logprobs,
          np.zeros(n, np.float32),
          np.zeros(n, np.int32),
          Stop.END_OF_TURN,
        )
      )
    else:
      source = Source.OBSERVATION if i else Source.PROMPT
      segments.append(Segment(source, tokens))
  return Trajectory(
    Task(str(row), ()), tuple(segments), status=Status.DONE, sample=row
  )


def step() -> dict[str, Any]:
  """One optimizer step on the batch."""
  return worker_memory.measured(_step)


if __name__ == '__main__':
  worker.serve({'load': load, 'step': step}, ('jax', 'jaxlib', 'flax', 'optax'))
