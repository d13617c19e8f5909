"""The last boxed expression of a LaTeX text.

Floor 1, env; under the rules of mathematics (`dapo`, `retool`) and under
mathematical equality. Text in, text out; nothing is evaluated.
"""

from __future__ import annotations

_OPENING = '\\boxed{'


def last_boxed(text: str) -> str | None:
  """What stands in the last `\\boxed{...}`, as it stands there.

  None where there is none or its braces do not close: an earlier one is not
  taken in its place.
  """
  start = text.rfind(_OPENING)
  if start < 0:
    return None
  start += len(_OPENING)
  depth = 1
  for end in range(start, len(text)):
    depth += (text[end] == '{') - (text[end] == '}')
    if depth == 0:
      return text[start:end]
  return None
