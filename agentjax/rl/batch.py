"""Trajectories packed into fixed-shape rows, and back.

Floor 1, rl/. Host-side numpy: several trajectories stand in one row, told
apart by `pack_ids`, with positions that restart; of a tree (`tree_rows`) the
shared tokens stand there once. Everything is indexed by the
label: entry t belongs to token t, which the model predicts from t - 1. A
token's weight is 0 unless the policy sampled it and its trajectory may be
trained on: the weight is the mask, times what `rl.aggregation` makes of it.

Letters: B rows, T tokens, N trajectories, M kept ids of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from agentjax.records import kept_ids, most_kept
from agentjax.types import Source, Trajectory


class Batch(NamedTuple):
  """Arrays [B, T]; at weight 0 the float arrays are 0.

  `kept` is [B, T, M]: -1 where fewer ids were kept, and throughout where all
  were, and at weight 0; M is 0 where nobody truncates.
  """

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
  before: np.ndarray  # int32, the place of the token before
  ends: np.ndarray  # int32, first place behind all that may see this token
  kept: np.ndarray  # int32, ids that truncated sampling kept
  # float32 [B]: shares of what the sum of weighted losses is divided by.
  counts: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
  """Where each token of each trajectory stands.

  Attributes:
    rows, length: B and T.
    index: of each trajectory its row, and int[T]: the place of each token.
    before: int32 [B, T]: the place of the token before, -1 for none.
    ends: int32 [B, T]: the first place behind all that may see this one.
    pack_ids: int32 [B, T], 0 where nothing stands.
  """

  rows: int
  length: int
  index: tuple[tuple[int, np.ndarray], ...]
  before: np.ndarray
  ends: np.ndarray
  pack_ids: np.ndarray


def fill_rows(
  lengths: Sequence[int], *, rows: int, length: int, name: Callable[[int], str]
) -> tuple[list[tuple[int, int]], int]:
  """(row, first place) of each, longest first, in the fullest row it fits.

  Args:
    rows: how many there are at least; more, in multiples of it, are made
      where needed. name: what the i-th is called in an error.

  Raises:
    ValueError: one is longer than a row.
  """
  room: list[int] = []
  starts = [(0, 0)] * len(lengths)
  for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    n = lengths[i]
    if n > length:
      raise ValueError(
        f'{name(i)} has {n} tokens, a row {length}: raise the length of the '
        'batch or lower limits.context'
      )
    fits = [r for r, left in enumerate(room) if left >= n]
    row = min(fits, key=lambda r: room[r]) if fits else len(room)
    if not fits:
      room.append(length)
    starts[i] = (row, length - room[row])
    room[row] -= n
  return starts, max(1, -(-len(room) // rows)) * rows


def places(
  trajectories: Sequence[Trajectory], *, rows: int, length: int
) -> Places:
  """Each trajectory in one piece; of a tree see `tree_rows.tree_places`."""
  lengths = [len(t) for t in trajectories]
  starts, B = fill_rows(
    lengths, rows=rows, length=length,
    name=lambda i: f'trajectory {trajectories[i].id}',
  )  # fmt: skip
  before = np.full((B, length), -1, np.int32)
  ends, ids = np.zeros((2, B, length), np.int32)
  index: list = [None] * len(lengths)
  packed = [0] * B
  for i in sorted(range(len(lengths)), key=lambda i: starts[i]):
    row, start = starts[i]
    at = np.arange(start, start + lengths[i])
    index[i] = row, at
    packed[row] += 1
    ids[row, at] = packed[row]
    before[row, at[1:]] = at[:-1]
    ends[row, at] = start + lengths[i]
  return Places(B, length, tuple(index), before, ends, ids)


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
  kept: int = 0,
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
    at: places, where they are known: those of a tree, or of a batch before.
    kept: M, where tokens were sampled from few ids.
    columns: `old`, `values` and `returns` by name, float[T] a trajectory; by
      default the behaviour policy's log-probs, and 0.

  Raises:
    ValueError: a trajectory is longer than a row, or greedy, has another
      number of advantages than tokens, or more kept ids than `kept`.
  """
  if temperature <= 0:
    raise ValueError(
      f'temperature {temperature}: greedy choices have no policy gradient, '
      'sample with a temperature > 0'
    )
  for t in trajectories:
    if (most := most_kept(t)) > kept:
      raise ValueError(
        f'trajectory {t.id} was sampled from up to {most} ids a token and the '
        f'batch has room for {kept}: give pack and Learner kept={most}'
      )
  at = at or places(trajectories, rows=rows, length=length)
  if weights is None:
    weights = [label_mask(t, mask_observations) * t.row_weight
               for t in trajectories]  # fmt: skip
  batch = empty_batch(at.rows, length, kept)._replace(
    pack_ids=at.pack_ids, before=np.maximum(at.before, 0), ends=at.ends
  )
  # Of a token that stands in several trajectories the weights are added up,
  # and whatever else it has is their weighted mean.
  total = np.full(batch.weights.shape, np.nan)  # where nothing stands yet
  for i, (t, (row, span)) in enumerate(
    zip(trajectories, at.index, strict=True)
  ):
    own = {name: column[i] for name, column in columns.items()}
    own |= {'advantages': advantages[i], 'weights': weights[i]}
    batch.temperature[row, span] = temperature
    _write(batch, total, t, own, (row, span))
  batch.weights[:] = np.nan_to_num(total)
  batch.counts[0] = batch.weights.sum() if count is None else count
  return batch


