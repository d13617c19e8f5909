"""Where a person should look first in what a run recorded.

Floor 3. Lists the trajectories with the highest rewards, the largest jumps of
reward from one record to the next, what was tampered with, and what failed,
each with a link to its page in the viewer: `python -m agentjax.report WORKDIR`
prints it and writes <workdir>/pages/report.html beside the pages that it links
to. A reward that no policy could have earned shows at the top of one of these
lists. Reads what the recorder wrote; knows no model and no environment.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import html
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from agentjax import recorder, storage, tally, viewer

_FAILED = ('infra_failure', 'environment_error')


@dataclasses.dataclass(frozen=True)
class Entry:
  """A trajectory that is worth a look.

  Attributes:
    step, place: of the record that it stands in, and where in it.
    reward: None where it has none. why: what is said of it.
  """

  step: int
  place: int
  id: str
  status: str
  reward: float | None
  why: str = ''

  @property
  def page(self) -> str:
    """Its page, from the folder of the report."""
    return f'{viewer.folder_name(self.step)}/{viewer.page_name(self.place)}'


@dataclasses.dataclass(frozen=True)
class Report:
  """The lists, each as long as was asked for; `counts` are of all.

  Attributes:
    highest: by reward. jumps: by the change of the mean reward of a task from
      a record of it to the next one; the entry is the best of the later one.
    steps: (change, from step, to step, mean before, mean after) of the run.
    flagged: what was tampered with. failed: infrastructure, environments.
    counts: trajectories, recorded steps, flagged, failed.
  """

  highest: list[Entry]
  jumps: list[Entry]
  steps: list[tuple[float, int, int, float, float]]
  flagged: list[Entry]
  failed: list[Entry]
  counts: dict[str, int]


def report(workdir: epath.PathLike, most: int = 20) -> Report:
  """Reads all records of a run; `most` is the length of each list.

  Raises:
    FileNotFoundError: no trajectories were recorded.
    storage.Unreadable: a record is damaged.
  """
  steps = recorder.trajectory_steps(workdir)
  if not steps:
    raise FileNotFoundError(
      f'no trajectories in {epath.Path(workdir)}: name the workdir of a run '
      'that has recorded some (record_every)'
    )
  highest: list[Entry] = []
  jumps: list[tuple[float, Entry]] = []
  flagged: list[Entry] = []
  failed: list[Entry] = []
  means: dict[str, tuple[int, float]] = {}  # of a task, where it came last
  n = 0
  for step in steps:
    rows = recorder.read_outlines(workdir, step)
    entries = [_entry(step, i, row) for i, row in enumerate(rows)]
    n += len(rows)
    scored = [e for e in entries if e.reward is not None]
    highest = _first([*highest, *scored], most)
    jumps += _jumps(step, rows, entries, means)
    jumps = sorted(jumps, key=lambda j: -abs(j[0]))[:most]
    flagged += [
      dataclasses.replace(e, why=flags)
      for e, row in zip(entries, rows, strict=True)
      if (flags := _flags(row))
    ]
    failed += [
      dataclasses.replace(e, why=_last_line(row.get('error')))
      for e, row in zip(entries, rows, strict=True)
      if e.status in _FAILED
    ]
  return Report(
    highest,
    [entry for _, entry in jumps],
    _run_jumps(recorder.read_metrics(workdir))[:most],
    _first(flagged, most),
    failed[-most:][::-1],
    {
      'trajectories': n,
      'steps': len(steps),
      'flagged': len(flagged),
      'failed': len(failed),
    },
  )


def _entry(step: int, place: int, row: Mapping[str, Any]) -> Entry:
  reward = row.get('reward')
  value = None if reward is None else reward['value']
  return Entry(step, place, row['id'], row['status'], value)


def _first(entries: Iterable[Entry], most: int) -> list[Entry]:
  """Those with the highest rewards; of equals the later ones."""

  def order(e: Entry):
    value = float('-inf') if e.reward is None else e.reward
    return (-value, -e.step, e.place)

  return sorted(entries, key=order)[:most]


def _flags(row: Mapping[str, Any]) -> str:
  """What a trajectory's record says of tampering: parts of its reward, and
  what stands in its info."""
  parts = (row.get('reward') or {}).get('parts') or {}
  found = [k for k, v in parts.items() if k.startswith(tally.TAMPER) and v]
  found += [
    f'{k}: {v}'
    for k, v in (row.get('info') or {}).items()
    if k.startswith(tally.TAMPER) and v
  ]
  return ', '.join(found)


def _jumps(
  step: int,
  rows: Sequence[Mapping[str, Any]],
  entries: Sequence[Entry],
  means: dict[str, tuple[int, float]],
) -> list[tuple[float, Entry]]:
  """How the mean reward of each task of a step differs from its last one.

  `means` is brought up to date.
  """
  by_task = collections.defaultdict(list)
  for row, entry in zip(rows, entries, strict=True):
    if entry.reward is not None:
      by_task[row['task']['id']].append(entry)
  found = []
  for task, mine in by_task.items():
    mean = sum(e.reward for e in mine) / len(mine)
    if task in means and mean != means[task][1]:
      before, old = means[task]
      why = f'mean {old:.3f} at step {before}, {mean:.3f} at step {step}'
      best = _first(mine, 1)[0]
      found.append((mean - old, dataclasses.replace(best, why=why)))
    means[task] = step, mean
  return found


def _run_jumps(metrics: Sequence[Mapping[str, Any]]) -> list:
  """Changes of the run's mean reward from step to step, largest first."""
  known = [
    (m['step'], m['reward'])
    for m in metrics
    if isinstance(m.get('reward'), (int, float))
  ]
  changes = [
    (new - old, before, after, old, new)
    for (before, old), (after, new) in itertools.pairwise(known)
    if new != old
  ]
  return sorted(changes, key=lambda c: -abs(c[0]))


