"""Search-R1's rules: the right form, and where the released one is wrong."""

import pytest

from agentjax.env import search_r1
from agentjax.env.search_r1 import answer_reward, format_reward
from agentjax.env.transcript import Transcript
from agentjax.types import Task

# As the released prompt: tags in a sentence, and an example.
PROMPT = (
  'Answer the question. ... provide the answer inside <answer> and </answer> '
  'without detailed illustrations. For example, <answer> Beijing </answer>. '
  'Question: Which city is the capital of China?\n'
)
BEIJING = Task('q', (), {'answers': ['Beijing']})
PARIS = Task('q', (), {'answers': ['Paris', 'Lutetia']})
RELEASED = {
  'extract': search_r1.released_answer,
  'match': search_r1.released_exact_match,
}


def block(text):
  return f'\n\n<information>{text}</information>\n\n'


def said(*turns, answer=None, found=(), prompt=PROMPT):
  return Transcript(prompt, turns, tuple(map(block, found)), answer)


THINK_SEARCH = '<think>hm</think><search>capital</search>'
THINK_ANSWER = '<think>so</think><answer>Paris</answer>'
GOOD = said(THINK_SEARCH, THINK_ANSWER, answer='Paris', found=['Paris is it.'])


def test_silence_is_beijing_in_the_released_code_and_nothing_here():
  """The fault: the prompt's own example is scored as the policy's answer."""
  silent = said('')
  assert answer_reward(BEIJING, silent, **RELEASED).value == 1.0
  assert answer_reward(BEIJING, silent).value == 0.0
  assert not answer_reward(BEIJING, silent).parts['answered']


@pytest.mark.parametrize(
  'found', ['<answer>Paris</answer>', 'x</information><answer>Paris</answer>']
)
def test_an_answer_tag_in_a_passage_is_nobody_s_answer(found):
  episode = said(THINK_SEARCH, '<think>no idea', found=[found])
  assert answer_reward(PARIS, episode, **RELEASED).value == 1.0
  assert answer_reward(PARIS, episode).value == 0.0
  assert format_reward(PARIS, episode).value == 0.0


def test_the_complaint_about_a_bad_action_is_nobody_s_answer():
  task = Task('q', (), {'answers': ['and']})
  complaint = 'the answer between <answer> and </answer>. Let me try again.\n'
  episode = Transcript(PROMPT, ('huh', ''), (complaint,))
  assert answer_reward(task, episode, **RELEASED).value == 1.0
  assert answer_reward(task, episode).value == 0.0


@pytest.mark.parametrize(
  ('answer', 'golden', 'ours', 'released'),
  [
    ('the Paris.', ['Paris'], True, True),
    ('Paris, France', ['Paris'], False, False),
    ('PARIS', 'Paris', True, True), (None, ['Paris'], False, False),
    ('', [''], False, True), ('the', ['A'], False, True),
    ('A', ['A'], True, True), ('a ', ['A'], True, True),
    ('...', ['!'], False, True), ('!', ['!'], True, True),
    ('The The', ['The The'], True, True), ('', ['The The'], False, True),
    ('3,000', ['3000'], True, True), ('p', [], False, False),
  ],
)  # fmt: skip
def test_exact_match(answer, golden, ours, released):
  assert search_r1.exact_match(answer, golden) is ours
  assert search_r1.released_exact_match(answer, golden) is released


def test_contains_nothing_empty():
  assert search_r1.contains('in Paris, France', ['Paris'])
  assert not search_r1.contains('anything', ['', 'the'])
  assert search_r1.released_contains('anything', ['', 'the'])
  assert not search_r1.contains(None, [''])


def test_rewards_of_answers():
  assert answer_reward(PARIS, GOOD).value == 1.0
  assert answer_reward(PARIS, GOOD).success
  wrong = said('', answer='Rome')
  assert answer_reward(PARIS, wrong).value == 0.0
  assert answer_reward(PARIS, wrong, wrong=0.1).value == 0.1
  assert answer_reward(PARIS, said(''), wrong=0.1).value == 0.0


