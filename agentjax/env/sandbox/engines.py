"""Container engines: how one is spoken to, and which one is used next.

Floor 1, env/sandbox, under `docker.py`. An `Engine` is one host with its
facts and its errors as kinds of InfraError; `Engines` are several, of which
the least loaded that works gets the next sandbox, and one that failed is left
aside for a while. Both know images and hosts, and no container.

Every request has a timeout and a connection of its own, and no lock is held
while it waits: an engine that hangs keeps nobody from another one. An engine
is reached over its Unix socket, or over TCP without TLS (through a tunnel),
because the attached stream is used as it is.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import docker
import requests

from agentjax.env.base import InfraError
from agentjax.env.sandbox.bounds import Overdue, within
from agentjax.env.sandbox.spec import (
  DiskPressure,
  EngineForbidden,
  EngineUnavailable,
  ImageMissing,
  RuntimeMissing,
  SandboxSpec,
  StartFailed,
)

ERRORS = (docker.errors.DockerException, requests.RequestException, OSError)
PING_S = 4.0  # answered without a lock: who does not, hangs
ASK_S = 20.0  # a question; it may wait for an image that is being loaded
START_S = 60.0  # a start; 7 s were seen with 16 at once on two busy cores
FLOOR_BYTES = 5 << 30
_FACTS_S = 60.0
T = TypeVar('T')


class Engine:
  """One container engine.

  Args:
    host: such as 'unix:///var/run/docker.sock' or 'tcp://10.0.0.7:2375'; None
      is that of DOCKER_HOST, or the default.
    floor_bytes: of free space below which nothing is started; looked at where
      the engine's folder is of this machine.
  """

  def __init__(self, host: str | None = None, floor_bytes: int = FLOOR_BYTES):
    self.host, self.floor_bytes = host, floor_bytes
    self._lock = threading.Lock()
    self._load = 0
    self._version: str | None = None
    self._facts: dict[str, Any] = {}
    self._facts_until = 0.0

  @property
  def name(self) -> str:
    default = os.environ.get('DOCKER_HOST') or 'unix:///var/run/docker.sock'
    return self.host or default

  @property
  def is_local(self) -> bool:
    return self.name.startswith('unix://')

  @property
  def load(self) -> float:
    """Sandboxes of this process for each processor of the engine."""
    return self._load / max(1, self._facts.get('NCPU', 1))

  def count(self, more: int) -> None:
    """`more` sandboxes begin (1) or have ended (-1) here."""
    with self._lock:
      self._load += more

  def ask(
    self, what: Callable[[docker.APIClient], T], timeout_s: float = ASK_S
  ) -> T:
    """What `what` returns of a client with this timeout for every request.

    Raises:
      EngineUnavailable: no engine. What `what` itself raises.
    """
    client = self._client(timeout_s)
    try:
      return what(client)
    finally:
      client.close()

  def check(self, spec: SandboxSpec) -> None:
    """Returns if a sandbox of `spec` can be started here.

    What it raises comes within 5 s, unless an engine that works is that slow.

    Raises:
      EngineUnavailable, EngineForbidden, ImageMissing, RuntimeMissing,
      DiskPressure.
    """
    try:
      within(5.0, lambda: self.ask(lambda client: client.ping(), PING_S))
      self._check(spec)
    except Overdue as error:
      raise EngineUnavailable(
        f'the Docker engine {self.name} hangs: {error}'
      ) from None
    except ERRORS as error:
      raise self.typed(error, spec.image) from error

  def facts(self) -> dict[str, Any]:
    """What the engine says of itself; at most a minute old."""
    if time.monotonic() > self._facts_until:
      try:
        self._facts = self.ask(lambda client: client.info())
      except ERRORS as error:
        raise self.typed(error, '') from error
      self._facts_until = time.monotonic() + _FACTS_S
    return self._facts

  def now(self) -> float:
    """The engine's own clock, in Unix seconds."""
    text = self.ask(lambda client: client.info())['SystemTime']
    return datetime.datetime.fromisoformat(text).timestamp()

  def forget(self) -> None:
    """Asks for version and facts anew next time: it may have been renewed."""
    self._version, self._facts_until = None, 0.0

  def typed(self, error: Exception, image: str) -> InfraError:
    """What an error of the engine's client means."""
    if isinstance(error, InfraError):
      return error
    if isinstance(error, docker.errors.ImageNotFound):
      return ImageMissing(
        f'the Docker engine {self.name} has no image {image!r}: build it with '
        '`python sandbox/build.py`, or pull it'
      )
    if isinstance(error, docker.errors.APIError):
      text = str(error)
      if 'no space left on device' in text or 'disk quota exceeded' in text:
        return DiskPressure(
          f'the disk of the Docker engine {self.name} is full: {error}. '
          'Remove images and containers that nobody needs'
        )
      if error.status_code in (401, 403):
        return self._forbidden(error)
      return StartFailed(f'no container of {image!r}: {error}')
    if _is_denied(error):
      return self._forbidden(error)
    self.forget()
    return EngineUnavailable(
      f'no Docker engine answers at {self.name}: {error}. Start one, or set '
      'DOCKER_HOST'
    )

  def _forbidden(self, error: Exception) -> InfraError:
    return EngineForbidden(
      f'permission denied by the Docker engine {self.name}: {error}. Join its '
      'group (usually docker), or run as its user'
    )

  def _client(self, timeout_s: float) -> docker.APIClient:
    arguments = docker.utils.kwargs_from_env() if self.host is None else {}
    if self.host is not None:
      arguments['base_url'] = self.host
    try:
      client = docker.APIClient(
        version=self._version or 'auto', timeout=timeout_s, **arguments
      )
    except ERRORS as error:
      raise self.typed(error, '') from error
    self._version = client.api_version
    return client

  def _check(self, spec: SandboxSpec) -> None:
    self.ask(lambda client: client.inspect_image(spec.image))
    facts = self.facts()
    known = sorted(facts.get('Runtimes') or {})
    if spec.runtime is not None and spec.runtime not in known:
      raise RuntimeMissing(
        f'the Docker engine {self.name} has no runtime {spec.runtime!r}: '
        f'choose one of {known}, or register it with the engine'
      )
    root = facts.get('DockerRootDir', '')
    if not self.is_local or not self.floor_bytes or not os.path.isdir(root):
      return
    stat = os.statvfs(root)
    free = stat.f_bavail * stat.f_frsize
    if free < self.floor_bytes:
      raise DiskPressure(
        f'{root} of the Docker engine {self.name} has {free >> 20} MiB left, '
        f'less than the floor of {self.floor_bytes >> 20} MiB: free some, or '
        'lower floor_bytes'
      )


