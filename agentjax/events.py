"""TensorBoard's view of the metrics; derived, and safe to delete.

Floor 1, beside the recorder that calls it. One event file per step, written
whole: TensorBoard reads the files of a directory in the order of their names,
so a step that a resumed run takes back is one file removed, and a bucket or a
full disk is no special case. The encoding is tensorboardX's, an extra
(`pip install agentjax[tensorboard]`); without it nothing is written.
"""

from __future__ import annotations

import importlib.util
import math
import re
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from agentjax import storage

_NAME = re.compile(r'step_(\d{8,})\.tfevents\.agentjax')


def installed() -> bool:
  """True if tensorboardX is there, so that events are written."""
  return importlib.util.find_spec('tensorboardX') is not None


def write(workdir: epath.PathLike, step: int, row: Mapping[str, Any]) -> None:
  """Writes the numbers of a metrics row as the events of its step."""
  if not installed():
    return
  scalars = {
    name: float(value)
    for name, value in row.items()
    if name not in ('schema', 'step') and _is_number(value)
  }
  path = epath.Path(workdir) / 'events' / f'step_{step:08d}.tfevents.agentjax'
  storage.write_bytes(path, _encode(step, scalars))


def rebuild(workdir: epath.PathLike, rows: Sequence[Mapping[str, Any]]) -> None:
  """Makes the events agree with metrics rows: each step once, no other."""
  if not installed():
    return
  directory = epath.Path(workdir) / 'events'
  storage.remove_leftovers(directory)
  steps = {row['step'] for row in rows}
  present = set()
  for name in storage.names(directory):
    if match := _NAME.fullmatch(name):
      if int(match[1]) in steps:
        present.add(int(match[1]))
      else:
        storage.remove(directory / name)
  for row in rows:
    if row['step'] not in present:
      write(workdir, row['step'], row)


def _is_number(value: Any) -> bool:
  try:
    float(value)
  except (TypeError, ValueError):
    return False
  return not isinstance(value, str)


def _encode(step: int, scalars: Mapping[str, float]) -> bytes:
  """An event file: TensorFlow's record framing around two Event messages."""
  from tensorboardX.proto import event_pb2, summary_pb2

  now = time.time()
  values = [
    # Float32 has no room for the largest floats; infinity is what they become.
    summary_pb2.Summary.Value(tag=name, simple_value=_float32(value))
    for name, value in scalars.items()
  ]
  messages = [
    event_pb2.Event(wall_time=now, file_version='brain.Event:2'),
    event_pb2.Event(
      wall_time=now, step=step, summary=summary_pb2.Summary(value=values)
    ),
  ]
  return b''.join(_frame(m.SerializeToString()) for m in messages)


def _float32(value: float) -> float:
  try:
    return struct.unpack('<f', struct.pack('<f', value))[0]
  except OverflowError:
    return math.copysign(math.inf, value)


def _frame(data: bytes) -> bytes:
  length = struct.pack('<Q', len(data))
  return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
  from tensorboardX.crc32c import crc32c

  crc = crc32c(data)
  rotated = ((crc >> 15) | (crc << 17)) & 0xFFFFFFFF
  return struct.pack('<I', (rotated + 0xA282EAD8) & 0xFFFFFFFF)
