"""Records that stand once, whole, and hold what any policy may write."""

import dataclasses
import importlib.util
import math
import os
import struct
import subprocess

import numpy as np
import pytest

from agentjax import events, recorder, records, storage, types

HOSTILE = 'a\u2028b\x85c\rd\ne\x00f\ud800g</script>\u202eh'


def trajectory(sample=0, task_id='t', tokens=(5, 6), **changes):
  n = len(tokens)
  task = types.Task(task_id, (types.Message('user', 'hi'),), {'answer': 3})
  return types.Trajectory(
    task,
    (
      types.Segment(types.Source.PROMPT, [1, 2, 3]),
      types.Segment(
        types.Source.MODEL,
        list(tokens),
        logprobs=-np.arange(1, n + 1),
        logprobs_full=-np.arange(1, n + 1) - 0.5,
        log_kept_mass=np.full(n, -0.5),
        versions=np.full(n, 7),
        stop=types.Stop.END_OF_TURN,
      ),
      types.Segment(types.Source.OBSERVATION, [9]),
    ),
    status=types.Status.DONE,
    reward=types.Reward(0.5, True, {'answer': 0.5}),
    turn_rewards=(0.25,),
    state_keys=('s',),
    draw=4,
    sample=sample,
    **changes,
  )


def group(*members):
  return types.Group(members[0].task, members[0].draw, members)


def same(a, b):
  ra, aa = records.trajectory_to_record(a)
  rb, ab = records.trajectory_to_record(b)
  assert ra == rb
  for name in aa:
    np.testing.assert_array_equal(aa[name], ab[name])
    assert aa[name].dtype == ab[name].dtype


def test_metrics_come_back_in_the_order_of_steps(tmp_path):
  r = recorder.Recorder(tmp_path)
  r.metrics(10, {'reward': np.float32(0.5), 'kl': math.nan})
  r.metrics(2, {'reward': 1, 'kl': -math.inf})
  assert sorted(os.listdir(tmp_path / 'metrics')) == [
    'step_00000002.jsonl',
    'step_00000010.jsonl',
  ]
  two, ten = recorder.read_metrics(tmp_path)
  assert two == {'schema': 1, 'step': 2, 'reward': 1, 'kl': -math.inf}
  assert ten['step'] == 10 and ten['reward'] == 0.5 and math.isnan(ten['kl'])
  line = (tmp_path / 'metrics/step_00000010.jsonl').read_text()
  assert line == (
    '{"schema": 1, "step": 10, "reward": 0.5, "kl": {"$float": "nan"}}\n'
  )


def test_a_step_that_is_written_again_stands_once(tmp_path):
  r = recorder.Recorder(tmp_path)
  r.metrics(1, {'x': 1})
  r.metrics(1, {'x': 2})
  r.evaluation(1, [{'name': 'a', 'success': 0.5}, {'name': 'b'}])
  r.evaluation(1, [{'name': 'a', 'success': 0.75}])
  assert [m['x'] for m in recorder.read_metrics(tmp_path)] == [2]
  (row,) = recorder.read_evaluations(tmp_path)
  assert row == {'schema': 1, 'step': 1, 'name': 'a', 'success': 0.75}


def test_names_of_the_record_are_refused(tmp_path):
  r = recorder.Recorder(tmp_path)
  with pytest.raises(ValueError, match=r"\['step'\] are names of the record"):
    r.metrics(1, {'step': 3})
  with pytest.raises(ValueError, match='step -1 is negative'):
    r.metrics(-1, {})
  assert recorder.read_metrics(tmp_path) == []


def test_trajectories_come_back_the_same(tmp_path):
  r = recorder.Recorder(tmp_path)
  groups = [
    group(trajectory(0), trajectory(1, tokens=(8,))),
    group(trajectory(0, 'u', tokens=())),
  ]
  advantages = {
    '4/t/0/0': np.array([0, 0, 0, 1.5, -2, 0]),
    '4/u/0/0': np.zeros(4),
  }
  r.trajectories(12, groups, advantages)
  back, given = recorder.read_trajectories(tmp_path, 12)
  assert [len(g.trajectories) for g in back] == [2, 1]
  assert [g.task.id for g in back] == ['t', 'u'] and back[0].draw == 4
  for before, after in zip(groups, back, strict=True):
    for a, b in zip(before.trajectories, after.trajectories, strict=True):
      same(a, b)
  assert sorted(given) == ['4/t/0/0', '4/u/0/0']  # the third one got none
  assert given['4/t/0/0'].tolist() == [0, 0, 0, 1.5, -2, 0]
  assert recorder.trajectory_steps(tmp_path) == [12]


