"""Integer expressions, read and computed without Python's evaluator.

Floor 1, env. The calculator computes with this what a policy wrote, and the
word problems what their templates say.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_OPERATORS: dict[type, tuple[str, Callable[[int, int], int]]] = {
  ast.Add: ('+', operator.add),
  ast.Sub: ('-', operator.sub),
  ast.Mult: ('*', operator.mul),
  ast.FloorDiv: ('//', operator.floordiv),
  ast.Mod: ('%', operator.mod),
}
MAX_CHARS = 64
_CHARACTERS = re.compile(r'[0-9+*/%() -]+')


def evaluate(
  text: str, *, operators: str = '+ - *', max_operations: int = 1
) -> int:
  """The value of `text`: integers, brackets, minus signs and `operators`.

  At most 64 characters, so that neither numbers nor nesting can grow.

  Args:
    operators: those of + - * // % that are allowed, with blanks between.

  Raises:
    ValueError: anything else, in words for a policy to read.
  """
  allowed = operators.split()
  if len(text) > MAX_CHARS:
    raise ValueError(f'{len(text)} characters, at most {MAX_CHARS}')
  if _CHARACTERS.fullmatch(text) is None:
    raise ValueError(f'only integers, brackets and {operators}')
  try:
    tree = ast.parse(text.strip(), mode='eval').body
  except SyntaxError:
    raise ValueError('cannot read the expression') from None
  count = sum(isinstance(node, ast.BinOp) for node in ast.walk(tree))
  if count > max_operations:
    raise ValueError(f'{count} operations, at most {max_operations} a call')
  try:
    return _value(tree, allowed)
  except ZeroDivisionError:
    raise ValueError('division by zero') from None


def _value(node: ast.AST, allowed: list[str]) -> int:
  if isinstance(node, ast.Constant) and type(node.value) is int:
    return node.value
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
    return -_value(node.operand, allowed)
  if isinstance(node, ast.BinOp):
    # `**` and `/` are operators of Python that have no entry here.
    sign, function = _OPERATORS.get(type(node.op), ('', None))
    if sign in allowed:
      return function(_value(node.left, allowed), _value(node.right, allowed))
  raise ValueError('cannot read the expression')
