"""Layout: a conversation as pieces, whole or from a sampled turn on.

Floor 1, text/. Both ways go through one function, `_layout`, so that what an
episode appends is what a full render has in that place. This file knows
formats and pieces, no vocabulary and no ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from agentjax.text.formats import ChatFormat
from agentjax.text.frames import BREAK, Piece, Special
from agentjax.types import Message, ToolSpec


def pieces_of(
  format: ChatFormat,
  messages: Sequence[Message],
  tools: Sequence[ToolSpec] = (),
) -> list[Piece]:
  """The pieces of a conversation and of the opening of the next turn.

  Raises:
    ValueError: the format's template refuses the conversation.
  """
  if not messages:
    raise ValueError('no messages: a conversation has at least one')
  arranged = format.arrange(_settle(format, messages, begins=True))
  # The order of roles is checked on messages, as the templates do.
  format.frame.check(_roles(format, arranged), 0)
  # Tools may take up the words of a first message that a rewrite would drop.
  offered = format.syntax.offer(arranged, tools)
  history = format.rewrite(offered)
  return [*format.frame.begin, *_layout(format, history, None)]


def after_turn(
  format: ChatFormat, messages: Sequence[Message], closed: bool
) -> list[Piece]:
  """The pieces between a sampled turn and the policy's next token."""
  # The policy's turn is an odd one, wherever the roles alternate.
  format.frame.check(_roles(format, messages), 2)
  settled = _settle(format, messages, begins=False)
  return list(_layout(format, settled, closed))


def _settle(
  format: ChatFormat, messages: Sequence[Message], begins: bool
) -> list[Message]:
  return [
    m if m.role == 'assistant' else format.settle(m, begins and i == 0)
    for i, m in enumerate(messages)
  ]


def _roles(format: ChatFormat, messages: Sequence[Message]) -> list[str]:
  """Who speaks in which turn; an inline result is part of a turn."""
  roles, going_on = [], False
  for m in messages:
    if m.role == 'tool' and format.syntax.inline:
      going_on = True
      continue
    if not (going_on and m.role == 'assistant'):
      roles.append(m.role)
    going_on = False
  return roles


def _layout(
  format: ChatFormat, messages: Sequence[Message], closed: bool | None
) -> Iterator[Piece]:
  """Pieces of `messages`, to where the policy speaks.

  `closed` is None at the beginning of a conversation; else the policy's turn
  precedes, and `closed` says whether its end was sampled.
  """
  frame, syntax = format.frame, format.syntax
  speaking = closed is False  # the assistant's turn is open
  going_on = False  # and a result in it was the last thing said
  if closed:
    yield from _rest_of_tail(frame.tail('assistant'))
  for is_tool, run in itertools.groupby(messages, lambda m: m.role == 'tool'):
    if is_tool:
      turns = syntax.results(list(run))
      if syntax.inline and speaking:
        yield from (BREAK, turns[0][1], BREAK)
        going_on = True
        continue
    else:
      turns = [
        (m.role, _words(format, m)) for m in run if format.prints(m.role)
      ]
    for role, text in turns:
      if role == 'assistant' and going_on:
        yield from (text, BREAK)
        going_on = False
        continue
      if speaking:
        yield from frame.tail('assistant')
      yield from frame.head(role)
      speaking, going_on = role == 'assistant', False
      if speaking:
        yield from (BREAK, text, BREAK)
      else:
        yield text
        yield from frame.tail(role)
  if speaking and not going_on:
    yield from frame.tail('assistant')
  if not (speaking and going_on):
    yield from (*frame.head('assistant'), BREAK)


def _words(format: ChatFormat, message: Message) -> str:
  if message.role == 'assistant':
    return format.syntax.write(message)
  return message.content


def _rest_of_tail(tail: Sequence[Piece]) -> Sequence[Piece]:
  """What is left of a turn's end once its special token was sampled."""
  return tail[1:] if tail and isinstance(tail[0], Special) else tail