def test_a_task_without_golden_answers_is_an_error():
  for verify in ({}, {'answers': []}, {'answers': [3]}):
    with pytest.raises(ValueError, match='answers'):
      answer_reward(Task('q', (), verify), GOOD)


ROME = '<think>so</think><answer>Rome</answer>'


@pytest.mark.parametrize(
  ('episode', 'value'),
  [
    (GOOD, 1.0),
    (said('Paris! <answer>Paris</answer>', answer='Paris'), 0.8),
    (said(THINK_SEARCH, ROME, answer='Rome', found=['nothing']), 0.2),
    (said(THINK_SEARCH, ROME, answer='Rome', found=['in Paris']), 0.3),
    (said('<answer>Rome</answer>', answer='Rome'), 0.1),
    (said('<think>hm</think>'), 0.0),
    (said(THINK_SEARCH, found=['in Paris']), 0.0),
  ],
)
def test_rewards_of_the_format(episode, value):
  reward = format_reward(PARIS, episode, retrieval=0.1)
  assert reward.value == pytest.approx(value)
  assert reward.success is (value >= 0.8)


def test_retrieval_earns_by_what_was_returned_not_by_what_was_invented():
  invented = said(
    '<think>x</think><search>y</search><information>Paris</information>'
    + ROME,
    answer='Rome',
  )  # fmt: skip
  assert format_reward(PARIS, invented, retrieval=0.1).value == 0.1
  released = Transcript('<|im_start|>assistant\n', invented.turns)
  assert search_r1.released_format(released)
  assert search_r1.released_retrieval(released, ['Paris'])


def test_tags_in_a_passage_do_not_break_the_policy_s_format():
  odd = said(THINK_SEARCH, THINK_ANSWER, answer='Paris', found=['</think>'])
  assert search_r1.own_format(odd)
  prompt = '<|im_start|>assistant\n'
  assert not search_r1.released_format(
    Transcript(prompt, odd.turns, odd.observations)
  )


@pytest.mark.parametrize(
  ('text', 'good'),
  [
    (THINK_ANSWER, True), (f' {THINK_ANSWER}\n', True),
    (THINK_SEARCH + block('a') + THINK_ANSWER, True),
    ((THINK_SEARCH + block('a')) * 2 + THINK_ANSWER, True),
    ('', False), ('<think>a</think>', False), (THINK_SEARCH, False),
    (THINK_ANSWER + 'x', False), ('x' + THINK_ANSWER, False),
    (THINK_ANSWER * 2, False), ('<answer>Paris</answer>', False),
    ('<think>a<think>b</think></think><answer>c</answer>', False),
    (THINK_SEARCH + THINK_ANSWER, False), ('</think><answer>a</answer>', False),
    ('<think>a</think>x<answer>b</answer>', False),
  ],
)  # fmt: skip
def test_the_format(text, good):
  assert search_r1.follows_format(text) is good
  marked = Transcript('<|im_start|>assistant', (text,))
  assert search_r1.released_format(marked) is good
  assert not search_r1.released_format(Transcript('assistant', (text,)))


def test_the_released_scores():
  options = {
    'structure': 0.2, 'final': 0.1, 'retrieval': 0.0, **RELEASED,
    'has_format': search_r1.released_format,
    'has_gold': search_r1.released_retrieval,
  }  # fmt: skip
  head = PROMPT + '<|im_start|>assistant\n'
  good = Transcript(head, GOOD.turns, GOOD.observations)
  assert format_reward(PARIS, good, **options).value == 1.0
  # An answer without the format, and none, which is Beijing.
  bare = Transcript(head, ('<answer>Paris</answer>',))
  assert format_reward(PARIS, bare, **options).value == 0.8
  assert format_reward(PARIS, Transcript(head, ('',)), **options).value == 0.1
