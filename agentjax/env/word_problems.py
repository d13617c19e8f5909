"""Word problems of two steps, with Python as the tool.

Floor 1, env. Short English texts from templates with numbers of two and three
digits. Test tasks differ from training tasks in two ways at once: other
templates (the last of `word_templates.TEMPLATES`, other sentences and things;
most of their formulas occur in training too) and other numbers. Needs a
sandbox; where none can run, `environment` says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from agentjax.env import verify
from agentjax.env.demonstrate import Act, Expert, call, wrong_digit
from agentjax.env.sandbox import Opener, Sandbox, SandboxSpec, pools
from agentjax.env.tool_environment import ToolEnvironment
from agentjax.env.tools import PythonTool
from agentjax.env.word_templates import NAMES, TEMPLATES, TEST, Template
from agentjax.types import Message, Task

SPLITS = ('train', 'test')
FLAWS = (
  'answers_without_calling',
  'first_step_only',
  'wrong_operand',
  'wrong_operator',
  'forgets_print',
  'syntax_error',
  'slip_in_answer',
)
# What policies without a model are owed at most (`agentjax.audit`).
BASELINES = {'random': 0.01, 'constant': 0.01}
# What a wrong operator is chosen from.
_OPERATORS = ('+', '-', '*')


def numbers(split: str, low: int = 10, high: int = 999) -> tuple[int, ...]:
  """The numbers from low to high that tasks of `split` are made of."""
  if split not in SPLITS:
    raise ValueError(f'split {split!r}: choose one of {SPLITS}')
  held_out = split == 'test'
  return tuple(n for n in range(low, high + 1) if _held_out(n) == held_out)


def tasks(
  split: str, n: int, seed: int = 0, *, system: str | None = None
) -> list[Task]:
  """`n` different tasks; a pure function of its arguments.

  The first k of n tasks are those of a call with k. Answers are integers
  above 0.

  Args:
    system: text of a system message to put first.

  Raises:
    ValueError: unknown split, or not that many different tasks.
  """
  for name, value in (('n', n), ('seed', seed)):
    if value < 0:
      raise ValueError(f'{name} is {value}: give 0 or more')
  pool = numbers(split)
  templates = [t for t in TEMPLATES if (t.name in TEST) == (split == 'test')]
  rng = np.random.default_rng([seed, SPLITS.index(split)])
  found: dict[str, Task] = {}
  for _ in range(20 * n + 1000):
    if len(found) == n:
      break
    template = templates[rng.integers(len(templates))]
    task = _task(rng, split, template, pool, system)
    if task is not None:
      found.setdefault(task.id, task)
  if len(found) < n:
    raise ValueError(
      f'found {len(found)} different tasks in split {split!r}, not {n}: ask '
      'for fewer'
    )
  return list(found.values())


def environment(
  *,
  max_calls: int = 4,
  max_failures: int = 3,
  timeout_s: float = 10.0,
  max_chars: int = 1000,
  spec: SandboxSpec | None = None,
  backend: str = 'auto',
  sandbox: Sandbox | None = None,
  open_sandbox: Opener | None = None,
  warm: int = 0,
) -> ToolEnvironment:
  """An environment for one episode; an `EnvironmentFactory`.

  Its sandbox is started at the first call and ends with it.

  Args:
    open_sandbox: opens it instead of `spec` and `backend`.
    warm: sandboxes that this process has ready, for the episodes of all
      environments with this `spec` and `backend`; the run closes them. 0: an
      episode waits for its own to be started.
    sandbox: an open one for many episodes instead, for scripted experts:
      files would go from one episode to the next.

  Raises:
    SandboxUnavailable: nothing here can run code apart.
    ValueError: the calls can outlast the sandbox.
  """
  lasting = sandbox.spec if sandbox else spec or SandboxSpec()
  lasting.check_calls(max_calls, timeout_s)
  if warm and open_sandbox is None and sandbox is None:
    open_sandbox = pools.shared(spec, backend, warm)
  tool = PythonTool(
    spec,
    backend,
    timeout_s=timeout_s,
    max_chars=max_chars,
    sandbox=sandbox,
    open_sandbox=open_sandbox,
  )
  return ToolEnvironment(
    [tool],
    judge,
    max_calls=max_calls,
    max_failures=max_failures,
    close=tool.close,
  )


def judge(task: Task, answer: str | None) -> bool:
  """True if the answer is the number, however it is written."""
  return verify.same_number(answer, task.verify['answer'])


def expert(rng: np.random.Generator, task: Task, flaws: float = 0.0) -> Expert:
  """Solves `task`, but with probability `flaws` one flaw of `FLAWS` is in it.

  Run it by `demonstrate`. After a flaw that shows in what it reads, the
  expert calls again and goes on well.
  """
  flaw = FLAWS[rng.integers(len(FLAWS))] if rng.random() < flaws else None
  return _act_out(rng, task, flaw)


def _act_out(rng, task: Task, flaw: str | None) -> Iterator[Act]:
  answer = task.verify['answer']
  if flaw == 'answers_without_calling':
    yield Act(answer=wrong_digit(rng, answer))
    return
  expression = task.metadata['expression']
  if flaw == 'first_step_only':
    expression = task.metadata['first']
  elif flaw == 'wrong_operand':
    expression = wrong_digit(rng, expression)
  elif flaw == 'wrong_operator':
    expression = _other_operator(rng, expression)
  if flaw == 'forgets_print':
    yield call('python', code=expression)
  elif flaw == 'syntax_error':
    yield call('python', code=f'print({expression}')
  (result,) = yield call('python', code=f'print({expression})')
  if flaw == 'slip_in_answer':
    result = wrong_digit(rng, result)
  yield Act(answer=result)


def _other_operator(rng, expression: str) -> str:
  places = [i for i, c in enumerate(expression) if c in '+-*/%']
  at = places[rng.integers(len(places))]
  others = [o for o in _OPERATORS if o != expression[at]]
  end = at + 1 + (expression[at : at + 2] == '//')
  return expression[:at] + others[rng.integers(len(others))] + expression[end:]


def _held_out(number: int) -> bool:
  return hashlib.sha256(f'number {number}'.encode()).digest()[0] < 64


def _task(rng, split, template: Template, pool, system) -> Task | None:
  """A random task of a template, or None where the numbers do not fit."""
  values = {}
  for name, (low, high) in template.ranges.items():
    fitting = [n for n in pool if low <= n <= high]
    values[name] = fitting[rng.integers(len(fitting))]
  results = template.compute(**values)
  if min(results) < 1:
    return None
  who = NAMES[rng.integers(len(NAMES))]
  text = template.text.format(name=who, **values)
  messages = [Message('user', text)]
  if system is not None:
    messages.insert(0, Message('system', system))
  chosen = '-'.join(str(v) for v in values.values())
  return Task(
    f'word-{split}-{template.name}-{who.lower()}-{chosen}',
    tuple(messages),
    verify={'answer': str(results[-1])},
    metadata={
      'template': template.name,
      'numbers': list(values.values()),
      'first': template.first.format(**values),
      'expression': template.expression.format(**values),
    },
  )
