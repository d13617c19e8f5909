"""Baselines of their own for each step: the optimal token baseline.

Floor 1, rl/. Estimators of the seam that `draw` tells. The trajectories of a
group are laid side by side, and at each step the baseline is the mean of their
rewards to go, weighted by how much their gradients have varied so far. Needs
`logprobs` and `sum_squares` (the sum of squared probabilities) of each token.

Letters: G trajectories (of one group), S steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentjax.rl.draw import Draw
from agentjax.rl.normalize import labels
from agentjax.rl.returns import returns


def otb(
  draw: Draw,
  *,
  importance: Sequence[np.ndarray] | None = None,
  raw_tail: bool = False,
  raw_singletons: bool = False,
  eps: float = 1e-8,
) -> list[np.ndarray]:
  """Optimal token baseline, steps aligned by position in the sequence.

  For comparison: with observations between, tokens at one position are not at
  one step. `tir_otb` is the form for many turns; the options are its.
  """
  steps = [np.arange(len(m)) for m in draw.masks]
  weights = _weights(draw, importance)
  label = labels(draw.groups_N, draw.valid_N)
  return _advantages(draw, steps, weights, label, raw_tail, raw_singletons, eps)


def tir_otb(
  draw: Draw,
  *,
  importance: Sequence[np.ndarray] | None = None,
  raw_tail: bool = False,
  raw_singletons: bool = False,
  eps: float = 1e-8,
) -> list[np.ndarray]:
  """Optimal token baseline, steps aligned by the number of sampled tokens.

  B_t = sum_i G_it W_it / (sum_i W_it + eps) over the group, A_t = G_t - B_t,
  where G is the undiscounted reward to go and W_t = sum_{s<=t} (1 - 2 pi_s +
  sum pi_s^2), the squared norm of the gradients in the logits up to t. Source:
  the optimal token baseline of verl (its multi-turn form).

  Args:
    importance: weights float[T] a trajectory of an off-policy correction; they
      enter W squared.
    raw_tail: where one trajectory goes on behind all others it has no
      baseline, in place of its own (which leaves 0).
    raw_singletons: the same for a group of one.
  """
  steps = [np.maximum(np.cumsum(m) - 1, 0) for m in draw.masks]
  weights = _weights(draw, importance)
  # One without a token stands beside nobody.
  sampled = np.array([m.any() for m in draw.masks_valid()], bool)
  label = labels(draw.groups_N, sampled)
  return _advantages(draw, steps, weights, label, raw_tail, raw_singletons, eps)


def _advantages(
  draw: Draw,
  steps: Sequence[np.ndarray],
  weights: Sequence[np.ndarray],
  label: np.ndarray,
  raw_tail: bool,
  raw_singletons: bool,
  eps: float,
) -> list[np.ndarray]:
  masks, to_go = draw.masks_valid(), returns(draw)
  out = [np.zeros(len(m)) for m in masks]
  for g in range(label.max(initial=-1) + 1):
    rows = np.flatnonzero(label == g)
    if len(rows) == 1:
      if raw_singletons:
        out[rows[0]] = to_go[rows[0]]
      continue
    at = [steps[i][masks[i]] for i in rows]
    length = max(int(a.max(initial=-1)) + 1 for a in at)
    G_GS, W_GS = np.zeros((2, len(rows), length))
    for k, i in enumerate(rows):
      G_GS[k, at[k]] = to_go[i][masks[i]]
      W_GS[k, at[k]] = weights[i][masks[i]]
    baseline_S = (G_GS * W_GS).sum(0) / (W_GS.sum(0) + eps)
    tail = np.sort([len(a) for a in at])[-2]
    for k, i in enumerate(rows):
      alone = raw_tail & (len(at[k]) > tail) & (at[k] >= tail)
      base = np.where(alone, 0.0, baseline_S[at[k]])
      out[i][masks[i]] = to_go[i][masks[i]] - base
  return out


def _weights(draw: Draw, importance) -> list[np.ndarray]:
  """W of each token."""
  logprobs, squares = draw.need('logprobs', 'sum_squares')
  out = []
  for i, mask in enumerate(draw.masks_valid()):
    w = 1 - 2 * np.exp(np.where(mask, logprobs[i], 0.0)) + squares[i]
    if importance is not None:
      w = w * np.square(np.where(mask, importance[i], 0.0))
    out.append(np.cumsum(np.where(mask, w, 0.0)))
  return out