def _last_line(error: str | None) -> str:
  lines = (error or '').strip().splitlines()
  return lines[-1] if lines else ''


# ---- as text and as a page ------------------------------------------------

_TITLES = (
  ('flagged', 'tampered with'),
  ('highest', 'highest rewards'),
  ('jumps', 'largest jumps of a task'),
  ('failed', 'failed by infrastructure or environment, newest first'),
)


def as_text(found: Report) -> str:
  """For a terminal; every entry with the path of its page."""
  c = found.counts
  lines = [
    f'{c["trajectories"]} trajectories of {c["steps"]} recorded steps, '
    f'{c["flagged"]} tampered with, {c["failed"]} failed'
  ]
  for name, title in _TITLES:
    entries = getattr(found, name)
    lines.append(f'\n{title}: ' + ('' if entries else 'none'))
    for e in entries:
      reward = '   none' if e.reward is None else f'{e.reward:7.3f}'
      said = viewer.shown(f'{e.id}  {e.why}'.rstrip()).replace('\n', ' ')
      lines.append(f'  {reward}  {e.status:<13} pages/{e.page}  {said}')
  lines.append('\nlargest jumps of the run: ' + ('' if found.steps else 'none'))
  lines += [f'  {_step_jump(change)}' for change in found.steps]
  return '\n'.join(lines)


def _step_jump(change: tuple) -> str:
  size, before, after, old, new = change
  return f'{size:+.3f}  {old:.3f} at step {before}, {new:.3f} at step {after}'


def as_page(found: Report) -> str:
  """The report as an HTML document, in the style of the viewer."""
  c = found.counts
  parts = [
    '<h1>Where to look first</h1><p>'
    f'{c["trajectories"]} trajectories of {c["steps"]} recorded steps, '
    f'{c["flagged"]} tampered with, {c["failed"]} failed.</p>'
  ]
  head = ''.join(
    f'<th>{h}</th>' for h in ('trajectory', 'step', 'status', 'reward', '')
  )
  for name, title in _TITLES:
    rows = ''.join(
      f'<tr><td><a href="{e.page}">{viewer.escaped(e.id)}</a></td>'
      f'<td>{e.step}</td><td>{viewer.escaped(e.status)}</td>'
      f'<td>{"none" if e.reward is None else f"{e.reward:.3f}"}</td>'
      f'<td>{viewer.escaped(e.why)}</td></tr>'
      for e in getattr(found, name)
    )
    table = f'<table><tr>{head}</tr>{rows}</table>' if rows else '<p>None.</p>'
    parts.append(f'<section><h2>{html.escape(title)}</h2>{table}</section>')
  changes = ''.join(
    f'<tr><td>{html.escape(_step_jump(s))}</td></tr>' for s in found.steps
  )
  table = f'<table>{changes}</table>' if changes else '<p>None.</p>'
  parts.append(f'<section><h2>largest jumps of the run</h2>{table}</section>')
  return viewer.document('report', ''.join(parts))


def write(workdir: epath.PathLike, found: Report) -> epath.Path:
  """Writes the report's page, and the pages that it links to; its path."""
  folder = epath.Path(workdir) / 'pages'
  linked = collections.defaultdict(set)
  for name, _ in _TITLES:
    for entry in getattr(found, name):
      linked[entry.step].add(entry.place)
  for step, places in sorted(linked.items()):
    viewer.write_pages(workdir, step, only=places)
  storage.write_text(folder / 'report.html', as_page(found))
  return folder / 'report.html'


def main(argv: Sequence[str] | None = None) -> int:
  """The command line; returns the exit code."""
  parser = argparse.ArgumentParser(
    prog='python -m agentjax.report',
    description='Lists the trajectories of a run that are worth a look.',
  )
  parser.add_argument('workdir', help='of the run')
  parser.add_argument('--most', type=int, default=20, help='a list (20)')
  args = parser.parse_args(argv)
  if args.most < 1:
    parser.error(f'--most is {args.most}: give 1 or more')
  return viewer.exit_code(lambda: _print(args.workdir, args.most))


def _print(workdir: str, most: int) -> None:
  """Prints the lists, and writes the page."""
  with storage.unusable_named(workdir, 'name the workdir of a run'):
    recorder.trajectory_steps(workdir)
  found = report(workdir, most)
  print(as_text(found))
  with storage.unusable_named(workdir, 'let it be written to'):
    print(f'\n{write(workdir, found)}')


if __name__ == '__main__':
  sys.exit(main())
