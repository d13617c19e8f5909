"""Functions run apart: in processes of their own, which may be killed.

Floor 1, env. What judges a policy's text may be made to work for ever by that
text (`9^{9^{9^9}}`), in C code that no signal interrupts. Here it works in a
process with a budget of processor time and of memory. Who uses the budget up
did so with the arguments, which is the policy's doing (`Exhausted`); a worker
that gets no processor, or is killed from outside, is the infrastructure's
(`InfraError`). The time budget is counted in processor seconds, so that a busy
machine changes no reward. This file knows no mathematics; the process's side
is `apart_worker`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from agentjax.env.base import InfraError

_MAX_REPLY = 1 << 20
_STARTING_S = 30.0  # processor seconds that importing may take


class Exhausted(Exception):
  """The arguments made the function use up its budget, or crash."""


class _Died(Exception):
  """A worker ended without an answer; the text says how."""


class Apart:
  """Calls one function in worker processes. Safe to use from many threads.

  Args:
    function: 'module:name', imported by the workers alone. It takes and
      returns what JSON can say.
    workers: processes at most; they start as they are needed, and a call
      waits for a free one.
    cpu_s: processor seconds of one call, rounded up to whole ones.
    wall_s: seconds of the clock, waiting for a worker and for its answer
      each; for trouble that uses no processor.
    memory_bytes: address space of a worker.
    imports: modules that a worker imports as it starts, so that no call pays
      for them.
  """

  def __init__(
    self,
    function: str,
    *,
    workers: int = 2,
    cpu_s: float = 5.0,
    wall_s: float = 60.0,
    memory_bytes: int = 2 << 30,
    imports: Sequence[str] = (),
  ):
    if workers < 1 or min(cpu_s, wall_s, memory_bytes) <= 0:
      raise ValueError(
        f'workers {workers}, cpu_s {cpu_s}, wall_s {wall_s}, memory_bytes '
        f'{memory_bytes}: give numbers above 0'
      )
    self._function, self._wall_s = function, wall_s
    limits = cpu_s, memory_bytes, _STARTING_S
    self._arguments = (*map(str, limits), *imports)
    self._free: queue.LifoQueue = queue.LifoQueue()
    for _ in range(workers):
      self._free.put(None)  # a place in which no worker was started yet
    self._lock = threading.Lock()
    self._running: set[_Worker] = set()
    self._closed = False

  def __call__(self, *arguments: Any) -> Any:
    """The function's value.

    Raises:
      Exhausted: these arguments use up the budget of time or memory, or crash
        the worker twice.
      InfraError: no worker came free or answered in `wall_s`, or workers are
        killed from outside.
      RuntimeError: the function raised or cannot be imported, which is a fault
        in it; or this is closed.
    """
    request = json.dumps(arguments).encode() + b'\n'
    died = ''
    for _ in range(2):  # a worker that was killed by accident is one accident
      worker = self._take()
      try:
        return worker.ask(request, time.monotonic() + self._wall_s)
      except _Died as error:
        died = str(error)
      finally:
        self._give_back(worker)
    if died.startswith('SIGKILL'):
      raise InfraError(f'workers of {self._function} are killed from outside')
    raise Exhausted(f'the worker crashed: {died}')

  def close(self) -> None:
    """Ends the workers, those at work too. Idempotent, never raises."""
    with self._lock:
      self._closed = True
      running, self._running = list(self._running), set()
    for worker in running:
      worker.end()

  def __enter__(self) -> Apart:
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _take(self) -> _Worker:
    try:
      worker = self._free.get(timeout=self._wall_s)
    except queue.Empty:
      raise InfraError(
        f'no worker of {self._function} came free in {self._wall_s:g} s'
      ) from None
    try:
      with self._lock:
        if self._closed:
          raise RuntimeError(f'calls of {self._function} are closed')
        if worker is None or not worker.alive:
          worker = _Worker(self._function, self._arguments)
          self._running.add(worker)
      return worker
    except BaseException:
      self._free.put(None)
      raise

  def _give_back(self, worker: _Worker) -> None:
    if worker.alive:
      self._free.put(worker)
      return
    worker.end()
    with self._lock:
      self._running.discard(worker)
    self._free.put(None)


class _Worker:
  """One process. `alive` is False once it may not be asked again."""

  def __init__(self, function: str, arguments: tuple[str, ...]):
    worker = 'agentjax.env.apart_worker'
    path = os.pathsep.join(filter(None, sys.path))
    try:
      self._process = subprocess.Popen(
        [sys.executable, '-m', worker, function, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Generators that walk over sets give the same in every worker.
        env=os.environ | {'PYTHONPATH': path, 'PYTHONHASHSEED': '0'},
      )
    except OSError as error:
      raise InfraError(f'no process for {function}: {error}') from error
    self.alive, self._started = True, False

  def ask(self, request: bytes, deadline: float) -> Any:
    """See `Apart.__call__`."""
    done = False
    try:
      if not self._started:
        self._start(deadline)
      try:
        self._process.stdin.write(request)
        self._process.stdin.flush()
      except OSError:
        self._raise_death()
      reply = json.loads(self._line(deadline))
      done = reply.get('exhausted') is None
    finally:
      # After anything but an answer it may be in the middle of another.
      self.alive = done
    if 'exhausted' in reply:
      raise Exhausted(reply['exhausted'])
    if 'error' in reply:
      raise RuntimeError(reply['error'])
    return reply['value']

  def _start(self, deadline: float) -> None:
    """Waits for the worker's word that its function is there.

    Raises:
      RuntimeError: it is not, for instance because a package is missing. That
        is nobody's answer, and no call can mend it.
    """
    try:
      said = json.loads(self._line(deadline)).get('error')
    except (Exhausted, _Died) as error:
      if str(error).startswith('SIGKILL'):
        raise
      said = str(error)
    if said:
      raise RuntimeError(f'a worker does not start: {said}')
    self._started = True

  def _line(self, deadline: float) -> bytes:
    reply, pipe = b'', self._process.stdout
    while not reply.endswith(b'\n'):
      left = deadline - time.monotonic()
      if left <= 0 or not select.select([pipe], [], [], left)[0]:
        raise InfraError(
          'a worker did not answer in time and used no processor'
        )
      piece = os.read(pipe.fileno(), 1 << 16)
      reply += piece
      if not piece:
        self._raise_death()
      if len(reply) > _MAX_REPLY:
        raise RuntimeError(f'a reply of more than {_MAX_REPLY} bytes')
    return reply

  def _raise_death(self) -> None:
    """Raises what became of a process whose pipe is closed."""
    try:
      code = self._process.wait(10)
    except subprocess.TimeoutExpired:
      raise InfraError('a worker closed its pipe and goes on') from None
    if code == -signal.SIGXCPU:
      raise Exhausted('the processor time is used up')
    name = signal.Signals(-code).name if code < 0 else f'exit code {code}'
    raise _Died(name)

  def end(self) -> None:
    """Kills the process and waits for its end. Idempotent, never raises."""
    self.alive = False
    with contextlib.suppress(OSError):
      self._process.kill()
    self._process.wait()
    for pipe in (self._process.stdin, self._process.stdout):
      with contextlib.suppress(OSError):
        pipe.close()
