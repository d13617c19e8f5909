"""Formats print what public templates print; see also chat_parity.py."""

import importlib.util
import json
import pathlib

import pytest

from agentjax.text import formats
from agentjax.types import Message

_path = pathlib.Path(__file__).parents[1] / 'chat_parity.py'
_spec = importlib.util.spec_from_file_location('chat_parity', _path)
chat_parity = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(chat_parity)


@pytest.mark.parametrize(
  ('name', 'key', 'messages', 'tools', 'expected'),
  [
    pytest.param(*c, id=f'{c[0]}-{c[1]}')
    for c in chat_parity.cases(chat_parity.DATA)
  ],
)
def test_public_templates(name, key, messages, tools, expected):
  assert chat_parity.render(name, messages, tools) == expected


def test_every_public_template_is_compared():
  data = json.loads(chat_parity.DATA.read_text(encoding='utf-8'))
  assert sum(map(len, data['renders'].values())) == 59
  assert set(data['renders']) == {
    *('qwen2_5', 'qwen3', 'llama3_1', 'llama3', 'gemma3', 'gemma', 'smollm2')
  }


def test_the_script_counts_and_fails(tmp_path, capsys, monkeypatch):
  data = json.loads(chat_parity.DATA.read_text(encoding='utf-8'))
  data['renders'] = {
    'gemma': {'user': data['renders']['gemma']['user'], 'two_turns': 'other'},
    'nobody': {'user': ''},
  }
  path = tmp_path / 'cases.json'
  path.write_text(json.dumps(data), encoding='utf-8')
  monkeypatch.setattr('sys.argv', ['chat_parity.py', '--file', str(path)])
  assert chat_parity.main() == 1
  out = capsys.readouterr().out
  assert out.splitlines()[-1] == '1 passed, 2 failed'
  assert 'gemma/two_turns' in out and 'nobody/user' in out


def test_tags_keep_the_system_message_of_their_base():
  messages = [Message('user', 'x')]
  for made, base in (
    (formats.smollm2_code, 'smollm2'),
    (formats.search_r1_qwen2_5, 'qwen2_5'),
  ):
    assert chat_parity.render(made.name, messages, []) == chat_parity.render(
      base, messages, []
    )


def test_a_plain_prompt_is_the_bare_text():
  text = chat_parity.render(
    'search_r1', [Message('user', 'Question: x?\n')], []
  )
  assert text == 'Question: x?\n'
