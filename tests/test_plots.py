"""Pictures are drawn of whatever a run has, and progress lines are true."""

import io
import math

import matplotlib.image
import numpy as np
import pytest

from agentjax import plots, progress


def rows(n):
  return [
    {'step': i, 'reward': i / n, 'success': i / (2 * n)} for i in range(n)
  ]


def evaluation(step, success, **more):
  return {'step': step, 'success': success, **more}


def colours(path):
  """How many pixels are strongly orange, blue and green."""
  picture = matplotlib.image.imread(path)[:, :, :3]
  r, g, b = picture[..., 0], picture[..., 1], picture[..., 2]
  return (
    int(np.sum((r > g + 0.2) & (g > b + 0.1))),
    int(np.sum((b > g + 0.15) & (g > r + 0.1))),
    int(np.sum((g > r + 0.1) & (g > b + 0.05))),
  )


def test_curves_and_bars_are_drawn(tmp_path):
  path = tmp_path / 'plots' / 'curve.png'
  low = evaluation(0, 0.25, low=0.125, high=0.375)
  plots.learning_curve(rows(9), [low, evaluation(9, 0.5)], path, title='x')
  orange, blue, green = colours(path)
  assert min(orange, blue) > 1000 and green > 10_000
  plots.learning_curve(rows(9), [low, evaluation(9, 1.0)], path)
  assert colours(path)[2] > green * 1.3  # a taller bar


def test_a_curve_needs_its_values_alone(tmp_path):
  path = tmp_path / 'curve.png'
  plots.learning_curve([], [], path)
  assert colours(path) == (0, 0, 0)
  only = [{'step': 0, 'loss': 1.0}, {'step': 1, 'reward': 0.5}]
  only += [{'step': 2, 'reward': math.nan}, {'step': 3, 'reward': 'text'}]
  plots.learning_curve(only, [evaluation(0, math.nan, low=None)], path)
  orange, blue, green = colours(path)
  assert orange > 0 and blue == 0 and green == 0


def test_both_lines_are_seen_where_they_are_one(tmp_path):
  path = tmp_path / 'curve.png'
  same = [{'step': i, 'reward': i / 9, 'success': i / 9} for i in range(60)]
  plots.learning_curve(same, [], path)
  orange, blue, _ = colours(path)
  assert orange > 500 and blue > 500


