"""What a run finds in its workdir when it starts, and leaves at its end.

Floor 3, under `run`. Knows files alone: no weights, no engine, no learner.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from agentjax import plots, recorder, report, storage, viewer, workdir


def begin(
  where: epath.PathLike,
  records: recorder.Recorder,
  step: int | None,
  first_save: int,
  config: Mapping[str, Any] | None,
) -> None:
  """Makes the records end where the run goes on, and says what that took.

  Args:
    where: the workdir. config: of the run, JSON-able, if it has one.
    step: of the checkpoint that was restored; None without one.
    first_save: the step that the first checkpoint is saved at.

  Raises:
    storage.WorkdirMismatch: there is no checkpoint, but once there was one.
      Nothing was changed.
  """
  if step is None:
    _refuse_to_forget(where, first_save)
  gone = records.forget_after(-1 if step is None else step)
  if step is not None:
    again = f', {len(gone)} later records removed' if gone else ''
    print(f'going on after step {step} of {where}{again}')
  elif gone:
    print(
      f'{where} has no checkpoint yet: starting again from step 0, '
      f'{len(gone)} records of an earlier start removed'
    )
  if config is None:
    return
  if changes := workdir.write_config(where, config, step or 0):
    print(f'the config has changed; from step {step or 0} on it is:')
    for change in changes:
      print(f'  {change}')


def _refuse_to_forget(where: epath.PathLike, first_save: int) -> None:
  """Refuses a workdir whose checkpoints were taken away.

  A run that was killed before its first checkpoint has records up to the step
  that would have been saved, and no further; it starts again by itself.
  """
  steps = recorder.recorded_steps(where)
  finished = (epath.Path(where) / 'summary.json').exists()
  if finished or (steps and steps[-1] > first_save):
    what = 'a summary' if finished else f'records up to step {steps[-1]}'
    raise storage.WorkdirMismatch(
      f'{where} holds {what} but no checkpoint, so that starting would remove '
      'the records of a run: restore checkpoints/, or choose another workdir'
    )


def finished(where: epath.PathLike, step: int) -> dict[str, Any] | None:
  """The summary of a run that ended at `step`, if there is one."""
  path = epath.Path(where) / 'summary.json'
  if not path.exists():
    return None
  summary = storage.read_json(path)
  if not isinstance(summary, dict):
    raise storage.Unreadable(path, 'not a JSON object')
  after = summary.get('after')
  ended = isinstance(after, dict) and after.get('step') == step
  return summary if ended and summary.get('steps') == step else None


def end(
  where: epath.PathLike,
  summary: Mapping[str, Any],
  *,
  pages: bool,
  method: Callable[..., Any],
) -> None:
  """Writes summary.json, pages of the last recorded step, report and curve.

  `method` estimates the advantages; the curve is labelled with its name.
  """
  where = epath.Path(where)
  storage.write_json(where / 'summary.json', summary)
  recorded = recorder.trajectory_steps(where)
  if pages and recorded:
    _made_if_possible(
      'the pages', lambda: viewer.write_pages(where, recorded[-1])
    )
    _made_if_possible(
      'the report', lambda: report.write(where, report.report(where))
    )
  _made_if_possible(
    'the learning curve',
    lambda: plots.learning_curve(
      recorder.read_metrics(where),
      recorder.read_evaluations(where),
      where / 'learning_curve.png',
      method=_name(method),
    ),
  )


def _name(method: Callable[..., Any]) -> str:
  name = getattr(getattr(method, 'func', method), '__name__', '')
  return name.upper() if name.isidentifier() else 'RL'


def _made_if_possible(what: str, make: Callable[[], Any]) -> None:
  """Pictures are for people: a run that is done does not fail for one."""
  try:
    make()
  except storage.StorageFull:
    raise
  except Exception as error:
    print(f'{what} could not be made: {error!r}', file=sys.stderr)
