"""Draws: epochs, no repeats, resumed exactly, other tasks refused."""

import json

import pytest
from fakes import task

from agentjax import storage
from agentjax.curriculum import Curriculum

TASKS = [task(f't{i}') for i in range(10)]


def ids(drawn):
  return [t.id for t in drawn]


def test_each_epoch_holds_every_task_once_in_an_order_of_its_own():
  curriculum = Curriculum(TASKS, 0)
  epochs = [ids(curriculum.draw(5)) + ids(curriculum.draw(5)) for _ in range(3)]
  for epoch in epochs:
    assert sorted(epoch) == sorted(ids(TASKS))
  assert len({tuple(e) for e in epochs}) == 3
  assert curriculum.draws == 6 and curriculum.position == 30


def test_a_draw_over_the_end_of_an_epoch_repeats_nothing():
  curriculum = Curriculum(TASKS, 1)
  drawn = [ids(curriculum.draw(7)) for _ in range(30)]
  assert all(len(set(d)) == 7 for d in drawn)
  counts = [sum(d.count(i) for d in drawn) for i in ids(TASKS)]
  assert min(counts) > 15  # 21 on average: nobody is left out
  assert sorted(ids(curriculum.draw(10))) == sorted(ids(TASKS))


def test_another_seed_is_another_order():
  assert ids(Curriculum(TASKS, 0).draw(10)) != ids(
    Curriculum(TASKS, 1).draw(10)
  )
  assert ids(Curriculum(TASKS, 0).draw(10)) == ids(
    Curriculum(TASKS, 0).draw(10)
  )


@pytest.mark.parametrize('before', [0, 1, 2, 5])
def test_restored_it_goes_on_as_if_nothing_had_happened(before):
  whole = Curriculum(TASKS, 3)
  for _ in range(before):
    whole.draw(4)
  # As a checkpoint stores it.
  state = json.loads(json.dumps(whole.state()))
  again = Curriculum(TASKS, 3)
  again.restore(state)
  assert again.draws == before
  for _ in range(7):
    assert ids(again.draw(4)) == ids(whole.draw(4))
  assert again.state() == whole.state()


@pytest.mark.parametrize(
  ('tasks', 'seed'),
  [
    (TASKS, 4),
    (TASKS[:-1], 3),
    (TASKS[::-1], 3),
    ([*TASKS[:-1], task('t9', answer=1)], 3),
  ],
)
def test_other_tasks_or_another_seed_are_refused(tasks, seed):
  state = Curriculum(TASKS, 3).state()
  other = Curriculum(tasks, seed)
  with pytest.raises(storage.WorkdirMismatch, match='other tasks or another s'):
    other.restore(state)
  assert other.position == 0


def test_what_cannot_be_drawn_from_is_refused():
  with pytest.raises(ValueError, match='a draw of 11 from 10 tasks'):
    Curriculum(TASKS, 0).draw(11)
  with pytest.raises(ValueError, match='0 tasks'):
    Curriculum([], 0)
  with pytest.raises(ValueError, match=r"standing twice: \['t3'\]"):
    Curriculum([*TASKS, task('t3')], 0)