def test_kept_ids_come_back_beside_trajectories_without(tmp_path):
  def kept(t, ids):
    prompt, turn, *rest = t.segments
    turn = dataclasses.replace(turn, kept=ids)
    return dataclasses.replace(t, segments=(prompt, turn, *rest))

  wide, narrow = [[5, 1, 2], [6, -1, -1]], [[8]]
  groups = [
    group(
      trajectory(0),
      kept(trajectory(1), wide),
      kept(trajectory(2, tokens=(8,)), narrow),
      kept(trajectory(3, tokens=()), np.zeros((0, 2))),
    )
  ]
  recorder.Recorder(tmp_path).trajectories(3, groups)
  (back,), _ = recorder.read_trajectories(tmp_path, 3)
  turns = [t.turns[0].kept for t in back.trajectories]
  assert turns[0] is None
  np.testing.assert_array_equal(turns[1], wide)
  np.testing.assert_array_equal(turns[2], narrow)
  assert turns[3].shape == (0, 2)
  for a, b in zip(groups[0].trajectories, back.trajectories, strict=True):
    same(a, b)
  # Records of before say nothing of it.
  record, arrays = records.trajectory_to_record(trajectory())
  assert 'kept' not in arrays
  for segment in record['segments']:
    del segment['kept']
  same(records.trajectory_from_record(record, arrays), trajectory())


def test_an_empty_step_is_a_record_too(tmp_path):
  recorder.Recorder(tmp_path).trajectories(0, [])
  assert recorder.read_trajectories(tmp_path, 0) == ([], {})


def test_advantages_belong_to_their_trajectory(tmp_path):
  r = recorder.Recorder(tmp_path)
  with pytest.raises(ValueError, match=r'shape \(2,\), the trajectory has 6'):
    r.trajectories(0, [group(trajectory())], {'4/t/0/0': np.zeros(2)})
  with pytest.raises(ValueError, match=r"for \['4/x/0/0'\], which are no"):
    r.trajectories(0, [group(trajectory())], {'4/x/0/0': np.zeros(6)})
  assert recorder.trajectory_steps(tmp_path) == []


def test_no_text_of_a_policy_breaks_a_record(tmp_path):
  one = trajectory(
    0, error=HOSTILE, info={'said': HOSTILE, HOSTILE: [math.nan]}
  )
  texts = {3: HOSTILE, 2: HOSTILE * 2, 1: ''}
  r = recorder.Recorder(tmp_path, decode=lambda ids: texts[len(ids)])
  r.trajectories(1, [group(one)])
  ((back,),) = [
    g.trajectories for g in recorder.read_trajectories(tmp_path, 1)[0]
  ]
  assert back.error == HOSTILE and back.info['said'] == HOSTILE
  assert math.isnan(back.info[HOSTILE][0])
  raw = (tmp_path / 'trajectories/step_00000001.jsonl').read_text('utf-8')
  assert len(raw.splitlines()) == 1
  texts = [s['text'] for s in storage.parse_json(raw)['segments']]
  assert texts == [HOSTILE, HOSTILE * 2, '']


def test_forget_after_leaves_each_step_once(tmp_path):
  r = recorder.Recorder(tmp_path)
  for step in (0, 1, 2, 3):
    r.metrics(step, {'x': step})
    r.evaluation(step, [{'success': 0.5}])
    r.trajectories(step, [group(trajectory())])
  gone = recorder.Recorder(tmp_path).forget_after(1)
  assert len(gone) == 6 and 'metrics/step_00000002.jsonl' in gone
  assert [m['step'] for m in recorder.read_metrics(tmp_path)] == [0, 1]
  assert [m['step'] for m in recorder.read_evaluations(tmp_path)] == [0, 1]
  assert recorder.trajectory_steps(tmp_path) == [0, 1]
  assert len(os.listdir(tmp_path / 'trajectories')) == 4
  r.metrics(2, {'x': 20})
  assert [m['x'] for m in recorder.read_metrics(tmp_path)] == [0, 1, 20]


def test_steps_that_were_not_recorded_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='none were recorded'):
    recorder.read_trajectories(tmp_path, 3)
  r = recorder.Recorder(tmp_path)
  for step in (0, 1, 2, 5):
    r.trajectories(step, [])
  with pytest.raises(FileNotFoundError, match='recorded are 0-2, 5'):
    recorder.read_trajectories(tmp_path, 3)


