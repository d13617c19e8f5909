"""`collect` with tools that take their time, and with ones that take none.

Benchmarks. Text is ids in decimal. Turns end at a stop id, as real ones do:
every `1 / STOP_SHARE`-th id is one, so that lengths are spread geometrically
around `1 / STOP_SHARE`. All but an episode's last turn call a tool, which
sleeps; how long depends on the episode and the turn alone. Both runs sample
the same trajectories.
"""

from __future__ import annotations

import dataclasses
import time
import zlib

import numpy as np

from agentjax.env.base import Opening
from agentjax.rollout.collect import CollectStats, collect
from agentjax.rollout.engine import Engine
from agentjax.rollout.episode import Limits
from agentjax.rollout.sampling import Sampling
from agentjax.types import (
  Message,
  Observation,
  Reward,
  Status,
  Step,
  Task,
  Turn,
  Verdict,
)
from benchmarks.measure import Measurement
from benchmarks.worker import Clock
from benchmarks.workloads import OBSERVATION, PROMPT, token_ids

MEAN_TURN = 96
LATENCY = (0.05, 2.0)  # seconds, uniform


@dataclasses.dataclass(frozen=True)
class Shape:
  """How much there is to do: `episodes` of `turns` turns."""

  slots: int = 8
  episodes: int = 32
  turns: int = 6
  context: int = 4096


def stop_ids(vocabulary: int) -> range:
  """One id in MEAN_TURN: over nearly uniform logits, turns of that length."""
  return range(0, vocabulary, MEAN_TURN)


class IdChat:
  """A chat over bare ids; every turn is a call, and none begins forced."""

  forced = np.zeros(0, np.int32)

  def render_prompt(self, messages, tools=()):
    return np.array(messages[-1].content.split(), np.int32)

  def render_observation(self, observations, closed, budget=None):
    return np.array(observations[0].body.split(), np.int32)

  def closes(self, tokens):
    return True

  def parse_turn(self, tokens, stop):
    return Turn('', Verdict.CALLS)


class SleepingTools:
  """Answers with 64 ids; each call takes between `latency` seconds."""

  def __init__(self, turns: int, latency: tuple[float, float]):
    self._left, self._latency = turns, latency

  def reset(self, task: Task) -> Opening:
    self._rng = np.random.default_rng(zlib.crc32(task.id.encode()))
    self._ids = task.verify['observations']
    return Opening(task.messages)

  def step(self, turn: Turn) -> Step:
    self._left -= 1
    if not self._left:  # an answer, not a call
      return Step(status=Status.DONE)
    time.sleep(self._rng.uniform(*self._latency))
    return Step((Observation(self._ids[self._left - 1]),))

  def verify(self, status: Status) -> Reward:
    return Reward(0.0)

  def close(self) -> None:
    pass


def tasks(shape: Shape, vocabulary: int) -> list[Task]:
  """One task an episode, each with a prompt of its own."""
  prompts = token_ids(3, (shape.episodes, PROMPT), vocabulary)
  given = token_ids(
    4, (shape.episodes, shape.turns - 1, OBSERVATION), vocabulary
  )

  def text(ids):
    return ' '.join(map(str, ids))

  return [
    Task(
      f'episode {i}',
      (Message('user', text(prompt)),),
      {'observations': [text(ids) for ids in given[i]]},
    )
    for i, prompt in enumerate(prompts)
  ]


def run(
  engine: Engine,
  shape: Shape,
  vocabulary: int,
  latency: tuple[float, float],
  seed: int,
) -> Measurement:
  """One `collect` of all episodes.

  Returns:
    `seconds`, `tokens` sampled, `occupancy`: the share of slots that sampled,
    over the steps that ran; `waiting_seconds` in which none ran; `checksum`
    of all sampled tokens; `cut`: trajectories that a limit ended.
  """
  stats = CollectStats()
  live, ran = engine.stats.live_steps, engine.stats.slot_steps
  limits = Limits(
    turns=shape.turns,
    turn_tokens=shape.context,
    model_tokens=shape.context,
    context=shape.context,
    observation_tokens=OBSERVATION,
  )
  # All episodes at once, more than there are slots.
  clock = Clock()
  groups = collect(
    tasks(shape, vocabulary),
    group_size=1,
    engine=engine,
    chat=IdChat(),
    make_environment=lambda: SleepingTools(shape.turns, latency),
    limits=limits,
    sampling=Sampling(),
    seed=seed & 0xFFFF,
    draw=0,
    tool_threads=shape.episodes,  # no tool waits for another
    stats=stats,
    in_flight=shape.episodes,
  )
  out = clock.read()
  made = [t for group in groups for t in group.trajectories]
  wrong = [t for t in made if t.error]
  if wrong:
    raise RuntimeError(f'episode {wrong[0].id} failed:\n{wrong[0].error}')
  tokens = np.concatenate([s.tokens for t in made for s in t.turns])
  live, ran = engine.stats.live_steps - live, engine.stats.slot_steps - ran
  return {
    **out,
    'tokens': len(tokens),
    'tokens_per_second': len(tokens) / out['seconds'],
    'occupancy': live / max(ran, 1),
    'waiting_seconds': stats.waiting_seconds,
    'checksum': zlib.crc32(tokens.tobytes()),
    'cut': sum(t.status is not Status.DONE for t in made),
  }
