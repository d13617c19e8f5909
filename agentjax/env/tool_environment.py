"""An environment in which a policy calls tools and then answers.

Floor 1, env. Arithmetic and word problems are this with other tools and
another verifier, given as arguments. It sees turns and answers with
observations; it knows no chat format and no tokens.

Whatever the policy does wrong comes back to it as text, beginning 'error:',
the same in training and in evaluation, until it has happened `max_failures`
times; the next time ends the episode.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

from agentjax.env.base import Opening, Tool, ToolError
from agentjax.sandbox_record import SandboxRecord
from agentjax.types import (
  Observation,
  Reward,
  Status,
  Step,
  Task,
  ToolCall,
  Turn,
  Verdict,
)

# (task, final answer or None) -> is it right? Or a reward of its own.
Judge = Callable[[Task, str | None], bool | Reward]


class ToolEnvironment:
  """Implements `Environment`.

  Args:
    tools: on offer; a name may stand only once.
    judge: decides the reward of the final answer, 1 or 0 or one of its own;
      it is asked of None where the episode has no answer.
    max_calls: tool calls in one episode; more are refused, each a failure.
    max_failures: wrong calls and unreadable turns that are forgiven. The next
      ends the episode with TOOL_FAILURE or PARSE_FAILURE.
    close: frees what the tools hold; may be called more than once.
  """

  def __init__(
    self,
    tools: Sequence[Tool],
    judge: Judge,
    *,
    max_calls: int = 8,
    max_failures: int = 3,
    close: Callable[[], None] | None = None,
  ):
    self._tools = {tool.spec.name: tool for tool in tools}
    if len(self._tools) != len(tools):
      names = [tool.spec.name for tool in tools]
      raise ValueError(f'tools {names}: a name stands twice')
    self._judge = judge
    self._max_calls, self._max_failures = max_calls, max_failures
    self._close = close
    self._task: Task | None = None
    self._status: Status | None = None
    self._answer: str | None = None
    self._calls = self._failures = 0
    self._history: list = []

  def reset(self, task: Task) -> Opening:
    """See `Environment`."""
    if self._task is not None:
      raise RuntimeError('an environment is for one episode: make another')
    self._task = task
    specs = tuple(tool.spec for tool in self._tools.values())
    return Opening(task.messages, specs)

  def step(self, turn: Turn) -> Step:
    """See `Environment`."""
    if self._task is None or self._status is not None:
      raise RuntimeError(
        f'step of an episode that is not running (status {self._status})'
      )
    key = self._state_key()
    if turn.verdict is Verdict.ANSWER:
      self._answer = turn.answer
      self._status = Status.DONE
      return Step(status=self._status, state_key=key)
    if turn.verdict is Verdict.CALLS:
      observations = tuple(self._act(call) for call in turn.calls)
      end = Status.TOOL_FAILURE
    else:
      observations = (self._failure(_complaint(turn), None),)
      end = Status.PARSE_FAILURE
    self._history.append(
      [
        [[c.name, c.arguments] for c in turn.calls],
        [o.body for o in observations],
      ]
    )
    if self._failures > self._max_failures:
      self._status = end
    return Step(observations, self._status, state_key=key)

  def verify(self, status: Status) -> Reward:
    """See `Environment`. Success needs an answer, given at the end."""
    ended = status is Status.DONE and self._status is Status.DONE
    judged = self._judge(self._task, self._answer if ended else None)
    if not isinstance(judged, Reward):
      judged = Reward(float(judged), bool(judged))
    if judged.success and (not ended or self._answer is None):
      raise ValueError(
        f'task {self._task.id!r}: an answer that is not there was judged right'
      )
    parts = {
      'answered': float(self._answer is not None),
      'calls': float(self._calls),
      'failures': float(self._failures),
    }
    return Reward(judged.value, judged.success, parts | dict(judged.parts))

  def sandbox_records(self) -> tuple[SandboxRecord, ...]:
    """See `Environment`: those of the tools, in the order of the tools."""
    asked = (getattr(t, 'sandbox_records', tuple) for t in self._tools.values())
    return tuple(record for ask in asked for record in ask())

  def close(self) -> None:
    """See `Environment`."""
    if self._close is not None:
      self._close()

  def _act(self, call: ToolCall) -> Observation:
    tool = self._tools.get(call.name)
    if tool is None:
      known = ', '.join(self._tools)
      return self._failure(f'no such tool, there is: {known}', None)
    if self._calls >= self._max_calls:
      return self._failure('no calls left, answer now', call.name)
    self._calls += 1
    try:
      return Observation(tool(call.arguments), name=call.name)
    except ToolError as error:
      return self._failure(str(error), call.name)

  def _failure(self, text: str, name: str | None) -> Observation:
    self._failures += 1
    return Observation(f'error: {text}', name=name)

  def _state_key(self) -> str:
    """Equal where task, calls and observations so far are equal."""
    text = json.dumps([self._task.id, self._history], sort_keys=True)
    return hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:16]


def _complaint(turn: Turn) -> str:
  if turn.verdict is Verdict.TRUNCATED:
    return 'the turn was cut at its limit'
  return turn.problem or 'the call cannot be read'
