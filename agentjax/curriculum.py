"""Which tasks are drawn next, exactly resumable.

Floor 2. Epochs over a fixed set of tasks, each in an order of its own. The
whole state is one number and the fingerprint of the tasks, so that a resumed
run draws what the uninterrupted one would have, and refuses other tasks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentjax import storage
from agentjax.records import task_to_json
from agentjax.types import Group, Task


class Curriculum:
  """Draws tasks without replacement, epoch after epoch.

  A draw may reach into the next epoch; a task that it already holds is then
  left out of that epoch.

  Args:
    tasks: at least one, ids unique. seed: of the orders.
  """

  def __init__(self, tasks: Sequence[Task], seed: int):
    ids = [t.id for t in tasks]
    if not ids or len(set(ids)) != len(ids):
      twice = sorted({i for i in ids if ids.count(i) > 1})[:3]
      raise ValueError(
        f'{len(ids)} tasks, ids standing twice: {twice}: give at least one '
        'task, each with an id of its own'
      )
    self._tasks, self._seed = list(tasks), seed
    self.position = 0  # tasks drawn so far
    self.draws = 0  # calls of draw so far

  def draw(self, n: int) -> list[Task]:
    """The next n tasks; a draw never holds a task twice.

    Raises:
      ValueError: there are fewer than n tasks.
    """
    if n > len(self._tasks):
      raise ValueError(
        f'a draw of {n} from {len(self._tasks)} tasks: draw fewer, or add tasks'
      )
    out: list[Task] = []
    while len(out) < n:
      epoch, at = divmod(self.position, len(self._tasks))
      order = np.random.default_rng([self._seed, epoch]).permutation(
        len(self._tasks)
      )
      seen = {t.id for t in out}
      for i in order[at:]:
        if len(out) == n:
          break
        self.position += 1
        if self._tasks[i].id not in seen:
          out.append(self._tasks[i])
    self.draws += 1
    return out

  def observe(self, groups: Sequence[Group]) -> None:
    """Sees what came of a draw. This curriculum does not adapt."""

  def state(self) -> dict[str, Any]:
    """JSON-able; `restore` takes it."""
    return {
      'position': self.position,
      'draws': self.draws,
      'tasks': self._fingerprint(),
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state.

    Raises:
      storage.WorkdirMismatch: it belongs to other tasks or another seed.
    """
    if state['tasks'] != self._fingerprint():
      raise storage.WorkdirMismatch(
        f'the checkpoint was made with other tasks or another seed '
        f'({state["tasks"]}, not {self._fingerprint()}): use those, or start '
        'in another workdir'
      )
    self.position, self.draws = state['position'], state['draws']

  def _fingerprint(self) -> str:
    text = json.dumps(
      [self._seed, [task_to_json(t) for t in self._tasks]], sort_keys=True
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]
