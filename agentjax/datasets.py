"""Tasks in an order of their own, epoch after epoch, by Grain.

Floor 2. For sets that are read from disk as they are drawn; for those that fit
in memory `curriculum` does the same. Its state is a few numbers, and goes on
exactly: mid-epoch, over the end of an epoch, and before the first draw.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import grain

from agentjax import storage
from agentjax.types import Group, Task


class Stream:
  """Draws tasks as `Curriculum` does: without replacement in an epoch.

  Args:
    tasks: read by number; ids unique. `fingerprint` names them in the state:
      that of `env.prepared`, if they have one.
    seed: of the orders, each epoch's another.
    shard, shards: this host draws from every `shards`-th task of an order.
  """

  def __init__(
    self,
    tasks: Sequence[Task],
    seed: int,
    *,
    fingerprint: str | None = None,
    shard: int = 0,
    shards: int = 1,
  ):
    if not 0 <= shard < shards:
      raise ValueError(f'shard {shard} of {shards}: give 0 to {shards - 1}')
    if len(tasks) < shards:
      raise ValueError(f'{len(tasks)} tasks for {shards} shards: give more')
    fingerprint = fingerprint or getattr(tasks, 'fingerprint', None)
    if fingerprint is None:
      raise ValueError(
        'these tasks have no fingerprint, without which a resumed run could '
        'go on with others: give one'
      )
    self._of = [fingerprint, len(tasks), seed, shard, shards]
    self._size = (len(tasks) - shard + shards - 1) // shards
    numbers = grain.MapDataset.range(len(tasks)).seed(seed).shuffle()
    self._order = (
      numbers[shard::shards]
      .repeat()
      .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    )
    self._tasks, self._next = tasks, iter(self._order)
    self.draws = 0

  def draw(self, n: int) -> list[Task]:
    """The next n tasks; a draw never holds a task twice.

    Raises:
      ValueError: there are fewer than n tasks.
    """
    if n > self._size:
      raise ValueError(f'a draw of {n} from {self._size} tasks: draw fewer')
    drawn: dict[int, Task] = {}
    while len(drawn) < n:
      number = int(next(self._next))
      # One that the end of an epoch brought is left out of the next.
      if number not in drawn:
        drawn[number] = self._tasks[number]
    self.draws += 1
    return list(drawn.values())

  def observe(self, groups: Sequence[Group]) -> None:
    """Sees what came of a draw. This order does not adapt."""

  def state(self) -> dict[str, Any]:
    """JSON-able; `restore` takes it."""
    state = self._next.get_state()
    return {'of': self._of, 'draws': self.draws, 'grain': json.dumps(state)}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state.

    Raises:
      storage.WorkdirMismatch: it belongs to other tasks, another seed or
        another number of shards.
    """
    if list(state['of']) != self._of:
      raise storage.WorkdirMismatch(
        f'the state was made with other tasks, seed or shards ({state["of"]}, '
        f'not {self._of}): use those, or start in another workdir'
      )
    self._next = iter(self._order)
    self._next.set_state(json.loads(state['grain']))
    self.draws = state['draws']
