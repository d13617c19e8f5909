"""Input/output judging of a function: the default way to a verdict.

Floor 1, env/judge. Hidden inputs are made on the host for each verdict: fixed
edge cases and random ones. The expected values are computed on the host, by a
reference that is never in any sandbox. The candidate runs in a process of its
own (`candidate.py`), and what comes back are claims: lines of strict JSON with
the id of an input and a value. They are compared here.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentjax.env.judge.judgement import Judgement, Reason, failed, passed
from agentjax.env.judge.submission import (
  STATUS_REASONS,
  Rule,
  misfit,
  program_source,
)
from agentjax.env.judge.values import SameValue, parse_strictly, same_value
from agentjax.env.judge.verdicts import Judge, check_pace
from agentjax.env.sandbox import Call, CallResult, CallStatus, Sandbox


@dataclasses.dataclass(frozen=True)
class FunctionTask:
  """A function that a policy writes.

  Attributes:
    function: its name. entry: the file that must define it.
    reference: computes what is right; on the host alone.
    edges: inputs that every verdict uses, as tuples of arguments.
    draw: makes one random input.
    draws: random inputs of a verdict.
    same: compares an answer with what is right.
    timeout_s: of one process of the candidate. input_s: of one input, where
      the candidate lets itself be interrupted.
    batch: inputs that one process is given; 0: all. With 1 each input has a
      fresh process and the deadline to itself.
  """

  function: str
  reference: Callable[..., Any]
  edges: Sequence[tuple]
  draw: Callable[[random.Random], tuple]
  entry: str = 'solution.py'
  draws: int = 30
  same: SameValue = same_value
  timeout_s: float = 20.0
  input_s: float = 5.0
  batch: int = 0

  def rule(self, named: tuple[str, ...] | None = None) -> Rule:
    """Which files are handed in."""
    return Rule(self.entry, named)

  def judge(self, rng: random.Random | None = None) -> Judge:
    """A judge for `verdicts.decide`; `rng` makes the hidden inputs."""
    rng = rng or random.Random(secrets.randbits(64))

    def judge(sandbox: Sandbox, files: Mapping[str, bytes]) -> Judgement:
      return judge_function(rng, self, sandbox, files)

    return judge


def judge_function(
  rng: random.Random,
  task: FunctionTask,
  sandbox: Sandbox,
  files: Mapping[str, bytes],
) -> Judgement:
  """PASS if the function is right on every hidden input.

  Args:
    sandbox: fresh; of no use afterwards.

  Raises:
    InfraError: of the sandbox. TypeError, ValueError: an input or an expected
      value has no JSON form.
  """
  inputs = [*task.edges, *(task.draw(rng) for _ in range(task.draws))]
  expected = [task.reference(*copy.deepcopy(values)) for values in inputs]
  json.dumps(expected)  # what cannot travel, nobody could answer
  if (problem := misfit(sandbox.put(files))) is not None:
    return problem
  size = task.batch or len(inputs)
  marks: tuple[str, ...] = ()
  for start in range(0, len(inputs), size):
    batch = slice(start, start + size)
    judgement = _judge_batch(task, sandbox, inputs[batch], expected[batch])
    marks += judgement.tamper
    if judgement.reason is not None:
      break
  else:
    judgement = passed(f'{len(inputs)} inputs')
  return dataclasses.replace(judgement, tamper=tuple(dict.fromkeys(marks)))


def _judge_batch(task, sandbox, inputs, expected) -> Judgement:
  nonce = secrets.token_hex(16)
  ids = [secrets.token_hex(8) for _ in inputs]
  request = {
    'nonce': nonce,
    'entry': task.entry,
    'function': task.function,
    'input_s': task.input_s,
    'inputs': list(zip(ids, inputs, strict=True)),
  }
  result = sandbox.call(
    Call(
      argv=['python3', '-I', '-B', '-c', program_source('candidate.py')],
      stdin=json.dumps(request).encode(),
      timeout_s=task.timeout_s,
    )
  )
  judgement = _read(task, result, ids, inputs, expected)
  if judgement.reason is Reason.TIMEOUT:
    check_pace(sandbox)
  return dataclasses.replace(judgement, tamper=_notes(result, nonce))


def _read(task, result: CallResult, ids, inputs, expected) -> Judgement:
  if result.status not in (CallStatus.OK, CallStatus.NONZERO):
    return failed(STATUS_REASONS[result.status], _end(result))
  if result.truncated[0]:
    return failed(Reason.OUTPUT_CAP, f'{result.truncated[0]} bytes too many')
  lines = result.stdout.split('\n')
  try:
    if lines.pop():
      raise ValueError('the last line has no end')
    replies = [_reply(line) for line in lines]
    if replies and replies[-1].late:
      late = replies.pop()
      if late.name not in (None, *ids[len(replies) : len(replies) + 1]):
        raise ValueError('an id that was not asked for')
      return failed(Reason.TIMEOUT, f'after {len(replies)} answers')
    if len(replies) == 1 and replies[0].name is None:
      return failed(Reason.RAISED, replies[0].error)
    if [reply.name for reply in replies] != ids[: len(replies)]:
      raise ValueError('an id that was not asked for')
  except ValueError as error:
    return failed(Reason.BAD_REPLY, str(error))
  if len(replies) < len(ids) or result.status is not CallStatus.OK:
    return failed(
      Reason.EXITED, f'{len(replies)} of {len(ids)} answers. {_end(result)}'
    )
  return _compare(task, replies, inputs, expected)


def _compare(task, replies, inputs, expected) -> Judgement:
  wrong, first = 0, ''
  for values, right, reply in zip(inputs, expected, replies, strict=True):
    if reply.error is None and task.same(reply.value, right):
      continue
    wrong += 1
    first = first or f'{task.function}{values!r}: {reply.line}, not {right!r}'
  if not wrong:
    return passed()
  raised = all(reply.error is not None for reply in replies)
  return failed(
    Reason.RAISED if raised else Reason.WRONG,
    f'{wrong} of {len(replies)} inputs; the first: {first}',
  )


@dataclasses.dataclass(frozen=True)
class _Reply:
  """One line; `error` is None where there is a value."""

  line: str
  name: str | None
  value: Any = None
  error: str | None = None
  late: bool = False


def _reply(line: str) -> _Reply:
  data = parse_strictly(line)
  # As text: to show a value that is nested deep can fail.
  shown = line[:300]
  if not isinstance(data, dict) or not isinstance(
    data.get('id', 0), (str, type(None))
  ):
    raise ValueError('a line that is no object with an id')
  name = data['id']
  if data.keys() == {'id', 'value'} and name is not None:
    return _Reply(shown, name, data['value'])
  if data.keys() == {'id', 'error'} and isinstance(data['error'], str):
    return _Reply(shown, name, error=data['error'])
  if data.keys() == {'id', 'late'} and data['late'] is True:
    return _Reply(shown, name, late=True)
  raise ValueError('a line with other keys than id and value')


def _notes(result: CallResult, nonce: str) -> tuple[str, ...]:
  """What the candidate reached for; see `candidate.py`."""
  found = []
  for line in result.stderr.split('\n'):
    if nonce not in line:
      continue
    try:
      data = parse_strictly(line)
      if data['nonce'] == nonce:
        found.append(str(data['found'])[:200])
    except (ValueError, KeyError, TypeError):
      continue
  if result.status is CallStatus.SIGNAL:
    # The decoy does nothing that it could die of.
    found.append(f'judge: a process of it ended by signal {result.signal}')
  return tuple(dict.fromkeys(found))[:8]


def _end(result: CallResult) -> str:
  return f'{result.status.value}, exit {result.exit}, signal {result.signal}'
