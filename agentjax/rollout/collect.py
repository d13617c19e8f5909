"""Many episodes over few slots: all concurrency of the project is here.

Floor 2, rollout/. One thread (the caller's) drives the device; a pool runs
environments. An episode needs a slot only while it samples: one that waits for
its tool keeps its KV state in its slot while nobody else needs the slot, and
in host memory afterwards, so decoding never waits for a tool. A group's prompt
is prefilled once and forked. Nothing here depends on time: when a tool
returns, and which slot an episode sits in, change no trajectory (design
promise 5); only a call that hangs, far beyond what a tool needs, ends its
episode as a failure of infrastructure.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from agentjax.env.base import Environment, InfraError
from agentjax.rollout.calls import Call, Calls, Hung
from agentjax.rollout.engine import Engine
from agentjax.rollout.episode import (
  Act,
  Chat,
  Decode,
  Limits,
  Request,
  Reset,
  episode,
)
from agentjax.rollout.sampling import Sampling, trajectory_key
from agentjax.rollout.seats import Seat, Seats, SharedPrompt
from agentjax.rollout.slots import Stats
from agentjax.types import Group, Reward, Status, Task, Trajectory

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class CollectStats:
  """Of one `collect`: seconds of the device thread, and counts."""

  seconds: float = 0.0
  waiting_seconds: float = 0.0  # no slot had a token to sample
  # What an engine without a KV state over tool calls would have to run: for
  # each turn all that is before it.
  tokens_reprefill: int = 0
  parked_bytes: int = 0  # KV states in host memory, at their peak
  retries: int = 0  # episodes run again after an InfraError
  # Episodes given up: after the retries, or as a call of theirs hung.
  infra_failures: int = 0
  calls_given_up: int = 0  # of environments, as they hung

  def metrics(self, engine: Stats) -> dict[str, float]:
    """These and the engine's own counts, under the names of the records."""
    sampled = engine.tokens_sampled
    return {
      'tokens_sampled': sampled,
      'tokens_on_old_kv': engine.tokens_on_old_kv,
      'tokens_prefilled': engine.tokens_prefilled,
      'tokens_recomputed': engine.tokens_recomputed,
      'tokens_reprefill': self.tokens_reprefill,
      'infra_retries': self.retries,
      'calls_given_up': self.calls_given_up,
      'slot_occupancy': engine.occupancy,
      'rows_parked': engine.parked,
      'parked_bytes': self.parked_bytes,
      'seconds_collect': self.seconds,
      'seconds_waiting_for_tools': self.waiting_seconds,
      'seconds_decode': engine.decode_seconds,
      'seconds_prefill': engine.prefill_seconds,
      'tokens_per_second': sampled / max(self.seconds, 1e-9),
      'tokens_decoded_per_second': sampled / max(engine.decode_seconds, 1e-9),
    }


class _Episode:
  """One episode on its way: its generator, its slot, its environment."""

  def __init__(self, trajectory: Trajectory, group: _Group, index: int):
    self.first = trajectory
    self.group = group
    self.index = index
    # Who goes on from one past begins with that; else the prompt is the past.
    shared = len(trajectory)
    past = trajectory.tokens().tobytes()
    prompt = group.prompts.setdefault(past, SharedPrompt(members=0))
    prompt.members += 1
    self.seat = Seat(self, prompt, shared)
    self.environment: Environment | None = None
    self.attempts = 0
    self.loop: Generator | None = None
    self.request: Request | None = None  # what it waits for
    self.call: Call | None = None  # the last one of the environment
    self.scored: Trajectory | None = None  # ended, waits for its reward


@dataclasses.dataclass
class _Group:
  task: Task
  done: list[Trajectory | None]
  prompts: dict[bytes, SharedPrompt] = dataclasses.field(default_factory=dict)


