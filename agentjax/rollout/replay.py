"""A recorded trajectory run again: the same observations and the same reward.

Floor 2, rollout/. The environment is made anew and acts on the turns that the
policy wrote then; its sandboxes are those of the record, so that no engine is
needed (design promise 5). Nothing is sampled. What comes out otherwise is
listed, never raised. This file reads no workdir and knows no sandbox backend.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import traceback
from collections.abc import Callable
from typing import Any

from agentjax.env.base import Environment, InfraError
from agentjax.env.sandbox.replay import ReplayingOpener
from agentjax.rollout.episode import (
  Act,
  Chat,
  Limits,
  Reset,
  episode,
)
from agentjax.types import Reward, Status, Trajectory

_CUT_OFF = (Status.INFRA_FAILURE, Status.ENVIRONMENT_ERROR, Status.ABORTED)


class NotReplayable(Exception):
  """The environment cannot be given the sandboxes of a record."""


@dataclasses.dataclass(frozen=True)
class Difference:
  """What came out otherwise; `where` is a segment, a turn or the reward."""

  where: str
  expected: Any
  got: Any

  def __str__(self) -> str:
    return f'{self.where}: {self.expected!r} -> {self.got!r}'


def replay(
  trajectory: Trajectory,
  make_environment: Callable[..., Environment],
  chat: Chat,
  limits: Limits,
) -> tuple[Difference, ...]:
  """What differs where a trajectory is run again; nothing if nothing does.

  Compared are the tokens of every segment (observations are what the policy
  read of them), the rewards and state keys of the turns, the status and the
  reward. A trajectory that was cut off by a failure is compared up to there.

  Args:
    make_environment: as in `collect`. Where the trajectory has sandboxes, it
      takes `open_sandbox`, which opens them.
    chat, limits: as when it was collected.

  Raises:
    NotReplayable: the environment takes no `open_sandbox`, and sandboxes were
      recorded.
  """
  opener = ReplayingOpener(trajectory.sandboxes)
  if trajectory.sandboxes or _takes_opener(make_environment):
    if not _takes_opener(make_environment):
      raise NotReplayable(
        f'{make_environment} takes no open_sandbox, but {trajectory.id} used '
        f'{len(trajectory.sandboxes)} sandboxes: its function needs this '
        'argument for a replay'
      )
    environment = make_environment(open_sandbox=opener)
  else:
    environment = make_environment()
  with contextlib.closing(environment):
    again, error = _run(trajectory, environment, chat, limits)
  found = list(_compared(trajectory, again))
  if error is not None and trajectory.error is None:
    found.append(Difference('error', None, error))
  left = [s.left for s in opener.opened if s.left]
  if left and trajectory.error is None:
    found.append(Difference('calls that were not made again', 0, sum(left)))
  return tuple(found)


def _run(
  trajectory, environment, chat, limits
) -> tuple[Trajectory, str | None]:
  """(the trajectory as it comes out, what was raised) of the recorded turns."""
  blank = dataclasses.replace(
    trajectory, segments=(), status=Status.RUNNING, reward=None,
    turn_rewards=(), state_keys=(), error=None,
  )  # fmt: skip
  loop = episode(chat, limits, blank)
  again, request = blank, next(loop)
  try:
    while True:
      again = request.trajectory
      if isinstance(request, Reset):
        answer = environment.reset(request.task)
      elif isinstance(request, Act):
        answer = environment.step(request.turn)
      elif len(again.turns) < len(trajectory.turns):
        answer = trajectory.turns[len(again.turns)]
      else:
        return again, None  # it was cut off here
      try:
        request = loop.send(answer)
      except StopIteration as stop:
        again = stop.value
        break
    if again.status.reward_trustworthy:
      again = again.append(reward=environment.verify(again.status))
    return again, None
  except InfraError:
    return again.append(status=Status.INFRA_FAILURE), traceback.format_exc()
  except Exception:
    return again.append(status=Status.ENVIRONMENT_ERROR), traceback.format_exc()
  finally:
    loop.close()


def _compared(was: Trajectory, now: Trajectory):
  """The differences of two trajectories of the same turns."""
  for i, (a, b) in enumerate(zip(was.segments, now.segments, strict=False)):
    if a.source is not b.source or a.tokens.tobytes() != b.tokens.tobytes():
      yield Difference(f'segment {i}', _shown(a), _shown(b))
  pairs = {
    'segments': (len(was.segments), len(now.segments)),
    'turn_rewards': (was.turn_rewards, now.turn_rewards),
    'state_keys': (was.state_keys, now.state_keys),
    'reward': (_plain(was.reward), _plain(now.reward)),
  }
  # One that was cut off does not say how it would have ended.
  if now.status is not Status.RUNNING or was.status not in _CUT_OFF:
    pairs['status'] = (was.status.value, now.status.value)
  for where, (a, b) in pairs.items():
    if a != b:
      yield Difference(where, a, b)


def _shown(segment) -> str:
  name = segment.source.value
  return f'{name} {segment.tokens.tolist()}'


def _plain(reward: Reward | None) -> Any:
  return None if reward is None else dataclasses.asdict(reward)


def _takes_opener(make_environment: Callable[..., Environment]) -> bool:
  parameters = inspect.signature(make_environment).parameters
  return 'open_sandbox' in parameters
