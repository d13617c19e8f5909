"""Sandboxes on the machines of a Ray cluster, behind the same protocol.

Floor 1, env/sandbox; Ray is imported here alone. On each machine of the
cluster one actor holds this process's sandboxes, opened there by Docker or
bubblewrap, and does what is asked of them here. The actor's process is their
owner: when this process ends, in whatever way, Ray ends its actors, the
streams end with them, and so do the sandboxes.

Needs the extra `fleet`. Who starts the cluster (`ray start`), or connects to
it (`ray.init`), says how large it is; without that, this machine is one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentjax.env import sandbox as opening
from agentjax.env.base import InfraError
from agentjax.env.sandbox.bounds import shielded
from agentjax.env.sandbox.owner import UNTAGGED, Tag
from agentjax.env.sandbox.reaper import Reaper
from agentjax.env.sandbox.spec import (
  Call,
  CallResult,
  Died,
  Fetched,
  HostDeadline,
  SandboxBug,
  SandboxSpec,
  SandboxUnavailable,
  StartFailed,
)

try:
  import ray
except ImportError:  # the extra is not installed: `open_fleet` says so
  ray = None

_START_S = 120.0
_FILES_S = 30.0
_CLOSE_S = 10.0
# That a message may take, beyond what the sandbox there allows itself.
_WAY_S = 10.0
_THREADS = 256  # calls at once in an actor; each waits for its sandbox


class _Holder:
  """The actor: holds sandboxes and sessions by number, for many threads.

  Failures come back as values: an exception would come wrapped, with the
  traceback of another machine in its text, and not as the kind that it is.
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._held: dict[int, Any] = {}
    self._unwanted: set[int] = set()
    self._reaper = Reaper()

  def open(
    self, number: int, spec: SandboxSpec, backend: str, tag: Tag
  ) -> tuple[str, Any]:
    def opened():
      said = dataclasses.asdict(tag)
      sandbox = opening.open_sandbox(spec, backend, **said)
      with self._lock:
        self._held[number] = sandbox
        late = number in self._unwanted
      if late:  # who asked has given up meanwhile
        self.close(number)
      return dict(sandbox.facts)

    return _outcome(opened)

  def ask(self, number: int, name: str, arguments: tuple) -> tuple[str, Any]:
    return _outcome(lambda: getattr(self._held[number], name)(*arguments))

  def session(self, number: int, new: int, kind: str) -> tuple[str, Any]:
    def opened():
      self._held[new] = self._held[number].session(kind)
      return self._held[new].alive

    return _outcome(opened)

  def run(self, number: int, text: str, timeout_s: float) -> tuple[str, Any]:
    def ran():
      session = self._held[number]
      return session.run(text, timeout_s), session.alive

    return _outcome(ran)

  def close(self, number: int) -> tuple[str, Any]:
    with self._lock:
      held = self._held.pop(number, None)
      if held is None:
        self._unwanted.add(number)
      else:
        self._unwanted.discard(number)
    return _outcome(held.close if held else lambda: None)


@dataclasses.dataclass(eq=False)
class _Machine:
  """A machine of the cluster, and the actor that holds sandboxes on it."""

  node: str
  processors: float
  actor: Any
  load: int = 0


