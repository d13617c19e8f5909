"""How the tokens of an optimizer batch are weighed against one another.

Floor 1, rl/. Host-side numpy in float64. An aggregation is a function

    (mask, sequences, groups, turns, **options) -> Weighting

of the WHOLE optimizer batch, over all its micro-batches, devices and hosts:
the loss is sum(weights * x) / count, summed wherever its tokens are and
divided once. So no split of a batch, no packing and no sharding can change it.
All arrays are of one shape, of any; ids are any integers, a sequence's the
same for its tokens and for no others; turns may restart in each sequence.

A sequence (group, turn) of no tokens is not there: neither in a sum nor in a
count, unless a count is given. Where each of P processes weighs its own rows
their counts are added up: a constant, given or of `token_sum`, would then stand
there P times, so each is given the P-th part of it. Token weights are a float
mask: a prefix shared by n leaves of a tree weighs 1 / n in each of them, and
counts so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Weighting(NamedTuple):
  """sum(weights * x) / count is the loss; weight 0 hides, count 0 is a 0."""

  weights: np.ndarray  # float64
  count: float


Aggregation = Callable[..., Weighting]


def token_mean(
  mask, sequences=None, groups=None, turns=None, *, token_weights=None,
  count: float | None = None,
) -> Weighting:  # fmt: skip
  """Over all tokens of the batch: DAPO's as public systems have it.

  Args:
    count: stands for the number of tokens.
  """
  del sequences, groups, turns
  weights = _weights(mask, token_weights)
  return Weighting(weights, _given(count, weights.sum()))


def token_sum(
  mask, sequences=None, groups=None, turns=None, *, token_weights=None,
  count: float | None = None,
) -> Weighting:  # fmt: skip
  """The sum; `count` divides it, where one is given."""
  del sequences, groups, turns
  weights = _weights(mask, token_weights)
  return Weighting(weights, _given(count, float(weights.any())))


def sequence_mean_token_sum(
  mask, sequences, groups=None, turns=None, *, token_weights=None,
  count: float | None = None,
) -> Weighting:  # fmt: skip
  """Mean over sequences of the sums over their tokens.

  Args:
    count: stands for the number of sequences that have tokens.
  """
  del groups, turns
  weights = _weights(mask, token_weights)
  return Weighting(weights, _given(count, _totals(weights, sequences)[1]))


def sequence_mean_token_mean(
  mask, sequences, groups=None, turns=None, *, token_weights=None,
  count: float | None = None,
) -> Weighting:  # fmt: skip
  """Mean over sequences of the means over their tokens: GRPO's as written.

  Args:
    count: stands for the number of sequences that have tokens.

  Source: arXiv:2402.03300, eq. 3.
  """
  del groups, turns
  weights = _weights(mask, token_weights)
  totals, n = _totals(weights, sequences)
  return Weighting(_shares(weights, totals), _given(count, n))


def sequence_mean_token_sum_norm(
  mask, sequences, groups=None, turns=None, *, length: float,
  token_weights=None, count: float | None = None,
) -> Weighting:  # fmt: skip
  """Mean over sequences of the sums over their tokens, over a constant.

  Args:
    length: the constant, such as the most tokens that a response may have; a
      row's width would change with packing.
    count: stands for the number of sequences that have tokens.

  Source: Dr. GRPO, arXiv:2503.20783.
  """
  if not length > 0:
    raise ValueError(f'length is {length}: give a number above 0')
  weights, n = sequence_mean_token_sum(
    mask, sequences, groups, turns, token_weights=token_weights, count=count
  )
  return Weighting(weights, n * length)


def group_mean_token_mean(
  mask, sequences, groups, turns=None, *, token_weights=None,
  count: float | None = None,
) -> Weighting:  # fmt: skip
  """Mean over prompt groups of the means over their tokens: DAPO as written.

  Args:
    count: stands for the number of groups that have tokens.

  Source: arXiv:2503.14476.
  """
  del sequences, turns
  weights = _weights(mask, token_weights)
  totals, n = _totals(weights, groups)
  return Weighting(_shares(weights, totals), _given(count, n))


def turn_mean_token_mean(
  mask, sequences, groups, turns, *, token_weights=None,
  count: float | None = None,
) -> Weighting:  # fmt: skip
  """Mean over turns of the means over their tokens: a turn is an action.

  Args:
    count: stands for the number of turns that have tokens.
  """
  del groups
  weights = _weights(mask, token_weights)
  totals, n = _totals(weights, sequences, turns)
  return Weighting(_shares(weights, totals), _given(count, n))


# ---- rejected tokens --------------------------------------------------------


def over_original(
  aggregate: Aggregation, mask, kept, *ids, **options
) -> Weighting:
  """Rejected tokens weigh 0, and still count: the scale stays what it was."""
  weights, count = aggregate(mask, *ids, **options)
  return Weighting(np.where(kept, weights, 0.0), count)


def over_effective(
  aggregate: Aggregation, mask, kept, *ids, **options
) -> Weighting:
  """As if rejected tokens had never been: the others make up for them."""
  return aggregate(np.asarray(mask, bool) & np.asarray(kept, bool), *ids,
                   **options)  # fmt: skip


# ---- trajectories -----------------------------------------------------------


def over_trajectories(
  aggregate: Aggregation, masks, *, groups, turns, token_weights=None,
  kept=None, rejected: Callable[..., Weighting] = over_original,
) -> tuple[list[np.ndarray], float]:  # fmt: skip
  """Weights float64[T] of each of N trajectories, and the count.

  Args:
    masks: bool[T] each. groups: int[N]. turns: int[T] each.
    token_weights: float[T] each, or None.
    kept: bool[T] each, what rejections leave, and `rejected` what becomes of
      the rest: `over_original` or `over_effective`.
  """
  lengths = [len(m) for m in masks]
  ends = np.cumsum([0, *lengths])

  def flat(arrays):
    return np.concatenate([np.zeros(0), *arrays])

  ids = (
    np.repeat(np.arange(len(lengths)), lengths),
    np.repeat(np.asarray(groups), lengths),
    flat(turns),
  )
  mask = flat(masks) > 0
  options = {}
  if token_weights is not None:
    options['token_weights'] = flat(token_weights)
  if kept is None:
    weights, count = aggregate(mask, *ids, **options)
  else:
    weights, count = rejected(aggregate, mask, flat(kept) > 0, *ids, **options)
  return [weights[a:b] for a, b in zip(ends, ends[1:], strict=False)], count


# ---- parts ------------------------------------------------------------------


def _weights(mask, token_weights) -> np.ndarray:
  mask = np.asarray(mask, bool)
  if token_weights is None:
    return mask.astype(np.float64)
  weights = np.where(mask, np.asarray(token_weights, np.float64), 0.0)
  if not (weights >= 0).all():
    raise ValueError(
      f'token weights down to {weights.min()}: give numbers of 0 or more'
    )
  return weights


def _given(count: float | None, own: float) -> float:
  if count is not None and not count > 0:
    raise ValueError(f'count is {count}: give a number above 0')
  return float(own if count is None else count)


def _totals(weights, *ids) -> tuple[np.ndarray, int]:
  """For each token the weight of all of its id, and how many ids have any."""
  place = np.zeros(weights.size, np.int64)
  for x in ids:
    own = np.unique(np.asarray(x).reshape(-1), return_inverse=True)[1]
    both = place * (own.max(initial=0) + 1) + own
    place = np.unique(both, return_inverse=True)[1]
  sums = np.bincount(place, weights.reshape(-1))
  return sums[place].reshape(weights.shape), int((sums > 0).sum())


def _shares(weights, totals) -> np.ndarray:
  return weights / np.where(totals > 0, totals, 1.0)
