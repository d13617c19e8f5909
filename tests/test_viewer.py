"""Pages show every token as it is, and hostile text as text."""

import html.parser
import os

import numpy as np
import pytest

from agentjax import recorder, types, viewer

S = types.Source
INJECTIONS = [
  '<script>alert(1)</script>',
  '</pre></section><img src=x onerror=alert(1)>',
  '" onmouseover="alert(1)',
  "' onfocus='alert(1)",
  '<!-- ',
  ']]>',
  '&lt;b&gt;',
  '</style><style>*{display:none}',
  '\x00\ud800\u202e\u2028\r\n\t\x1b[31m',
  '</title><base href=//x>',
]


class Page(html.parser.HTMLParser):
  """Tags with their attributes, and the text under each token."""

  def __init__(self, document):
    super().__init__(convert_charrefs=True)
    self.tags, self.tokens, self.text, self._in_token = [], [], '', False
    self.feed(document)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag == 'i':
      self._in_token = True
      self.tokens.append((dict(attrs), ''))

  def handle_endtag(self, tag):
    if tag == 'i':
      self._in_token = False

  def handle_data(self, data):
    self.text += data
    if self._in_token:
      attrs, text = self.tokens[-1]
      self.tokens[-1] = (attrs, text + data)


def trajectory(**changes):
  task = types.Task('calc', (types.Message('user', 'q'),), {'answer': 2})
  model = types.Segment(
    S.MODEL,
    [21, 22],
    logprobs=[-0.25, -1.5],
    logprobs_full=[-0.5, -1.75],
    log_kept_mass=[-0.25, -0.25],
    versions=[7, 8],
    stop=types.Stop.STOP_STRING,
  )
  fields = {
    'task': task,
    'segments': (
      types.Segment(S.PROMPT, [11, 12]),
      types.Segment(S.FORCED, [13]),
      model,
      types.Segment(S.OBSERVATION, [31]),
    ),
    'status': types.Status.TURN_LIMIT,
    'reward': types.Reward(-0.5, False, {'format': 0.125}),
    'turn_rewards': (0.75,),
    'state_keys': (None,),
    'draw': 3,
  }
  return types.Trajectory(**{**fields, **changes})


def test_every_token_has_its_source_and_numbers():
  pieces = ['How', ' many', 'So ', 'two', '.', '\nok']
  shown = Page(
    viewer.page(trajectory(), pieces, np.array([9, 9, 9, 0.5, -0.25, 9]))
  )
  assert [t for _, t in shown.tokens] == [
    'How', ' many', 'So ', 'two', '.', '↵\nok',
  ]  # fmt: skip
  assert [a['class'] for a, _ in shown.tokens] == [
    'prompt', 'prompt', 'forced', 'model up', 'model down', 'observation',
  ]  # fmt: skip
  tips = [a['data-t'].split('\n')[1] for a, _ in shown.tokens]
  assert tips == [
    'position 0 · id 11 · prompt',
    'position 1 · id 12 · prompt',
    'position 2 · id 13 · forced',
    'position 3 · id 21 · model · log-prob −0.2500 · policy version 7 · '
    'advantage 0.5000',
    'position 4 · id 22 · model · log-prob −1.5000 · policy version 8 · '
    'advantage −0.2500',
    'position 5 · id 31 · observation',
  ]


def test_the_header_says_how_it_ended():
  text = Page(viewer.page(trajectory(), None)).text
  for words in (
    '3/calc/0/0',
    'turn_limit',
    '−0.500 no success',
    'format 0.125',
    '6, of which 2 by the model',
    'stopped by stop_string · policy version 7 and 8 · turn reward 0.750',
  ):
    assert words in text
  assert 'none' in Page(viewer.page(trajectory(reward=None), None)).text


def test_ids_stand_where_no_text_is_known():
  shown = Page(viewer.page(trajectory(), None))
  assert [t for _, t in shown.tokens][:2] == ['⟨11⟩', '⟨12⟩']


@pytest.mark.parametrize('evil', INJECTIONS)
def test_text_of_a_policy_is_never_markup(evil):
  plain = Page(viewer.page(_with_text('x'), ['x'] * 6))
  document = viewer.page(_with_text(evil), [evil] * 6)
  shown = Page(document)
  tags = [t for t in shown.tags if t != ('span', {'class': 'dim'})]  # newlines
  assert [t for t, _ in tags] == [t for t, _ in plain.tags]
  for (_, got), (_, expected) in zip(tags, plain.tags, strict=True):
    assert set(got) == set(expected)  # no attribute was added
  assert len(shown.tokens) == 6
  document.encode('utf-8')  # no lone surrogate is left
  assert not set(document) & set('\x00\x1b\u202e\u2028\r')
  assert "default-src 'none'" in document and '<script' not in document


