"""ReTool's rules: code that is run, rewards, demonstrations."""

import contextlib
import io

import pytest

from agentjax.env import retool
from agentjax.env.tool_environment import ToolEnvironment
from agentjax.types import Message, Reward, Status, Task, ToolCall


def run(code):
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    exec(compile(code, 'code', 'exec'), {})
  return out.getvalue()


@pytest.mark.parametrize(
  ('code', 'printed'),
  [
    ('1+1', '2\n'), ('x = 1\nx', '1\n'), ('x = 1', ''), ('print(3)', '3\n'),
    ('print (3)', '3\n'), ('x = 4; x', '4\n'), ('# only words', ''), ('', ''),
    ('1 + 1  # two', '2\n'), ('(1 +\n 1)', '2\n'), ('1, 2', '(1, 2)\n'),
    ('*[1], 2', '(1, 2)\n'), ('None', ''), ('[].append(1)', ''),
    ('if True:\n  5\nelse:\n  6', ''), ('for i in range(2):\n  i', ''),
    ('"ä" + "ö"', 'äö\n'), ('y = "ä"; y\n\n', 'ä\n'), ('(z := 7)', '7\n'),
    ('x = 1\r\nx\r\n', '1\n'), ('"""a\nb"""', 'a\nb\n'), ('f"{1}"', '1\n'),
    ('(i for i in [1]).__next__()', '1\n'), ('lambda: 0 if 1 else 2', None),
    ('"\\x0c"\n8', '8\n'), ('a = 1 # \x0c\na', '1\n'),
  ],
)  # fmt: skip
def test_the_last_expression_is_printed_and_nothing_else(code, printed):
  got = run(retool.print_last(code))
  assert got == printed if printed is not None else got.startswith('<function')


@pytest.mark.parametrize(
  'code', ['x = = 1', 'def f(:', '\x00', '(' * 5000, 'print("\ud800")\n\ud800']
)
def test_what_does_not_parse_is_run_as_it_is(code):
  assert retool.print_last(code) == code


def test_code_that_runs_before_the_rewriting_runs_after_it():
  code = 'total = 0\nfor i in range(4):\n  total += i\n'
  assert run(retool.print_last(code)) == ''
  with pytest.raises(SyntaxError):  # the recipe breaks it
    run(retool.released_print_last(code.rstrip()))


def test_rewards_of_paper_and_recipe():
  assert [retool.plus_minus_one(r) for r in (True, False)] == [1.0, -1.0]
  assert retool.released_reward(True, 8) == 1.0
  wrong = [retool.released_reward(False, n) for n in (2, 4, 10, 16)]
  assert wrong == pytest.approx([-1.0, -0.9, -0.6, -0.6])
  # Its prompt shows quotes, which its reading does not take off.
  assert retool.released_score("\\boxed{'42'}", '42', 2)[0] == -1.0


def test_a_judge_that_pays_one_or_minus_one():
  judge = retool.signed(lambda task, answer: answer == '42')
  task = Task('t', ())
  assert judge(task, '42') == Reward(1.0, True)
  assert judge(task, '41') == judge(task, None) == Reward(-1.0, False)
  assert retool.released_reward(False, None) == -1.05
  # In an environment, an episode without an answer is wrong as well.
  env = ToolEnvironment([], judge)
  env.reset(task)
  assert env.verify(Status.TOKEN_LIMIT).value == -1.0


def test_what_is_not_there_cannot_be_right():
  env = ToolEnvironment([], lambda task, answer: True)
  env.reset(Task('t', ()))
  with pytest.raises(ValueError, match='not there'):
    env.verify(Status.TURN_LIMIT)


ROW = [
  {
    'role': 'user',
    'content': 'Instructions with <answer> in them.\n*user question:*\n'
    'What is 6*7?\nIn <answer>\\boxed{}</answer>.',
  },
  {
    'role': 'assistant',
    'content': 'Let me see.\n<code>\n```python\nprint(6*7)\n```\n</code>\n'
    '<interpreter>\n42\n</interpreter>\nSo it is.\n'
    '<answer>\n\\boxed{42}\n</answer>',
  },
]


def test_a_demonstration_becomes_calls():
  assert retool.parse_demonstration(ROW) == [
    Message('user', 'What is 6*7?\nIn \\boxed{}.'),
    Message(
      'assistant',
      'Let me see.',
      (ToolCall('code_interpreter', {'code': 'print(6*7)'}),),
    ),
    Message('tool', '42', name='code_interpreter'),
    Message('assistant', 'So it is.\n\n\\boxed{42}'),
  ]


@pytest.mark.parametrize(
  ('at', 'old', 'new', 'says'),
  [
    (0, '*user question:*', '', 'user question'),
    (1, '</code>', '', '<code>'),
    (1, '</interpreter>', '', '<interpreter>'),
    (1, '<answer>', '', '<answer>'),
    (1, '</answer>', '</answer> and more', 'follows'),
  ],
)
def test_a_row_that_is_none_is_refused(at, old, new, says):
  row = [dict(m) for m in ROW]
  row[at]['content'] = row[at]['content'].replace(old, new)
  with pytest.raises(ValueError, match=says.replace('*', '.')):
    retool.parse_demonstration(row)


def test_one_message_is_no_demonstration():
  with pytest.raises(ValueError, match='1 messages'):
    retool.parse_demonstration(ROW[:1])
