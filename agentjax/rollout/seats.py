"""Who sits in which slot: more episodes than slots, and prompts in common.

Floor 2, rollout/, under `collect`. An episode has a seat. While it samples,
its KV state is in a slot; while it waits for a tool, it stays there until
somebody else needs the slot, and moves to host memory then. A group's prompt
is run once and forked. This file knows no environment and no thread.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import numpy as np

from agentjax.rollout.engine import Engine
from agentjax.rollout.episode import Decode
from agentjax.rollout.forks import Mark
from agentjax.rollout.parking import Parked
from agentjax.rollout.sampling import Sampling
from agentjax.types import Segment


@dataclasses.dataclass(eq=False)
class SharedPrompt:
  """The KV state of a group's prompt, or of a past, while it may be needed.

  Attributes:
    members: episodes that begin with it; begun: those that have.
    mark: in a slot whose row begins with it. copy: in host memory, once that
      row was given away.
  """

  members: int = 1
  begun: int = 0
  mark: Mark | None = None
  copy: Parked | None = None


@dataclasses.dataclass(eq=False)
class Seat:
  """Where an episode's KV state is.

  Attributes:
    owner: whose seat it is. prompt: what it begins with, in common with others
      of its group; shared: how many tokens that is, 0 for the first segment.
    key: of its sampling.
    slot: that holds its state. parked: its state, while it has no slot.
    filled: tokens of the trajectory that the state is of.
    request: the turn that it wants, or samples.
  """

  owner: Any
  prompt: SharedPrompt
  shared: int = 0
  key: np.ndarray | None = None
  slot: int | None = None
  parked: Parked | None = None
  filled: int = 0
  request: Decode | None = None


class Seats:
  """The seats of one `collect`, over an engine's slots.

  Attributes:
    ready: seats whose turn has not begun. decoding: slot -> seat.
    tokens_reprefill: what would have been run if every turn began with
      nothing. parked_bytes: in host memory, at the peak.
  """

  def __init__(self, engine: Engine, sampling: Sampling):
    if engine.n_decoding:
      raise ValueError(
        f'{engine.n_decoding} turns of somebody else are under way in the '
        'engine: let them end, or cancel them'
      )
    self._engine, self._sampling = engine, sampling
    self.ready: deque[Seat] = deque()
    self.decoding: dict[int, Seat] = {}
    self.tokens_reprefill = 0
    self.parked_bytes = 0
    self._paused: dict[Seat, None] = {}  # in a slot, at a tool, oldest first
    self._prompts: dict[SharedPrompt, None] = {}  # that somebody may need
    self._parked: dict[Seat | SharedPrompt, int] = {}  # bytes
    # Ended turns go to their tools, and their slots to others, in small lots:
    # a call of the device has a price too.
    self._lot = max(1, engine.n_slots // 8)

  def want(self, seat: Seat, request: Decode) -> None:
    """Asks for a turn; `place` begins it."""
    seat.request = request
    self.ready.append(seat)

  def place(self) -> None:
    """Begins the turns that are wanted, as far as there are slots.

    Who is in a slot still goes on in it; the others take free slots in the
    order in which they became ready, and then those of paused episodes, the
    longest paused first.
    """
    for seat in [s for s in self.ready if s.slot is not None]:
      self.ready.remove(seat)
      self._start(seat)
    while self.ready and (slot := self._slot()) is not None:
      seat = self.ready.popleft()
      self._enter(seat, slot)
      self._start(seat)

  def step(self) -> list[tuple[Any, Segment]]:
    """A decode chunk: (owner, segment) of each turn that ended."""
    if not self.decoding:
      return []
    out = []
    for slot, segment in self._engine.step(ended=self._lot):
      seat = self.decoding.pop(slot)
      seat.filled += len(segment)
      self._paused[seat] = None
      out.append((seat.owner, segment))
    return out

  def leave(self, seat: Seat) -> None:
    """Gives up a state. Its row stays until the slot is used."""
    self._paused.pop(seat, None)
    self._parked.pop(seat, None)
    if seat.slot is not None:
      self.decoding.pop(seat.slot, None)
      self._engine.release(seat.slot)
    if seat in self.ready:
      self.ready.remove(seat)
    seat.slot, seat.parked, seat.filled = None, None, 0

  def forget(self, prompt: SharedPrompt) -> None:
    """Nobody needs this prompt any more."""
    self._prompts.pop(prompt, None)
    self._parked.pop(prompt, None)
    prompt.mark = prompt.copy = None

  # ---- slots --------------------------------------------------------------

  def _slot(self) -> int | None:
    """A slot to enter: a free one, or that of a paused episode."""
    if (slot := self._engine.acquire()) is not None or not self._paused:
      return slot
    seat = next(iter(self._paused))
    del self._paused[seat]
    seat.parked, seat.slot = self._engine.park(seat.slot), None
    self._note_parked(seat, seat.parked)
    return self._engine.acquire()

  def _enter(self, seat: Seat, slot: int) -> None:
    """Brings a seat's state, as far as there is one, into a slot."""
    engine, prompt, seat.slot = self._engine, seat.prompt, slot
    tokens = seat.request.trajectory.segments[0].tokens
    if seat.shared:
      tokens = seat.request.trajectory.tokens()[: seat.shared]
    fresh = seat.parked is None
    forks = fresh and _is(prompt.mark, tokens) and engine.holds(prompt.mark)
    for other in list(self._prompts):
      here = other.mark is not None and other.mark.slot == slot
      if here and not (forks and other is prompt):
        self._keep(other)
    if seat.parked is not None:
      engine.unpark(seat.parked, slot)
      seat.parked = None
      self._parked.pop(seat)
      return
    prompt.begun += 1
    if forks:
      prompt.mark = engine.fork(prompt.mark, slot)
    elif _is(prompt.copy, tokens):
      prompt.mark = engine.unpark(prompt.copy, slot)
    else:  # the first of all, or one that opened otherwise
      engine.reset(slot)
      engine.extend(slot, tokens)
    seat.filled = len(tokens)
    self._mark_again(prompt, slot, tokens)

  def _mark_again(self, prompt: SharedPrompt, slot: int, tokens) -> None:
    """Marks a prompt that was run in `slot`, if nobody could fork from it.

    After an update of the weights the first who begins runs it again, where
    the engine recomputes, and the others fork from that.
    """
    engine = self._engine
    engine.refresh(slot)
    if prompt.mark is not None and engine.holds(prompt.mark):
      return
    if prompt.copy is not None and not _is(prompt.copy, tokens):
      return  # that of the others stands
    prompt.mark, prompt.copy = engine.mark(slot), None
    self._parked.pop(prompt, None)
    self._prompts[prompt] = None

  def _keep(self, prompt: SharedPrompt) -> None:
    """Saves a prompt from the slot that is about to be used."""
    mark, prompt.mark = prompt.mark, None
    more = prompt.begun < prompt.members
    if more and prompt.copy is None and self._engine.holds(mark):
      prompt.copy = self._engine.copy(mark)
      self._note_parked(prompt, prompt.copy)

  def _note_parked(self, who: Seat | SharedPrompt, parked: Parked) -> None:
    self._parked[who] = parked.bytes
    now = sum(self._parked.values())
    self.parked_bytes = max(self.parked_bytes, now)

  def _start(self, seat: Seat) -> None:
    """Runs what the slot does not hold yet, and begins the turn."""
    tokens = seat.request.trajectory.tokens()
    self._paused.pop(seat, None)
    self._engine.check(seat.slot, tokens[: seat.filled])
    if seat.filled < len(tokens):
      self._engine.extend(seat.slot, tokens[seat.filled :])
      seat.filled = len(tokens)
    self.tokens_reprefill += len(tokens)
    self._engine.start(
      seat.slot,
      seat.key,
      self._sampling,
      turn_budget=seat.request.turn_budget,
      trajectory_budget=seat.request.trajectory_budget,
      context=seat.request.context,
      said=seat.request.said,
    )
    self.decoding[seat.slot] = seat


def _is(state: Mark | Parked | None, tokens: np.ndarray) -> bool:
  return state is not None and np.array_equal(state.tokens, tokens)