def _with_text(text):
  return trajectory(
    task=types.Task(text, (types.Message('user', text),), {'a': text}),
    error=text,
    info={text: text},
    parent_id=text,
    reward=types.Reward(1, True, {text: 1.0}),
  )


def test_what_is_not_seen_is_shown_as_escapes():
  pieces = ['a\x00', '\u202eb', '\ud800', '', ' ', '\u200b']
  shown = Page(viewer.page(trajectory(), pieces))
  assert [t for _, t in shown.tokens] == [
    'a\\u0000', '\\u202eb', '\\ud800', '∅', ' ', '\\u200b',
  ]  # fmt: skip


def test_lengths_must_agree():
  with pytest.raises(ValueError, match='1 pieces for a trajectory of 6'):
    viewer.page(trajectory(), ['x'])
  with pytest.raises(ValueError, match='7 advantages for a trajectory of 6'):
    viewer.page(trajectory(), None, np.zeros(7))


def test_command_line_writes_an_index_and_pages(tmp_path, capsys):
  r = recorder.Recorder(tmp_path)
  one, two = trajectory(), trajectory(sample=1)
  r.vocabulary([f'<{i}>' for i in range(22)])
  for step in (0, 4):
    r.trajectories(
      step, [types.Group(one.task, 3, (one, two))], {one.id: np.ones(6)}
    )
  assert viewer.main(['--workdir', str(tmp_path)]) == 0
  index = tmp_path / 'pages/step_00000004/index.html'
  assert capsys.readouterr().out == f'{index}\n'
  links = [a['href'] for t, a in Page(index.read_text()).tags if t == 'a']
  assert links == ['0000.html', '0001.html']
  pages = [Page((index.parent / name).read_text()) for name in links]
  assert [t for _, t in pages[0].tokens] == [
    '<11>', '<12>', '<13>', '<21>', '⟨22⟩', '⟨31⟩',
  ]  # fmt: skip
  assert 'advantage 1.0000' in pages[0].tokens[3][0]['data-t']
  assert 'advantage' not in pages[1].tokens[3][0]['data-t']
  out = str(tmp_path / 'out')
  argv = ['--workdir', str(tmp_path), '--step', '0', '--out', out]
  assert viewer.main(argv) == 0
  assert sorted(os.listdir(out)) == ['0000.html', '0001.html', 'index.html']


def test_command_line_names_what_is_missing(tmp_path, capsys):
  assert viewer.main(['--workdir', str(tmp_path)]) == 1
  err = capsys.readouterr().err
  assert f'no trajectories are recorded in {tmp_path}: name the wor' in err
  recorder.Recorder(tmp_path).trajectories(2, [])
  assert viewer.main(['--workdir', str(tmp_path), '--step', '9']) == 1
  assert 'recorded are 2' in capsys.readouterr().err


def test_command_line_refuses_where_no_page_can_be(tmp_path, capsys):
  recorder.Recorder(tmp_path).trajectories(2, [])
  (tmp_path / 'file').write_text('mine')
  for out in ('file', 'file/under'):
    argv = ['--workdir', str(tmp_path), '--out', str(tmp_path / out)]
    assert viewer.main(argv) == 2
    err = capsys.readouterr().err
    assert 'give another directory with --out' in err and err.count('\n') == 1
  assert (tmp_path / 'file').read_text() == 'mine'
  assert viewer.main(['--workdir', 'foo://a']) == 2
  assert 'name the workdir of a run' in capsys.readouterr().err
  assert viewer.main(['--workdir', str(tmp_path / 'file')]) in (1, 2)
  assert len(capsys.readouterr().err.splitlines()) == 1


def test_command_line_names_a_damaged_record(tmp_path, capsys):
  recorder.Recorder(tmp_path).trajectories(2, [])
  (tmp_path / 'vocabulary.json').write_text('[')
  assert viewer.main(['--workdir', str(tmp_path)]) == 1
  err = capsys.readouterr().err
  assert 'vocabulary.json: not JSON' in err and err.count('\n') == 1
