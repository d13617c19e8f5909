"""Tasks from a file: one JSON object a line.

Floor 1, env. A file is taken whole or not at all: a line that is no task
raises and says which and why, so that no run trains on half of a set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

from agentjax import storage
from agentjax.records import task_from_json, task_to_json
from agentjax.types import Task


def read_tasks(path: str | os.PathLike) -> list[Task]:
  """The tasks of a JSONL file, in its order.

  Lines end with a line feed and nothing else: U+2028 and the like are text.

  Raises:
    ValueError: it holds no task, or a line is empty, not UTF-8, not JSON or
      not a task, or an id comes twice; the message names file, line and
      reason.
  """
  path = os.fspath(path)
  lines = storage.read_bytes(path).split(b'\n')
  if lines[-1] == b'':
    lines.pop()
  if not lines:
    raise ValueError(f'{path} is empty: give one task a line')
  tasks: dict[str, Task] = {}
  first: dict[str, int] = {}
  for number, line in enumerate(lines, 1):
    try:
      task = _task(line)
      if task.id in tasks:
        raise ValueError(f'id {task.id!r} is that of line {first[task.id]} too')
    except (ValueError, TypeError, KeyError, RecursionError) as error:
      raise ValueError(
        f'{path}, line {number}: {error}. No task of this file was '
        'taken: correct the line'
      ) from error
    tasks[task.id] = task
    first[task.id] = number
  return list(tasks.values())


def write_tasks(path: str | os.PathLike, tasks: Iterable[Task]) -> None:
  """Inverse of `read_tasks`."""
  lines = [
    json.dumps(task_to_json(task), ensure_ascii=False) + '\n' for task in tasks
  ]
  storage.write_text(path, ''.join(lines))


def _task(line: bytes) -> Task:
  if not line.strip():
    raise ValueError('the line is empty')
  data = json.loads(
    line.decode('utf-8'),
    object_pairs_hook=_no_key_twice,
    parse_constant=_no_constant,
  )
  return task_from_json(data)


def _no_key_twice(pairs: list) -> dict:
  out = dict(pairs)
  if len(out) != len(pairs):
    raise ValueError(f'a key stands twice in {[key for key, _ in pairs]}')
  return out


def _no_constant(name: str) -> None:
  raise ValueError(f'{name} is not JSON')
