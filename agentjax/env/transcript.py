"""What was said in an episode, and by whom: what a reward may look at.

Floor 1, env. Rewards of search and of code are functions of this record. It
keeps the policy's words apart from everybody else's, so that a reward that
reads the policy's own text cannot read a passage by accident.
"""

from __future__ import annotations

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class Transcript:
  """An episode as text.

  Attributes:
    prompt: what the policy read first.
    turns: what it wrote, in order.
    observations: what it read after each of them but the last, as it is laid
      out; after the last one too, where a limit ended the episode.
    answer: its final answer, or None.
    searches, invalid: how many turns searched; how many could not be read.
  """

  prompt: str = ''
  turns: tuple[str, ...] = ()
  observations: tuple[str, ...] = ()
  answer: str | None = None
  searches: int = 0
  invalid: int = 0

  def text(self) -> str:
    """Everything in order: what a reward must not read, and some do."""
    said = itertools.zip_longest(self.turns, self.observations, fillvalue='')
    return self.prompt + ''.join(itertools.chain.from_iterable(said))
