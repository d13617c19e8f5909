"""Records as JSON and flat arrays, and back: the form that they have on disk.

Floor 0, beside `types`. A trajectory is a JSON object, which a person can read
with a pager, and a dict of flat arrays over all of its tokens. This file opens
no file; `recorder` and `env.tasks` do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentjax.types import (
  SCHEMA_VERSION,
  TOKEN_FIELDS,
  Message,
  Reward,
  Segment,
  Source,
  Status,
  Stop,
  Task,
  ToolCall,
  Trajectory,
)


def most_kept(trajectory: Trajectory) -> int:
  """M of the widest `Segment.kept`, 0 where no segment has one."""
  kept = (s.kept for s in trajectory.turns)
  return max((k.shape[1] for k in kept if k is not None), default=0)


def kept_ids(trajectory: Trajectory, width: int) -> np.ndarray:
  """int32[T, width]: `Segment.kept` of all tokens; -1 where there is none.

  The width is at least `most_kept`.
  """
  out, start = np.full((len(trajectory), width), -1, np.int32), 0
  for s in trajectory.segments:
    if s.kept is not None:
      out[start : start + len(s), : s.kept.shape[1]] = s.kept
    start += len(s)
  return out


def trajectory_to_record(
  trajectory: Trajectory, kept: int | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Splits a trajectory into a JSON-able dict and arrays over its tokens.

  Args:
    kept: columns of the array of kept ids, where trajectories of different
      ones are to stand in one; by default as many as it needs. With 0 there is
      no such array.

  Raises:
    ValueError: if a segment has a payload, which no file format holds yet.
  """
  for s in trajectory.segments:
    if s.payload is not None:
      raise ValueError(
        f'a {s.source.name} segment carries a payload of type '
        f'{type(s.payload).__name__}: records hold tokens only'
      )
  record = {
    'schema': SCHEMA_VERSION,
    'id': trajectory.id,
    'task': _jsonable(trajectory.task),
    'segments': [
      {
        'source': s.source.value,
        'n': len(s),
        'stop': s.stop.value if s.stop else None,
        'kv_versions': [list(stretch) for stretch in s.kv_versions],
        'kept': None if s.kept is None else s.kept.shape[1],
      }
      for s in trajectory.segments
    ],
    'status': trajectory.status.value,
    'reward': _jsonable(trajectory.reward),
    'turn_rewards': list(trajectory.turn_rewards),
    'state_keys': list(trajectory.state_keys),
    'draw': trajectory.draw,
    'sample': trajectory.sample,
    'branch': trajectory.branch,
    'parent_id': trajectory.parent_id,
    'row_weight': trajectory.row_weight,
    'error': trajectory.error,
    'info': dict(trajectory.info),
  }
  arrays = {'tokens': trajectory.tokens()}
  for name in (*TOKEN_FIELDS, 'versions'):
    arrays[name] = trajectory.per_token(name)
  kept = most_kept(trajectory) if kept is None else kept
  if kept:
    arrays['kept'] = kept_ids(trajectory, kept)
  return record, arrays