def test_another_schema_is_refused(tmp_path):
  path = tmp_path / 'metrics/step_00000000.jsonl'
  storage.write_jsonl(path, [{'schema': 99, 'step': 0}])
  with pytest.raises(ValueError, match='schema version 99, this code reads 1'):
    recorder.read_metrics(tmp_path)


@pytest.mark.parametrize(
  ('name', 'text', 'said'),
  [
    ('metrics', '{"schema": 1, "st', 'line 1 is not JSON'),
    ('metrics', '', '0 lines, not one'),
    ('metrics', '[1]\n', 'line 1 is no JSON object'),
    ('metrics', '{"schema": 1}\n', 'line 1 says no step'),
    ('evaluations', '3\n', 'line 1 is no JSON object'),
    ('trajectories', '{"schema": 1, "step": 2}\n', 'line 1 and its .npz file'),
    ('trajectories', '[]\n', 'line 1 is no JSON object'),
    ('trajectories', '{"schema": 9, "step": 2}\n', 'schema version 9, this'),
  ],
)
def test_a_damaged_record_is_named_with_the_remedy(tmp_path, name, text, said):
  r = recorder.Recorder(tmp_path)
  r.metrics(2, {'x': 1})
  r.evaluation(2, [{'x': 1}])
  r.trajectories(2, [group(trajectory())])
  path = tmp_path / name / 'step_00000002.jsonl'
  path.write_text(text)
  read = {
    'metrics': recorder.read_metrics,
    'evaluations': recorder.read_evaluations,
    'trajectories': lambda w: recorder.read_trajectories(w, 2),
  }[name]
  with pytest.raises(storage.Unreadable) as error:
    read(tmp_path)
  assert str(error.value).startswith(f'{path}: ') and said in str(error.value)
  assert 'it' in str(error.value).split(': ')[-1]  # the remedy


