"""The records that everything else speaks: numpy only, frozen, versioned.

Floor 0. This file knows no model, no tokenizer, no environment and no JAX. A
record is complete when it is made: token ids, log-probs and policy versions
of a MODEL segment are born together while sampling and never rebuilt from
text (design promise 1), and the loss mask is nothing but `source is MODEL`
(promise 2).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SCHEMA_VERSION = 1


class Source(enum.Enum):
  """Who wrote a segment."""

  PROMPT = 'prompt'
  MODEL = 'model'  # sampled by the policy: the only tokens that are trained on
  FORCED = 'forced'  # put into the model's mouth, never trained on
  OBSERVATION = 'observation'  # a tool or a user, with the template's glue


class Stop(enum.Enum):
  """Why sampling of a MODEL segment stopped; carried, never inferred."""

  END_OF_TURN = 'end_of_turn'  # a stop token id
  STOP_STRING = 'stop_string'  # a stop string was completed
  TURN_BUDGET = 'turn_budget'  # tokens of one turn
  TRAJECTORY_BUDGET = 'trajectory_budget'  # MODEL tokens of one trajectory
  CONTEXT = 'context'  # the engine's context length
  CANCELLED = 'cancelled'  # the caller ended it

  @property
  def is_limit(self) -> bool:
    """True if a limit cut the turn, so that the text may be incomplete."""
    return self in (Stop.TURN_BUDGET, Stop.TRAJECTORY_BUDGET, Stop.CONTEXT)


class Status(enum.Enum):
  """How a trajectory ended. Three properties say what may be done with it."""

  RUNNING = 'running'
  DONE = 'done'
  TURN_LIMIT = 'turn_limit'
  TOKEN_LIMIT = 'token_limit'
  PROMPT_TOO_LONG = 'prompt_too_long'  # no token could be sampled
  PARSE_FAILURE = 'parse_failure'
  TOOL_FAILURE = 'tool_failure'  # by the policy
  INFRA_FAILURE = 'infra_failure'
  ENVIRONMENT_ERROR = 'environment_error'  # a bug in an environment's code
  ABORTED = 'aborted'  # by the trainer

  @property
  def reward_trustworthy(self) -> bool:
    """The reward says something about the policy."""
    return self in _POLICY_STATUSES

  @property
  def train_on_tokens(self) -> bool:
    """The tokens may enter the loss and the group's statistics."""
    return self in _POLICY_STATUSES

  @property
  def count_in_evaluation(self) -> bool:
    """In the denominator of a success rate (an unscored one as a failure)."""
    return self not in (Status.RUNNING, Status.ABORTED)


_POLICY_STATUSES = frozenset(
  {
    Status.DONE,
    Status.TURN_LIMIT,
    Status.TOKEN_LIMIT,
    Status.PARSE_FAILURE,
    Status.TOOL_FAILURE,
  }
)


