"""Dynamic sampling: drawing on until enough groups teach something.

Floor 2. Groups in which all came out the same have no advantage. They are
left out, and others are drawn in their place, a bounded number of times. It
knows neither engine nor tasks: what a draw is, is given. Source: DAPO,
arXiv:2503.14476, section 3.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from agentjax.rl.normalize import together, varies
from agentjax.types import Group, Trajectory


@dataclasses.dataclass(frozen=True)
class Refilled:
  """What came of drawing on.

  Attributes:
    groups: those that teach, in the order in which they were drawn; no more
      than were wanted.
    draws: how many were made.
    left_out: the groups that teach nothing. surplus: those that do, and were
      not wanted any more.
  """

  groups: tuple[Group, ...]
  draws: int
  left_out: tuple[Group, ...]
  surplus: tuple[Group, ...]

  @property
  def collected(self) -> tuple[Group, ...]:
    """All that was drawn: what metrics and totals are to count."""
    return (*self.groups, *self.left_out, *self.surplus)


class NothingToLearn(RuntimeError):
  """No group taught anything in as many draws as were allowed."""


def outcome(trajectory: Trajectory) -> float:
  """1 for success, else 0: what tells the trajectories of a group apart.

  Not the reward: a length penalty would make a group of failures differ.
  """
  return float(trajectory.reward is not None and trajectory.reward.success)


def teaches(
  group: Group, metric: Callable[[Trajectory], float] = outcome
) -> bool:
  """Whether the outcomes in a group differ, by more than rounding.

  Among the trajectories that have a reward which says something of the
  policy; one alone has nobody to differ from.
  """
  told = [
    t for t in group.trajectories
    if t.status.reward_trustworthy and t.reward is not None
  ]  # fmt: skip
  if not told:
    return False
  label = together([True] * len(told))
  return bool(varies([metric(t) for t in told], label)[0])


def refill(
  draw: Callable[[], Sequence[Group]],
  *,
  wanted: int,
  most_draws: int = 10,
  keep: Callable[[Group], bool] = teaches,
) -> Refilled:
  """Draws until `wanted` groups are kept, at most `most_draws` times.

  With fewer kept than wanted the draw is short, which the caller sees and the
  learner can take: its weights do not depend on the number of groups.

  Raises:
    ValueError: bounds below 1.
    NothingToLearn: none was kept at all.
  """
  if min(wanted, most_draws) < 1:
    raise ValueError(
      f'wanted {wanted}, most_draws {most_draws}: give at least 1'
    )
  kept: list[Group] = []
  left_out: list[Group] = []
  draws = 0
  while len(kept) < wanted and draws < most_draws:
    draws += 1
    for group in draw():
      (kept if keep(group) else left_out).append(group)
  if not kept:
    raise NothingToLearn(
      f'{draws} draws of {len(left_out)} groups, and in each all came out the '
      'same: take tasks that are neither too easy nor too hard, larger groups, '
      'or more draws'
    )
  return Refilled(
    tuple(kept[:wanted]), draws, tuple(left_out), tuple(kept[wanted:])
  )


def refuse_short(refilled: Refilled, wanted: int) -> Refilled:
  """As the released code does: a short draw ends the run.

  Raises:
    NothingToLearn: it is short.
  """
  if len(refilled.groups) < wanted:
    raise NothingToLearn(
      f'{len(refilled.groups)} of {wanted} groups after {refilled.draws} draws'
    )
  return refilled
