"""Chat: the only code that turns messages into tokens and tokens into turns.

Floor 1, text/. One object for training, evaluation and replay. It joins a
vocabulary and a format, and holds two promises of the design. Tokens are
appended, never re-encoded: what comes after a sampled turn is encoded by
itself, with the same pieces that a full render has there. And no text becomes
a special token: those are placed by name, by the format alone. (An observation
that spells `<|im_end|>` stays a spelling.) This file knows no environment and
no engine.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Sequence

import numpy as np

from agentjax.text.formats import ChatFormat
from agentjax.text.frames import BREAK, Piece, Special, text_of
from agentjax.text.layout import after_turn, pieces_of
from agentjax.text.stop import StopAutomaton
from agentjax.text.vocab import Vocab
from agentjax.types import (
  Message,
  Observation,
  Stop,
  ToolCall,
  ToolSpec,
  Turn,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Chat:
  """A vocabulary and a format. Immutable; safe to use from many threads.

  `turn_prefix` is put into the policy's mouth at the start of every turn, as
  FORCED tokens that nothing is learned from.

  Raises:
    ValueError: the vocabulary lacks a special token of the format, or treats
      as special what the format needs as text.
  """

  vocab: Vocab
  format: ChatFormat
  turn_prefix: str = ''

  def __post_init__(self):
    special = self.vocab.special
    frame = self.format.frame
    pieces = (*frame.begin, *frame.head('user'), *frame.tail('assistant'))
    wanted = {p.name for p in pieces if isinstance(p, Special)}
    if missing := sorted(wanted - set(special)):
      raise ValueError(
        f'format {self.format.name} needs the special tokens {missing}, which '
        'the vocabulary does not have: choose a format of the model, or '
        'formats.plain_tags for a model without a template'
      )
    if clash := sorted(set(self.format.syntax.markers) & set(special)):
      raise ValueError(
        f'format {self.format.name} reads {clash} in text, but the vocabulary '
        'has them as special tokens: mark them as text in its file'
      )

  @functools.cached_property
  def forced(self) -> np.ndarray:
    """int32[n]: ids of `turn_prefix`."""
    return np.array(self.vocab.encode(self.turn_prefix), np.int32)

  # ---- messages to tokens ----

  def render_prompt(
    self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
  ) -> np.ndarray:
    """int32[n]: the conversation and the opening of the policy's next turn.

    Raises:
      ValueError: the format's template refuses the conversation.
    """
    return self._encode(pieces_of(self.format, messages, tools))

  def render_text(
    self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
  ) -> str:
    """What `render_prompt` encodes, special tokens as their names."""
    return text_of(pieces_of(self.format, messages, tools))

  def keeps_history(self, messages: Sequence[Message]) -> bool:
    """Whether a full render shows the assistant's turns as they were written.

    Where it is False (Qwen3 dropped a thought, Llama 3.1 the text beside a
    call), the ids of an episode and those of a full render of its messages
    differ: the episode has what was sampled.
    """
    return list(messages) == self.format.rewrite(messages)

  def render_observation(
    self,
    observations: Sequence[Observation],
    closed: bool,
    budget: int | None = None,
  ) -> np.ndarray:
    """int32[n]: what follows a sampled turn, up to the policy's next token.

    These are the ids that a full render has there: the rest of the turn's
    end, the observations, the opening of the next turn. With tags, results
    stand inside of the turn, which goes on; but if the policy ended it, they
    come in a user's turn.

    Args:
      observations: of the turn's calls in call order, or a user's words.
      closed: the sampled ids end with the end of the turn; if not (a limit, a
        stop string), it is put here.
      budget: the most tokens to return. Bodies alone are cut to fit, longest
        first, at a token's end and a character's, and marked
        (`ChatFormat.cut_mark`). Where all the rest alone is longer, it is
        returned whole, with empty bodies: check the length.

    Raises:
      ValueError: there is no observation, or the template refuses its role.
    """
    if not observations:
      raise ValueError('no observation: a turn without one has nothing after')

    def encoded(bodies: Sequence[str]) -> np.ndarray:
      messages = [
        Message(o.role, f'{o.head}{b}{o.tail}', name=o.name)
        for o, b in zip(observations, bodies, strict=True)
      ]
      return self._encode(after_turn(self.format, messages, closed))

    bodies = [o.body for o in observations]
    if budget is None:
      return encoded(bodies)
    # No token is longer than this, so nothing behind can fit: it keeps ten
    # megabytes of output from being encoded for two thousand tokens.
    reach = (max(budget, 0) + 1) * self._longest_token
    return _fit(self, encoded, bodies, budget, reach)

  @functools.cached_property
  def _longest_token(self) -> int:
    vocab = self.vocab
    return max(len(vocab.token_bytes(i)) for i in range(vocab.size))

  def render_turn(
    self,
    calls: Sequence[ToolCall] = (),
    answer: str | None = None,
    thought: str | None = None,
  ) -> np.ndarray:
    """int32[n]: what a policy would have sampled to say this.

    For demonstrations. The ids end as sampling would have stopped: with a
    stop string, else with the end of the turn. They begin behind
    `turn_prefix`, where the text begins with it.

    Raises:
      ValueError: the format has no way to write a call.
    """
    syntax = self.format.syntax
    content = '' if answer is None else syntax.answer(answer)
    text = syntax.write(Message('assistant', content, tuple(calls)))
    if thought is not None:
      text = thought.join(self.format.thought) + text
    text = text.removeprefix(self.turn_prefix)
    ids = self.vocab.encode(text)
    if syntax.stop_strings and text.endswith(syntax.stop_strings):
      return ids
    return np.append(ids, np.array(self.stop_ids[:1], np.int32))

  def _encode(self, pieces: Sequence[Piece]) -> np.ndarray:
    parts = [np.zeros(0, np.int32)]
    for is_text, run in itertools.groupby(
      pieces, key=lambda p: isinstance(p, str)
    ):
      if is_text:
        parts.append(self.vocab.encode(''.join(run)))
        continue
      ids = [self.vocab.special[p.name] for p in run if p is not BREAK]
      parts.append(np.array(ids, np.int32))
    return np.concatenate(parts)

  # ---- tokens to turns ----

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end a turn: the format's own first, then the vocabulary's."""
    special = self.vocab.special
    end = self.format.frame.end_of_turn
    names = [*([end.name] if end else []), *self.format.frame.stops]
    ids = [special[n] for n in names if n in special]
    return tuple(dict.fromkeys([*ids, *self.vocab.eos_ids]))

  @property
  def stop_strings(self) -> tuple[str, ...]:
    """Strings whose completion ends a turn."""
    return self.format.syntax.stop_strings

  def stop_automaton(self, padded_vocab: int | None = None) -> StopAutomaton:
    """The stops as a table over ids; `padded_vocab` is the model's V."""
    n = self.vocab.size
    padding = max(n, padded_vocab or 0) - n
    table = [self.vocab.token_bytes(i) for i in range(n)] + [b''] * padding
    return StopAutomaton.build(table, self.stop_strings, self.stop_ids)

  def closes(self, tokens: Sequence[int]) -> bool:
    """Whether `tokens` end with the template's own end of turn.

    This is `closed` of `render_observation`. A turn that another stop id
    ended is not closed: the template's end still has to follow.
    """
    end = self.format.frame.end_of_turn
    if end is None:
      return len(tokens) > 0 and int(tokens[-1]) in self.stop_ids
    return len(tokens) > 0 and int(tokens[-1]) == self.vocab.special[end.name]

  def parse_turn(self, tokens: Sequence[int], stop: Stop) -> Turn:
    """Reads a MODEL segment. Total: any ids give a Turn, nothing raises.

    The verdict is MALFORMED where a call cannot be read, TRUNCATED where a
    limit ended the turn before a call or an answer was whole, CALLS where
    there are calls, else ANSWER. With tags that have one for the answer,
    `Turn.answer` is its text, and None where the policy wrote none.
    """
    text = self.vocab.decode(tokens)
    thought, said = _split_thought(self.format, text)
    reading = self.format.syntax.read(said)
    return Turn(
      text=text,
      verdict=reading.verdict(stop.is_limit),
      calls=reading.calls,
      answer=reading.rest,
      thought=thought,
      problem=reading.problem,
    )


