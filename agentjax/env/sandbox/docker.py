"""Sandboxes as containers of a Docker engine.

Floor 1, env/sandbox. One container an episode: no network, read-only root,
no capabilities but the three that the runner needs to start and to end the
policy's processes, sized tmpfs to write to, no log. Calls never go through
`docker exec`, which is slow and cannot be ended; they are frames on the
stream that was attached before the start.

Four nets keep containers from being left behind: `close`; the end of the
stream (also at kill -9 of this process), upon which the runner ends and the
engine removes the container; the end of the runner's lifetime; and the
reaper, by label and journal. A process that is forked without exec inherits
the stream and so weakens the second net.
"""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import signal
import socket
import threading
import time
import uuid

import docker
from docker.types import Ulimit

from agentjax.env.base import InfraError
from agentjax.env.sandbox import journal, owner
from agentjax.env.sandbox.bounds import shielded
from agentjax.env.sandbox.channel import Channel
from agentjax.env.sandbox.engines import ERRORS, START_S, Engine, Engines
from agentjax.env.sandbox.owner import UNTAGGED, Tag
from agentjax.env.sandbox.seccomp import docker_profile
from agentjax.env.sandbox.session import RunnerSandbox, runner_program
from agentjax.env.sandbox.spec import CallStatus, SandboxSpec

_PYTHON = 'python3'
_CLOSE_S = 3.0
_REMOVE_S = 30.0
_GONE_S = 20.0
_log = logging.getLogger(__name__)


def default_engines() -> Engines:
  """The engine of DOCKER_HOST, or the default one; tried every time."""
  return _default_engines(os.environ.get('DOCKER_HOST', ''))


@functools.cache
def _default_engines(host: str) -> Engines:
  return Engines(base_s=0.0)


def check_docker(spec: SandboxSpec, engines: Engines | None = None) -> None:
  """Returns if an engine can start a sandbox of `spec`.

  Raises:
    What `Engine.check` raises, of the last engine.
  """
  error: InfraError | None = None
  for engine in (engines or default_engines()).all:
    try:
      engine.check(spec)
      return
    except InfraError as refused:
      error = refused
  raise error


def open_docker(
  spec: SandboxSpec, tag: Tag = UNTAGGED, engines: Engines | None = None
) -> RunnerSandbox:
  """Starts a container of `spec.image` and the runner in it.

  The least loaded engine is tried first, those that failed lately are not.

  Raises:
    EngineUnavailable, ImageMissing, StartFailed, DiskPressure,
    RuntimeMissing, and what the first exchange with the runner raises.
  """
  engines = engines or default_engines()
  for engine in engines.ordered():
    try:
      engine.check(spec)
      sandbox = _open(engine, spec, tag)
    except InfraError as error:
      engines.note(engine, error)
    else:
      engines.note(engine, None)
      return sandbox
  raise AssertionError('Engines.ordered raises')  # pragma: no cover


def _open(engine: Engine, spec: SandboxSpec, tag: Tag) -> RunnerSandbox:
  container = _Container(engine, spec, tag)
  try:
    channel = Channel(container.start(), multiplexed=True)
  except BaseException as error:
    container.stop()
    if isinstance(error, ERRORS):
      raise engine.typed(error, spec.image) from error
    raise
  try:
    return RunnerSandbox(
      spec,
      channel,
      container.facts(),
      rlimits={},
      stop=container.stop,
      hit_limit=container.hit_limit,
    )
  except BaseException:
    channel.shutdown()
    container.stop()
    raise