def trajectory_from_record(
  record: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> Trajectory:
  """Inverse of `trajectory_to_record`.

  Raises:
    ValueError: the record has another schema version, or its arrays are not
      as long as its segments.
  """
  if record.get('schema') != SCHEMA_VERSION:
    raise ValueError(
      f'record has schema version {record.get("schema")!r}, this code reads '
      f'{SCHEMA_VERSION}: read it with the release that wrote it'
    )
  total = sum(s['n'] for s in record['segments'])
  segments, start = [], 0
  for s in record['segments']:
    span = slice(start, start + s['n'])
    start += s['n']
    source = Source(s['source'])
    fields = {}
    if source is Source.MODEL:
      fields = {
        name: arrays[name][span] for name in (*TOKEN_FIELDS, 'versions')
      }
      fields['stop'] = Stop(s['stop'])
      # Older records lack these two.
      fields['kv_versions'] = s.get('kv_versions', ())
      if (kept := s.get('kept')) is not None:
        fields['kept'] = arrays['kept'][span, :kept]
    segments.append(Segment(source, arrays['tokens'][span], **fields))
  if total != len(arrays['tokens']):
    raise ValueError(
      f'record {record.get("id")!r} has segments of {total} tokens and arrays '
      f'of {len(arrays["tokens"])}: the files do not belong together'
    )
  reward = record['reward']
  return Trajectory(
    task=task_from_json(record['task']),
    segments=tuple(segments),
    status=Status(record['status']),
    reward=Reward(**reward) if reward is not None else None,
    turn_rewards=tuple(record['turn_rewards']),
    state_keys=tuple(record['state_keys']),
    draw=record['draw'],
    sample=record['sample'],
    branch=record['branch'],
    parent_id=record['parent_id'],
    row_weight=record['row_weight'],
    error=record['error'],
    info=record['info'],
  )


def task_to_json(task: Task) -> dict[str, Any]:
  """A JSON-able dict with every field of the task."""
  return _jsonable(task)


def task_from_json(data: Mapping[str, Any]) -> Task:
  """Inverse of `task_to_json`; `verify` and `metadata` may be absent.

  Raises:
    ValueError: a field is missing, unknown or of the wrong type.
  """
  if not isinstance(data, Mapping):
    raise ValueError(f'a task is a JSON object, not {type(data).__name__}')
  _refuse_unknown('task', data, Task)
  if missing := {'id', 'messages'} - set(data):
    raise ValueError(f'task lacks {sorted(missing)}')
  if not isinstance(data['id'], str) or not data['id']:
    raise ValueError(f'task id {data["id"]!r} is not a non-empty string')
  for name in ('verify', 'metadata'):
    if not isinstance(data.get(name, {}), Mapping):
      raise ValueError(f'task field {name} is not a JSON object')
  if not isinstance(data['messages'], list) or not data['messages']:
    raise ValueError('task field messages is not a non-empty list')
  return Task(
    id=data['id'],
    messages=tuple(_message_from_json(m) for m in data['messages']),
    verify=dict(data.get('verify', {})),
    metadata=dict(data.get('metadata', {})),
  )


def _message_from_json(data: Any) -> Message:
  if not isinstance(data, Mapping):
    raise ValueError(f'a message is a JSON object, not {data!r}')
  _refuse_unknown('message', data, Message)
  for name in ('role', 'content'):
    if not isinstance(data.get(name), str):
      raise ValueError(f'message field {name} is {data.get(name)!r}, not text')
  if not isinstance(data.get('name'), str | None):
    raise ValueError(f'message field name is {data["name"]!r}, not text')
  # null is how many tools write that there is none.
  calls = data.get('tool_calls')
  calls = () if calls is None else calls
  if not isinstance(calls, (list, tuple)):
    raise ValueError(f'message field tool_calls is {calls!r}, not a list')
  return Message(
    data['role'],
    data['content'],
    tuple(_call_from_json(c) for c in calls),
    data.get('name'),
  )


def _call_from_json(data: Any) -> ToolCall:
  if not isinstance(data, Mapping):
    raise ValueError(f'a tool call is a JSON object, not {data!r}')
  _refuse_unknown('tool call', data, ToolCall)
  if missing := sorted({'name', 'arguments'} - set(data)):
    raise ValueError(f'tool call lacks {missing}: {dict(data)!r}')
  for name in ('name', 'id'):
    if not isinstance(value := data.get(name, ''), str):
      raise ValueError(f'tool call field {name} is {value!r}, not text')
  if not isinstance(data['arguments'], Mapping):
    raise ValueError(
      f'tool call field arguments is {data["arguments"]!r}, not a JSON object'
    )
  return ToolCall(data['name'], data['arguments'], data.get('id', ''))


def _refuse_unknown(what: str, data: Mapping[str, Any], record: type) -> None:
  known = {f.name for f in dataclasses.fields(record)}
  if unknown := sorted(set(data) - known):
    raise ValueError(
      f'unknown {what} fields {unknown}: known are {sorted(known)}'
    )


def _jsonable(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    return {
      f.name: _jsonable(getattr(value, f.name))
      for f in dataclasses.fields(value)
    }
  if isinstance(value, Mapping):
    return {k: _jsonable(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_jsonable(v) for v in value]
  return value
