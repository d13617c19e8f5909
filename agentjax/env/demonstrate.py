"""Scripted experts at work: demonstrations for a cold start.

Floor 1, env. An expert is a generator: it yields what it does in its turn and
is sent what it reads. `demonstrate` lets one act in a real environment, so
that every observation in a demonstration is one that the policy would get.
Putting the acts into a chat format is the caller's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from typing import Any

from agentjax.env.base import Environment, Opening
from agentjax.types import (
  Observation,
  Reward,
  Status,
  Task,
  ToolCall,
  Turn,
  Verdict,
)


@dataclasses.dataclass(frozen=True)
class Act:
  """One assistant turn: calls, or a final answer; a thought before them."""

  calls: tuple[ToolCall, ...] = ()
  answer: str | None = None
  thought: str | None = None

  def as_turn(self) -> Turn:
    """As a chat format would have read it."""
    if self.calls:
      return Turn('', Verdict.CALLS, calls=self.calls, thought=self.thought)
    return Turn(
      self.answer or '', Verdict.ANSWER, answer=self.answer,
      thought=self.thought,
    )  # fmt: skip


# Yields acts, is sent the bodies of the observations; an answer is the last.
Expert = Generator[Act, tuple[str, ...], None]


@dataclasses.dataclass(frozen=True)
class Demonstration:
  """An episode of an expert: each act with the observations it brought."""

  task: Task
  opening: Opening
  acts: tuple[tuple[Act, tuple[Observation, ...]], ...]
  status: Status
  reward: Reward


def call(name: str, *, thought: str | None = None, **arguments: Any) -> Act:
  """An act with one call."""
  return Act((ToolCall(name, arguments),), thought=thought)


def demonstrate(
  env: Environment,
  task: Task,
  expert: Expert,
  as_turn: Callable[[Act], Turn] = Act.as_turn,
) -> Demonstration:
  """Runs `expert` on `task` in `env`, which is closed afterwards.

  `as_turn` says what the environment is given for an act: an environment that
  reads the turn's text wants it written out.

  Raises:
    RuntimeError: the expert stopped before the episode ended.
    InfraError: of the environment.
  """
  acts: list[tuple[Act, tuple[Observation, ...]]] = []
  try:
    opening = env.reset(task)
    act = next(expert)
    while True:
      step = env.step(as_turn(act))
      acts.append((act, step.observations))
      if step.status is not None:
        reward = env.verify(step.status)
        return Demonstration(task, opening, tuple(acts), step.status, reward)
      act = expert.send(tuple(o.body for o in step.observations))
  except StopIteration:
    raise RuntimeError(
      f'the expert of task {task.id!r} stopped after {len(acts)} acts'
    ) from None
  finally:
    expert.close()
    env.close()


def wrong_digit(rng, number: str) -> str:
  """`number`, an integer or an expression, with one of its digits changed.

  No number gets a leading zero. `rng` is a numpy Generator.
  """
  places = [i for i, c in enumerate(number) if c.isdigit()]
  at = places[int(rng.integers(len(places)))]
  leads = at == 0 or not number[at - 1].isdigit()
  others = [d for d in '0123456789'[leads:] if d != number[at]]
  return number[:at] + others[int(rng.integers(len(others)))] + number[at + 1 :]
