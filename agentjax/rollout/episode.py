"""The loop of one trajectory, as a generator that owns nothing.

Floor 2, rollout/. `episode` yields what it wants done and is sent the result:
`Reset` -> an Opening, `Decode` -> a MODEL segment, `Act` -> a Step. It returns
the trajectory. It knows no engine, no thread and no environment object, and
holds no state that the trajectory does not: every request carries the
trajectory so far, and an episode started from that one goes on the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import Protocol

import numpy as np

from agentjax.env.base import InfraError, Opening
from agentjax.types import (
  Message,
  Observation,
  Segment,
  Source,
  Status,
  Step,
  Stop,
  Task,
  ToolSpec,
  Trajectory,
  Turn,
)


class Chat(Protocol):
  """What an episode needs of a chat; `agentjax.text.chat` has the real one.

  `forced`: int32 ids with which every turn begins, usually none.
  """

  forced: np.ndarray

  def render_prompt(
    self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
  ) -> np.ndarray: ...

  def render_observation(
    self,
    observations: Sequence[Observation],
    closed: bool,
    budget: int | None = None,
  ) -> np.ndarray: ...

  def closes(self, tokens: np.ndarray) -> bool: ...

  def parse_turn(self, tokens: np.ndarray, stop: Stop) -> Turn: ...


@dataclasses.dataclass(frozen=True)
class Limits:
  """Bounds of a trajectory, in turns and tokens.

  Attributes:
    turns: MODEL segments. turn_tokens: tokens of one of them.
    model_tokens: MODEL tokens of the trajectory. context: all its tokens.
    observation_tokens: of one observation, the template's glue included; only
      an observation's body is cut to it.
  """

  turns: int = 4
  turn_tokens: int = 256
  model_tokens: int = 1024
  context: int = 2048
  observation_tokens: int = 512

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not isinstance(value, int) or value < 1:
        raise ValueError(f'limit {field.name} is {value!r}: give at least 1')


@dataclasses.dataclass(frozen=True)
class Reset:
  """Start the environment with `task`; answered by an Opening."""

  trajectory: Trajectory
  task: Task


@dataclasses.dataclass(frozen=True)
class Decode:
  """Sample a turn after the trajectory; answered by a MODEL segment.

  `context`: tokens that the trajectory may have. `said`: the FORCED tokens at
  its end, with which the turn begins.
  """

  trajectory: Trajectory
  turn_budget: int
  trajectory_budget: int
  context: int
  said: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Act:
  """Step the environment with `turn`; answered by a Step.

  `replayed` turns only bring a new environment to where the trajectory is:
  what they return has to be what is recorded.
  """

  trajectory: Trajectory
  turn: Turn
  replayed: bool = False


Request = Reset | Decode | Act


class OtherwiseThanRecorded(RuntimeError):
  """An environment answered a replayed turn with something else than before.

  What comes of it then says nothing of the state that was to be gone on from.
  """


def episode(
  chat: Chat, limits: Limits, trajectory: Trajectory
) -> Generator[Request, Opening | Segment | Step, Trajectory]:
  """One trajectory from its task, or from a prefix of itself, to its end.

  Raises:
    OtherwiseThanRecorded: the environment cannot be brought to where the
      prefix ends.
  """
  opening = yield Reset(trajectory, trajectory.task)
  if not isinstance(opening, Opening):
    raise TypeError(f'reset returned {opening!r}: return an Opening')
  if not trajectory.segments:
    prompt = chat.render_prompt(opening.messages, opening.tools)
    if not len(prompt):
      raise ValueError('the opening has no tokens: there is nothing to go on')
    trajectory = trajectory.append(Segment(Source.PROMPT, prompt))
  for k, segment in enumerate(trajectory.turns[: len(trajectory.turn_rewards)]):
    turn = chat.parse_turn(trajectory.turn_tokens[k], segment.stop)
    step = _checked((yield Act(trajectory, turn, replayed=True)))
    _same(chat, limits, trajectory, k, step)

  while trajectory.status is Status.RUNNING:
    segment = trajectory.segments[-1]
    if segment.source is not Source.MODEL:
      request = _decode(chat, trajectory, limits)
      if isinstance(request, Status):
        return trajectory.append(status=request)
      segment = _numbers((yield request))
      trajectory = request.trajectory.append(segment)
    if segment.stop.is_limit or segment.stop is Stop.CANCELLED:
      cancelled = segment.stop is Stop.CANCELLED
      status = Status.ABORTED if cancelled else Status.TOKEN_LIMIT
      return trajectory.append(status=status)
    turn = chat.parse_turn(trajectory.turn_tokens[-1], segment.stop)
    step = _checked((yield Act(trajectory, turn)))
    trajectory = _observe(chat, limits, trajectory, segment, step)
  return trajectory


def _decode(
  chat: Chat, trajectory: Trajectory, limits: Limits
) -> Decode | Status:
  """The next turn, or the status of a trajectory that has no room for one."""
  if len(chat.forced) and trajectory.segments[-1].source is not Source.FORCED:
    trajectory = trajectory.append(Segment(Source.FORCED, chat.forced))
  left = limits.model_tokens - trajectory.model_tokens
  if min(left, limits.context - len(trajectory)) < 1:
    no_turn = not trajectory.turns
    return Status.PROMPT_TOO_LONG if no_turn else Status.TOKEN_LIMIT
  return Decode(
    trajectory, limits.turn_tokens, left, limits.context, chat.forced
  )


def _numbers(segment: Segment) -> Segment:
  """A turn that was sampled from logits that are numbers.

  Whatever was sampled otherwise says nothing of the policy.
  """
  if not np.isfinite(segment.logprobs).all():
    raise InfraError(
      f'{np.sum(~np.isfinite(segment.logprobs))} of {len(segment)} tokens were '
      'sampled from logits that are no numbers: the weights, or what the model '
      'makes of these tokens, are not finite'
    )
  return segment


def _same(
  chat: Chat, limits: Limits, trajectory: Trajectory, k: int, step: Step
) -> None:
  """Refuses an answer to turn `k` that is not the recorded one."""
  ends = [
    i for i, s in enumerate(trajectory.segments) if s.source is Source.MODEL
  ]
  behind = trajectory.segments[ends[k] + 1 : ends[k] + 2]
  if not behind:  # it was the last one
    return
  recorded = behind[0].tokens.tolist()
  now: object = step.status
  if step.status is None:
    now = chat.render_observation(
      step.observations,
      chat.closes(trajectory.segments[ends[k]].tokens),
      limits.observation_tokens,
    ).tolist()
  if now != recorded or step.state_key != trajectory.state_keys[k]:
    raise OtherwiseThanRecorded(
      f'turn {k} of {trajectory.parent_id or trajectory.id} was answered by '
      f'{recorded} (state {trajectory.state_keys[k]!r}), and replayed by {now} '
      f'(state {step.state_key!r}): what goes on from it would be no '
      'continuation; make the environment answer the same acts alike, or leave '
      'branch out'
    )


def _checked(step: Step) -> Step:
  """The environment's answer, if it is one that it may give."""
  if not isinstance(step, Step):
    raise TypeError(f'step returned {step!r}: return a Step')
  if step.status is not None and not (
    isinstance(step.status, Status) and step.status.reward_trustworthy
  ):
    raise ValueError(
      f'step ended with status {step.status!r}: an environment ends as one of '
      f'{[s.name for s in Status if s.reward_trustworthy]}, goes on with None, '
      'and raises InfraError where the infrastructure failed'
    )
  # A bool, a NumPy number: all that counts as one; math says what does not.
  if not math.isfinite(step.reward):
    raise ValueError(f'reward of a turn is {step.reward}: give a finite number')
  return step


def _observe(
  chat: Chat, limits: Limits, before: Trajectory, segment: Segment, step: Step
) -> Trajectory:
  """The trajectory after the environment's answer; both or nothing of it."""
  answered = {
    'turn_rewards': (*before.turn_rewards, float(step.reward)),
    'state_keys': (*before.state_keys, step.state_key),
  }
  if step.status is not None:
    return before.append(status=step.status, **answered)
  if len(before.turns) >= limits.turns:
    return before.append(status=Status.TURN_LIMIT, **answered)
  tokens = chat.render_observation(
    step.observations, chat.closes(segment.tokens), limits.observation_tokens
  )
  if len(before) + len(tokens) >= limits.context:
    return before.append(status=Status.TOKEN_LIMIT, **answered)
  return before.append(Segment(Source.OBSERVATION, tokens), **answered)
