"""A run's learning curve as a picture.

Floor 2, beside the recorder whose rows it draws: what was learned from, step
by step, and what evaluation said of it before and after. Knows no model and
no config, and computes nothing: intervals come with the rows.
"""

from __future__ import annotations

import io
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from agentjax import storage

_REWARD, _SUCCESS, _EVALUATION = '#b4610d', '#1f66b0', '#3a7d44'
# How a row's 'when' is said; {} is the method.
_WHEN = {
  'untrained': 'untrained\n',
  'before': 'before {}\n',
  'after': 'after {}\n',
}
_GREY = '#5c6670'


def learning_curve(
  metrics: Sequence[Mapping[str, Any]],
  evaluations: Sequence[Mapping[str, Any]],
  path: epath.PathLike,
  *,
  reward: str = 'reward',
  success: str = 'success',
  title: str = '',
  method: str = 'RL',
) -> None:
  """Draws reward and success in training, and evaluations as bars, to a PNG.

  Args:
    metrics: rows of `recorder.read_metrics`; `reward` and `success` name the
      values to draw. A step without them is a gap.
    evaluations: rows of `recorder.read_evaluations`: the success rate under
      'success', its interval under 'low' and 'high' if known, and 'name'
      where several sets are evaluated. Of each name the first and the last
      step are drawn.
    path: where the PNG goes.
    method: what the cold start is told apart from, as it is called.
  """
  # Not pyplot: no window system, no global state, safe in any thread.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(9.6, 3.8), dpi=150, layout='constrained')
  FigureCanvasAgg(figure)
  curve, bars = figure.subplots(1, 2, width_ratios=(3, 1.4))
  for axes in (curve, bars):
    axes.spines[['top', 'right']].set_visible(False)
    axes.grid(axis='y', color='#d9dee3', linewidth=0.7)
    axes.set_axisbelow(True)
  _draw_training(curve, metrics, reward, success, method)
  _draw_evaluations(bars, _first_and_last(evaluations), method)
  if title:
    figure.suptitle(title, fontsize=11)
  png = io.BytesIO()
  figure.savefig(png, format='png')
  storage.write_bytes(path, png.getvalue())


def _draw_training(
  axes, metrics, reward: str, success: str, method: str
) -> None:
  drawn = False
  # Where a reward is 1 for success the two are one line: the second has gaps,
  # through which the first is seen.
  for name, label, color, line in (
    (reward, 'mean reward', _REWARD, '-'),
    (success, 'success rate', _SUCCESS, (0, (4, 3))),
  ):
    steps = [row['step'] for row in metrics]
    values = [_finite(row.get(name)) for row in metrics]
    if not any(not math.isnan(v) for v in values):
      continue
    drawn = True
    few = len(values) <= 40
    # The single steps are noisy: pale, with their running mean on top.
    axes.plot(
      steps,
      values,
      color=color,
      alpha=0.35,
      linewidth=1,
      marker='o' if few else None,
      markersize=3,
      linestyle=line,
    )
    axes.plot(
      steps,
      _smooth(values),
      color=color,
      linewidth=2.2,
      linestyle=line,
      label=label,
    )
  cold = [r['step'] for r in metrics if r.get('phase') == 'cold_start']
  axes.set_xlabel(
    f'step ({method} after a cold start of {max(cold)} steps)'
    if cold
    else f'step of {method}'
  )
  axes.set_ylabel('per step, with running mean')
  axes.set_title('Training', fontsize=10, color=_GREY, loc='left')
  if drawn:
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=9, loc='best')
  else:
    _say(axes, 'no training steps yet')


def _draw_evaluations(
  axes, rows: Sequence[Mapping[str, Any]], method: str
) -> None:
  axes.set_title('Evaluation', fontsize=10, color=_GREY, loc='left')
  axes.set_ylabel('success rate')
  axes.set_ylim(0, 1.08)
  if not rows:
    axes.set_xticks([])
    _say(axes, 'no evaluations yet')
    return
  several = len({row.get('name') for row in rows}) > 1
  labels = []
  for x, row in enumerate(rows):
    value = _finite(row.get('success'))
    low, high = (_finite(row.get(k)) for k in ('low', 'high'))
    last = x + 1 == len(rows) or rows[x + 1].get('name') != row.get('name')
    axes.bar(
      x, value, width=0.66, color=_EVALUATION, alpha=0.9 if last else 0.45
    )
    top = value
    if not (math.isnan(low) or math.isnan(high)):
      error = [[max(0.0, value - low)], [max(0.0, high - value)]]
      axes.errorbar(
        x, value, error, color='#1c2024', capsize=4, linewidth=1.3, fmt='none'
      )
      top = max(value, high)
    if not math.isnan(value):
      axes.annotate(
        f'{value:.2f}',
        (x, top),
        xytext=(0, 3),
        textcoords='offset points',
        ha='center',
        fontsize=9,
      )
    name = f'{row["name"]}\n' if several and row.get('name') else ''
    when = _WHEN.get(str(row.get('when')), '').format(method)
    labels.append(f'{name}{when}step {row["step"]}')
  axes.set_xticks(range(len(rows)), labels, fontsize=9)
  axes.set_xlim(-0.7, max(1.0, len(rows) - 1) + 0.7)


def _say(axes, text: str) -> None:
  axes.text(0.5, 0.5, text, ha='center', color=_GREY, transform=axes.transAxes)


def _first_and_last(
  rows: Sequence[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
  """Of each name the rows of its first and last step, names in order."""
  by_name: dict[Any, list[Mapping[str, Any]]] = {}
  for row in rows:
    by_name.setdefault(row.get('name'), []).append(row)
  out = []
  for mine in by_name.values():
    mine = sorted(mine, key=lambda row: row['step'])
    out += mine if len(mine) == 1 else [mine[0], mine[-1]]
  return out


def _smooth(values: Sequence[float]) -> list[float]:
  """Mean of the last values: a tenth of the run, at least 3; NaN are skipped.

  A step is never smoothed with later ones, so the curve does not rise before
  its values do.
  """
  width = max(3, len(values) // 10)
  out = []
  for i in range(len(values)):
    window = values[max(0, i + 1 - width) : i + 1]
    known = [v for v in window if not math.isnan(v)]
    out.append(sum(known) / len(known) if known else math.nan)
  return out


def _finite(value: Any) -> float:
  if not isinstance(value, numbers.Real):
    return math.nan
  value = float(value)
  return value if math.isfinite(value) else math.nan
