"""ReTool's rules: what code is run, what an answer earns, what is imitated.

Floor 1, env. Text in, text out; nothing is run here. Where the paper
(arXiv:2504.11536) and its public recipe differ, each has a function of its
own: `released_...` is the recipe, to the letter.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence

from agentjax.env import dapo
from agentjax.types import Message, Reward, Task, ToolCall

TOOL = 'code_interpreter'
# What the recipe adds to a problem.
RELEASED_ANSWER_FORMAT = (
  "\nThe answer format must be: \\boxed{'The final answer goes here.'}"
)

_FENCE = re.compile(r'```python(.*?)```', re.DOTALL)

# ---- what code is run -------------------------------------------------------


def print_last(code: str) -> str:
  """`code` with its last statement printed, if that is an expression.

  As a notebook shows it: a statement that is no expression, a call of print,
  or None prints nothing. What Python cannot parse comes back as it is, for
  the sandbox to complain of.
  """
  try:
    tree = ast.parse(code)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return code
  last = tree.body[-1] if tree.body else None
  if not isinstance(last, ast.Expr) or _prints(last.value):
    return code
  lines = code.encode().splitlines(keepends=True)
  at, end = last.lineno - 1, last.end_lineno - 1
  before = b''.join(lines[:at]) + lines[at][: last.col_offset]
  after = lines[end][last.end_col_offset :] + b''.join(lines[end + 1 :])
  value = ast.get_source_segment(code, last.value)
  # Two brackets: a tuple is one argument, and may go over many lines.
  shown = f'(lambda v: None if v is None else print(v))((\n{value}\n))'
  return before.decode() + shown + after.decode()


def _prints(value: ast.expr) -> bool:
  return (
    isinstance(value, ast.Call)
    and isinstance(value.func, ast.Name)
    and value.func.id == 'print'
  )


def released_print_last(code: str) -> str:
  """As the recipe does: `print(...)` around the last line that is not empty.

  Unless it begins with 'print'. Assignments, indented lines and comments
  become syntax errors, which the policy then reads. Of code in fences, the
  first block alone.
  """
  fenced = _FENCE.search(code)
  lines = (fenced[1].strip() if fenced else code).split('\n')
  for i in reversed(range(len(lines))):
    if lines[i]:
      if not lines[i].startswith('print'):
        lines[i] = f'print({lines[i]})'
      break
  return '\n'.join(lines)


# ---- what an answer earns ---------------------------------------------------


def plus_minus_one(right: bool) -> float:
  """The paper's reward: 1 or -1, section 2.2; no reward for code that runs."""
  return 1.0 if right else -1.0


def signed(
  judge: Callable[[Task, str | None], bool],
) -> Callable[[Task, str | None], Reward]:
  """A `tool_environment.Judge` that pays 1 or -1; no answer is wrong."""

  def judged(task: Task, answer: str | None) -> Reward:
    right = bool(judge(task, answer))
    return Reward(plus_minus_one(right), right)

  return judged


def released_reward(right: bool, messages: int | None) -> float:
  """As the recipe does: a wrong answer is less wrong by the tools it used.

  `messages` counts those of the whole conversation: 2 without a call; None,
  where nobody counted, is 1. Wrong answers earn -1 and 0.05 more for each
  message beyond 2, at most -0.6.
  """
  if right:
    return 1.0
  messages = 1 if messages is None else messages
  return min(-0.6, -1.0 + (messages - 2) / 2 * 0.1)


def released_score(
  text: str, golden: str, messages: int | None
) -> tuple[float, dapo.Verdict]:
  """(reward, verdict) of the recipe, with its strict reading of the box."""
  verdict = dapo.released_box(text, golden)
  return released_reward(verdict.right, messages), verdict


# ---- what is imitated -------------------------------------------------------

_QUESTION = '*user question:*'


def parse_demonstration(messages: Sequence[Mapping]) -> list[Message]:
  """A row of ReTool-SFT as messages with calls of `code_interpreter`.

  `messages` are the row's two: the problem with instructions before it, and
  the solution with `<code>`, `<interpreter>` and `<answer>` in its text.

  Raises:
    ValueError: it is no such row; the message says what is missing.
  """
  if len(messages) != 2:
    raise ValueError(f'{len(messages)} messages, of a problem and a solution')
  _, found, problem = messages[0]['content'].partition(_QUESTION)
  if not found:
    raise ValueError(f'the problem has no {_QUESTION!r} before it')
  problem = problem.replace('<answer>', '').replace('</answer>', '').strip()
  out = [Message('user', problem)]
  rest = messages[1]['content']
  while rest:
    if '<code>' in rest:
      before, code, rest = _between(rest, 'code')
      fenced = _FENCE.search(code)
      code = fenced[1].strip() if fenced else code
      call = ToolCall(TOOL, {'code': code})
      out.append(Message('assistant', before.strip(), (call,)))
      if rest:
        _, said, rest = _between(rest, 'interpreter')
        out.append(Message('tool', said.strip(), name=TOOL))
    else:
      before, answer, rest = _between(rest, 'answer')
      out.append(Message('assistant', (before + answer).strip()))
      if rest.strip():
        raise ValueError(f'text follows the answer: {rest[:40]!r}')
      rest = ''
  return out


def _between(text: str, tag: str) -> tuple[str, str, str]:
  """(before, inside, after) of the first block of a tag."""
  before, opened, rest = text.partition(f'<{tag}>')
  inside, closed, after = rest.partition(f'</{tag}>')
  if not opened or not closed:
    raise ValueError(f'no whole <{tag}> in {text[:60]!r}')
  return before, inside, after
