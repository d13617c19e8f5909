"""Streams of tasks: interrupted anywhere, they go on exactly."""

import json

import pytest

from agentjax import storage
from agentjax.datasets import Stream
from agentjax.env import prepared
from agentjax.types import Message, Task

TASKS = [Task(f't{i}', (Message('user', str(i)),)) for i in range(11)]


def stream(seed=0, **options):
  return Stream(TASKS, seed, **{'fingerprint': 'eleven'} | options)


def ids(tasks):
  return [t.id for t in tasks]


def test_an_epoch_has_each_task_once_and_the_next_another_order():
  s = stream()
  epochs = [ids(s.draw(11)) for _ in range(3)]
  assert all(sorted(e) == sorted(t.id for t in TASKS) for e in epochs)
  assert len({tuple(e) for e in epochs}) == 3
  assert ids(stream().draw(11)) == epochs[0]
  assert ids(stream(seed=1).draw(11)) != epochs[0]


@pytest.mark.parametrize('before', range(8))
def test_interrupted_is_uninterrupted(before):
  """Before the first draw, in an epoch, at its end and over it."""
  whole = stream()
  wanted = [ids(whole.draw(4)) for _ in range(10)]
  first = stream()
  for _ in range(before):
    first.draw(4)
  state = json.loads(json.dumps(first.state()))
  second = stream()
  second.draw(3)  # whatever it did before
  second.restore(state)
  assert [ids(second.draw(4)) for _ in range(10 - before)] == wanted[before:]
  assert second.draws == whole.draws and second.state() == whole.state()
  # A state that was taken is not moved on by further draws.
  again = stream()
  again.restore(state)
  assert [ids(again.draw(4)) for _ in range(10 - before)] == wanted[before:]


def test_a_draw_over_the_end_of_an_epoch_has_no_task_twice():
  s = stream()
  for _ in range(20):
    drawn = ids(s.draw(9))
    assert len(set(drawn)) == 9


def test_shards_share_out_an_epoch():
  parts = [stream(shard=i, shards=3) for i in range(3)]
  drawn = [ids(p.draw(n)) for p, n in zip(parts, (4, 4, 3), strict=True)]
  assert sorted(sum(drawn, [])) == sorted(t.id for t in TASKS)
  with pytest.raises(ValueError, match='draw fewer'):
    parts[2].draw(4)


@pytest.mark.parametrize(
  'other',
  [
    {'fingerprint': 'others'}, {'seed': 1}, {'shards': 2},
    {'shard': 1, 'shards': 2},
  ],
)  # fmt: skip
def test_a_state_of_another_stream_is_refused(other):
  state = stream().state()
  with pytest.raises(storage.WorkdirMismatch, match='other tasks'):
    stream(**other).restore(state)


def test_bad_arguments_are_refused():
  for options in ({'shard': 2, 'shards': 2}, {'shards': 12}):
    with pytest.raises(ValueError, match='shard'):
      stream(**options)
  with pytest.raises(ValueError, match='fingerprint'):
    Stream(TASKS, 0)
  with pytest.raises(ValueError, match='draw fewer'):
    stream().draw(12)


def test_a_stream_over_prepared_tasks(tmp_path):
  path = tmp_path / 'a.txt'
  path.write_text('eleven')
  source = prepared.prepare(
    lambda: TASKS, tmp_path, name='eleven', files=[path], how=''
  )
  s = Stream(source, 0)
  assert ids(s.draw(11)) == ids(stream().draw(11))
  assert s.state()['of'][0] == source.fingerprint
