"""The search environment: turns of every kind, and who is paid for what."""

import pytest

from agentjax.env import search, search_r1
from agentjax.env.base import InfraError
from agentjax.env.demonstrate import Act, call, demonstrate
from agentjax.env.retrieval.passages import Passage
from agentjax.env.search import SearchEnvironment
from agentjax.sft import to_trajectory
from agentjax.text import formats
from agentjax.text.chat import Chat
from agentjax.text.train_vocab import arithmetic_model
from agentjax.text.vocab import load_sentencepiece
from agentjax.types import (
  Message,
  Source,
  Status,
  Stop,
  Task,
  ToolCall,
  Turn,
  Verdict,
)

TASK = Task('q', (Message('user', 'Capital of France?'),),
            {'answers': ['Paris']})  # fmt: skip
GOLD = Passage(
  '1', '"France"\nThe capital is <answer>Paris</answer>, they say.'
)


def retrieve(queries, topk):
  return [[GOLD][:topk] for _ in queries]


@pytest.fixture(scope='module')
def vocab():
  return load_sentencepiece(arithmetic_model())


@pytest.fixture(params=['search_r1', 'search_r1_released'])
def chat(request, vocab):
  return Chat(vocab, getattr(formats, request.param))


def read(chat, text, stop=Stop.STOP_STRING):
  return chat.parse_turn(chat.vocab.encode(text), stop)


def started(**options):
  env = SearchEnvironment(retrieve, **options)
  opening = env.reset(TASK)
  assert opening.messages == TASK.messages and opening.tools == (search.TOOL,)
  return env


def reward(env, step):
  return env.verify(step.status or Status.TURN_LIMIT)


def test_search_and_answer(chat):
  env = started()
  step = env.step(read(chat, '<think>hm</think><search> France </search>'))
  assert step.status is None
  (seen,) = step.observations
  assert seen.name == 'search' and 'Doc 1(Title: "France")' in seen.body
  step = env.step(read(chat, '<think>so</think><answer> Paris. </answer>'))
  assert (step.status, step.observations) == (Status.DONE, ())
  got = reward(env, step)
  assert (got.value, got.success) == (1.0, True)
  assert got.parts == {'answered': 1.0, 'searches': 1.0, 'invalid': 0.0}
  assert search_r1.own_format(env._said)
  env.close()


@pytest.mark.parametrize(
  'said',
  [
    '', 'Paris', 'I do not know', '</answer>', '</search>', '<answer>Paris',
    '<information>Paris</information>', '<search>a<search>b</search>',
  ],
)  # fmt: skip
def test_the_gold_answer_in_an_observation_earns_nothing(chat, said):
  """It came back with tags and all; the policy never answered."""
  env = started()
  env.step(read(chat, '<search>France</search>'))
  step = env.step(read(chat, said))
  assert step.status is None and step.observations[0].name == 'complaint'
  assert reward(env, step).value == 0.0
  for score in (search_r1.format_reward,):
    assert score(TASK, env._said).value == 0.0


def test_the_released_reward_pays_for_it(chat):
  env = started()
  env.step(read(chat, '<search>France</search>'))
  env.step(read(chat, 'nothing'))
  released = search_r1.answer_reward(
    TASK, env._said, extract=search_r1.released_answer
  )
  # The passage's tag and the complaint's: two, the last of which says 'and'.
  assert search_r1.released_answer(env._said) == 'and'
  assert released.value == 0.0
  env = started(complaint='Try <answer>Paris</answer>.')
  env.step(read(chat, 'nothing'))
  env.step(read(chat, 'nothing'))
  assert search_r1.answer_reward(
    TASK, env._said, extract=search_r1.released_answer
  ).value == 1.0  # fmt: skip


@pytest.mark.parametrize('said', ['<answer></answer>', '<answer> </answer>'])
def test_an_empty_answer_is_one_and_wrong(chat, said):
  env = started()
  step = env.step(read(chat, said))
  assert step.status is Status.DONE
  assert reward(env, step).value == 0.0
  assert reward(env, step).parts['answered'] == 1.0


def test_searches_are_bounded(chat):
  asked = []

  def counted(queries, topk):
    asked.append((tuple(queries), topk))
    return retrieve(queries, topk)

  env = SearchEnvironment(counted, max_searches=2, topk=1)
  env.reset(TASK)
  for _ in range(2):
    assert env.step(read(chat, '<search>a</search>')).status is None
  step = env.step(read(chat, '<search>b</search>'))
  assert (step.status, step.observations) == (Status.TURN_LIMIT, ())
  assert asked == [(('a',), 1)] * 2
  assert reward(env, step).value == 0.0
  env = started(max_searches=0)
  assert env.step(read(chat, '<answer>Paris</answer>')).status is Status.DONE


def test_invalid_turns_are_forgiven_so_often(chat):
  env = started(max_invalid=1)
  assert env.step(read(chat, 'huh')).status is None
  step = env.step(read(chat, 'huh'))
  assert step.status is Status.PARSE_FAILURE
  assert reward(env, step).parts['invalid'] == 2.0


@pytest.mark.parametrize(
  'calls',
  [
    (ToolCall('browse', {'query': 'a'}),), (ToolCall('search', {}),),
    (ToolCall('search', {'query': 3}),),
    (ToolCall('search', {'query': 'a', 'k': 1}),),
    (ToolCall('search', {'query': 'a'}), ToolCall('browse', {})),
  ],
)  # fmt: skip
def test_calls_of_other_formats_that_are_no_search(calls):
  step = started().step(Turn('', Verdict.CALLS, calls=calls))
  assert step.observations[0].name == 'complaint'


