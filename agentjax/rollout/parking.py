"""Rows in host memory: where a KV state waits that has no slot.

Floor 2, rollout/, under `engine`. What is parked comes back into any slot of
its engine, bit by bit the same, in the middle of a turn too. Who has to make
room for whom is not decided here.

Letters: D width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from agentjax.rollout.forks import Mark, holds
from agentjax.rollout.rows import Rows
from agentjax.rollout.slots import Slot, StaleKV, Turn, Versions


@dataclasses.dataclass(frozen=True, eq=False)
class Parked:
  """A slot's content in host memory; fits into any slot of its engine.

  Attributes:
    row: of `Store.take`, as NumPy arrays. hidden_D: of the last token, a few
      kB that stay on the device.
    turn: under way when it was parked, or None.
  """

  tokens: np.ndarray
  versions: Versions
  hidden_D: jax.Array
  row: Any
  turn: Turn | None = None

  @property
  def bytes(self) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(self.row))


def copy(rows: Rows, mark: Mark) -> Parked:
  """A mark's KV state in host memory, where it outlives its slot.

  Raises:
    ValueError: the mark is gone, or in the past.
  """
  if mark.hidden_D is None or not holds(rows, mark):
    raise ValueError(
      f'mark in slot {mark.slot} is in the past or no longer there: fork '
      'from it while it is, and mark that slot'
    )
  return _parked(rows, mark.slot, mark.tokens, mark.versions, mark.hidden_D)


def park(rows: Rows, slot: int) -> Parked:
  """Moves a slot's content to host memory, a turn under way included.

  The slot is released. `unpark` puts it into any slot, bit by bit the same.
  """
  s = rows.held(slot)
  hidden_D = rows.state.hidden_of(slot)
  out = _parked(rows, slot, s.tokens, s.versions, hidden_D)
  out = dataclasses.replace(out, turn=s.turn)
  rows.release(slot)
  return out


def unpark(rows: Rows, parked: Parked, slot: int) -> Mark:
  """Puts what was parked into `slot`; returns a mark at its end.

  Raises:
    ValueError: there is a turn under way in the slot; or (StaleKV.REFUSE)
      a parked turn is of other weights.
  """
  rows.idle(slot)
  rows.clean(slot)
  turn = parked.turn
  version = parked.versions[-1][1] if parked.versions else rows.version
  if turn and version != rows.version and rows.stale_kv is StaleKV.REFUSE:
    raise ValueError(
      f'a parked turn is of version {version}, the weights are of version '
      f'{rows.version}: set stale_kv to keep or recompute'
    )
  rows.state.put(slot, parked.hidden_D, parked.row)
  generation = rows.slots[slot].generation + 1
  rows.slots[slot] = Slot.of(generation, parked.tokens, parked.versions)
  # It may be unparked again: then each goes on by itself.
  rows.slots[slot].turn = turn and turn.copy()
  return Mark(slot, generation, parked.tokens, parked.hidden_D,
              parked.versions)  # fmt: skip


def _parked(rows, slot, tokens, versions, hidden_D) -> Parked:
  row = rows.state.take(slot, len(tokens))
  out = Parked(tokens, versions, hidden_D, row)
  rows.stats.parked += 1
  rows.stats.parked_bytes += out.bytes
  return out
