"""Trajectories packed into fixed-shape rows, and back.

Floor 1, rl/. Host-side numpy: several trajectories stand in one row, told
apart by `pack_ids`, with positions that restart. Everything is indexed by the
label: entry t belongs to token t, which the model predicts from t - 1. A
token's weight is 0 unless the policy sampled it and its trajectory may be
trained on: the weight is the mask, times what `rl.aggregation` makes of it.

Letters: B rows, T tokens, N trajectories.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from agentjax.types import Source, Trajectory


class Batch(NamedTuple):
  """Arrays [B, T]; at weight 0 the float arrays are 0."""

  tokens: np.ndarray  # int32
  positions: np.ndarray  # int32, restarting per trajectory
  pack_ids: np.ndarray  # int32, 0 is padding
  weights: np.ndarray  # float32, > 0 exactly at tokens with a loss
  logprobs: np.ndarray  # float32, of the behaviour policy, which sampled
  old: np.ndarray  # float32, of the proximal policy, which the ratio is against
  advantages: np.ndarray  # float32
  temperature: np.ndarray  # float32, 1 at padding
  versions: np.ndarray  # int32, -1 where not sampled
  turns: np.ndarray  # int32, 1.. in each trajectory, 0 where not sampled
  values: np.ndarray  # float32, of the critic before the update
  returns: np.ndarray  # float32, what the critic is to predict
  # float32 [B]: shares of what the sum of weighted losses is divided by.
  counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class Places:
  """Where each trajectory stands: its row and its first token there."""

  rows: int
  length: int
  starts: tuple[tuple[int, int], ...]


def places(
  lengths: Sequence[int], *, rows: int, length: int
) -> Places:  # fmt: skip
  """Places for N trajectories, longest first, each in the fullest row it fits.

  Args:
    rows: B at least; more rows, in multiples of it, are made where needed.
    length: T, which no trajectory may exceed.
  """
  room: list[int] = []
  starts = [(0, 0)] * len(lengths)
  for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    n = lengths[i]
    fits = [r for r, left in enumerate(room) if left >= n]
    row = min(fits, key=lambda r: room[r]) if fits else len(room)
    if not fits:
      room.append(length)
    starts[i] = (row, length - room[row])
    room[row] -= n
  return Places(max(1, -(-len(room) // rows)) * rows, length, tuple(starts))


def pack(
  trajectories: Sequence[Trajectory],
  advantages: Sequence[float | np.ndarray],
  *,
  rows: int,
  length: int,
  temperature: float = 1.0,
  mask_observations: bool = True,
  weights: Sequence[np.ndarray] | None = None,
  count: float | None = None,
  at: Places | None = None,
  **columns: Sequence[np.ndarray],
) -> Batch:
  """Packs trajectories.

  Args:
    advantages: float[T] a trajectory, or one number for each of its tokens.
    rows, length: see `places`. temperature: at which the tokens were sampled.
    mask_observations: False puts observations into the loss: the ablation of
      design promise 2, for experiments that show what it costs.
    weights: float[T] a trajectory, as `rl.aggregation` makes them, and
      `count`, what their sum of losses is divided by. By default a token's is
      its trajectory's `row_weight`, and the count their sum.
    at: places, where they are known.
    columns: `old`, `values` and `returns` by name, float[T] a trajectory; by
      default the behaviour policy's log-probs, and 0.

  Raises:
    ValueError: a trajectory is longer than a row, or greedy, or has another
      number of advantages than tokens.
  """
  if temperature <= 0:
    raise ValueError(
      f'temperature {temperature}: greedy choices have no policy gradient, '
      'sample with a temperature > 0'
    )
  for t in trajectories:
    if len(t) > length:
      raise ValueError(
        f'trajectory {t.id} has {len(t)} tokens, a row {length}: '
        'raise the length of the batch or lower limits.context'
      )
  at = at or places([len(t) for t in trajectories], rows=rows, length=length)
  if weights is None:
    weights = [label_mask(t, mask_observations) * t.row_weight
               for t in trajectories]  # fmt: skip
  batch = empty_batch(at.rows, length)
  packed = [0] * at.rows
  for i, (row, start) in enumerate(at.starts):
    packed[row] += 1
    t = trajectories[i]
    span = (row, slice(start, start + len(t)))
    batch.pack_ids[span] = packed[row]
    batch.temperature[span] = temperature
    own = {name: column[i] for name, column in columns.items()}
    own |= {'advantages': advantages[i], 'weights': weights[i]}
    _write(batch, t, own, span)
  batch.counts[0] = batch.weights.sum() if count is None else count
  return batch


def unpack(array_BT: np.ndarray, at: Places, lengths: Sequence[int]) -> list:
  """What stands in the places of each trajectory: [T] each."""
  return [
    np.asarray(array_BT[row, start : start + n])
    for (row, start), n in zip(at.starts, lengths, strict=True)
  ]


def label_mask(
  trajectory: Trajectory, mask_observations: bool = True
) -> np.ndarray:
  """bool[T]: tokens that carry a loss: none if nothing is learned from it."""
  mask = trajectory.loss_mask()
  if not mask_observations:
    mask = np.ones_like(mask)
    mask[: len(trajectory.segments[0])] = False
  # The first token has no label position: nothing predicts it.
  mask[:1] = False
  return mask if trajectory.status.train_on_tokens else np.zeros_like(mask)


def turn_numbers(trajectory: Trajectory) -> np.ndarray:
  """int32[T]: the number of the turn that a token was sampled in, from 1."""
  sampled = [s.source is Source.MODEL for s in trajectory.segments]
  numbers = np.where(sampled, np.cumsum(sampled), 0)
  return np.repeat(numbers, [len(s) for s in trajectory.segments])


def add_rows(batch: Batch, rows: int) -> Batch:
  """A batch of `rows` rows: those of `batch`, then empty ones."""
  more = rows - batch.tokens.shape[0]
  if more < 0:
    raise ValueError(
      f'{batch.tokens.shape[0]} rows do not fit into {rows}: ask for more'
    )
  if not more:
    return batch
  pairs = zip(batch, empty_batch(more, batch.tokens.shape[1]), strict=True)
  return Batch(*(np.concatenate(pair) for pair in pairs))


def empty_batch(B: int, T: int) -> Batch:
  """B rows of T tokens of padding: they change nothing."""

  def full(value, dtype, *shape):
    return np.full(shape or (B, T), value, dtype)

  whole, real = np.int32, np.float32
  return Batch(
    tokens=full(0, whole),
    positions=full(0, whole),
    pack_ids=full(0, whole),
    weights=full(0, real),
    logprobs=full(0, real),
    old=full(0, real),
    advantages=full(0, real),
    temperature=full(1, real),
    versions=full(-1, whole),
    turns=full(0, whole),
    values=full(0, real),
    returns=full(0, real),
    counts=full(0, real, B),
  )


def _write(
  batch: Batch,
  trajectory: Trajectory,
  own: Mapping[str, float | np.ndarray],
  span: tuple[int, slice],
) -> None:
  n = len(trajectory)
  own = {'old': trajectory.per_token('logprobs')} | own
  for name, given in own.items():
    shape = np.shape(given)
    if shape not in ((), (n,)):
      raise ValueError(
        f'trajectory {trajectory.id} has {n} tokens and {name} of shape '
        f'{shape}: give one a token'
      )
  batch.tokens[span] = trajectory.tokens()
  batch.positions[span] = np.arange(n)
  batch.versions[span] = trajectory.per_token('versions')
  batch.turns[span] = turn_numbers(trajectory)
  batch.weights[span] = own.pop('weights')
  mask = batch.weights[span] > 0
  own['logprobs'] = trajectory.per_token('logprobs')
  for name, given in own.items():
    getattr(batch, name)[span] = np.where(mask, given, 0)