# ---- cutting --------------------------------------------------------------


def _fit(
  chat: Chat,
  encoded: Callable[[Sequence[str]], np.ndarray],
  bodies: Sequence[str],
  budget: int,
  reach: int,
) -> np.ndarray:
  """The ids with the longest bodies of which at most `budget` tokens result.

  One cap holds for all bodies, so that short ones stay whole. A merge between
  a body and its surroundings may cost or save a token, so every candidate is
  encoded in full; a bisection finds the cap. Characters behind `reach` are
  not looked at.
  """
  short = [b[:reach] for b in bodies]
  is_whole = [len(s) == len(b) for s, b in zip(short, bodies, strict=True)]
  if all(is_whole):
    whole = encoded(bodies)
    if len(whole) <= budget:
      return whole
  ids = [chat.vocab.encode(s) for s in short]

  def capped(cap: int) -> np.ndarray:
    return encoded(
      [
        body
        if fits and len(i) <= cap
        else _prefix(chat.vocab, i[:cap]) + chat.format.cut_mark
        for body, fits, i in zip(bodies, is_whole, ids, strict=True)
      ]
    )

  low, best = 0, capped(0)
  high = min(max(map(len, ids)), max(budget, 0))
  while low < high:
    middle = (low + high + 1) // 2
    candidate = capped(middle)
    if len(candidate) <= budget:
      low, best = middle, candidate
    else:
      high = middle - 1
  return best


