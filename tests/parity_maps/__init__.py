"""What maps a case of a golden index to functions of ours: see tests/parity.py.

Every module here that has FUNCTIONS, a dict of maps, is found by the runner.
Its keys are the index's "function", or `function@project` where several
projects have a function of that name: `project` is a part of the case's
source, and decides over a bare name. A map renames, reshapes and chooses; the
mathematics is the package's. It says what it cannot express (`CannotMap`).
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np


class CannotMap(ValueError):
  """A case asks for what our mathematics has no switch for."""

  def __init__(self, what: str):
    super().__init__(f'cannot map: {what}')


@dataclasses.dataclass(frozen=True)
class Case:
  """One case of an index.

  Attributes:
    inputs, expected: the arrays in_* and out_* of its file, without prefix.
    expect: how to compare, such as allclose. See `parity.check`.
  """

  name: str
  source: str
  function: str
  args: Mapping[str, Any]
  inputs: Mapping[str, np.ndarray]
  expected: Mapping[str, np.ndarray]
  expect: str = 'allclose'
  notes: str = ''

  def options(self, **defaults) -> types.SimpleNamespace:
    """The args over these defaults; one that is not among them is refused."""
    check(self, defaults, self.inputs)
    return types.SimpleNamespace(**defaults | dict(self.args))

  def take(self, *names: str) -> list[np.ndarray]:
    """Inputs by name; all others must be none."""
    check(self, self.args, names)
    return [self.inputs.get(name) for name in names]


@dataclasses.dataclass
class Result:
  """What ours gives for a case.

  Attributes:
    outputs: by the names of the case's expected outputs.
    where: entries that are compared, by name; all by default.
    ignored: name -> why an expected output is not ours to give.
    switched: where `expect` says that we must differ, or a row of B2 decides
      against the peer: what ours gives with the switch that reproduces it.
    row: the number of that row.
    rtol: name -> a relative tolerance of its own, where digits are lost.
  """

  outputs: Mapping[str, Any]
  where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  ignored: Mapping[str, str] = dataclasses.field(default_factory=dict)
  switched: Mapping[str, Any] | None = None
  row: int | None = None
  rtol: Mapping[str, float] = dataclasses.field(default_factory=dict)


def check(
  case: Case, args: Collection[str] = (), inputs: Collection[str] = ()
) -> None:
  """Refuses args and inputs of a case that are not among these.

  Raises:
    CannotMap: there is another.
  """
  for kind, known, given in (
    ('args', args, case.args),
    ('inputs', inputs, case.inputs),
  ):
    if unknown := sorted(set(given) - set(known)):
      raise CannotMap(f'{kind} {unknown} of {case.function}')