def collect(
  tasks: Sequence[Task],
  *,
  group_size: int,
  engine: Engine,
  chat: Chat,
  make_environment: Callable[[], Environment],
  limits: Limits,
  sampling: Sampling,
  seed: int,
  draw: int,
  in_flight: int | None = None,
  tool_threads: int = 8,
  tool_seconds: float = 3600.0,
  infra_retries: int = 2,
  prefixes: Sequence[Sequence[Trajectory]] | None = None,
  on_group: Callable[[Group], None] | None = None,
  stats: CollectStats | None = None,
) -> list[Group]:
  """Makes `group_size` trajectories of each task.

  Args:
    seed, draw: with task id, sample and branch they key the sampling.
    in_flight: episodes under way at once; None: one a slot. More keep the
      slots busy while tools are slow; KV states that have no slot are kept in
      host memory. tool_threads: environments that run at once.
    tool_seconds: that a call of an environment may take. Then it is given up:
      its episode ends with INFRA_FAILURE, without another try, and the
      environment is closed if the call ever returns.
    infra_retries: an InfraError runs the episode again from its start, with
      the same keys, this often; then its status is INFRA_FAILURE.
    prefixes: per task, trajectories to go on from, as many as there are; then
      `group_size` counts for nothing. Who goes on from the same past has it
      run once.
    on_group: called in this thread with each group when it is complete, between
      two chunks. It is the place to load other weights in the middle of a
      `collect`: all that is sampled after it is of them. If the engine's
      `stale_kv` is to refuse, that ends in a ValueError, of `Engine.load` or of
      the next turn on a state of the old ones.

  Returns:
    Groups in the order of `tasks`, trajectories in the order of `sample`.
  """
  began = time.monotonic()
  if limits.context > engine.context:
    raise ValueError(
      f'limits.context {limits.context} exceeds the engine context '
      f'{engine.context}: lower it, or raise the engine context'
    )
  if in_flight is not None and in_flight < 1:
    raise ValueError(f'in_flight {in_flight}: give 1 or more, or None')
  run = _Run(
    engine, chat, make_environment, limits, sampling, infra_retries,
    on_group, draw, in_flight or engine.n_slots, stats or CollectStats(),
    Calls(tool_threads, tool_seconds),
  )  # fmt: skip
  run.enter(tasks, group_size, seed, prefixes)
  try:
    run.loop()
  finally:
    run.end()
  run.count(time.monotonic() - began)
  return [Group(g.task, draw, tuple(g.done)) for g in run.groups]


