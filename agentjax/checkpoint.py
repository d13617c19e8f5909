"""Checkpoints of everything that a resume needs; the one user of Orbax.

Floor 2. A checkpoint is the learner's state (sharded arrays) and one JSON
object: curriculum, counters, and the fingerprint of the model. Saving is
atomic: a kill at any moment leaves the newest whole checkpoint, and what was
half written is removed at the next start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from agentjax import storage
from agentjax.model.config import ModelConfig


class DamagedCheckpoint(ValueError):
  """A checkpoint that cannot be read; the message names it and the remedy."""


class Checkpoints:
  """The checkpoints of one run, in `<workdir>/checkpoints`.

  Args:
    facts: what a checkpoint of this run depends on beside its model, by name
      and JSON-able; one with others is refused as one of another model is.
    keep: newest ones to keep.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    config: ModelConfig,
    facts: Mapping[str, Any] | None = None,
    keep: int = 2,
  ):
    self.path = epath.Path(workdir) / 'checkpoints'
    made_with = {**dataclasses.asdict(config), **(facts or {})}
    self._made_with = json.loads(json.dumps(made_with))
    # Orbax's own clean-up passes over some that a killed process left.
    if jax.process_index() == 0 and self.path.exists():
      for left in self.path.glob('*.orbax-checkpoint-tmp*'):
        left.rmtree()
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
    """Saves `state` (arrays) and `meta` (JSON-able) as `step`; blocks.

    Raises:
      storage.StorageFull: the checkpoints before it stand.
    """
    args = ocp.args.Composite(
      state=ocp.args.StandardSave(state),
      meta=ocp.args.JsonSave({'made_with': self._made_with, **meta}),
    )
    with storage.full_disk_named(self.path / str(step)), _said_once():
      self._check_space(state)
      try:
        self._manager.save(step, args=args)
        self._manager.wait_until_finished()
      except ValueError as error:
        # TensorStore has the system's error in its text alone.
        if os.strerror(errno.ENOSPC) not in str(error):
          raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error

  def _check_space(self, state: Any) -> None:
    """Raises ENOSPC for a checkpoint that would hardly fit.

    Orbax finds out as well, but its writes that are under way then report to
    an event loop that it has closed: pages of tracebacks.
    """
    if storage.is_bucket(self.path):
      return
    needed = sum(x.nbytes for x in jax.tree.leaves(state))
    if needed > shutil.disk_usage(self.path).free:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  def restore(self, like: Any, step: int | None = None) -> tuple[Any, dict]:
    """Restores (state, meta) of `step`, by default the newest.

    Args:
      like: a state with the shapes, types and shardings to restore into.

    Raises:
      storage.WorkdirMismatch: the checkpoint is of another model, or made
        with other facts; nothing was changed.
      DamagedCheckpoint: files of it are missing, cut off or overwritten.
      ValueError: there is none.
    """
    step = self.latest if step is None else step
    if step is None:
      raise ValueError(f'there is no checkpoint in {self.path}')
    meta = self._meta(step)
    self._check(meta['made_with'], step)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    try:
      state = self._manager.restore(
        step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))
      )['state']
    except Exception as error:  # Orbax's and TensorStore's are of any kind
      if self._fits(step, target, error):
        raise self._damaged(step, error) from error
      # The model is the same, so it is the optimizer that has another shape.
      raise self._mismatch(step, f'its arrays do not fit: {error}') from error
    return state, meta

  def _meta(self, step: int) -> dict[str, Any]:
    try:
      meta = self._manager.restore(
        step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
      )['meta']
    except Exception as error:  # of any kind, by what is damaged
      raise self._damaged(step, error) from error
    if not isinstance(meta, dict) or not isinstance(
      meta.get('made_with'), dict
    ):
      raise self._damaged(
        step, 'its meta says nothing of what it was made with'
      )
    return meta

  def _fits(self, step: int, target: Any, error: Exception) -> bool:
    """Whether arrays that could not be restored have the wanted shapes.

    Then it is not the config that is wrong. Shapes that cannot be read are
    damaged too.
    """
    if 'structures do not match' in str(error):
      return False
    try:
      there = jax.tree.leaves(self._manager.item_metadata(step).state.tree)
      found = Counter(tuple(x.shape) for x in there)
    except Exception:  # as above
      return True
    return found == Counter(tuple(x.shape) for x in jax.tree.leaves(target))

  def _damaged(self, step: int, why: object) -> DamagedCheckpoint:
    before = [s for s in self._manager.all_steps() if s < step]
    remedy = (
      f'remove it, and the run goes on from step {max(before)}'
      if before
      else 'there is none before it: restore it, or choose another workdir'
    )
    said = ' '.join(str(why).split())
    said = said if len(said) <= 300 else f'{said[:300]} ...'
    return DamagedCheckpoint(
      f'checkpoint {self.path}/{step} is damaged: {remedy} ({said})'
    )

  def _check(self, found: Mapping[str, Any], step: int) -> None:
    differ = [
      f'{k} is {found.get(k)!r} there and {v!r} here'
      for k, v in self._made_with.items()
      if found.get(k) != v
    ]
    if differ:
      raise self._mismatch(step, '; '.join(differ))

  def _mismatch(self, step: int, why: str) -> storage.WorkdirMismatch:
    return storage.WorkdirMismatch(
      f'checkpoint {self.path}/{step} is not of this config: {why}. Nothing '
      'was changed: start with the config that it was made with, or in '
      'another workdir'
    )

  def close(self) -> None:
    """Waits for what is under way."""
    with contextlib.suppress(RuntimeError):  # its event loop may be gone
      self._manager.close()


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
  """Orbax's threads log with tracebacks what they raise to the caller too."""

  def is_news(record: logging.LogRecord) -> bool:
    return 'raised an exception' not in record.getMessage()

  logger = logging.getLogger('absl')
  logger.addFilter(is_news)
  try:
    yield
  finally:
    logger.removeFilter(is_news)
