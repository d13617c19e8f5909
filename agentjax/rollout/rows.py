"""The rows of the slots: who holds them, and what was run into them.

Floor 2, rollout/, under `engine`. A row is the KV state of one trajectory.
Here slots are taken and given back, tokens are run on top of what a row holds,
and a row of older weights is treated as `StaleKV` says. Forks, host memory and
turns stand on this, and it knows none of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import numpy as np

from agentjax.model.config import ModelConfig
from agentjax.rollout.programs import Programs
from agentjax.rollout.slots import Slot, StaleKV, Stats
from agentjax.rollout.state import State
from agentjax.rollout.weights import Weights


class Rows:
  """The rows of `slots` slots; see `Engine` for the arguments.

  Attributes:
    slots: what the host knows of each. state: their arrays on the device.
    weights: that run tokens. stats: counts of all that is done.
  """

  def __init__(
    self,
    config: ModelConfig,
    programs: Programs,
    *,
    slots: int,
    context: int,
    buckets: Sequence[int],
    stale_kv: StaleKV,
  ):
    self.context, self.stale_kv = context, stale_kv
    self.slots = [Slot() for _ in range(slots)]
    self.weights = Weights(config, programs.layout, programs.factors)
    self.state = State(programs, buckets, self.weights)
    self.stats = Stats()
    self._vocab_size = config.vocab_size
    self._prefilling = False
    self._spoiled: set[int] = set()  # rows with something that is no number

  @property
  def version(self) -> int:
    """Of the weights that run tokens now."""
    return self.weights.version

  # ---- who holds a row ----------------------------------------------------

  def at(self, slot: int) -> Slot:
    if not 0 <= slot < len(self.slots):
      raise ValueError(f'slot {slot}: there are 0 to {len(self.slots) - 1}')
    return self.slots[slot]

  def held(self, slot: int) -> Slot:
    """A slot that somebody holds, and has put something into."""
    s = self.at(slot)
    if s.free or s.leftover:
      raise ValueError(
        f'slot {slot} is not in use: acquire, then reset or fork'
      )
    return s

  def idle(self, slot: int) -> Slot:
    """A slot that somebody holds, without a turn under way."""
    s = self.at(slot)
    if s.turn is not None:
      raise ValueError(
        f'slot {slot} has a turn under way: let it end, cancel it, or choose '
        'another'
      )
    if s.free:
      raise ValueError(f'slot {slot} is free: acquire it first')
    return s

  def acquire(self) -> int | None:
    for i, slot in enumerate(self.slots):
      if slot.free:
        slot.free, slot.leftover = False, True
        return i
    return None

  def release(self, slot: int) -> None:
    self.at(slot).free = True
    self.at(slot).turn = None

  def reset(self, slot: int) -> None:
    old = self.idle(slot)
    self.clean(slot)
    self.slots[slot] = Slot(False, False, old.generation + 1)

  def spoil(self, slot: int) -> None:
    """Notes that the row holds something that is no number."""
    self._spoiled.add(slot)

  def clean(self, slot: int) -> None:
    """No NaN in a row outlives its trajectory.

    A mask would not hide it from who sits there next: 0 * NaN is NaN.
    """
    if slot in self._spoiled:
      self.state.clear(slot)
      self._spoiled.remove(slot)

  # ---- what is run into it ------------------------------------------------

  def extend(self, slot: int, tokens: np.ndarray) -> None:
    self.weights.needed()
    s = self.held(slot)
    self.idle(slot)
    tokens = self._ids(tokens)
    if s.length + len(tokens) > self.context:
      raise ValueError(
        f'{len(tokens)} tokens on top of {s.length} exceed the context of '
        f'{self.context}: cut the observation or raise engine context'
      )
    self.refresh(slot)
    self.run(slot, tokens, s.length)
    s.grow(tokens, self.version)
    self.stats.tokens_prefilled += len(tokens)

  def refresh(self, slot: int) -> None:
    """Applies `stale_kv` where the row is of other weights."""
    s = self.slots[slot]
    if s.stale(self.version):
      if self.stale_kv is StaleKV.REFUSE:
        raise ValueError(
          f'slot {slot} holds {s.length} tokens of version {s.version}, the '
          f'weights are of version {self.version}: set stale_kv to keep or '
          'recompute'
        )
      if self.stale_kv is StaleKV.KEEP:
        return
      self.run(slot, s.tokens, 0)
      self.stats.tokens_recomputed += s.length
      s.versions = ((0, self.version),)

  def run(self, slot: int, tokens: np.ndarray, start: int) -> None:
    """Runs tokens on top of a row's first `start`; writes nothing down."""
    began = time.monotonic()
    self.state.run(slot, tokens, start)
    self._prefilling = True
    self.stats.prefill_seconds += time.monotonic() - began

  def settle(self) -> None:
    """What was handed to the device is prefill's time, not the next chunk's."""
    if self._prefilling:
      began = time.monotonic()
      jax.block_until_ready(self.state.hidden)
      self._prefilling = False
      self.stats.prefill_seconds += time.monotonic() - began

  def _ids(self, tokens: np.ndarray) -> np.ndarray:
    """A copy of its own: what the caller does with theirs changes nothing."""
    given = np.asarray(tokens)
    if given.ndim != 1 or (given.size and given.dtype.kind not in 'iu'):
      raise ValueError(
        f'tokens of shape {given.shape} and type {given.dtype}: give a row of '
        'integer ids'
      )
    wrong = (given < 0) | (given >= self._vocab_size)
    if wrong.any():
      raise ValueError(
        f'token id {given[wrong][0]} is not of the vocabulary: give 0 to '
        f'{self._vocab_size - 1}'
      )
    return given.astype(np.int32)  # copies
