"""Code writing: a function in a file, judged on hidden inputs.

Floor 1, env. The policy works with Python in its own sandbox, where a stub and
visible tests lie, and writes solution.py. At the end the file is copied out,
the sandbox dies, and a fresh one judges: nothing that the policy did to its
sandbox, its tests or its processes reaches the verdict (see `judge`). What it
tampered with is recorded in the parts of the reward. Needs sandboxes; where
none can run, `environment` says so.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator

import numpy as np

from agentjax.env.base import Opening
from agentjax.env.code_problems import FAMILIES, FUNCTION, TEST, TRAIN
from agentjax.env.demonstrate import Act, Expert, call
from agentjax.env.judge import (
  Journal,
  Judgement,
  Outcome,
  as_tested,
  decide,
  judge_spec,
)
from agentjax.env.judge.workplace import Workplace
from agentjax.env.sandbox import (
  Sandbox,
  SandboxSpec,
  choose_backend,
  open_sandbox,
)
from agentjax.env.tool_environment import ToolEnvironment
from agentjax.env.tools import PythonTool
from agentjax.types import Message, Reward, Status, Step, Task, Turn

SPLITS = ('train', 'test')
# Silence and noise are owed nothing; whoever writes the file needs no answer.
BASELINES = {'silent': 1.0}
_ENTRY = 'solution.py'


def tasks(
  split: str, n: int, seed: int = 0, *, system: str | None = None
) -> list[Task]:
  """`n` different tasks; a pure function of its arguments.

  The first k of n tasks are those of a call with k.

  Args:
    system: text of a system message to put first.

  Raises:
    ValueError: unknown split, or not that many different tasks.
  """
  if split not in SPLITS:
    raise ValueError(f'split {split!r}: choose one of {SPLITS}')
  for name, value in (('n', n), ('seed', seed)):
    if value < 0:
      raise ValueError(f'{name} is {value}: give 0 or more')
  families = TEST if split == 'test' else TRAIN
  rng = np.random.default_rng([seed, SPLITS.index(split)])
  found: dict[str, Task] = {}
  for _ in range(20 * n + 1000):
    if len(found) == n:
      break
    family = families[rng.integers(len(families))]
    values = {
      name: int(rng.integers(low, high + 1))
      for name, (low, high) in family.ranges.items()
    }
    task = _task(split, family, values, system)
    found.setdefault(task.id, task)
  if len(found) < n:
    raise ValueError(
      f'found {len(found)} different tasks in split {split!r}, not {n}: ask '
      'for fewer'
    )
  return list(found.values())


def given_files(task: Task) -> dict[str, bytes]:
  """What the policy finds in its folder: a stub and two visible tests."""
  family = FAMILIES[task.verify['family']]
  judged = family.task(task.verify['values'])
  stub = f'def {FUNCTION}({family.arguments}):\n  raise NotImplementedError\n'
  lines = [f'from solution import {FUNCTION}\n']
  for number, values in enumerate(judged.edges[:2], 1):
    shown = ', '.join(map(repr, values))
    right = judged.reference(*values)
    lines.append(
      f'\n\ndef test_{number}():\n  assert {FUNCTION}({shown}) == {right!r}\n'
    )
  return {
    _ENTRY: stub.encode(),
    'tests/test_solution.py': ''.join(lines).encode(),
  }


def environment(
  *,
  max_calls: int = 6,
  max_failures: int = 3,
  timeout_s: float = 10.0,
  max_chars: int = 1000,
  spec: SandboxSpec | None = None,
  backend: str = 'auto',
  open_policy: Callable[[], Sandbox] | None = None,
  open_judge: Callable[[], Sandbox] | None = None,
  pay: Callable[[Judgement], float] = as_tested,
  journal: str | None = None,
) -> CodeEnvironment:
  """An environment for one episode; an `EnvironmentFactory`.

  Args:
    open_policy, open_judge: open the policy's and the judge's sandbox, for
      pools of them; by default `spec` and `backend` do.
    pay: what a verdict is worth: `as_tested` or `nothing_if_tampered`.
    journal: folder of the verdicts; None: they stand in the rewards alone.

  Raises:
    SandboxUnavailable: nothing here can run code apart.
    ValueError: the calls can outlast the sandbox.
  """
  spec = spec or SandboxSpec()
  spec.check_calls(max_calls, timeout_s)
  if open_policy is None or open_judge is None:
    backend = choose_backend(spec, backend)
  return CodeEnvironment(
    spec,
    open_policy or functools.partial(open_sandbox, spec, backend),
    open_judge or functools.partial(open_sandbox, judge_spec(spec), backend),
    pay=pay,
    journal=None if journal is None else Journal(journal),
    max_calls=max_calls,
    max_failures=max_failures,
    timeout_s=timeout_s,
    max_chars=max_chars,
  )


class CodeEnvironment:
  """Implements `Environment`; see `environment` for the arguments."""

  def __init__(
    self,
    spec: SandboxSpec,
    open_policy: Callable[[], Sandbox],
    open_judge: Callable[[], Sandbox],
    *,
    pay: Callable[[Judgement], float],
    journal: Journal | None,
    max_calls: int,
    max_failures: int,
    timeout_s: float,
    max_chars: int,
  ):
    self._spec, self._open_policy = spec, open_policy
    self._open_judge, self._pay, self._journal = open_judge, pay, journal
    self._limits = {'max_calls': max_calls, 'max_failures': max_failures}
    self._reading = {'timeout_s': timeout_s, 'max_chars': max_chars}
    self._task: Task | None = None
    self._workplace: Workplace | None = None
    self._turns: ToolEnvironment | None = None
    self._judgement: Judgement | None = None

  def reset(self, task: Task) -> Opening:
    """See `Environment`."""
    if self._task is not None:
      raise RuntimeError('an environment is for one episode: make another')
    self._task = task
    self._workplace = Workplace(
      self._spec, self._open_policy, given_files(task)
    )
    tool = PythonTool(sandbox=self._workplace, **self._reading)
    self._turns = ToolEnvironment([tool], _no_judge, **self._limits)
    return self._turns.reset(task)

  def step(self, turn: Turn) -> Step:
    """See `Environment`."""
    return self._turns.step(turn)

  def verify(self, status: Status) -> Reward:
    """See `Environment`. However it ended, what is in the file counts.

    Asked again, it says the same.

    Raises:
      InfraError: there is no verdict.
    """
    if self._judgement is None:
      self._judgement = self._judge()
    judgement = self._judgement
    parts = dict(self._turns.verify(status).parts)
    parts['tampered'] = float(bool(judgement.tamper))
    for mark in judgement.tamper:
      parts[f'tampered: {mark.split(":")[0]}'] = 1.0
    if judgement.reason is not None:
      parts[f'failed: {judgement.reason.value}'] = 1.0
    passed = judgement.outcome is Outcome.PASS
    return Reward(self._pay(judgement), passed, parts)

  def close(self) -> None:
    """See `Environment`."""
    if self._workplace is not None:
      self._workplace.close()

  def _judge(self) -> Judgement:
    family = FAMILIES[self._task.verify['family']]
    judged = family.task(self._task.verify['values'])
    submission = self._workplace.hand_in(judged.rule())

    def judge() -> Judgement:
      return decide(submission, judged.judge(), self._open_judge)

    if self._journal is None:
      return judge()
    # No two episodes have one name, those of a run that was resumed neither.
    return self._journal.once(f'{self._task.id}/{secrets.token_hex(8)}', judge)


def expert(rng: np.random.Generator, task: Task, flaws: float = 0.0) -> Expert:
  """Writes a right solution, but with probability `flaws` a wrong one.

  Run it by `demonstrate`.
  """
  source = FAMILIES[task.verify['family']].source(task.verify['values'])
  if rng.random() < flaws:
    source += '  \n\n' + f'_right = {FUNCTION}\n\n\n'
    source += f'def {FUNCTION}(*values):\n  return [_right(*values)]\n'
  return _act_out(source)


def _act_out(source: str) -> Iterator[Act]:
  code = f'open({_ENTRY!r}, "w").write({source!r})'
  yield call('python', code=code)
  yield Act(answer='done')


def _no_judge(task: Task, answer: str | None) -> bool:
  return False  # the file decides, not what is said of it


def _task(split, family, values, system) -> Task:
  text = (
    f'Write solution.py with a function {FUNCTION}({family.arguments}) that '
    f'{family.question(values)}. A stub and tests are in your folder.'
  )
  messages = [Message('user', text)]
  if system is not None:
    messages.insert(0, Message('system', system))
  chosen = '-'.join(str(v) for v in values.values())
  return Task(
    f'code-{split}-{family.name}-{chosen}',
    tuple(messages),
    verify={'family': family.name, 'values': values},
  )
