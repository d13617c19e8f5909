"""Mathematical equality, with answers that mean well and others."""

import importlib.util
import threading
import time

import pytest
from requirements import require

from agentjax.env import equality
from agentjax.env.apart import Apart
from agentjax.types import Task

TOWER = '9^{9^{9^{9^{9}}}}'


@pytest.fixture(scope='module')
def same():
  require(
    'math-verify',
    importlib.util.find_spec('math_verify') is not None,
    "pip install 'agentjax[data]'",
  )
  apart = Apart('agentjax.env.equality:equal', workers=1, cpu_s=2,
                imports=['math_verify'])  # fmt: skip
  made = equality.Equality(apart)
  yield made
  made.close()


@pytest.mark.parametrize(
  ('answer', 'golden', 'equal'),
  [
    ('42', '42', True), ('\\boxed{42}', '42', True), ('42.', '42', True),
    ("so \\boxed{'42'}", '42', True), ('\\boxed{ 42.0 }', '42', True),
    ('\\frac{84}{2}', '42', True), ('1,234', '1234', True),
    ('0.5', '\\frac{1}{2}', True), ('x=42', '42', True),
    ('x^2+2x+1', '(x+1)^2', True), ('\\boxed{41} or \\boxed{42}', '42', True),
    ('2,3', '\\{3,2\\}', True), ('(3,2)', '(2,3)', False),
    ('\\text{Thursday}', 'Thursday', True), ('Friday', 'Thursday', False),
    ('41', '42', False), ('\\boxed{42} or \\boxed{41}', '42', False),
    ('41, 42', '42', False), ('41 \\text{ or } 42', '42', False),
    ('\\pm 42', '42', False), ('42 \\neq 41', '42', False),
    ('x', '42', False), ('\\infty', '42', False), ('', '42', False),
    (None, '42', False), ('\\boxed{}', '42', False),
    ('\\boxed{42', '41', False),
    ('41.9999999', '42', False), ('-42', '42', False), ('...', '42', False),
    ('\\sum_{k=1}^{42} 1', '42', False), ('\\int_0^{42} 1 dx', '42', False),
    ('\\lim_{x\\to 42} x', '42', False), ('[INVALID]', '42', False),
    ('\x00\ud800', '42', False), ('{' * 30, '42', False),
    ('None', '42', False), ('nan', '42', False),
    ('__import__("os").getpid()', '42', False),
  ],
)  # fmt: skip
def test_what_is_equal(same, answer, golden, equal):
  assert same(answer, golden) is equal
  assert same.judge(Task('t', (), {'answer': golden}), answer) is equal


def test_a_tower_of_powers_hurts_nobody(same):
  """Bounded in time, is not equal, and answers beside it are judged right."""
  before, found = same.exhausted, {}

  def ask(answer):
    found[answer] = same(answer, '42')

  began = time.monotonic()
  answers = [TOWER, '84/2', f'\\boxed{{{TOWER}}}', '41+1']
  threads = [threading.Thread(target=ask, args=(a,)) for a in answers]
  for t in threads:
    t.start()
  for t in threads:
    t.join(120)
  assert found == dict(zip(answers, [False, True, False, True], strict=True))
  assert time.monotonic() - began < 100
  assert same.exhausted - before in (0, 1, 2)  # may be refused before that


@pytest.mark.parametrize(
  'wrap',
  [
    '{}', '\\text{{{}}}', '\\operatorname{{{}}}(1)', '{}=1', 'x_{{{}}}',
    '1,{}', '"{}"', '\\boxed{{{}}}',
  ],
)  # fmt: skip
def test_nothing_that_a_policy_wrote_is_run(same, tmp_path, wrap):
  path = tmp_path / 'touched'
  code = f"__import__('pathlib').Path({str(path)!r}).touch()"
  assert not same(wrap.format(code), '42')
  assert not path.exists()


def test_too_long_an_answer_is_not_looked_at(same):
  assert not same('1+' * equality.MAX_CHARS + '1', '42')


def test_an_empty_golden_answer_is_an_error(same):
  with pytest.raises(ValueError, match='empty'):
    same('', ' ')
