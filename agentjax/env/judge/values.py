"""Comparing what a candidate answered with what is right, on the host.

Floor 1, env/judge. Answers are hostile text: of values strict JSON, one a
line, compared by type and value; of programs what they printed. Nothing here
evaluates, follows or imports anything, every length is bounded before it is
parsed, and no answer at all never equals anything.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

MAX_LINE = 64 << 10
_DECIMAL = re.compile(r'[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?', re.A)
_MAX_NUMBER = 400  # characters of a number that is compared within a tolerance

# (what was answered, what is right) -> equal?
SameValue = Callable[[Any, Any], bool]
SameText = Callable[[str, str], bool]


def parse_strictly(line: str) -> Any:
  """The JSON value that `line` is.

  ASCII only, no key twice, at most 64 KiB. NaN and infinities are read, to be
  told apart by `same_value`.

  Raises:
    ValueError: it is anything else, too deep or too long, in words.
  """
  if len(line) > MAX_LINE:
    raise ValueError(f'a line of {len(line)} characters, at most {MAX_LINE}')
  if not line.isascii():
    raise ValueError('a character that is not ASCII')
  try:
    return json.loads(line, object_pairs_hook=_no_key_twice)
  except RecursionError:
    raise ValueError('nested too deep') from None


def same_value(answer: Any, expected: Any) -> bool:
  """True if two JSON values are equal in type and value, all the way down.

  True is not 1 and 5.0 is not 5; -0.0 is 0.0; NaN is NaN and nothing else is.
  Tuples count as lists, which is how they travel.
  """
  if isinstance(expected, tuple):
    expected = list(expected)
  if type(answer) is not type(expected):
    return False
  if isinstance(expected, float) and math.isnan(expected):
    return math.isnan(answer)
  if isinstance(expected, list):
    return len(answer) == len(expected) and all(
      same_value(a, e) for a, e in zip(answer, expected, strict=True)
    )
  if isinstance(expected, dict):
    return answer.keys() == expected.keys() and all(
      same_value(answer[k], expected[k]) for k in expected
    )
  return answer == expected


def close_value(relative: float = 1e-9, absolute: float = 0.0) -> SameValue:
  """As `same_value`, but finite floats may differ by a tolerance."""

  def close(answer: Any, expected: Any) -> bool:
    if isinstance(expected, (list, tuple)):
      return (
        type(answer) is list
        and len(answer) == len(expected)
        and all(close(a, e) for a, e in zip(answer, expected, strict=True))
      )
    if isinstance(expected, dict):
      return (
        type(answer) is dict
        and answer.keys() == expected.keys()
        and all(close(answer[k], expected[k]) for k in expected)
      )
    if type(answer) is not type(expected):
      return False
    if isinstance(expected, float) and math.isfinite(expected):
      # An answer that is not finite is close to nothing: isclose says so.
      return math.isclose(answer, expected, rel_tol=relative, abs_tol=absolute)
    return same_value(answer, expected)

  return close


def same_text(answer: str, expected: str) -> bool:
  """True if two texts are equal, character by character."""
  _check_expected(expected)
  return answer == expected


def same_lines(answer: str, expected: str) -> bool:
  """True if the lines are equal but for blanks and empty lines at the ends."""
  _check_expected(expected)
  return _lines(answer) == _lines(expected)


def same_tokens(answer: str, expected: str) -> bool:
  """True if the words are equal, whatever blanks are between them."""
  _check_expected(expected)
  return answer.split() == expected.split()


def close_tokens(relative: float = 1e-9, absolute: float = 1e-9) -> SameText:
  """As `same_tokens`, but decimal numbers may differ by a tolerance.

  A number that is not finite, or is written in another way than in decimal
  digits, is a word like any other.
  """

  def close(answer: str, expected: str) -> bool:
    _check_expected(expected)
    ours, theirs = expected.split(), answer.split()
    return len(ours) == len(theirs) and all(
      a == e or _close_number(a, e, relative, absolute)
      for a, e in zip(theirs, ours, strict=True)
    )

  return close


def _close_number(a: str, e: str, relative: float, absolute: float) -> bool:
  if max(len(a), len(e)) > _MAX_NUMBER:
    return False
  if not (_DECIMAL.fullmatch(a) and _DECIMAL.fullmatch(e)):
    return False
  answer, expected = float(a), float(e)
  if not (math.isfinite(answer) and math.isfinite(expected)):
    return False
  return math.isclose(answer, expected, rel_tol=relative, abs_tol=absolute)


def _lines(text: str) -> list[str]:
  lines = [line.rstrip() for line in text.split('\n')]
  while lines and not lines[-1]:
    lines.pop()
  return lines


def _check_expected(expected: str) -> None:
  if not expected.strip():
    raise ValueError(
      f'expected output {expected!r} is empty: a program that prints nothing '
      'would be right; correct the task'
    )


def _no_key_twice(pairs: list) -> dict:
  out = dict(pairs)
  if len(out) != len(pairs):
    raise ValueError('a key stands twice')
  return out
