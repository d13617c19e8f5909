"""Warm sandboxes: started ahead of need, used by one episode each.

Floor 1, env/sandbox. A start takes a large part of a second and is paid while
nobody waits; `acquire` hands out what is ready. What an episode has used is
destroyed, never handed on. It opens sandboxes by one function and knows no
backend; engines that hang are found by watching, before an episode is given
something on them.

A pool is an Opener. One is made for each process and kind of sandbox
(`pools.shared`), and closed at the end of the run, or of the process.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agentjax.env import sandbox as opening
from agentjax.env.base import InfraError
from agentjax.env.sandbox import journal
from agentjax.env.sandbox.bounds import shielded, together
from agentjax.env.sandbox.breaker import Breaker
from agentjax.env.sandbox.leased import Leased
from agentjax.env.sandbox.owner import Tag
from agentjax.env.sandbox.pool_stats import PoolStats, Tally
from agentjax.env.sandbox.reaper import Reaper
from agentjax.env.sandbox.spec import (
  LASTING,
  EngineUnavailable,
  PoolExhausted,
  Sandbox,
  SandboxBug,
  SandboxSpec,
)

if TYPE_CHECKING:
  from agentjax.env.sandbox.engines import Engines

_WATCH_S = 2.0
# After a start that failed, doubled with each one in a row up to the most.
_REST_S, _MOST_REST_S = 0.2, 10.0
_CLOSE_S = 20.0
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Failure:
  error: Exception
  at: float  # monotonic
  rest_until: float

  @property
  def lasts(self) -> bool:
    return not isinstance(self.error, InfraError) or isinstance(
      self.error, LASTING
    )


class Pool:
  """Sandboxes of one spec; thread-safe. Nothing is started before `acquire`.

  Args:
    warm: sandboxes to have idle. starters: that are started at once; on two
      processors more than 4 only get in each other's way.
    most: sandboxes at a time, idle and used; and callers that wait. At least
      as many as there are episodes in flight.
    deadline_s: that `acquire` waits, unless told otherwise; longer than an
      engine needs to be started again.
    idle_s: after which one that nobody took is replaced, or if nobody has
      taken any for as long, is not.
    run, role: of the labels. hosts: of Docker engines; empty is that of
      DOCKER_HOST. floor_bytes: see `Engine`; None is its default.
    breaker: stops starts and acquires while too many fail.
  """

  def __init__(
    self,
    spec: SandboxSpec | None = None,
    backend: str = 'auto',
    *,
    warm: int = 4,
    starters: int = 4,
    most: int = 256,
    deadline_s: float = 120.0,
    idle_s: float = 300.0,
    run: str = 'none',
    role: str = 'agent',
    hosts: Sequence[str] = (),
    floor_bytes: int | None = None,
    breaker: Breaker | None = None,
  ):
    if warm < 0 or starters < 1 or most <= warm:
      raise ValueError(
        f'warm {warm}, starters {starters}, most {most}: give 0 or more, 1 or '
        'more, and more than warm'
      )
    self.spec, self.backend = spec or SandboxSpec(), backend
    self.breaker = breaker or Breaker()
    self._warm, self._starters, self._most = warm, starters, most
    self._deadline_s, self._idle_s = deadline_s, idle_s
    self._tag = Tag(run, role)
    self._hosts, self._floor = tuple(hosts), floor_bytes
    self._opener: Callable[[SandboxSpec, Tag], Sandbox] | None = None
    self._engines: Engines | None = None
    self._tally = Tally()
    self._change = threading.Condition()  # of all below
    self._idle: deque[tuple[float, Sandbox]] = deque()
    self._busy: set[Leased] = set()
    self._starting = self._waiting = 0
    self._asked = 0.0  # when `acquire` was called last, monotonic
    self._failure: _Failure | None = None
    self._threads: list[threading.Thread] = []
    self._reaper: Reaper | None = None
    self._closed = False

  def acquire(
    self, episode: str = '', deadline_s: float | None = None
  ) -> Leased:
    """A sandbox for one episode, which closes it.

    Args:
      episode: into the journal. deadline_s: to wait at most.

    Raises:
      PoolExhausted: none in time. BreakerOpen: because too many failed.
      One of `LASTING`: at once, where waiting is no use.
      SandboxBug: the pool is closed.
    """
    began = time.monotonic()
    wait_s = self._deadline_s if deadline_s is None else deadline_s
    with self._change:
      self._start()
      if self._waiting >= self._most:
        self._tally.count('others', 'exhausted')
        raise PoolExhausted(
          f'{self._waiting} callers wait for a sandbox already: raise most '
          f'({self._most}), or run fewer episodes at once'
        )
      self._waiting += 1
      self._asked = time.monotonic()
      self._change.notify_all()
      try:
        inner = self._take(began, wait_s)
      finally:
        self._waiting -= 1
      leased = Leased(
        inner, self.spec, {'episode': episode},
        called=self._called, ended=self._ended,
      )  # fmt: skip
      self._busy.add(leased)
      self._change.notify_all()
    self._tally.took('acquires', time.monotonic() - began)
    if episode and 'container' in inner.facts:
      journal.own().episode(inner.facts['container'], episode)
    return leased

  __call__ = acquire

  def stats(self) -> PoolStats:
    """What it has done so far."""
    with self._change:
      now = {
        'idle': len(self._idle),
        'starting': self._starting,
        'busy': len(self._busy),
        'opened': self.breaker.opened,
      }
    return self._tally.stats(**now)

  def close(self) -> None:
    """Ends every sandbox, those in use too. Idempotent, never raises.

    But for a KeyboardInterrupt, which comes after the work is done.
    """
    shielded(_CLOSE_S, self._end)

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  # ---- handing out --------------------------------------------------------

  def _take(self, began: float, wait_s: float) -> Sandbox:
    """An idle sandbox, as soon as there is one. Holds the condition."""
    waited = False
    while True:
      if self._closed:
        raise SandboxBug('acquire of a closed pool')
      resting = self.breaker.rest()
      while self._idle and not resting:
        ready, sandbox = self._idle.popleft()
        if not getattr(sandbox, 'is_open', True):
          self._discard(sandbox, 'lost')
        elif time.monotonic() - ready > self._idle_s:
          self._discard(sandbox, 'expired')
        else:
          return sandbox
      failed = self._failure
      if failed is not None and failed.lasts:
        # One of this caller's time, or one that is not to be tried yet.
        if failed.at >= began or time.monotonic() < failed.rest_until:
          raise _again(failed.error)
      left = began + wait_s - time.monotonic()
      if left <= 0:
        self._tally.count('others', 'exhausted')
        raise self.breaker.error() if resting else self._exhausted(wait_s)
      if not waited:
        waited = True
        self._tally.count('others', 'waits')
      self._change.wait(min(left, 0.5))

  def _exhausted(self, wait_s: float) -> PoolExhausted:
    why = ''
    if self._failure is not None:
      why = f'; the last start failed: {self._failure.error}'
    return PoolExhausted(
      f'no sandbox within {wait_s:g} s: {len(self._busy)} in use, '
      f'{self._starting} starting, {self._waiting} callers waiting, most '
      f'{self._most}{why}'
    )

  def _called(self, seconds: float, kill: str, error) -> None:
    self._tally.took('calls', seconds)
    if kill:
      self._tally.count('kills', kill)
    if error is not None:
      self._tally.count('failures', type(error).__name__)
    self.breaker.note(error)

  def _ended(self, leased: Leased, reason: str) -> None:
    self._tally.count('ends', reason)
    with self._change:
      self._busy.discard(leased)
      self._change.notify_all()

  def _discard(self, sandbox: Sandbox, reason: str) -> None:
    """Closes one that was idle, without waiting for it."""
    self._tally.count('ends', reason)
    threading.Thread(
      target=sandbox.close, name='sandbox-discard', daemon=True
    ).start()

  # ---- starting -----------------------------------------------------------

  def _start(self) -> None:
    """Starts the threads, once. Holds the condition."""
    if self._threads or self._closed:
      return
    atexit.register(self.close)
    works = [self._keep] + [self._make] * self._starters
    for work in works:
      thread = threading.Thread(target=work, name='sandbox-pool', daemon=True)
      self._threads.append(thread)
      thread.start()
    self._reaper = Reaper(self._hosts)

  def _make(self) -> None:
    """A starter: one start after another, while they are wanted."""
    while True:
      with self._change:
        while not self._closed and not self._wanted():
          self._change.wait(0.5 if self._waiting else None)
        if self._closed:
          return
        self._starting += 1
      began, sandbox, error = time.monotonic(), None, None
      try:
        sandbox = self._open()
      except Exception as failure:  # an InfraError, or a spec that cannot be
        error = failure
      with self._change:
        self._starting -= 1
        if sandbox is not None and not self._closed:
          self._tally.took('starts', time.monotonic() - began)
          self._idle.append((time.monotonic(), sandbox))
          self._failure = sandbox = None
        elif error is not None:
          self._failed(error)
        self._change.notify_all()
      self.breaker.note(error if isinstance(error, InfraError) else None)
      if sandbox is not None:  # the pool was closed meanwhile
        sandbox.close()

  def _wanted(self) -> bool:
    here = len(self._idle) + self._starting
    # One that nobody asks any more does not renew what nobody took.
    asked = time.monotonic() - self._asked < self._idle_s
    if here >= (self._warm if asked else 0) + self._waiting:
      return False
    if here + len(self._busy) >= self._most or self.breaker.rest():
      return False
    failed = self._failure
    return failed is None or time.monotonic() >= failed.rest_until

  def _failed(self, error: Exception) -> None:
    _log.warning('a sandbox does not start: %s', error)
    self._tally.count('failures', type(error).__name__)
    now, last = time.monotonic(), self._failure
    rest = 0.0 if self._engines is None else self._engines.next_try()
    if last is None:
      rest = max(rest, _REST_S)
    elif now >= last.rest_until:  # else it failed beside the last one
      rest = max(rest, min(2 * (last.rest_until - last.at), _MOST_REST_S))
    else:
      rest = max(rest, last.rest_until - now)
    self._failure = _Failure(error, now, now + rest)

  def _open(self) -> Sandbox:
    """Starts one; the backend is chosen at the first start that can be."""
    if self._opener is None:
      if self._engines is None and self.backend in ('auto', 'docker'):
        from agentjax.env.sandbox.engines import FLOOR_BYTES, Engines

        floor = FLOOR_BYTES if self._floor is None else self._floor
        self._engines = Engines(self._hosts, floor_bytes=floor)
      self._opener = opening.starter(self.spec, self.backend, self._engines)
    # As long as was asked for, from when it is handed out.
    lifetime_s = self.spec.lifetime_s + self._idle_s
    spec = dataclasses.replace(self.spec, lifetime_s=lifetime_s)
    return self._opener(spec, self._tag)

  # ---- looking after ------------------------------------------------------

  def _keep(self) -> None:
    """Replaces idle ones that nobody can use any more."""
    while True:
      with self._change:
        self._change.wait_for(lambda: self._closed, _WATCH_S)
        if self._closed:
          return
      hung = self._hanging()
      now = time.monotonic()
      with self._change:
        kept = []
        for ready, sandbox in self._idle:
          if not getattr(sandbox, 'is_open', True):
            self._discard(sandbox, 'lost')
          elif sandbox.facts.get('engine') in hung:
            self._discard(sandbox, 'lost')
          elif now - ready > self._idle_s:
            self._discard(sandbox, 'expired')
          else:
            kept.append((ready, sandbox))
        self._idle = deque(kept)
        self._change.notify_all()

  def _hanging(self) -> set[str]:
    """Names of engines that have idle ones and do not answer."""
    with self._change:
      used = {sandbox.facts.get('engine') for _, sandbox in self._idle}
    hung = set()
    for engine in self._engines.all if self._engines else ():
      if engine.name not in used:
        continue
      try:
        engine.check(self.spec)
      except EngineUnavailable as error:
        self._engines.note(engine, error)
        hung.add(engine.name)
      except InfraError:
        pass  # of the next start: what runs may go on
    return hung

  def _end(self) -> None:
    with self._change:
      self._closed = True
      idle, busy = list(self._idle), list(self._busy)
      self._idle.clear()
      self._change.notify_all()
    atexit.unregister(self.close)
    if self._reaper is not None:
      self._reaper.stop()
    for _ in idle:
      self._tally.count('ends', 'shutdown')
    ends = [sandbox.close for _, sandbox in idle]
    ends += [functools.partial(leased.close, 'shutdown') for leased in busy]
    together(self._starters, ends)
    for thread in self._threads:
      thread.join(_CLOSE_S)


def _again(error: Exception) -> Exception:
  """Another error that says the same: each caller raises its own."""
  return type(error)(*error.args)
