"""The runner of recorded vectors, and the vectors that the repository has."""

import json
import pathlib
import subprocess
import sys

import pytest
import vector_maps
import vectors

TESTS = pathlib.Path(__file__).resolve().parent
KEPT = TESTS / 'vectors'


def test_every_kept_vector_passes():
  assert vectors.run(KEPT) == (137, [], [])


def test_command_line():
  done = subprocess.run(
    [sys.executable, TESTS / 'vectors.py', '--dir', KEPT],
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert (done.returncode, done.stdout) == (0, '137 passed, 0 failed\n')


SECTIONS = [
  (path.name, section)
  for path in sorted(KEPT.glob('*.json'))
  for section in json.loads(path.read_text('utf-8'))
]


@pytest.mark.parametrize(('name', 'section'), SECTIONS)
def test_a_vector_with_another_output_fails(tmp_path, name, section):
  cases = json.loads((KEPT / name).read_text('utf-8'))[section]
  outputs = {
    'normalize': 'output', 'em_check': 'subem', 'passages2string': 'out',
    'truncate_response': 'truncated', 'parse_action': 'content',
    'info_mask': 'loss_mask', 'reward': 'score', 'overlong': 'reward',
    'code_rewrite': 'sent_to_sandbox', 'dynamic_sampling': 'kept_traj_idxs',
    'math_answer': 'strict_box',
  }  # fmt: skip
  for case in cases:
    case[outputs[section]] = 'something else'
  (tmp_path / name).write_text(json.dumps({section: cases}))
  passed, failed, _ = vectors.run(tmp_path)
  assert (passed, len(failed)) == (0, len(cases))


@pytest.mark.parametrize(
  ('name', 'text'),
  [
    ('search_r1.json', '{"normalize": [{"input": "a"}]}'),  # no output
    ('search_r1.json', '{"unheard_of": [{"input": "a"}]}'),
    ('search_r1.json', '{"normalize": {"input": "a", "output": ""}}'),
    ('search_r1.json', '[1'),
    ('search_r1.json', '[]'),
    ('unheard_of.json', '{"normalize": [{"input": "a", "output": ""}]}'),
    ('search_r1.json', '{}'),
    ('notes.txt', ''),
    ('webrl.json', '{}'),
  ],
)
def test_what_cannot_be_read_fails(tmp_path, name, text):
  (tmp_path / name).write_text(text)
  passed, failed, _ = vectors.run(tmp_path)
  assert passed == 0 and len(failed) == 1


def test_other_files_of_a_system_are_read_by_its_name(tmp_path):
  (tmp_path / 'dapo_more.json').write_text(
    '{"math_answer": [{"solution": "Answer: 1", "gt": "1", "minerva": {"score":'
    ' 1, "acc": true, "pred": "1"}, "strict_box": {"score": -1, "acc": false,'
    ' "pred": null}}]}'
  )
  assert vectors.run(tmp_path) == (1, [], [])


@pytest.mark.parametrize(
  ('got', 'want', 'same'),
  [
    (1.0, 1, True), (-0.05, -0.05000000074505806, True), (0.1, 0.1001, False),
    (True, 1, False), (1, True, False), (True, True, True), ('1', 1, False),
    ([1, [2.0]], [1, [2]], True), ([1], [1, 2], False), (None, '', False),
  ],
)  # fmt: skip
def test_what_counts_as_the_same(got, want, same):
  assert vector_maps.same(got, want) is same


def test_passages_in_every_form_of_the_released_code():
  plain = {'docs': ['"A"\nb'], 'out': 'Doc 1(Title: "A") b\n'}
  wrapped = [{'document': {'id': 1, 'contents': '"A"\nb\nc'}, 'score': 2.0}]
  found = {'docs': wrapped, 'out': 'Doc 1(Title: "A") b\nc\n'}
  sections = vectors.maps()['search_r1']
  assert sections['passages2string'](plain) == ''
  assert sections['passages2string'](found) == ''
