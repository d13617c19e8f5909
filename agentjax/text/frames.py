"""Frames: how a chat template marks who speaks, as data.

Floor 1, text/. A frame knows turns: what opens one, what closes it, which
roles may follow each other. It knows neither tools nor tokens: it yields
pieces, and `chat.py` turns pieces into ids.

A piece is text, or `Special`, a special token by name, or `BREAK`. Adjacent
text is encoded as one run, as public templates do; a BREAK keeps two runs
apart. There is one on either side of what a policy sampled, so that no merge
ever reaches over the boundary of a turn (design promise 1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from agentjax.types import Message


@dataclasses.dataclass(frozen=True)
class Special:
  """A special token, by its name in the vocabulary."""

  name: str


class Break:
  """Keeps the texts on its two sides from being encoded as one run."""


BREAK = Break()
Piece = str | Special | Break
Pieces = tuple[Piece, ...]


def text_of(pieces: Sequence[Piece]) -> str:
  """What a public template would print: special tokens as their names."""
  return ''.join(
    p.name if isinstance(p, Special) else p if isinstance(p, str) else ''
    for p in pieces
  )


@dataclasses.dataclass(frozen=True)
class Frame:
  """How turns are marked.

  Attributes:
    head: pieces that open the turn of a role.
    tail: pieces that close it. Where the first one is special, it is what a
      policy samples to end its turn.
    begin: pieces before the first turn.
    stops: names of further special tokens that end a turn where the
      vocabulary has them.
    check: raises ValueError for an order of roles that the template refuses;
      gets the roles and the index of the first of them in the conversation's
      turns.
  """

  head: Callable[[str], Pieces]
  tail: Callable[[str], Pieces]
  begin: Pieces = ()
  stops: tuple[str, ...] = ()
  check: Callable[[Sequence[str], int], None] = lambda roles, first: None

  @property
  def end_of_turn(self) -> Special | None:
    """The special token that ends the policy's turn, if there is one."""
    tail = self.tail('assistant')
    return tail[0] if tail and isinstance(tail[0], Special) else None


def _alternate(roles: Sequence[str], first: int) -> None:
  for k, role in enumerate(roles, start=first):
    if (role == 'user') != (k % 2 == 0):
      raise ValueError(
        f'role {role!r} at turn {k}: this template wants user and assistant '
        'to alternate, beginning with user; put tool results into the '
        "assistant's turn (formats.with_tags) or choose another format"
      )


_IM_START, _IM_END = Special('<|im_start|>'), Special('<|im_end|>')

CHATML = Frame(
  head=lambda role: (_IM_START, f'{role}\n'),
  tail=lambda role: (_IM_END, '\n'),
  stops=('<|endoftext|>',),
)

_HEADER = (Special('<|start_header_id|>'), Special('<|end_header_id|>'))

LLAMA3 = Frame(
  head=lambda role: (_HEADER[0], role, _HEADER[1], '\n\n'),
  tail=lambda role: (Special('<|eot_id|>'),),
  begin=(Special('<|begin_of_text|>'),),
  stops=('<|eom_id|>', '<|end_of_text|>'),
)


def _gemma_head(role: str) -> Pieces:
  shown = 'model' if role == 'assistant' else role
  return (Special('<start_of_turn>'), f'{shown}\n')


GEMMA = Frame(
  head=_gemma_head,
  tail=lambda role: (Special('<end_of_turn>'), '\n'),
  begin=(Special('<bos>'),),
  stops=('<eos>',),
  check=_alternate,
)


# A base model has no template: its prompt is the bare text, to be continued.
# A system message stands apart from the user's, and a later user turn begins
# on a line of its own.
_PLAIN_TAILS = {'system': ('\n\n',), 'assistant': ('\n',)}

PLAIN = Frame(
  head=lambda role: (),
  tail=lambda role: _PLAIN_TAILS.get(role, ()),
)


# ---- what templates do to messages before they print them -----------------


def with_system(messages: Sequence[Message], text: str) -> list[Message]:
  """`messages` with a system message of `text` where they have none."""
  if messages and messages[0].role == 'system':
    return list(messages)
  return [Message('system', text), *messages]


def trimmed(message: Message, first: bool = False) -> Message:
  """Without whitespace at either end."""
  return dataclasses.replace(message, content=message.content.strip())


def trimmed_after_system(message: Message, first: bool) -> Message:
  """Trimmed, but for a system message that begins the conversation."""
  return message if first and message.role == 'system' else trimmed(message)


def merge_system(messages: Sequence[Message]) -> list[Message]:
  """The system message in front of the first turn's text (Gemma 3)."""
  if messages[0].role != 'system':
    return list(messages)
  system, *rest = messages
  if rest:
    merged = f'{system.content}\n\n{rest[0].content}'
    rest[0] = dataclasses.replace(rest[0], content=merged)
  return rest


def refuse_system(messages: Sequence[Message]) -> list[Message]:
  """Refuses a system message (Gemma)."""
  if messages[0].role == 'system':
    raise ValueError(
      'this template has no system role: put the text of the system message '
      f'{messages[0].content[:40]!r} into the first user message'
    )
  return list(messages)
