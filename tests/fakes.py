"""Fakes for unit tests of logic; the real parts are tested beside them."""

from __future__ import annotations

import random
import time

import numpy as np

from agentjax.env.base import InfraError, Opening
from agentjax.types import (
  Message,
  Observation,
  Reward,
  Segment,
  Source,
  Status,
  Step,
  Stop,
  Task,
  Trajectory,
  Turn,
  Verdict,
)


def task(name: str = 'a', **verify) -> Task:
  return Task(name, (Message('user', name),), verify=verify)


class IdChat:
  """A chat over bare ids: a prompt and an observation are made of numbers.

  A message's content and an observation's body are ids in decimal; a turn
  ends the conversation if its first id is even.
  """

  def __init__(self, forced=()):
    self.forced = np.array(forced, np.int32)

  def render_prompt(self, messages, tools=()):
    return np.array([int(x) for x in messages[-1].content.split()], np.int32)

  def render_observation(self, observations, closed, budget=None):
    ids = [int(x) for o in observations for x in o.body.split()]
    return np.array(ids[:budget], np.int32)

  def closes(self, tokens):
    return True

  def parse_turn(self, tokens, stop):
    verdict = Verdict.TRUNCATED if stop.is_limit else Verdict.ANSWER
    return Turn(' '.join(map(str, tokens)), verdict)


def id_task(name: str, prompt) -> Task:
  return Task(name, (Message('user', ' '.join(map(str, prompt))),))


class IdEnvironment:
  """Answers each turn with ids that depend on the turn alone.

  Args:
    turns: ends the episode at this turn. delay: seconds at most per call.
    fail: raises InfraError at these calls of `step`, counted over `log`.
    log: collects what was called.
  """

  def __init__(self, turns=3, delay=0.0, fail=(), log=None, error=None):
    self.turns, self.delay, self.fail = turns, delay, fail
    self.log = [] if log is None else log
    self.error = error
    self.seen = []
    self.closed = 0

  def reset(self, task):
    self._wait()
    self.log.append('reset')
    return Opening(task.messages)

  def step(self, turn):
    self._wait()
    self.log.append('step')
    if self.error is not None:
      raise self.error
    if self.log.count('step') in self.fail:
      raise InfraError('the fake engine is gone')
    self.seen.append(turn.text)
    if len(self.seen) >= self.turns:
      return Step(status=Status.DONE, reward=0.5)
    total = sum(int(x) for x in turn.text.split())
    body = f'{2 + total % 30} {2 + (total * 7) % 30}'
    return Step((Observation(body),), reward=0.25, state_key=str(total))

  def verify(self, status):
    self._wait()
    self.log.append('verify')
    value = float(sum(len(t.split()) for t in self.seen) % 3)
    return Reward(value, success=value > 0)

  def close(self):
    self.closed += 1
    self.log.append('close')

  def _wait(self):
    if self.delay:
      time.sleep(random.random() * self.delay)


def trajectory(
  parts, name='a', status=Status.DONE, reward=1.0, sample=0, logprob=-1.0
) -> Trajectory:
  """From (source letter, ids): p, m, f or o."""
  sources = {s.value[0]: s for s in Source}
  segments = []
  for letter, ids in parts:
    n, source = len(ids), sources[letter]
    if source is Source.MODEL:
      lp = np.full(n, logprob)
      segments.append(
        Segment(source, ids, lp, lp, np.zeros(n), np.zeros(n), Stop.END_OF_TURN)
      )
    else:
      segments.append(Segment(source, ids))
  return Trajectory(
    task(name),
    tuple(segments),
    status,
    Reward(reward, reward > 0),
    sample=sample,
  )
