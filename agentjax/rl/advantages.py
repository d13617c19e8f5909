"""Advantage estimators: from the rewards of a draw to one number a trajectory.

Floor 1, rl/. Host-side numpy in float64; knows no token and no model. An
estimator is a function (rewards_N, groups_N, valid_N) -> advantages_N; a
config names it. Statistics are over trajectories, never over tokens, and only
over valid ones: an infrastructure failure is neither in a mean nor in a loss.
"""

from __future__ import annotations

import numpy as np

# A group whose rewards differ by no more than this carries no information.
_EQUAL = 1e-6


def grpo(
  rewards_N: np.ndarray,
  groups_N: np.ndarray,
  valid_N: np.ndarray,
  *,
  normalize_std: bool = True,
  eps: float = 1e-6,
) -> np.ndarray:
  """Group-relative advantages; 0 for invalid rows and groups of one.

  A = (R - mean of its group) / (std of its group + eps), std with ddof=1; a
  group of equal rewards gives exactly 0. Source: GRPO, arXiv:2402.03300, eq.
  in section 4.1.2; `normalize_std=False` is Dr. GRPO, arXiv:2503.20783.
  """
  rewards = np.asarray(rewards_N, np.float64)
  out = np.zeros(len(rewards))
  for group in np.unique(groups_N):
    rows = np.flatnonzero((groups_N == group) & valid_N)
    if len(rows) < 2 or np.ptp(rewards[rows]) <= _EQUAL:
      continue
    centred = rewards[rows] - rewards[rows].mean()
    if normalize_std:
      centred /= rewards[rows].std(ddof=1) + eps
    out[rows] = centred
  return out


def rloo(
  rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray
) -> np.ndarray:
  """Leave-one-out: A = R - mean of the others; 0 where there are none.

  Source: RLOO, arXiv:2402.14740.
  """
  rewards = np.asarray(rewards_N, np.float64)
  out = np.zeros(len(rewards))
  for group in np.unique(groups_N):
    rows = np.flatnonzero((groups_N == group) & valid_N)
    n = len(rows)
    if n > 1:
      out[rows] = n / (n - 1) * (rewards[rows] - rewards[rows].mean())
  return out


def grpo_shuffled(
  rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray
) -> np.ndarray:
  """A control: `grpo` on rewards that were shuffled within their groups.

  Who did well is lost, all statistics stay: nothing can be learned from it.
  The shuffle is keyed by the group's number.
  """
  rewards = np.array(rewards_N, np.float64)
  for group in np.unique(groups_N):
    rows = np.flatnonzero((groups_N == group) & valid_N)
    rng = np.random.default_rng([0, int(group)])
    rewards[rows] = rewards[rng.permutation(rows)]
  return grpo(rewards, groups_N, valid_N)
