"""Loaders, on small invented files of the released forms."""

import functools
import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from agentjax.env import prepared, released
from agentjax.types import Message, Task


def jsonl(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(json.dumps(r) + '\n' for r in rows), 'utf-8')
  return path


def parquet(path, rows):
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  return path


def raw(i, text='who wrote it '):
  return {
    'id': f'train_{i}', 'question': f'{text}{i}', 'golden_answers': [f'a{i}'],
    'metadata': {},
  }  # fmt: skip


# ---- questions --------------------------------------------------------------


@pytest.mark.parametrize('write', [jsonl, parquet])
def test_raw_questions(tmp_path, write):
  suffix = '.jsonl' if write is jsonl else '.parquet'
  rows = [
    raw(0),
    {**raw(1), 'question': ' Who? ', 'golden_answers': ['x', 'y']},
  ]
  for row in rows:
    row['metadata'] = {'k': 1}
  path = write(tmp_path / f'train{suffix}', rows)
  to_task = functools.partial(
    released.question, dataset='nq', split='train', prompt='Q: {question}\n'
  )
  one, two = released.read_tasks(path, to_task)
  assert one == Task(
    'nq-train-train_0', (Message('user', 'Q: who wrote it 0?\n'),),
    {'answers': ['a0']}, {'dataset': 'nq', 'question': 'who wrote it 0?'},
  )  # fmt: skip
  assert two.messages[0].content == 'Q: Who?\n'
  assert two.verify == {'answers': ['x', 'y']}
  assert list(released.read_tasks(path, to_task, most=1)) == [one]


def processed(source, index, **changes):
  return {
    'data_source': source,
    'prompt': [{'role': 'user', 'content': f'Question: {source} {index}?\n'}],
    'ability': 'fact-reasoning',
    'reward_model': {'style': 'rule', 'ground_truth': {'target': ['a', 'b']}},
    'extra_info': {'split': 'train', 'index': index},
  } | changes  # fmt: skip


def test_processed_questions_of_one_index_are_two_groups(tmp_path):
  path = parquet(
    tmp_path / 'train.parquet', [processed('nq', 0), processed('hotpotqa', 0)]
  )
  tasks = list(released.read_tasks(path, released.processed_question))
  assert [t.id for t in tasks] == ['nq-train-0', 'hotpotqa-train-0']
  assert tasks[0].messages == (Message('user', 'Question: nq 0?\n'),)
  assert tasks[0].verify == {'answers': ['a', 'b']}


def test_ids_are_unique_over_all_sets(tmp_path):
  """With the ids that the files themselves give: the same in each of them."""
  ids = []
  for name in released.QUESTION_SETS:
    for split in ('train', 'dev'):
      path = jsonl(
        tmp_path / name / f'{split}.jsonl', [raw(i) for i in range(3)]
      )
      to_task = functools.partial(released.question, dataset=name, split=split)
      ids += [t.id for t in released.read_tasks(path, to_task)]
  assert len(set(ids)) == len(ids) == 7 * 2 * 3


def test_which_file_is_the_test_split(tmp_path):
  for name, splits in (('nq', ('train', 'test')), ('musique', ('train', 'dev')),
                       ('popqa', ('test',)), ('x', ('train',))):  # fmt: skip
    for split in splits:
      jsonl(tmp_path / name / f'{split}.jsonl', [raw(0)])
  found = {
    name: released.question_file(tmp_path, name, 'test')[1]
    for name in ('nq', 'musique', 'popqa', 'x')
  }
  assert found == {
    'nq': 'test',
    'musique': 'dev',
    'popqa': 'test',
    'x': 'train',
  }
  with pytest.raises(ValueError, match='bamboogle'):
    released.question_file(tmp_path, 'bamboogle', 'test')
  with pytest.raises(ValueError, match='popqa/train'):
    released.question_file(tmp_path, 'popqa', 'train')


@pytest.mark.parametrize(
  'row',
  [
    {'question': 'who?'}, {'golden_answers': ['a']},
    {'question': 'who?', 'golden_answers': []},
    {'question': 'who?', 'golden_answers': [3]},
    {'question': 3, 'golden_answers': ['a']},
  ],
)  # fmt: skip
def test_rows_of_another_form_are_named(tmp_path, row):
  path = jsonl(tmp_path / 'a.jsonl', [raw(0), row])
  to_task = functools.partial(released.question, dataset='nq', split='train')
  with pytest.raises(ValueError, match='row 1, is not of the form'):
    list(released.read_tasks(path, to_task))


def test_files_of_another_kind_are_refused(tmp_path):
  for name, text in (('a.csv', 'q,a\n'), ('a.jsonl', '{'), ('b.jsonl', '[]')):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match='a.csv|a.jsonl|b.jsonl'):
      list(released.read_rows(tmp_path / name))


# ---- mathematics ------------------------------------------------------------


@pytest.mark.parametrize(
  'row',
  [
    {'input': 'p', 'output': '33'}, {'Problem': 'p', 'Answer': 33, 'ID': 'x'},
    {'problem': 'p', 'answer': '33', 'url': 'u'},
  ],
)  # fmt: skip
def test_aime_in_each_of_its_forms(row):
  task = released.aime(row, 4, dataset='aime_2024', suffix='\nBox it.')
  assert task == Task(
    'aime_2024-test-4', (Message('user', 'p\nBox it.'),), {'answer': '33'},
    {'dataset': 'aime_2024'},
  )  # fmt: skip


