"""Marks, and forks from them: many trajectories from one past.

Floor 2, rollout/, under `engine`. A mark names a point of a row; a fork copies
the row up to there into another one. A group's prompt is run once that way,
and a trajectory branches anywhere in its past. This file knows no group and no
turn.

Letters: D width.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from agentjax.rollout.rows import Rows
from agentjax.rollout.slots import Slot, StaleKV, Versions, before


@dataclasses.dataclass(frozen=True, eq=False)
class Mark:
  """A point in a slot's row that other slots can fork from.

  Valid until the slot is given to another content; `fork` checks it.
  `hidden_D` is None at a point in the past, whose hidden state is gone. A mark
  equals itself alone: whether two name the same state is their handles' to say.
  """

  slot: int
  generation: int
  tokens: np.ndarray
  hidden_D: jax.Array | None
  versions: Versions


def mark(rows: Rows, slot: int, at: int | None = None) -> Mark:
  """Names a point of the slot's row, so that others can fork from it.

  Args:
    at: tokens before it; None is the present end.

  Raises:
    ValueError: there is nothing before it, or it is not in the row.
  """
  s = rows.held(slot)
  at = s.length if at is None else at
  if not 1 <= at <= s.length:
    raise ValueError(
      f'mark at {at} in slot {slot}, which holds {s.length} tokens: give 1 '
      f'to {s.length}'
    )
  hidden_D = None
  if at == s.length:
    hidden_D = rows.state.hidden_of(slot)
  return Mark(slot, s.generation, s.tokens[:at], hidden_D,
              before(s.versions, at))  # fmt: skip


def holds(rows: Rows, mark: Mark) -> bool:
  """Whether a mark can still be forked from."""
  s, n = rows.slots[mark.slot], len(mark.tokens)
  return (
    s.generation == mark.generation
    and before(s.versions, n) == mark.versions
    and np.array_equal(s.tokens[:n], mark.tokens)
  )


def fork(rows: Rows, mark: Mark, slot: int) -> Mark:
  """Gives `slot` the KV state of a mark; returns the same mark in `slot`.

  Nothing is run again, but the one token before a mark in the past; if the
  weights have changed since, as `stale_kv` says.

  Raises:
    ValueError: a turn is under way in `slot`; the marked row holds something
      else by now; or (StaleKV.REFUSE) that token would be run with other
      weights.
  """
  n = len(mark.tokens)
  rows.idle(slot)
  if slot != mark.slot:
    rows.clean(slot)
  if not holds(rows, mark):
    raise ValueError(
      f'mark in slot {mark.slot} is no longer there: the slot was given to '
      'another trajectory or recomputed; extend with the tokens instead'
    )
  hidden_D, stale = mark.hidden_D, mark.versions[-1][1] != rows.version
  if hidden_D is None and stale and rows.stale_kv is StaleKV.REFUSE:
    raise ValueError(
      f'mark at {n} in slot {mark.slot} is of version '
      f'{mark.versions[-1][1]}, and the weights of version {rows.version} '
      'would run its last token: set stale_kv to keep or recompute'
    )
  if hidden_D is None:  # the source's own, until it is made below
    hidden_D = rows.state.hidden_of(mark.slot)
  rows.state.fork(mark.slot, slot, hidden_D, n)
  generation = rows.slots[slot].generation + (slot != mark.slot)
  s = rows.slots[slot] = Slot.of(generation, mark.tokens, mark.versions)
  if mark.hidden_D is None:
    if stale and rows.stale_kv is StaleKV.RECOMPUTE:
      rows.refresh(slot)
    else:
      rows.run(slot, mark.tokens[-1:], n - 1)
      rows.stats.tokens_recomputed += 1
    if stale and rows.stale_kv is StaleKV.KEEP:
      s.versions = (*before(s.versions, n - 1), (n - 1, rows.version))
    hidden_D = rows.state.hidden_of(slot)
  return Mark(slot, generation, mark.tokens, hidden_D, s.versions)
