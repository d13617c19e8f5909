"""Recursions over tokens: rewards to go, and generalised advantages.

Floor 1, rl/. Host-side numpy in float64: a loop over tokens, every step of it
over all trajectories at once. A token that the policy did not sample is no
step: what is carried crosses it unchanged, and gamma and lambda apply once a
sampled token, so that no observation moves an advantage.

Letters: N trajectories, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from agentjax.rl.draw import Draw
from agentjax.rl.seam import reward_stream, stack, unstack, whitened

# (carried_N, gamma) -> what is carried before a token that was not sampled.
Cross = Callable[[np.ndarray, float], np.ndarray]


def carry(carried_N: np.ndarray, gamma: float) -> np.ndarray:
  """Unchanged: the default."""
  del gamma
  return carried_N


def decay(carried_N: np.ndarray, gamma: float) -> np.ndarray:
  """A step like any other, as in OpenRLHF and slime: observations cost."""
  return gamma * carried_N


def reset(carried_N: np.ndarray, gamma: float) -> np.ndarray:
  """Forgotten: rewards reach the last turn alone. verl before August 2026."""
  del gamma
  return np.zeros_like(carried_N)


# ---- on padded arrays -------------------------------------------------------


def discounted(
  rewards_NT, mask_NT, *, gamma: float = 1.0, cross: Cross = carry
) -> np.ndarray:
  """G_t = r_t + gamma G_next over sampled tokens; 0 where not sampled."""
  mask, rewards = _by_token(mask_NT, rewards_NT)
  out = np.zeros(rewards.shape)
  carried = np.zeros(rewards.shape[1])
  for t in reversed(range(len(mask))):
    step = rewards[t] + gamma * carried
    carried = np.where(mask[t], step, cross(carried, gamma))
    out[t] = step
  return np.where(mask, out, 0.0).T


def generalized(
  rewards_NT,
  values_NT,
  mask_NT,
  bootstrap_N,
  *,
  gamma: float,
  lam: float,
  ends_NT=None,
) -> np.ndarray:
  """Generalised advantages over sampled tokens; 0 where not sampled.

  A_t = delta_t + gamma lam A_next, delta_t = r_t + gamma V_next - V_t, where
  `next` is the next sampled token. Behind the last one A is 0 and V is
  `bootstrap_N`: 0 where a trajectory ended, the value of its last state where
  it was cut. At `ends_NT` nothing of what follows is seen: A and V are 0.
  Source: GAE, arXiv:1506.02438, eq. 16.
  """
  mask, rewards, values = _by_token(mask_NT, rewards_NT, values_NT)
  ends = (
    np.zeros(mask.shape, bool) if ends_NT is None else np.asarray(ends_NT).T
  )
  out = np.zeros(rewards.shape)
  advantage = np.zeros(rewards.shape[1])
  following = np.array(bootstrap_N, np.float64)
  for t in reversed(range(len(mask))):
    seen = ~ends[t]
    delta = rewards[t] + gamma * (following * seen) - values[t]
    step = delta + gamma * lam * (advantage * seen)
    advantage = np.where(mask[t], step, advantage)
    following = np.where(mask[t], values[t], following)
    out[t] = advantage
  return np.where(mask, out, 0.0).T


def _by_token(mask_NT, *arrays_NT) -> tuple[np.ndarray, ...]:
  """[T, N] each, so that a step is contiguous; 0 under the mask."""
  mask = np.ascontiguousarray(np.asarray(mask_NT, bool).T)
  return mask, *(np.where(mask, np.asarray(x).T, 0.0) for x in arrays_NT)


# ---- on a draw --------------------------------------------------------------


def returns(
  draw: Draw, *, gamma: float = 1.0, cross: Cross = carry
) -> list[np.ndarray]:
  """Rewards to go of each sampled token, not whitened; 0 where not valid."""
  masks = draw.masks_valid()
  out = discounted(
    stack(reward_stream(draw)),
    stack(masks, fill=False),
    gamma=gamma,
    cross=cross,
  )
  return unstack(out, masks)


def gae(
  draw: Draw, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> list[np.ndarray]:
  """Token-level GAE that skips what was not sampled, whitened over tokens.

  Needs `values`. For long trajectories the critic learns with lam = 1 and the
  policy with less (VAPO, arXiv:2504.05118, "decoupled GAE"): give
  `value_targets` a lambda of its own.
  """
  advantages = _advantages(draw, gamma, lam, draw.masks_valid())
  return whitened(draw, advantages) if whiten else advantages


def value_targets(
  draw: Draw, *, gamma: float = 1.0, lam: float = 1.0, per_slot: bool = False
) -> list[np.ndarray]:
  """What a critic is to predict: A + V, A of its own lambda, not whitened.

  `per_slot` belongs to `gae_per_slot`.
  """
  masks = draw.masks_valid()
  (values,) = draw.need('values')
  advantages = _advantages(
    draw, gamma, lam, _slots(draw) if per_slot else masks
  )
  return [
    np.where(m, a + v, 0.0)
    for m, a, v in zip(masks, advantages, values, strict=True)
  ]


def gae_per_slot(
  draw: Draw, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> list[np.ndarray]:
  """GAE as OpenRLHF has it: each token is a step, with V = 0 where not sampled.

  For comparison alone: the last token of a turn does not see the next turn's
  value, and each observed token costs a gamma * lam.
  """
  advantages = [
    np.where(m, a, 0.0)
    for m, a in zip(
      draw.masks_valid(), _advantages(draw, gamma, lam, _slots(draw)),
      strict=True,
    )
  ]  # fmt: skip
  return whitened(draw, advantages) if whiten else advantages


def _slots(draw: Draw) -> list[np.ndarray]:
  """Every token is a step."""
  return [np.ones_like(m) for m in draw.masks]


def _advantages(draw: Draw, gamma, lam, steps) -> list[np.ndarray]:
  """Of the tokens that are steps; the draw's arrays are 0 under its mask."""
  (values,) = draw.need('values')
  out = generalized(
    stack(reward_stream(draw)),
    stack(values),
    stack(steps, fill=False),
    draw.bootstrap_N,
    gamma=gamma,
    lam=lam,
  )
  return unstack(out, steps)
