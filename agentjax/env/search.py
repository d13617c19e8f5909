"""The search environment: a policy asks a retriever, and then answers.

Floor 1, env; Search-R1's (arXiv:2503.09516). It knows neither tags nor tokens:
what a turn says was read by a chat format, and an information block is laid
out and cut by it, closing tag and all. The reward is a function of the
transcript, in which the policy's words stand apart from everybody else's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence

from agentjax.env import search_r1
from agentjax.env.base import Opening
from agentjax.env.demonstrate import Act
from agentjax.env.retrieval.passages import Passage, Retriever, as_text
from agentjax.env.transcript import Transcript
from agentjax.types import (
  Observation,
  Reward,
  Status,
  Step,
  Task,
  ToolSpec,
  Turn,
  Verdict,
)

TOOL = ToolSpec(
  'search',
  'Finds passages that may help to answer.',
  {
    'type': 'object',
    'properties': {'query': {'type': 'string'}},
    'required': ['query'],
  },
)
COMPLAINT = (
  '\nThat was neither a search nor an answer. A search is a query between '
  '<search> and </search>, an answer stands between <answer> and </answer>.\n'
)
PROMPT = (
  'Answer the question below. Think between <think> and </think> whenever you '
  'have learned something new. If you lack knowledge, search for it: write '
  '<search> query </search>, and what is found comes back between '
  '<information> and </information>. Search as often as you like. When you '
  'know enough, write nothing but the answer between <answer> and </answer>, '
  'without explanations. Question: {question}\n'
)


@dataclasses.dataclass(frozen=True)
class Action:
  """What a turn asks for: searches, or an answer; neither is invalid."""

  queries: tuple[str, ...] = ()
  answer: str | None = None


def from_chat(turn: Turn) -> Action:
  """As the chat format read the turn."""
  if turn.verdict is Verdict.ANSWER:
    return Action(answer=turn.answer)
  if turn.verdict is not Verdict.CALLS:
    return Action()
  queries = tuple(
    call.arguments.get('query')
    for call in turn.calls
    if call.name == TOOL.name and set(call.arguments) == {'query'}
  )
  whole = len(queries) == len(turn.calls)
  return Action(queries if whole and all(map(_is_text, queries)) else ())


def _is_text(x) -> bool:
  return isinstance(x, str)


def released_reading(turn: Turn) -> Action:
  """As the released code reads the turn's text: the first closed tag."""
  text = search_r1.released_cut(turn.text)
  action, content = search_r1.released_action(text)
  if action == 'search':
    return Action((content,))
  return Action(answer=content if action else None)


def information(passages: Sequence[Passage]) -> Observation:
  """An information block; the format wraps it, and cuts its body alone."""
  return Observation(as_text(passages).strip(), name=TOOL.name)


def released_information(passages: Sequence[Passage]) -> Observation:
  """As the released code: the block is cut with its tags, the closing one
  first. Goes with a format whose `cut_mark` is empty."""
  text = as_text(passages).strip()
  return Observation(
    f'\n\n<information>{text}</information>\n\n', name='released'
  )


class SearchEnvironment:
  """Implements `Environment`.

  Args:
    retrieve: finds passages; shared by all episodes.
    score: the reward of an episode.
    topk: passages a search brings.
    max_searches: turns that may search. In the next one only an answer
      counts: a search there ends the episode, with TURN_LIMIT and unanswered.
    max_invalid: turns without an action that are forgiven. The next one ends
      the episode with PARSE_FAILURE.
    read: what a turn asks for. lay_out: what the policy reads of passages.
    complaint: what it reads after a turn without an action.
  """

  def __init__(
    self,
    retrieve: Retriever,
    score: search_r1.Scoring = search_r1.answer_reward,
    *,
    topk: int = 3,
    max_searches: int = 4,
    max_invalid: int = 3,
    read: Callable[[Turn], Action] = from_chat,
    lay_out: Callable[[Sequence[Passage]], Observation] = information,
    complaint: str = COMPLAINT,
  ):
    self._retrieve, self._score = retrieve, score
    self._topk, self._max_searches = topk, max_searches
    self._max_invalid = max_invalid
    self._read, self._lay_out, self._complaint = read, lay_out, complaint
    self._task: Task | None = None
    self._status: Status | None = None
    self._said = Transcript()
    self._history: list = []  # what was asked for, and what came

  def reset(self, task: Task) -> Opening:
    """See `Environment`."""
    if self._task is not None:
      raise RuntimeError('an environment is for one episode: make another')
    self._task = task
    prompt = '\n'.join(m.content for m in task.messages)
    self._said = Transcript(prompt)
    return Opening(task.messages, (TOOL,))

  def step(self, turn: Turn) -> Step:
    """See `Environment`.

    Raises:
      InfraError: the passages cannot be had.
    """
    if self._task is None or self._status is not None:
      raise RuntimeError(
        f'step of an episode that is not running (status {self._status})'
      )
    key = self._state_key()
    action = self._read(turn)
    self._say(turns=(*self._said.turns, turn.text))
    if action.answer is not None:
      self._say(answer=action.answer)
      self._status = Status.DONE
      return Step(status=self._status, state_key=key)
    if action.queries:
      observations = self._search(action.queries)
    else:
      observations = (Observation(self._complaint, name='complaint'),)
      self._say(invalid=self._said.invalid + 1)
      if self._said.invalid > self._max_invalid:
        self._status = Status.PARSE_FAILURE
    shown = ''.join(_shown(o) for o in observations)
    self._say(observations=(*self._said.observations, shown))
    self._history.append([action.queries, shown])
    return Step(observations, self._status, state_key=key)

  def verify(self, status: Status) -> Reward:
    """See `Environment`."""
    return self._score(self._task, self._said)

  def close(self) -> None:
    """See `Environment`."""

  def _search(self, queries: Sequence[str]) -> tuple[Observation, ...]:
    if self._said.searches >= self._max_searches:
      self._status = Status.TURN_LIMIT
      return ()
    found = self._retrieve(queries, self._topk)
    self._say(searches=self._said.searches + 1)
    return tuple(self._lay_out(passages) for passages in found)

  def _say(self, **changes) -> None:
    self._said = dataclasses.replace(self._said, **changes)

  def _state_key(self) -> str:
    """Equal where task, actions and observations so far are equal."""
    text = json.dumps([self._task.id, self._history])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shown(observation: Observation) -> str:
  """As the formats of tags print it; for the transcript."""
  said = f'{observation.head}{observation.body}{observation.tail}'
  if observation.name != TOOL.name:
    return said
  return f'\n\n<information>{said}</information>\n\n'


def as_tags(act: Act) -> Turn:
  """An act as a turn with its text in tags; for `demonstrate`."""
  turn = act.as_turn()
  thought = '' if act.thought is None else f'<think>{act.thought}</think>'
  said = ''.join(f'<search>{c.arguments["query"]}</search>' for c in act.calls)
  if not act.calls and act.answer is not None:
    said = f'<answer>{act.answer}</answer>'
  return dataclasses.replace(turn, text=thought + said)
