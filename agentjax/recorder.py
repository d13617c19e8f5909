"""What a run leaves behind for people: metrics, evaluations, trajectories.

Floor 2. Training calls a `Recorder` once a step; viewer, plots and reports
read what it wrote. It writes one file per step and kind, each whole or not at
all, and never appends, so that a bucket will do and a resumed run can take
back the steps it is about to repeat (`forget_after`): every step stands once.
It knows no model, no loss and no environment; checkpoints are elsewhere.

  <workdir>/metrics/step_00000012.jsonl       one line
  <workdir>/evaluations/step_00000012.jsonl   one line per evaluation
  <workdir>/trajectories/step_00000012.jsonl  one line per trajectory
  <workdir>/trajectories/step_00000012.npz    arrays over all their tokens
  <workdir>/trajectories/step_00000012.blobs.npz
                    contents by SHA-256 that went into and out of sandboxes
  <workdir>/events/...tfevents...             TensorBoard, derived from metrics
  <workdir>/vocabulary.json                   the text of each token id

A process of a pod other than the first writes trajectories alone, to
step_00000012.p0003.jsonl and the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from agentjax import events, records, sandbox_record, storage, types

SCHEMA_VERSION = 1
_KINDS = ('metrics', 'evaluations', 'trajectories')
_OTHER_RELEASE = 'read it with the release that wrote it'
_NAME = re.compile(r'step_(\d{8,})(?:\.p(\d{4,}))?\.jsonl')

_BLOBS = '.blobs.npz'
_PAGES = re.compile(r'step_(\d{8,})')


class Recorder:
  """Writes the records of one run.

  Args:
    workdir: a directory or bucket; the caller holds its lock.
    decode: turns int32[n] token ids into text; if given, each segment's text
      stands in the trajectory file for people to read. Nothing reads it back.
    process: index of this host in a pod. Metrics and evaluations are global,
      so only process 0 writes them.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    *,
    decode: Callable[[np.ndarray], str] | None = None,
    process: int = 0,
  ):
    self.workdir = epath.Path(workdir)
    self._decode = decode
    self._process = process
    if process == 0:
      for kind in _KINDS:
        storage.remove_leftovers(self.workdir / kind)

  def metrics(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes the metrics of a step, replacing those that stood there.

    `values` holds numbers (or anything JSON-able) by name; NaN and infinities
    are kept. They go to TensorBoard too if tensorboardX is installed.

    Raises:
      ValueError: a name is 'step' or 'schema'.
      storage.StorageFull: no half record is left.
    """
    if self._process == 0:
      rows = [_row(step, values)]
      storage.write_jsonl(self._path('metrics', step), rows)
      events.write(self.workdir, step, rows[0])

  def evaluation(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the evaluations made at a step, one mapping each; as metrics."""
    if self._process == 0:
      storage.write_jsonl(
        self._path('evaluations', step), [_row(step, r) for r in rows]
      )

  def trajectories(
    self,
    step: int,
    groups: Sequence[types.Group],
    advantages: Mapping[str, np.ndarray] | None = None,
  ) -> None:
    """Writes the trajectories that a step learned from.

    `advantages` maps a trajectory's id to float32[T] over all its tokens; a
    trajectory that got none (a masked one) may be absent.

    Raises:
      ValueError: an advantage has another length than its trajectory, or
        belongs to none of them.
      storage.StorageFull: no half record is left.
    """
    given = dict(advantages or {})
    rows, columns, start = [], {}, 0
    blobs: dict[str, bytes] = {}
    # One array for all, so that each token's row is where its others are.
    members = (t for g in groups for t in g.trajectories)
    kept = max(map(records.most_kept, members), default=0)
    for number, group in enumerate(groups):
      for trajectory in group.trajectories:
        record, arrays = records.trajectory_to_record(trajectory, kept)
        advantage = given.pop(trajectory.id, None)
        arrays['advantages'] = _advantages(trajectory, advantage)
        for name, array in arrays.items():
          columns.setdefault(name, []).append(array)
        if self._decode is not None:
          for segment, entry in zip(
            trajectory.segments, record['segments'], strict=True
          ):
            entry['text'] = self._decode(segment.tokens)
        record['sandboxes'] = list(
          map(sandbox_record.to_json, trajectory.sandboxes)
        )
        for sandbox in trajectory.sandboxes:
          blobs.update(sandbox.blobs)
        record['step'] = step
        record['group'] = number
        record['offset'] = start
        record['has_advantages'] = advantage is not None
        rows.append(record)
        start += len(trajectory)
    if given:
      raise ValueError(
        f'advantages for {sorted(given)}, which are no trajectories of step '
        f'{step}: pass the groups that they were computed from'
      )
    path = self._path('trajectories', step)
    # The line file is what makes the record stand: it goes first when a step
    # is replaced and comes last, so that the pair is never of two writers.
    storage.remove(path)
    storage.write_npz(
      path.with_suffix('.npz'),
      {name: np.concatenate(parts) for name, parts in columns.items()},
    )
    storage.remove(path.with_suffix(_BLOBS))
    if blobs:
      storage.write_npz(
        path.with_suffix(_BLOBS),
        {name: np.frombuffer(b, np.uint8) for name, b in blobs.items()},
      )
    storage.write_jsonl(path, rows)

  def vocabulary(self, pieces: Sequence[str]) -> None:
    """Writes the text of each token id, for the viewer; once a run."""
    if self._process == 0:
      storage.write_text(
        self.workdir / 'vocabulary.json', storage.dump_json(list(pieces))
      )

  def forget_after(self, step: int) -> list[str]:
    """Removes the records of all steps above `step`; returns their names.

    A run that resumes at the checkpoint of `step` calls it before it goes on,
    so that a repeated step does not stand twice. TensorBoard's events are made
    anew from what remains; summary, curve and pages that were made of what is
    gone go with it.
    """
    gone = []
    for kind in _KINDS:
      for found, process, name in _files(self.workdir, kind):
        if found > step and process == self._process:
          path = self.workdir / kind / name
          storage.remove(path)
          storage.remove(path.with_suffix('.npz'))
          storage.remove(path.with_suffix(_BLOBS))
          gone.append(f'{kind}/{name}')
    if self._process == 0:
      if gone:
        self._forget_pictures(step)
      events.rebuild(self.workdir, read_metrics(self.workdir))
    return gone

  def _forget_pictures(self, step: int) -> None:
    made = ('summary.json', 'learning_curve.png', 'pages/report.html')
    for name in made:
      storage.remove(self.workdir / name)
    pages = self.workdir / 'pages'
    for name in storage.names(pages):
      if (match := _PAGES.fullmatch(name)) and int(match[1]) > step:
        storage.remove(pages / name)

  def _path(self, kind: str, step: int) -> epath.Path:
    if step < 0:
      raise ValueError(f'step {step} is negative: steps count from 0')
    process = f'.p{self._process:04d}' if self._process else ''
    return self.workdir / kind / f'step_{step:08d}{process}.jsonl'


def read_metrics(workdir: epath.PathLike) -> list[dict[str, Any]]:
  """The metrics of all steps, in the order of steps."""
  return _read_rows(workdir, 'metrics')


def read_evaluations(workdir: epath.PathLike) -> list[dict[str, Any]]:
  """The evaluations of all steps, in the order of steps."""
  return _read_rows(workdir, 'evaluations')


def read_vocabulary(workdir: epath.PathLike) -> list[str] | None:
  """The text of each token id, or None if it was not recorded."""
  path = epath.Path(workdir) / 'vocabulary.json'
  if not path.exists():
    return None
  pieces = storage.read_json(path)
  if not isinstance(pieces, list) or not all(
    isinstance(p, str) for p in pieces
  ):
    raise storage.Unreadable(path, 'not a list of texts')
  return pieces


def recorded_steps(workdir: epath.PathLike) -> list[int]:
  """The steps of which anything stands in a workdir."""
  return sorted({f[0] for kind in _KINDS for f in _files(workdir, kind)})


def trajectory_steps(workdir: epath.PathLike) -> list[int]:
  """The steps whose trajectories stand in a workdir."""
  return sorted({step for step, _, _ in _files(workdir, 'trajectories')})


def read_trajectories(
  workdir: epath.PathLike, step: int
) -> tuple[list[types.Group], dict[str, np.ndarray]]:
  """The groups of a step, of all processes, and advantages by trajectory id.

  Inverse of `Recorder.trajectories`.

  Raises:
    FileNotFoundError: none were recorded; the message has the steps that were.
    storage.Unreadable: another schema version, damaged files, or files that do
      not belong together.
  """
  files = [f for f in _files(workdir, 'trajectories') if f[0] == step]
  if not files:
    steps = trajectory_steps(workdir)
    raise FileNotFoundError(
      f'no trajectories of step {step} in {epath.Path(workdir)}: '
      + (f'recorded are {_spans(steps)}' if steps else 'none were recorded')
    )
  groups: list[types.Group] = []
  advantages: dict[str, np.ndarray] = {}
  for _, _, name in files:
    path = epath.Path(workdir) / 'trajectories' / name
    rows = _rows(path)
    if not path.with_suffix('.npz').exists():
      raise storage.Unreadable(path, 'the .npz file beside it is missing')
    arrays = storage.read_npz(path.with_suffix('.npz'))
    blobs = _blobs(path.with_suffix(_BLOBS))
    members: dict[int, list[types.Trajectory]] = {}
    for i, row in enumerate(rows, 1):
      try:
        trajectory, advantage = _trajectory(row, arrays, blobs)
        members.setdefault(row['group'], []).append(trajectory)
      except (KeyError, TypeError, ValueError, IndexError) as e:
        raise storage.Unreadable(
          path, f'line {i} and its .npz file are no trajectory ({e!r})'
        ) from e
      if advantage is not None:
        advantages[trajectory.id] = advantage
    groups += [
      types.Group(m[0].task, m[0].draw, tuple(m)) for m in members.values()
    ]
  return groups, advantages


def read_outlines(workdir: epath.PathLike, step: int) -> list[dict[str, Any]]:
  """The JSON objects of a step's trajectories, without their arrays.

  In the order of `read_trajectories`; many times as fast.

  Raises:
    storage.Unreadable: as there.
  """
  out = []
  for found, _, name in _files(workdir, 'trajectories'):
    if found == step:
      path = epath.Path(workdir) / 'trajectories' / name
      rows = _rows(path)
      for i, row in enumerate(rows, 1):
        if not _is_outline(row):
          raise storage.Unreadable(path, f'line {i} is no trajectory')
      out += rows
  return out


def _is_outline(row: Mapping[str, Any]) -> bool:
  """Whether a line has what people look for first."""
  reward, task = row.get('reward'), row.get('task')
  return (
    isinstance(row.get('id'), str)
    and isinstance(row.get('status'), str)
    and isinstance(task, dict)
    and isinstance(task.get('id'), str)
    and (
      reward is None
      or isinstance(reward, dict)
      and isinstance(reward.get('value'), (int, float))
      and isinstance(reward.get('parts', {}), dict)
    )
    and isinstance(row.get('error'), str | None)
    and isinstance(row.get('info'), dict | None)
  )


def _trajectory(
  row: Mapping[str, Any],
  arrays: Mapping[str, np.ndarray],
  blobs: Mapping[str, bytes],
) -> tuple[types.Trajectory, np.ndarray | None]:
  """A trajectory and its advantages, out of the arrays of all."""
  n = sum(s['n'] for s in row['segments'])
  span = slice(row['offset'], row['offset'] + n)
  mine = {k: v[span] for k, v in arrays.items()}
  sandboxes = tuple(
    sandbox_record.from_json(data, blobs)
    for data in row.get('sandboxes', ())  # older records lack them
  )
  trajectory = records.trajectory_from_record(row, mine)
  trajectory = trajectory.append(sandboxes=sandboxes)
  return trajectory, mine['advantages'] if row['has_advantages'] else None


def _blobs(path: epath.Path) -> dict[str, bytes]:
  """By SHA-256; none where no sandbox was used."""
  if not path.exists():
    return {}
  return {n: array.tobytes() for n, array in storage.read_npz(path).items()}


def _advantages(
  trajectory: types.Trajectory, advantage: np.ndarray | None
) -> np.ndarray:
  n = len(trajectory)
  if advantage is None:
    return np.full(n, np.nan, np.float32)
  out = np.asarray(advantage, np.float32)
  if out.shape != (n,):
    raise ValueError(
      f'advantages of {trajectory.id} have shape {out.shape}, the trajectory '
      f'has {n} tokens: give one value for every token, prompt included'
    )
  return out


def _row(step: int, values: Mapping[str, Any]) -> dict[str, Any]:
  if taken := {'step', 'schema'} & set(values):
    raise ValueError(f'{sorted(taken)} are names of the record: choose others')
  return {'schema': SCHEMA_VERSION, 'step': int(step), **values}


def _read_rows(workdir: epath.PathLike, kind: str) -> list[dict[str, Any]]:
  rows = []
  for _, _, name in _files(workdir, kind):
    path = epath.Path(workdir) / kind / name
    found = _rows(path)
    if kind == 'metrics' and len(found) != 1:
      raise storage.Unreadable(path, f'{len(found)} lines, not one')
    rows += found
  return rows


def _rows(path: epath.Path) -> list[dict[str, Any]]:
  """The lines of a record, each an object of this schema."""
  rows = storage.read_jsonl(path)
  for i, row in enumerate(rows, 1):
    if not isinstance(row, dict):
      raise storage.Unreadable(path, f'line {i} is no JSON object')
    if row.get('schema') != SCHEMA_VERSION:
      raise storage.Unreadable(
        path,
        f'line {i} has schema version {row.get("schema")!r}, this code reads '
        f'{SCHEMA_VERSION}',
        _OTHER_RELEASE,
      )
    if type(row.get('step')) is not int:
      raise storage.Unreadable(path, f'line {i} says no step')
  return rows


def _files(workdir: epath.PathLike, kind: str) -> list[tuple[int, int, str]]:
  """(step, process, name) of the records of a kind, sorted."""
  found = []
  for name in storage.names(epath.Path(workdir) / kind):
    if match := _NAME.fullmatch(name):
      found.append((int(match[1]), int(match[2] or 0), name))
  return sorted(found)


def _spans(steps: Sequence[int]) -> str:
  """[0, 1, 2, 5] as '0-2, 5'."""
  spans: list[list[int]] = []
  for step in steps:
    if spans and step == spans[-1][1] + 1:
      spans[-1][1] = step
    else:
      spans.append([step, step])
  return ', '.join(f'{a}-{b}' if b > a else f'{a}' for a, b in spans)
