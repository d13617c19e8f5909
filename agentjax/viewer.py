"""A trajectory as one HTML page: every token, who wrote it, what it earned.

Floor 3. Reads what the recorder wrote; knows no model and no tokenizer (the
text of each token id is given, or was recorded). A page is self-contained,
runs no script and loads nothing, and text that a policy or a tool wrote can
only ever be shown: `python -m agentjax.viewer --workdir W --step N`.
"""

from __future__ import annotations

import argparse
import html
import re
import sys
from collections.abc import Callable, Collection, Sequence

import numpy as np
from etils import epath

from agentjax import recorder, storage, types

_LABELS = {
  types.Source.PROMPT: 'prompt',
  types.Source.MODEL: 'model',
  types.Source.FORCED: 'forced',
  types.Source.OBSERVATION: 'observation',
}

# Control characters, surrogates, and marks that reorder or hide text: shown
# as escapes, so that a page never looks other than its tokens are.
_INVISIBLE = re.compile(
  '[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e'
  '\u2060-\u206f\ufeff\ufff9-\ufffc\ufffe\uffff\ud800-\udfff'
  '\U000e0000-\U000e0fff]'
)

# `default-src 'none'` is the second wall: were some text not escaped, the
# browser would still run and load nothing.
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
"""

_STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --back: #ffffff;
  --dim: #646c76; --line: #dde1e6; --prompt: #eceff3; --model: #d3e5ff;
  --forced: #f3dcfa; --observation: #fdeac2; --good: #148040;
  --bad: #c42b2b; --bar: #1c2024; --bartext: #f5f7f9; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ec;
  --back: #14171a; --dim: #98a2ad; --line: #343b43; --prompt: #272d34;
  --model: #17395f; --forced: #4a2856; --observation: #4b3a11;
  --good: #54cf86; --bad: #ff8078; --bar: #e4e8ec; --bartext: #14171a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text);
  background: var(--back); max-width: 62rem; margin: 0 auto;
  padding: 1.5rem 1rem 6rem; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; margin: 0 0 .8rem; }
a { color: inherit; }
dl { display: grid; grid-template-columns: max-content 1fr;
  gap: .15rem 1.2rem; margin: 0 0 1rem; }
dt, .dim { color: var(--dim); } dd { margin: 0; }
.good { color: var(--good); } .bad { color: var(--bad); }
.legend span { padding: .1rem .5rem; margin-right: .4rem; border-radius: 3px; }
section { border-top: 1px solid var(--line); padding: .6rem 0; }
h2 { font-size: .8rem; font-weight: 600; color: var(--dim);
  margin: 0 0 .3rem; }
pre { font: 13.5px/1.75 ui-monospace, Menlo, Consolas, monospace; margin: 0;
  white-space: pre-wrap; }
i { font-style: normal; unicode-bidi: isolate; border-radius: 2px;
  padding: .12em 0; box-shadow: inset -1px 0 var(--back); }
.prompt { background: var(--prompt); } .model { background: var(--model); }
.forced { background: var(--forced); }
.observation { background: var(--observation); }
.up { border-bottom: 2px solid var(--good); }
.down { border-bottom: 2px solid var(--bad); }
i:hover { outline: 2px solid var(--text); }
i:hover::after { content: attr(data-t); position: fixed; left: 0; right: 0;
  bottom: 0; padding: .6rem 1rem; background: var(--bar);
  color: var(--bartext); white-space: pre-wrap; z-index: 1; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .3rem .8rem .3rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; }
td { font-variant-numeric: tabular-nums; }
"""


def page(
  trajectory: types.Trajectory,
  pieces: Sequence[str] | None,
  advantages: np.ndarray | None = None,
) -> str:
  """One trajectory as a whole HTML document.

  Args:
    trajectory: what to show.
    pieces: the text of each of its T tokens, or None if it is not known (ids
      are shown then).
    advantages: float[T], if known.

  Raises:
    ValueError: pieces or advantages are not T long.
  """
  n = len(trajectory)
  for name, given in (('pieces', pieces), ('advantages', advantages)):
    if given is not None and len(given) != n:
      raise ValueError(
        f'{len(given)} {name} for a trajectory of {n} tokens: give one each'
      )
  if pieces is None:
    pieces = [f'⟨{i}⟩' for i in trajectory.tokens()]
  parts, start, turn = [], 0, 0
  for segment in trajectory.segments:
    end = start + len(segment)
    mine = None if advantages is None else advantages[start:end]
    parts.append(
      f'<section><h2>{_caption(trajectory, segment, start, turn)}</h2><pre>'
      f'{_tokens(segment, pieces[start:end], mine, start)}</pre></section>'
    )
    turn += segment.source is types.Source.MODEL
    start = end
  title = f'{trajectory.task.id}: {trajectory.status.value}'
  body = _header(trajectory) + _legend(advantages) + ''.join(parts)
  return document(title, body + _details(trajectory))


