"""Supervised cold start on demonstrations.

Floor 3. Demonstrations are made by running a scripted expert in the real
environment, and rendered by the same chat as the policy's turns, so that they
are trajectories like any other: the expert's turns are their MODEL segments.
The update is the learner's, with cross entropy for a loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from agentjax.env.base import EnvironmentFactory
from agentjax.env.demonstrate import Demonstration, Expert, demonstrate
from agentjax.rl.batch import Batch, pack
from agentjax.text.chat import Chat
from agentjax.types import Segment, Source, Stop, Task, Trajectory


def to_trajectory(
  chat: Chat, demonstration: Demonstration, sample: int = 0
) -> Trajectory:
  """A demonstration as a trajectory; its MODEL log-probs are 0, versions -1."""
  opening = demonstration.opening
  prompt = chat.render_prompt(opening.messages, opening.tools)
  trajectory = Trajectory(demonstration.task, sample=sample).append(
    Segment(Source.PROMPT, prompt)
  )
  last = len(demonstration.acts) - 1
  for i, (act, observations) in enumerate(demonstration.acts):
    tokens = chat.render_turn(act.calls, act.answer, act.thought)
    zeros = np.zeros(len(tokens))
    closed = chat.closes(tokens)
    stop = Stop.END_OF_TURN if closed else Stop.STOP_STRING
    if len(chat.forced):
      trajectory = trajectory.append(Segment(Source.FORCED, chat.forced))
    trajectory = trajectory.append(
      Segment(Source.MODEL, tokens, zeros, zeros, zeros, zeros - 1, stop=stop),
      turn_rewards=(*trajectory.turn_rewards, 0.0),
      state_keys=(*trajectory.state_keys, None),
    )
    if i < last:
      seen = chat.render_observation(observations, closed)
      trajectory = trajectory.append(Segment(Source.OBSERVATION, seen))
  return trajectory.append(
    status=demonstration.status, reward=demonstration.reward
  )


def demonstrations(
  n: int,
  seed: int,
  *,
  tasks: Sequence[Task],
  make_environment: EnvironmentFactory,
  expert: Callable[[np.random.Generator, Task], Expert],
) -> list[Demonstration]:
  """n demonstrations of `expert`, going round the tasks."""
  return [
    demonstrate(
      make_environment(),
      tasks[i % len(tasks)],
      expert(np.random.default_rng([seed, i]), tasks[i % len(tasks)]),
    )
    for i in range(n)
  ]


@dataclasses.dataclass(frozen=True)
class ColdStart:
  """Options of the cold start.

  Attributes:
    demonstrate: (n, seed) -> n demonstrations.
    steps: optimizer steps. demonstrations: how many are made, once.
    per_step: demonstrations of one step.
  """

  demonstrate: Callable[[int, int], Sequence[Demonstration]]
  steps: int
  demonstrations: int
  per_step: int

  def __post_init__(self):
    if self.steps < 0 or not 0 < self.per_step <= self.demonstrations:
      raise ValueError(
        f'cold start of {self.steps} steps with {self.per_step} of '
        f'{self.demonstrations} demonstrations each: steps at least 0, and no '
        'more a step than there are'
      )


def batches(
  options: ColdStart,
  chat: Chat,
  *,
  seed: int,
  rows: int,
  length: int,
  start: int = 0,
) -> Iterator[Batch]:
  """Batches of steps `start`, `start` + 1, ..., the same however often it is
  started: each epoch is a permutation keyed by its number."""
  trajectories = [
    to_trajectory(chat, d, i)
    for i, d in enumerate(options.demonstrate(options.demonstrations, seed))
  ]
  n = options.per_step
  per_epoch = len(trajectories) // n
  for step in range(start, options.steps):
    epoch, at = divmod(step, per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(len(trajectories))
    chosen = [trajectories[i] for i in order[at * n : (at + 1) * n]]
    yield pack(chosen, [0.0] * n, rows=rows, length=length)
