"""Sandboxes for the tests: limits that are quick to hit, and what can run."""

import os
import signal
import subprocess

from requirements import require

from agentjax.env.base import InfraError
from agentjax.env.sandbox import SandboxSpec, choose_backend

BACKENDS = ('docker', 'bwrap')
SPEC = SandboxSpec(
  memory_bytes=192 << 20,
  tmpfs_bytes=16 << 20,
  pids=32,
  output_cap=4096,
  output_kill=32 << 20,
  grace_s=20.0,
)


def backend_or_skip(name: str, spec: SandboxSpec = SPEC) -> str:
  """`name`, if it can run here what `spec` asks for."""
  try:
    choose_backend(spec, name)
    reason = ''
  except InfraError as error:
    reason = str(error)
  require(name, not reason, reason)
  return name


def signal_runner(sandbox, docker_command, number):
  """Does it from outside, as a machine's failure or a person would."""
  if sandbox.facts['backend'] == 'docker':
    command = ['docker', docker_command, sandbox.facts['container']]
    subprocess.run(command, check=True, capture_output=True)
  else:
    os.kill(sandbox.facts['pid'], number)


def kill_runner(sandbox):
  signal_runner(sandbox, 'kill', signal.SIGKILL)


def freeze(sandbox):
  signal_runner(sandbox, 'pause', signal.SIGSTOP)
