"""DAPO's rules: how an answer is read and compared, as text.

Floor 1, env. The recipe compares strings after a normalization that comes
from Minerva (arXiv:2206.14858, appendix D.1) by way of public evaluation
code; nothing is computed, so that 0.5 is not 1/2. `released_...` is what the
code does, to the letter. The right thing for mathematics is
`equality.is_equal`. The length penalty and the choice of groups are in
`rl.shaping`.
"""

from __future__ import annotations

import dataclasses
import re

from agentjax.env.boxed import last_boxed

_ANSWER_LINE = re.compile(r'(?i)answer\s*:\s*([^\n]+)')
# What the code looks at: an answer further from the end is none.
RELEASED_TAIL = 300
RELEASED_BOX_TAIL = 100

# Order matters: blanks go after the articles and before what has none.
_REPLACED = (
  ('an ', ''),
  ('a ', ''),
  ('.$', '$'),
  ('\\$', ''),
  ('\\ ', ''),
  (' ', ''),
  ('mbox', 'text'),
  (',\\text{and}', ','),
  ('\\text{and}', ','),
  ('\\text{m}', '\\text{}'),
)
_REMOVED = (
  *'square ways integers dollars mph inches hours km units'.split(),
  '\\ldots',
  *'sue points feet minutes digits cents degrees cm gm pounds'.split(),
  *'meters meals edges students childrentickets multiples'.split(),
  '\\text{s}',
  '\\text{.}',
  '\\text{\ns}',
  '\\text{}^2',
  '\\text{}^3',
  '\\text{\n}',
  '\\text{}',
  '\\mathrm{th}',
  '^\\circ',
  '^{\\circ}',
  '\\;',
  ',\\!',
  '{,}',
  '"',
  '\\dots',
)
_REWRITTEN = (
  (re.compile(r'.*?\$(.*?)\$.*'), r'$\1$'),
  (re.compile(r'\\text\{(.*?)\}'), r'\1'),
  (re.compile(r'\\textbf\{(.*?)\}'), r'\1'),
  (re.compile(r'\\overline\{(.*?)\}'), r'\1'),
  (re.compile(r'\\boxed\{(.*)\}'), r'\1'),
  # \frac12 is \frac{1}{2}, \sqrt2 is \sqrt{2}.
  (re.compile(r'frac([^{])(.)'), r'frac{\1}{\2}'),
  (re.compile(r'sqrt([^{])'), r'sqrt{\1}'),
)


@dataclasses.dataclass(frozen=True)
class Verdict:
  """`answer` is None where the text has none."""

  right: bool
  answer: str | None


def normalize(answer: str) -> str:
  """Minerva's normal form: what follows the last '=', units and TeX removed."""
  text = answer.rsplit('=', 1)[-1]
  for old, new in _REPLACED:
    text = text.replace(old, new)
  for old in _REMOVED:
    text = text.replace(old, '')
  for pattern, new in _REWRITTEN:
    text = pattern.sub(new, text)
  text = text.replace('$', '')
  digits = text.replace(',', '')
  return (digits if digits.isdigit() else text).strip()


def answer_line(text: str, golden: str) -> Verdict:
  """The last line `Answer: ...` against the golden answer, normalized."""
  found = _ANSWER_LINE.findall(text)
  if not found:
    return Verdict(False, None)
  said = normalize(found[-1])
  return Verdict(said == normalize(golden), said)


def released_answer_line(text: str, golden: str) -> Verdict:
  """As the code does: in the last 300 characters; none is '[INVALID]'.

  So an answer that is not there equals a golden one of these letters.
  """
  found = _ANSWER_LINE.findall(text[-RELEASED_TAIL:])
  said = normalize(found[-1] if found else '[INVALID]')
  return Verdict(said == normalize(golden), said)


def released_box(text: str, golden: str) -> Verdict:
  """As the code does: a box in the last 100 characters, to the letter."""
  said = last_boxed(text[-RELEASED_TAIL:][-RELEASED_BOX_TAIL:])
  return Verdict(said is not None and said == golden, said)