def document(title: str, body: str) -> str:
  """A whole page in the viewer's style; `body` is HTML."""
  return (
    f'{_HEAD}<title>{escaped(title)}</title><style>{_STYLE}</style></head>\n'
    f'<body>{body}</body></html>\n'
  )


def shown(text: object) -> str:
  """Text in which nothing is invisible, reorders, or moves a cursor."""
  return _INVISIBLE.sub(lambda m: f'\\u{ord(m.group()):04x}', str(text))


def escaped(text: object) -> str:
  """`shown` for an element or a double-quoted attribute."""
  return html.escape(shown(text), quote=True)


def _number(value: float, digits: int = 3) -> str:
  if not isinstance(value, (int, float, np.number)):
    return str(value)  # of a record that something else wrote
  return f'{value:.{digits}f}'.replace('-', '−')


def _plural(n: int, word: str) -> str:
  return f'{n} {word}' if n == 1 else f'{n} {word}s'


def _caption(
  trajectory: types.Trajectory, segment: types.Segment, start: int, turn: int
) -> str:
  """The line over a segment."""
  source = _LABELS[segment.source]
  said = [source, _plural(len(segment), 'token'), f'from position {start}']
  if segment.source is types.Source.MODEL:
    said[0] = f'model, turn {turn + 1}'
    said.append(f'stopped by {segment.stop.value}')
    versions = np.unique(segment.versions)
    if len(versions):
      said.append(f'policy version {" and ".join(map(str, versions))}')
    if turn < len(trajectory.turn_rewards):
      said.append(f'turn reward {_number(trajectory.turn_rewards[turn])}')
  return escaped(' · '.join(said))


def _tokens(
  segment: types.Segment,
  pieces: Sequence[str],
  advantages: np.ndarray | None,
  start: int,
) -> str:
  """The tokens of a segment as spans with their numbers."""
  source = _LABELS[segment.source]
  out = []
  for i, piece in enumerate(pieces):
    facts = [f'position {start + i}', f'id {segment.tokens[i]}', source]
    style = source
    if segment.source is types.Source.MODEL:
      facts.append(f'log-prob {_number(segment.logprobs[i], 4)}')
      facts.append(f'policy version {segment.versions[i]}')
    # Nobody may read an advantage off a token that has no part in the loss.
    if advantages is not None and segment.source is types.Source.MODEL:
      advantage = float(advantages[i])
      facts.append(f'advantage {_number(advantage, 4)}')
      style += ' up' if advantage > 0 else ' down' if advantage < 0 else ''
    shown = escaped(piece).replace('\n', '<span class="dim">↵</span>\n')
    tip = escaped(f'{piece!r}\n{" · ".join(facts)}').replace('\n', '&#10;')
    out.append(f'<i class="{style}" data-t="{tip}">{shown or "∅"}</i>')
  return ''.join(out)


def _header(trajectory: types.Trajectory) -> str:
  reward = trajectory.reward
  rows = [
    ('task', escaped(trajectory.task.id)),
    ('status', escaped(trajectory.status.value)),
    ('reward', _reward(reward)),
  ]
  if reward is not None and reward.parts:
    parts = ', '.join(f'{k} {_number(v)}' for k, v in reward.parts.items())
    rows.append(('reward parts', escaped(parts)))
  turns = len(trajectory.turns)
  rows += [
    ('turns', str(turns)),
    (
      'tokens',
      f'{len(trajectory)}, of which {trajectory.model_tokens} by the model',
    ),
    (
      'draw, sample, branch',
      f'{trajectory.draw}, {trajectory.sample}, {trajectory.branch}',
    ),
  ]
  if trajectory.parent_id is not None:
    rows.append(('forked from', escaped(trajectory.parent_id)))
  items = ''.join(f'<dt>{k}</dt><dd>{v}</dd>' for k, v in rows)
  return f'<h1>{escaped(trajectory.id)}</h1><dl>{items}</dl>'


def _reward(reward: types.Reward | None) -> str:
  if reward is None:
    return '<span class="dim">none</span>'
  word, style = ('success', 'good') if reward.success else ('no success', 'bad')
  return f'{_number(reward.value)} <span class="{style}">{word}</span>'


def _legend(advantages: np.ndarray | None) -> str:
  spans = ''.join(f'<span class="{s}">{s}</span>' for s in _LABELS.values())
  if advantages is not None:
    spans += '<span class="up">advantage above 0</span>'
    spans += '<span class="down">advantage below 0</span>'
  return f'<p class="legend">{spans}</p>'


