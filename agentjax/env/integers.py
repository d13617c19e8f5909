"""Integer expressions, read and computed without Python's evaluator.

Floor 1, env. The calculator computes with this what a policy wrote, and the
word problems what their templates say. The parser is our own: Python 3.11's
`ast.parse` fails now and then when several threads are in it (SystemError, AST
constructor recursion depth mismatch), and each tool has a thread.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

_OPERATORS: dict[str, Callable[[int, int], int]] = {
  '+': operator.add,
  '-': operator.sub,
  '*': operator.mul,
  '//': operator.floordiv,
  '%': operator.mod,
}
_SUMS, _PRODUCTS = ('+', '-'), ('*', '//', '%')
MAX_CHARS = 64
_CHARACTERS = re.compile(r'[0-9+*/%() -]+')
_TOKEN = re.compile(r' *(?:([0-9]+)|(\*\*|//|[-+*/%()]))')


def evaluate(
  text: str, *, operators: str = '+ - *', max_operations: int = 1
) -> int:
  """The value of `text`: integers, brackets, minus signs and `operators`.

  As Python computes it. At most 64 characters, so that neither numbers nor
  nesting can grow.

  Args:
    operators: those of + - * // % that are allowed, with blanks between.

  Raises:
    ValueError: anything else, in words for a policy to read.
  """
  if len(text) > MAX_CHARS:
    raise ValueError(f'{len(text)} characters, at most {MAX_CHARS}')
  if _CHARACTERS.fullmatch(text) is None:
    raise ValueError(f'only integers, brackets and {operators}')
  reader = _Reader(text, operators.split())
  value = reader.sum()
  reader.expect('')
  if reader.operations > max_operations:
    raise ValueError(
      f'{reader.operations} operations, at most {max_operations} a call'
    )
  try:
    return value()
  except ZeroDivisionError:
    raise ValueError('division by zero') from None


class _Reader:
  """Recursive descent. What is read is a function that computes it, so that
  nothing is computed of a text that turns out to be none."""

  def __init__(self, text: str, allowed: list[str]):
    self._tokens = [n or sign for n, sign in _TOKEN.findall(text)] + ['']
    self._allowed = allowed
    self._at = 0
    self.operations = 0

  def expect(self, token: str) -> None:
    if self._tokens[self._at] != token:
      raise ValueError('cannot read the expression')
    self._at += 1

  def sum(self) -> Callable[[], int]:
    return self._chain(_SUMS, self._product)

  def _product(self) -> Callable[[], int]:
    return self._chain(_PRODUCTS, self._factor)

  def _chain(self, signs, operand) -> Callable[[], int]:
    value = operand()
    while (sign := self._tokens[self._at]) in signs:
      self.expect(sign if sign in self._allowed else '')
      value = _apply(_OPERATORS[sign], value, operand())
      self.operations += 1
    return value

  def _factor(self) -> Callable[[], int]:
    token = self._tokens[self._at]
    if token == '-':
      self.expect('-')
      value = self._factor()
      return lambda: -value()
    if token == '(':
      self.expect('(')
      value = self.sum()
      self.expect(')')
      return value
    # As in Python, 007 is no number, and 000 is one.
    if not token.isdigit() or (token[0] == '0' and token.strip('0')):
      raise ValueError('cannot read the expression')
    self.expect(token)
    return lambda: int(token)


def _apply(function, left, right) -> Callable[[], int]:
  return lambda: function(left(), right())
