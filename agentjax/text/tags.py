"""Plain tags: the call syntax of Search-R1, ReTool and the quickstart.

Floor 1, text/, beside `calls.py`. A tag is a tool: `<search>who?</search>`
calls it with one argument, the result follows in tags of its own, and the
policy goes on in the same turn. Sampling halts at the closing tags. This file
knows no frame and no tokens.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from agentjax.text.calls import CallSyntax, Reading
from agentjax.types import Message, ToolCall


@dataclasses.dataclass(frozen=True)
class Tag:
  """One tool as a tag.

  Attributes:
    tool: the tool's name. argument: the one that the tag's text becomes.
    head, tail: what stands before and after a result.
    fenced: the text is code and may stand in a Markdown fence; what is passed
      on is the last fenced block.
  """

  tool: str
  argument: str
  head: str
  tail: str
  fenced: bool = False


def syntax(tags: Mapping[str, Tag], answer: str | None) -> CallSyntax:
  """The call syntax of `tags`, with the final answer in a tag `answer`.

  Where `answer` is given, a turn without that tag has no answer (None): what
  it says is for the environment to judge. A result is wrapped as the tool
  that its message names; one without a name as the first tool's; any other
  name stands for bare text, put in as it is.

  Raises:
    ValueError: there are no tags, or the answer's tag is a tool's.
  """
  if not tags or answer in tags:
    raise ValueError(
      f'tags {sorted(tags)} with answer {answer!r}: give one tag a tool at '
      'least, and the answer a tag of its own'
    )
  names = [*tags, *([answer] if answer else [])]
  marker = re.compile('<(/?)(' + '|'.join(map(re.escape, names)) + ')>')
  closing = tuple(f'</{n}>' for n in names)
  return CallSyntax(
    offer=lambda messages, tools: list(messages),
    write=lambda message: _write(tags, message),
    results=lambda messages: _results(tags, messages),
    read=lambda text: _read(tags, answer, marker, text),
    inline=True,
    stop_strings=closing,
    opener=re.compile('<(?:' + '|'.join(map(re.escape, names)) + ')>'),
    markers=(*(f'<{n}>' for n in names), *closing),
    answer=lambda text: f'<{answer}>{text}</{answer}>' if answer else text,
  )


def _write(tags: Mapping[str, Tag], message: Message) -> str:
  by_tool = {t.tool: (name, t) for name, t in tags.items()}
  text = message.content
  for call in message.tool_calls:
    if call.name not in by_tool:
      raise ValueError(
        f'tool {call.name!r} has no tag: there are tags for {sorted(by_tool)}'
      )
    name, tag = by_tool[call.name]
    if set(call.arguments) != {tag.argument}:
      raise ValueError(
        f'a call of {call.name!r} in a tag has the argument {tag.argument!r} '
        f'alone, not {sorted(call.arguments)}'
      )
    text += f'<{name}>{call.arguments[tag.argument]}</{name}>'
  return text


def _results(
  tags: Mapping[str, Tag], messages: Sequence[Message]
) -> list[tuple[str, str]]:
  by_tool = {t.tool: t for t in tags.values()}
  first = next(iter(tags.values()))
  shown = []
  for m in messages:
    tag = first if m.name is None else by_tool.get(m.name)
    shown.append(f'{tag.head}{m.content}{tag.tail}' if tag else m.content)
  return [('user', ''.join(shown))]


def _read(
  tags: Mapping[str, Tag], answer: str | None, marker: re.Pattern, text: str
) -> Reading:
  calls, outside, position = [], [], 0
  while found := marker.search(text, position):
    outside.append(text[position : found.start()])
    slash, name = found.groups()
    end = text.find(f'</{name}>', found.end())
    inner = text[found.end() : end]
    problem = None
    if slash:
      problem = f'</{name}> without <{name}> before it'
    elif end < 0:
      problem = f'<{name}> is not closed'
    elif f'<{name}>' in inner:
      problem = f'<{name}> stands inside of <{name}>'
    if problem:
      return Reading(
        tuple(calls),
        problem=problem,
        open=not slash and end < 0,
        finished=bool(calls),
      )
    if name == answer:
      return Reading(tuple(calls), inner.strip(), finished=True)
    tag = tags[name]
    argument = _unfence(inner) if tag.fenced else inner.strip()
    calls.append(ToolCall(tag.tool, {tag.argument: argument}))
    position = end + len(name) + 3
  outside.append(text[position:])
  rest = ''.join(outside).strip() or None
  if answer and not calls:
    rest = None
  return Reading(tuple(calls), rest, finished=bool(calls))


_FENCE = re.compile(r'```[A-Za-z0-9_+-]*[ \t]*\r?\n(.*?)(?:```|\Z)', re.DOTALL)


def _unfence(text: str) -> str:
  blocks = _FENCE.findall(text)
  return (blocks[-1] if blocks else text).strip('\r\n').rstrip()
