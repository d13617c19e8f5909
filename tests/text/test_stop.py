"""The stop automaton against a search in the bytes."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.text.stop import StopAutomaton


def test_a_stop_string_split_over_tokens():
  tokens = [b'<', b'/', b'a>', b'a', b'>', b'x', b'</a>!', b'']
  auto = StopAutomaton.build(tokens, ['</a>'], [7])
  assert auto.run([0, 1, 2]) == auto.STRING
  assert auto.run([0, 1, 3, 4]) == auto.STRING
  assert auto.run([6]) == auto.STRING  # kept whole, with what is behind
  assert auto.run([0, 0, 1, 2]) == auto.STRING
  assert auto.run([0, 1, 3]) < auto.n_live
  assert auto.run([0, 1, 5, 3, 4]) < auto.n_live
  assert auto.run([0, 7]) == auto.ID


def test_terminal_states_stay():
  auto = StopAutomaton.build([b'a', b'b', b''], ['a'], [2])
  assert auto.run([0, 1, 2, 0]) == auto.STRING
  assert auto.run([2, 0, 1]) == auto.ID
  assert auto.table.shape == (3, 3) and auto.table.dtype == np.int16


def test_a_stop_id_wins_over_a_string():
  auto = StopAutomaton.build([b'a'], ['a'], [0])
  assert auto.run([0]) == auto.ID


def test_no_stops_at_all():
  auto = StopAutomaton.build([b'a', b'bc', b''], [], [])
  assert auto.n_live == 1 and auto.run([0, 1, 2]) == 0


def test_a_string_inside_of_a_longer_one_stops_first():
  auto = StopAutomaton.build([b'a', b'b', b'c', b'd'], ['abcd', 'bc'], [])
  assert auto.run([0, 1]) < auto.n_live
  assert auto.run([0, 1, 2]) == auto.STRING


PIECES = [b'<', b'/', b'a', b'>', 'é'.encode(), '漢'.encode(), b'\xc3', b'\xa9']


CASES = dict(
  vocabulary=st.lists(
    st.lists(st.sampled_from(PIECES), max_size=4).map(b''.join),
    min_size=1,
    max_size=12,
  ),
  strings=st.lists(
    st.text('</a>é漢', min_size=1, max_size=5), min_size=0, max_size=4
  ),
  draws=st.lists(st.integers(0, 10**6), max_size=30),
)


@settings(max_examples=150, deadline=None)
@given(**CASES)
def test_against_a_search_in_the_bytes(vocabulary, strings, draws):
  check(vocabulary, strings, draws)


@pytest.mark.long
@settings(max_examples=2000, deadline=None)
@given(**CASES)
def test_two_thousand_against_a_search(vocabulary, strings, draws):
  check(vocabulary, strings, draws)


def check(vocabulary, strings, draws):
  auto = StopAutomaton.build(vocabulary, strings, [])
  needles = [s.encode() for s in strings]
  ids = [d % len(vocabulary) for d in draws]
  state, text = auto.start, b''
  for i in ids:
    state, text = int(auto.table[state, i]), text + vocabulary[i]
    found = any(n in text for n in needles)
    assert (state >= auto.n_live) == found
    if found:
      assert state == auto.STRING
      break


def test_a_real_vocabulary_is_fast(smollm2):
  tokens = [smollm2.token_bytes(i) for i in range(smollm2.size)]
  start = time.perf_counter()
  auto = StopAutomaton.build(tokens, ['</search>', '</answer>'], [0, 2])
  assert time.perf_counter() - start < 2
  assert auto.table.shape == (auto.n_live + 2, 49152)
  assert auto.run(smollm2.encode('so: </search>\n')) == auto.STRING
  assert auto.run([2]) == auto.ID


def test_errors_name_the_value():
  with pytest.raises(ValueError, match='stop id 3 is outside.* 2 ids'):
    StopAutomaton.build([b'a', b'b'], [], [3])
  with pytest.raises(ValueError, match='empty'):
    StopAutomaton.build([b'a'], ['a', ''], [])
