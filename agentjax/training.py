"""What a run is made of: everything that a config names, and nothing else.

Floor 3. Values only; `train` tells what is done with them. Bad values are
refused here, before anything slow is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optax

from agentjax.env.base import EnvironmentFactory
from agentjax.learner import Learner
from agentjax.model.config import ModelConfig
from agentjax.rl import advantages as estimators
from agentjax.rollout.engine import Engine
from agentjax.rollout.episode import Limits
from agentjax.rollout.sampling import Sampling
from agentjax.sft import ColdStart
from agentjax.text.chat import Chat
from agentjax.types import Task

Estimator = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Policy:
  """Where the weights come from: `load(config=...)`, or they are random."""

  config: ModelConfig
  load: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class Evaluating:
  """Held-out evaluation: `samples` trajectories of each task.

  `untrained` evaluates the weights that the run begins with, too.
  """

  tasks: Sequence[Task]
  samples: int = 1
  untrained: bool = False
  sampling: Sampling = Sampling()


class TooManyFailures(RuntimeError):
  """Environments or infrastructure fail so often that training is no use."""


@dataclasses.dataclass(frozen=True)
class Training:
  """Everything that a run is made of.

  Attributes:
    engine, learner: called as `engine(config, stops)` and `learner(config,
      optimizer=...)`; all their other options are bound.
    cold_start: supervised steps before reinforcement, with an optimizer of
      their own.
    advantages: rewards_N, groups_N, valid_N -> advantages_N.
    steps: of reinforcement, after `cold_start.steps`. groups, group_size: of
      one draw. minibatches: optimizer steps a draw is split into.
    mask_observations: False is the ablation that trains on observations.
    use_reference: measure (and with kl_coef, hold) the KL to the policy after
      the cold start.
    pages: write the last recorded step's trajectories as HTML.
    max_failure_rate: of a draw's trajectories, infrastructure failures and
      environment errors together; above it the run stops.
  """

  policy: Policy
  chat: Chat
  make_environment: EnvironmentFactory
  tasks: Sequence[Task]
  evaluation: Evaluating
  engine: Callable[..., Engine]
  learner: Callable[..., Learner]
  limits: Limits
  optimizer: optax.GradientTransformation
  cold_start: ColdStart | None = None
  cold_start_optimizer: optax.GradientTransformation | None = None
  sampling: Sampling = Sampling()
  advantages: Estimator = estimators.grpo
  steps: int = 10
  groups: int = 8
  group_size: int = 8
  minibatches: int = 1
  mask_observations: bool = True
  use_reference: bool = False
  seed: int = 0
  tool_threads: int = 8
  checkpoint_every: int = 5
  record_every: int = 1
  pages: bool = True
  max_failure_rate: float = 0.2

  def __post_init__(self):
    for name in ('groups', 'group_size', 'minibatches', 'checkpoint_every',
                 'record_every', 'tool_threads'):  # fmt: skip
      if getattr(self, name) < 1:
        raise ValueError(f'{name} is {getattr(self, name)}: give at least 1')
    if self.steps < 0:
      raise ValueError(f'steps is {self.steps}: give 0 or more')
    if self.minibatches > self.groups * self.group_size:
      raise ValueError(
        f'{self.minibatches} minibatches of {self.groups} groups of '
        f'{self.group_size}: lower minibatches'
      )
    if self.cold_start and self.cold_start_optimizer is None:
      raise ValueError('a cold start needs a cold_start_optimizer')
    for sampling in (self.sampling,):
      if sampling.temperature == 0:
        raise ValueError(
          'sampling.temperature is 0: greedy choices have no policy gradient'
        )
