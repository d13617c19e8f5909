"""Formats print what public templates print; see also chat_parity.py."""

import importlib.util
import json
import pathlib

import pytest

from agentjax.text import formats
from agentjax.types import Message, ToolCall, ToolSpec

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


def printed(name, *messages, tools=()):
  return chat_parity.render(name, list(messages), list(tools))


def test_gemma3_trims_every_turn_but_the_first_system_message():
  text = printed(
    'gemma3',
    Message('system', ' s '),
    Message('user', ' a '),
    Message('system', ' b\n'),
    Message('user', ' c '),
  )
  assert text == (
    '<bos><start_of_turn>user\n s \n\na<end_of_turn>\n'
    '<start_of_turn>system\nb<end_of_turn>\n'
    '<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n'
  )


TOOL = ToolSpec('f', 'd', {})
LLAMA_HEAD = (
  '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n'
  'Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n'
  '<|eot_id|>'
)


def test_llama_tells_tools_in_the_words_beside_a_first_call():
  call = Message('assistant', ' I will. ', (ToolCall('f', {}),))
  text = printed('llama3_1', call, Message('tool', '4'), tools=[TOOL])
  assert '\n\nI will.<|eot_id|><|start_header_id|>ipython' in text
  assert '"name": "f", "parameters": {}}<|eot_id|>' not in text
  # Without tools the call alone is printed, as in any other place.
  assert printed('llama3_1', call) == (
    LLAMA_HEAD + '<|start_header_id|>assistant<|end_header_id|>\n\n'
    '{"name": "f", "parameters": {}}<|eot_id|>'
    '<|start_header_id|>assistant<|end_header_id|>\n\n'
  )


@pytest.mark.parametrize('role', ['tool', 'ipython'])
def test_llama_prints_results_as_json(role):
  text = printed('llama3_1', Message('user', ' x '), Message(role, ' "é"\n'))
  assert text == (
    LLAMA_HEAD + '<|start_header_id|>user<|end_header_id|>\n\nx<|eot_id|>'
    '<|start_header_id|>ipython<|end_header_id|>\n\n" \\"é\\"\\n"<|eot_id|>'
    '<|start_header_id|>assistant<|end_header_id|>\n\n'
  )
  # Llama 3 knows no tools: to it this is a role like any other.
  assert printed('llama3', Message(role, ' x ')) == (
    f'<|begin_of_text|><|start_header_id|>{role}<|end_header_id|>\n\nx'
    '<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
  )


@pytest.mark.parametrize(
  ('name', 'default'),
  [('qwen2_5', formats._QWEN2_5_SYSTEM), ('qwen3', None)],
)
def test_qwen_passes_over_other_roles_where_they_stand(name, default):
  head = f'<|im_start|>system\n{default}<|im_end|>\n' if default else ''
  tail = '<|im_start|>assistant\n'
  odd = Message('developer', 'never printed')
  # A system message that is not the first message is one among others.
  system = '<|im_start|>system\ns<|im_end|>\n'
  assert printed(name, odd, Message('system', 's')) == head + system + tail
  result = '<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n'
  assert (
    printed(name, Message('tool', '1'), odd, Message('tool', '2'))
    == head + result.format(1) + result.format(2) + tail
  )
  with_tools = printed(name, odd, Message('system', 's'), tools=[TOOL])
  opening = (
    f'<|im_start|>system\n{default}\n\n'
    if default
    else ('<|im_start|>system\n')
  )
  assert with_tools.startswith(opening + '# Tools')
  assert with_tools.endswith(system + tail)


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
