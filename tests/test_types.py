"""Records: their invariants, and the round trip."""

import json

import numpy as np
import pytest
from fakes import trajectory

from agentjax import records
from agentjax.types import (
  Observation,
  Reward,
  Segment,
  Source,
  Status,
  Step,
  Stop,
)


def test_the_mask_is_what_the_policy_sampled():
  t = trajectory(
    [('p', [1, 2]), ('m', [3]), ('f', [4]), ('o', [5]), ('m', [6])]
  )
  np.testing.assert_array_equal(t.tokens(), [1, 2, 3, 4, 5, 6])
  np.testing.assert_array_equal(t.loss_mask(), [0, 0, 1, 0, 0, 1])
  np.testing.assert_array_equal(t.per_token('logprobs'), [0, 0, -1, 0, 0, -1])
  np.testing.assert_array_equal(t.per_token('versions'), [-1, -1, 0, -1, -1, 0])
  assert (len(t), t.model_tokens, len(t.turns)) == (6, 2, 2)


def test_a_segment_is_complete_when_it_is_made():
  n = np.zeros(2)
  with pytest.raises(ValueError, match='logprobs is missing on a MODEL'):
    Segment(Source.MODEL, [1, 2], stop=Stop.END_OF_TURN)
  with pytest.raises(ValueError, match='stop is None on a MODEL'):
    Segment(Source.MODEL, [1, 2], n, n, n, n)
  with pytest.raises(ValueError, match=r'shape \(3,\).*2 tokens'):
    Segment(Source.MODEL, [1, 2], np.zeros(3), n, n, n, Stop.END_OF_TURN)
  with pytest.raises(ValueError, match='versions is set on a OBSERVATION'):
    Segment(Source.OBSERVATION, [1, 2], versions=n)
  with pytest.raises(ValueError, match='kept is set on a FORCED'):
    Segment(Source.FORCED, [1, 2], kept=[[1], [2]])
  for kept in ([1, 2], [[1, 2]]):
    with pytest.raises(ValueError, match=r'kept has shape .* has 2 tokens'):
      Segment(Source.MODEL, [1, 2], n, n, n, n, Stop.END_OF_TURN, kept=kept)


def test_records_cannot_be_changed():
  t = trajectory([('p', [1, 2]), ('m', [3])])
  with pytest.raises(ValueError, match='read-only'):
    t.segments[1].tokens[0] = 9
  with pytest.raises(AttributeError):
    t.status = Status.ABORTED
  ids = np.array([1, 2], np.int32)
  segment = Segment(Source.PROMPT, ids)
  ids[0] = 7
  assert segment.tokens[0] == 1


def test_status_says_what_may_be_done():
  def properties(s):
    return (s.reward_trustworthy, s.train_on_tokens, s.count_in_evaluation)

  policy = {
    'DONE', 'TURN_LIMIT', 'TOKEN_LIMIT', 'PARSE_FAILURE', 'TOOL_FAILURE'
  }  # fmt: skip
  for s in Status:
    if s.name in policy:
      assert properties(s) == (True, True, True)
    elif s in (Status.RUNNING, Status.ABORTED):
      assert properties(s) == (False, False, False)
    else:  # counted as a failure, but nothing is learned from it
      assert properties(s) == (False, False, True)


@pytest.mark.parametrize(
  ('make', 'said'),
  [
    (lambda: Reward('1'), "reward is '1', a str: give a real number"),
    (lambda: Reward(None), 'reward is None, a NoneType'),
    (lambda: Reward(1j), 'a complex'),
    (lambda: Reward(float('inf')), 'reward is inf'),
    (lambda: Reward(1.0, success=0.7), 'success is 0.7: give True or False'),
    (lambda: Reward(1.0, success=None), 'success is None'),
    (lambda: Reward(0.5, parts={'a': None}), "reward part 'a' is None"),
    (lambda: Reward(0.5, parts={'a': 'b'}), "reward part 'a' is 'b', a str"),
    (lambda: Reward(0.5, parts={3: 1.0}), 'reward part 3 has no text'),
    (lambda: Reward(0.5, parts=[1.0]), r'parts is \[1.0\]: give a mapping'),
    (lambda: Step(Observation('x')), 'observations is Observation'),
    (lambda: Step('x'), "observations is 'x': give a tuple"),
    (lambda: Step(('x',)), 'give a tuple of Observations'),
    (lambda: Step(state_key=3), 'state_key is 3: give text or None'),
    (lambda: Observation(3), 'Observation.body is 3: give text'),
    (lambda: Observation('', head=None), 'Observation.head is None'),
    (lambda: Observation('', name=3), 'Observation.name is 3'),
  ],
)
def test_what_an_environment_answers_is_what_it_should_be(make, said):
  with pytest.raises((TypeError, ValueError), match=said):
    make()


