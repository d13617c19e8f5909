"""Stops as a table: a finite automaton over token ids.

Floor 1, text/. A stop string may be split over tokens in many ways, so it
cannot be found by comparing ids, and decoding inside a jitted loop is out of
the question. Here the Aho-Corasick automaton of the stop strings' bytes (Aho
and Corasick, 1975) is run through every token of the vocabulary once, on the
host, and becomes one lookup a sampled token: `state = table[state, token]`.

The rule: the token that completes a stop string (or is a stop id) is kept
whole, with whatever bytes it has behind the stop string, and sampling halts
there. Token, log-prob and text then agree, and nothing is ever cut out of the
middle of a token. This file knows bytes and ids, no format and no JAX.

Legend: N states, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class StopAutomaton:
  """Transition table over token ids.

  Attributes:
    table: int16 or int32 [N, V]; the state after a token. States below
      `n_live` go on; the last two rows are STRING and ID, which stay as they
      are, so that a halted slot may go on looking up.
    n_live: number of live states; sampling halts where `state >= n_live`.
    start: 0, the state before the first token of a turn.
  """

  table: np.ndarray
  n_live: int
  start: int = 0

  @property
  def STRING(self) -> int:
    """The state in which a stop string was completed."""
    return self.n_live

  @property
  def ID(self) -> int:
    """The state after a stop id; it wins over STRING on the same token."""
    return self.n_live + 1

  @staticmethod
  def build(
    token_bytes: Sequence[bytes],
    stop_strings: Sequence[str],
    stop_ids: Iterable[int],
  ) -> StopAutomaton:
    """Builds the table.

    Args:
      token_bytes: bytes of each id (b'' for special and for padded ids: they
        leave the state as it is).
      stop_strings: any number of non-empty strings.
      stop_ids: ids that stop by themselves.

    Raises:
      ValueError: a stop string is empty, or a stop id is outside of the
        vocabulary.
    """
    n_tokens = len(token_bytes)
    stop_ids = sorted(set(map(int, stop_ids)))
    for i in stop_ids:
      if not 0 <= i < n_tokens:
        raise ValueError(
          f'stop id {i} is outside of the vocabulary of {n_tokens} ids'
        )
    for s in stop_strings:
      if not s:
        raise ValueError('a stop string is empty: it would stop everywhere')
    step = _byte_automaton([_bytes(s) for s in stop_strings])
    n_live = step.shape[0] - 1
    dtype = np.int16 if n_live + 2 < 2**15 else np.int32
    table = np.empty((n_live + 2, n_tokens), dtype)
    table[: n_live + 1] = _over_tokens(step, token_bytes)
    table[n_live + 1] = n_live + 1
    table[:n_live, stop_ids] = n_live + 1
    table.setflags(write=False)
    return StopAutomaton(table, n_live)

  def run(self, ids: Iterable[int], state: int = 0) -> int:
    """The state after `ids`; what a jitted loop does, on the host."""
    for i in ids:
      state = int(self.table[state, i])
    return state


def _byte_automaton(strings: Sequence[bytes]) -> np.ndarray:
  """int32[live + 1, 256]; the last state is 'completed' and stays.

  States are the prefixes of the strings in which no string is completed, in
  breadth-first order, the empty one first.
  """
  children: list[dict[int, int]] = [{}]
  completed = [False]
  for s in strings:
    node = 0
    for b in s:
      if b not in children[node]:
        children[node][b] = len(children)
        children.append({})
        completed.append(False)
      node = children[node][b]
    completed[node] = True

  goto = np.zeros((len(children), 256), np.int32)
  fail = [0] * len(children)
  order, queue = [], deque([0])
  while queue:
    node = queue.popleft()
    order.append(node)
    # A proper suffix is shorter, so its row and its mark are final by now.
    completed[node] |= completed[fail[node]]
    if node:
      goto[node] = goto[fail[node]]
    for b, child in children[node].items():
      fail[child] = int(goto[node, b]) if node else 0
      queue.append(child)
    for b, child in children[node].items():
      goto[node, b] = child

  live = [node for node in order if not completed[node]]
  rename = np.full(len(children), len(live), np.int32)
  rename[live] = np.arange(len(live))
  out = np.full((len(live) + 1, 256), len(live), np.int32)
  out[:-1] = rename[goto[live]]
  return out


def _over_tokens(step: np.ndarray, token_bytes: Sequence[bytes]) -> np.ndarray:
  """int32[states, V]: `step` applied to all bytes of each token.

  Tokens are taken longest first, so that the tokens which still have a byte
  at some position are a prefix, and each position is one gather.
  """
  lengths = np.array([len(t) for t in token_bytes], np.int64)
  order = np.argsort(-lengths, kind='stable')
  longest = int(lengths.max(initial=0))
  padded = np.zeros((len(token_bytes), longest), np.uint8)
  for row, i in enumerate(order):
    padded[row, : lengths[i]] = np.frombuffer(token_bytes[i], np.uint8)
  states = np.tile(
    np.arange(step.shape[0], dtype=np.int32)[:, None], (1, len(token_bytes))
  )
  for position in range(longest):
    n = int(np.searchsorted(-lengths[order], -position, side='left'))
    states[:, :n] = step[states[:, :n], padded[:n, position]]
  out = np.empty_like(states)
  out[:, order] = states
  return out


def _bytes(text: str) -> bytes:
  try:
    return text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f'stop string {text!r} holds a surrogate, which no text in UTF-8 does: '
      'leave it out'
    ) from error
