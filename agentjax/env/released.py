"""Rows of released data sets as tasks: questions and mathematics.

Floor 1, env. Files as their authors publish them, read where they lie: JSONL
or Parquet. Each function makes the tasks of one form of row; a row that is not
of that form is refused with its place, so that no run trains on half of a
set. Ids name set, split and row, and are unique over all sets: a group is the
trajectories of one id.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping

from agentjax.env import retool
from agentjax.env.search import PROMPT
from agentjax.types import Message, Task

# The sets of Search-R1; it trains on the first two and tests on all seven.
QUESTION_SETS = (
  'nq', 'hotpotqa', 'triviaqa', 'popqa', '2wikimultihopqa', 'musique',
  'bamboogle',
)  # fmt: skip
TEST_SPLITS = ('test', 'dev', 'train')  # the first of them that there is

Row = Mapping
# (row, its number in the file) -> task.
ToTask = Callable[[Row, int], Task]


def read_rows(path: str | os.PathLike) -> Iterator[dict]:
  """The rows of a .jsonl or .parquet file, in order.

  Raises:
    ValueError: another kind of file, or a line that is no object.
  """
  path = pathlib.Path(path)
  if path.suffix == '.parquet':
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
      for batch in file.iter_batches(1024):
        yield from batch.to_pylist()
  elif path.suffix == '.jsonl':
    with path.open('rb') as file:
      for number, line in enumerate(file):
        try:
          row = json.loads(line)
        except ValueError as error:
          raise ValueError(f'{path}, row {number}: {error}') from error
        if not isinstance(row, dict):
          raise ValueError(f'{path}, row {number} is no object')
        yield row
  else:
    raise ValueError(f'{path} is no .jsonl and no .parquet file')


def read_tasks(
  path: str | os.PathLike, to_task: ToTask, most: int | None = None
) -> Iterator[Task]:
  """The tasks of a file, at most `most`.

  Raises:
    ValueError: a row is not of the form; the message names file and row.
  """
  for number, row in enumerate(read_rows(path)):
    if number == most:
      return
    try:
      yield to_task(row, number)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
      raise ValueError(
        f'{path}, row {number}, is not of the form that is asked for '
        f'({type(error).__name__}: {error})'
      ) from error


# ---- questions --------------------------------------------------------------


def question(
  row: Row, number: int, *, dataset: str, split: str, prompt: str = PROMPT
) -> Task:
  """A row of the raw sets: `question`, `golden_answers`, `id`.

  The question ends with a question mark, which is added where it lacks.
  """
  text = row['question'].strip()
  text += '' if text.endswith('?') else '?'
  id = row.get('id', number)
  return Task(
    f'{dataset}-{split}-{id}',
    (Message('user', prompt.format(question=text)),),
    verify={'answers': _answers(row['golden_answers'])},
    metadata={'dataset': dataset, 'question': text},
  )


def processed_question(row: Row, number: int) -> Task:
  """A row of the processed sets, with its own prompt.

  Its index begins anew in each set, and two questions of one index are not
  the same: the id has the set's name as well.
  """
  info = row['extra_info']
  target = row['reward_model']['ground_truth']['target']
  return Task(
    f'{row["data_source"]}-{info["split"]}-{info["index"]}',
    tuple(Message(m['role'], m['content']) for m in row['prompt']),
    verify={'answers': _answers(target)},
    metadata={'dataset': row['data_source']},
  )


def _answers(given) -> list[str]:
  answers = [given] if isinstance(given, str) else list(given)
  if not answers or not all(isinstance(a, str) for a in answers):
    raise ValueError(f'golden answers {given!r}: at least one text')
  return answers


def question_file(
  folder: str | os.PathLike, dataset: str, split: str
) -> tuple[pathlib.Path, str]:
  """(file, split) of a raw set; of 'test' the first of `TEST_SPLITS`.

  Raises:
    ValueError: there is none.
  """
  wanted = TEST_SPLITS if split == 'test' else (split,)
  for name in wanted:
    for suffix in ('.jsonl', '.parquet'):
      path = pathlib.Path(folder) / dataset / f'{name}{suffix}'
      if path.exists():
        return path, name
  raise ValueError(
    f'{folder} has no {dataset}/{split}.jsonl: download the set there'
  )


# ---- mathematics ------------------------------------------------------------


def aime(row: Row, number: int, *, dataset: str, suffix: str = '') -> Task:
  """A row of an AIME file: input and output, or problem and answer."""
  lower = {key.lower(): value for key, value in row.items()}
  pairs = (('input', 'output'), ('problem', 'answer'))
  pair = next((p for p in pairs if p[0] in lower and p[1] in lower), None)
  if pair is None:
    raise ValueError(f'keys {sorted(row)}: {" or ".join(map(str, pairs))}')
  problem, answer = (lower[key] for key in pair)
  return _problem(f'{dataset}-test-{number}', dataset, problem, answer, suffix)


def dapo_math(row: Row, number: int, *, suffix: str = '') -> Task:
  """A row of DAPO-Math-17k, which has its instructions in the prompt."""
  (message,) = row['prompt']
  if message['role'] != 'user':
    raise ValueError(f'role {message["role"]!r}: the user asks')
  index = row['extra_info']['index']
  answer = row['reward_model']['ground_truth']
  return _problem(
    f'dapo_math-train-{index}', 'dapo_math', message['content'], answer, suffix
  )


def _problem(id: str, dataset: str, problem: str, answer, suffix: str) -> Task:
  if not isinstance(problem, str) or not str(answer).strip():
    raise ValueError(f'problem {problem!r}, answer {answer!r}: both are needed')
  return Task(
    id,
    (Message('user', problem + suffix),),
    verify={'answer': str(answer).strip()},
    metadata={'dataset': dataset},
  )


@dataclasses.dataclass
class Repeats:
  """What `without_repeats` left out: rows, and problems of two answers."""

  repeated: int = 0
  contradicted: int = 0


def without_repeats(
  tasks: Iterator[Task], found: Repeats | None = None
) -> list[Task]:
  """Each problem once; none of which two rows give different answers.

  Problems are compared up to blanks. Of equal ones the first stays. (The
  released file of DAPO-Math-17k has each about a hundred times.)
  """
  found = Repeats() if found is None else found
  kept: dict[str, Task] = {}
  contradicted = set()
  for task in tasks:
    text = ' '.join(' '.join(m.content for m in task.messages).split())
    first = kept.setdefault(text, task)
    if first is task:
      continue
    found.repeated += 1
    if first.verify != task.verify:
      contradicted.add(text)
  found.contradicted = len(contradicted)
  return [task for text, task in kept.items() if text not in contradicted]


# ---- demonstrations ---------------------------------------------------------


def retool_demonstration(row: Row, number: int) -> Task:
  """A row of ReTool-SFT: a task whose messages are the whole conversation."""
  messages = retool.parse_demonstration(row['messages'])
  return Task(f'retool_sft-train-{number}', tuple(messages))