def test_damaged_arrays_of_a_record_are_named(tmp_path):
  r = recorder.Recorder(tmp_path)
  r.trajectories(2, [group(trajectory())])
  path = tmp_path / 'trajectories/step_00000002.npz'
  whole = path.read_bytes()
  path.write_bytes(whole[: len(whole) // 2])
  with pytest.raises(storage.Unreadable, match='2.npz: not an npz file'):
    recorder.read_trajectories(tmp_path, 2)
  arrays = {'tokens': np.arange(3)}
  storage.write_npz(path, arrays)
  with pytest.raises(storage.Unreadable, match='2.jsonl: line 1 and its .npz'):
    recorder.read_trajectories(tmp_path, 2)
  path.unlink()
  with pytest.raises(storage.Unreadable, match='the .npz file beside it is mi'):
    recorder.read_trajectories(tmp_path, 2)


@pytest.mark.parametrize('text', ['["a', '{}', '[1]'])
def test_a_damaged_vocabulary_is_named(tmp_path, text):
  (tmp_path / 'vocabulary.json').write_text(text)
  with pytest.raises(storage.Unreadable, match='vocabulary.json: not '):
    recorder.read_vocabulary(tmp_path)


def test_what_was_made_of_forgotten_records_goes_too(tmp_path):
  made = ('summary.json', 'learning_curve.png', 'pages/step_00000003/a.html',
          'pages/step_00000002/a.html')  # fmt: skip
  r = recorder.Recorder(tmp_path)
  for step in (1, 2, 3):
    r.metrics(step, {'x': 1})
  for name in made:
    storage.write_text(tmp_path / name, '')
  assert r.forget_after(3) == []
  assert all((tmp_path / name).exists() for name in made)
  assert r.forget_after(2) == ['metrics/step_00000003.jsonl']
  assert [(tmp_path / n).exists() for n in made] == [False] * 3 + [True]
  assert not (tmp_path / 'pages/step_00000003').exists()
  assert recorder.recorded_steps(tmp_path) == [1, 2]


def test_hosts_of_a_pod_do_not_write_over_each_other(tmp_path):
  for process in (0, 1):
    r = recorder.Recorder(tmp_path, process=process)
    r.metrics(0, {'process': process})
    r.evaluation(0, [{'process': process}])
    r.vocabulary([str(process)])
    r.trajectories(0, [group(trajectory(process))], {})
  assert [m['process'] for m in recorder.read_metrics(tmp_path)] == [0]
  assert [m['process'] for m in recorder.read_evaluations(tmp_path)] == [0]
  assert recorder.read_vocabulary(tmp_path) == ['0']
  groups, _ = recorder.read_trajectories(tmp_path, 0)
  assert [g.trajectories[0].sample for g in groups] == [0, 1]
  recorder.Recorder(tmp_path, process=1).forget_after(-1)
  groups, _ = recorder.read_trajectories(tmp_path, 0)
  assert [g.trajectories[0].sample for g in groups] == [0]


def test_vocabulary_holds_any_piece(tmp_path):
  assert recorder.read_vocabulary(tmp_path) is None
  recorder.Recorder(tmp_path).vocabulary(['a', '\u2028', '\ud800', '<0x0A>'])
  assert recorder.read_vocabulary(tmp_path) == [
    'a',
    '\u2028',
    '\ud800',
    '<0x0A>',
  ]


def test_full_disk_leaves_no_half_record(tmp_path):
  mount = ['mount', '-t', 'tmpfs', '-o', 'size=48k', 'tmpfs', str(tmp_path)]
  try:
    done = subprocess.run(mount, capture_output=True, text=True)
  except FileNotFoundError:
    pytest.skip('there is no mount command here')
  if done.returncode:
    pytest.skip(f'may not mount a tmpfs: {done.stderr.strip()}')
  try:
    r = recorder.Recorder(tmp_path)
    r.trajectories(0, [group(trajectory())])
    r.metrics(0, {'x': 1})
    # The arrays still fit, the lines do not: the pair is cut in its middle.
    big = trajectory(info={'log': 'x' * 100_000})
    with pytest.raises(storage.StorageFull, match='step_00000001.jsonl'):
      r.trajectories(1, [group(big)])
    assert recorder.trajectory_steps(tmp_path) == [0]
    same(
      recorder.read_trajectories(tmp_path, 0)[0][0].trajectories[0],
      trajectory(),
    )
    assert recorder.read_metrics(tmp_path)[0]['x'] == 1
  finally:
    subprocess.run(['umount', '-l', str(tmp_path)], check=True)


def test_a_killed_writer_s_leftovers_are_swept(tmp_path):
  left = tmp_path / 'metrics' / '.step_00000003.jsonl.tmp-77-00c0ffee'
  storage.write_text(left, '{"schema": 1, "st')
  assert recorder.read_metrics(tmp_path) == []
  recorder.Recorder(tmp_path)
  assert os.listdir(tmp_path / 'metrics') == []


def scalars(workdir):
  """Reads event files back: (step, name, value), frames checked by length."""
  from tensorboardX.proto import event_pb2

  found = []
  for name in storage.names(workdir / 'events'):
    data = storage.read_bytes(workdir / 'events' / name)
    while data:
      (length,) = struct.unpack('<Q', data[:8])
      event = event_pb2.Event.FromString(data[12 : 12 + length])
      data = data[16 + length :]
      for value in event.summary.value:
        found.append((event.step, value.tag, value.simple_value))
  return found


needs_tensorboard = pytest.mark.skipif(
  importlib.util.find_spec('tensorboardX') is None,
  reason='tensorboardX is not installed',
)


@needs_tensorboard
def test_events_follow_the_metrics_and_stand_once(tmp_path):
  r = recorder.Recorder(tmp_path)
  for step in (0, 1, 2):
    r.metrics(step, {'loss': step + 0.5, 'name': 'text', 'big': 1e300})
  assert scalars(tmp_path) == [
    (s, n, v)
    for s in (0, 1, 2)
    for n, v in (('loss', s + 0.5), ('big', math.inf))
  ]
  os.remove(tmp_path / 'events/step_00000000.tfevents.agentjax')
  recorder.Recorder(tmp_path).forget_after(1)
  assert [s for s, n, _ in scalars(tmp_path) if n == 'loss'] == [0, 1]


@needs_tensorboard
def test_event_checksums_are_those_of_the_format(tmp_path):
  # 0x8a9136aa is the CRC-32C of 32 zero bytes (RFC 3720, B.4); that of no
  # bytes is 0, whose mask is the constant of TFRecord.
  from tensorboardX.crc32c import crc32c

  assert crc32c(bytes(32)) == 0x8A9136AA
  frame = events._frame(b'')
  assert frame[:8] == bytes(8) and frame[12:] == struct.pack('<I', 0xA282EAD8)
