"""A chat over the tiny model's ids whose turns are programs to run.

Random turns so become calls of a Python tool, and what it says comes back as
ids: two a byte, so that no two texts are the same.
"""

from __future__ import annotations

import numpy as np
from fakes import IdChat

from agentjax.types import ToolCall, Turn, Verdict

# `open` in append mode: what is run twice shows.
PROGRAMS = (
  'open("log", "a").write("x"); print(open("log").read())',
  'print({n} * 7)',
  'open("log", "a").write("y"); 1/0',
  'import sys; sys.stdout.buffer.write(b"\\xff{n}")',
  'import os; os.abort()',
  'print(len(open("log").read()))',
)


class CodeChat(IdChat):
  """Turns whose ids add up to a multiple of 9 answer, the others call."""

  def parse_turn(self, tokens, stop):
    if stop.is_limit:
      return Turn('', Verdict.TRUNCATED)
    n = int(np.sum(tokens))
    if n % 9 == 0:
      return Turn(str(n), Verdict.ANSWER, answer=str(n))
    code = PROGRAMS[n % len(PROGRAMS)].format(n=n)
    call = ToolCall('python', {'code': code})
    return Turn(str(n), Verdict.CALLS, calls=(call,))

  def render_observation(self, observations, closed, budget=None):
    data = b'|'.join(o.body.encode() for o in observations)
    ids = [2 + half for byte in data for half in divmod(byte, 16)]
    return np.array(ids[:budget], np.int32)
