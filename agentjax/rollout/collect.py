"""Many episodes over few slots: all concurrency of the project is here.

Floor 2, rollout/. One thread (the caller's) drives the device; a pool runs
environments. An episode needs a slot only while it samples: one that waits for
its tool keeps its KV state in its slot while nobody else needs the slot, and
in host memory afterwards, so decoding never waits for a tool. A group's prompt
is prefilled once and forked. Nothing here depends on time: when a tool
returns, and which slot an episode sits in, change no trajectory (design
promise 5).
"""

from __future__ import annotations

import dataclasses
import queue
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from agentjax.env.base import Environment, InfraError
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
  infra_failures: int = 0  # episodes given up after the retries

  def metrics(self, engine: Stats) -> dict[str, float]:
    """These and the engine's own counts, under the names of the records."""
    sampled = engine.tokens_sampled
    return {
      'tokens_sampled': sampled,
      'tokens_prefilled': engine.tokens_prefilled,
      'tokens_recomputed': engine.tokens_recomputed,
      'tokens_reprefill': self.tokens_reprefill,
      'infra_retries': self.retries,
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
    # A given past is no group's prompt.
    self.seat = Seat(self, None if trajectory.segments else group.prompt)
    self.environment: Environment | None = None
    self.attempts = 0
    self.loop: Generator | None = None
    self.request: Request | None = None  # what it waits for
    self.future: Future | None = None  # of the environment's last call
    self.scored: Trajectory | None = None  # ended, waits for its reward


@dataclasses.dataclass
class _Group:
  task: Task
  done: list[Trajectory | None]
  prompt: SharedPrompt = dataclasses.field(default_factory=SharedPrompt)


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
    infra_retries: an InfraError runs the episode again from its start, with
      the same keys, this often; then its status is INFRA_FAILURE.
    prefixes: per task and sample, a trajectory to go on from.
    on_group: called with each group when it is complete.

  Returns:
    Groups in the order of `tasks`, trajectories in the order of `sample`.
  """
  began = time.monotonic()
  if limits.context > engine.context:
    raise ValueError(
      f'limits.context {limits.context} exceeds the engine context '
      f'{engine.context}: lower it, or raise the engine context'
    )
  if group_size < 1 or len({t.id for t in tasks}) != len(tasks):
    raise ValueError(
      f'{len(tasks)} tasks, {len({t.id for t in tasks})} different ids, group '
      f'size {group_size}: ids must be unique within a draw, groups not empty'
    )
  if in_flight is not None and in_flight < 1:
    raise ValueError(f'in_flight {in_flight}: give 1 or more, or None')
  run = _Run(
    engine, chat, make_environment, limits, sampling, infra_retries,
    on_group, draw, in_flight or engine.n_slots, stats or CollectStats(),
  )  # fmt: skip
  groups = run.groups
  for i, task in enumerate(tasks):
    group = _Group(task, [None] * group_size)
    group.prompt.members = group_size
    groups.append(group)
    for k in range(group_size):
      first = Trajectory(task, draw=draw, sample=k)
      if prefixes is not None:
        first = prefixes[i][k]
      e = _Episode(first, group, k)
      e.seat.key = trajectory_key(
        seed, first.draw, task.id, first.sample, first.branch
      )
      run.waiting.append(e)
  with ThreadPoolExecutor(tool_threads, 'agentjax-tool') as pool:
    try:
      run.loop(pool)
    finally:
      run.abandon(pool)
  run.stats.seconds += time.monotonic() - began
  run.stats.tokens_reprefill += run.seats.tokens_reprefill
  run.stats.parked_bytes = max(run.stats.parked_bytes, run.seats.parked_bytes)
  return [Group(g.task, draw, tuple(g.done)) for g in groups]


class _Run:
  """The event loop of one `collect`."""

  def __init__(
    self, engine, chat, make_environment, limits, sampling, infra_retries,
    on_group, draw, in_flight, stats,
  ):  # fmt: skip
    self.engine, self.chat, self.limits = engine, chat, limits
    self.make_environment, self.sampling = make_environment, sampling
    self.infra_retries, self.on_group = infra_retries, on_group
    self.draw, self.in_flight, self.stats = draw, in_flight, stats
    self.groups: list[_Group] = []
    self.seats = Seats(engine, sampling)
    self.waiting: deque[_Episode] = deque()  # not begun
    self.running: set[_Episode] = set()
    self.results: queue.SimpleQueue = queue.SimpleQueue()

  def loop(self, pool: ThreadPoolExecutor) -> None:
    while self.waiting or self.running:
      while self.waiting and len(self.running) < self.in_flight:
        e = self.waiting.popleft()
        self.running.add(e)
        self._begin(pool, e)
      self.seats.place()
      if len(self.seats.ready) == len(self.running):
        raise RuntimeError(
          f'all {self.engine.n_slots} slots are held by somebody else: release '
          'them before collect'
        )
      busy = bool(self.seats.decoding)
      for e, segment in self.seats.step():
        self._advance(pool, e, lambda segment=segment: segment)
      began = time.monotonic()
      for e, future in self._results(block=not busy):
        self._advance(pool, e, future.result)
      if not busy:
        self.stats.waiting_seconds += time.monotonic() - began

  def _results(self, block: bool) -> list[tuple[_Episode, Future]]:
    """Finished calls of environments; waits for one if asked to."""
    out = []
    while True:
      try:
        out.append(self.results.get(block=block and not out))
      except queue.Empty:
        return out

  # ---- an episode's way ---------------------------------------------------

  def _begin(self, pool, e: _Episode) -> None:
    e.attempts += 1
    e.scored = None
    e.loop = episode(self.chat, self.limits, e.first)
    self._want(pool, e, next(e.loop))

  def _advance(self, pool, e: _Episode, result: Callable[[], Any]) -> None:
    """Gives an episode what it waited for, and does what it wants next.

    The one catch per episode: whatever an environment or a chat raised ends
    as a status with its traceback, and never leaves the loop.
    """
    try:
      done = self._send(pool, e, result)
    except InfraError as error:
      self._infra(pool, e, error)
    except KeyboardInterrupt:  # of a person, who wants the run to end
      raise
    except BaseException as error:  # SystemExit too: no tool ends a run
      self._fail(pool, e, Status.ENVIRONMENT_ERROR, error)
    else:
      if done is not None:
        self._close(pool, e, done)

  def _send(
    self, pool, e: _Episode, result: Callable[[], Any]
  ) -> Trajectory | None:
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
      return self._score(pool, e, stop.value)
    self._want(pool, e, request)
    return None

  def _want(self, pool, e: _Episode, request: Request) -> None:
    """Does what an episode asks for."""
    e.request = request
    if isinstance(request, Reset):
      self._call(pool, e, _reset, e, self.make_environment)
    elif isinstance(request, Act):
      self._call(pool, e, e.environment.step, request.turn)
    elif isinstance(request, Decode):
      self.seats.want(e.seat, request)

  def _call(self, pool, e: _Episode, function: Callable, *args) -> None:
    e.future = pool.submit(function, *args)
    e.future.add_done_callback(lambda f: self.results.put((e, f)))

  def _score(
    self, pool, e: _Episode, trajectory: Trajectory
  ) -> Trajectory | None:
    """Asks for the reward; the trajectory itself, if it is due none."""
    if not trajectory.status.reward_trustworthy:
      return trajectory
    e.scored = trajectory
    self.seats.leave(e.seat)  # whoever scores needs no slot
    self._call(pool, e, e.environment.verify, trajectory.status)
    return None

  def _infra(self, pool, e: _Episode, error: InfraError) -> None:
    """Runs the episode again from its start, or gives it up as such."""
    if e.attempts > self.infra_retries:
      self.stats.infra_failures += 1
      self._fail(pool, e, Status.INFRA_FAILURE, error)
      return
    self.stats.retries += 1
    e.loop.close()
    _close_later(pool, e)
    self.seats.leave(e.seat)
    self._begin(pool, e)

  def _fail(
    self, pool, e: _Episode, status: Status, error: BaseException
  ) -> None:
    e.loop.close()
    trajectory = e.request.trajectory if e.scored is None else e.scored
    text = ''.join(traceback.format_exception(error))
    self._close(
      pool, e, trajectory.append(status=status, reward=None, error=text)
    )

  def _close(self, pool, e: _Episode, trajectory: Trajectory) -> None:
    """Frees what the episode held and puts its trajectory into its group."""
    self.running.discard(e)
    self.seats.leave(e.seat)
    _close_later(pool, e)
    info = {
      **trajectory.info,
      'sampling': dataclasses.asdict(self.sampling),
      'attempts': e.attempts,
    }
    done = e.group.done
    done[e.index] = trajectory.append(info=info)
    if any(t is None for t in done):
      return
    self.seats.forget(e.group.prompt)
    if self.on_group:
      self.on_group(Group(e.group.task, self.draw, tuple(done)))

  def abandon(self, pool: ThreadPoolExecutor) -> None:
    """Frees slots and environments of episodes that an error cut off."""
    for e in self.running:
      self.seats.leave(e.seat)
      if e.loop is not None:
        e.loop.close()
      if e.future is None:
        _close_later(pool, e)
      else:  # an environment is never called from two threads
        e.future.add_done_callback(lambda _, e=e: _close_environment(e))


def _reset(e: _Episode, make_environment: Callable[[], Environment]):
  e.environment = make_environment()
  return e.environment.reset(e.request.task)


def _close_later(pool: ThreadPoolExecutor, e: _Episode) -> None:
  environment, e.environment = e.environment, None
  if environment is not None:
    pool.submit(environment.close)


def _close_environment(e: _Episode) -> None:
  if e.environment is not None:
    e.environment.close()