class Verdict(enum.Enum):
  """What the parser of a chat format found in a MODEL segment."""

  ANSWER = 'answer'  # a final answer, or plain text
  CALLS = 'calls'  # one or more well-formed tool calls
  MALFORMED = 'malformed'  # a tool call that cannot be read
  TRUNCATED = 'truncated'  # a limit cut the turn


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A call as the policy wrote it; `arguments` is JSON-able."""

  name: str
  arguments: Mapping[str, Any]
  id: str = ''


@dataclasses.dataclass(frozen=True)
class ToolSpec:
  """What the policy is told of a tool; `parameters` is a JSON schema."""

  name: str
  description: str
  parameters: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Message:
  """One message; `role` is system, user, assistant or tool."""

  role: str
  content: str
  tool_calls: tuple[ToolCall, ...] = ()
  name: str | None = None  # of the tool, where role is tool


@dataclasses.dataclass(frozen=True)
class Task:
  """What is to be done. `verify` holds what the verifier needs; JSON-able."""

  id: str
  messages: tuple[Message, ...]
  verify: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Turn:
  """What a chat format reads in one MODEL segment. Parsing never raises.

  Attributes:
    text: the decoded segment, special tokens left out.
    verdict: what was found.
    calls: the tool calls, in the order in which they were written.
    answer: the text outside of calls and thoughts, or None if there is none.
    thought: text inside thinking tags, or None.
    problem: for MALFORMED, what is wrong, in words for the policy to read.
  """

  text: str
  verdict: Verdict
  calls: tuple[ToolCall, ...] = ()
  answer: str | None = None
  thought: str | None = None
  problem: str | None = None


@dataclasses.dataclass(frozen=True)
class Observation:
  """What the environment says back. Only `body` is ever cut."""

  body: str
  role: str = 'tool'
  name: str | None = None
  head: str = ''
  tail: str = ''


@dataclasses.dataclass(frozen=True)
class Step:
  """The answer of `Environment.step`.

  Attributes:
    observations: one per tool call in call order, or a user's reply.
    status: None while the episode goes on, else how it ended.
    reward: the reward of this turn alone (0 where there is none).
    state_key: names the state before this turn; equal keys, equal states.
  """

  observations: tuple[Observation, ...] = ()
  status: Status | None = None
  reward: float = 0.0
  state_key: str | None = None


@dataclasses.dataclass(frozen=True)
class Reward:
  """The verifier's word. `success` is what evaluation counts."""

  value: float
  success: bool = False
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


def _frozen(array, dtype, name: str, n: int | None) -> np.ndarray:
  out = np.array(array, dtype=dtype)
  if out.ndim != 1 or (n is not None and out.shape[0] != n):
    raise ValueError(
      f'Segment.{name} has shape {out.shape}, but the segment has {n} tokens: '
      'give one value a token'
    )
  out.setflags(write=False)
  return out


