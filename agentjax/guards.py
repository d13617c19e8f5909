"""What ends a run that would only go on for show.

Floor 3, under `run`. Each guard raises with the reason and the remedy, after
the step is recorded and before it is saved: the checkpoint before it stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from agentjax import credit
from agentjax.evaluate import failure_rate
from agentjax.training import Diverged, TooManyFailures
from agentjax.types import Group, Status

# A batch or two whose update is not finite can be survived. With so many in a
# row nothing is learned any more, and no later batch will change that: the
# weights that they are made with stay the same.
SKIPPED_IN_A_ROW = 5

# A draw may lose a few trajectories to a bad minute. Over so many steps it is
# no bad minute, and what is lost is not lost at random: what is slow, or big.
MASKED_STEPS = 20


def stop_if_failing(groups: Sequence[Group], most: float) -> None:
  """Raises TooManyFailures where the rate of failures is above `most`."""
  rate = failure_rate(groups)
  if rate > most:
    errors = [t.error for t in credit.members(groups) if t.error]
    raise TooManyFailures(
      f'{rate:.0%} of the trajectories failed by infrastructure or '
      f'environment, more than max_failure_rate {most:.0%}; the first one:\n'
      f'{errors[0]}'
    )


def stop_if_diverged(skipped: int, step: int, kept: int | None) -> None:
  """Raises Diverged where the last `skipped` updates are too many.

  `kept` is the step of the newest checkpoint, if there is one.
  """
  if skipped < SKIPPED_IN_A_ROW:
    return
  stands = 'there is no checkpoint yet'
  if kept is not None:
    stands = f'the checkpoint of step {kept} stands'
  raise Diverged(
    f'the last {skipped} updates up to step {step} were skipped, as their '
    'gradients or the new weights were not finite: lower the learning rate or '
    f'look for what is not finite in the loss; {stands}'
  )


class Masking:
  """Watches how many trajectories infrastructure takes out of the loss.

  It begins anew with the process: who has put things right goes on.
  """

  def __init__(self, most: float):
    self.most = most
    self._counts: deque[tuple[int, int]] = deque(maxlen=MASKED_STEPS)

  def alarm(self, groups: Sequence[Group], step: int) -> TooManyFailures | None:
    """What to stop the run with, if it is to be stopped after this draw.

    Unlike a draw that failed as such, this one has taught what it should: the
    step is to be saved before.
    """
    members = credit.members(groups)
    lost = [t for t in members if t.status is Status.INFRA_FAILURE]
    self._counts.append((len(lost), len(members)))
    masked, total = (sum(c) for c in zip(*self._counts, strict=True))
    rate = masked / max(1, total)
    if len(self._counts) < MASKED_STEPS or rate <= self.most:
      return None
    said = f'; the last one:\n{lost[-1].error}' if lost else ''
    return TooManyFailures(
      f'{rate:.1%} of the trajectories of the last {MASKED_STEPS} steps were '
      f'masked, as infrastructure failed, more than max_mask_rate '
      f'{self.most:.1%}: put it right, or raise max_mask_rate; step {step} is '
      f'saved, and the same command goes on from there{said}'
    )
