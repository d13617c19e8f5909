"""Advantages by turn: what was good in a trajectory, not only how it ended.

Floor 1, rl/. Estimators of the seam that `draw` tells. A turn's reward stands
at its last token, and the last turn's includes the outcome (`step_rewards`);
turn ends come from the segments, never from where a reward is not 0 (a turn
without a reward is a turn). With one turn each of these equals its estimator
of whole trajectories.

Letters: N trajectories, K turns (of one trajectory), T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from agentjax.rl.advantages import Scale, group_std, standardized
from agentjax.rl.draw import Draw
from agentjax.rl.normalize import labels, whiten
from agentjax.rl.returns import generalized
from agentjax.rl.seam import (
  apart,
  by_turn,
  joined,
  stack,
  step_rewards,
  turn_counts,
  unstack,
  whitened,
)

# ---- group-relative ---------------------------------------------------------


def turn_returns(
  draw: Draw, *, gamma: float = 1.0, scale: Scale = group_std,
  ddof: int = 1, eps: float = 1e-6,
) -> list[np.ndarray]:  # fmt: skip
  """Rewards to go of each turn, relative to the group's turns of that number.

  G_k = sum_{j>=k} gamma^{j-k} r_j, A_k = (G_k - mean) / (std + eps) over the
  k-th turns of the group. A turn that no other trajectory got to has 0.
  """
  to_go = [_to_go(r, gamma) for r in step_rewards(draw)]
  label = _turn_labels(draw, per_number=True)
  return by_turn(draw, _normalized(to_go, label, scale, ddof, eps))


def process_supervision(
  draw: Draw, *, gamma: float = 1.0, scale: Scale = group_std,
  ddof: int = 1, eps: float = 1e-6,
) -> list[np.ndarray]:  # fmt: skip
  """Turn rewards normalised over all turns of the group, then summed to go.

  r~ = (r - mean) / (std + eps) over every turn of every trajectory of the
  group, A_k = sum_{j>=k} gamma^{j-k} r~_j. Source: GRPO with process
  supervision, arXiv:2402.03300, section 4.1.3.
  """
  label = _turn_labels(draw, per_number=False)
  normal = _normalized(step_rewards(draw), label, scale, ddof, eps)
  return by_turn(draw, [_to_go(r, gamma) for r in normal])


def igpo(
  draw: Draw, *, gamma: float = 1.0, scale: Scale = group_std,
  ddof: int = 1, eps: float = 1e-6,
) -> list[np.ndarray]:  # fmt: skip
  """Information gain: what a turn adds to the probability of the right answer.

  r_k = p_{k+1} - p_k, p_k the probability of the right answer in the state
  before turn k (`answer_probs`, under the policy of the draw, no gradient); the
  last turn's reward is the outcome. Then as `process_supervision`. An answer
  that leaks into an observation is paid for. Source: IGPO, arXiv:2510.14967.
  """
  (probs,) = draw.need('answer_probs')
  gains = []
  for p, outcome in zip(probs, draw.rewards_N, strict=True):
    r = np.diff(p, append=0.0)
    r[-1:] = outcome
    gains.append(r)
  label = _turn_labels(draw, per_number=False)
  normal = _normalized(gains, label, scale, ddof, eps)
  return by_turn(draw, [_to_go(r, gamma) for r in normal])


def mt_grpo(
  draw: Draw, *, coef: float = 1.0, scale: Scale = group_std,
  ddof: int = 1, eps: float = 1e-6,
) -> list[np.ndarray]:  # fmt: skip
  """A_O + coef * A_k at the tokens of turn k but the last, A_O at the last's.

  A_O normalises outcomes over the group, A_k the rewards of the k-th turns
  over those trajectories of the group that have one. A trajectory of one turn
  has no turn apart from its outcome: the sum of both rewards, normalised over
  the group (the sum with the first turn's reward elsewhere). Source: MT-GRPO,
  arXiv:2505.11821, for two turns; the published code finds the split by a
  search for text, this takes turn ids.
  """
  options = {'scale': scale, 'ddof': ddof, 'eps': eps}
  group = labels(draw.groups_N, draw.valid_N)
  first = np.array([r[0] if len(r) else 0.0 for r in draw.turn_rewards])
  outcome_N = standardized(draw.rewards_N, group, **options)
  sum_N = standardized(draw.rewards_N + first, group, **options)
  label = _turn_labels(draw, per_number=True)
  own = _normalized(draw.turn_rewards, label, scale, ddof, eps)
  leading = turn_counts(draw) - 1
  return assign_turns(draw, own, outcome_N, sum_N, leading, coef=coef)


def assign_turns(
  draw: Draw,
  turn_advantages: Sequence[np.ndarray],
  outcome_N,
  combined_N,
  leading_N,
  *,
  coef: float = 1.0,
) -> list[np.ndarray]:
  """What `mt_grpo` does with advantages that are there already.

  Args:
    turn_advantages: float[K] a trajectory. leading_N: how many leading turns
      get theirs beside the outcome's; with none it is `combined_N` alone.
  """
  out = []
  for own, outcome, combined, n in zip(
    turn_advantages, outcome_N, combined_N, leading_N, strict=True
  ):
    bonus = np.where(np.arange(len(own)) < n, coef * own, 0.0)
    out.append(outcome + bonus if n > 0 else np.full(len(own), combined))
  return by_turn(draw, out)


# ---- with a critic ----------------------------------------------------------


def turn_gae(
  draw: Draw, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> list[np.ndarray]:
  """GAE over turns; every token of a turn has the turn's advantage.

  delta_k = r_k + gamma V(e_{k+1}) - V(e_k), A_k = delta_k + gamma lam A_{k+1},
  e_k the last token of turn k, whitened over turn ends: a turn counts once.
  Needs `values`. Source: VAGEN, arXiv:2510.16907 (turn-wise GAE of its code).
  """
  advantages = turn_advantages(draw, gamma=gamma, lam=lam)
  return by_turn(
    draw, _whitened_turns(draw, advantages) if whiten else advantages
  )


def turn_advantages(
  draw: Draw, *, gamma: float, lam: float
) -> list[np.ndarray]:
  """float64[K] a trajectory: A_k of `turn_gae`, not whitened."""
  rewards, values = step_rewards(draw), _end_values(draw)
  out = generalized(
    stack(rewards),
    stack(values),
    stack([np.ones(len(r), bool) for r in rewards], fill=False),
    draw.bootstrap_N,
    gamma=gamma,
    lam=lam,
  )
  return [a[: len(r)] for a, r in zip(out, rewards, strict=True)]


def turn_value_targets(
  draw: Draw, *, gamma: float = 1.0, lam: float = 1.0
) -> list[np.ndarray]:
  """A_k + V(e_k) at the last token of each turn, 0 elsewhere."""
  out = []
  for mask, ends, a, v in zip(
    draw.masks_valid(),
    draw.turn_ends(),
    turn_advantages(draw, gamma=gamma, lam=lam),
    _end_values(draw),
    strict=True,
  ):
    target = np.zeros(len(mask))
    target[ends] = a + v
    out.append(np.where(mask, target, 0.0))
  return out


def bi_level_gae(
  draw: Draw,
  *,
  gamma: float = 1.0,
  lam: float = 1.0,
  turn_gamma: float = 1.0,
  turn_lam: float | None = None,
  whiten: bool = True,
) -> list[np.ndarray]:
  """GAE over turns, and inside of each turn GAE over tokens.

  First `turn_gae`'s A_k; then the reward at e_k is the turn's return A_k +
  V(e_k), and token-level GAE runs inside the turn with V_next = 0 at its end.
  Whitened over tokens. The states of the first level are those before the last
  token of a turn, as in the published code. `turn_lam` is `lam` if None.
  Needs `values`. Source: VAGEN, arXiv:2510.16907, and RAGEN, arXiv:2504.20073
  (which takes a reward that is not 0 for a turn's end).
  """
  tokens = _bi_level(draw, gamma, lam, turn_gamma, turn_lam)
  return whitened(draw, tokens) if whiten else tokens


def bi_level_value_targets(
  draw: Draw,
  *,
  gamma: float = 1.0,
  lam: float = 1.0,
  turn_gamma: float = 1.0,
  turn_lam: float | None = None,
) -> list[np.ndarray]:
  """A + V of `bi_level_gae`, not whitened."""
  (values,) = draw.need('values')
  tokens = _bi_level(draw, gamma, lam, turn_gamma, turn_lam)
  return [
    np.where(m, a + v, 0.0)
    for m, a, v in zip(draw.masks_valid(), tokens, values, strict=True)
  ]


def _bi_level(draw, gamma, lam, turn_gamma, turn_lam) -> list[np.ndarray]:
  """Not whitened; 0 where not valid."""
  turn_lam = lam if turn_lam is None else turn_lam
  upper = turn_advantages(draw, gamma=turn_gamma, lam=turn_lam)
  (values,) = draw.need('values')
  rewards, at_end = [], []
  for i, ends in enumerate(draw.turn_ends()):
    r, last = draw.token_rewards[i].copy(), np.zeros(len(values[i]), bool)
    r[ends] += upper[i] + values[i][ends]
    last[ends] = True
    rewards.append(r)
    at_end.append(last)
  masks = draw.masks_valid()
  out = generalized(
    stack(rewards),
    stack(values),
    stack(masks, fill=False),
    np.zeros(len(draw)),
    gamma=gamma,
    lam=lam,
    ends_NT=stack(at_end, fill=False),
  )
  return unstack(out, masks)


# ---- rewards of steps -------------------------------------------------------


def steptool_rewards(success_K, contribution_K, *, coef: float = 1.0):
  """Turn rewards of StepTool; the outcome is added to the last turn's anyway.

  coef * (the call succeeded + it contributed to the answer) for each turn but
  the last, whose reward is whether the task is solved: the draw's outcome.
  Source: StepTool, arXiv:2410.07745.
  """
  rewards = coef * np.add(success_K, contribution_K, dtype=np.float64)
  rewards[-1:] = 0.0
  return rewards


Aggregate = Callable[[np.ndarray], np.ndarray]


def prm_sum(scores_K) -> np.ndarray:
  """Each step's score as its reward.

  Scores that are never below 0 pay for more steps; centre them first.
  """
  return np.array(scores_K, np.float64)


def prm_min(scores_K) -> np.ndarray:
  """The lowest score, once, at the step that has it: no step can be bought.

  Source: PURE, arXiv:2504.15275 (credit by the minimum), without its softmin.
  """
  scores = np.asarray(scores_K, np.float64)
  out = np.zeros(len(scores))
  if len(scores):
    out[np.argmin(scores)] = scores.min()
  return out


def prm_delta(scores_K, *, start: float = 0.0) -> np.ndarray:
  """q_k - q_{k-1}, with `start` before the first.

  A potential: it telescopes, so that with gamma = 1 the best policy stays the
  best. Source: Ng et al., 1999.
  """
  return np.diff(np.asarray(scores_K, np.float64), prepend=start)


# ---- inside -----------------------------------------------------------------


def _to_go(rewards_K: np.ndarray, gamma: float) -> np.ndarray:
  out, carried = np.zeros(len(rewards_K)), 0.0
  for k in reversed(range(len(rewards_K))):
    out[k] = carried = rewards_K[k] + gamma * carried
  return out


def _turn_labels(draw: Draw, *, per_number: bool) -> np.ndarray:
  """Of all turns one after the other: who is compared with whom."""
  group = labels(draw.groups_N, draw.valid_N)
  counts = turn_counts(draw)
  label = np.repeat(group, counts)
  if not per_number:
    return label
  number = joined([np.arange(k) for k in counts]).astype(int)
  most = number.max(initial=0) + 1
  return np.where(label >= 0, label * most + number, -1)


def _normalized(numbers, label, scale, ddof, eps) -> list[np.ndarray]:
  """`standardized` of the turns of all trajectories together."""
  flat = standardized(joined(numbers), label, scale=scale, ddof=ddof, eps=eps)
  return apart(flat, [len(x) for x in numbers])


def _end_values(draw: Draw) -> list[np.ndarray]:
  (values,) = draw.need('values')
  return [v[e] for v, e in zip(values, draw.turn_ends(), strict=True)]


def _whitened_turns(draw: Draw, numbers) -> list[np.ndarray]:
  counts = turn_counts(draw)
  flat = whiten(joined(numbers), np.repeat(draw.valid_N, counts))
  return apart(flat, counts)
