"""What the host knows of each slot, and the plan that it makes of it.

Floor 2, rollout/, under `engine`. Plain bookkeeping: lengths, the versions of
the weights, the turn under way. No array of the device is touched here.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import jax
import numpy as np

from agentjax.rollout.decode import Plan
from agentjax.rollout.sampling import Sampling
from agentjax.types import Stop


class StaleKV(enum.Enum):
  """What to do with a KV state that older weights made."""

  REFUSE = 'refuse'
  KEEP = 'keep'  # go on with it; versions are recorded per token
  RECOMPUTE = 'recompute'


@dataclasses.dataclass(frozen=True)
class Mark:
  """A point in a slot's row that other slots can fork from.

  Valid until the slot is given to another content; `fork` checks it.
  """

  slot: int
  generation: int
  tokens: np.ndarray
  hidden_D: jax.Array
  version: int


@dataclasses.dataclass
class Stats:
  """Counts since the engine was made. Seconds are of the device thread."""

  tokens_sampled: int = 0
  tokens_prefilled: int = 0
  tokens_recomputed: int = 0  # by StaleKV.RECOMPUTE, not in tokens_prefilled
  decode_seconds: float = 0.0
  prefill_seconds: float = 0.0
  live_steps: int = 0  # slot-steps that sampled a token
  slot_steps: int = 0  # slot-steps that ran


@dataclasses.dataclass
class Turn:
  """A turn under way."""

  key: np.ndarray
  sampling: Sampling
  budget: int
  limit: Stop  # which limit the budget stands for
  stop_state: int
  parts: list[tuple] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Slot:
  free: bool = True
  leftover: bool = True  # the row is of whoever held the slot before
  generation: int = 0
  length: int = 0
  version: int = -1  # of the weights that made the KV state
  tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
  turn: Turn | None = None


def make_plan(slots: Sequence[Slot], steps: int) -> Plan:
  """The decisions of a chunk of at most `steps` tokens a slot."""
  S = len(slots)
  plan = Plan(
    steps=np.int32(steps),
    live_S=np.zeros(S, bool),
    length_S=np.zeros(S, np.int32),
    budget_S=np.ones(S, np.int32),
    stop_state_S=np.zeros(S, np.int32),
    key_S2=np.zeros((S, 2), np.uint32),
    temperature_S=np.ones(S, np.float32),
    top_k_S=np.zeros(S, np.int32),
    top_p_S=np.ones(S, np.float32),
    min_p_S=np.zeros(S, np.float32),
  )
  for i, slot in enumerate(slots):
    plan.length_S[i] = slot.length
    if (turn := slot.turn) is not None:
      plan.live_S[i] = True
      plan.budget_S[i] = turn.budget
      plan.stop_state_S[i] = turn.stop_state
      plan.key_S2[i] = turn.key
      plan.temperature_S[i] = turn.sampling.temperature
      plan.top_k_S[i] = turn.sampling.top_k
      plan.top_p_S[i] = turn.sampling.top_p
      plan.min_p_S[i] = turn.sampling.min_p
  return plan
