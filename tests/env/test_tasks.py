"""Files of tasks: whole, or an error that says where and why."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.env import arithmetic
from agentjax.env.tasks import read_tasks, write_tasks
from agentjax.types import Message, Task, ToolCall

GOOD = '{"id": "a", "messages": [{"role": "user", "content": "1+1="}]}'


def test_round_trip(tmp_path):
  tasks = arithmetic.tasks('train', 20, system='é\u2028漢')
  calls = (ToolCall('calculator', {'expression': '1+1'}, 'c1'),)
  tasks.append(
    Task(
      'with\u2028lines\u0085\r\x0b\x1c',
      (
        Message('user', 'a\nb\r\nc\u2029'),
        Message('assistant', '', calls),
        Message('tool', '2', name='calculator'),
      ),
      {'answer': ['x', None, {'y': 1.5}]},
    )
  )
  path = tmp_path / 'tasks.jsonl'
  write_tasks(path, tasks)
  assert read_tasks(path) == tasks
  assert read_tasks(str(path)) == tasks


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=['Cs']), max_size=50))
def test_any_text_comes_back(tmp_path_factory, text):
  path = tmp_path_factory.mktemp('tasks') / 't.jsonl'
  tasks = [Task('a', (Message('user', text),)), Task('b', (Message('u', ''),))]
  write_tasks(path, tasks)
  assert read_tasks(path) == tasks


def test_last_line_may_lack_its_end_and_lines_may_end_in_crlf(tmp_path):
  path = tmp_path / 'tasks.jsonl'
  path.write_bytes(
    GOOD.encode() + b'\r\n' + GOOD.replace('"a"', '"b"').encode()
  )
  assert [t.id for t in read_tasks(path)] == ['a', 'b']


@pytest.mark.parametrize(
  'line, reason',
  [
    ('', 'the line is empty'),
    ('   ', 'the line is empty'),
    (GOOD[:-1], "Expecting ',' delimiter"),
    ('[1]', 'a task is a JSON object, not list'),
    ('null', 'not NoneType'),
    ('{"id": "b"}', "lacks ['messages']"),
    (GOOD, "id 'a' is that of line 1 too"),
    (GOOD.replace('"a"', '""'), 'not a non-empty string'),
    (GOOD.replace('"a"', '7'), 'not a non-empty string'),
    (GOOD.replace('"id"', '"ids"'), 'unknown task fields'),
    (GOOD.replace('"content"', '"text"'), "unknown message fields ['text']"),
    (GOOD.replace('"1+1="', '5'), 'message field content is 5'),
    ('{"id": "b", "id": "c", "messages": []}', 'a key stands twice'),
    ('{"id": "b", "messages": []}', 'non-empty list'),
    ('{"id": "b", "messages": [1]}', 'a message is a JSON object'),
    (
      GOOD.replace('"a"', '"b"').replace('}]', '}], "verify": {"x": NaN}'),
      'NaN is not JSON',
    ),
    (GOOD.replace('"a"', '"b"').replace('}]', '}], "verify": []'), 'verify'),
    ('[' * 100_000, 'recursion'),
  ],
)
def test_a_bad_line_is_named_and_nothing_is_kept(tmp_path, line, reason):
  path = tmp_path / 'tasks.jsonl'
  path.write_text(f'{GOOD}\n{line}\n{GOOD.replace("a", "z")}\n')
  with pytest.raises(ValueError) as caught:
    read_tasks(path)
  text = str(caught.value)
  assert f'{path}, line 2: ' in text and reason in text
  assert 'No task of this file was taken' in text


@pytest.mark.parametrize('data', [b'', b'\n'])
def test_an_empty_file_is_named(tmp_path, data):
  (tmp_path / 'tasks.jsonl').write_bytes(data)
  with pytest.raises(ValueError, match=r'jsonl(, line 1: the line)? is empty'):
    read_tasks(tmp_path / 'tasks.jsonl')


def test_bytes_that_are_no_text(tmp_path):
  path = tmp_path / 'tasks.jsonl'
  path.write_bytes(GOOD.encode() + b'\n' + b'\xff\n')
  with pytest.raises(ValueError, match="line 2: 'utf-8' codec"):
    read_tasks(path)


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='none.jsonl'):
    read_tasks(tmp_path / 'none.jsonl')


def test_file_is_plain_json_lines(tmp_path):
  path = tmp_path / 'tasks.jsonl'
  write_tasks(path, arithmetic.tasks('test', 3))
  lines = path.read_text('utf-8').split('\n')
  assert len(lines) == 4 and lines[-1] == ''
  assert json.loads(lines[0])['messages'][0]['role'] == 'user'
