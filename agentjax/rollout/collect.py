"""Many episodes over few slots: all concurrency of the project is here.

Floor 2, rollout/. One thread (the caller's) drives the device; a pool runs
environments. A slot whose turn ended waits for its tool while the others go on
decoding. A group's prompt is prefilled once and forked. Nothing here depends
on time: when a tool returns, and which slot an episode sits in, change no
trajectory (design promise 5).
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

import numpy as np

from agentjax.env.base import Environment, InfraError
from agentjax.rollout.engine import Engine, Mark
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
from agentjax.types import Group, Status, Task, Trajectory


@dataclasses.dataclass
class CollectStats:
  """Of one `collect`: seconds of the device thread, and counts."""

  seconds: float = 0.0
  waiting_seconds: float = 0.0  # no slot had a token to sample
  retries: int = 0  # episodes run again after an InfraError
  infra_failures: int = 0  # episodes given up after the retries


class _Episode:
  """One episode on its way: its generator, its slot, its environment."""

  def __init__(self, trajectory: Trajectory, group: _Group, index: int):
    self.first = trajectory
    self.group = group
    self.index = index
    self.slot: int | None = None
    self.filled = 0  # tokens of the trajectory that are in the slot
    self.environment: Environment | None = None
    self.prompt: Mark | None = None  # where its slot's row holds the prompt
    self.attempts = 0
    self.loop: Generator | None = None
    self.request: Request | None = None  # what it waits for
    self.future: Future | None = None  # of the environment's last call
    self.scored: Trajectory | None = None  # ended, waits for its reward
    self.key = np.zeros(2, np.uint32)


@dataclasses.dataclass
class _Group:
  task: Task
  done: list[Trajectory | None]
  holder: Mark | None = None  # a slot whose row begins with the prompt


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
  tool_threads: int = 8,
  infra_retries: int = 2,
  prefixes: Sequence[Sequence[Trajectory]] | None = None,
  on_group: Callable[[Group], None] | None = None,
  stats: CollectStats | None = None,
) -> list[Group]:
  """Makes `group_size` trajectories of each task.

  Args:
    seed, draw: with task id, sample and branch they key the sampling.
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
  run = _Run(
    engine, chat, make_environment, limits, sampling, infra_retries,
    on_group, draw, stats or CollectStats(),
  )  # fmt: skip
  groups = []
  for i, task in enumerate(tasks):
    group = _Group(task, [None] * group_size)
    groups.append(group)
    for k in range(group_size):
      first = Trajectory(task, draw=draw, sample=k)
      if prefixes is not None:
        first = prefixes[i][k]
      e = _Episode(first, group, k)
      e.key = trajectory_key(seed, first.draw, task.id, k, first.branch)
      run.waiting.append(e)
  with ThreadPoolExecutor(tool_threads, 'agentjax-tool') as pool:
    try:
      run.loop(pool)
    finally:
      run.abandon(pool)
  run.stats.seconds += time.monotonic() - began
  return [Group(g.task, draw, tuple(g.done)) for g in groups]


