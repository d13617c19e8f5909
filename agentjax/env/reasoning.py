"""The tasks of reasoning-gym: over 100 generators, each with its grader.

Floor 1, env. The package (extra `data`) runs in worker processes alone: it
takes seconds to import, its generators may search for long, and some of its
graders evaluate what a policy wrote. Those are given what is arithmetic and
nothing else. A task is made again from dataset, seed and index when it is
graded, so that nothing of an entry is lost on the way.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentjax.env import apart_worker
from agentjax.env.apart import Apart, Exhausted
from agentjax.env.base import Tool
from agentjax.env.tool_environment import ToolEnvironment
from agentjax.types import Message, Reward, Task

SPLITS = ('train', 'test')
# Not offered, and why.
LEFT_OUT = {
  'composite': 'it is made of others',
  'game_of_life_halting': 'its grader takes any text for True',
}
SYSTEM = (
  'Think first, then give the final answer between <answer> and </answer>, '
  'in the form that the question asks for and without anything else.'
)
MAX_ANSWER = 10_000
_ANSWER = re.compile(r'<answer>(.*?)</answer>', re.DOTALL)

# Graders that call eval on an answer, or parse_expr, which calls it.
_EVALUATED = (
  'binary_matrix', 'n_queens', 'spiral_matrix', 'string_insertion',
)  # fmt: skip
_PARSED = (
  'countdown', 'intermediate_integration', 'polynomial_multiplication',
  'puzzle24', 'simple_integration',
)  # fmt: skip
_FUNCTIONS = (
  'sin cos tan asin acos atan sinh cosh tanh exp log ln sqrt pi E Abs sec csc '
  'cot'
).split()
_WORD = re.compile(r'[A-Za-z_]\w*')


class Gym:
  """Makes and grades tasks. Safe to use from many threads.

  Args:
    workers: processes.
    make_s: processor seconds of one task: a generator may search for long.
    grade_s: of one answer.
  """

  def __init__(
    self, *, workers: int = 2, make_s: float = 60.0, grade_s: float = 5.0
  ):
    self._apart = Apart(
      'agentjax.env.reasoning:answer_call',
      workers=workers,
      cpu_s=make_s,
      wall_s=10 * make_s,
      imports=['reasoning_gym'],
    )
    self._grade_s = grade_s
    self.exhausted = 0  # answers that used the budget up

  def datasets(self) -> list[str]:
    """Names of all generators that are offered."""
    return self._apart('names')

  def tasks(
    self,
    dataset: str,
    split: str,
    n: int,
    seed: int = 0,
    *,
    config: Mapping[str, Any] | None = None,
    system: str | None = SYSTEM,
  ) -> list[Task]:
    """`n` different tasks of one generator; a pure function of its arguments.

    A question belongs to the train or the test split by its text, so that
    none is in both, whatever the seeds.

    Raises:
      ValueError: unknown dataset or split, a config that it refuses, or not
        that many different questions among 20 n + 100.
      Exhausted: it searches for too long for one.
    """
    if split not in SPLITS or n < 0:
      raise ValueError(
        f'split {split!r}, n {n}: choose one of {SPLITS}, and 0 or more'
      )
    if dataset not in self.datasets():
      why = LEFT_OUT.get(dataset, 'there is none of that name')
      raise ValueError(f'dataset {dataset!r}: {why}')
    config, found = dict(config or {}), {}
    for index in range(20 * n + 100):
      if len(found) == n:
        break
      question = self._apart('make', dataset, config, seed, index)
      if held_out(question) == (split == 'test'):
        found.setdefault(question, index)
    if len(found) < n:
      raise ValueError(
        f'{dataset} gave {len(found)} different questions of split {split!r}, '
        f'not {n}: ask for fewer, or give a harder config'
      )
    before = [] if system is None else [Message('system', system)]
    return [
      Task(
        f'{dataset}-{seed}-{index}' + (f'-{_digest(config)}' if config else ''),
        (*before, Message('user', question)),
        verify={
          'dataset': dataset, 'config': config, 'seed': seed, 'index': index,
          'question': _digest(question),
        },
      )
      for question, index in found.items()
    ]  # fmt: skip

  def score(self, task: Task, answer: str | None) -> float:
    """The grader's score of an answer, 0 to 1; 0 where there is none.

    Raises:
      InfraError: the grader cannot be asked.
      RuntimeError: the generator no longer makes this task.
    """
    said = stated(answer)
    if said is None or len(said) > MAX_ANSWER:
      return 0.0
    v = task.verify
    if not is_harmless(v['dataset'], said):
      return 0.0
    try:
      return self._apart(
        'score', v['dataset'], dict(v['config']), v['seed'], v['index'],
        v['question'], said, self._grade_s,
      )  # fmt: skip
    except Exhausted:
      self.exhausted += 1
      return 0.0

  def solved(self, task: Task, answer: str | None) -> bool:
    """A `Judge`: whether the grader gives the full score.

    Many give a little to a wrong answer, an empty one too.
    """
    return self.score(task, answer) >= 1.0

  def graded(self, task: Task, answer: str | None) -> Reward:
    """A `Judge`: the score is the reward; success is the full one."""
    score = self.score(task, answer)
    return Reward(score, score >= 1.0, {'score': score})

  def close(self) -> None:
    """Ends the workers. Idempotent, never raises."""
    self._apart.close()


def environment(
  judge: Callable[[Task, str | None], bool | Reward],
  *,
  tools: Sequence[Tool] = (),
  max_calls: int = 4,
  max_failures: int = 3,
  close: Callable[[], None] | None = None,
) -> ToolEnvironment:
  """An environment for one episode: `judge` is a Gym's; one turn, or several
  with tools, such as Python in a sandbox, which `close` closes."""
  return ToolEnvironment(
    tools,
    judge,
    max_calls=max_calls,
    max_failures=max_failures,
    close=close,
  )


def held_out(question: str) -> bool:
  """Whether a question belongs to the test split: one in four."""
  return hashlib.sha256(question.encode()).digest()[0] < 64


def stated(answer: str | None) -> str | None:
  """What an answer states: the last answer tag in it, else all of it."""
  if answer is None:
    return None
  found = _ANSWER.findall(answer)
  return (found[-1] if found else answer).strip() or None


def is_harmless(dataset: str, answer: str) -> bool:
  """Whether the dataset's grader may see an answer.

  What is evaluated must be a literal or be unable to call anything; what is
  parsed as an expression must be arithmetic with known names.
  """
  if dataset in _EVALUATED:
    try:
      ast.literal_eval(answer)
      return True
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
      return '(' not in answer
  if dataset in _PARSED:
    plain = re.sub(r'(?<=\d)\.(?=\d)', '0', answer)  # decimals
    if not re.fullmatch(r'[0-9A-Za-z+\-*/^() ]*', plain):
      return False
    words = _WORD.findall(plain)
    return all(len(w) == 1 or w in _FUNCTIONS for w in words)
  return True


def _digest(value: Any) -> str:
  return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


# ---- in a worker ------------------------------------------------------------


def answer_call(what: str, *arguments: Any) -> Any:
  """What `Gym` asks of a worker: 'names', 'make' or 'score'."""
  calls = {'names': _names, 'make': _make, 'score': _score}
  return calls[what](*arguments)


def _names() -> list[str]:
  from reasoning_gym.factory import DATASETS

  return sorted(set(DATASETS) - set(LEFT_OUT))


# Entries of a dataset of theirs: some of them depend on how many there are.
_BLOCK = 500
_APART = 1_000_003  # seeds of ours are further apart than any number of tasks


@functools.lru_cache(maxsize=8)
def _block(name: str, config: tuple, seed: int):
  import reasoning_gym

  return reasoning_gym.create_dataset(
    name, seed=seed, size=_BLOCK, **dict(config)
  )


@functools.lru_cache(maxsize=256)  # a group's answers are graded one by one
def _entry(name: str, config: tuple, seed: int, index: int):
  first = index - index % _BLOCK
  data = _block(name, config, seed * _APART + first)
  return data, data[index - first]


def entry_of(name: str, config: dict, seed: int, index: int):
  """(the dataset that grades it, the entry) of a task."""
  return _entry(name, tuple(config.items()), seed, index)


def _make(name: str, config: dict, seed: int, index: int) -> str:
  return entry_of(name, config, seed, index)[1]['question']


def _score(
  name: str, config: dict, seed: int, index: int, digest: str, answer: str,
  grade_s: float,
) -> float:  # fmt: skip
  data, entry = entry_of(name, config, seed, index)
  if _digest(entry['question']) != digest:
    raise RuntimeError(
      f'{name}, seed {seed}, index {index} is another question now: the tasks '
      'were made by another version of reasoning-gym; make them anew'
    )
  # From here on the policy decides how much work there is.
  apart_worker.allow_cpu(grade_s)
  try:
    return float(data.score_answer(answer, entry))
  except Exception:  # an answer that is not in the form that was asked for
    return 0.0
