"""Arithmetic with a calculator that does one operation a call.

Floor 1, env. The smallest task that needs a tool, and needs it twice:
`(47*12)+85=` takes two calls, the second with what the first one returned.
Prompts are short, so that a policy of a few hundred thousand parameters can
learn it. The operands of the splits are disjoint: no number that stands in a
test task stands in a training task.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from agentjax.env import verify
from agentjax.env.demonstrate import Act, Expert, call, wrong_digit
from agentjax.env.tool_environment import ToolEnvironment
from agentjax.env.tools import Calculator
from agentjax.types import Message, Task

SPLITS = ('train', 'test')
FLAWS = (
  'answers_without_calling',
  'answers_first_result',
  'wrong_operand',
  'wrong_operator',
  'malformed_expression',
  'swapped_order',
  'whole_expression',
  'unknown_tool',
  'slip_in_answer',
)
# What policies without a model are owed at most (`agentjax.audit`). Small
# results are common: one task in fifty of the test split has the answer 0.
BASELINES = {'random': 0.01, 'constant': 0.03}
_OPERATORS = {'+': 'plus', '-': 'minus', '*': 'times'}
_CALCULATE = {
  '+': lambda a, b: a + b,
  '-': lambda a, b: a - b,
  '*': lambda a, b: a * b,
}


def operands(split: str, largest: int = 99) -> tuple[int, ...]:
  """The numbers of 10 to `largest` that tasks of `split` are made of.

  A number belongs to the test split by its hash, about one in four.
  """
  if split not in SPLITS:
    raise ValueError(f'split {split!r}: choose one of {SPLITS}')
  return tuple(
    n for n in range(10, largest + 1) if _held_out(n) == (split == 'test')
  )


def tasks(
  split: str,
  n: int,
  seed: int = 0,
  *,
  calls: int = 2,
  largest: int = 99,
  least: int = 0,
  most: int = 10**6,
  system: str | None = None,
) -> list[Task]:
  """`n` different tasks; a pure function of its arguments.

  The first k of n tasks are those of a call with k.

  Args:
    calls: how many operations a task has, 1 or 2.
    largest: operand. With many operands a policy has to learn to copy digits;
      of few it learns the numbers.
    least, most: bounds of the result and of a result on the way.
    system: text of a system message to put first.

  Raises:
    ValueError: unknown split, bounds that no task can keep, or not that many
      different tasks.
  """
  if calls not in (1, 2):
    raise ValueError(f'calls is {calls}: choose 1 or 2')
  _check(n, seed)
  if least > most:
    raise ValueError(f'least {least} exceeds most {most}: swap them')
  numbers = operands(split, largest)
  if not numbers:
    raise ValueError(
      f'largest is {largest}: split {split!r} has no operand from 10 to there'
    )
  # SeedSequence takes integers: the split and the calls are part of them.
  rng = np.random.default_rng([seed, calls, SPLITS.index(split)])
  found: dict[str, Task] = {}
  for tries in range(20 * n + 1000):
    # Where hundreds find none, the bounds leave none worth minutes.
    if len(found) == n or tries == 500 and not found:
      break
    task = _task(rng, split, numbers, calls, (least, most), system)
    if task is not None:
      found.setdefault(task.id, task)
  if len(found) < n:
    raise ValueError(
      f'found {len(found)} different tasks with calls={calls} and results of '
      f'{least} to {most} in split {split!r}, not {n}: ask for fewer'
    )
  return list(found.values())


def _check(n: int, seed: int) -> None:
  for name, value in (('n', n), ('seed', seed)):
    if value < 0:
      raise ValueError(f'{name} is {value}: give 0 or more')


def environment(
  *, max_calls: int = 4, max_failures: int = 3, max_operations: int = 1
) -> ToolEnvironment:
  """An environment for one episode; an `EnvironmentFactory`."""
  return ToolEnvironment(
    [Calculator(max_operations)],
    judge,
    max_calls=max_calls,
    max_failures=max_failures,
  )


def judge(task: Task, answer: str | None) -> bool:
  """True if the answer is the exact result in plain digits."""
  return verify.same_integer(answer, task.verify['answer'])


def expert(
  rng: np.random.Generator,
  task: Task,
  flaws: float = 0.0,
  kinds: Sequence[str] = FLAWS,
) -> Expert:
  """Solves `task`, but with probability `flaws` one flaw of `kinds` is in it.

  Run it by `demonstrate`. A flaw that brings an error is put right after it
  has been read; the others lead to a wrong answer, mostly.
  """
  numbers, operators = task.metadata['numbers'], task.metadata['operators']
  flaw = kinds[rng.integers(len(kinds))] if rng.random() < flaws else None
  if len(operators) == 1 and flaw in ('answers_first_result', 'swapped_order'):
    flaw = 'slip_in_answer'
  return _act_out(rng, task, list(numbers), list(operators), flaw)


def _act_out(rng, task, numbers, operators, flaw: str | None) -> Iterator[Act]:
  answer = str(task.verify['answer'])
  if flaw == 'answers_without_calling':
    yield Act(answer=wrong_digit(rng, answer))
    return
  if flaw == 'wrong_operand':
    at = int(rng.integers(len(numbers)))
    numbers[at] = int(wrong_digit(rng, str(numbers[at])))
  elif flaw == 'wrong_operator':
    at = int(rng.integers(len(operators)))
    others = [o for o in _OPERATORS if o != operators[at]]
    operators[at] = others[rng.integers(len(others))]
  elif flaw == 'swapped_order':
    # The last two numbers first: right only where brackets do not matter.
    numbers, operators = numbers[1:] + numbers[:1], operators[::-1]
  mistakes = {
    'malformed_expression': ('calculator', f'{numbers[0]}{operators[0]}'),
    'whole_expression': ('calculator', task.messages[-1].content[:-1]),
    'unknown_tool': ('calc', f'{numbers[0]}{operators[0]}{numbers[1]}'),
  }
  if flaw in mistakes:
    name, expression = mistakes[flaw]
    yield call(name, expression=expression)
  result = str(numbers[0])
  for operator, number in zip(operators, numbers[1:], strict=True):
    (result,) = yield call(
      'calculator', expression=f'{result}{operator}{number}'
    )
    if flaw == 'answers_first_result':
      break
  if flaw == 'slip_in_answer':
    result = wrong_digit(rng, result)
  yield Act(answer=result)


def _results(numbers: list[int], operators: list[str]) -> list[int]:
  """The first number, and the result after each operator."""
  results = numbers[:1]
  for operator, number in zip(operators, numbers[1:], strict=True):
    results.append(_CALCULATE[operator](results[-1], number))
  return results


def _held_out(number: int) -> bool:
  return hashlib.sha256(f'operand {number}'.encode()).digest()[0] < 64


def _task(rng, split, numbers, calls, bounds, system) -> Task | None:
  """A random task. Every form is as likely: its numbers are drawn again.

  None where a form has hardly any numbers whose results are within bounds.
  """
  operators = [list(_OPERATORS)[i] for i in rng.integers(3, size=calls)]
  for chosen in rng.choice(numbers, (64, calls + 1)).tolist():
    results = _results(chosen, operators)
    if bounds[0] <= min(results) and max(results) <= bounds[1]:
      break
  else:
    return None
  text = f'{chosen[0]}{operators[0]}{chosen[1]}'
  name = f'{chosen[0]}{_OPERATORS[operators[0]]}{chosen[1]}'
  if calls == 2:
    text = f'({text}){operators[1]}{chosen[2]}'
    name += f'{_OPERATORS[operators[1]]}{chosen[2]}'
  messages = [Message('user', f'{text}=')]
  if system is not None:
    messages.insert(0, Message('system', system))
  return Task(
    f'arithmetic{calls}-{split}-{name}',
    tuple(messages),
    verify={'answer': results[-1]},
    metadata={'numbers': chosen, 'operators': operators},
  )