class _Run:
  """The event loop of one `collect`."""

  def __init__(
    self, engine, chat, make_environment, limits, sampling, infra_retries,
    on_group, draw, stats,
  ):  # fmt: skip
    self.engine, self.chat, self.limits = engine, chat, limits
    self.make_environment, self.sampling = make_environment, sampling
    self.infra_retries, self.on_group = infra_retries, on_group
    self.draw, self.stats = draw, stats
    self.waiting: deque[_Episode] = deque()
    self.running: set[_Episode] = set()
    self.decoding: dict[int, _Episode] = {}
    self.results: queue.SimpleQueue = queue.SimpleQueue()

  def loop(self, pool: ThreadPoolExecutor) -> None:
    while self.waiting or self.running:
      self._admit(pool)
      if not self.running:
        raise RuntimeError(
          f'all {self.engine.n_slots} slots are held by somebody else: release '
          'them before collect'
        )
      busy = bool(self.decoding)
      began = time.monotonic()
      for e, future in self._results(block=not busy):
        self._advance(pool, e, future.result)
      if not busy:
        self.stats.waiting_seconds += time.monotonic() - began
      if self.decoding:
        for slot, segment in self.engine.step():
          e = self.decoding.pop(slot)
          e.filled += len(segment)
          self._advance(pool, e, lambda segment=segment: segment)

  def _results(self, block: bool) -> list[tuple[_Episode, Future]]:
    """Finished calls of environments; waits for one if asked to."""
    out = []
    while True:
      try:
        out.append(self.results.get(block=block and not out))
      except queue.Empty:
        return out

  # ---- an episode's way ---------------------------------------------------

  def _admit(self, pool) -> None:
    """Starts waiting episodes while there are slots, in order of tasks."""
    while self.waiting and (slot := self.engine.acquire()) is not None:
      e = self.waiting.popleft()
      e.slot = slot
      self.running.add(e)
      # The prompt is forked in now: later its holder may be overwritten.
      if e.group.holder is not None and not e.first.segments:
        self._fork_prompt(e)
      else:
        self.engine.reset(slot)
      self._begin(pool, e)

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
      value = result()
      if e.scored is not None:
        self._close(pool, e, e.scored.append(reward=value))
        return
      request = e.loop.send(value)
    except StopIteration as stop:
      self._score(pool, e, stop.value)
      return
    except InfraError as error:
      self._infra(pool, e, error)
      return
    except KeyboardInterrupt:  # of a person, who wants the run to end
      raise
    except BaseException as error:  # SystemExit too: no tool ends a run
      self._fail(pool, e, Status.ENVIRONMENT_ERROR, error)
      return
    self._want(pool, e, request)

  def _want(self, pool, e: _Episode, request: Request) -> None:
    """Does what an episode asks for."""
    e.request = request
    if isinstance(request, Reset):
      self._call(pool, e, _reset, e, self.make_environment)
    elif isinstance(request, Act):
      self._call(pool, e, e.environment.step, request.turn)
    elif isinstance(request, Decode):
      self._fill(e, request.trajectory)
      self.engine.start(
        e.slot,
        e.key,
        self.sampling,
        turn_budget=request.turn_budget,
        trajectory_budget=request.trajectory_budget,
      )
      self.decoding[e.slot] = e

  def _call(self, pool, e: _Episode, function: Callable, *args) -> None:
    e.future = pool.submit(function, *args)
    e.future.add_done_callback(lambda f: self.results.put((e, f)))

  def _score(self, pool, e: _Episode, trajectory: Trajectory) -> None:
    if trajectory.status.reward_trustworthy:
      e.scored = trajectory
      self._call(pool, e, e.environment.verify, trajectory.status)
    else:
      self._close(pool, e, trajectory)

  def _infra(self, pool, e: _Episode, error: InfraError) -> None:
    """Runs the episode again from its start, or gives it up as such."""
    if e.attempts > self.infra_retries:
      self.stats.infra_failures += 1
      self._fail(pool, e, Status.INFRA_FAILURE, error)
      return
    self.stats.retries += 1
    e.loop.close()
    _close_later(pool, e)
    if e.prompt is not None:  # the slot's own row still begins with it
      e.prompt = self.engine.fork(e.prompt, e.slot)
      e.filled = len(e.prompt.tokens)
    else:
      self.engine.reset(e.slot)
      e.filled = 0
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
    self.engine.release(e.slot)
    _close_later(pool, e)
    info = {
      **trajectory.info,
      'sampling': dataclasses.asdict(self.sampling),
      'attempts': e.attempts,
    }
    done = e.group.done
    done[e.index] = trajectory.append(info=info)
    if self.on_group and all(t is not None for t in done):
      self.on_group(Group(e.group.task, self.draw, tuple(done)))

  def abandon(self, pool: ThreadPoolExecutor) -> None:
    """Frees slots and environments of episodes that an error cut off."""
    for e in self.running:
      e.loop.close()
      self.engine.release(e.slot)
      if e.future is None:
        _close_later(pool, e)
      else:  # an environment is never called from two threads
        e.future.add_done_callback(lambda _, e=e: _close_environment(e))

  # ---- what a slot holds --------------------------------------------------

  def _fill(self, e: _Episode, trajectory: Trajectory) -> None:
    """Brings the slot to the trajectory's end: only what is not in it yet."""
    tokens = trajectory.tokens()
    opens = len(trajectory.segments) == 1 and not e.first.segments
    if opens and e.prompt and not np.array_equal(e.prompt.tokens, tokens):
      # This environment opened otherwise than its group's first one did.
      self.engine.reset(e.slot)
      e.filled, e.prompt = 0, None
    if e.filled < len(tokens):
      self.engine.extend(e.slot, tokens[e.filled :])
      e.filled = len(tokens)
    if opens and e.prompt is None:
      e.prompt = self.engine.mark(e.slot)
      if e.group.holder is None:
        e.group.holder = e.prompt
        for other in self.running:
          if other.group is e.group and other.filled == 0:
            if not other.first.segments:
              self._fork_prompt(other)

  def _fork_prompt(self, e: _Episode) -> None:
    """Copies the group's prompt into the episode's slot, which holds it on.

    Slots are taken in the order of tasks, so that while a group has waiting
    episodes nobody else overwrites the slot that was last given its prompt.
    """
    e.prompt = e.group.holder = self.engine.fork(e.group.holder, e.slot)
    e.filled = len(e.prompt.tokens)


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
