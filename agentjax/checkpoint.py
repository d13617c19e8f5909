"""Checkpoints of everything that a resume needs; the one user of Orbax.

Floor 2. A checkpoint is the learner's state (sharded arrays) and one JSON
object: curriculum, counters, and the fingerprint of the model. Saving is
atomic: a kill at any moment leaves the newest whole checkpoint, and what was
half written is removed at the next start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from agentjax.model.config import ModelConfig


class Checkpoints:
  """The checkpoints of one run, in `<workdir>/checkpoints`.

  Args:
    keep: newest ones to keep.
  """

  def __init__(
    self, workdir: epath.PathLike, config: ModelConfig, keep: int = 2
  ):
    self.path = epath.Path(workdir) / 'checkpoints'
    self._model = json.loads(json.dumps(dataclasses.asdict(config)))
    self._manager = ocp.CheckpointManager(
      self.path.resolve(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=True,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=False,
      ),
    )

  @property
  def latest(self) -> int | None:
    """The newest whole step, or None."""
    return self._manager.latest_step()

  def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
    """Saves `state` (arrays) and `meta` (JSON-able) as `step`; blocks."""
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        meta=ocp.args.JsonSave({'model': self._model, **meta}),
      ),
    )
    self._manager.wait_until_finished()

  def restore(self, like: Any, step: int | None = None) -> tuple[Any, dict]:
    """Restores (state, meta) of `step`, by default the newest.

    Args:
      like: a state with the shapes, types and shardings to restore into.

    Raises:
      ValueError: the checkpoint is of another model, or there is none.
    """
    step = self.latest if step is None else step
    if step is None:
      raise ValueError(f'there is no checkpoint in {self.path}')
    meta = self._manager.restore(
      step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
    )['meta']
    self._check(meta.get('model', {}), step)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    state = self._manager.restore(
      step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))
    )['state']
    return state, meta

  def _check(self, found: Mapping[str, Any], step: int) -> None:
    differ = [
      f'{k} is {found.get(k)!r} there and {v!r} here'
      for k, v in self._model.items()
      if found.get(k) != v
    ]
    if differ:
      raise ValueError(
        f'checkpoint {self.path}/{step} is of another model: '
        f'{"; ".join(differ)}. Nothing was changed: choose its config, or '
        'another workdir'
      )

  def close(self) -> None:
    """Waits for what is under way."""
    with contextlib.suppress(RuntimeError):  # its event loop may be gone
      self._manager.close()
