"""Answers that want to be paid: only the right one is."""

import fractions
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.env import verify


@pytest.mark.parametrize('answer', ['649', ' 649', '649\n', '\t649  '])
def test_same_integer(answer):
  assert verify.same_integer(answer, 649)


@pytest.mark.parametrize(
  'answer',
  [
    None,
    '',
    ' ',
    '+649',
    '0649',
    '649.0',
    '649.',
    '6 49',
    '649 649',
    '649 or 650',
    'not 649',
    '=649',
    '6_49',
    '648 649 650',
    '６４９',  # full-width digits, which int() would take
    '٦٤٩',
    '649\u200b',
    '0x289',
    '6.49e2',
    '47*12+85',
    'True',
    '9' * 100_000,
    '-649',
  ],
)
def test_nothing_else_is_that_integer(answer):
  assert not verify.same_integer(answer, 649)


def test_zero_and_negative_integers():
  assert verify.same_integer('-5', -5) and not verify.same_integer('5', -5)
  assert verify.same_integer('0', 0) and not verify.same_integer('-0', 0)
  assert not verify.same_integer('', 0) and not verify.same_integer('None', 0)


@pytest.mark.parametrize(
  'text', ['1234', '1,234', '1234.0', '1,234.00', ' +1234 ', '01234', '1234\n']
)
def test_same_number(text):
  assert verify.same_number(text, '1234')
  assert verify.same_number('1234', text)


@pytest.mark.parametrize(
  'text',
  [
    None,
    '',
    ' ',
    '.',
    '-',
    ',',
    '1 234',
    '1234 1234',
    '1234\n1234',
    '12,34',
    '1,2345',
    ',234',
    '1,,234',
    '1234,',
    '1234.',
    '.5',
    '1.2.3',
    '1e3',
    '1_234',
    '0x4d2',
    'nan',
    'inf',
    '-inf',
    'NaN',
    '--1234',
    '+-1234',
    '- 1234',
    '1234 apples',
    '$1234',
    '1234 or 1235',
    '１２３４',
    '1234\u2028',
    '1234\x00',
    '1/2',
    '9' * 1_000_000,
    '9' * 65,
  ],
)
def test_what_is_no_number(text):
  start = time.monotonic()
  # Some of these strip to a number: U+2028 is a blank to str.strip.
  if text == '1234\u2028':
    assert verify.parse_number(text) == 1234
    return
  assert verify.parse_number(text) is None
  assert not verify.same_number(text, '1234')
  assert time.monotonic() - start < 1


def test_numbers_are_exact():
  assert not verify.same_number('0.30000000000000004', '0.3')
  assert not verify.same_number('9007199254740993', '9007199254740992')
  assert not verify.same_number('1234.0000000000000000000001', '1234')
  assert verify.parse_number('-0.25') == fractions.Fraction(-1, 4)
  assert verify.same_number('-0', '0')


def test_task_without_a_number_as_truth_is_an_error():
  for expected in ('', 'None', 'x'):
    with pytest.raises(ValueError, match='correct the task'):
      verify.same_number('', expected)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20), st.integers(-9999, 9999))
def test_any_text_is_judged_without_raising(text, number):
  if verify.same_integer(text, number):
    assert int(text) == number
  if verify.same_number(text, str(number)):
    assert float(text.replace(',', '')) == number
