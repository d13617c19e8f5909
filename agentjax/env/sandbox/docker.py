"""Sandboxes as containers of a Docker engine.

Floor 1, env/sandbox. One container an episode: no network, read-only root,
no capabilities but the three that the runner needs to start and to end the
policy's processes, sized tmpfs to write to, no log. Calls never go through
`docker exec`, which is slow and cannot be ended; they are frames on the
stream that was attached before the start.

Three nets keep containers from being left behind: `close`; the end of the
stream (also at kill -9 of this process), upon which the runner ends and the
engine removes the container; and `reap_containers`, by label. A process that
is forked without exec inherits the stream and so weakens the second net.

The engine is reached by docker-py's low-level client, one for each sandbox,
with a timeout on every request: over its Unix socket, or over TCP without
TLS (through a tunnel), because the attached stream is used as it is.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid

import docker
import requests
from docker.types import Ulimit

from agentjax.env.base import InfraError
from agentjax.env.sandbox import owner
from agentjax.env.sandbox.channel import Channel
from agentjax.env.sandbox.seccomp import docker_profile
from agentjax.env.sandbox.session import RunnerSandbox, runner_program
from agentjax.env.sandbox.spec import (
  CallStatus,
  EngineUnavailable,
  ImageMissing,
  SandboxSpec,
  StartFailed,
)

LABEL_RUN = 'agentjax.run'
LABEL_OWNER = 'agentjax.owner'
_TIMEOUT_S = 60
_PYTHON = 'python3'
_ENGINE_ERRORS = (
  docker.errors.DockerException,
  requests.RequestException,
  OSError,
)
_log = logging.getLogger(__name__)


def check_docker(image: str, timeout_s: int = 5) -> None:
  """Returns if an engine answers and has `image`.

  Raises:
    EngineUnavailable: no engine. ImageMissing: no such image.
  """
  client = _client(timeout_s)
  try:
    client.inspect_image(image)
  except _ENGINE_ERRORS as error:
    raise _typed(error, image) from error
  finally:
    client.close()


def open_docker(spec: SandboxSpec, run: str = 'none') -> RunnerSandbox:
  """Starts a container of `spec.image` and the runner in it.

  Args:
    run: names the run in the container's label.

  Raises:
    EngineUnavailable, ImageMissing, StartFailed, and what the first exchange
    with the runner raises.
  """
  client = _client(_TIMEOUT_S)
  name = None
  try:
    name = _create(client, spec, run)
    sock = _attach(client, name)
    client.start(name)
  except _ENGINE_ERRORS as error:
    _remove(client, name)
    raise _typed(error, spec.image) from error
  except BaseException:
    _remove(client, name)
    raise
  channel = Channel(sock, multiplexed=True)
  try:
    return RunnerSandbox(
      spec,
      channel,
      {'backend': 'docker', 'container': name, 'image': spec.image},
      rlimits={},
      stop=lambda: _remove(client, name),
      hit_limit=lambda began, _: _hit_limit(client, name, began),
    )
  except InfraError:
    channel.shutdown()
    _remove(client, name)
    raise


def reap_containers() -> list[str]:
  """Removes containers of ours whose owner is dead; the ids of these.

  Containers without our label, of living owners, or of owners that cannot be
  seen from here are not touched.
  """
  client = _client(_TIMEOUT_S)
  removed = []
  try:
    # Not containers.list(): it inspects each, and fails if one goes meanwhile.
    for found in client.containers(all=True, filters={'label': LABEL_OWNER}):
      if owner.is_dead(found['Labels'].get(LABEL_OWNER, '')):
        _force_remove(client, found['Id'])
        removed.append(found['Id'])
  except _ENGINE_ERRORS as error:
    raise EngineUnavailable(f'the Docker engine fails: {error}') from error
  finally:
    client.close()
  return removed


def _client(timeout_s: int) -> docker.APIClient:
  try:
    arguments = docker.utils.kwargs_from_env()
    return docker.APIClient(version='auto', timeout=timeout_s, **arguments)
  except _ENGINE_ERRORS as error:
    raise EngineUnavailable(
      f'no Docker engine answers: {error}. Start one, or set DOCKER_HOST'
    ) from error


def _typed(error: Exception, image: str) -> InfraError:
  """What an error of the engine's client means."""
  if isinstance(error, docker.errors.ImageNotFound):
    return ImageMissing(
      f'the Docker engine has no image {image!r}: build it with '
      '`python sandbox/build.py`, or pull it'
    )
  if isinstance(error, docker.errors.APIError):
    return StartFailed(f'no container of {image!r}: {error}')
  return EngineUnavailable(f'the Docker engine fails: {error}')


