"""The quickstart's vocabulary is small and can be made again."""

from agentjax.text import formats, train_vocab
from agentjax.text.chat import Chat
from agentjax.types import Message, Observation


def test_the_shipped_model_is_what_training_gives():
  assert train_vocab.train() == train_vocab.arithmetic_model().read_bytes()


def test_one_piece_a_digit_and_a_tag(arithmetic):
  assert arithmetic.size == 285
  for text in (*'0123456789+-*/()=. ', *train_vocab.TAGS):
    assert len(arithmetic.encode(text)) == 1
  assert arithmetic.decode(arithmetic.encode('  12 ')) == '  12 '


def test_a_turn_costs_few_tokens(arithmetic):
  chat = Chat(arithmetic, formats.arithmetic)
  prompt = chat.render_prompt([Message('user', '(12+7)*3=')])
  assert len(prompt) == 9 and arithmetic.decode(prompt) == '(12+7)*3='
  result = chat.render_observation([Observation('19')], closed=False)
  assert len(result) == 4 and arithmetic.decode(result) == '<result>19</result>'