def words(metrics, evaluations):
  """All that is written on the picture."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure()
  FigureCanvasAgg(figure)
  axes = figure.subplots()
  plots._draw_training(axes, metrics, 'reward', 'success', 'GRPO')
  x = axes.get_xlabel()
  plots._draw_evaluations(axes, evaluations, 'GRPO')
  return x, [t.get_text() for t in axes.get_xticklabels()]


def test_cold_start_and_reinforcement_are_told_apart():
  cold = [{'step': i, 'phase': 'cold_start'} for i in (1, 2, 3)]
  x, bars = words(
    [*cold, {'step': 4, 'reward': 1.0, 'success': 1.0}],
    [evaluation(3, 0.2, when='before'), evaluation(4, 0.4, when='after')],
  )
  assert x == 'step (GRPO after a cold start of 3 steps)'
  assert bars == ['before GRPO\nstep 3', 'after GRPO\nstep 4']
  _, bars = words([], [evaluation(0, 0.2, when='untrained')])
  assert bars == ['untrained\nstep 0']
  x, bars = words([{'step': 1, 'reward': 1.0}], [evaluation(1, 0.2)])
  assert x == 'step of GRPO' and bars == ['step 1']


@pytest.mark.parametrize('value', [[], {}, '1', None, math.inf, object()])
def test_what_is_no_number_is_a_gap(value):
  assert math.isnan(plots._finite(value))


def test_values_can_have_other_names(tmp_path):
  path = tmp_path / 'curve.png'
  mine = [{'step': s, 'score': s / 3} for s in range(4)]
  plots.learning_curve(mine, [], path)
  assert colours(path)[0] == 0
  plots.learning_curve(mine, [], path, reward='score')
  assert colours(path)[0] > 1000


def test_first_and_last_evaluation_of_each_name():
  given = [
    evaluation(4, 0.3, name='a'),
    evaluation(0, 0.1, name='a'),
    evaluation(2, 0.2, name='a'),
    evaluation(4, 0.9, name='b'),
  ]
  chosen = plots._first_and_last(given)
  assert [(r['name'], r['step']) for r in chosen] == [
    ('a', 0),
    ('a', 4),
    ('b', 4),
  ]


def test_running_mean_looks_back_only():
  nan = math.nan
  assert plots._smooth([3.0, 0.0, 0.0, 3.0]) == [3.0, 1.5, 1.0, 1.0]
  assert plots._smooth([1.0, nan, nan, 3.0]) == [1.0, 1.0, 1.0, 3.0]
  assert np.isnan(plots._smooth([nan, 1.0])).tolist() == [True, False]


class Clock:
  now = 100.0

  def __call__(self):
    return self.now


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_a_log_file_gets_a_line_every_few_seconds():
  clock, out = Clock(), io.StringIO()
  with progress.Progress(6, stream=out, every=10, clock=clock) as p:
    for step in range(1, 7):
      clock.now += 4
      p.update(step, reward=0.5, success=0.25, kl=0.00123, tokens=8000)
  said = 'reward 0.500  success 25.0%  kl 0.0012  2,000 tokens/s'
  assert out.getvalue().splitlines() == [
    f'step 1/6  {said}  20s left',
    f'step 4/6  {said}  8s left',
    f'step 6/6  {said}  the last step',
  ]
  p.done()
  assert out.getvalue().splitlines()[-1] == 'done in 24s'


def test_a_terminal_line_is_rewritten_and_wiped():
  clock, out = Clock(), Terminal()
  with progress.Progress(3, stream=out, clock=clock) as p:
    clock.now += 1
    p.update(1, reward=0.5)
    clock.now += 1
    p.update(2)
    clock.now += 1
    p.update(3)
  written = out.getvalue()
  assert written.count('\n') == 1 and written.endswith('\n')
  first, second, third = written.strip('\r\n').split('\r')
  assert first == 'step 1/3  reward 0.500  2s left'
  assert second == f'{"step 2/3  1s left":<{len(first)}}'
  assert third == f'{"step 3/3  the last step":<{len("step 2/3  1s left")}}'


def test_a_note_takes_the_place_of_the_line():
  out = Terminal()
  with progress.Progress(2, stream=out, clock=Clock()) as p:
    p.update(1)
    p.note('evaluating')
  assert out.getvalue() == (
    '\rstep 1/2  0s left\r' + ' ' * 17 + '\revaluating\n'
  )
  out = io.StringIO()
  progress.Progress(2, stream=out).note('evaluating')
  assert out.getvalue() == 'evaluating\n'


def test_time_left_is_that_of_the_steps_alone():
  clock, out = Clock(), io.StringIO()
  p = progress.Progress(4, stream=out, every=0, clock=clock)
  clock.now += 500  # programs are compiled
  p.begin()
  for step in (1, 2):
    clock.now += 2
    p.update(step, tokens=10)
  clock.now += 300  # an evaluation
  p.begin()
  clock.now += 5
  p.update(3, tokens=10)
  assert out.getvalue().splitlines() == [
    'step 1/4  5 tokens/s  6s left',
    'step 2/4  5 tokens/s  4s left',
    'step 3/4  2 tokens/s  5s left',
  ]


def test_skipped_updates_are_shown():
  out = io.StringIO()
  p = progress.Progress(9, stream=out, clock=Clock())
  for step, skipped in enumerate((0, 0, 1, 1, 3), 1):
    p.update(step, skipped=skipped)
  assert out.getvalue().splitlines() == [
    'step 1/9  0s left',
    'step 3/9  1 updates skipped  0s left',
    'step 5/9  3 updates skipped  0s left',
  ]


def test_time_left_after_a_resume_counts_own_steps_alone():
  clock, out = Clock(), io.StringIO()
  p = progress.Progress(100, stream=out, every=0, clock=clock)
  clock.now += 10
  p.update(91)
  assert out.getvalue() == 'step 91/100  1m30s left\n'


@pytest.mark.parametrize(
  ('seconds', 'text'),
  [(0.4, '0s'), (59.6, '1m00s'), (61, '1m01s'), (3700, '1h01m')],
)
def test_durations(seconds, text):
  assert progress._duration(seconds) == text
