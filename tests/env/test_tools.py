"""The calculator and Python: what a policy may write, and what it reads."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sandboxes import SPEC

from agentjax.env.base import ToolError
from agentjax.env.sandbox import (
  CallResult,
  CallStatus,
  SandboxUnavailable,
)
from agentjax.env.tools import Calculator, PythonTool, bounded, readable

JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=5,
)


@pytest.mark.parametrize(
  'expression, result',
  [
    ('47*12', '564'),
    (' 564 + 85 ', '649'),
    ('10-99', '-89'),
    ('-5+3', '-2'),
    ('5*-3', '-15'),
    ('(7)', '7'),
    ('((4+4))', '8'),
    ('99999999999999999999*9', '899999999999999999991'),
  ],
)
def test_calculator(expression, result):
  assert Calculator()({'expression': expression}) == result


@pytest.mark.parametrize(
  'expression, message',
  [
    ('(47*12)+85', '2 operations, at most 1'),
    ('1+2+3', '2 operations'),
    ('2**9', 'cannot read'),
    ('9**9**9', 'cannot read'),
    ('8/2', 'cannot read'),
    ('8//2', 'cannot read'),
    ('8%3', 'cannot read'),
    ('47*', 'cannot read'),
    ('*', 'cannot read'),
    ('()', 'cannot read'),
    ('(1,2)', 'only integers'),
    ('5(3)', 'cannot read'),
    ('007', 'cannot read'),
    ('+5', 'cannot read'),
    ('1_0+1', 'only integers'),
    ('1.5+1', 'only integers'),
    ('a+1', 'only integers'),
    ('４+４', 'only integers'),
    ("__import__('os').system('touch hacked')", 'only integers'),
    ('1;2', 'only integers'),
    ('1\n+1', 'only integers'),
    ('(' * 60, 'cannot read'),
    ('9' * 65, '65 characters'),
    ('-' * 63 + '1', None),
    ('', 'non-empty'),
    ('  ', 'non-empty'),
    (None, 'non-empty text'),
    (5, 'non-empty text'),
    ([], 'non-empty text'),
  ],
)
def test_calculator_refuses_in_words(expression, message):
  if message is None:
    assert Calculator()({'expression': expression}) == '-1'
    return
  with pytest.raises(ToolError, match=message.replace('(', r'\(')):
    Calculator()({'expression': expression})
  assert not os.path.exists('hacked')


@pytest.mark.parametrize(
  'arguments', [{}, None, [], 'x', {'expr': '1'}, {'expression': '1', 'y': 2}]
)
def test_arguments_are_checked(arguments):
  with pytest.raises(ToolError, match='exactly one argument: expression'):
    Calculator()(arguments)


def test_more_operations_are_an_option():
  assert Calculator(2)({'expression': '(47*12)+85'}) == '649'
  with pytest.raises(ValueError, match='max_operations is 0'):
    Calculator(0)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet='0123456789+-*/%() e.', max_size=70) | JSON)
def test_calculator_raises_nothing_but_tool_errors(expression):
  try:
    result = Calculator(3)({'expression': expression})
  except ToolError as error:
    assert str(error)
  else:
    assert int(result) == eval(expression)


def test_python_tool_says_what_happened(shared):
  tool = PythonTool(timeout_s=1.0, max_chars=200, sandbox=shared)

  def text(code):
    return tool({'code': code})

  assert tool.spec.name == 'python'
  assert text('print(3 * 4)') == '12'
  assert text('x = 1') == '(no output)'
  assert text('print("é漢🙂")') == 'é漢🙂'
  assert text('1/0') == 'error: ZeroDivisionError: division by zero'
  assert text('print("so far"); 1/0') == (
    'so far\nerror: ZeroDivisionError: division by zero'
  )
  assert text('raise SystemExit(7)') == 'error: exit code 7'
  assert text('while True: pass') == 'error: timed out after 1 s'
  assert text('import os; os.abort()') == 'error: ended by signal 6'
  assert text('print("\\x00\\x1b[31m")') == '\ufffd\ufffd[31m'
  long = text('print("a" * 5000 + "z")')
  assert len(long) <= 200 and long.startswith('aaa') and long.endswith('z')
  assert 'cut' in long
  with pytest.raises(ToolError, match='exactly one argument: code'):
    tool({'source': '1'})
  with pytest.raises(ToolError, match='at most 20000'):
    text('#' * 30_000)
  tool.close()  # not its own: still open
  assert text('print(1)') == '1'


def test_python_tool_opens_its_sandbox_late_and_closes_it(backend):
  tool = PythonTool(SPEC, backend)
  assert tool._own is None
  tool.close()
  tool = PythonTool(SPEC, backend)
  assert tool({'code': 'open("kept", "w").write("1")'}) == '(no output)'
  assert tool({'code': 'print(open("kept").read())'}) == '1'
  tool.close()
  tool.close()


def test_python_tool_is_not_made_where_nothing_can_run_it(monkeypatch):
  monkeypatch.setenv('DOCKER_HOST', 'unix:///nonexistent/docker.sock')
  monkeypatch.setenv('PATH', '/nonexistent')
  with pytest.raises(SandboxUnavailable, match='no sandbox can run here'):
    PythonTool()
  assert Calculator()({'expression': '1+1'}) == '2'


@pytest.mark.parametrize(
  'status, text',
  [
    (CallStatus.OOM, 'error: out of memory'),
    (CallStatus.PIDS, 'error: too many processes'),
    (CallStatus.DISK, 'error: disk full'),
    (CallStatus.OUTPUT_CAP, 'error: too much output'),
  ],
)
def test_limits_have_names(status, text):
  assert readable(CallResult(status, stderr='x'), 1, 100) == text
  dead = readable(CallResult(status, alive=False), 1, 100)
  assert dead == f'{text}; the sandbox is gone'


@settings(max_examples=100, deadline=None)
@given(
  st.text(st.characters(), max_size=300),
  st.text(st.characters(), max_size=300),
  st.sampled_from(list(CallStatus)),
  st.integers(1, 200),
)
def test_what_is_read_is_valid_and_bounded(stdout, stderr, status, max_chars):
  result = CallResult(status, exit=1, stdout=stdout, stderr=stderr)
  text = readable(result, 1.0, max_chars)
  assert 0 < len(text) <= max_chars
  text.encode('utf-8')
  assert not set(text) & {'\x00', '\x1b', '\x7f', '\r'}


def test_bounded_keeps_both_ends():
  text = bounded('a' * 500 + 'z' * 500, 101)
  head, mark, tail = text.partition('\n[... 1000 characters, cut ...]\n')
  assert mark and set(head) == {'a'} and set(tail) == {'z'}
  assert len(text) == 101
  assert bounded('\ud800x', 10) == '?x'