def _prefix(vocab: Vocab, ids: np.ndarray) -> str:
  """The text of `ids`, without a character that was cut in two."""
  data = b''.join(vocab.token_bytes(int(i)) for i in ids)
  return data.decode('utf-8', 'ignore')


# ---- thoughts -------------------------------------------------------------


_NOWHERE = sys.maxsize  # behind the end of every text


def _forward(find: Callable[[int], int]) -> Callable[[int], int]:
  """`find` for positions that only grow: goes through the text once.

  `find(position)` is -1 where nothing follows; here that is `_NOWHERE`.
  """
  found = -1

  def following(position: int) -> int:
    nonlocal found
    if found < position:
      at = find(position)
      found = at if at >= 0 else _NOWHERE
    return found

  return following


def _split_thought(format: ChatFormat, text: str) -> tuple[str | None, str]:
  """Thoughts and what is said outside of them.

  A thought ends at its closing tag. One that has none ends where a call
  begins, and one that has no opening tag began before this segment; tags
  behind the beginning of a call belong to the call. The text is gone through
  once for each of the three, whatever it holds.
  """
  opening, closing = format.thought

  def call_at(position: int) -> int:
    call = format.syntax.opener.search(text, position)
    return call.start() if call else -1

  next_call = _forward(call_at)
  next_opening = _forward(lambda position: text.find(opening, position))
  next_closing = _forward(lambda position: text.find(closing, position))
  thoughts, said, position = [], [], 0
  while True:
    limit = min(next_call(position), len(text))
    start = next_opening(position)
    if start + len(opening) > limit:
      end = next_closing(position)
      if end + len(closing) > limit:
        break
      thoughts.append(text[position:end])
    else:
      said.append(text[position:start])
      inner = start + len(opening)
      end = next_closing(inner)
      if end == _NOWHERE:
        thoughts.append(text[inner:limit])
        position = limit
        break
      thoughts.append(text[inner:end])
    position = end + len(closing)
  thought = '\n'.join(t.strip() for t in thoughts) if thoughts else None
  return thought, ''.join(said) + text[position:]
