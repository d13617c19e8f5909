"""DAPO's reading of answers, and the last box."""

import numpy as np
import pytest

from agentjax.env import dapo
from agentjax.env.boxed import last_boxed
from agentjax.rl import shaping


@pytest.mark.parametrize(
  ('text', 'inside'),
  [
    ('\\boxed{1}\\boxed{2}', '2'), ('\\boxed{\\frac{1}{2}}x', '\\frac{1}{2}'),
    ('\\boxed{1} \\boxed{2', None), ('boxed{1}', None), ('\\boxed{}', ''),
    ('', None), ('\\boxed 1', None), ('\\boxed{{a}}}', '{a}'),
  ],
)  # fmt: skip
def test_last_box(text, inside):
  assert last_boxed(text) == inside


def test_no_answer_equals_no_golden_answer():
  assert dapo.released_answer_line('', '[INVALID]').right
  assert dapo.answer_line('', '[INVALID]') == dapo.Verdict(False, None)
  assert not dapo.released_box('', '').right


def test_an_answer_far_from_the_end_is_one():
  text = 'Answer: 42\n' + 'x' * 300
  assert dapo.answer_line(text, '42').right
  assert not dapo.released_answer_line(text, '42').right


@pytest.mark.parametrize(
  ('metric', 'ours', 'released'),
  [
    ([1.0, 0.0], True, True), ([0.7] * 3, False, True), ([1.0], False, True),
    ([0.0, 0.0], False, False), ([1.0, 1.0, 1.0], False, False),
  ],
)  # fmt: skip
def test_groups_are_chosen_by_outcome_not_by_float_deviation(
  metric, ours, released
):
  n = len(metric)
  given = metric, np.zeros(n, int), np.ones(n, bool)
  assert shaping.informative(*given).tolist() == [ours] * n
  assert shaping.released_informative(*given).tolist() == [released] * n


def test_a_length_penalty_does_not_make_failures_informative():
  """The metric is the verdict; the released filter may be given the score."""
  verdict, penalty = np.full(2, -1.0), np.array([0.0, -0.5])
  given = np.zeros(2, int), np.ones(2, bool)
  assert not shaping.informative(verdict, *given).any()
  assert shaping.released_informative(verdict + penalty, *given).all()
