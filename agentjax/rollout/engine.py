"""Slots and caches: generation that pauses, and resumes for what was observed.

Floor 2, rollout/. The engine knows tokens only: no text, no environment, no
reward. It holds S slots over one static-shape KV cache. `extend` runs a
prompt or an observation through the model (bucketed lengths, one slot a call,
so that its shape depends on that trajectory alone); `step` runs one jitted
decode chunk over all slots. A slot's last hidden state stays on the device, so
a sampled token is in the cache the moment it is sampled, and a resumed slot
processes the observation's tokens and nothing else (design promise 3).

A slot's content can be forked, at its end or in its past, and moved to host
memory and back, bit by bit the same. Weights may change between two chunks;
what then happens to the KV states is `StaleKV`'s, and every state and token
says which weights made it.

All decisions of a chunk are one fixed-shape `Plan`, which a leader could
broadcast. Stops, budgets and sampling parameters are data, never shapes: the
programs are compiled by `compile` before step 1, and none after it.

Letters: S slots, C chunk, V vocabulary, D width.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from agentjax.model import transformer
from agentjax.model.cache import Store
from agentjax.model.config import ModelConfig
from agentjax.model.stores import best_store
from agentjax.rollout import decode
from agentjax.rollout.programs import Programs
from agentjax.rollout.sampling import Sampling, trajectory_key
from agentjax.rollout.slots import (
  Handle,
  Mark,
  Parked,
  Slot,
  StaleKV,
  Stats,
  Turn,
  before,
  make_plan,
)
from agentjax.rollout.state import State
from agentjax.text.stop import StopAutomaton
from agentjax.types import Segment, Stop


class Engine:
  """A policy that samples, on one mesh; for one thread.

  Args:
    config: the model's. stops: automaton over its token ids.
    slots: S, trajectories that hold a KV state at once.
    context: positions of a slot; a trajectory never exceeds it.
    chunk: C, tokens that a slot may sample in one `step`.
    buckets: lengths in which `extend` runs tokens, ascending.
    dtype, cache_dtype: of compute and parameters, and of the KV cache.
    stale_kv: what happens to a KV state when the weights change.
    mesh: None for the default device.
    store: layout of the KV cache and the attention over it, called as
      (config, slots, context, cache dtype, mesh); None is `best_store`'s.
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
    store: Callable[..., Store] | None = None,
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
    self._shapes = transformer.init_shapes(config)
    self._stops = stops
    self._slots = [Slot() for _ in range(slots)]
    cache_dtype = cache_dtype or dtype
    programs = Programs(
      config,
      stops,
      slots=slots,
      context=context,
      chunk=chunk,
      dtype=dtype,
      cache_dtype=cache_dtype,
      mesh=mesh,
      store=store or best_store(config, cache_dtype, mesh),
    )
    self._state = State(programs, buckets)
    self._prefilling = False
    self._spoiled: set[int] = set()  # rows with something that is no number

  # ---- programs -----------------------------------------------------------

  def compile(self) -> tuple[int, float]:
    """Runs every program once; returns their number and the seconds taken.

    After this, no call compiles anything (a test counts), as long as weights
    come in the type and placement of those that were loaded. Needs `load`.
    """
    start = time.monotonic()
    self._need_weights()
    programs = self._state.compile(make_plan(self._slots, 0, 1))
    trajectory_key(0, 0, '', 0, 0)
    return programs + 1, time.monotonic() - start

  # ---- weights ------------------------------------------------------------

  def load(self, params: transformer.Params, version: int) -> None:
    """Takes the weights of `version`; slots keep their KV state (`stale_kv`).

    The arrays are laid out for decoding once, here. Turns under way go on
    with the new weights at the next `step`.

    Raises:
      ValueError: turns are under way, and stale_kv is to refuse; or they are
        parameters of another model.
    """
    if self.n_decoding and self.stale_kv is StaleKV.REFUSE:
      raise ValueError(
        f'{self.n_decoding} turns of version {self.version} are under way: let '
        'them end, or set stale_kv to keep or recompute'
      )
    if not 0 <= version < 2**31:
      raise ValueError(f'version {version}: give 0 to 2^31 - 1')
    want = jax.tree.map(lambda x: x.shape, self._shapes)
    if (has := jax.tree.map(np.shape, params)) != want:
      raise ValueError(
        f'these are not parameters of this model: it has {want}, they have '
        f'{has}'
      )
    self._state.load(params)
    self.version = int(version)

  def _need_weights(self):
    if self._state.layout is None:
      raise RuntimeError(
        'the engine has no weights: call load(params, version)'
      )

  # ---- slots --------------------------------------------------------------

  @property
  def n_slots(self) -> int:
    return len(self._slots)

  @property
  def cache_bytes(self) -> int:
    """Of all slots' KV state, over all devices."""
    return self._state.cache_bytes

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
    self._at(slot).free = True
    self._at(slot).turn = None

  def length(self, slot: int) -> int:
    """Tokens in the slot's KV state."""
    return self._at(slot).length

  def reset(self, slot: int) -> None:
    """Empties a slot: marks in it end.

    Raises:
      ValueError: a turn is under way in it; so do `fork` and `extend`.
    """
    old = self._idle(slot)
    self._clean(slot)
    self._slots[slot] = Slot(False, False, old.generation + 1)

  def handle(self, slot: int) -> Handle:
    """Names the slot's KV state: weights, tokens, length, position."""
    return self._at(slot).handle

  def check(self, slot: int, tokens: np.ndarray) -> None:
    """Refuses a slot whose KV state is not of these tokens.

    Raises:
      ValueError: it is of others; reset and extend with the tokens instead.
    """
    self._at(slot).check(slot, tokens)

  def mark(self, slot: int, at: int | None = None) -> Mark:
    """Names a point of the slot's row, so that others can fork from it.

    Args:
      at: tokens before it; None is the present end.

    Raises:
      ValueError: there is nothing before it, or it is not in the row.
    """
    s = self._held(slot)
    at = s.length if at is None else at
    if not 1 <= at <= s.length:
      raise ValueError(
        f'mark at {at} in slot {slot}, which holds {s.length} tokens: give 1 '
        f'to {s.length}'
      )
    hidden_D = None
    if at == s.length:
      hidden_D = self._state.hidden_of(slot)
    return Mark(slot, s.generation, s.tokens[:at], hidden_D,
                before(s.versions, at))  # fmt: skip

  def holds(self, mark: Mark) -> bool:
    """Whether a mark can still be forked from."""
    s, n = self._slots[mark.slot], len(mark.tokens)
    return (
      s.generation == mark.generation
      and before(s.versions, n) == mark.versions
      and np.array_equal(s.tokens[:n], mark.tokens)
    )

  def fork(self, mark: Mark, slot: int) -> Mark:
    """Gives `slot` the KV state of a mark; returns the same mark in `slot`.

    Nothing is run again, but the one token before a mark in the past; if the
    weights have changed since, as `stale_kv` says.

    Raises:
      ValueError: the marked row holds something else by now, or
        (StaleKV.REFUSE) that token would be run with other weights.
    """
    n = len(mark.tokens)
    self._idle(slot)
    if slot != mark.slot:
      self._clean(slot)
    if not self.holds(mark):
      raise ValueError(
        f'mark in slot {mark.slot} is no longer there: the slot was given to '
        'another trajectory or recomputed; extend with the tokens instead'
      )
    hidden_D, stale = mark.hidden_D, mark.versions[-1][1] != self.version
    if hidden_D is None and stale and self.stale_kv is StaleKV.REFUSE:
      raise ValueError(
        f'mark at {n} in slot {mark.slot} is of version '
        f'{mark.versions[-1][1]}, and the weights of version {self.version} '
        'would run its last token: set stale_kv to keep or recompute'
      )
    if hidden_D is None:  # the source's own, until it is made below
      hidden_D = self._state.hidden_of(mark.slot)
    self._state.fork(mark.slot, slot, hidden_D, n)
    generation = self._slots[slot].generation + (slot != mark.slot)
    s = self._slots[slot] = Slot.of(generation, mark.tokens, mark.versions)
    if mark.hidden_D is None:
      if stale and self.stale_kv is StaleKV.RECOMPUTE:
        self._refresh(slot)
      else:
        self._run_tokens(slot, mark.tokens[-1:], n - 1)
        self.stats.tokens_recomputed += 1
      if stale and self.stale_kv is StaleKV.KEEP:
        s.versions = (*before(s.versions, n - 1), (n - 1, self.version))
      hidden_D = self._state.hidden_of(slot)
    return Mark(slot, generation, mark.tokens, hidden_D, s.versions)

  # ---- host memory --------------------------------------------------------

  def copy(self, mark: Mark) -> Parked:
    """A mark's KV state in host memory, where it outlives its slot.

    Raises:
      ValueError: the mark is gone, or in the past.
    """
    if mark.hidden_D is None or not self.holds(mark):
      raise ValueError(
        f'mark in slot {mark.slot} is in the past or no longer there: fork '
        'from it while it is, and mark that slot'
      )
    return self._parked(mark.slot, mark.tokens, mark.versions, mark.hidden_D)

  def park(self, slot: int) -> Parked:
    """Moves a slot's content to host memory, a turn under way included.

    The slot is released. `unpark` puts it into any slot, bit by bit the same.
    """
    s = self._held(slot)
    hidden_D = self._state.hidden_of(slot)
    out = self._parked(slot, s.tokens, s.versions, hidden_D)
    out = dataclasses.replace(out, turn=s.turn)
    self.release(slot)
    return out

  def _parked(self, slot, tokens, versions, hidden_D) -> Parked:
    row = self._state.take(slot, len(tokens))
    out = Parked(tokens, versions, hidden_D, row)
    self.stats.parked += 1
    self.stats.parked_bytes += out.bytes
    return out

  def unpark(self, parked: Parked, slot: int) -> Mark:
    """Puts what was parked into `slot`; returns a mark at its end.

    Raises:
      ValueError: there is a turn under way in the slot; or (StaleKV.REFUSE)
        a parked turn is of other weights.
    """
    self._idle(slot)
    self._clean(slot)
    turn = parked.turn
    version = parked.versions[-1][1] if parked.versions else self.version
    if turn and version != self.version and self.stale_kv is StaleKV.REFUSE:
      raise ValueError(
        f'a parked turn is of version {version}, the weights are of version '
        f'{self.version}: set stale_kv to keep or recompute'
      )
    self._state.put(slot, parked.hidden_D, parked.row)
    generation = self._slots[slot].generation + 1
    self._slots[slot] = Slot.of(generation, parked.tokens, parked.versions)
    # It may be unparked again: then each goes on by itself.
    self._slots[slot].turn = turn and turn.copy()
    return Mark(slot, generation, parked.tokens, parked.hidden_D,
                parked.versions)  # fmt: skip

  def _at(self, slot: int) -> Slot:
    if not 0 <= slot < self.n_slots:
      raise ValueError(f'slot {slot}: there are 0 to {self.n_slots - 1}')
    return self._slots[slot]

  def _idle(self, slot: int) -> Slot:
    s = self._at(slot)
    if s.turn is not None:
      raise ValueError(
        f'slot {slot} has a turn under way: let it end, cancel it, or choose '
        'another'
      )
    if s.free:
      raise ValueError(f'slot {slot} is free: acquire it first')
    return s

  def _clean(self, slot: int) -> None:
    """No NaN in a row outlives its trajectory.

    A mask would not hide it from who sits there next: 0 * NaN is NaN.
    """
    if slot in self._spoiled:
      self._state.clear(slot)
      self._spoiled.remove(slot)

  def _held(self, slot: int) -> Slot:
    s = self._at(slot)
    if s.free or s.leftover:
      raise ValueError(
        f'slot {slot} is not in use: acquire, then reset or fork'
      )
    return s

  # ---- prefill ------------------------------------------------------------

  def extend(self, slot: int, tokens: np.ndarray) -> None:
    """Runs a prompt's or an observation's tokens on top of the slot.

    Raises:
      ValueError: they are no ids of the vocabulary, do not fit the context, or
        (StaleKV.REFUSE) the slot's KV state is of other weights.
    """
    self._need_weights()
    s = self._held(slot)
    self._idle(slot)
    tokens = self._ids(tokens)
    if s.length + len(tokens) > self.context:
      raise ValueError(
        f'{len(tokens)} tokens on top of {s.length} exceed the context of '
        f'{self.context}: cut the observation or raise engine context'
      )
    self._refresh(slot)
    self._run_tokens(slot, tokens, s.length)
    s.grow(tokens, self.version)
    self.stats.tokens_prefilled += len(tokens)

  def _ids(self, tokens: np.ndarray) -> np.ndarray:
    """A copy of its own: what the caller does with theirs changes nothing."""
    given = np.asarray(tokens)
    if given.ndim != 1 or (given.size and given.dtype.kind not in 'iu'):
      raise ValueError(
        f'tokens of shape {given.shape} and type {given.dtype}: give a row of '
        'integer ids'
      )
    wrong = (given < 0) | (given >= self.config.vocab_size)
    if wrong.any():
      raise ValueError(
        f'token id {given[wrong][0]} is not of the vocabulary: give 0 to '
        f'{self.config.vocab_size - 1}'
      )
    return given.astype(np.int32)  # copies

  def _run_tokens(self, slot: int, tokens: np.ndarray, start: int) -> None:
    began = time.monotonic()
    self._state.run(slot, tokens, start)
    self._prefilling = True
    self.stats.prefill_seconds += time.monotonic() - began

  def _await_prefill(self) -> None:
    """What was handed to the device is prefill's time, not the next chunk's."""
    if self._prefilling:
      began = time.monotonic()
      jax.block_until_ready(self._state.hidden)
      self._prefilling = False
      self.stats.prefill_seconds += time.monotonic() - began

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
      self._run_tokens(slot, s.tokens, 0)
      self.stats.tokens_recomputed += s.length
      s.versions = ((0, self.version),)

  # ---- decoding -----------------------------------------------------------

  def start(
    self,
    slot: int,
    key: np.ndarray,
    sampling: Sampling,
    *,
    turn_budget: int,
    trajectory_budget: int,
    context: int | None = None,
    said: Sequence[int] = (),
  ) -> None:
    """Begins a turn in a slot; `step` then samples it.

    Args:
      key: uint32[2], see `sampling.trajectory_key`.
      turn_budget, trajectory_budget: MODEL tokens that this turn, and the
        trajectory from here on, may still sample.
      context: tokens that the slot may hold in the end, if it may not be full.
      said: FORCED tokens with which the turn begins: in the slot already, they
        count for stop strings.

    Raises:
      ValueError: the slot is empty, busy, or no token may be sampled.
    """
    s = self._held(slot)
    if np.shape(key) != (2,):
      raise ValueError(
        f'key of shape {np.shape(key)}: give uint32[2], as trajectory_key does'
      )
    limits = (
      (trajectory_budget, Stop.TRAJECTORY_BUDGET),
      (turn_budget, Stop.TURN_BUDGET),
      (min(self.context, context or self.context) - s.length, Stop.CONTEXT),
    )
    budget, limit = min(limits, key=lambda pair: pair[0])
    if s.turn is not None or s.length == 0 or budget < 1:
      raise ValueError(
        f'slot {slot} cannot start a turn: {s.length} tokens in it, '
        f'{"a turn under way" if s.turn else "no turn under way"}, '
        f'{budget} tokens left by {limit.name}'
      )
    self._refresh(slot)
    state = self._stops.run(said, self._stops.start)
    if state >= self._stops.n_live:
      raise ValueError(
        f'slot {slot}: the turn begins with {len(said)} forced tokens that '
        'hold a stop: force less'
      )
    s.turn = Turn(np.asarray(key, np.uint32), sampling, budget, limit, state)

  def step(
    self, steps: int | None = None, ended: int | None = None
  ) -> list[tuple[int, Segment]]:
    """One decode chunk over all slots with a turn under way.

    Neither argument changes a trajectory. If it is interrupted, all slots with
    a turn under way are emptied.

    Args:
      steps: tokens a slot at most; None is the chunk size, which it may not
        exceed.
      ended: come back as soon as this many turns have ended; None is all.

    Returns:
      (slot, MODEL segment) of every turn that ended. Its last token is in the
      cache: `extend` with the observation goes on.
    """
    self._need_weights()
    steps = self.chunk if steps is None else steps
    if not 1 <= steps <= self.chunk:
      raise ValueError(f'steps {steps}: give 1 to the chunk size {self.chunk}')
    if ended is not None and ended < 1:
      raise ValueError(f'ended {ended}: give 1 or more, or None for all')
    for i, slot in enumerate(self._slots):
      if slot.turn is not None:
        self._refresh(i)
    version = self.version  # of this chunk, whoever loads meanwhile
    plan = make_plan(self._slots, steps, ended or self.n_slots)
    self._await_prefill()
    began = time.monotonic()
    try:
      chunk = self._state.chunk(plan)
      done = self._book(plan, chunk, version)
    except BaseException:
      # Ctrl-C in a notebook: the rows may hold tokens that nobody wrote down.
      for i in np.flatnonzero(plan.live_S):
        self._slots[i].turn = None
        self.reset(i)
      raise
    counts = chunk.count_S[plan.live_S]
    self.stats.tokens_sampled += int(counts.sum())
    self.stats.live_steps += int(counts.sum())
    self.stats.slot_steps += int(counts.max(initial=0)) * self.n_slots
    self.stats.decode_seconds += time.monotonic() - began
    return done

  def _book(self, plan, chunk, version) -> list[tuple[int, Segment]]:
    """Writes down what a chunk made; the turns that ended."""
    done = []
    for i in np.flatnonzero(plan.live_S):
      slot, n = self._slots[i], int(chunk.count_S[i])
      turn = slot.turn
      turn.parts.append(
        (
          *(array[i, :n] for array in chunk[:4]),
          np.full(n, version, np.int32),
        )
      )
      turn.budget -= n
      turn.stop_state = int(chunk.stop_state_S[i])
      slot.grow(chunk.tokens_SC[i, :n], version)
      if not np.isfinite(chunk.logprobs_SC[i, :n]).all():
        self._spoiled.add(int(i))
      if chunk.stop_S[i] != decode.GOES_ON:
        done.append((int(i), self._finish(slot, int(chunk.stop_S[i]))))
    return done

  def cancel(self, slot: int) -> Segment:
    """Ends the slot's turn here; what it sampled so far, perhaps nothing.

    Raises:
      ValueError: no turn is under way.
    """
    if self._at(slot).turn is None:
      raise ValueError(f'slot {slot} has no turn under way to cancel')
    return self._finish(self._slots[slot], None)

  def _finish(self, slot: Slot, code: int | None) -> Segment:
    turn, slot.turn = slot.turn, None
    stop = {
      decode.STRING: Stop.STOP_STRING,
      decode.ID: Stop.END_OF_TURN,
      None: Stop.CANCELLED,
    }.get(code, turn.limit)
    return turn.segment(stop)