def _create(client: docker.APIClient, spec: SandboxSpec, run: str) -> str:
  size = f'size={spec.tmpfs_bytes},nr_inodes={spec.tmpfs_inodes},mode=1777'
  host = client.create_host_config(
    network_mode='none',
    read_only=True,
    cap_drop=['ALL'],
    cap_add=['SETUID', 'SETGID', 'KILL'],
    security_opt=['no-new-privileges', f'seccomp={docker_profile()}'],
    pids_limit=spec.pids + 1,  # the runner
    mem_limit=spec.memory_bytes,
    memswap_limit=spec.memory_bytes,
    cpu_period=100_000,
    cpu_quota=int(spec.cpus * 100_000),
    tmpfs={
      spec.workdir: f'{size},exec',
      '/tmp': size,
      # What the engine would mount there has no limit of inodes.
      '/dev/shm': f'size={16 << 20},nr_inodes={spec.tmpfs_inodes},mode=1777',
      '/dev/mqueue': 'ro,size=4k,nr_inodes=1',
    },
    ulimits=[Ulimit(name='core', soft=0, hard=0)],
    log_config={'Type': 'none'},
    auto_remove=True,
    ipc_mode='private',
  )
  name = f'agentjax-{uuid.uuid4().hex[:16]}'
  client.create_container(
    spec.image,
    [_PYTHON, '-s', '-B', '-c', runner_program()],
    name=name,
    hostname='sandbox',
    user='0:0',
    working_dir='/',
    stdin_open=True,
    environment={'LANG': 'C.UTF-8', 'TZ': 'UTC', 'PYTHONHASHSEED': '0'},
    labels={LABEL_RUN: run, LABEL_OWNER: owner.own_name()},
    host_config=host,
    entrypoint=[],
  )
  return name


def _attach(client: docker.APIClient, name: str) -> socket.socket:
  params = {'stdin': 1, 'stdout': 1, 'stderr': 1, 'stream': 1}
  wrapper = client.attach_socket(name, params=params)
  # A copy of our own: the original is closed with the HTTP response that it
  # belongs to, at some time or never.
  copy = getattr(wrapper, '_sock', wrapper).dup()
  response = getattr(wrapper, '_response', None)
  (wrapper if response is None else response).close()
  return copy


def _hit_limit(client, name: str, began: float) -> CallStatus | None:
  """OOM if the engine saw one since `began`; the cgroup itself is gone."""
  try:
    events = client.events(
      since=f'{began:.6f}',
      until=f'{time.time():.6f}',
      filters={'container': name, 'event': 'oom'},
      decode=True,
    )
    return CallStatus.OOM if any(True for _ in events) else None
  except _ENGINE_ERRORS:
    return None  # the engine is in trouble too: then it is infrastructure


def _force_remove(client: docker.APIClient, name: str) -> None:
  try:
    client.remove_container(name, force=True)
  except docker.errors.NotFound:
    pass  # gone by itself
  except docker.errors.APIError as error:
    if error.status_code != 409:  # already being removed
      raise


def _remove(client: docker.APIClient, name: str | None) -> None:
  try:
    if name is not None:
      _force_remove(client, name)
  except _ENGINE_ERRORS as error:
    _log.warning('container %s could not be removed: %s', name, error)
  finally:
    client.close()
