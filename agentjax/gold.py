"""How likely the policy holds the right answer, at each state of a trajectory.

Floor 3, under `credit`. The answer is put behind each state as if the policy
had said it, and the learner scores it: one packed pass a draw, no gradient.
What this is for is `rl.turns.igpo`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from agentjax.learner import Learner
from agentjax.rl import batch as packing
from agentjax.rollout.branches import cut
from agentjax.text.chat import Chat
from agentjax.types import Segment, Source, Stop, Task, Trajectory


def verified(task: Task) -> str:
  """The answer that a task's verifier is told, `verify['answer']`."""
  if 'answer' not in task.verify:
    raise ValueError(
      f'task {task.id!r} has no answer in its verify, which has '
      f'{sorted(task.verify)}: give gold_answer a function of your own'
    )
  return str(task.verify['answer'])


def answer_probs(
  trajectories: Sequence[Trajectory],
  *,
  answer: Callable[[Task], str],
  chat: Chat,
  learner: Learner,
  params: Any,
  temperature: float,
) -> list[np.ndarray]:
  """float64[K] of each trajectory: exp(mean log-prob of the answer's tokens).

  Before each turn. Where the answer does not fit behind a state, it is what it
  was before (0 at first). Source: IGPO, arXiv:2510.14967, eq. 3.
  """
  said, whose = [], []
  for i, t in enumerate(trajectories):
    spoken = chat.render_turn(answer=answer(t.task))
    for k, turn in enumerate(t.turns):
      if len(turn):
        made = _with_answer(cut(t, k, 0), chat.forced, spoken)
        whose.append((i, None if len(made) > learner.length else len(said)))
        said += [] if whose[-1][1] is None else [made]
  weights = [_answer_alone(t) for t in said]
  at = packing.places(said, rows=learner.rows, length=learner.length)
  batch = packing.pack(
    said, [0.0] * len(said), rows=learner.rows, length=learner.length,
    temperature=temperature, weights=weights, at=at, kept=learner.kept,
  )  # fmt: skip
  found = packing.unpack(learner.logprobs(params, batch), at)
  out: list[list[float]] = [[] for _ in trajectories]
  for i, place in whose:
    p = out[i][-1] if out[i] else 0.0
    if place is not None:
      p = float(np.exp(found[place][weights[place] > 0].mean()))
    out[i].append(p)
  return [np.array(p) for p in out]


def _with_answer(past: Trajectory, forced, tokens) -> Trajectory:
  if len(forced):
    past = past.append(Segment(Source.FORCED, forced))
  zeros = np.zeros(len(tokens))
  return past.append(
    Segment(
      Source.MODEL, tokens, zeros, zeros, zeros, zeros - 1,
      stop=Stop.END_OF_TURN,
    )
  )  # fmt: skip


def _answer_alone(trajectory: Trajectory) -> np.ndarray:
  """1 at the tokens of the last segment."""
  n = len(trajectory.segments[-1])
  weights = np.zeros(len(trajectory))
  weights[-n:] = 1.0
  return weights
