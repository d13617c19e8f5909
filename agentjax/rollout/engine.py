"""Slots and caches: generation that pauses, and resumes for what was observed.

Floor 2, rollout/. The engine knows tokens only: no text, no environment, no
reward. It holds S slots over one static-shape KV cache. `extend` runs a
prompt or an observation through the model (bucketed lengths, one slot a call,
so that its shape depends on that trajectory alone); `step` runs one jitted
decode chunk over all slots. A slot's last hidden state stays on the device, so
a sampled token is in the cache the moment it is sampled, and a resumed slot
processes the observation's tokens and nothing else (design promise 3).

All decisions of a chunk are one fixed-shape `Plan`, which a leader could
broadcast. Stops, budgets and sampling parameters are data, never shapes: an
engine has len(buckets) + 4 programs, compiled by `compile` before step 1.

Letters: S slots, C chunk, V vocabulary, D width.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from agentjax.model import transformer
from agentjax.model.config import ModelConfig
from agentjax.rollout import decode
from agentjax.rollout.programs import Programs
from agentjax.rollout.sampling import Sampling, trajectory_key
from agentjax.rollout.slots import Mark, Slot, StaleKV, Stats, Turn, make_plan
from agentjax.text.stop import StopAutomaton
from agentjax.types import Segment, Source, Stop


class Engine:
  """A policy that samples, on one mesh.

  Args:
    config: the model's. stops: automaton over its token ids.
    slots: S, trajectories that hold a KV state at once.
    context: positions of a slot; a trajectory never exceeds it.
    chunk: C, tokens that a slot may sample in one `step`.
    buckets: lengths in which `extend` runs tokens, ascending.
    dtype, cache_dtype: of compute and parameters, and of the KV cache.
    stale_kv: what happens to a KV state when the weights change.
    mesh: None for the default device.
  """

  def __init__(
    self,
    config: ModelConfig,
    stops: StopAutomaton,
    *,
    slots: int,
    context: int,
    chunk: int = 16,
    buckets: Sequence[int] = (16, 64, 256),
    dtype: str = 'float32',
    cache_dtype: str | None = None,
    stale_kv: StaleKV = StaleKV.REFUSE,
    mesh: Mesh | None = None,
  ):
    if slots < 1 or chunk < 1 or context < 2:
      raise ValueError(
        f'slots {slots}, chunk {chunk}, context {context}: at least 1, 1 and 2'
      )
    if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
      raise ValueError(f'buckets {buckets}: give ascending positive lengths')
    if config.context < context:
      raise ValueError(
        f'context {context} exceeds the {config.context} positions that the '
        'model was made for: lower engine context'
      )
    self.config, self.context, self.chunk = config, context, chunk
    self.buckets = tuple(buckets)
    self.stale_kv = StaleKV(stale_kv)
    self.stats = Stats()
    self.version = -1
    self._stops = stops
    self._slots = [Slot() for _ in range(slots)]
    self._layout = None
    self._programs = Programs(
      config,
      stops,
      slots=slots,
      context=context,
      chunk=chunk,
      dtype=dtype,
      cache_dtype=cache_dtype or dtype,
      mesh=mesh,
    )
    self._hidden, self._cache = self._programs.state()

  # ---- programs -----------------------------------------------------------

  def compile(self) -> tuple[int, float]:
    """Runs every program once; returns their number and the seconds taken.

    After this, no call compiles anything (a test counts). Needs `load`.
    """
    start = time.monotonic()
    self._need_weights()
    self.stats, stats = Stats(), self.stats
    for bucket in self.buckets:
      self._extend_piece(0, np.zeros(bucket, np.int32), 0, 0)
    idle = make_plan(self._slots, 0)
    self._hidden, self._cache, chunk = self._programs.chunk(
      self._layout, self._hidden, self._cache, idle
    )
    hidden_D = self._programs.take(self._hidden, np.int32(0))
    self._fork_row(np.int32(0), np.int32(0), hidden_D)
    trajectory_key(0, 0, '', 0, 0)
    jax.block_until_ready((self._hidden, chunk))
    self.stats = stats
    return len(self.buckets) + 4, time.monotonic() - start

  # ---- weights ------------------------------------------------------------

  def load(self, params: transformer.Params, version: int) -> None:
    """Takes the weights of `version`; slots keep their KV state (`stale_kv`).

    The arrays are laid out for decoding once, here.
    """
    self._layout = self._programs.layout(params)
    self.version = int(version)

  def _need_weights(self):
    if self._layout is None:
      raise RuntimeError(
        'the engine has no weights: call load(params, version)'
      )

  # ---- slots --------------------------------------------------------------

  @property
  def n_slots(self) -> int:
    return len(self._slots)

  @property
  def n_decoding(self) -> int:
    """Slots with a turn under way."""
    return sum(s.turn is not None for s in self._slots)

  def acquire(self) -> int | None:
    """A slot to `reset` or to `fork` into, or None if all are held.

    What the slot held before stays until then, so that marks in it live on.
    """
    for i, slot in enumerate(self._slots):
      if slot.free:
        slot.free, slot.leftover = False, True
        return i
    return None

  def release(self, slot: int) -> None:
    """Gives a slot back; marks in it stay valid until it is used again."""
    self._slots[slot].free = True
    self._slots[slot].turn = None

  def length(self, slot: int) -> int:
    """Tokens in the slot's KV state."""
    return self._slots[slot].length

  def reset(self, slot: int) -> None:
    """Empties a slot: marks in it end."""
    old = self._slots[slot]
    self._slots[slot] = Slot(False, False, old.generation + 1)

  def mark(self, slot: int) -> Mark:
    """Names the slot's present end, so that others can fork from it."""
    s = self._slots[slot]
    hidden_D = self._programs.take(self._hidden, np.int32(slot))
    tokens = np.concatenate([np.zeros(0, np.int32), *s.tokens])
    return Mark(slot, s.generation, tokens, hidden_D, s.version)

  def fork(self, mark: Mark, slot: int) -> Mark:
    """Gives `slot` the KV state of a mark; returns the same mark in `slot`.

    Raises:
      ValueError: the marked row holds something else by now.
    """
    source = self._slots[mark.slot]
    n = len(mark.tokens)
    if (source.generation, source.version) != (mark.generation, mark.version):
      raise ValueError(
        f'mark in slot {mark.slot} is no longer there: the slot was given to '
        'another trajectory or recomputed; extend with the tokens instead'
      )
    self._fork_row(np.int32(mark.slot), np.int32(slot), mark.hidden_D)
    generation = self._slots[slot].generation + (slot != mark.slot)
    self._slots[slot] = Slot(
      False, False, generation, n, mark.version, [mark.tokens]
    )
    return dataclasses.replace(mark, slot=slot, generation=generation)

  def _held(self, slot: int) -> Slot:
    s = self._slots[slot]
    if s.free or s.leftover:
      raise ValueError(
        f'slot {slot} is not in use: acquire, then reset or fork'
      )
    return s

  def _fork_row(self, source, target, hidden_D):
    self._hidden, self._cache = self._programs.fork(
      self._hidden, self._cache, source, target, hidden_D
    )

  # ---- prefill ------------------------------------------------------------

  def extend(self, slot: int, tokens: np.ndarray) -> None:
    """Runs a prompt's or an observation's tokens on top of the slot.

    Raises:
      ValueError: they do not fit the context, or (StaleKV.REFUSE) the slot's
        KV state is of other weights.
    """
    self._need_weights()
    s = self._held(slot)
    tokens = np.asarray(tokens, np.int32)
    if s.length + len(tokens) > self.context:
      raise ValueError(
        f'{len(tokens)} tokens on top of {s.length} exceed the context of '
        f'{self.context}: cut the observation or raise engine context'
      )
    self._refresh(slot)
    self._run_tokens(slot, tokens, s.length)
    s.tokens.append(tokens)
    s.length += len(tokens)
    self.stats.tokens_prefilled += len(tokens)

  def _run_tokens(self, slot: int, tokens: np.ndarray, start: int) -> None:
    began = time.monotonic()
    at = 0
    while at < len(tokens):
      rest = len(tokens) - at
      size = next((b for b in self.buckets if b >= rest), self.buckets[-1])
      count = min(rest, size)
      piece = np.zeros(size, np.int32)
      piece[:count] = tokens[at : at + count]
      self._extend_piece(slot, piece, start + at, count)
      at += count
    self.stats.prefill_seconds += time.monotonic() - began

  def _extend_piece(self, slot, piece, start, count):
    self._hidden, self._cache = self._programs.extend(
      self._layout,
      self._hidden,
      self._cache,
      np.int32(slot),
      piece,
      np.int32(start),
      np.int32(count),
    )

  def _refresh(self, slot: int) -> None:
    """Applies `stale_kv` where the slot's KV state is of other weights."""
    s = self._slots[slot]
    if s.length and s.version != self.version:
      if self.stale_kv is StaleKV.REFUSE:
        raise ValueError(
          f'slot {slot} holds {s.length} tokens of version {s.version}, the '
          f'weights are of version {self.version}: set stale_kv to keep or '
          'recompute'
        )
      if self.stale_kv is StaleKV.KEEP:
        return
      past = np.concatenate(s.tokens)
      self._run_tokens(slot, past, 0)
      self.stats.tokens_recomputed += len(past)
    s.version = self.version

  # ---- decoding -----------------------------------------------------------

  def start(
    self,
    slot: int,
    key: np.ndarray,
    sampling: Sampling,
    *,
    turn_budget: int,
    trajectory_budget: int,
  ) -> None:
    """Begins a turn in a slot; `step` then samples it.

    Args:
      key: uint32[2], see `sampling.trajectory_key`.
      turn_budget, trajectory_budget: MODEL tokens that this turn, and the
        trajectory from here on, may still sample.

    Raises:
      ValueError: the slot is empty, busy, or no token may be sampled.
    """
    s = self._held(slot)
    limits = (
      (trajectory_budget, Stop.TRAJECTORY_BUDGET),
      (turn_budget, Stop.TURN_BUDGET),
      (self.context - s.length, Stop.CONTEXT),
    )
    budget, limit = min(limits, key=lambda pair: pair[0])
    if s.turn is not None or s.length == 0 or budget < 1:
      raise ValueError(
        f'slot {slot} cannot start a turn: {s.length} tokens in it, '
        f'{"a turn under way" if s.turn else "no turn under way"}, '
        f'{budget} tokens left by {limit.name}'
      )
    self._refresh(slot)
    s.turn = Turn(
      np.asarray(key, np.uint32), sampling, budget, limit, self._stops.start
    )

  def step(self, steps: int | None = None) -> list[tuple[int, Segment]]:
    """One decode chunk over all slots with a turn under way.

    Args:
      steps: tokens a slot at most; None is the chunk size, which it may not
        exceed. It changes no trajectory.

    Returns:
      (slot, MODEL segment) of every turn that ended. Its last token is in the
      cache: `extend` with the observation goes on.
    """
    began = time.monotonic()
    self._need_weights()
    steps = self.chunk if steps is None else steps
    if not 1 <= steps <= self.chunk:
      raise ValueError(f'steps {steps}: give 1 to the chunk size {self.chunk}')
    plan = make_plan(self._slots, steps)
    self._hidden, self._cache, chunk = self._programs.chunk(
      self._layout, self._hidden, self._cache, plan
    )
    chunk = jax.device_get(chunk)
    ended = []
    for i in np.flatnonzero(plan.live_S):
      slot, n = self._slots[i], int(chunk.count_S[i])
      turn = slot.turn
      turn.parts.append(
        (
          *(array[i, :n] for array in chunk[:4]),
          np.full(n, self.version, np.int32),
        )
      )
      turn.budget -= n
      turn.stop_state = int(chunk.stop_state_S[i])
      slot.tokens.append(chunk.tokens_SC[i, :n])
      slot.length += n
      if chunk.stop_S[i] != decode.GOES_ON:
        ended.append((int(i), self._finish(slot, int(chunk.stop_S[i]))))
    counts = chunk.count_S[plan.live_S]
    self.stats.tokens_sampled += int(counts.sum())
    self.stats.live_steps += int(counts.sum())
    self.stats.slot_steps += int(counts.max(initial=0)) * self.n_slots
    self.stats.decode_seconds += time.monotonic() - began
    return ended

  def _finish(self, slot: Slot, code: int) -> Segment:
    turn, slot.turn = slot.turn, None
    stop = {decode.STRING: Stop.STOP_STRING, decode.ID: Stop.END_OF_TURN}.get(
      code, turn.limit
    )
    parts = [np.concatenate(column) for column in zip(*turn.parts, strict=True)]
    return Segment(Source.MODEL, *parts, stop=stop)
