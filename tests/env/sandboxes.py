"""Sandboxes for the tests: limits that are quick to hit, and what can run."""

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
