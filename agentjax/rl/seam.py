"""What estimators share: rewards by turn and token, numbers spread over tokens.

Floor 1, rl/. Host-side numpy; a combinator here turns what an estimator finds
(one number a trajectory, one a turn) into the float64[T] that the seam asks
for (`draw` tells the seam). Knows no formula of any paper.

Letters: N trajectories, T tokens (of one trajectory), K turns (of one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from agentjax.rl.draw import Draw
from agentjax.rl.normalize import whiten

# What a trajectory is worth: `outcome`, `total`, or another.
Scores = Callable[[Draw], np.ndarray]


def step_rewards(draw: Draw) -> list[np.ndarray]:
  """float64[K] a trajectory: of each turn; the last has the outcome's too."""
  out = []
  for rewards, outcome in zip(draw.turn_rewards, draw.rewards_N, strict=True):
    rewards = rewards.copy()
    rewards[-1:] += outcome
    out.append(rewards)
  return out


def reward_stream(draw: Draw) -> list[np.ndarray]:
  """float64[T] a trajectory: all rewards, each on a sampled token.

  A turn's at the last token of the turn, the outcome at the last of all.
  """
  out = []
  for dense, ends, steps in zip(
    draw.token_rewards, draw.turn_ends(), step_rewards(draw), strict=True
  ):
    stream = dense.copy()
    stream[ends] += steps
    out.append(stream)
  return out


# ---- what a trajectory is worth ---------------------------------------------


def outcome(draw: Draw) -> np.ndarray:
  """float64[N]: the outcome's reward alone."""
  return draw.rewards_N


def total(draw: Draw) -> np.ndarray:
  """float64[N]: outcome, turns and tokens, undiscounted.

  With a KL penalty among the token rewards it is in the baseline too.
  """
  return draw.rewards_N + np.array(
    [
      np.sum(turns) + np.sum(tokens)
      for turns, tokens in zip(
        draw.turn_rewards, draw.token_rewards, strict=True
      )
    ]
  )


# ---- from numbers to tokens -------------------------------------------------


def broadcast(draw: Draw, numbers_N: np.ndarray) -> list[np.ndarray]:
  """Each trajectory's number at all of its sampled tokens."""
  return [
    np.where(m, a, 0.0)
    for m, a in zip(draw.masks_valid(), numbers_N, strict=True)
  ]


def turn_counts(draw: Draw) -> np.ndarray:
  """int[N]: turns of each trajectory."""
  return np.array([len(r) for r in draw.turn_rewards], int)


def by_turn(draw: Draw, numbers: Sequence[np.ndarray]) -> list[np.ndarray]:
  """Each turn's number at the sampled tokens of the turn; float[K] a row."""
  out = []
  for mask, turn, a in zip(
    draw.masks_valid(), draw.turns, numbers, strict=True
  ):
    tokens = np.zeros(len(mask))
    tokens[mask] = np.asarray(a, np.float64)[turn[mask]]
    out.append(tokens)
  return out


def whitened(
  draw: Draw, tokens: Sequence[np.ndarray], **options
) -> list[np.ndarray]:
  """Whitened over the sampled tokens of all valid trajectories.

  Each token counts once, so that a long trajectory weighs more: afterwards
  the mean of a group need not be 0.
  """
  masks = draw.masks_valid()
  flat = whiten(joined(tokens), joined(masks), **options)
  return apart(flat, [len(m) for m in masks])


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
  """One array after the other."""
  return np.concatenate(arrays) if len(arrays) else np.zeros(0)


def apart(flat: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
  """The arrays that `joined` was made of, by their lengths."""
  return np.split(flat, np.cumsum(counts, dtype=int))[:-1]


def stack(arrays: Sequence[np.ndarray], fill=0.0) -> np.ndarray:
  """[N, T], each array from the left, filled up."""
  length = max((len(a) for a in arrays), default=0)
  dtype = np.result_type(*arrays) if len(arrays) else np.float64
  out = np.full((len(arrays), length), fill, dtype)
  for row, a in zip(out, arrays, strict=True):
    row[: len(a)] = a
  return out


def unstack(x_NT: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
  """The rows of `stack`, each as long as it was."""
  return [row[: len(a)].copy() for row, a in zip(x_NT, like, strict=True)]
