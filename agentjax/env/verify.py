"""Comparing answers: the functions that decide a reward.

Floor 1, env. Verifiers call these on text that a policy wrote to be paid for:
each accepts what it names and nothing else, and an answer that is not there
never equals anything, not even another one that is not there. Nothing here
evaluates the text, and its length is bounded before anything else is done.
"""

from __future__ import annotations

import fractions
import re

_MAX_CHARS = 64
# Plain digits, or groups of three after commas; ASCII only.
_NUMBER = re.compile(r'([+-]?)([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.([0-9]+))?')


def same_integer(answer: str | None, expected: int) -> bool:
  """True if `answer` is `expected` in plain decimal digits.

  Blanks around it are allowed; signs of plus, leading zeros, commas, words
  and a second number are not.
  """
  if answer is None or len(answer) > _MAX_CHARS:
    return False
  return answer.strip() == str(expected)


def parse_number(text: str | None) -> fractions.Fraction | None:
  """The one decimal number that `text` is, exactly; None if it is not one.

  '1,234', ' 1234 ', '+1234.0' are the same number; '', '1 2', '1e3', '12,34',
  '0x10', 'nan', '42 apples' are none.
  """
  if text is None or len(text) > _MAX_CHARS:
    return None
  match = _NUMBER.fullmatch(text.strip())
  if match is None:
    return None
  sign, whole, decimals = match.groups()
  decimals = decimals or ''
  digits = int(whole.replace(',', '') + decimals)
  value = fractions.Fraction(digits, 10 ** len(decimals))
  return -value if sign == '-' else value


def same_number(answer: str | None, expected: str) -> bool:
  """True if `answer` is a number, and exactly the number `expected`.

  Raises:
    ValueError: `expected` is not a number: then nothing may be right.
  """
  truth = parse_number(expected)
  if truth is None:
    raise ValueError(
      f'expected answer {expected!r} is not a number: correct the task'
    )
  return parse_number(answer) == truth