@pytest.mark.parametrize(
  'row', [{'input': 'p'}, {'input': 'p', 'output': ' '}, {'a': 1}]
)
def test_aime_without_an_answer_is_refused(row):
  with pytest.raises(ValueError):
    released.aime(row, 0, dataset='aime_2024')


def dapo_row(index, problem, answer):
  return {
    'data_source': 'math_dapo',
    'prompt': [{'content': problem, 'role': 'user'}],
    'ability': 'MATH',
    'reward_model': {'ground_truth': answer, 'style': 'rule-lighteval/MATH_v2'},
    'extra_info': {'index': index},
  }


def test_dapo_math_without_its_repeats(tmp_path):
  rows = [
    dapo_row('u1', 'What is  1+1?', '2'), dapo_row('u2', 'And 2+2?', '4'),
    dapo_row('u3', 'What is 1+1?\n', '2'), dapo_row('u4', 'And 2+2?', '5'),
    dapo_row('u5', 'And 3+3?', '6'), dapo_row('u6', 'What is 1+1?', '2'),
  ]  # fmt: skip
  path = parquet(tmp_path / 'dapo.parquet', rows)
  found = released.Repeats()
  tasks = released.without_repeats(
    released.read_tasks(path, released.dapo_math), found
  )
  assert [t.id for t in tasks] == ['dapo_math-train-u1', 'dapo_math-train-u5']
  assert (found.repeated, found.contradicted) == (3, 1)
  assert tasks[0].verify == {'answer': '2'}


def test_retool_demonstrations(tmp_path):
  user = '*user question:*\nWhat is 6*7?'
  said = (
    '<code>\n```python\nprint(42)\n```\n</code><interpreter>42</interpreter>'
  )
  good = {'messages': [
    {'role': 'user', 'content': user},
    {'role': 'assistant', 'content': f'{said}<answer>\\boxed{{42}}</answer>'},
  ]}  # fmt: skip
  path = parquet(tmp_path / 'train.parquet', [good])
  (task,) = released.read_tasks(path, released.retool_demonstration)
  assert task.id == 'retool_sft-train-0'
  assert [m.role for m in task.messages] == [
    'user', 'assistant', 'tool', 'assistant',
  ]  # fmt: skip
  bad = {'messages': [{'role': 'user', 'content': user}]}
  path = parquet(tmp_path / 'bad.parquet', [good, bad])
  with pytest.raises(ValueError, match='row 1'):
    list(released.read_tasks(path, released.retool_demonstration))


# ---- prepared ---------------------------------------------------------------


def tasks_of(path):
  to_task = functools.partial(released.question, dataset='nq', split='train')
  return released.read_tasks(path, to_task)


def prepare(path, folder, how='1'):
  return prepared.prepare(
    lambda: tasks_of(path), folder, name='nq_train', files=[path], how=how
  )


def test_prepared_tasks_are_the_file_s_in_its_order(tmp_path):
  path = jsonl(tmp_path / 'a.jsonl', [raw(i, 'ü "é" ') for i in range(300)])
  got = prepare(path, tmp_path / 'data')
  assert list(got) == list(tasks_of(path)) and len(got) == 300
  assert got[299].messages[0].content.count('ü "é" 299?') == 1
  for index in (-1, 300):
    with pytest.raises(IndexError):
      got[index]


def test_other_files_are_prepared_anew_and_the_same_are_not(tmp_path):
  path = jsonl(tmp_path / 'a.jsonl', [raw(0), raw(1)])
  first = prepare(path, tmp_path / 'data')

  def never():
    raise AssertionError('prepared twice')

  again = prepared.prepare(
    never, tmp_path / 'data', name='nq_train', files=[path], how='1'
  )
  assert list(again) == list(first)
  assert again.fingerprint == first.fingerprint
  jsonl(path, [raw(0), raw(7)])
  changed = prepare(path, tmp_path / 'data')
  assert [t.id for t in changed] == ['nq-train-train_0', 'nq-train-train_7']
  assert prepare(path, tmp_path / 'data', how='2').fingerprint not in (
    first.fingerprint, changed.fingerprint,
  )  # fmt: skip


@pytest.mark.parametrize('rows', [[raw(0), raw(0)], []])
def test_tasks_that_are_none_or_not_unique_are_refused(tmp_path, rows):
  path = jsonl(tmp_path / 'a.jsonl', rows)
  with pytest.raises(ValueError, match='twice|no tasks'):
    prepare(path, tmp_path / 'data')


def test_no_tensorflow_and_no_jax_is_needed(tmp_path):
  path = jsonl(tmp_path / 'a.jsonl', [raw(0)])
  code = (
    'import sys, functools\n'
    'from agentjax.env import prepared, released\n'
    'make = lambda: released.read_tasks(\n'
    f'  {str(path)!r}, functools.partial(\n'
    '    released.question, dataset="nq", split="train"))\n'
    f'got = prepared.prepare(make, {str(tmp_path / "data")!r}, name="nq",\n'
    f'  files=[{str(path)!r}], how="")\n'
    'print(got[0].id, {"jax", "tensorflow"} & set(sys.modules))'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, timeout=120
  )
  assert done.stdout.strip().endswith('nq-train-train_0 set()'), done.stderr
