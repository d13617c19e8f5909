"""Call syntaxes: how a policy writes tool calls and reads their results.

Floor 1, text/. A syntax is data and four small functions, and goes with any
frame: it offers tools to the policy, writes calls (for histories and
supervised data), lays out results, and reads what a policy wrote. Reading is
total: any text gives a `Reading`, nothing raises and nothing is evaluated.
This file knows no frame and no tokens.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from agentjax.types import Message, ToolCall, ToolSpec, Verdict


@dataclasses.dataclass(frozen=True)
class Reading:
  """What a syntax finds in a text without thoughts.

  Attributes:
    calls: those that are whole, in order.
    rest: the text outside of calls, or the final answer where the syntax
      marks it; None if there is none.
    problem: what is wrong with the first call that cannot be read.
    open: the text breaks off inside of that call.
    finished: a call or a marked answer was closed.
  """

  calls: tuple[ToolCall, ...] = ()
  rest: str | None = None
  problem: str | None = None
  open: bool = False
  finished: bool = False

  def verdict(self, limited: bool) -> Verdict:
    """`limited`: a limit, not the policy, ended the turn."""
    if self.problem is not None:
      cut = limited and self.open
      return Verdict.TRUNCATED if cut else Verdict.MALFORMED
    if self.calls:
      return Verdict.CALLS
    if limited and not self.finished:
      return Verdict.TRUNCATED
    return Verdict.ANSWER


@dataclasses.dataclass(frozen=True)
class CallSyntax:
  """How calls are written and results are read.

  Attributes:
    offer: (messages, tools) to messages that tell the policy of the tools.
    write: the text of an assistant message with its calls.
    results: a run of tool messages to (role, text) turns.
    read: a text to what it holds.
    inline: results stand inside the assistant's turn (as the text of the one
      turn of `results`), not between turns.
    stop_strings: at which sampling halts.
    opener: where a call or a marked answer may begin; what comes before may
      be a thought.
    markers: strings that the vocabulary must treat as text.
    answer: marks a final answer; as it is where the syntax has no mark.
  """

  offer: Callable[[Sequence[Message], Sequence[ToolSpec]], list[Message]]
  write: Callable[[Message], str]
  results: Callable[[Sequence[Message]], list[tuple[str, str]]]
  read: Callable[[str], Reading]
  inline: bool = False
  stop_strings: tuple[str, ...] = ()
  opener: re.Pattern = re.compile(r'(?!)')
  markers: tuple[str, ...] = ()
  answer: Callable[[str], str] = str


def to_json(value: Any, indent: int | None = None) -> str:
  """As public templates print JSON: every character as itself."""
  return json.dumps(value, ensure_ascii=False, indent=indent)


def tool_json(tool: ToolSpec, indent: int | None = None) -> str:
  """The schema of a tool as public templates print it."""
  function = {
    'name': tool.name,
    'description': tool.description,
    'parameters': tool.parameters,
  }
  return to_json({'type': 'function', 'function': function}, indent)


def _some(text: str) -> str | None:
  return text.strip() or None


# ---- reading JSON that nobody vouches for ---------------------------------


def _refuse_constant(name: str):
  raise ValueError(f'{name} is not JSON')


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f'the number {text[:20]} is too large')
  return value


_DECODER = json.JSONDecoder(
  parse_constant=_refuse_constant, parse_float=_finite
)


class _NotJson(ValueError):
  """The text is not JSON, or breaks off before it is."""


def _read_json(text: str, start: int) -> tuple[Any, int]:
  """The JSON value at `start` and where it ends.

  Raises:
    _NotJson: there is none.
    ValueError: it could not be written back as UTF-8.
  """
  try:
    value, end = _DECODER.raw_decode(text, start)
    to_json(value).encode()
  except json.JSONDecodeError as e:
    raise _NotJson(f'{e.msg} at character {e.pos - start}') from e
  except UnicodeEncodeError as e:
    raise ValueError('a string holds half of a surrogate pair') from e
  except RecursionError as e:
    raise ValueError('it is nested too deeply') from e
  return value, end


def _as_call(value: Any, key: str) -> ToolCall:
  """
  Raises:
    ValueError: `value` is not a call with its arguments under `key`.
  """
  if not isinstance(value, dict):
    raise ValueError('a call is a JSON object')
  name, arguments = value.get('name'), value.get(key)
  if not isinstance(name, str) or not name:
    raise ValueError('a call needs "name", a non-empty string')
  if not isinstance(arguments, dict):
    raise ValueError(f'a call needs "{key}", a JSON object')
  return ToolCall(name, arguments)


def _skip_space(text: str, start: int) -> int:
  while start < len(text) and text[start] in ' \t\r\n':
    start += 1
  return start


# ---- none -----------------------------------------------------------------


def _own_turns(messages: Sequence[Message]) -> list[tuple[str, str]]:
  return [('tool', m.content) for m in messages]


def _no_calls(message: Message) -> str:
  if message.tool_calls:
    raise ValueError(
      f'a call of {message.tool_calls[0].name!r} cannot be written in a format '
      'without tools: choose one with a call syntax, or formats.with_tags'
    )
  return message.content


# Templates without tools: tools are not told, and a tool message passes
# through as a turn of that name.
NONE = CallSyntax(
  offer=lambda messages, tools: list(messages),
  write=_no_calls,
  results=_own_turns,
  read=lambda text: Reading(rest=_some(text)),
)


# ---- Hermes ---------------------------------------------------------------

_OPEN, _CLOSE = '<tool_call>', '</tool_call>'
_HERMES_TOOLS = (
  '# Tools\n\nYou may call one or more functions to assist with the user '
  'query.\n\nYou are provided with function signatures within <tools></tools> '
  'XML tags:\n<tools>{tools}\n</tools>\n\nFor each function call, return a '
  'json object with function name and arguments within <tool_call>'
  '</tool_call> XML tags:\n<tool_call>\n{{"name": <function-name>, '
  '"arguments": <args-json-object>}}\n</tool_call>'
)


def _hermes_offer(messages, tools):
  """Puts the tools behind the system message, or makes one of them."""
  if not tools:
    return list(messages)
  listed = ''.join('\n' + tool_json(t) for t in tools)
  block = _HERMES_TOOLS.format(tools=listed)
  if not messages or messages[0].role != 'system':
    return [Message('system', block), *messages]
  system, *rest = messages
  return [Message('system', f'{system.content}\n\n{block}'), *rest]


def _hermes_write(message: Message) -> str:
  calls = [
    f'{_OPEN}\n{{"name": "{c.name}", "arguments": {to_json(c.arguments)}}}\n'
    f'{_CLOSE}'
    for c in message.tool_calls
  ]
  content = [message.content] if message.content else []
  return '\n'.join([*content, *calls])


def _hermes_results(messages):
  shown = [f'<tool_response>\n{m.content}\n</tool_response>' for m in messages]
  return [('user', '\n'.join(shown))]


def _hermes_read(text: str) -> Reading:
  calls, outside, position = [], [], 0
  problem, is_open = None, False
  while problem is None:
    start = text.find(_OPEN, position)
    before = text[position : start if start >= 0 else len(text)]
    outside.append(before)
    if _CLOSE in before:
      problem = f'{_CLOSE} without {_OPEN} before it'
    if start < 0 or problem:
      break
    inner = _skip_space(text, start + len(_OPEN))
    try:
      # The decoder says where the object ends, so a closing tag inside of a
      # string argument is only a string.
      value, end = _read_json(text, inner)
      end = _skip_space(text, end)
      if not text.startswith(_CLOSE, end):
        is_open = _CLOSE.startswith(text[end:])
        raise ValueError(f'{_CLOSE} must follow the JSON object')
      calls.append(_as_call(value, 'arguments'))
    except ValueError as e:
      problem = f'tool call {len(calls) + 1} cannot be read: {e}'
      is_open = is_open or (
        _CLOSE not in text[inner:] or str(e).count('Unterminated string') > 0
      )
      break
    position = end + len(_CLOSE)
  rest = _some(''.join(outside))
  return Reading(tuple(calls), rest, problem, is_open, bool(calls))


HERMES = CallSyntax(
  offer=_hermes_offer,
  write=_hermes_write,
  results=_hermes_results,
  read=_hermes_read,
  opener=re.compile(re.escape(_OPEN)),
  markers=(_OPEN, _CLOSE),
)


# ---- Llama 3.1 JSON -------------------------------------------------------

_LLAMA_TOOLS = (
  'Given the following functions, please respond with a JSON for a function '
  'call with its proper arguments that best answers the given prompt.\n\n'
  'Respond in the format {"name": function name, "parameters": dictionary of '
  'argument name and its value}.Do not use variables.\n\n'
)


def _llama_offer(messages, tools):
  """Puts the tools in front of the first message after the system's.

  `messages` begins with a system message: that of the template.
  """
  if not tools:
    return list(messages)
  if len(messages) < 2:
    raise ValueError(
      'this template tells tools in the first user message, and the '
      'conversation has none: add one'
    )
  system, first, *rest = messages
  listed = ''.join(tool_json(t, indent=4) + '\n\n' for t in tools)
  content = _LLAMA_TOOLS + listed + first.content.strip()
  told = Message('system', f'Environment: ipython\n{system.content}')
  return [told, Message('user', content), *rest]


def _llama_write(message: Message) -> str:
  if not message.tool_calls:
    return message.content
  if len(message.tool_calls) > 1:
    raise ValueError(
      f'an assistant message has {len(message.tool_calls)} tool calls, and '
      'this template knows single ones: write one call a message'
    )
  call = message.tool_calls[0]
  arguments = to_json(call.arguments)
  return (
    f'{message.content}{{"name": "{call.name}", "parameters": {arguments}}}'
  )


def _llama_results(messages):
  return [('ipython', to_json(m.content)) for m in messages]


# A call, or text that begins as an object does: a set or a formula in braces
# is neither.
_CALL_BEGINS = re.compile(
  r'\A\s*\{(?=\s*(?:"|\Z))|\{(?=\s*"(?:name|parameters|arguments)"\s*:)'
)


def _llama_read(text: str) -> Reading:
  calls, outside, position = [], [], 0
  problem, is_open = None, False
  while found := _CALL_BEGINS.search(text, position):
    start = found.end() - 1
    outside.append(text[position:start])
    try:
      value, position = _read_json(text, start)
      if not {'name', 'parameters', 'arguments'} & set(value):
        outside.append(text[start:position])  # JSON, but no call
        continue
      if text.startswith(('}', ']'), _skip_space(text, position)):
        raise ValueError('a closing bracket too many follows it')
      # The format says parameters; a model trained on others may not.
      key = 'arguments' if 'arguments' in value else 'parameters'
      calls.append(_as_call(value, key))
    except ValueError as e:
      problem = f'tool call {len(calls) + 1} cannot be read: {e}'
      is_open = isinstance(e, _NotJson)
      position = len(text)
      break
  outside.append(text[position:])
  rest = ''.join(outside)
  rest = rest.strip().strip(';') if calls else rest  # parallel calls: a; b
  return Reading(tuple(calls), _some(rest), problem, is_open, bool(calls))


LLAMA_JSON = CallSyntax(
  offer=_llama_offer,
  write=_llama_write,
  results=_llama_results,
  read=_llama_read,
  opener=_CALL_BEGINS,
)
