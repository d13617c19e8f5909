"""What the host knows of each slot, and the plan that it makes of it.

Floor 2, rollout/, under `engine`. Plain bookkeeping: lengths, the versions of
the weights, the turn under way. No array of the device is touched here.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentjax.rollout import decode
from agentjax.rollout.decode import Plan
from agentjax.rollout.sampling import Sampling
from agentjax.types import Segment, Source, Stop

EMPTY = np.zeros(0, np.int32)

# (first position, version of the weights) of each stretch of a KV state.
Versions = tuple[tuple[int, int], ...]


class StaleKV(enum.Enum):
  """What to do with a KV state that older weights made."""

  REFUSE = 'refuse'
  KEEP = 'keep'  # go on with it; `Segment.kv_versions` says so
  RECOMPUTE = 'recompute'


@dataclasses.dataclass(frozen=True)
class Handle:
  """What a KV state is of; equal handles, the same state.

  Attributes:
    versions: (first position, version of the weights) of each stretch, where
      the version changes. More than one only by StaleKV.KEEP.
    digest: of the token ids. length: their number.
    position: of the next token.
  """

  versions: Versions
  digest: str
  length: int
  position: int

  @staticmethod
  def digest_of(tokens: np.ndarray) -> str:
    return _hash(tokens).hexdigest()


@dataclasses.dataclass
class Stats:
  """Counts since the engine was made. Seconds are of the device thread."""

  tokens_sampled: int = 0
  # Of these, on top of a KV state that other weights had a part in.
  tokens_on_old_kv: int = 0
  tokens_prefilled: int = 0
  # Run once more, and not in tokens_prefilled: by StaleKV.RECOMPUTE, and the
  # one token before a fork in the past.
  tokens_recomputed: int = 0
  decode_seconds: float = 0.0
  prefill_seconds: float = 0.0
  live_steps: int = 0  # slot-steps that sampled a token
  slot_steps: int = 0  # slot-steps that ran
  parked: int = 0  # rows that were moved to host memory
  parked_bytes: int = 0

  @property
  def occupancy(self) -> float:
    """Share of the slot-steps run in which a slot sampled a token."""
    return self.live_steps / max(1, self.slot_steps)


@dataclasses.dataclass
class Turn:
  """A turn under way."""

  key: np.ndarray
  sampling: Sampling
  budget: int
  limit: Stop  # which limit the budget stands for
  stop_state: int
  parts: list[tuple] = dataclasses.field(default_factory=list)
  # Ids that truncation kept: none where it kept all, or nobody asked.
  kept: list[np.ndarray] = dataclasses.field(default_factory=list)

  def copy(self) -> Turn:
    """One that goes on by itself."""
    return dataclasses.replace(
      self, parts=list(self.parts), kept=list(self.kept)
    )

  def segment(self, stop: Stop, kv_versions: Versions) -> Segment:
    """What was sampled, perhaps nothing, and the KV state that it left."""
    floats = [np.zeros(0, np.float32)] * 3
    parts = zip((EMPTY, *floats, EMPTY), *self.parts, strict=True)
    return Segment(
      Source.MODEL,
      *map(np.concatenate, parts),
      stop=stop,
      kv_versions=kv_versions,
      kept=np.concatenate(self.kept) if self.kept else None,
    )


@dataclasses.dataclass
class Slot:
  free: bool = True
  leftover: bool = True  # the row is of whoever held the slot before
  generation: int = 0
  length: int = 0
  versions: Versions = ()  # see Handle
  turn: Turn | None = None
  _tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
  _digest: Any = dataclasses.field(default_factory=lambda: _hash(EMPTY))

  @property
  def version(self) -> int:
    """Of the oldest weights that had a part in the KV state; -1 if empty."""
    return min((version for _, version in self.versions), default=-1)

  def stale(self, version: int) -> bool:
    """Whether other weights than these had a part in the KV state."""
    return any(v != version for _, v in self.versions)

  @property
  def tokens(self) -> np.ndarray:
    """int32[length] ids."""
    self._tokens = [np.concatenate([EMPTY, *self._tokens])]
    return self._tokens[0]

  @property
  def handle(self) -> Handle:
    digest = self._digest.hexdigest()
    return Handle(self.versions, digest, self.length, self.length)

  def grow(self, tokens: np.ndarray, version: int) -> None:
    """Appends tokens whose KV state is of `version`."""
    if not len(tokens):
      return
    if not self.versions or self.versions[-1][1] != version:
      self.versions += ((self.length, version),)
    self._tokens.append(tokens)
    self._digest.update(_bytes(tokens))
    self.length += len(tokens)

  def finish(self, code: int | None) -> Segment:
    """Ends the turn, as `decode` says why; None: somebody cancelled it."""
    turn, self.turn = self.turn, None
    stop = {
      decode.STRING: Stop.STOP_STRING,
      decode.ID: Stop.END_OF_TURN,
      None: Stop.CANCELLED,
    }.get(code, turn.limit)
    return turn.segment(stop, self.versions)

  def check(self, name: int, tokens: np.ndarray) -> None:
    """Raises ValueError if the KV state is not of these tokens."""
    if self.length != len(tokens) or self.handle.digest != Handle.digest_of(
      tokens
    ):
      raise ValueError(
        f'slot {name} holds {self.length} tokens ({self.handle.digest}), not '
        f'the {len(tokens)} given ({Handle.digest_of(tokens)}): reset the slot '
        'and extend it with the tokens'
      )

  @staticmethod
  def of(generation: int, tokens: np.ndarray, versions: Versions) -> Slot:
    """A held slot with this content."""
    slot = Slot(free=False, leftover=False, generation=generation)
    slot._tokens, slot.length = [tokens], len(tokens)
    slot._digest, slot.versions = _hash(tokens), tuple(versions)
    return slot


def _bytes(tokens: np.ndarray) -> bytes:
  return np.ascontiguousarray(tokens, '<i4').tobytes()


def _hash(tokens: np.ndarray) -> Any:
  return hashlib.blake2b(_bytes(tokens), digest_size=16)


def before(versions: Versions, length: int) -> Versions:
  """The stretches of `versions` that begin before a length."""
  return tuple(v for v in versions if v[0] < length)


def make_plan(slots: Sequence[Slot], steps: int, ended: int) -> Plan:
  """The decisions of a chunk of at most `steps` tokens a slot.

  It comes back once `ended` turns have ended.
  """
  S = len(slots)
  live = sum(slot.turn is not None for slot in slots)
  plan = Plan(
    steps=np.int32(steps),
    stay=np.int32(max(1, live - ended + 1)),
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