class _Fleet:
  """The machines that this process uses; thread-safe."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._machines: dict[str, _Machine] = {}
    self.numbers = itertools.count(1)

  def take(self, resource: str | None) -> _Machine:
    """The least loaded machine for its processors; counted as taken."""
    with self._lock:
      alive = {n['NodeID']: n for n in ray.nodes() if n['Alive']}
      for node in set(self._machines) - set(alive):
        del self._machines[node]
      found = [
        self._machines.get(node) or self._begin(node, facts['Resources'])
        for node, facts in alive.items()
        if resource is None or resource in facts['Resources']
      ]
      if not found:
        raise SandboxUnavailable(
          f'no machine of the Ray cluster has the resource {resource!r}: start '
          f'one with `ray start --resources=\'{{"{resource}": 1}}\'`'
        )
      least = min(found, key=lambda m: m.load / max(1.0, m.processors))
      least.load += 1
      return least

  def give_back(self, machine: _Machine) -> None:
    with self._lock:
      machine.load -= 1

  def forget(self, machine: _Machine) -> None:
    """Its actor is gone: who wants it next gets another one."""
    with self._lock:
      if self._machines.get(machine.node) is machine:
        del self._machines[machine.node]

  def _begin(self, node: str, resources: Mapping[str, float]) -> _Machine:
    from ray.util import scheduling_strategies

    on = scheduling_strategies.NodeAffinitySchedulingStrategy
    # Never started again by Ray: what it held would not come back with it.
    actor = ray.remote(_Holder).options(
      num_cpus=0, max_concurrency=_THREADS, max_restarts=0, max_task_retries=0,
      scheduling_strategy=on(node, soft=False),
    ).remote()  # fmt: skip
    machine = _Machine(node, resources.get('CPU', 1.0), actor)
    self._machines[node] = machine
    return machine


@functools.cache
def _fleet(job: str) -> _Fleet:  # by job, as actors end with it
  return _Fleet()


def open_fleet(
  spec: SandboxSpec,
  tag: Tag = UNTAGGED,
  *,
  backend: str = 'auto',
  resource: str | None = None,
  start_timeout_s: float = _START_S,
) -> FleetSandbox:
  """Starts a sandbox on the least loaded machine of the cluster.

  Args:
    backend: there, as in `open_sandbox`.
    resource: that a machine must have, by the name that its `ray start` gave;
      None is any machine.

  Raises:
    SandboxUnavailable: no machine. StartFailed: the machine did not answer in
      time. What `open_sandbox` raises there.
  """
  if ray is None:
    raise SandboxUnavailable(
      'Ray is not installed: pip install "agentjax[fleet]"'
    )
  if not ray.is_initialized():
    ray.init(
      include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
  fleet = _fleet(ray.get_runtime_context().get_job_id())
  machine, number = fleet.take(resource), next(fleet.numbers)
  sandbox = FleetSandbox(spec, fleet, machine, number)
  try:
    facts = sandbox.open(backend, tag, start_timeout_s)
  except BaseException as error:
    sandbox.close()
    if isinstance(error, (Died, HostDeadline)):
      raise StartFailed(
        f'no sandbox on machine {machine.node} of the fleet: {error}'
      ) from error
    raise
  sandbox.facts = {**facts, 'fleet': machine.node}
  return sandbox


class FleetSandbox:
  """Implements `Sandbox`, over an actor that holds the real one."""

  def __init__(
    self, spec: SandboxSpec, fleet: _Fleet, machine: _Machine, number: int
  ):
    self.spec = spec
    self.facts: Mapping[str, Any] = {}
    self._fleet, self._machine, self._number = fleet, machine, number
    self._closed = False
    self._failure: InfraError | None = None

  def open(self, backend: str, tag: Tag, seconds: float) -> dict[str, Any]:
    """Starts the real one; its facts."""
    return self._remote('open', self.spec, backend, tag, seconds=seconds)

  def call(self, call: Call) -> CallResult:
    """See `Sandbox.call`."""
    return self._ask('call', call, seconds=call.timeout_s)

  def session(self, kind: str) -> FleetSession:
    """See `Sandbox.session`."""
    new = next(self._fleet.numbers)
    alive = self._remote('session', new, kind, seconds=_FILES_S)
    return FleetSession(
      kind, alive, functools.partial(self._remote, number=new)
    )

  def put(self, files: Mapping[str, bytes], mode: int = 0o644) -> CallResult:
    """See `Sandbox.put`."""
    return self._ask('put', dict(files), mode)

  def get(self, paths: Sequence[str], max_bytes: int = 8 << 20) -> Fetched:
    """See `Sandbox.get`."""
    return self._ask('get', list(paths), max_bytes)

  def put_tar(self, data: bytes) -> CallResult:
    """See `Sandbox.put_tar`."""
    return self._ask('put_tar', data)

  def get_tar(
    self, paths: Sequence[str], max_bytes: int = 8 << 20
  ) -> tuple[bytes, Mapping[str, str]]:
    """See `Sandbox.get_tar`."""
    return self._ask('get_tar', list(paths), max_bytes)

  def snapshot(self, *arguments: Any) -> Any:
    """See `Sandbox.snapshot`."""
    return self._ask('snapshot', *arguments)

  def restore(self, snapshot: Any) -> None:
    """Begins with the files of a snapshot, as `open_sandbox(snapshot=...)`."""
    self._ask('restore', snapshot)

  def close(self) -> None:
    """See `Sandbox.close`."""
    if not self._closed:
      self._closed = True
      shielded(2 * _CLOSE_S, self._end)

  def __enter__(self) -> FleetSandbox:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def _ask(self, name: str, *arguments: Any, seconds: float = _FILES_S) -> Any:
    return self._remote('ask', name, arguments, seconds=seconds)

  def _remote(
    self, method: str, *arguments: Any, seconds: float, number: int = 0
  ) -> Any:
    """What the actor's method returns, of this sandbox or another number."""
    if self._closed:
      raise SandboxBug(f'{method!r} on a closed sandbox')
    if self._failure is not None:
      raise self._failure
    ask = getattr(self._machine.actor, method).remote
    try:
      reply = ask(number or self._number, *arguments)
      return _answer(reply, seconds + self.spec.grace_s + _WAY_S)
    except InfraError as error:
      self._failure = error
      if isinstance(error, Died):
        self._look()
      raise

  def _look(self) -> None:
    """Was it the sandbox that died, or its actor, with all that it held?"""
    try:
      nothing = self._machine.actor.close.remote(0)
      ray.get(nothing, timeout=_CLOSE_S)
    except ray.exceptions.GetTimeoutError:
      pass  # busy, or hangs: not for this sandbox to decide
    except ray.exceptions.RayError:
      self._fleet.forget(self._machine)

  def _end(self) -> None:
    self._fleet.give_back(self._machine)
    try:
      ended = self._machine.actor.close.remote(self._number)
      ray.get(ended, timeout=_CLOSE_S)
    except ray.exceptions.RayError:
      pass  # the actor is gone, and it with it; or it ends when it can


