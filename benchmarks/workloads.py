"""What every system is given: prompts and observations, as bare ids.

Benchmarks. Plain data, drawn once from a fixed seed; no model, no system.
"""

from __future__ import annotations

import dataclasses

import numpy as np

PROMPT = 128
NEW_TOKENS = 128
BATCHES = (1, 8, 32)
# Multi-turn: with turns of 32 tokens a conversation of 4 turns, padded to
# powers of two at each call, prefills 128 + 256 + 512 + 512 = 1,408 tokens.
TRAJECTORIES = 8
OBSERVATION = 64
TURN_TOKENS = 32


def token_ids(seed: int, shape: tuple[int, ...], vocabulary: int) -> np.ndarray:
  """int32 ids in [1, vocabulary): 0 is left to systems that pad with it."""
  rng = np.random.default_rng(seed)
  return rng.integers(1, vocabulary, shape, dtype=np.int32)


def prompts(batch: int, vocabulary: int) -> np.ndarray:
  """int32[batch, PROMPT]."""
  return token_ids(0, (batch, PROMPT), vocabulary)


@dataclasses.dataclass(frozen=True)
class Conversations:
  """Trajectories of equal shape, all of whose turns have the same length.

  Attributes:
    prompts: int32[n, P]. observations: int32[n, turns - 1, O].
    turn_tokens: sampled at each turn.
  """

  prompts: np.ndarray
  observations: np.ndarray
  turn_tokens: int

  @property
  def turns(self) -> int:
    return self.observations.shape[1] + 1

  @property
  def sampled(self) -> int:
    """MODEL tokens of all trajectories."""
    return len(self.prompts) * self.turns * self.turn_tokens

  @property
  def length(self) -> int:
    """All tokens of one trajectory."""
    given = self.prompts.shape[1] + self.observations[0].size
    return given + self.turns * self.turn_tokens

  @property
  def prefilled_once(self) -> int:
    """Tokens to prefill where nothing is prefilled twice."""
    return self.prompts.size + self.observations.size

  @property
  def prefilled_each_turn(self) -> int:
    """Tokens to prefill where each turn starts from nothing, unpadded."""
    return len(self.prompts) * sum(self.prefixes)

  @property
  def prefixes(self) -> list[int]:
    """Length of a trajectory at the start of each turn."""
    step = self.turn_tokens + self.observations.shape[2]
    return [self.prompts.shape[1] + i * step for i in range(self.turns)]

  @property
  def padded_length(self) -> int:
    """Cache of a system that pads prompts to powers of two."""
    return (1 << (self.prefixes[-1] - 1).bit_length()) + self.turn_tokens


def conversations(
  turns: int, vocabulary: int, n: int = TRAJECTORIES
) -> Conversations:
  """`n` trajectories of `turns` turns with random prompts, observations."""
  return Conversations(
    token_ids(1, (n, PROMPT), vocabulary),
    token_ids(2, (n, turns - 1, OBSERVATION), vocabulary),
    TURN_TOKENS,
  )
