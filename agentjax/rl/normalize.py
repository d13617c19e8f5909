"""Means and spreads of groups of numbers, and whitening.

Floor 1, rl/. Host-side numpy in float64; knows no trajectory and no token.
Labels say which numbers stand together: integers of the numbers' shape, -1
for a number that is in no statistic and comes out as 0, whatever it holds.
Denominators are counts. Numbers that differ by no more than rounding carry no
information: centred, they are exactly 0, so that no division blows them up.
"""

from __future__ import annotations

import numpy as np

# Relative to the largest of a group, and absolute below 1: float32 rewards.
EQUAL = 1e-6


def labels(groups, valid) -> np.ndarray:
  """0, 1, ... by group, in the order of their keys; -1 where not valid."""
  _, number = np.unique(np.asarray(groups), return_inverse=True)
  valid = np.asarray(valid, bool)
  return np.where(valid, number.reshape(valid.shape), -1)


def together(valid) -> np.ndarray:
  """One group of all that is valid."""
  return np.where(np.asarray(valid, bool), 0, -1)


def varies(x, label: np.ndarray) -> np.ndarray:
  """bool: whether the numbers of its group differ by more than rounding."""
  flat, at, n = _gathered(x, label)
  out = np.zeros(np.shape(label), bool)
  out[label >= 0] = _vary(flat, at, len(n))
  return out


def centre(
  x,
  label: np.ndarray,
  *,
  leave_one_out: bool = False,
  raw_singletons: bool = False,
) -> np.ndarray:
  """x - mean of its group; 0 in a group of one, and of equal numbers.

  Args:
    leave_one_out: the mean of the others, in place of all.
    raw_singletons: x itself in a group of one. Some systems do this, where
      nothing is known of how good x is.
  """
  flat, at, n = _gathered(x, label)
  if not len(n):
    return np.zeros(np.shape(x))
  total = np.bincount(at, flat, len(n))[at]
  count = n[at]
  mean = total / count
  if leave_one_out:
    alone = count == 1
    mean = np.where(alone, mean, (total - flat) / np.where(alone, 1, count - 1))
  out = np.where(_vary(flat, at, len(n)), flat - mean, 0.0)
  if raw_singletons:
    out = np.where(count == 1, flat, out)
  return _scattered(out, label)


def spread(centred, label: np.ndarray, *, ddof: int = 1) -> np.ndarray:
  """sqrt(sum x^2 / (n - ddof)) of its group, for each number.

  1 in a group of no more than `ddof`, and where there is no label.
  """
  flat, at, n = _gathered(centred, label)
  out = np.ones(np.shape(centred))
  if not len(n):
    return out
  free = np.maximum(n - ddof, 1)
  deviation = np.sqrt(np.bincount(at, flat * flat, len(n)) / free)
  out[label >= 0] = np.where(n > ddof, deviation, 1.0)[at]
  return out


def normalize(
  x,
  mean_label: np.ndarray | None,
  spread_label: np.ndarray | None,
  *,
  leave_one_out: bool = False,
  raw_singletons: bool = False,
  ddof: int = 1,
  eps: float = 1e-6,
) -> np.ndarray:
  """(x - mean) / (spread around that mean + eps), each at a level of its own.

  Args:
    mean_label, spread_label: who stands together for the mean, and for the
      spread; None leaves that step out. Both are -1 at the same numbers.

  A spread is one around the mean that was taken off, also where that is the
  mean of another level or of the others alone. Source: the normalisation of
  AReaL, arXiv:2505.24298 (its code: mean and std at batch or group level).
  """
  if mean_label is None and spread_label is None:
    return np.array(x, np.float64)
  if mean_label is None:
    out = np.where(spread_label >= 0, np.asarray(x, np.float64), 0.0)
  else:
    out = centre(
      x,
      mean_label,
      leave_one_out=leave_one_out,
      raw_singletons=raw_singletons,
    )
  if spread_label is None:
    return out
  divisor = spread(out, spread_label, ddof=ddof) + eps
  return out / np.where(divisor > 0, divisor, 1.0)


def whiten(
  x,
  mask,
  *,
  ddof: int = 1,
  eps: float = 1e-8,
  least: float = 0.0,
  keep_mean: bool = False,
  over=None,
) -> np.ndarray:
  """(x - mean) / sqrt(max(variance, least) + eps) where the mask holds, or 0.

  With one number or none there is no variance: x - mean.

  Args:
    least: variances below count as this one.
    keep_mean: adds the mean again.
    over: mask of the numbers that mean and variance are of; `mask` if None.
  """
  mask = np.asarray(mask, bool)
  over = mask if over is None else np.asarray(over, bool)
  x = np.where(mask | over, np.asarray(x, np.float64), 0.0)
  mean, variance = moments(x, over, ddof=ddof)
  out = x - mean
  if np.count_nonzero(over) > 1:
    out = out / np.sqrt(max(variance, least) + eps)
  return np.where(mask, out + mean if keep_mean else out, 0.0)


def moments(x, mask, *, ddof: int = 1) -> tuple[float, float]:
  """Mean and variance of what the mask holds; 0 where there is none."""
  held = np.asarray(x, np.float64)[np.asarray(mask, bool)]
  mean = held.sum() / max(len(held), 1)
  variance = np.square(held - mean).sum() / max(len(held) - ddof, 1)
  return float(mean), float(variance)


def _gathered(x, label):
  """The numbers that have a label, their group, and the size of each group."""
  x, label = np.asarray(x, np.float64), np.asarray(label)
  has = label >= 0
  at = label[has]
  return x[has], at, np.bincount(at) if at.size else np.zeros(0, int)


def _scattered(flat, label) -> np.ndarray:
  out = np.zeros(np.shape(label))
  out[np.asarray(label) >= 0] = flat
  return out


def _vary(flat, at, groups: int) -> np.ndarray:
  """Whether the numbers of its group differ, for each number."""
  low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
  np.minimum.at(low, at, flat)
  np.maximum.at(high, at, flat)
  size = np.maximum(np.maximum(np.abs(low), np.abs(high)), 1.0)
  return (high - low > EQUAL * size)[at]
