"""From a section of recorded vectors to our functions: see tests/vectors.py.

Every module here is named as the system whose file it reads, and has SECTIONS:
section -> function of one vector, which returns what is wrong, or ''. A map
chooses by section and arguments, never by case, and takes the form of our
functions that does what the released code does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Floats that a peer made in float32.
TOLERANCE = 1e-6


def differences(case: Mapping, ours: Mapping[str, Any]) -> str:
  """What of `ours` is not as the vector says, or ''.

  Raises:
    KeyError: the vector has no such output.
  """
  wrong = [
    f'{name}: {got!r}, wanted {case[name]!r}'
    for name, got in ours.items()
    if not same(got, case[name])
  ]
  return '; '.join(wrong)


def same(got: Any, want: Any) -> bool:
  """Equal, floats within `TOLERANCE`; a truth value is no number."""
  if isinstance(got, bool) or isinstance(want, bool):
    return got is want
  if isinstance(got, (int, float)) and isinstance(want, (int, float)):
    return math.isclose(got, want, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
  if isinstance(got, (list, tuple)) and isinstance(want, list):
    return len(got) == len(want) and all(map(same, got, want))
  return got == want