def unpack(array_BT: np.ndarray, at: Places) -> list[np.ndarray]:
  """What stands in the places of each trajectory: [T] each."""
  return [np.asarray(array_BT[row, span]) for row, span in at.index]


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
  empty = empty_batch(more, batch.tokens.shape[1], batch.kept.shape[2])
  pairs = zip(batch, empty, strict=True)
  return Batch(*(np.concatenate(pair) for pair in pairs))


def empty_batch(B: int, T: int, kept: int = 0) -> Batch:
  """B rows of T tokens of padding, with M = `kept`: they change nothing."""

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
    before=full(0, whole),
    ends=full(0, whole),
    kept=full(-1, whole, B, T, kept),
    counts=full(0, real, B),
  )


def _write(
  batch: Batch,
  total: np.ndarray,
  trajectory: Trajectory,
  own: dict[str, float | np.ndarray],
  span: tuple[int, np.ndarray],
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
  tokens, there = trajectory.tokens(), ~np.isnan(total[span])
  if (batch.tokens[span] != tokens)[there].any():
    raise ValueError(
      f'trajectory {trajectory.id} does not have the tokens that it is said to '
      'share: give a tree of trajectories that were forked'
    )
  batch.tokens[span] = tokens
  batch.positions[span] = np.arange(n)
  batch.versions[span] = trajectory.per_token('versions')
  batch.turns[span] = turn_numbers(trajectory)
  weights = np.broadcast_to(np.float64(own.pop('weights')), (n,))
  mask = weights > 0
  own['logprobs'] = trajectory.per_token('logprobs')
  before = np.nan_to_num(total[span])
  share = _share(weights, before)
  for name, given in own.items():
    column = getattr(batch, name)
    new = np.where(mask, given, 0)
    old = column[span]
    mixed = np.where(before > 0, old + share * (new - old), new)
    column[span] = np.where(mask, mixed, old)
  kept = kept_ids(trajectory, batch.kept.shape[2])
  twice = mask & (before > 0)
  if (batch.kept[span] != kept)[twice].any():
    raise ValueError(
      f'trajectory {trajectory.id} shares tokens that were sampled from other '
      'ids: give a tree of trajectories that were forked'
    )
  batch.kept[span] = np.where(mask[:, None], kept, batch.kept[span])
  total[span] = before + weights


def _share(weights: np.ndarray, before: np.ndarray) -> np.ndarray:
  """weights / (weights + before), and 0 where both are 0."""
  both = weights + before
  return np.divide(weights, both, out=np.zeros_like(both), where=both > 0)
