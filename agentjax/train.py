"""The training run: draw, collect, credit, pack, update, load, save, record.

Floor 3. `train` tells the whole story of a run; everything that it joins is
given to it. A run is what silence earns, steps 1 .. cold start, an evaluation,
steps .. of reinforcement, an evaluation. Killed at any moment and started
again with the same workdir, it goes on from its newest checkpoint as if nothing
had happened (design promise 7): the metrics of a step, clocks aside, are the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etils import epath

from agentjax import storage
from agentjax.run import Run
from agentjax.training import Training, parts
from agentjax.workdir import WorkdirLock


def train(
  workdir: epath.PathLike,
  training: Training,
  config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """Trains, and returns what it writes into `<workdir>/summary.json`.

  Args:
    workdir: of this run alone; started again with it, the run goes on. Model,
      tasks, seed, cold start and the use of a reference must be the same then;
      what else changed (more steps, another rate) holds from there on.
    config: what `training` was built from, JSON-able; it is kept in
      `<workdir>/config.json`, and one that changed beside it.

  Raises:
    WorkdirLocked: another process uses it.
    storage.Unusable: no run can live there.
    storage.Unreadable, DamagedCheckpoint: a file there is damaged.
    storage.StorageFull: the disk is full; what was saved stands.
    TooManyFailures: see `Training.max_failure_rate`.
    Diverged: updates are not finite any more.
    storage.WorkdirMismatch: its checkpoint is of another model, other tasks.
    ConfigError: parts that do not go together.
    KeyboardInterrupt: of a person; it says where the run stopped.
  """
  made = parts(training)  # what they refuse leaves nothing in the workdir
  with WorkdirLock(workdir):
    storage.remove_leftovers(workdir)
    run = Run(workdir, training, made, config)
    try:
      run.start()
      if run.summary is not None:
        return run.summarize()
      run.measure_null()
      if training.evaluation.untrained and run.step == 0:
        run.evaluate('untrained')
      for step in range(run.step + 1, run.cold_steps + 1):
        run.cold_start_step(step)
      run.evaluate('before')
      for step in range(run.step + 1, run.last_step + 1):
        groups, stats = run.collect()
        trained = run.update(groups)
        run.finish_step(step, groups, trained, stats)
      run.evaluate('after')
      return run.summarize()
    except KeyboardInterrupt:
      raise KeyboardInterrupt(run.stopped()) from None
    finally:
      run.close()