def test_numbers_of_numpy_are_numbers():
  reward = Reward(np.float32(0.5), np.bool_(True), {'a': np.int64(3)})
  assert type(reward.value) is float and reward.success is True
  assert Reward(True).value == 1.0
  assert Step([Observation('x')]).observations == (Observation('x'),)


def test_round_trip():
  t = trajectory(
    [('p', [1]), ('m', [2, 3]), ('o', []), ('f', [4]), ('m', [])], 'é\u2028'
  ).append(
    turn_rewards=(0.5, 0.0),
    state_keys=('k', None),
    parent_id='0/a/0/0',
    row_weight=0.5,
    error='x',
    info={'n': [1, None]},
  )
  record, arrays = records.trajectory_to_record(t)
  back = records.trajectory_from_record(json.loads(json.dumps(record)), arrays)
  assert records.trajectory_to_record(back)[0] == record
  for name, value in arrays.items():
    np.testing.assert_array_equal(
      records.trajectory_to_record(back)[1][name], value
    )
  assert back.task == t.task and back.reward == t.reward
  assert [s.stop for s in back.segments] == [s.stop for s in t.segments]


def test_foreign_records_are_refused():
  record, arrays = records.trajectory_to_record(trajectory([('p', [1, 2])]))
  with pytest.raises(ValueError, match='schema version 0'):
    records.trajectory_from_record({**record, 'schema': 0}, arrays)
  with pytest.raises(ValueError, match='segments of 2 tokens and arrays of 3'):
    records.trajectory_from_record(record, {**arrays, 'tokens': [1, 2, 3]})
  with pytest.raises(ValueError, match='payload'):
    segment = Segment(Source.PROMPT, [1], payload=b'image')
    records.trajectory_to_record(trajectory([]).append(segment))


CALL = {'name': 'f', 'arguments': {'x': 1}}


def message(**more):
  """A task whose message has more fields."""
  return {
    'id': 'a',
    'messages': [{'role': 'assistant', 'content': '', **more}],
  }


def test_null_is_no_tool_calls():
  (read,) = records.task_from_json(message(tool_calls=None)).messages
  assert read.tool_calls == ()
  (read,) = records.task_from_json(message(tool_calls=[CALL])).messages
  assert read.tool_calls[0].arguments == {'x': 1}


@pytest.mark.parametrize(
  'data, said',
  [
    ([], 'JSON object'),
    ({'id': 'a'}, "lacks \\['messages'\\]"),
    ({'id': '', 'messages': [{}]}, 'non-empty string'),
    ({'id': 'a', 'messages': []}, 'non-empty list'),
    ({'id': 'a', 'messages': [{'role': 'user'}]}, 'content is None'),
    ({'id': 'a', 'messages': [3]}, 'a message is a JSON object'),
    (
      {'id': 'a', 'messages': [], 'answer': 1, 'aim': 2},
      r"fields \['aim', 'answer'\]: known are \['id', 'messages', 'metadata', "
      r"'verify'\]",
    ),
    (message(text='x'), r"unknown message fields \['text'\]: known are \['con"),
    (message(name=3), 'message field name is 3, not text'),
    (message(tool_calls='x'), "tool_calls is 'x', not a list"),
    (message(tool_calls=['x']), "a tool call is a JSON object, not 'x'"),
    (message(tool_calls=[{}]), r"tool call lacks \['arguments', 'name'\]"),
    (
      message(tool_calls=[{'name': 'f'}]),
      r"tool call lacks \['arguments'\]: {'name': 'f'}",
    ),
    (message(tool_calls=[CALL | {'type': 'function'}]), 'unknown tool call fi'),
    (message(tool_calls=[CALL | {'name': None}]), 'call field name is None'),
    (message(tool_calls=[CALL | {'arguments': '{}'}]), "arguments is '{}', no"),
  ],
)
def test_bad_tasks_are_refused(data, said):
  with pytest.raises(ValueError, match=said):
    records.task_from_json(data)
