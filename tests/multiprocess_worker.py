"""One of two JAX processes of test_multiprocess: updates, hand-over, decoding.

`python multiprocess_worker.py PROCESS PORT FILE` writes what it found to FILE.
The same functions, called without a mesh, are the single process.
"""

import json
import pathlib
import sys

import jax
import numpy as np
import optax
import test_learner
import tiny_model as tiny

from agentjax import compiles
from agentjax.learner import Learner
from agentjax.model.mesh import make_mesh
from agentjax.rl.batch import pack
from agentjax.rollout.sampling import Sampling, trajectory_key

PROCESSES = 2
ROWS, LENGTH = 8, 24
MESHES = {'data4': {'data': 4}, 'fsdp4': {'fsdp': 4}}
LONG = [test_learner.example(i, n) for i, n in enumerate([13, 15, 14, 12, 15])]
SHORT = [test_learner.example(10 + i, n) for i, n in enumerate([1, 2])]
# Two updates; of each, the trajectories of process 0 and of process 1. In the
# first, process 0 needs two micro-batches and many loss tokens, process 1 one
# row; in the second, process 0 has nothing at all.
SHARES = [(LONG, SHORT), ([], SHORT)]


def batch_of(trajectories, rows):
  credit = [(-1.0) ** i * (1 + i) for i in range(len(trajectories))]
  return pack(trajectories, credit, rows=rows, length=LENGTH)


def learner(mesh=None):
  return Learner(
    tiny.PLAIN,
    # Not Adam, whose first steps turn rounding into signs.
    optimizer=optax.chain(
      optax.clip_by_global_norm(1.0), optax.sgd(0.5, momentum=0.9)
    ),
    rows=ROWS,
    length=LENGTH,
    shares=(0.25, 1.0),
    chunk=16,
    remat=False,  # compiles in less time
    mesh=mesh,
  )


def updates(learner, batches):
  """(metrics of each update, params after the last, compilations within)."""
  state = learner.init(jax.tree.map(np.array, tiny.params(config=tiny.PLAIN)))
  state = learner.compile(state)
  before, metrics = compiles.count(), []
  for batch in batches:
    state, found = learner.update(state, batch)
    metrics.append(found)
  return metrics, state.params, compiles.count() - before


def decode(params, seed, mesh=None):
  """A turn after the prompt of this seed, by an engine of the process's own."""
  engine = tiny.engine(
    loaded=False, config=tiny.PLAIN, slots=1, buckets=(16,), mesh=mesh
  )
  engine.load(params, 2)
  slot = engine.acquire()
  engine.reset(slot)
  engine.extend(slot, tiny.tokens(seed, 10))
  key = trajectory_key(0, 0, str(seed), 0, 0)
  engine.start(slot, key, Sampling(), turn_budget=8, trajectory_budget=8)
  ended = []
  while not ended:
    ended = engine.step()
  return ended[0][1].tokens


def main(process, port, file):
  jax.config.update('jax_num_cpu_devices', 2)
  jax.distributed.initialize(
    f'127.0.0.1:{port}', PROCESSES, process, initialization_timeout=60
  )
  from jax.experimental import multihost_utils

  assert (jax.process_count(), len(jax.devices())) == (PROCESSES, 4)
  found = {}
  for name, shape in MESHES.items():
    l = learner(make_mesh(**shape))
    batches = [batch_of(share[process], l.local_rows) for share in SHARES]
    metrics, params, compiled = updates(l, batches)
    whole = multihost_utils.process_allgather(params, tiled=True)
    found[name] = {
      'rows': [b.tokens.shape[0] for b in batches],
      'loss_tokens': [int((b.weights > 0).sum()) for b in batches],
      'metrics': metrics,
      'compiled': compiled,
      'params': [x.tolist() for x in jax.tree.leaves(whole)],
    }
  # Weights that are split over the processes, taken over by each one.
  tokens = decode(params, process, make_mesh(tensor=2, local=True))
  found['tokens'] = tokens.tolist()
  pathlib.Path(file).write_text(json.dumps(found))


if __name__ == '__main__':
  main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
