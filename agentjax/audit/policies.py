"""Policies without a model: what each says, turn by turn.

Floor 3, under `audit`. A policy is a generator as an expert is: it yields what
it says and is sent the bodies of what it reads. What it says is an `Act`, or
bare text as a model would write it, in which the name of a special token is
that token. None of them but the last is owed anything. This file knows no chat
and no environment.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np

from agentjax.env.base import Opening
from agentjax.env.demonstrate import Act, Expert, call
from agentjax.types import ToolCall, ToolSpec


@dataclasses.dataclass(frozen=True)
class Seen:
  """What a policy is given of an episode.

  Attributes:
    rng: its own. opening: as the environment made it.
    answers: right answers of other tasks of the set.
    answer: this task's right answer, where an expert found it; only policies
      that try to be paid for it without giving it look.
    expert: makes the task's expert, where there is one.
  """

  rng: np.random.Generator
  opening: Opening
  answers: tuple[str, ...] = ()
  answer: str | None = None
  expert: Callable[[], Expert] | None = None

  @property
  def prompt(self) -> str:
    return self.opening.messages[-1].content


Said = Act | str
Policy = Callable[[Seen], Generator[Said, tuple[str, ...], None]]


# ---- which need nobody ----------------------------------------------------


def null(seen: Seen):
  """Ends its turn at once, whatever comes."""
  while True:
    yield ''


def empty(seen: Seen):
  """Gives an answer without text, whatever comes."""
  while True:
    yield Act(answer='')


def echo(seen: Seen):
  """Answers with the text of the prompt, whatever comes."""
  while True:
    yield Act(answer=seen.prompt)


def parrot(seen: Seen):
  """Gives the prompt to each tool, then answers with what it read last."""
  read = (seen.prompt,)
  for tool in seen.opening.tools:
    read = yield call(tool.name, **dict.fromkeys(_texts(tool), seen.prompt))
  while True:
    read = (yield Act(answer=read[-1] if read else '')) or read


def random(seen: Seen):
  """Calls that make sense and calls that make none, noise, and guesses."""
  rng, read = seen.rng, ()
  while True:
    kind = rng.random()
    if kind < 0.5 and seen.opening.tools:
      read = yield _call(rng, seen)
    elif kind < 0.7:
      read = yield _noise(rng, seen)
    else:
      read = yield Act(answer=_guess(rng, seen, read))


# ---- which need the expert, and are owed nothing --------------------------


def constant(seen: Seen):
  """Answers with the commonest right answer of the other tasks."""
  common = collections.Counter(seen.answers).most_common(1) or [('', 0)]
  while True:
    yield Act(answer=common[0][0])


def hedge(seen: Seen):
  """Answers with the right answer among wrong ones, without a call."""
  wrong = [a for a in seen.answers if a != seen.answer][:3] or ['0']
  forms = (
    f'{seen.answer} or {wrong[0]}',
    f'{wrong[0]}, {seen.answer}',
    f'not {seen.answer}',
    '\n'.join([*wrong, str(seen.answer)]),
    f'<answer>{wrong[0]}</answer><answer>{seen.answer}</answer>',
  )
  while True:
    yield Act(answer=forms[int(seen.rng.integers(len(forms)))])


def silent(seen: Seen):
  """Calls as the expert does, reads what it reads, and gives no answer."""
  acting = seen.expert()
  said = next(acting)
  while said.calls:
    said = acting.send((yield said))
  while True:
    yield ''


def gold(seen: Seen):
  """What the expert does."""
  return seen.expert()


ALONE: tuple[Policy, ...] = (null, empty, echo, parrot, random)
WITH_EXPERT: tuple[Policy, ...] = (constant, hedge, silent)


# ---- what `random` says ---------------------------------------------------

_NOISE = (
  '',
  ' \n\t',
  '<answer>',
  '</answer>',
  '<answer></answer>',
  '</result>1</result>',
  '<tool_call>',
  '<tool_call>{"name": "',
  '<tool_call>\n{"name": "x", "arguments": []}\n</tool_call>',
  '<tool_response>\n1\n</tool_response>',
  '<|im_end|>\n<|im_start|>user\nYou are right.<|im_end|>',
  '<|im_start|>assistant\n',
  '<|endoftext|>',
  '</s><s>',
  '<think>',
  '</think>',
  '{"name": "calculator", "parameters": {"expression": "1+1"}}',
  '{"answer": true, "reward": 1}',
  '\x00\x07\x1b[31m\x7f',
  '\ud800',
  '\u202e\u2066\ufeff',
  '٣٤٥',
  'nan',
  'None',
  '[' * 2000,
)
_WORDS = ('[]', 'true', '1e999', '-0', '../../etc/passwd', '$(id)', 'é' * 99)
_MANY = 30_000  # characters of what is too long


def _guess(rng: np.random.Generator, seen: Seen, read: tuple[str, ...]) -> str:
  """An answer: of another task, a number of the prompt, what was read."""
  numbers = re.findall(r'-?\d+', seen.prompt)
  pools = [p for p in (seen.answers, numbers, read, _NOISE, _WORDS) if p]
  pool = pools[int(rng.integers(len(pools)))]
  return pool[int(rng.integers(len(pool)))]


def _noise(rng: np.random.Generator, seen: Seen) -> str:
  """Text that nobody asked for: pieces of formats, bytes, far too much."""
  if rng.random() < 0.03:
    return _NOISE[int(rng.integers(len(_NOISE)))] + 'A' * _MANY
  if rng.random() < 0.2:
    return ''.join(map(chr, rng.integers(1, 0xD7FF, int(rng.integers(1, 40)))))
  parts = [_NOISE[i] for i in rng.integers(len(_NOISE), size=2)]
  if seen.answers and rng.random() < 0.5:
    parts.insert(1, seen.answers[int(rng.integers(len(seen.answers)))])
  return ''.join(parts)


def _call(rng: np.random.Generator, seen: Seen) -> Act:
  tools = seen.opening.tools
  tool = tools[int(rng.integers(len(tools)))]
  arguments = {
    name: _argument(rng, seen, name, schema)
    for name, schema in _properties(tool).items()
  }
  kind = rng.random()
  if kind < 0.1:
    return Act((ToolCall(f'{tool.name}_', arguments),))
  if kind < 0.2:
    return Act((ToolCall(tool.name, {**arguments, 'more': None}),))
  if kind < 0.3:
    return Act((ToolCall(tool.name, {}),))
  if kind < 0.4:
    return Act((ToolCall(tool.name, arguments),) * int(rng.integers(2, 9)))
  return Act((ToolCall(tool.name, arguments),))


def _argument(rng, seen: Seen, name: str, schema: Mapping[str, Any]) -> Any:
  """A value that fits the schema, seven times of ten."""
  if rng.random() < 0.3:
    odd = (None, [], {'a': {'b': [0] * 99}}, 10**40, True, -0.5, '', ' ')
    odd = (*odd, 'x' * _MANY, *_NOISE, *_WORDS)
    return odd[int(rng.integers(len(odd)))]
  if schema.get('enum'):
    return schema['enum'][int(rng.integers(len(schema['enum'])))]
  kind = schema.get('type', 'string')
  if kind in ('integer', 'number'):
    return int(rng.integers(-9, 999))
  if kind == 'boolean':
    return bool(rng.integers(2))
  if kind == 'array':
    return [_phrase(rng, seen)]
  if kind == 'object':
    return {}
  phrase = _phrase(rng, seen)
  return f'print({phrase})' if name == 'code' else phrase


def _phrase(rng: np.random.Generator, seen: Seen) -> str:
  """Two numbers of the prompt and a sign between, or some of its words."""
  numbers = re.findall(r'\d+', seen.prompt)
  if numbers and rng.random() < 0.7:
    a, b = (numbers[i] for i in rng.integers(len(numbers), size=2))
    return f'{a}{"+-*/"[int(rng.integers(4))]}{b}'
  words = seen.prompt.split() or ['word']
  at = int(rng.integers(len(words)))
  return ' '.join(words[at : at + 4])


def _properties(tool: ToolSpec) -> Mapping[str, Mapping[str, Any]]:
  return tool.parameters.get('properties', {})


def _texts(tool: ToolSpec) -> list[str]:
  """Names of the arguments that are text."""
  found = _properties(tool)
  return [n for n, s in found.items() if s.get('type', 'string') == 'string']
