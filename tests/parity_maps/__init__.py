"""Maps from public functions to ours, for `tests/parity.py`.

A module here has `FUNCTIONS`: the name of a public function, as the index
spells it, to a function of a `Case`. A map holds glue alone: it renames,
reshapes and chooses. It knows functions, arguments and sources, never the
names of cases; what it cannot express it refuses with `CannotMap`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np


class CannotMap(ValueError):
  """A case asks for what ours cannot express."""

  def __init__(self, what: str):
    super().__init__(f'cannot map: {what}')


@dataclasses.dataclass(frozen=True)
class Case:
  """One case of the index, with its arrays."""

  name: str
  source: str
  function: str
  args: Mapping[str, Any]
  inputs: Mapping[str, np.ndarray]
  expect: str = 'allclose'
  notes: str = ''


@dataclasses.dataclass(frozen=True)
class Result:
  """Ours, by the names of the case's outputs.

  `where` are masks of the entries that are compared; an output without one is
  compared throughout.
  """

  outputs: Mapping[str, Any]
  where: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


def check(
  case: Case, args: Collection[str] = (), inputs: Collection[str] = ()
) -> None:
  """Refuses arguments and arrays that are not among these.

  Raises:
    CannotMap: there is another.
  """
  for kind, known, given in (
    ('argument', args, case.args),
    ('input', inputs, case.inputs),
  ):
    if surplus := sorted(set(given) - set(known)):
      raise CannotMap(f'{case.function} with {kind} {surplus}')
