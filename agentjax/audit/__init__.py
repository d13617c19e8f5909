"""Audit: what policies that know nothing earn, and what they are owed.

Floor 3. An environment that pays for silence, for its own prompt or for noise
teaches a policy just that. Before anything is trained on it, policies without
a model play it, by turns and through the real loop with tokens, and so does
its scripted expert; `python -m agentjax.audit` prints the table. A test of an
environment is one line: `audit.check(module)`. A run prints what silence earns
before its first step (`null_baseline`).

An environment is audited by what its module has: `SPLITS`, `tasks(split, n,
seed)`, `environment()`, `expert(rng, task)` if it has one, and `BASELINES`:
by name of a policy the mean reward that it is owed at most (gold: at least).
What that does not state is 0, and 1 for gold. No JAX is imported here.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from agentjax.audit import play, policies
from agentjax.audit.rows import GOLD, HEAD, OK, Row, line, row, table
from agentjax.env.base import EnvironmentFactory
from agentjax.env.demonstrate import Expert
from agentjax.rollout.episode import Limits
from agentjax.text import formats
from agentjax.text.chat import Chat
from agentjax.text.vocab import byte_vocab
from agentjax.types import Task

__all__ = [
  'Subject',
  'audit',
  'check',
  'null_baseline',
  'null_totals',
  'show',
  'subject',
  'table',
]

# Of a chat in which each byte is a token.
BYTE_LIMITS = Limits(
  turns=play.TURNS,
  turn_tokens=8192,
  model_tokens=32768,
  context=131072,
  observation_tokens=8192,
)


@dataclasses.dataclass(frozen=True)
class Subject:
  """What is audited.

  Attributes:
    name: for people. expert: None where there is none.
    baselines: by name of a policy.
    chat, limits: of the way by tokens; by default one id a byte, in the
      format of Qwen2.5.
  """

  name: str
  tasks: Sequence[Task]
  make_environment: EnvironmentFactory
  expert: Callable[[np.random.Generator, Task], Expert] | None = None
  baselines: Mapping[str, float] = dataclasses.field(default_factory=dict)
  chat: Chat | None = None
  limits: Limits = BYTE_LIMITS

  def stated(self, policy: str) -> float:
    return self.baselines.get(policy, float(policy == GOLD))


def subject(
  module: types.ModuleType, *, n: int = 64, seed: int = 0, **changes: Any
) -> Subject:
  """The environment of a module, with `n` tasks of all its splits together.

  `changes` are fields of `Subject`.

  Raises:
    ValueError: the module lacks something, or its tasks do not suffice.
  """
  if missing := [
    name
    for name in ('SPLITS', 'tasks', 'environment')
    if not hasattr(module, name)
  ]:
    raise ValueError(
      f'{module.__name__} has no {", ".join(missing)}: a module that is '
      'audited has SPLITS, tasks(split, n, seed), environment(), and expert('
      'rng, task) if there is one'
    )
  tasks = changes.pop('tasks', None)
  if tasks is None:
    shares = [
      part.size for part in np.array_split(range(n), len(module.SPLITS))
    ]
    tasks = [
      task
      for split, share in zip(module.SPLITS, shares, strict=True)
      for task in module.tasks(split, share, seed)
    ]
  fields = {
    'name': module.__name__,
    'make_environment': module.environment,
    'expert': getattr(module, 'expert', None),
    'baselines': getattr(module, 'BASELINES', {}),
  }
  return Subject(tasks=tasks, **(fields | changes))


def audit(
  subject: Subject,
  *,
  seed: int = 0,
  threads: int = 1,
  seconds: float = 600.0,
) -> Iterator[Row]:
  """The rows of the table, one after the other as they are played.

  Args:
    threads: episodes at once. seconds: of one, which is then given up.
  """
  chat = subject.chat or Chat(byte_vocab(), formats.qwen2_5)
  ways = {
    'turns': play.by_turns,
    'tokens': play.by_tokens(chat, subject.limits),
  }
  options = {'seed': seed, 'threads': threads, 'seconds': seconds}
  golden: list[play.Played] = []
  if subject.expert is not None:
    golden = _played(subject, ways['turns'], policies.gold, [], **options)
  chosen = policies.ALONE + (policies.WITH_EXPERT if golden else ())
  answers = [p.answer for p in golden]
  null = {}
  for policy in chosen:
    for name, way in ways.items():
      made = _played(subject, way, policy, answers, **options)
      said = row(policy.__name__, name, made, subject.stated(policy.__name__))
      null.setdefault(name, said.reward)
      yield said
  if not golden:
    return
  stated = subject.stated(GOLD)
  yield row(GOLD, 'turns', golden, stated, null['turns'])
  made = _played(subject, ways['tokens'], policies.gold, answers, **options)
  yield row(GOLD, 'tokens', made, stated, null['tokens'])


def show(subject: Subject, *, seed: int = 0, threads: int = 1) -> bool:
  """Prints the table as it is played; True if every verdict is ok.

  Raises:
    InfraError: the environment cannot be made here.
  """
  subject.make_environment().close()
  print(f'{subject.name}: {len(subject.tasks)} tasks, seed {seed}')
  print(HEAD, flush=True)
  good, failure = True, None
  for made in audit(subject, seed=seed, threads=threads):
    print(line(made), flush=True)
    good = good and made.verdict == OK
    if made.error and failure is None:
      failure = f'{made.policy}, by {made.way}:\n{made.error}'
  if failure:
    print(f'\nthe first failure, of {failure}')
  if subject.expert is None:
    print('no expert, so no gold policy and none that needs its answers')
  return good


def check(
  module: types.ModuleType, *, n: int = 64, seed: int = 0, **changes: Any
) -> list[Row]:
  """Audits the environment of a module, for its test; returns the rows.

  Raises:
    AssertionError: a verdict is not ok; has the table.
  """
  rows = list(audit(subject(module, n=n, seed=seed, **changes), seed=seed))
  errors = [r.error for r in rows if r.error]
  assert all(r.verdict == OK for r in rows), '\n'.join([table(rows), *errors])
  return rows


def null_baseline(
  tasks: Sequence[Task],
  make_environment: EnvironmentFactory,
  chat: Chat,
  limits: Limits,
  *,
  n: int = 32,
  threads: int = 8,
  seconds: float = 60.0,
) -> Row:
  """What a policy earns that says nothing, on `n` of the tasks.

  They are spread evenly over all; nothing is drawn, and nothing raises.
  """
  n = min(n, len(tasks))
  chosen = [tasks[i * len(tasks) // n] for i in range(n)]
  of = Subject('', chosen, make_environment, chat=chat, limits=limits)
  way = play.by_tokens(chat, limits)
  made = _played(
    of, way, policies.null, [], seed=0, threads=threads, seconds=seconds
  )
  return row('null', 'tokens', made, float('inf'))


def null_totals(
  tasks: Sequence[Task],
  make_environment: EnvironmentFactory,
  chat: Chat,
  limits: Limits,
  threads: int,
  seconds: float,
) -> dict[str, float]:
  """Prints the null baseline of a run; returns it as its summary has it.

  What fails in it is said and counted, and ends nothing: a run has guards of
  its own. Where nothing was scored there is no reward in what it returns.
  """
  made = null_baseline(
    tasks, make_environment, chat, limits,
    threads=threads, seconds=min(seconds, 60.0),
  )  # fmt: skip
  scored = made.n - made.failed
  print(
    f'null policy: reward {made.reward:.3f} '
    f'[{made.low:.3f}, {made.high:.3f}], success {made.success:.3f}, of '
    f'{scored} episodes that say nothing'
  )
  if made.failed:
    last = (made.error or 'no reward').strip().splitlines()[-1]
    print(f'null policy: {made.failed} of {made.n} episodes failed: {last}')
  found = {'null_episodes': scored}
  if scored:
    found |= {'null_reward': made.reward, 'null_success': made.success}
  return found


def _played(
  subject: Subject,
  way: play.Way,
  policy: policies.Policy,
  answers: Sequence[str | None],
  *,
  seed: int,
  threads: int,
  seconds: float,
) -> list[play.Played]:
  """An episode of each task. `answers` are the right ones, of those tasks."""
  name = zlib.crc32(policy.__name__.encode())

  def one(i: int) -> play.Played:
    task, expert = subject.tasks[i], None
    if subject.expert is not None:
      rng = np.random.default_rng([seed, i])
      expert = functools.partial(subject.expert, rng, task)
    return play.play(
      way,
      subject.make_environment,
      task,
      policy,
      rng=np.random.default_rng([seed, name, i]),
      answers=_others(answers, i),
      answer=answers[i] if answers else None,
      expert=expert,
    )

  episodes = [functools.partial(one, i) for i in range(len(subject.tasks))]
  return play.play_all(episodes, threads=threads, seconds=seconds)


def _others(answers: Sequence[str | None], i: int) -> tuple[str, ...]:
  """Of up to 256 tasks behind task `i`, round and round."""
  n = len(answers)
  behind = (answers[(i + k) % n] for k in range(1, min(n, 257)))
  return tuple(a for a in behind if a is not None)
