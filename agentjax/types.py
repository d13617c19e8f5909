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
import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentjax.sandbox_record import SandboxRecord

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

  def __post_init__(self):
    for field in ('body', 'role', 'head', 'tail'):
      if not isinstance(value := getattr(self, field), str):
        raise TypeError(f'Observation.{field} is {value!r}: give text')
    if not isinstance(self.name, str | None):
      raise TypeError(f'Observation.name is {self.name!r}: give text or None')


@dataclasses.dataclass(frozen=True)
class Step:
  """The answer of `Environment.step`.

  Attributes:
    observations: one per tool call in call order, or a user's reply.
    status: None while the episode goes on, else how it ended.
    reward: the reward of this turn alone (0 where there is none). Advantage
      estimators by turn and by token learn from it; those of whole
      trajectories learn from `Reward.value` of `verify` alone, unless their
      `scores` say otherwise.
    state_key: names the state before this turn; equal keys, equal states.

  The loop checks `status` and `reward`, the step itself the other two.
  """

  observations: tuple[Observation, ...] = ()
  status: Status | None = None
  reward: float = 0.0
  state_key: str | None = None

  def __post_init__(self):
    given = self.observations
    if not isinstance(given, (tuple, list)) or not all(
      isinstance(o, Observation) for o in given
    ):
      raise TypeError(
        f'Step.observations is {given!r}: give a tuple of Observations'
      )
    object.__setattr__(self, 'observations', tuple(given))
    if not isinstance(self.state_key, str | None):
      raise TypeError(
        f'Step.state_key is {self.state_key!r}: give text or None'
      )


@dataclasses.dataclass(frozen=True)
class Reward:
  """The verifier's word. `success` is what evaluation counts.

  `parts` are numbers by name, recorded for people; of the advantage estimators
  `gdpo` alone learns from them.

  Raises:
    TypeError, ValueError: `value` is no finite number, `success` no truth
      value, or a part no number under a name.
  """

  value: float
  success: bool = False
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    object.__setattr__(self, 'value', _number(self.value, 'reward'))
    if not math.isfinite(self.value):
      raise ValueError(
        f'reward is {self.value}: one that is no finite number would spoil '
        'the whole draw; give another, or raise what went wrong'
      )
    if not isinstance(self.success, (bool, np.bool_)):
      raise TypeError(f'success is {self.success!r}: give True or False')
    object.__setattr__(self, 'success', bool(self.success))
    if not isinstance(self.parts, Mapping):
      raise TypeError(f'parts is {self.parts!r}: give a mapping')
    for name, value in self.parts.items():
      if not isinstance(name, str):
        raise TypeError(f'reward part {name!r} has no text for a name')
      _number(value, f'reward part {name!r}')


def _number(value: Any, what: str) -> float:
  """`value` as a float: a real number, a NumPy one too."""
  if not isinstance(value, (numbers.Real, np.bool_)):
    raise TypeError(
      f'{what} is {value!r}, a {type(value).__name__}: give a real number'
    )
  return float(value)


def _frozen(
  array, dtype, name: str, n: int | None, ndim: int = 1
) -> np.ndarray:
  out = np.array(array, dtype=dtype)
  if out.ndim != ndim or (n is not None and out.shape[0] != n):
    raise ValueError(
      f'Segment.{name} has shape {out.shape}, but the segment has {n} tokens: '
      'give one value a token'
    )
  out.setflags(write=False)
  return out


TOKEN_FIELDS = ('logprobs', 'logprobs_full', 'log_kept_mass')


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
    kv_versions: MODEL only: (first position in the trajectory, version of the
      weights) of each stretch of the KV state at the segment's end; () where
      nobody wrote it down. A token was sampled on top of the stretches before
      it: a version below its own there is a state that older weights made.
    payload: room for what is not a token (an image); nothing uses it yet.
    kept: int32[n, M], MODEL only: the ids that truncation kept, the token's own
      among them; -1 where there are fewer. None: of whoever kept all ids.
  """

  source: Source
  tokens: np.ndarray
  logprobs: np.ndarray | None = None
  logprobs_full: np.ndarray | None = None
  log_kept_mass: np.ndarray | None = None
  versions: np.ndarray | None = None
  stop: Stop | None = None
  kv_versions: tuple[tuple[int, int], ...] = ()
  payload: Any = None
  kept: np.ndarray | None = None

  def __post_init__(self):
    tokens = _frozen(self.tokens, np.int32, 'tokens', None)
    object.__setattr__(self, 'tokens', tokens)
    is_model = self.source is Source.MODEL
    for name in (*TOKEN_FIELDS, 'versions'):
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
    stretches = tuple((int(at), int(v)) for at, v in self.kv_versions)
    if stretches and not is_model:
      raise ValueError(
        f'Segment.kv_versions is {stretches} on a {self.source.name} segment: '
        'the MODEL segment behind it says it'
      )
    object.__setattr__(self, 'kv_versions', stretches)
    if self.kept is not None:
      if not is_model:
        raise ValueError(f'Segment.kept is set on a {self.source.name} segment')
      kept = _frozen(self.kept, np.int32, 'kept', len(tokens), 2)
      object.__setattr__(self, 'kept', kept)

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
    sandboxes: what passed between the environment and its sandboxes, one
      `SandboxRecord` each.
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
  sandboxes: tuple[SandboxRecord, ...] = ()

  @property
  def id(self) -> str:
    return f'{self.draw}/{self.task.id}/{self.sample}/{self.branch}'

  @property
  def turns(self) -> tuple[Segment, ...]:
    """The MODEL segments."""
    return tuple(s for s in self.segments if s.source is Source.MODEL)

  @property
  def turn_tokens(self) -> tuple[np.ndarray, ...]:
    """Per turn what was said: FORCED tokens before it, then the MODEL's."""
    out = []
    for before, s in itertools.pairwise((None, *self.segments)):
      if s.source is Source.MODEL:
        forced = before is not None and before.source is Source.FORCED
        out.append(
          np.concatenate([before.tokens, s.tokens]) if forced else s.tokens
        )
    return tuple(out)

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