def _details(trajectory: types.Trajectory) -> str:
  """What is long or rarely read, folded up."""
  parts = [
    ('error', trajectory.error),
    ('info', trajectory.info),
    ('what the verifier was given', trajectory.task.verify),
    ('task metadata', trajectory.task.metadata),
  ]
  out = []
  for name, value in parts:
    if not value:
      continue
    text = value if isinstance(value, str) else storage.dump_json(value, 2)
    opened = ' open' if name == 'error' else ''
    out.append(
      f'<section><details{opened}><summary>{name}</summary>'
      f'<pre>{escaped(text)}</pre></details></section>'
    )
  return ''.join(out)


def _index(step: int, trajectories: Sequence[types.Trajectory]) -> str:
  rows = []
  for i, t in enumerate(trajectories):
    rows.append(
      f'<tr><td><a href="{page_name(i)}">{escaped(t.task.id)}</a></td>'
      f'<td>{t.draw}</td><td>{t.sample}</td>'
      f'<td>{t.branch}</td><td>{escaped(t.status.value)}</td>'
      f'<td>{_reward(t.reward)}</td><td>{len(t.turns)}</td>'
      f'<td>{t.model_tokens}</td></tr>'
    )
  names = ('draw', 'sample', 'branch', 'status', 'reward', 'turns')
  head = ''.join(f'<th>{n}</th>' for n in ('task', *names, 'model tokens'))
  return document(
    f'step {step}',
    f'<h1>Trajectories of step {step}</h1>'
    f'<table><tr>{head}</tr>{"".join(rows)}</table>',
  )


def folder_name(step: int) -> str:
  """Where the pages of a step are, in <workdir>/pages."""
  return f'step_{step:08d}'


def page_name(place: int) -> str:
  """The page of a step's trajectory, by its place in the record."""
  return f'{place:04d}.html'


def write_pages(
  workdir: epath.PathLike,
  step: int,
  out: epath.PathLike | None = None,
  only: Collection[int] | None = None,
) -> epath.Path:
  """Writes an index and a page for each trajectory of a step.

  Args:
    out: the directory to write to: <workdir>/pages/step_<step> if None.
    only: places in the record; then no other page is written, and no index.

  Returns the path of the index.

  Raises:
    FileNotFoundError: no trajectories of that step were recorded.
  """
  groups, advantages = recorder.read_trajectories(workdir, step)
  texts = recorder.read_vocabulary(workdir)
  if out is None:
    out = epath.Path(workdir) / 'pages' / folder_name(step)
  out = epath.Path(out)
  trajectories = [t for g in groups for t in g.trajectories]
  for i, trajectory in enumerate(trajectories):
    if only is not None and i not in only:
      continue
    pieces = None if texts is None else _pieces(trajectory, texts)
    document = page(trajectory, pieces, advantages.get(trajectory.id))
    storage.write_text(out / page_name(i), document)
  if only is None:
    storage.write_text(out / 'index.html', _index(step, trajectories))
  return out / 'index.html'


def _pieces(trajectory: types.Trajectory, texts: Sequence[str]) -> list[str]:
  return [
    texts[i] if 0 <= i < len(texts) else f'⟨{i}⟩'
    for i in trajectory.tokens().tolist()
  ]


def main(argv: Sequence[str] | None = None) -> int:
  """The command line; returns the exit code."""
  parser = argparse.ArgumentParser(
    prog='python -m agentjax.viewer',
    description='Writes the trajectories of a step as HTML pages.',
  )
  parser.add_argument('--workdir', required=True, help='of the run')
  parser.add_argument('--step', type=int, help='default: the last one')
  parser.add_argument('--out', help='directory for the pages')
  args = parser.parse_args(argv)
  return exit_code(lambda: _write(args.workdir, args.step, args.out))


def _write(workdir: str, step: int | None, out: str | None) -> None:
  """Writes the pages that the command line asks for."""
  with storage.unusable_named(workdir, 'name the workdir of a run'):
    steps = recorder.trajectory_steps(workdir)
  if not steps:
    raise FileNotFoundError(
      f'no trajectories are recorded in {workdir}: name the workdir of a run '
      'that has made a step of reinforcement'
    )
  step = steps[-1] if step is None else step
  if step not in steps:
    recorder.read_trajectories(workdir, step)  # says which there are
  with storage.unusable_named(
    out or workdir, 'give another directory with --out'
  ):
    print(write_pages(workdir, step, out))


def exit_code(work: Callable[[], None]) -> int:
  """Does the work of a command that reads a workdir; its exit code."""
  try:
    work()
  except storage.Unusable as e:
    print(e, file=sys.stderr)
    return 2
  except (FileNotFoundError, storage.Unreadable, storage.StorageFull) as e:
    print(e, file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