def test_many_searches_in_one_turn_are_answered_in_order():
  calls = tuple(ToolCall('search', {'query': q}) for q in 'ab')

  def named(queries, topk):
    return [[Passage(q, f'"{q}"\nx')] for q in queries]

  env = SearchEnvironment(named, max_searches=1)
  env.reset(TASK)
  step = env.step(Turn('', Verdict.CALLS, calls=calls))
  assert [
    '"a"' in step.observations[0].body,
    '"b"' in step.observations[1].body,
  ]
  assert [o.body for o in step.observations] == [
    'Doc 1(Title: "a") x', 'Doc 1(Title: "b") x',
  ]  # fmt: skip


def test_trouble_with_the_retriever_is_no_outcome(chat):
  def broken(queries, topk):
    raise InfraError('gone')

  env = SearchEnvironment(broken)
  env.reset(TASK)
  with pytest.raises(InfraError):
    env.step(read(chat, '<search>a</search>'))


def test_states_are_named_by_what_was_asked_and_came(chat):
  one, two = started(), started()
  for env, thought in ((one, 'a'), (two, 'b')):
    env.step(read(chat, f'<think>{thought}</think><search>x</search>'))
  ends = [e.step(read(chat, '<answer>y</answer>')) for e in (one, two)]
  assert ends[0].state_key == ends[1].state_key
  assert started().step(read(chat, '')).state_key != ends[0].state_key


# ---- what the policy reads --------------------------------------------------


def long_passage(queries, topk):
  return [[Passage('1', '"A"\n' + 'word ' * 500)] for _ in queries]


def test_a_block_that_is_cut_keeps_its_closing_tag(vocab):
  chat = Chat(vocab, formats.search_r1)
  env = SearchEnvironment(long_passage)
  env.reset(TASK)
  step = env.step(read(chat, '<search>a</search>'))
  ids = chat.render_observation(step.observations, False, 200)
  text = vocab.decode(ids)
  assert len(ids) <= 200
  assert text.startswith('\n\n<information>Doc 1(Title: "A") word')
  assert text.endswith('[... truncated]</information>\n\n')


def test_the_released_cut_loses_it(vocab):
  chat = Chat(vocab, formats.search_r1_released)
  env = SearchEnvironment(long_passage, lay_out=search.released_information)
  env.reset(TASK)
  step = env.step(read(chat, '<search>a</search>'))
  ids = chat.render_observation(step.observations, False, 200)
  whole = chat.render_observation(step.observations, False)
  # The first tokens of the whole, no more and no less.
  assert ids.tolist() == whole[:200].tolist()
  assert vocab.decode(whole).endswith('word</information>\n\n')


def test_both_layouts_are_the_same_where_nothing_is_cut(vocab):
  chat = Chat(vocab, formats.search_r1)
  shown = [
    chat.render_observation([lay_out([GOLD])], False).tolist()
    for lay_out in (search.information, search.released_information)
  ]
  assert shown[0] == shown[1]


@pytest.mark.parametrize(
  ('text', 'action'),
  [
    ('<search>a</search>', search.Action(('a',))),
    ('<answer>b</answer>', search.Action(answer='b')),
    ('<answer>b</answer> <search>a</search>', search.Action(answer='b')),
    ('nothing', search.Action()),
  ],
)
def test_the_released_reading(text, action):
  turn = Turn(text, Verdict.MALFORMED)
  assert search.released_reading(turn) == action
  env = started(read=search.released_reading)
  assert (env.step(turn).status is Status.DONE) is (action.answer is not None)


# ---- demonstrations ---------------------------------------------------------


def expert():
  (found,) = yield call('search', thought='Which?', query='France')
  assert 'Paris' in found
  yield Act(answer='Paris', thought='It says so.')


def test_a_demonstration_is_what_the_policy_would_have_said(vocab):
  chat = Chat(vocab, formats.search_r1)
  done = demonstrate(
    SearchEnvironment(retrieve, search_r1.format_reward),
    TASK, expert(), search.as_tags,
  )  # fmt: skip
  assert done.reward.value == 1.0 and done.reward.parts['format'] == 1.0
  trajectory = to_trajectory(chat, done)
  turns = [vocab.decode(s.tokens) for s in trajectory.turns]
  assert turns == [
    '<think>Which?</think><search>France</search>',
    '<think>It says so.</think><answer>Paris</answer>',
  ]
  (seen,) = [s for s in trajectory.segments if s.source is Source.OBSERVATION]
  assert vocab.decode(seen.tokens).endswith('</information>\n\n')
  for said, act in zip(turns, done.acts, strict=True):
    assert search.as_tags(act[0]).text == said
    assert read(chat, said).thought == act[0].thought


def test_a_forced_beginning_is_not_said_twice(vocab):
  chat = Chat(vocab, formats.search_r1, turn_prefix='<think>')
  done = demonstrate(
    SearchEnvironment(retrieve), TASK, expert(), search.as_tags
  )
  trajectory = to_trajectory(chat, done)
  said = [vocab.decode(t) for t in trajectory.turn_tokens]
  assert said[0] == '<think>Which?</think><search>France</search>'
