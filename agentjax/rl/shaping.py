"""What is done to rewards before an estimator sees them, and to whole groups.

Floor 1, rl/. Host-side numpy in float64. Rewards are shaped here and nowhere
else: a length penalty, clipping (of a KL penalty see `kl.in_reward`); and
groups that teach nothing are found by the raw metric, before any shaping.

Letters: N trajectories.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from agentjax.rl.draw import Draw
from agentjax.rl.normalize import labels, varies

# ---- length -----------------------------------------------------------------


def policy_tokens(draw: Draw) -> np.ndarray:
  """int[N]: what the policy sampled. The length of an agent's answer."""
  return np.array([np.count_nonzero(m) for m in draw.masks])


def all_tokens(draw: Draw) -> np.ndarray:
  """int[N]: from the first sampled token on, observations among them."""
  return np.array([len(m) - np.argmax(m) if m.any() else 0 for m in draw.masks])


def overlong_penalty(
  lengths_N,
  *,
  limit: int,
  buffer: int,
  factor: float = 1.0,
  lowest: float = -np.inf,
) -> np.ndarray:
  """min(-(length - (limit - buffer)) / buffer * factor, 0), and >= lowest.

  To be added to rewards. The paper stops at -1 behind the limit (`lowest` =
  -factor); most systems, whose limit is a hard one, do not. Without a buffer
  it is all or nothing. Source: DAPO, arXiv:2503.14476, eq. 13.
  """
  over = np.asarray(lengths_N, np.float64) - (limit - buffer)
  share = over / buffer if buffer else np.where(over > 0, 1.0, 0.0)
  return np.maximum(np.minimum(-share * factor, 0.0), lowest)


def overlong(
  draw: Draw,
  *,
  limit: int,
  buffer: int,
  factor: float = 1.0,
  lowest: float = -np.inf,
  lengths: Callable[[Draw], np.ndarray] = policy_tokens,
) -> Draw:
  """The draw with `overlong_penalty` in its rewards; `lengths` of [N]."""
  penalty = overlong_penalty(
    lengths(draw), limit=limit, buffer=buffer, factor=factor, lowest=lowest
  )
  rewards = np.where(draw.valid_N, draw.rewards_N + penalty, 0.0)
  return dataclasses.replace(draw, rewards_N=rewards)


# ---- scale ------------------------------------------------------------------


def rescaled(
  rewards_N, *, bias: float = 0.0, factor: float = 1.0,
  low: float = -np.inf, high: float = np.inf,
) -> np.ndarray:  # fmt: skip
  """(reward + bias) * factor, clipped."""
  rewards = (np.asarray(rewards_N, np.float64) + bias) * factor
  return np.clip(rewards, low, high)


# ---- groups that teach nothing ----------------------------------------------


def informative(metric_N, groups_N, valid_N) -> np.ndarray:
  """bool[N]: valid, and in a group whose metric is not the same throughout.

  Dynamic sampling without a refill: what is False may be taken out of the
  loss, with counts as they were or without it. `metric_N` is the raw verdict:
  a length penalty would make a group of failures look as if it taught
  something. Source: DAPO, arXiv:2503.14476, eq. 11.
  """
  return varies(metric_N, labels(groups_N, valid_N))


def released_informative(metric_N, groups_N, valid_N) -> np.ndarray:
  """bool[N]: as the DAPO recipe filters: by np.std > 0, or a group of one.

  The deviation of equal numbers may be above 0 by rounding ([0.7] * 3), and
  one that is no number drops its group.
  """
  metric = np.asarray(metric_N, np.float64)
  label = labels(groups_N, valid_N)
  out = np.zeros(label.shape, bool)
  for number in np.unique(label[label >= 0]):
    members = label == number
    alone = np.count_nonzero(members) == 1
    out[members] = alone or bool(np.std(metric[members]) > 0)
  return out


def group_shares(metric_N, groups_N, valid_N) -> dict[str, float]:
  """Shares of the groups: without variance, and with one valid member.

  Among the groups that have a valid member; 0 where there are none.
  """
  label = labels(groups_N, valid_N)
  present, size = np.unique(label[label >= 0], return_counts=True)
  teaches = varies(metric_N, label)
  taught = np.unique(label[teaches])
  n = max(len(present), 1)
  return {
    'zero_variance_groups': (len(present) - len(taught)) / n,
    'singleton_groups': float(np.count_nonzero(size == 1)) / n,
  }
