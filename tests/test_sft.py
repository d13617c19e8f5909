"""Demonstrations as trajectories, and batches that resume in mid-epoch."""

import functools

import numpy as np
import pytest

from agentjax.env import arithmetic
from agentjax.env.demonstrate import demonstrate
from agentjax.rollout.episode import Act, Decode, Limits, Reset, episode
from agentjax.sft import ColdStart, batches, demonstrations, to_trajectory
from agentjax.text import formats
from agentjax.text.chat import Chat
from agentjax.text.train_vocab import arithmetic_model
from agentjax.text.vocab import load_sentencepiece
from agentjax.types import Source, Trajectory, Verdict

CHAT = Chat(load_sentencepiece(arithmetic_model()), formats.arithmetic)
TASKS = arithmetic.tasks('train', 7)
DEMONSTRATE = functools.partial(
  demonstrations,
  tasks=TASKS,
  make_environment=arithmetic.environment,
  expert=functools.partial(
    arithmetic.expert,
    flaws=0.5,
    kinds=('wrong_operand', 'answers_without_calling', 'malformed_expression'),
  ),
)


def decode(ids):
  return CHAT.vocab.decode(ids, keep_special=True)


@pytest.mark.parametrize('i', range(3))
def test_what_is_masked_in_is_what_the_expert_wrote(i):
  task = TASKS[i]
  shown = demonstrate(
    arithmetic.environment(),
    task,
    arithmetic.expert(np.random.default_rng(i), task),
  )
  assert len(shown.acts) == 3  # two calls and the answer
  trajectory = to_trajectory(CHAT, shown, sample=4)
  sources = ''.join(s.source.value[0] for s in trajectory.segments)
  assert sources == 'pmomom' and trajectory.sample == 4
  # Turn by turn, the masked-in ids are the assistant's text and no more.
  for turn, (act, _) in zip(trajectory.turns, shown.acts, strict=True):
    parsed = CHAT.parse_turn(turn.tokens, turn.stop)
    if act.calls:
      assert parsed.verdict is Verdict.CALLS and parsed.calls == act.calls
      expression = act.calls[0].arguments['expression']
      assert decode(turn.tokens) == f'<calc>{expression}</calc>'
    else:
      assert parsed.answer == act.answer == str(task.verify['answer'])
      assert decode(turn.tokens) == f'<answer>{act.answer}</answer>'
    assert not turn.stop.is_limit
  mask, tokens = trajectory.loss_mask(), trajectory.tokens()
  written = ''.join(decode(t.tokens) for t in trajectory.turns)
  assert decode(tokens[mask]) == written
  # Observations and prompt are masked out; their text is the environment's.
  for segment, (_, observations) in zip(
    [s for s in trajectory.segments if s.source is Source.OBSERVATION],
    shown.acts,
    strict=False,
  ):
    assert observations[0].body in decode(segment.tokens)
    assert '<result>' in decode(segment.tokens)
  assert not mask[: len(trajectory.segments[0])].any()
  assert trajectory.reward.success and trajectory.status is shown.status
  assert set(trajectory.per_token('versions')) == {-1}


def test_a_policy_would_have_been_shown_the_same_tokens():
  """The ids are those of an episode in which a policy writes these turns."""
  shown = DEMONSTRATE(4, 0)[1]
  trajectory = to_trajectory(CHAT, shown)
  turns, environment = list(trajectory.turns), arithmetic.environment()
  loop = episode(CHAT, Limits(), Trajectory(shown.task))
  request = next(loop)
  try:
    while True:
      if isinstance(request, Reset):
        request = loop.send(environment.reset(request.task))
      elif isinstance(request, Decode):
        request = loop.send(turns.pop(0))
      elif isinstance(request, Act):
        request = loop.send(environment.step(request.turn))
  except StopIteration as stop:
    played = stop.value
  np.testing.assert_array_equal(played.tokens(), trajectory.tokens())
  np.testing.assert_array_equal(played.loss_mask(), trajectory.loss_mask())


def test_demonstrations_go_round_the_tasks_and_are_the_same_each_time():
  first, again = DEMONSTRATE(10, 3), DEMONSTRATE(10, 3)
  assert [d.task.id for d in first] == [TASKS[i % 7].id for i in range(10)]
  assert [d.acts for d in first] == [d.acts for d in again]
  assert [d.acts for d in first] != [d.acts for d in DEMONSTRATE(10, 4)]
  # Half of them are flawed, and they still are demonstrations.
  assert 0 < sum(d.reward.success for d in DEMONSTRATE(20, 0)) < 20


COLD = ColdStart(DEMONSTRATE, steps=9, demonstrations=11, per_step=3)


def taken(start=0, options=COLD, seed=0):
  return list(
    batches(options, CHAT, seed=seed, rows=2, length=112, start=start)
  )


@pytest.mark.parametrize('start', [1, 3, 4, 8, 9])
def test_batches_resume_in_the_middle_of_an_epoch(start):
  whole, rest = taken(), taken(start)
  assert len(whole) == 9 and len(rest) == 9 - start
  for a, b in zip(whole[start:], rest, strict=True):
    for x, y in zip(a, b, strict=True):
      np.testing.assert_array_equal(x, y)


def test_an_epoch_repeats_no_demonstration():
  def contents(batch):
    """The trajectories of a batch as the ids that stand in it."""
    return [
      tuple(row[packed == p])
      for row, packed in zip(batch.tokens, batch.pack_ids, strict=True)
      for p in range(1, packed.max() + 1)
    ]

  made = {tuple(to_trajectory(CHAT, d).tokens()) for d in DEMONSTRATE(7, 0)}
  assert len(made) == 7  # one of each task
  given = taken(options=ColdStart(DEMONSTRATE, 9, 7, 2))
  epochs = [sum(map(contents, given[i : i + 3]), []) for i in (0, 3, 6)]
  for epoch in epochs:
    assert len(epoch) == len(set(epoch)) == 6 and set(epoch) <= made
  assert len({tuple(e) for e in epochs}) == 3
  assert not np.array_equal(taken()[0].tokens, taken(seed=1)[0].tokens)


def test_the_loss_is_on_the_experts_tokens_alone():
  for batch in taken():
    rows = decode(batch.tokens[batch.weights > 0])
    assert '<result>' not in rows and '=' not in rows
    assert rows.count('</answer>') == 3


@pytest.mark.parametrize(
  'changes',
  [{'steps': -1}, {'per_step': 0}, {'per_step': 12}, {'demonstrations': 0}],
)
def test_wrong_options_are_refused(changes):
  options = {'steps': 9, 'demonstrations': 11, 'per_step': 3} | changes
  with pytest.raises(ValueError, match='demonstrations each: steps at least 0'):
    ColdStart(DEMONSTRATE, **options)
