"""Call syntaxes: what a text is read as."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.text import calls, formats, tags
from agentjax.types import Message, ToolCall, Verdict

SEARCH = formats.search_r1.syntax
CODE = formats.smollm2_code.syntax


def _hermes(*bodies):
  return ''.join(f'<tool_call>\n{b}\n</tool_call>' for b in bodies)


def test_hermes_calls_in_order_with_text_around():
  text = 'First ' + _hermes(
    '{"name": "f", "arguments": {"x": [1, {"y": null}]}}',
    '{"name": "g", "arguments": {}}',
  )
  got = calls.HERMES.read(text + ' then')
  assert got.calls == (
    ToolCall('f', {'x': [1, {'y': None}]}),
    ToolCall('g', {}),
  )
  assert got.rest == 'First  then' and got.problem is None
  assert got.verdict(limited=False) is Verdict.CALLS


def test_a_closing_tag_inside_of_an_argument_is_text():
  code = 'print("</tool_call>") # <tool_call>'
  body = json.dumps({'name': 'run', 'arguments': {'code': code}})
  got = calls.HERMES.read(_hermes(body))
  assert got.calls == (ToolCall('run', {'code': code}),)


@pytest.mark.parametrize(
  ('text', 'problem'),
  [
    (_hermes('{"name": "f", "arguments": {"x": 1}'), "Expecting ','"),
    (_hermes('{"name": "f", "arguments": {}}}'), 'must follow'),
    (_hermes('{"arguments": {}}'), 'needs "name"'),
    (_hermes('{"name": "", "arguments": {}}'), 'needs "name"'),
    (_hermes('{"name": "f"}'), 'needs "arguments"'),
    (_hermes('{"name": "f", "arguments": "{}"}'), 'needs "arguments"'),
    (_hermes('["f"]'), 'is a JSON object'),
    (_hermes('{"name": "f", "arguments": {"x": NaN}}'), 'NaN is not JSON'),
    (_hermes('{"name": "f", "arguments": {"x": 1e999}}'), '1e999'),
    (_hermes('{"name": "f", "arguments": {"x": "\\ud800"}}'), 'surrogate'),
    (_hermes('{"name": "f", "arguments": ' + '[' * 9999), 'nested too deeply'),
    (_hermes('{"name": "f", "arguments": {"x": ' + '9' * 9999 + '}}'), 'limit'),
    (_hermes(''), 'Expecting value'),
    ('{"name": "f", "arguments": {}}\n</tool_call>', 'without <tool_call>'),
    (_hermes('{"name": "f", "arguments": {}}') + '</tool_call>', 'without'),
  ],
)
def test_hermes_names_what_is_wrong(text, problem):
  got = calls.HERMES.read(text)
  assert problem in got.problem
  assert got.verdict(limited=False) is Verdict.MALFORMED


@pytest.mark.parametrize(
  ('text', 'verdict'),
  [
    ('<tool_call>\n{"name": "f", "argu', Verdict.TRUNCATED),
    ('<tool_call>', Verdict.TRUNCATED),
    ('<tool_call>{"name": "f", "arguments": {}}\n</tool_c', Verdict.TRUNCATED),
    (
      '<tool_call>{"name": "f", "arguments": {"x": "</tool_call> an',
      Verdict.TRUNCATED,
    ),
    (_hermes('{"name": }') + ' and', Verdict.MALFORMED),
    (_hermes('{"name": "f", "arguments": {}}'), Verdict.CALLS),
    ('I think that', Verdict.TRUNCATED),
    ('', Verdict.TRUNCATED),
  ],
)
def test_hermes_at_a_limit(text, verdict):
  assert calls.HERMES.read(text).verdict(limited=True) is verdict


@pytest.mark.parametrize(
  ('text', 'expected', 'rest'),
  [
    ('{"name": "f", "parameters": {"x": 1}}', [('f', {'x': 1})], None),
    (' {"name": "f", "arguments": {}} ', [('f', {})], None),
    ('So: {"name": "f", "parameters": {}}', [('f', {})], 'So:'),
    (
      '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
      [('f', {}), ('g', {})],
      None,
    ),
    ('{1, 2} is a set', [], '{1, 2} is a set'),
    ('{"result": 4}', [], '{"result": 4}'),
    ('It is 4.', [], 'It is 4.'),
  ],
)
def test_llama_calls(text, expected, rest):
  got = calls.LLAMA_JSON.read(text)
  assert [(c.name, c.arguments) for c in got.calls] == expected
  assert got.rest == rest and got.problem is None


@pytest.mark.parametrize(
  ('text', 'limited'),
  [
    ('{"name": "f", "parameters": {"x": 1}', Verdict.TRUNCATED),
    ('{"name": "f", "parameters": {"x": "a', Verdict.TRUNCATED),
    ('{"na', Verdict.TRUNCATED),
    ('{', Verdict.TRUNCATED),
    ('{"name": "f", "parameters": {}}}', Verdict.MALFORMED),
    ('[{"name": "f", "parameters": {}}]', Verdict.MALFORMED),
    ('{"name": "f"}', Verdict.MALFORMED),
    ('{"parameters": {}}', Verdict.MALFORMED),
    ('{"name": "f", "parameters": [1]}', Verdict.MALFORMED),
  ],
)
def test_llama_calls_that_cannot_be_read(text, limited):
  got = calls.LLAMA_JSON.read(text)
  assert got.problem and got.verdict(limited=False) is Verdict.MALFORMED
  assert got.verdict(limited=True) is limited


def test_a_tag_is_a_call_with_one_argument():
  got = SEARCH.read('I wonder. <search> who? </search>')
  assert got.calls == (ToolCall('search', {'query': 'who?'}),)
  assert got.rest == 'I wonder.'
  assert got.verdict(limited=False) is Verdict.CALLS


def test_a_tag_for_the_answer():
  got = SEARCH.read('Known. <answer> Beijing </answer> ')
  assert got.rest == 'Beijing' and not got.calls
  assert got.verdict(limited=True) is Verdict.ANSWER


def test_text_without_the_tag_is_no_answer():
  got = SEARCH.read('Beijing')
  assert got.rest is None and got.verdict(limited=False) is Verdict.ANSWER
  assert got.verdict(limited=True) is Verdict.TRUNCATED


@pytest.mark.parametrize(
  ('text', 'limited'),
  [
    ('<search> who', Verdict.TRUNCATED),
    ('<search> who</sear', Verdict.TRUNCATED),
    ('<answer>', Verdict.TRUNCATED),
    ('who? </search>', Verdict.MALFORMED),
    ('</answer>', Verdict.MALFORMED),
    ('<search> a <search> b </search>', Verdict.MALFORMED),
    ('<search>a</search><answer>b', Verdict.TRUNCATED),
  ],
)
def test_unbalanced_tags(text, limited):
  got = SEARCH.read(text)
  assert got.problem and got.verdict(limited=False) is Verdict.MALFORMED
  assert got.verdict(limited=True) is limited


@pytest.mark.parametrize(
  ('inner', 'code'),
  [
    ('\n```python\nif x:\n  print(1)\n```\n', 'if x:\n  print(1)'),
    ('```py\na\n```\ntext\n```python\nb\n```', 'b'),
    ('```python\nunclosed', 'unclosed'),
    ('\n  indented\nx', '  indented\nx'),
    ('', ''),
  ],
)
def test_code_comes_out_of_its_fence(inner, code):
  got = CODE.read(f'<code>{inner}</code>')
  assert got.calls == (ToolCall('code_interpreter', {'code': code}),)


def test_results_are_wrapped_as_their_tool():
  both = tags.syntax({**formats.SEARCH, **formats.CODE}, 'answer')
  (turn,) = both.results(
    [
      Message('tool', '4', name='code_interpreter'),
      Message('tool', 'doc', name='search'),
      Message('tool', 'doc'),
      Message('tool', ' bare ', name='notice'),
    ]
  )
  assert turn == (
    'user',
    '\n<interpreter>\n4</interpreter>\n\n'
    '\n\n<information>doc</information>\n\n'
    '\n\n<information>doc</information>\n\n bare ',
  )


def test_tags_that_cannot_be_told_apart_are_refused():
  with pytest.raises(ValueError, match="'search'.*answer 'search'"):
    tags.syntax(formats.SEARCH, 'search')
  with pytest.raises(ValueError, match='no tag: there are tags for'):
    SEARCH.write(Message('assistant', '', (ToolCall('f', {}),)))
  with pytest.raises(ValueError, match=r"alone, not \['q'\]"):
    SEARCH.write(Message('assistant', '', (ToolCall('search', {'q': 1}),)))


json_values = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats(allow_nan=False, allow_infinity=False)
  | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=5,
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.dictionaries(st.text(), json_values), max_size=3), st.data())
def test_written_calls_are_read_back(arguments, data):
  made = tuple(ToolCall('f', a) for a in arguments)
  if made:
    assert (
      calls.HERMES.read(
        calls.HERMES.write(Message('assistant', 'so', made))
      ).calls
      == made
    )
  for call in made:
    text = calls.LLAMA_JSON.write(Message('assistant', '', (call,)))
    assert calls.LLAMA_JSON.read(text).calls == (call,)
    cut = data.draw(st.integers(1, len(text) - 1))
    got = calls.LLAMA_JSON.read(text[:cut])
    assert got.verdict(limited=True) is Verdict.TRUNCATED
    assert got.verdict(limited=False) is Verdict.MALFORMED
