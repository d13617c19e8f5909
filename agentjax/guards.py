"""What ends a run that would only go on for show.

Floor 3, under `run`. Each guard raises with the reason and the remedy, after
the step is recorded and before it is saved: the checkpoint before it stands.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentjax import credit
from agentjax.evaluate import failure_rate
from agentjax.training import Diverged, TooManyFailures
from agentjax.types import Group

# A batch or two whose update is not finite can be survived. With so many in a
# row nothing is learned any more, and no later batch will change that: the
# weights that they are made with stay the same.
SKIPPED_IN_A_ROW = 5


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