class FleetSession:
  """Implements `Session`."""

  def __init__(self, kind: str, alive: bool, remote: Callable[..., Any]):
    self.kind, self.alive = kind, alive
    self._remote = remote

  def run(self, text: str, timeout_s: float = 30.0) -> CallResult:
    """See `Session.run`."""
    result, self.alive = self._remote('run', text, timeout_s, seconds=timeout_s)
    return result

  def close(self) -> None:
    """See `Session.close`."""
    if self.alive:
      self.alive = False
      try:
        self._remote('close', seconds=_FILES_S)
      except (InfraError, SandboxBug):
        pass  # it has ended with its sandbox


def _outcome(function: Any) -> tuple[str, Any]:
  try:
    return 'value', function()
  except (InfraError, SandboxBug, ValueError) as error:
    return 'error', (type(error), str(error))


def _answer(reply: Any, timeout_s: float) -> Any:
  """The value of an actor's reply.

  Raises:
    Died: the actor has ended. HostDeadline: no reply in time. What its
      sandbox raised.
  """
  try:
    kind, value = ray.get(reply, timeout=timeout_s)
  except ray.exceptions.GetTimeoutError:
    raise HostDeadline(f'no reply of the fleet in {timeout_s:g} s') from None
  except ray.exceptions.RayError as error:
    said = str(error).strip().split('\n', 1)[0]
    raise Died(f'the actor that held the sandbox is gone: {said}') from error
  if kind == 'error':
    failure, text = value
    raise failure(text)
  return value
