"""Integer expressions: what Python computes, and safe in many threads."""

import ast
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.env import integers

ALL = '+ - * // %'


def by_python(text, operators):
  """The value as Python has it, or None for what must be refused."""
  try:
    tree = ast.parse(text.strip(), mode='eval').body
  except SyntaxError:
    return None
  signs = {
    ast.Add: '+',
    ast.Sub: '-',
    ast.Mult: '*',
    ast.FloorDiv: '//',
    ast.Mod: '%',
  }
  for node in ast.walk(tree):
    if isinstance(node, ast.BinOp):
      if signs.get(type(node.op)) not in operators.split():
        return None
    elif isinstance(node, ast.UnaryOp):
      if not isinstance(node.op, ast.USub):
        return None
    elif isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
      return None
  try:
    value = eval(compile(ast.Expression(tree), '', 'eval'))
  except (ZeroDivisionError, TypeError):
    return None
  return value if type(value) is int else None


def ours(text, operators):
  try:
    return integers.evaluate(text, operators=operators, max_operations=99)
  except ValueError:
    return None


@settings(max_examples=1500, deadline=None)
@given(
  st.one_of(
    st.text('0123456789+-*/%() ', max_size=12),
    st.lists(
      st.sampled_from(
        ['0', '7', '12', '007', '+', '-', '*', '//', '%', '**', '/', '(', ')']
      ),
      max_size=12,
    ).map(' '.join),
  ),
  st.sampled_from([ALL, '+ - *', '+', '//']),
)
def test_it_computes_what_python_computes(text, operators):
  # A power is refused, and one of powers would keep Python busy.
  expected = None if '**' in text else by_python(text, operators)
  assert ours(text, operators) == expected


@pytest.mark.parametrize(
  ('text', 'value'),
  [
    ('2+3*4', 14),
    ('2*3+4', 10),
    ('9-3-2', 4),
    ('-2*-3', 6),
    ('--5', 5),
    ('-7//2', -4),
    ('-(7//2)', -3),
    ('7%-3', -2),
    ('2*(3+4)*5', 70),
    (' 1 + 1 ', 2),
    ('000', 0),
    ('(' * 31 + '1' + ')' * 31, 1),
    ('-' * 63 + '1', -1),
  ],
)
def test_precedence_signs_and_nesting(text, value):
  assert ours(text, ALL) == value


def test_many_threads_at_once():
  """What the calculators of a draw do; `ast.parse` fails at it on 3.11."""

  def switch(*unused):
    time.sleep(0)

  def work(i):
    return [
      integers.evaluate(f'(({k}*(-{i})))-(3)', max_operations=2)
      for k in range(300)
    ]

  # JAX has such a callback too: other threads run in the middle of a parse.
  threshold = gc.get_threshold()
  gc.callbacks.append(switch)
  gc.set_threshold(50)
  try:
    with ThreadPoolExecutor(8) as pool:
      found = list(pool.map(work, range(8)))
  finally:
    gc.set_threshold(*threshold)
    gc.callbacks.remove(switch)
  assert found == [[k * -i - 3 for k in range(300)] for i in range(8)]
