"""Mathematical equality of answers, decided apart from the process that asks.

Floor 1, env. `equal` is the mathematics (by `math-verify`, of the extra
`data`) and runs in worker processes; `Equality` asks it within a budget. An
answer that cannot be decided in the budget is not equal: the policy wrote it.
"""

from __future__ import annotations

import functools

from agentjax.env.apart import Apart, Exhausted
from agentjax.env.boxed import last_boxed
from agentjax.types import Task

MAX_CHARS = 500


class Equality:
  """Judges answers; an argument of `ToolEnvironment`. Safe to use from many
  threads. `exhausted` counts the answers that used the budget up.

  Args:
    apart: where `equal` runs; by default two workers of 5 processor seconds.
  """

  def __init__(self, apart: Apart | None = None):
    self._apart = apart or Apart(
      'agentjax.env.equality:equal', imports=['math_verify']
    )
    self.exhausted = 0

  def __call__(self, answer: str | None, golden: str) -> bool:
    """Whether `answer`, or the last box in it, is the number or the
    expression `golden`.

    Raises:
      InfraError: it cannot be asked.
      ValueError: `golden` is empty, so that nothing may be right.
    """
    if not golden.strip():
      raise ValueError('the golden answer is empty: correct the task')
    said = stated(answer)
    if said is None:
      return False
    if said == golden.strip():
      return True
    try:
      return self._apart(said, golden)
    except Exhausted:
      self.exhausted += 1
      return False

  def judge(self, task: Task, answer: str | None) -> bool:
    """See `tool_environment.Judge`; the golden one is `verify['answer']`."""
    return self(answer, str(task.verify['answer']))

  def close(self) -> None:
    """Ends the workers. Idempotent, never raises."""
    self._apart.close()


def stated(answer: str | None) -> str | None:
  """What an answer states: the last box in it, else all of it.

  Without the quotes that ReTool's prompt shows, blanks and a full stop around
  it; None if nothing is left or it is longer than `MAX_CHARS`.
  """
  if answer is None:
    return None
  inside = last_boxed(answer)
  text = answer if inside is None else inside
  text = text.strip().removesuffix('.').strip()
  if len(text) > 1 and text[0] == text[-1] and text[0] in '\'"':
    text = text[1:-1].strip()
  return text if 0 < len(text) <= MAX_CHARS else None


def equal(answer: str, golden: str) -> bool:
  """Whether two LaTeX expressions are equal. Runs in a worker.

  An expression that only names what is to be computed (a sum, an integral, a
  limit that is not carried out) is no answer.
  """
  import sympy
  from math_verify import verify

  wanted, said = _parse(golden), _parse(answer)
  undone = (
    sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative,
    sympy.Mod,
  )  # fmt: skip
  if any(getattr(x, 'has', lambda *_: False)(*undone) for x in said):
    return False
  return bool(verify(wanted, said, timeout_seconds=None))


@functools.cache
def _configured():
  import logging

  from math_verify import LatexExtractionConfig

  logging.disable(logging.CRITICAL)  # it reports each text that is no LaTeX
  return [LatexExtractionConfig(boxed_match_priority=0)]


def _parse(text: str) -> list:
  from math_verify import parse

  return parse(
    f'\\boxed{{{text}}}',
    _configured(),
    fallback_mode='no_fallback',
    parsing_timeout=None,
  )
