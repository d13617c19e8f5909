"""Comparing answers: what is equal, and all that is not."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.env.judge.values import (
  MAX_LINE,
  close_tokens,
  close_value,
  parse_strictly,
  same_lines,
  same_text,
  same_tokens,
  same_value,
)

NAN, INF = float('nan'), float('inf')
JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=8,
)


@given(JSON)
def test_a_value_is_itself_and_its_type_alone(value):
  assert same_value(value, value)
  assert close_value()(value, value)
  for other in (None, True, 0, 0.5, 'a', [value], {'a': value}):
    if type(other) is not type(value):
      assert not same_value(other, value)
      assert not close_value(absolute=INF)(other, value)


@pytest.mark.parametrize(
  'answer, expected',
  [
    (True, 1),
    (1, True),
    (5.0, 5),
    (5, 5.0),
    ('5', 5),
    (None, 0),
    (None, False),
    ([], None),
    ([1, True], [1, 1]),
    ({'a': 1}, {'a': 1, 'b': 2}),
    ({'a': 1, 'b': 2}, {'a': 1}),
    ([1, 2], [2, 1]),
    ([1], [1, 1]),
    (NAN, 0.0),
    (0.0, NAN),
    (INF, NAN),
    (-INF, INF),
    (INF, 1e308),
    ('a', 'a '),
  ],
)
def test_not_the_same_value(answer, expected):
  assert not same_value(answer, expected)
  assert not close_value(relative=1e-3)(answer, expected)
  assert not same_value([answer], [expected])
  assert not same_value({'k': answer}, {'k': expected})


def test_the_same_value():
  assert same_value(NAN, NAN) and same_value(INF, INF)
  assert same_value(-0.0, 0.0)
  assert same_value([1, [2]], (1, (2,)))  # tuples travel as lists
  assert same_value(2**200, 2**200)


def test_close_values():
  close = close_value(relative=1e-6)
  assert close([1.0, {'a': 1e9}], [1.0000001, {'a': 1e9 + 1}])
  assert not close(1.0, 1.00001)
  assert not close(1, 1.0) and not close(2, 3)  # floats alone may differ
  for wrong in (NAN, INF, -INF):
    assert not close_value(absolute=1e300)(wrong, 1.0)


@pytest.mark.parametrize(
  'line, message',
  [
    ('{"a": 1, "a": 1}', 'twice'),
    ('[{"a": 1, "a": 2}]', 'twice'),
    ('"é"', 'not ASCII'),
    ('[' * 60_000, 'too deep'),
    ('[' * 2000 + ']' * 2000, 'too deep'),
    ('1' * 5000, '4300'),
    ('"' + 'x' * MAX_LINE + '"', 'at most'),
    ('', 'Expecting value'),
    ('1 2', 'Extra data'),
    ('{"a": 1} {"a": 1}', 'Extra data'),
    ('{a: 1}', 'Expecting'),
    ('nan', 'Expecting'),
    ("{'a': 1}", 'Expecting'),
  ],
)
def test_what_is_no_answer(line, message):
  with pytest.raises(ValueError, match=message):
    parse_strictly(line)


@given(st.text(alphabet='[]{}",:0123456789.eE+-truefalsnN\\u', max_size=80))
def test_reading_an_answer_never_fails_otherwise(line):
  try:
    parse_strictly(line)
  except ValueError:
    pass


def test_texts():
  assert same_text('a\n', 'a\n') and not same_text('a', 'a\n')
  assert same_lines('a  \nb\n\n', 'a\nb') and not same_lines('a b', 'a\nb')
  assert not same_lines(' a', 'a')
  assert same_tokens('1\n2', ' 1 2 ') and not same_tokens('1 2 2', '1 2')
  assert not same_tokens('1', '1.0')


@pytest.mark.parametrize('empty', ['', '\n', ' \t\n'])
def test_nothing_is_never_right(empty):
  for same in (same_text, same_lines, same_tokens, close_tokens()):
    assert not same(empty, 'a')
    with pytest.raises(ValueError, match='correct the task'):
      same(empty, empty)


def test_close_tokens():
  close = close_tokens(relative=1e-6, absolute=1e-6)
  assert close('0.3333333 yes', '0.33333333 yes')
  assert close('1e3', '1000') and close('-0', '0.0') and close('.5', '0.5')
  assert close('nan', 'nan')  # a word like any other
  wrongs = ('nan', 'inf', '-inf', 'Infinity', '1_0', '0x1', '１', '', '1 1')
  for wrong in wrongs:
    assert not close(wrong, '1')
    assert not close_tokens(math.inf, math.inf)(wrong, '1')
  assert not close('1e999', '1e998') and not close('1' * 999, '1' * 998 + '2')