class _Container:
  """One container, from before its creation until nothing of it is left."""

  def __init__(self, engine: Engine, spec: SandboxSpec, tag: Tag):
    self.engine, self.spec = engine, spec
    self.name = f'agentjax-{uuid.uuid4().hex[:16]}'
    self.labels = owner.labels(spec, tag)
    self.id, self.image, self.pid = '', '', 0
    self._lock = threading.Lock()
    self._stopped = False
    engine.count(1)

  def start(self) -> socket.socket:
    """Creates, attaches and starts it; the stream of the runner."""
    # Before anything of it exists, so that there is no moment to be killed in.
    journal.own().begin(
      journal.Entry(self.name, 'docker', self.engine.name, self.labels)
    )

    def made(client: docker.APIClient) -> socket.socket:
      self.id = client.create_container(
        self.spec.image,
        [_PYTHON, '-s', '-B', '-c', runner_program()],
        name=self.name,
        hostname='sandbox',
        user='0:0',
        working_dir='/',
        stdin_open=True,
        environment={'LANG': 'C.UTF-8', 'TZ': 'UTC', 'PYTHONHASHSEED': '0'},
        labels=self.labels,
        host_config=client.create_host_config(**host_config(self.spec)),
        entrypoint=[],
      )['Id']
      sock = _attach(client, self.name)
      try:
        client.start(self.name)
        found = client.inspect_container(self.name)
      except BaseException:
        _end_stream(sock)
        raise
      self.image, self.pid = found['Image'], found['State']['Pid']
      return sock

    return self.engine.ask(made, START_S)

  def facts(self) -> dict[str, object]:
    """What a record of a run should say of where its code ran."""
    said = self.engine.facts()
    security = ' '.join(said.get('SecurityOptions') or ())
    return {
      'backend': 'docker',
      'container': self.name,
      'image': self.spec.image,
      'image_id': self.image,
      'engine': self.engine.name,
      'engine_version': said.get('ServerVersion'),
      'runtime': self.spec.runtime or said.get('DefaultRuntime'),
      'cgroup_version': said.get('CgroupVersion'),
      # Whether uid 0 inside is another one outside.
      'userns': 'name=userns' in security or 'name=rootless' in security,
    }

  def stop(self) -> None:
    """Ends it within seconds, whatever the engine does. Never raises.

    But for a KeyboardInterrupt, which comes after the work is done.
    """
    with self._lock:
      if self._stopped:
        return
      self._stopped = True
    self.engine.count(-1)
    if not shielded(_CLOSE_S, self._remove):
      _log.warning(
        'the engine %s does not remove %s in time: it is left to the reaper',
        self.engine.name, self.name,
      )  # fmt: skip
      journal.own().doom(self.name)
      self._kill()

  def hit_limit(self, began: float, _) -> CallStatus | None:
    """OOM if the engine saw one since `began`; the cgroup itself is gone."""
    try:
      # By the engine's clock, which need not be this machine's, nor right.
      until = self.engine.now()
      since = until - (time.monotonic() - began)
      events = self.engine.ask(
        lambda client: list(
          client.events(
            since=f'{since:.6f}',
            until=f'{until:.6f}',
            filters={'container': self.name, 'event': 'oom'},
            decode=True,
          )
        )
      )
      return CallStatus.OOM if events else None
    except (*ERRORS, InfraError):
      return None  # the engine is in trouble too: then it is infrastructure

  def _remove(self) -> None:
    try:
      remove(self.engine, self.name)
      journal.own().end(self.name)
    except (*ERRORS, InfraError) as error:
      _log.warning('container %s is not removed: %s', self.name, error)
      journal.own().doom(self.name)
      self._kill()

  def _kill(self) -> None:
    """Without the engine: ends its first process, and so all of them."""
    if not (self.engine.is_local and self.pid and self.id):
      return
    try:
      fd = os.pidfd_open(self.pid)
    except OSError:
      return
    try:
      # The engine may count in another PID namespace, and mean another one.
      groups = pathlib.Path(f'/proc/{self.pid}/cgroup').read_text()
      if self.id in groups:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:
      pass  # ended meanwhile, or not ours to kill
    finally:
      os.close(fd)


def host_config(spec: SandboxSpec) -> dict[str, object]:
  """Limits and walls of a container, as docker-py names them."""
  size = f'size={spec.tmpfs_bytes},nr_inodes={spec.tmpfs_inodes},mode=1777'
  return {
    'network_mode': 'none',
    'read_only': True,
    'cap_drop': ['ALL'],
    'cap_add': ['SETUID', 'SETGID', 'KILL'],
    'security_opt': ['no-new-privileges', f'seccomp={docker_profile()}'],
    'pids_limit': spec.pids + 1,  # the runner
    'mem_limit': spec.memory_bytes,
    'memswap_limit': spec.memory_bytes,
    # Short of memory, the host ends the policy's programs before ours.
    'oom_score_adj': 500,
    'oom_kill_disable': False,
    'cpu_period': 100_000,
    'cpu_quota': int(spec.cpus * 100_000),
    'tmpfs': {
      spec.workdir: f'{size},exec',
      '/tmp': size,
      # What the engine would mount there has no limit of inodes.
      '/dev/shm': f'size={16 << 20},nr_inodes={spec.tmpfs_inodes},mode=1777',
      '/dev/mqueue': 'ro,size=4k,nr_inodes=1',
    },
    'ulimits': [
      Ulimit(name='core', soft=0, hard=0),
      Ulimit(name='nofile', soft=spec.nofile, hard=spec.nofile),
      Ulimit(name='fsize', soft=spec.tmpfs_bytes, hard=spec.tmpfs_bytes),
    ],
    'log_config': {'Type': 'none'},
    'auto_remove': True,
    'ipc_mode': 'private',
    'runtime': spec.runtime,
  }


def remove(engine: Engine, name: str) -> None:
  """Removes a container, and returns when it is gone.

  Raises:
    InfraError or one of `ERRORS`: it may be there still.
  """
  engine.ask(lambda client: _remove_by(client, name), _REMOVE_S)


def _remove_by(client: docker.APIClient, name: str) -> None:
  try:
    client.remove_container(name, force=True)
    return
  except docker.errors.NotFound:
    return  # gone by itself
  except docker.errors.APIError as error:
    if error.status_code != 409:
      raise
    removing = error
  # It is on its way out already, because its runner has ended.
  deadline = time.monotonic() + _GONE_S
  while time.monotonic() < deadline:
    try:
      client.inspect_container(name)
    except docker.errors.NotFound:
      return
    time.sleep(0.02)
  raise removing


def _attach(client: docker.APIClient, name: str) -> socket.socket:
  params = {'stdin': 1, 'stdout': 1, 'stderr': 1, 'stream': 1}
  wrapper = client.attach_socket(name, params=params)
  # A copy of our own: the original is closed with the HTTP response that it
  # belongs to, at some time or never.
  copy = getattr(wrapper, '_sock', wrapper).dup()
  response = getattr(wrapper, '_response', None)
  (wrapper if response is None else response).close()
  return copy


def _end_stream(sock: socket.socket) -> None:
  try:
    sock.shutdown(socket.SHUT_RDWR)  # close() alone leaves the engine's end
  except OSError:
    pass
  sock.close()