_TOKEN_FIELDS = ('logprobs', 'logprobs_full', 'log_kept_mass')


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
  """A run of tokens from one source.

  Attributes:
    source: who wrote it.
    tokens: int32[n] ids.
    logprobs: float32[n], MODEL only: log-prob under the distribution that was
      really sampled from (tempered, truncated, renormalised).
    logprobs_full: float32[n], MODEL only: tempered, not truncated.
    log_kept_mass: float32[n], MODEL only: log of the mass that truncation
      kept, so that logprobs_full - logprobs == log_kept_mass.
    versions: int32[n], MODEL only: version of the policy that sampled it.
    stop: MODEL only: why sampling stopped.
    payload: room for what is not a token (an image); nothing uses it yet.
  """

  source: Source
  tokens: np.ndarray
  logprobs: np.ndarray | None = None
  logprobs_full: np.ndarray | None = None
  log_kept_mass: np.ndarray | None = None
  versions: np.ndarray | None = None
  stop: Stop | None = None
  payload: Any = None

  def __post_init__(self):
    tokens = _frozen(self.tokens, np.int32, 'tokens', None)
    object.__setattr__(self, 'tokens', tokens)
    is_model = self.source is Source.MODEL
    for name in (*_TOKEN_FIELDS, 'versions'):
      value = getattr(self, name)
      if (value is not None) != is_model:
        raise ValueError(
          f'Segment.{name} is {"missing on" if is_model else "set on"} a '
          f'{self.source.name} segment: MODEL segments carry it, others do not'
        )
      if is_model:
        dtype = np.int32 if name == 'versions' else np.float32
        frozen = _frozen(value, dtype, name, tokens.shape[0])
        object.__setattr__(self, name, frozen)
    if (self.stop is not None) != is_model:
      raise ValueError(
        f'Segment.stop is {self.stop} on a {self.source.name} segment: every '
        'MODEL segment says why it stopped, others do not stop'
      )

  def __len__(self) -> int:
    return self.tokens.shape[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
  """A task, its segments in order, and how it ended. Append-only.

  Each MODEL segment is one turn: `turn_rewards` and `state_keys` have one
  entry for each turn that the environment has answered.

  Attributes:
    draw: counts the draws of the curriculum; with task, sample and branch it
      names the trajectory, and with position it keys the sampling.
    sample: index in the group. branch: 0, or the number of the fork.
    parent_id: of the trajectory that this one was forked from.
    row_weight: weight of its row in the loss.
    error: traceback, where an environment or the infrastructure failed.
    info: what the environment wants to be recorded; JSON-able.
  """

  task: Task
  segments: tuple[Segment, ...] = ()
  status: Status = Status.RUNNING
  reward: Reward | None = None
  turn_rewards: tuple[float, ...] = ()
  state_keys: tuple[str | None, ...] = ()
  draw: int = 0
  sample: int = 0
  branch: int = 0
  parent_id: str | None = None
  row_weight: float = 1.0
  error: str | None = None
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def id(self) -> str:
    return f'{self.draw}/{self.task.id}/{self.sample}/{self.branch}'

  @property
  def turns(self) -> tuple[Segment, ...]:
    """The MODEL segments."""
    return tuple(s for s in self.segments if s.source is Source.MODEL)

  def __len__(self) -> int:
    """All tokens."""
    return sum(len(s) for s in self.segments)

  @property
  def model_tokens(self) -> int:
    return sum(len(s) for s in self.turns)

  def append(self, *segments: Segment, **changes) -> Trajectory:
    """A new trajectory with `segments` at the end and `changes` made."""
    return dataclasses.replace(
      self, segments=self.segments + segments, **changes
    )

  def tokens(self) -> np.ndarray:
    """int32[T], all segments in order."""
    return _concat([s.tokens for s in self.segments], np.int32)

  def loss_mask(self) -> np.ndarray:
    """bool[T]: this token was sampled by the policy."""
    return _concat(
      [np.full(len(s), s.source is Source.MODEL) for s in self.segments], bool
    )

  def per_token(self, name: str) -> np.ndarray:
    """A MODEL field of all tokens [T]; 0 (versions: -1) where not MODEL."""
    dtype = np.int32 if name == 'versions' else np.float32
    fill = -1 if name == 'versions' else 0
    parts = []
    for s in self.segments:
      value = getattr(s, name)
      parts.append(np.full(len(s), fill, dtype) if value is None else value)
    return _concat(parts, dtype)


def _concat(parts: Sequence[np.ndarray], dtype) -> np.ndarray:
  return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Group:
  """The trajectories of one task and one draw."""

  task: Task
  draw: int
  trajectories: tuple[Trajectory, ...]


# ---- round trip to disk ---------------------------------------------------
# A trajectory is a JSON object and a dict of flat arrays over all tokens. The
# object holds text and metadata, so that a person can read it with a pager.


def trajectory_to_record(
  trajectory: Trajectory,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Splits a trajectory into a JSON-able dict and arrays over its tokens.

  Raises:
    ValueError: if a segment has a payload, which no file format holds yet.
  """
  for s in trajectory.segments:
    if s.payload is not None:
      raise ValueError(
        f'a {s.source.name} segment carries a payload of type '
        f'{type(s.payload).__name__}: records hold tokens only'
      )
  record = {
    'schema': SCHEMA_VERSION,
    'id': trajectory.id,
    'task': _jsonable(trajectory.task),
    'segments': [
      {
        'source': s.source.value,
        'n': len(s),
        'stop': s.stop.value if s.stop else None,
      }
      for s in trajectory.segments
    ],
    'status': trajectory.status.value,
    'reward': _jsonable(trajectory.reward),
    'turn_rewards': list(trajectory.turn_rewards),
    'state_keys': list(trajectory.state_keys),
    'draw': trajectory.draw,
    'sample': trajectory.sample,
    'branch': trajectory.branch,
    'parent_id': trajectory.parent_id,
    'row_weight': trajectory.row_weight,
    'error': trajectory.error,
    'info': dict(trajectory.info),
  }
  arrays = {'tokens': trajectory.tokens()}
  for name in (*_TOKEN_FIELDS, 'versions'):
    arrays[name] = trajectory.per_token(name)
  return record, arrays


def trajectory_from_record(
  record: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> Trajectory:
  """Inverse of `trajectory_to_record`.

  Raises:
    ValueError: the record has another schema version, or its arrays are not
      as long as its segments.
  """
  if record.get('schema') != SCHEMA_VERSION:
    raise ValueError(
      f'record has schema version {record.get("schema")!r}, this code reads '
      f'{SCHEMA_VERSION}: read it with the release that wrote it'
    )
  total = sum(s['n'] for s in record['segments'])
  segments, start = [], 0
  for s in record['segments']:
    span = slice(start, start + s['n'])
    start += s['n']
    source = Source(s['source'])
    fields = {}
    if source is Source.MODEL:
      fields = {
        name: arrays[name][span] for name in (*_TOKEN_FIELDS, 'versions')
      }
      fields['stop'] = Stop(s['stop'])
    segments.append(Segment(source, arrays['tokens'][span], **fields))
  if total != len(arrays['tokens']):
    raise ValueError(
      f'record {record.get("id")!r} has segments of {total} tokens and arrays '
      f'of {len(arrays["tokens"])}: the files do not belong together'
    )
  reward = record['reward']
  return Trajectory(
    task=task_from_json(record['task']),
    segments=tuple(segments),
    status=Status(record['status']),
    reward=Reward(**reward) if reward is not None else None,
    turn_rewards=tuple(record['turn_rewards']),
    state_keys=tuple(record['state_keys']),
    draw=record['draw'],
    sample=record['sample'],
    branch=record['branch'],
    parent_id=record['parent_id'],
    row_weight=record['row_weight'],
    error=record['error'],
    info=record['info'],
  )


def task_to_json(task: Task) -> dict[str, Any]:
  """A JSON-able dict with every field of the task."""
  return _jsonable(task)


def task_from_json(data: Mapping[str, Any]) -> Task:
  """Inverse of `task_to_json`; `verify` and `metadata` may be absent.

  Raises:
    ValueError: a field is missing, unknown or of the wrong type.
  """
  known = {f.name for f in dataclasses.fields(Task)}
  if not isinstance(data, Mapping):
    raise ValueError(f'a task is a JSON object, not {type(data).__name__}')
  if unknown := set(data) - known:
    raise ValueError(f'unknown task fields {sorted(unknown)}: known {known}')
  if missing := {'id', 'messages'} - set(data):
    raise ValueError(f'task lacks {sorted(missing)}')
  if not isinstance(data['id'], str) or not data['id']:
    raise ValueError(f'task id {data["id"]!r} is not a non-empty string')
  for name in ('verify', 'metadata'):
    if not isinstance(data.get(name, {}), Mapping):
      raise ValueError(f'task field {name} is not a JSON object')
  if not isinstance(data['messages'], list) or not data['messages']:
    raise ValueError('task field messages is not a non-empty list')
  return Task(
    id=data['id'],
    messages=tuple(_message_from_json(m) for m in data['messages']),
    verify=dict(data.get('verify', {})),
    metadata=dict(data.get('metadata', {})),
  )


def _message_from_json(data: Any) -> Message:
  if not isinstance(data, Mapping):
    raise ValueError(f'a message is a JSON object, not {data!r}')
  for name in ('role', 'content'):
    if not isinstance(data.get(name), str):
      raise ValueError(f'message field {name} is {data.get(name)!r}, not text')
  calls = tuple(
    ToolCall(c['name'], c['arguments'], c.get('id', ''))
    for c in data.get('tool_calls', ())
  )
  return Message(data['role'], data['content'], calls, data.get('name'))


def _jsonable(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    return {
      f.name: _jsonable(getattr(value, f.name))
      for f in dataclasses.fields(value)
    }
  if isinstance(value, Mapping):
    return {k: _jsonable(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_jsonable(v) for v in value]
  return value
