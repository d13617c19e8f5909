"""One episode of a policy without a model, by turns or by tokens.

Floor 3, under `audit`. By turns an environment is given what a policy says as
it is; by tokens everything goes the way of a trained policy's text: the real
`episode`, a real chat, ids cut where sampling would have stopped. Whatever an
environment raises ends as a status, as it does in `collect`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import traceback
from collections.abc import Callable, Sequence

import numpy as np

from agentjax.audit.policies import Policy, Said, Seen
from agentjax.env.base import (
  Environment,
  EnvironmentFactory,
  InfraError,
  Opening,
)
from agentjax.env.demonstrate import Act
from agentjax.rollout.calls import Call, Calls
from agentjax.rollout.episode import Decode, Limits, Reset, episode
from agentjax.text.calls import HERMES
from agentjax.text.chat import Chat
from agentjax.types import (
  Observation,
  Reward,
  Segment,
  Source,
  Status,
  Stop,
  Task,
  Trajectory,
  Turn,
)

TURNS = 16  # of an episode by turns


@dataclasses.dataclass(frozen=True)
class Played:
  """How an episode ended.

  Attributes:
    answer: the last one that the policy gave as such.
    forged: observations in which text became a special token.
    error: traceback, where the status is no doing of the policy's.
  """

  status: Status
  reward: Reward | None = None
  answer: str | None = None
  turns: int = 0
  forged: int = 0
  error: str | None = None


class Voice:
  """A policy at work. One that has come to its end says nothing any more."""

  def __init__(self, policy: Policy, **seen):
    self._policy, self._seen = policy, seen
    self.answer: str | None = None
    self.turns = self.forged = 0

  def begin(self, opening: Opening) -> None:
    """Tells it what the episode starts from."""
    self._loop = self._policy(Seen(opening=opening, **self._seen))

  def __call__(self, read: tuple[str, ...]) -> Said:
    try:
      said = self._loop.send(read if self.turns else None)
    except StopIteration:
      said = ''
    self.turns += 1
    if isinstance(said, Act) and not said.calls:
      self.answer = said.answer
    return said


# Plays an episode up to its reward.
Way = Callable[[Environment, Task, Voice], Status]


def play(
  way: Way,
  make_environment: EnvironmentFactory,
  task: Task,
  policy: Policy,
  **seen,
) -> Played:
  """One episode; `seen` are the fields of `Seen`, but for the opening."""
  voice = Voice(policy, **seen)
  environment, reward, error = None, None, None
  try:
    environment = make_environment()
    status = way(environment, task, voice)
    if status.reward_trustworthy:
      reward = environment.verify(status)
      if not isinstance(reward, Reward):
        raise TypeError(f'verify returned {reward!r}: return a Reward')
  except KeyboardInterrupt:
    raise
  except BaseException as raised:  # SystemExit too, as in `collect`
    infra = isinstance(raised, InfraError)
    status = Status.INFRA_FAILURE if infra else Status.ENVIRONMENT_ERROR
    reward, error = None, ''.join(traceback.format_exception(raised))
  finally:
    if environment is not None:
      environment.close()
  return Played(status, reward, voice.answer, voice.turns, voice.forged, error)


def play_all(
  episodes: Sequence[Callable[[], Played]],
  *,
  threads: int = 1,
  seconds: float = 600.0,
) -> list[Played]:
  """Plays each, in tool threads; one that hangs for `seconds` is given up."""
  calls, out = Calls(threads, seconds), [None] * len(episodes)
  for i, one in enumerate(episodes):
    calls.submit(Call('an episode', one, i))
  while calls.n_open:
    for done in calls.ended(block=True):
      try:
        out[done.owner] = done.result()
      except InfraError as hung:
        out[done.owner] = Played(Status.INFRA_FAILURE, error=str(hung))
  return out


# ---- by turns -------------------------------------------------------------


def by_turns(environment: Environment, task: Task, voice: Voice) -> Status:
  """A `Way` without tokens. Bare text is read as one with Hermes calls."""
  voice.begin(environment.reset(task))
  read: tuple[str, ...] = ()
  for _ in range(TURNS):
    said = voice(read)
    turn = said.as_turn() if isinstance(said, Act) else _read(said)
    step = environment.step(turn)
    if step.status is not None:
      return step.status
    read = tuple(o.body for o in step.observations)
  return Status.TURN_LIMIT


def _read(text: str) -> Turn:
  reading = HERMES.read(text)
  return Turn(
    text,
    reading.verdict(limited=False),
    reading.calls,
    reading.rest,
    problem=reading.problem,
  )


# ---- by tokens ------------------------------------------------------------


def by_tokens(chat: Chat, limits: Limits) -> Way:
  """A `Way` through the real loop, with the chat of a run and its limits."""
  stops = chat.stop_automaton()
  return functools.partial(_by_tokens, chat, limits, stops)


def _by_tokens(chat, limits, stops, environment, task, voice) -> Status:
  loop = episode(chat, limits, Trajectory(task))
  request, read = next(loop), ()
  observations, closed = (), False
  while True:
    if isinstance(request, Reset):
      result = environment.reset(task)
      if isinstance(result, Opening):  # the loop says what is wrong, if not
        voice.begin(result)
    elif isinstance(request, Decode):
      voice.forged += _forged(chat, request.trajectory, observations, closed)
      result = _say(chat, stops, request, voice(read))
      closed = chat.closes(result.tokens)
    else:
      result = environment.step(request.turn)
      observations = getattr(result, 'observations', ())
      read = tuple(o.body for o in observations)
    try:
      request = loop.send(result)
    except StopIteration as end:
      return end.value.status


def _say(chat: Chat, stops, request: Decode, said: Said) -> Segment:
  """A MODEL segment of `said`: cut where sampling stops, or by a limit."""
  limits = {
    Stop.TURN_BUDGET: request.turn_budget,
    Stop.TRAJECTORY_BUDGET: request.trajectory_budget,
    Stop.CONTEXT: request.context - len(request.trajectory),
  }
  stop = min(limits, key=limits.get)
  ids = [*_ids(chat, said).tolist(), *chat.stop_ids[:1]][: limits[stop]]
  state = stops.run(request.said)
  for n, i in enumerate(ids):
    state = int(stops.table[state, i])
    if state >= stops.n_live:
      string = state == stops.STRING
      ids = ids[: n + 1]
      stop = Stop.STOP_STRING if string else Stop.END_OF_TURN
      break
  zeros = np.zeros(len(ids))
  return Segment(Source.MODEL, ids, zeros, zeros, zeros, zeros - 1, stop=stop)


def _ids(chat: Chat, said: Said) -> np.ndarray:
  """The ids that a policy samples to say it, without the end of its turn."""
  if isinstance(said, Act):
    try:
      return chat.render_turn(said.calls, said.answer)
    except ValueError:  # a call that the format has no way to write
      said = ''.join(
        f'<tool_call>\n{{"name": "{c.name}", "arguments": '
        f'{json.dumps(c.arguments)}}}\n</tool_call>'
        for c in said.calls
      )
  special = chat.vocab.special
  parts, rest = [], said
  while rest:
    # Anything may be sampled, special tokens too.
    found = [(at, n) for n in special if n and (at := rest.find(n)) >= 0]
    at, name = min(found, default=(len(rest), ''))
    parts.append(chat.vocab.encode(rest[:at]))
    parts.append(np.array([special[name]] if name else [], np.int32))
    rest = rest[at + len(name) :]
  return np.concatenate([np.zeros(0, np.int32), *parts])


def _forged(chat: Chat, trajectory: Trajectory, observations, closed) -> int:
  """1 if the last observation has special tokens that its frame has not."""
  seen = [s for s in trajectory.segments[-2:] if s.source is Source.OBSERVATION]
  if not seen or not observations:
    return 0
  special = list(chat.vocab.special.values())
  bare = [Observation('', o.role, o.name) for o in observations]
  frame = chat.render_observation(bare, closed)
  counts = [np.isin(ids, special).sum() for ids in (seen[-1].tokens, frame)]
  return int(counts[0] != counts[1])