class _Run:
  """The event loop of one `collect`."""

  def __init__(
    self, engine, chat, make_environment, limits, sampling, infra_retries,
    on_group, draw, in_flight, stats, calls,
  ):  # fmt: skip
    self.engine, self.chat, self.limits = engine, chat, limits
    self.make_environment, self.sampling = make_environment, sampling
    self.infra_retries, self.on_group = infra_retries, on_group
    self.draw, self.in_flight, self.stats = draw, in_flight, stats
    self.calls = calls
    self.groups: list[_Group] = []
    self.seats = Seats(engine, sampling)
    self.waiting: deque[_Episode] = deque()  # not begun
    self.running: set[_Episode] = set()

  def enter(self, tasks, group_size, seed, prefixes) -> None:
    """Puts the episodes of all groups in line."""
    if group_size < 1 or len({t.id for t in tasks}) != len(tasks):
      raise ValueError(
        f'{len(tasks)} tasks, {len({t.id for t in tasks})} different ids, '
        f'group size {group_size}: ids must be unique within a draw, groups '
        'not empty'
      )
    for i, task in enumerate(tasks):
      begin = [
        Trajectory(task, draw=self.draw, sample=k) for k in range(group_size)
      ]
      if prefixes is not None:
        begin = prefixes[i]
      group = _Group(task, [None] * len(begin))
      self.groups.append(group)
      for k, first in enumerate(begin):
        e = _Episode(first, group, k)
        e.seat.key = trajectory_key(
          seed, first.draw, task.id, first.sample, first.branch
        )
        self.waiting.append(e)

  def count(self, seconds: float) -> None:
    """Adds to the stats what it all cost."""
    stats, seats = self.stats, self.seats
    stats.calls_given_up += self.calls.n_given_up
    stats.seconds += seconds
    stats.tokens_reprefill += seats.tokens_reprefill
    stats.parked_bytes = max(stats.parked_bytes, seats.parked_bytes)

  def loop(self) -> None:
    while self.waiting or self.running:
      while self.waiting and len(self.running) < self.in_flight:
        e = self.waiting.popleft()
        self.running.add(e)
        self._begin(e)
      self.seats.place()
      if len(self.seats.ready) == len(self.running):
        raise RuntimeError(
          f'all {self.engine.n_slots} slots are held by somebody else: release '
          'them before collect'
        )
      busy = bool(self.seats.decoding)
      for e, segment in self.seats.step():
        self._advance(e, lambda segment=segment: segment)
      began = time.monotonic()
      for e, result in self._returned(block=not busy):
        self._advance(e, result)
      if not busy:
        self.stats.waiting_seconds += time.monotonic() - began

  def _returned(self, block: bool) -> list[tuple[_Episode, Callable[[], Any]]]:
    """Whose calls came back, or were given up; waits for one if asked to."""
    return [
      (call.owner, call.result)
      for call in self.calls.ended(block)
      if call.owner is not None
    ]

  # ---- an episode's way ---------------------------------------------------

  def _begin(self, e: _Episode) -> None:
    e.attempts += 1
    e.scored = None
    e.loop = episode(self.chat, self.limits, e.first)
    self._want(e, next(e.loop))

  def _advance(self, e: _Episode, result: Callable[[], Any]) -> None:
    """Gives an episode what it waited for, and does what it wants next.

    The one catch per episode: whatever an environment or a chat raised ends
    as a status with its traceback, and never leaves the loop.
    """
    try:
      done = self._send(e, result)
    except InfraError as error:
      self._infra(e, error)
    except KeyboardInterrupt:  # of a person, who wants the run to end
      raise
    except BaseException as error:  # SystemExit too: no tool ends a run
      self._fail(e, Status.ENVIRONMENT_ERROR, error)
    else:
      if done is not None:
        self._close(e, done)

  def _send(self, e: _Episode, result: Callable[[], Any]) -> Trajectory | None:
    """One step of an episode; its trajectory, if that was the last one."""
    try:
      value = result()
    except StopIteration as error:  # an environment's own, not the episode's
      raise RuntimeError('the environment raised StopIteration') from error
    if e.scored is not None:
      if not isinstance(value, Reward):
        raise TypeError(
          f'verify returned {value!r}: an environment returns a Reward'
        )
      return e.scored.append(reward=value)
    try:
      request = e.loop.send(value)
    except StopIteration as stop:
      return self._score(e, stop.value)
    self._want(e, request)
    return None

  def _want(self, e: _Episode, request: Request) -> None:
    """Does what an episode asks for."""
    e.request = request
    if isinstance(request, Reset):
      self._call(e, 'reset', _reset, e, self.make_environment)
    elif isinstance(request, Act):
      self._call(e, 'step', e.environment.step, request.turn)
    elif isinstance(request, Decode):
      self.seats.want(e.seat, request)

  def _call(self, e: _Episode, name: str, function: Callable, *args) -> None:
    function = functools.partial(function, *args)
    late = functools.partial(_close_environment, e)
    e.call = self.calls.submit(Call(name, function, e, late))

  def _score(self, e: _Episode, trajectory: Trajectory) -> Trajectory | None:
    """Asks for the reward; the trajectory itself, if it is due none."""
    if not trajectory.status.reward_trustworthy:
      return trajectory
    e.scored = trajectory
    self.seats.leave(e.seat)  # whoever scores needs no slot
    self._call(e, 'verify', e.environment.verify, trajectory.status)
    return None

  def _infra(self, e: _Episode, error: InfraError) -> None:
    """Runs the episode again from its start, or gives it up as such."""
    if isinstance(error, Hung) or e.attempts > self.infra_retries:
      self.stats.infra_failures += 1
      self._fail(e, Status.INFRA_FAILURE, error)
      return
    self.stats.retries += 1
    e.loop.close()
    self._close_later(e)
    self.seats.leave(e.seat)
    self._begin(e)

  def _fail(self, e: _Episode, status: Status, error: BaseException) -> None:
    e.loop.close()
    trajectory = e.request.trajectory if e.scored is None else e.scored
    text = ''.join(traceback.format_exception(error))
    self._close(e, trajectory.append(status=status, reward=None, error=text))

  def _close(self, e: _Episode, trajectory: Trajectory) -> None:
    """Frees what the episode held and puts its trajectory into its group."""
    self.running.discard(e)
    self.seats.leave(e.seat)
    sandboxes = _sandbox_records(e.environment)
    self._close_later(e)
    info = {
      **trajectory.info,
      'past_tokens': e.seat.shared,
      'sampling': dataclasses.asdict(self.sampling),
      'attempts': e.attempts,
    }
    done = e.group.done
    done[e.index] = trajectory.append(info=info, sandboxes=sandboxes)
    if any(t is None for t in done):
      return
    for prompt in e.group.prompts.values():
      self.seats.forget(prompt)
    if self.on_group:
      self.on_group(Group(e.group.task, self.draw, tuple(done)))

  def _close_later(self, e: _Episode) -> None:
    """Closes an environment, unless a call of it hangs.

    It is never called from two threads: the one that hangs closes it.
    """
    if e.environment is not None and not e.call.given_up:
      self.calls.submit(Call('close', e.environment.close))
      e.environment = None

  def end(self) -> None:
    """Frees what episodes hold that an error cut off; waits for all calls."""
    for e in self.running:
      self.seats.leave(e.seat)
      if e.loop is not None:
        e.loop.close()
    while self.running or self.calls.n_open:
      for e in [e for e in self.running if e.call is None or e.call.is_over]:
        self.running.remove(e)
        self._close_later(e)
      self.calls.ended(block=True)


def _reset(e: _Episode, make_environment: Callable[[], Environment]):
  e.environment = make_environment()
  return e.environment.reset(e.request.task)


def _sandbox_records(environment: Environment | None) -> tuple:
  """What it recorded of its sandboxes; nothing it raises ends the run."""
  try:
    return tuple(getattr(environment, 'sandbox_records', tuple)())
  except Exception:
    _log.warning('sandboxes were not recorded', exc_info=True)
    return ()


def _close_environment(e: _Episode) -> None:
  if e.environment is not None:
    e.environment.close()
