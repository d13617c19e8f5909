"""Compares our renders with those of public templates, from a JSON file.

`python tests/chat_parity.py --file PATH`. The file holds `conversations`
(messages and tools as a chat API has them) and `renders`: for a format's name
and a conversation's, the text that the public template prints with its
generation prompt, or null where it refuses. Prints a line for each failure
and the counts; exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator

# Runs from a clone, installed or not.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from agentjax.text import formats, frames, layout  # noqa: E402
from agentjax.types import Message, ToolCall, ToolSpec  # noqa: E402

DATA = pathlib.Path(__file__).parent / 'data' / 'chat.json'


def message_of(data: dict) -> Message:
  """A message of a chat API."""
  calls = []
  for call in data.get('tool_calls') or ():
    function = call.get('function', call)
    arguments = function['arguments']
    calls.append(ToolCall(function['name'], arguments, call.get('id') or ''))
  content = data.get('content') or ''
  return Message(data['role'], content, tuple(calls), data.get('name'))


def tool_of(data: dict) -> ToolSpec:
  """A tool of a chat API."""
  function = data.get('function', data)
  return ToolSpec(
    function['name'],
    function.get('description', ''),
    function.get('parameters', {}),
  )


def cases(path: pathlib.Path) -> Iterator[tuple[str, str, list, list, str]]:
  """(format, conversation, messages, tools, expected) of a file."""
  data = json.loads(path.read_text(encoding='utf-8'))
  for name, renders in data['renders'].items():
    for key, expected in renders.items():
      conversation = data['conversations'][key]
      messages = [message_of(m) for m in conversation['messages']]
      tools = [tool_of(t) for t in conversation.get('tools') or ()]
      yield name, key, messages, tools, expected


def render(name: str, messages: list, tools: list) -> str | None:
  """Our render, or None where we refuse."""
  try:
    pieces = layout.pieces_of(getattr(formats, name), messages, tools)
  except ValueError:
    return None
  return frames.text_of(pieces)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--file', type=pathlib.Path, default=DATA)
  passed = failed = 0
  for name, key, messages, tools, expected in cases(parser.parse_args().file):
    if not isinstance(getattr(formats, name, None), formats.ChatFormat):
      print(f'{name}/{key}: there is no format of this name')
      failed += 1
      continue
    got = render(name, messages, tools)
    if got == expected:
      passed += 1
    else:
      print(f'{name}/{key}:\n  expected {expected!r}\n  got      {got!r}')
      failed += 1
  print(f'{passed} passed, {failed} failed')
  return 1 if failed else 0


if __name__ == '__main__':
  sys.exit(main())
