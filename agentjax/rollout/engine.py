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

import time
from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh

from agentjax.model import transformer
from agentjax.model.cache import Store
from agentjax.model.config import ModelConfig
from agentjax.model.stores import best_store
from agentjax.rollout import decode, forks, parking
from agentjax.rollout.forks import Mark
from agentjax.rollout.parking import Parked
from agentjax.rollout.programs import Programs
from agentjax.rollout.rows import Rows
from agentjax.rollout.sampling import Sampling, trajectory_key
from agentjax.rollout.slots import (
  Handle,
  StaleKV,
  Stats,
  Turn,
  make_plan,
)
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
    kept: M, ids that a turn which truncates may keep for a token; they are
      written down. 0 is off.
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
    kept: int = 0,
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
    if not 0 <= kept <= config.vocab_size:
      raise ValueError(
        f'kept {kept}: give 0 (off) to the {config.vocab_size} ids that there '
        'are'
      )
    self.config, self.context, self.chunk = config, context, chunk
    self.kept = kept
    self.buckets = tuple(buckets)
    self.stale_kv = StaleKV(stale_kv)
    self._stops = stops
    cache_dtype = cache_dtype or dtype
    programs = Programs(
      config, stops, slots=slots, context=context, chunk=chunk, dtype=dtype,
      cache_dtype=cache_dtype, mesh=mesh,
      store=store or best_store(config, cache_dtype, mesh), kept=kept,
    )  # fmt: skip
    self._rows = Rows(
      config, programs, slots=slots, context=context, buckets=buckets,
      stale_kv=self.stale_kv,
    )  # fmt: skip
    self._slots, self._state = self._rows.slots, self._rows.state

  # ---- programs -----------------------------------------------------------

  def compile(self) -> tuple[int, float]:
    """Runs every program once; returns their number and the seconds taken.

    After this, no call compiles anything (a test counts), as long as weights
    come in the type and placement of those that were loaded. Needs `load`.
    """
    start = time.monotonic()
    self._rows.weights.needed()
    programs = self._state.compile(make_plan(self._slots, 0, 1))
    trajectory_key(0, 0, '', 0, 0)
    return programs + 1, time.monotonic() - start

  # ---- weights ------------------------------------------------------------

  @property
  def version(self) -> int:
    """Of the weights that were loaded last; -1 before."""
    return self._rows.version

  def load(self, params: transformer.Params, version: int) -> None:
    """Takes the weights of `version`; slots keep their KV state (`stale_kv`).

    The arrays are laid out for decoding once, here. Turns under way go on
    with the new weights at the next `step`. The weights that are loaded may be
    loaded again under their version.

    Args:
      params: parameters; or with the factors of `lora.attach` among them; or
        the factors alone, `lora.attach(None, ...)`, for the parameters that
        were loaded before. Programs are compiled for the maps that have some:
        to compile nothing later, load with factors before `compile`.

    Raises:
      ValueError: the version is that of other weights; turns are under way,
        and stale_kv is to refuse; or they are parameters of another model.
    """
    refuses = self.stale_kv is StaleKV.REFUSE and version != self.version
    if self.n_decoding and refuses:
      raise ValueError(
        f'{self.n_decoding} turns of version {self.version} are under way: let '
        'them end, or set stale_kv to keep or recompute'
      )
    self._rows.weights.load(params, version)

  # ---- slots --------------------------------------------------------------

  @property
  def n_slots(self) -> int:
    return len(self._slots)

  @property
  def stats(self) -> Stats:
    """Counts since the engine was made, or since others were put here."""
    return self._rows.stats

  @stats.setter
  def stats(self, stats: Stats) -> None:
    self._rows.stats = stats

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
    return self._rows.acquire()

  def release(self, slot: int) -> None:
    """Gives a slot back; marks in it stay valid until it is used again."""
    self._rows.release(slot)

  def length(self, slot: int) -> int:
    """Tokens in the slot's KV state."""
    return self._rows.at(slot).length

  def reset(self, slot: int) -> None:
    """Empties a slot: marks in it end.

    Raises:
      ValueError: a turn is under way in it; so do `fork` and `extend`.
    """
    self._rows.reset(slot)

  def handle(self, slot: int) -> Handle:
    """Names the slot's KV state: weights, tokens, length, position."""
    return self._rows.at(slot).handle

  def check(self, slot: int, tokens: np.ndarray) -> None:
    """Refuses a slot whose KV state is not of these tokens.

    Raises:
      ValueError: it is of others; reset and extend with the tokens instead.
    """
    self._rows.at(slot).check(slot, tokens)

  def extend(self, slot: int, tokens: np.ndarray) -> None:
    """Runs a prompt's or an observation's tokens on top of the slot.

    Raises:
      ValueError: they are no ids of the vocabulary, do not fit the context, or
        (StaleKV.REFUSE) the slot's KV state is of other weights.
    """
    self._rows.extend(slot, tokens)

  def refresh(self, slot: int) -> None:
    """Does what `stale_kv` says now, and not when the slot is run next.

    Raises:
      ValueError: it says to refuse, and the slot is of other weights.
    """
    self._rows.held(slot)
    self._rows.refresh(slot)

  # ---- forks and host memory ----------------------------------------------

  def mark(self, slot: int, at: int | None = None) -> Mark:
    """Names a point of the slot's row: `forks.mark`."""
    return forks.mark(self._rows, slot, at)

  def holds(self, mark: Mark) -> bool:
    """Whether a mark can still be forked from: `forks.holds`."""
    return forks.holds(self._rows, mark)

  def fork(self, mark: Mark, slot: int) -> Mark:
    """Gives `slot` the KV state of a mark: `forks.fork`."""
    return forks.fork(self._rows, mark, slot)

  def copy(self, mark: Mark) -> Parked:
    """A mark's KV state in host memory: `parking.copy`."""
    return parking.copy(self._rows, mark)

  def park(self, slot: int) -> Parked:
    """Moves a slot's content to host memory: `parking.park`."""
    return parking.park(self._rows, slot)

  def unpark(self, parked: Parked, slot: int) -> Mark:
    """Puts what was parked into `slot`: `parking.unpark`."""
    return parking.unpark(self._rows, parked, slot)

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
      said: FORCED tokens with which the turn begins: at the slot's end
        already, they count for stop strings.

    Raises:
      ValueError: the slot is empty, busy, does not end with `said`, no token
        may be sampled, or the sampling may keep more ids than `kept`.
    """
    s = self._rows.held(slot)
    if self.kept and not sampling.fits(self.kept):
      raise ValueError(
        f'{sampling} may keep more than the {self.kept} ids that engine.kept '
        f'has room for: give top_k 1 to {self.kept}, or raise engine.kept'
      )
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
    if len(said) and not np.array_equal(s.tokens[-len(said) :], said):
      raise ValueError(
        f'slot {slot} does not end with the forced tokens {list(said)}: extend '
        'it with them first'
      )
    self._rows.refresh(slot)
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
    self._rows.weights.needed()
    steps = self.chunk if steps is None else steps
    if not 1 <= steps <= self.chunk:
      raise ValueError(f'steps {steps}: give 1 to the chunk size {self.chunk}')
    if ended is not None and ended < 1:
      raise ValueError(f'ended {ended}: give 1 or more, or None for all')
    for i, slot in enumerate(self._slots):
      if slot.turn is not None:
        self._rows.refresh(i)
    version = self.version  # of this chunk, whoever loads meanwhile
    plan = make_plan(self._slots, steps, ended or self.n_slots)
    self._rows.settle()
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
      if self.kept and turn.sampling.truncates:
        turn.kept.append(chunk.kept_SCM[i, :n])
      turn.budget -= n
      turn.stop_state = int(chunk.stop_state_S[i])
      self.stats.tokens_on_old_kv += n * slot.stale(version)
      slot.grow(chunk.tokens_SC[i, :n], version)
      if not np.isfinite(chunk.logprobs_SC[i, :n]).all():
        self._rows.spoil(int(i))
      if chunk.stop_S[i] != decode.GOES_ON:
        done.append((int(i), slot.finish(int(chunk.stop_S[i]))))
    return done

  def cancel(self, slot: int) -> Segment:
    """Ends the slot's turn here; what it sampled so far, perhaps nothing.

    Raises:
      ValueError: no turn is under way.
    """
    if self._rows.at(slot).turn is None:
      raise ValueError(f'slot {slot} has no turn under way to cancel')
    return self._slots[slot].finish(None)
