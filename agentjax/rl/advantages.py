"""Advantages of whole trajectories: one number each, the same at each token.

Floor 1, rl/. Estimators of the seam that `draw` tells. Statistics are over
trajectories, never over tokens unless an algorithm says so, and only over
valid ones: an infrastructure failure is neither in a mean nor in a loss. A
group of one, and a group of equal rewards, tell nothing: exactly 0.

Options that estimators share: `scores` says what a trajectory is worth
(`seam.outcome`, or `seam.total` with turn and token rewards, then a KL penalty
moves the baseline too); `raw_singletons` gives a group of one its reward in
place of 0, as some systems do.

Letters: N trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from agentjax.rl import returns
from agentjax.rl.draw import Draw, MissingParts
from agentjax.rl.normalize import centre, labels, spread, together, varies
from agentjax.rl.seam import Scores, broadcast, outcome, whitened

# (scores_N, label_N, ddof, eps) -> what centred scores are divided by.
Scale = Callable[[np.ndarray, np.ndarray, int, float], np.ndarray]


def no_std(scores_N, label_N, ddof, eps) -> np.ndarray:
  """Not divided: Dr. GRPO."""
  del label_N, ddof, eps
  return np.ones(np.shape(scores_N))


def group_std(scores_N, label_N, ddof, eps, *, least=0.0) -> np.ndarray:
  """Standard deviation of the group, at least `least`, plus eps."""
  std = spread(centre(scores_N, label_N), label_N, ddof=ddof)
  # Where it is 0, so is what it divides.
  return np.where(std > 0, np.maximum(std, least) + eps, 1.0)


def batch_std(scores_N, label_N, ddof, eps) -> np.ndarray:
  """Standard deviation of the scores of the whole draw, plus eps (TRL)."""
  return group_std(scores_N, together(label_N >= 0), ddof, eps)


def within_std(scores_N, label_N, ddof, eps) -> np.ndarray:
  """Of the whole draw, around the mean of each group, plus eps (AReaL)."""
  std = spread(centre(scores_N, label_N), together(label_N >= 0), ddof=ddof)
  return np.where(std > 0, std + eps, 1.0)


def standardized(
  scores_N,
  label_N,
  *,
  scale: Scale = group_std,
  ddof: int = 1,
  eps: float = 1e-6,
  raw_singletons: bool = False,
) -> np.ndarray:
  """(score - mean of its group) / scale; 0 where there is no label."""
  centred = centre(scores_N, label_N, raw_singletons=raw_singletons)
  return centred / scale(np.asarray(scores_N, np.float64), label_N, ddof, eps)


def _labels(draw: Draw) -> np.ndarray:
  return labels(draw.groups_N, draw.valid_N)


def grpo(
  draw: Draw,
  *,
  scale: Scale = group_std,
  ddof: int = 1,
  eps: float = 1e-6,
  raw_singletons: bool = False,
  scores: Scores = outcome,
) -> list[np.ndarray]:
  """Group-relative: A = (R - mean of its group) / (std of its group + eps).

  `scale` may be another than the group's std: `batch_std` and `within_std` are
  those of the whole draw, `no_std` is Dr. GRPO. Source: GRPO,
  arXiv:2402.03300, section 4.1.2; ddof 1 and an eps of 1e-6 outside of the
  root are what most systems take.
  """
  return broadcast(
    draw,
    standardized(
      scores(draw),
      _labels(draw),
      scale=scale,
      ddof=ddof,
      eps=eps,
      raw_singletons=raw_singletons,
    ),
  )


def dr_grpo(
  draw: Draw, *, scores: Scores = outcome, raw_singletons: bool = False
) -> list[np.ndarray]:
  """A = R - mean of its group. Source: Dr. GRPO, arXiv:2503.20783."""
  centred = centre(scores(draw), _labels(draw), raw_singletons=raw_singletons)
  return broadcast(draw, centred)


def rloo(
  draw: Draw, *, scores: Scores = outcome, raw_singletons: bool = False
) -> list[np.ndarray]:
  """Leave-one-out: A = R - mean of the others. Source: arXiv:2402.14740."""
  centred = centre(
    scores(draw),
    _labels(draw),
    leave_one_out=True,
    raw_singletons=raw_singletons,
  )
  return broadcast(draw, centred)


def grpo_shuffled(draw: Draw) -> list[np.ndarray]:
  """A control: `grpo` on rewards that were shuffled within their groups.

  Who did well is lost, all statistics stay: nothing can be learned from it.
  The shuffle is keyed by the group's number.
  """
  rewards = draw.rewards_N.copy()
  for group in np.unique(draw.groups_N):
    rows = np.flatnonzero((draw.groups_N == group) & draw.valid_N)
    rng = np.random.default_rng([0, int(group)])
    rewards[rows] = rewards[rng.permutation(rows)]
  return broadcast(draw, standardized(rewards, _labels(draw)))


def reinforce_plus_plus(
  draw: Draw, *, gamma: float = 1.0, cross: returns.Cross = returns.carry
) -> list[np.ndarray]:
  """Rewards to go, whitened over all sampled tokens of the draw.

  G_t = r_t + gamma G_next over sampled tokens. `cross` says what an observation
  does to what is carried over it. Source: REINFORCE++, arXiv:2501.03262.
  """
  return whitened(draw, returns.returns(draw, gamma=gamma, cross=cross))


def reinforce_plus_plus_baseline(
  draw: Draw, *, scores: Scores = outcome, raw_singletons: bool = False
) -> list[np.ndarray]:
  """R - mean of its group, then whitened over all sampled tokens.

  Source: REINFORCE++-baseline, arXiv:2501.03262.
  """
  return whitened(
    draw, dr_grpo(draw, scores=scores, raw_singletons=raw_singletons)
  )


def remax(draw: Draw) -> list[np.ndarray]:
  """Rewards to go less the reward of the greedy answer (`baselines_N`).

  Source: ReMax, arXiv:2310.10505.
  """
  (baselines,) = draw.need('baselines_N')
  return [
    np.where(m, g - b, 0.0)
    for m, g, b in zip(
      draw.masks_valid(), returns.returns(draw), baselines, strict=True
    )
  ]


def opo(
  draw: Draw, *, scores: Scores = outcome, raw_singletons: bool = False
) -> list[np.ndarray]:
  """A = R - mean of its group, weighted by lengths in sampled tokens.

  Source: OPO, arXiv:2505.23585, the optimal baseline where the square of a
  gradient grows as the length.
  """
  label, score = _labels(draw), scores(draw)
  has = label >= 0
  length = np.array([np.count_nonzero(m) for m in draw.masks], float)
  groups = label.max(initial=-1) + 1
  weight = np.bincount(label[has], length[has], groups)
  summed = np.bincount(label[has], (length * score)[has], groups)
  size = np.bincount(label[has], minlength=groups)
  baseline = np.zeros(len(draw))
  baseline[has] = (summed / np.where(weight > 0, weight, 1.0))[label[has]]
  out = np.where(varies(score, label), score - baseline, 0.0)
  if raw_singletons:
    out[has] = np.where(size[label[has]] == 1, score[has], out[has])
  return broadcast(draw, out)


def gpg(
  draw: Draw,
  *,
  scores: Scores = outcome,
  divisor: float = 1.0,
  raw_singletons: bool = False,
) -> list[np.ndarray]:
  """A = (R - mean of its group) / divisor * N / (number of scores not 0).

  Source: GPG, arXiv:2504.02546; the factor makes up for the groups whose
  rewards are all 0, which give no gradient.
  """
  label, score = _labels(draw), scores(draw)
  has = label >= 0
  factor = np.count_nonzero(has) / max(np.count_nonzero(score[has]), 1)
  centred = centre(score, label, raw_singletons=raw_singletons)
  return broadcast(draw, factor * centred / divisor)


def pass_at_k(
  draw: Draw, *, scores: Scores = outcome, scale: Scale = group_std,
  ddof: int = 1, eps: float = 1e-6,
) -> list[np.ndarray]:  # fmt: skip
  """The best of its group gets (best - second best) / scale, others 0.

  What the best one adds to the best of k. Source: arXiv:2503.19595.
  """
  label, score = _labels(draw), scores(draw)
  out = np.zeros(len(draw))
  for g in range(label.max(initial=-1) + 1):
    rows = np.flatnonzero(label == g)
    if len(rows) > 1:
      second, best = rows[np.argsort(score[rows], kind='stable')[-2:]]
      out[best] = score[best] - score[second]
  out = np.where(varies(score, label), out, 0.0)
  return broadcast(draw, out / scale(score, label, ddof, eps))


def gdpo(
  draw: Draw,
  *,
  weights: Mapping[str, float] | None = None,
  scale: Scale = group_std,
  ddof: int = 1,
  eps: float = 1e-6,
  raw_singletons: bool = False,
) -> list[np.ndarray]:
  """`grpo` of each part of the reward, weighted, summed, whitened over tokens.

  A part with a small spread counts as much as one with a large. `weights` name
  the parts that count; all, once each, if None; the outcome, if the draw has
  no parts. Source: GDPO, arXiv:2601.05242.

  Raises:
    MissingParts: a part that is weighed is not in every trajectory's reward.
  """
  parts = dict(draw.parts) or {'outcome': draw.rewards_N}
  weights = dict.fromkeys(parts, 1.0) if weights is None else weights
  if lacking := sorted(set(weights) - set(parts)):
    raise MissingParts(
      f'gdpo weighs {lacking}, and the parts of these rewards are '
      f'{sorted(parts)}'
    )
  summed = np.zeros(len(draw))
  for name, weight in weights.items():
    summed += weight * standardized(
      parts[name],
      _labels(draw),
      scale=scale,
      ddof=ddof,
      eps=eps,
      raw_singletons=raw_singletons,
    )
  return whitened(draw, broadcast(draw, summed))
