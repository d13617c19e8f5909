"""Trajectories packed into fixed-shape rows.

Floor 1, rl/. Host-side numpy: several trajectories stand in one row, told
apart by `pack_ids`, with positions that restart. Everything is indexed by the
label: entry t belongs to token t, which the model predicts from t - 1. A
token's weight is 0 unless the policy sampled it and its trajectory may be
trained on: the weight is the mask.

Letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agentjax.types import Source, Trajectory


class Batch(NamedTuple):
  """Arrays [B, T]; at weight 0 the float arrays are 0."""

  tokens: np.ndarray  # int32
  positions: np.ndarray  # int32, restarting per trajectory
  pack_ids: np.ndarray  # int32, 0 is padding
  weights: np.ndarray  # float32, > 0 exactly at tokens with a loss
  logprobs: np.ndarray  # float32, of the behaviour policy
  advantages: np.ndarray  # float32
  temperature: np.ndarray  # float32, 1 at padding
  versions: np.ndarray  # int32, -1 where not sampled
  turns: np.ndarray  # int32, 1.. in each trajectory, 0 where not sampled


def pack(
  trajectories: Sequence[Trajectory],
  advantages: Sequence[float | np.ndarray],
  *,
  rows: int,
  length: int,
  temperature: float = 1.0,
  row_multiple: int = 1,
  mask_observations: bool = True,
) -> Batch:
  """Packs trajectories, longest first, each into the fullest row it fits.

  Args:
    advantages: float[T] a trajectory, or one number for each of its tokens.
    rows: B at least; more rows, in multiples of it, are made where needed.
    length: T. temperature: at which the tokens were sampled.
    mask_observations: False puts observations into the loss: the ablation of
      design promise 2, for experiments that show what it costs.

  Raises:
    ValueError: a trajectory is longer than a row, or greedy, or has another
      number of advantages than tokens.
  """
  if temperature <= 0:
    raise ValueError(
      f'temperature {temperature}: greedy choices have no policy gradient, '
      'sample with a temperature > 0'
    )
  order = sorted(range(len(trajectories)), key=lambda i: -len(trajectories[i]))
  room: list[int] = []
  places: list[tuple[int, int, int]] = []  # trajectory, row, start
  for i in order:
    n = len(trajectories[i])
    if n > length:
      raise ValueError(
        f'trajectory {trajectories[i].id} has {n} tokens, a row {length}: '
        'raise the length of the batch or lower limits.context'
      )
    fits = [r for r, left in enumerate(room) if left >= n]
    row = min(fits, key=lambda r: room[r]) if fits else len(room)
    if not fits:
      room.append(length)
    places.append((i, row, length - room[row]))
    room[row] -= n
  unit = rows * row_multiple
  B = max(1, -(-len(room) // unit)) * unit
  batch = empty_batch(B, length)
  packed = [0] * B
  for i, row, start in places:
    packed[row] += 1
    _write(
      batch,
      trajectories[i],
      np.asarray(advantages[i], np.float32),
      (row, slice(start, start + len(trajectories[i]))),
      packed[row],
      temperature,
      mask_observations,
    )
  return batch


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
  return Batch(
    tokens=np.zeros((B, T), np.int32),
    positions=np.zeros((B, T), np.int32),
    pack_ids=np.zeros((B, T), np.int32),
    weights=np.zeros((B, T), np.float32),
    logprobs=np.zeros((B, T), np.float32),
    advantages=np.zeros((B, T), np.float32),
    temperature=np.ones((B, T), np.float32),
    versions=np.full((B, T), -1, np.int32),
    turns=np.zeros((B, T), np.int32),
  )


def _write(
  batch: Batch,
  trajectory: Trajectory,
  advantage: np.ndarray,
  span: tuple[int, slice],
  pack_id: int,
  temperature: float,
  mask_observations: bool,
) -> None:
  if advantage.shape not in ((), (len(trajectory),)):
    raise ValueError(
      f'trajectory {trajectory.id} has {len(trajectory)} tokens and '
      f'advantages of shape {advantage.shape}: give one a token, or one'
    )
  mask = trajectory.loss_mask()
  if not mask_observations:
    mask = np.ones_like(mask)
    mask[: len(trajectory.segments[0])] = False
  # The first token has no label position: nothing predicts it.
  mask[:1] = False
  if not trajectory.status.train_on_tokens:
    mask = np.zeros_like(mask)
  batch.tokens[span] = trajectory.tokens()
  batch.positions[span] = np.arange(len(trajectory))
  batch.pack_ids[span] = pack_id
  batch.weights[span] = mask * trajectory.row_weight
  batch.logprobs[span] = np.where(mask, trajectory.per_token('logprobs'), 0)
  batch.advantages[span] = np.where(mask, advantage, 0)
  batch.temperature[span] = temperature
  batch.versions[span] = trajectory.per_token('versions')
  batch.turns[span] = _turns(trajectory)


def _turns(trajectory: Trajectory) -> np.ndarray:
  """int32[T]: the number of the turn that a token was sampled in, from 1."""
  sampled = [s.source is Source.MODEL for s in trajectory.segments]
  numbers = np.where(sampled, np.cumsum(sampled), 0)
  return np.repeat(numbers, [len(s) for s in trajectory.segments])