@dataclasses.dataclass
class _Aside:
  """Of an engine that failed: how often in a row, and until when it rests."""

  failures: int = 0
  until: float = 0.0
  error: InfraError | None = None


class Engines:
  """Several engines; thread-safe.

  Args:
    hosts: as `Engine` takes them; empty is the one of DOCKER_HOST.
    base_s, most_s: how long an engine is left aside after its first failure,
      doubled with each one in a row up to the most; times a random factor
      from 0.5 to 1.5, so that many trainers do not come back at once.
    seed: of that factor.
  """

  def __init__(
    self,
    hosts: Sequence[str] = (),
    *,
    floor_bytes: int = FLOOR_BYTES,
    base_s: float = 0.5,
    most_s: float = 30.0,
    seed: int = 0,
  ):
    if len(set(hosts)) != len(hosts):
      raise ValueError(f'engines {list(hosts)}: a host stands twice')
    self.all = [Engine(host, floor_bytes) for host in hosts or (None,)]
    self._base_s, self._most_s = base_s, most_s
    self._random = random.Random(seed)
    self._lock = threading.Lock()
    self._aside = {engine: _Aside() for engine in self.all}

  def ordered(self) -> Iterator[Engine]:
    """Engines to try, the least loaded for its processors first.

    Those that are left aside are not among them.

    Raises:
      InfraError: after the last one, the newest failure, in its own kind.
    """
    now = time.monotonic()
    with self._lock:
      ready = [e for e in self.all if self._aside[e].until <= now]
    yield from sorted(ready, key=lambda engine: engine.load)
    with self._lock:
      failed = [a for a in self._aside.values() if a.error is not None]
    last = max(failed, key=lambda a: a.until)
    others = f' (and {len(failed) - 1} other engines)' if failed[1:] else ''
    raise type(last.error)(f'{last.error}{others}')

  def note(self, engine: Engine, error: InfraError | None) -> None:
    """That something on `engine` went well, or failed."""
    with self._lock:
      aside = self._aside[engine]
      if error is None:
        aside.failures, aside.until, aside.error = 0, 0.0, None
        return
      aside.failures += 1
      rest = min(self._base_s * 2 ** (aside.failures - 1), self._most_s)
      rest *= self._random.uniform(0.5, 1.5)
      aside.until, aside.error = time.monotonic() + rest, error

  def next_try(self) -> float:
    """Seconds until an engine is tried again; 0 if one is ready."""
    with self._lock:
      soonest = min(aside.until for aside in self._aside.values())
    return max(0.0, soonest - time.monotonic())


def _is_denied(error: BaseException | None) -> bool:
  """True if a refusal by the file system is at the bottom of `error`."""
  seen: set[int] = set()
  while error is not None and id(error) not in seen:
    seen.add(id(error))
    if isinstance(error, PermissionError):
      return True
    inner = [a for a in error.args if isinstance(a, BaseException)]
    error = inner[0] if inner else error.__cause__ or error.__context__
  return False
