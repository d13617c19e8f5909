"""The seams of floor 1's environments: Environment, Tool, Verifier, errors.

An environment speaks messages, never tokens, and runs in a tool thread: no
JAX is imported anywhere in `env/`. Outcomes that the policy caused are values
(a Step with a status, an observation that names the error). Failures of the
infrastructure are exceptions, `InfraError`, and end the episode with status
INFRA_FAILURE (design promise 6). Any other exception out of an environment is
a bug in it and becomes ENVIRONMENT_ERROR with its traceback.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from agentjax.types import Message, Reward, Status, Step, Task, ToolSpec, Turn


class InfraError(Exception):
  """The infrastructure failed; it is retried or masked, never rewarded."""


@dataclasses.dataclass(frozen=True)
class Opening:
  """What an episode starts from: messages and the tools on offer."""

  messages: tuple[Message, ...]
  tools: tuple[ToolSpec, ...] = ()


class Environment(Protocol):
  """One episode's world. Methods are called from one thread at a time.

  `reset`, then `step` for each turn that came to an end of its own, then
  `verify` where the episode's end says something of the policy, then `close`.

  One that runs code in sandboxes may also have

      sandbox_records() -> tuple[SandboxRecord, ...]

  what passed between it and each, in the order of their opening. It is asked
  once before `close`, also while a call hangs, and goes into the trajectory's
  record; it must not wait.
  """

  def reset(self, task: Task) -> Opening:
    """Starts `task`; called once, before anything else."""

  def step(self, turn: Turn) -> Step:
    """Acts on what the policy wrote. Any turn is legal, malformed ones too.

    A turn that a limit cut (`Stop.is_limit`) never comes here: the episode is
    over with TOKEN_LIMIT, after no step at all if it was the first turn.
    `Step.reward` is recorded and teaches nothing; `verify`'s reward does.
    """

  def verify(self, status: Status) -> Reward:
    """Scores the episode, out of the policy's reach; called once, at its end.

    `status` is how the episode ended; called only where its reward is
    trustworthy. There may have been no `step`.
    """

  def close(self) -> None:
    """Frees what the episode holds. Idempotent, never raises."""


# Makes the environment of one episode; called in a tool thread.
EnvironmentFactory = Callable[[], Environment]


class Tool(Protocol):
  """A tool that a policy may call."""

  spec: ToolSpec

  def __call__(self, arguments: Mapping[str, Any]) -> str:
    """What the policy reads back.

    Raises:
      ToolError: the policy's call is wrong; its text is the observation.
      InfraError: the infrastructure failed.
    """


class ToolError(Exception):
  """The policy called a tool wrongly. Its message is the observation."""
