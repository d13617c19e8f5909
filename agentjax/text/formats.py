"""Chat formats: a frame and a call syntax, as module-level constants.

Floor 1, text/. A config names a format by its dotted name
(`agentjax.text.formats.qwen2_5`), or makes one (`with_tags`, `plain_tags`).
The named ones print what the public templates of those models print, for any
conversation; `tests/chat_parity.py` compares. This file knows no vocabulary:
special tokens are names here.

Some templates rewrite history: Qwen3 drops the thoughts of earlier turns,
Llama 3.1 the text beside a call, and several trim whitespace. A full render
follows them. The incremental path never does: what was sampled stays as it
is, and `Chat.keeps_history` says where the two differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from agentjax.text import calls, frames, tags
from agentjax.text.tags import Tag
from agentjax.types import Message


@dataclasses.dataclass(frozen=True)
class ChatFormat:
  """How a conversation is written for one family of models.

  Attributes:
    name: for messages and records.
    frame: how turns are marked. syntax: how tools are called.
    settle: what the template does to a message that is not the assistant's;
      is told whether the message is the conversation's first.
    arrange: what it does to a conversation's system message, before tools are
      offered; raises ValueError for what it refuses.
    rewrite: what it does, last, to the assistant's messages of a history; on
      the incremental path these are sampled ids, which nobody rewrites.
    roles: those that it prints; None is all. A message of another role is
      passed over, but still parts the tool messages around it.
    thought: the tags of a thought.
    cut_mark: stands where the body of an observation was cut.
  """

  name: str
  frame: frames.Frame
  syntax: calls.CallSyntax
  settle: Callable[[Message, bool], Message] = lambda message, first: message
  arrange: Callable[[Sequence[Message]], list[Message]] = list
  rewrite: Callable[[Sequence[Message]], list[Message]] = list
  roles: tuple[str, ...] | None = None
  thought: tuple[str, str] = ('<think>', '</think>')
  cut_mark: str = '\n[... truncated]'

  def prints(self, role: str) -> bool:
    """Whether the template prints messages of `role`."""
    return self.roles is None or role in self.roles


def _each_turn(
  change: Callable[[Message], Message],
) -> Callable[[Sequence[Message]], list[Message]]:
  """A `rewrite` that changes the assistant's messages one by one."""
  return lambda messages: [
    change(m) if m.role == 'assistant' else m for m in messages
  ]


def _without_calls(message: Message) -> Message:
  return dataclasses.replace(message, tool_calls=())


# ---- Qwen, SmolLM ---------------------------------------------------------

_QWEN2_5_SYSTEM = (
  'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.'
)
_SMOLLM2_SYSTEM = (
  'You are a helpful AI assistant named SmolLM, trained by Hugging Face'
)


_QWEN_ROLES = ('system', 'user', 'assistant', 'tool')


def _is_query(message: Message) -> bool:
  c = message.content
  wrapped = c.startswith('<tool_response>') and c.endswith('</tool_response>')
  return message.role == 'user' and not wrapped


def _qwen3_history(messages: Sequence[Message]) -> list[Message]:
  """Drops the thoughts of turns before the last query, and lays out those of
  the turns after it; a conversation's last turn gets a thought, if empty."""
  queries = [i for i, m in enumerate(messages) if _is_query(m)]
  last_query = queries[-1] if queries else len(messages) - 1
  out = list(messages)
  for i, m in enumerate(messages):
    if m.role != 'assistant':
      continue
    content, thought = m.content, ''
    if '</think>' in content:
      before = content.split('</think>')[0].rstrip('\n')
      thought = before.split('<think>')[-1].lstrip('\n')
      content = content.split('</think>')[-1].lstrip('\n')
    if i > last_query and (i == len(messages) - 1 or thought):
      block = '<think>\n' + thought.strip('\n') + '\n</think>\n\n'
      content = block + content.lstrip('\n')
    out[i] = dataclasses.replace(m, content=content)
  return out


def _qwen3_write(message: Message) -> str:
  """Hermes calls, but with no line between a thought and the first call."""
  content = message.content
  if content.endswith('</think>\n\n') and message.tool_calls:
    bare = dataclasses.replace(message, content='')
    return content + calls.HERMES.write(bare)
  return calls.HERMES.write(message)


qwen2_5 = ChatFormat(
  name='qwen2_5',
  frame=frames.CHATML,
  syntax=calls.HERMES,
  arrange=lambda messages: frames.with_system(messages, _QWEN2_5_SYSTEM),
  roles=_QWEN_ROLES,
)

qwen3 = ChatFormat(
  name='qwen3',
  frame=frames.CHATML,
  syntax=dataclasses.replace(calls.HERMES, write=_qwen3_write),
  rewrite=_qwen3_history,
  roles=_QWEN_ROLES,
)

# The public template: it tells no tools and prints no calls.
smollm2 = ChatFormat(
  name='smollm2',
  frame=frames.CHATML,
  syntax=calls.NONE,
  rewrite=_each_turn(_without_calls),
  arrange=lambda messages: frames.with_system(messages, _SMOLLM2_SYSTEM),
)

# SmolLM2 with tools, told and called as Qwen2.5 does it.
smollm2_hermes = dataclasses.replace(
  smollm2, name='smollm2_hermes', syntax=calls.HERMES, rewrite=list
)


# ---- Llama ----------------------------------------------------------------

_LLAMA3_1_SYSTEM = (
  'Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n'
)


def _llama3_1_system(messages: Sequence[Message]) -> list[Message]:
  system, *rest = frames.with_system(messages, '')
  return [Message('system', _LLAMA3_1_SYSTEM + system.content), *rest]


def _llama3_1_settled(message: Message, first: bool) -> Message:
  """Results stay as they are; Llama's own word for their role is ipython."""
  if message.role in ('tool', 'ipython'):
    return dataclasses.replace(message, role='tool')
  return frames.trimmed(message)


def _llama3_1_turn(message: Message) -> Message:
  """Of a turn with a call, the template prints the call alone."""
  if message.tool_calls:
    return dataclasses.replace(message, content='')
  return frames.trimmed(message)


llama3_1 = ChatFormat(
  name='llama3_1',
  frame=frames.LLAMA3,
  syntax=calls.LLAMA_JSON,
  settle=_llama3_1_settled,
  rewrite=_each_turn(_llama3_1_turn),
  arrange=_llama3_1_system,
)

llama3 = ChatFormat(
  name='llama3',
  frame=frames.LLAMA3,
  syntax=calls.NONE,
  settle=frames.trimmed,
  rewrite=_each_turn(lambda m: frames.trimmed(_without_calls(m))),
)


# ---- Gemma ----------------------------------------------------------------

gemma = ChatFormat(
  name='gemma',
  frame=frames.GEMMA,
  syntax=calls.NONE,
  settle=frames.trimmed,
  rewrite=_each_turn(lambda m: frames.trimmed(_without_calls(m))),
  arrange=frames.refuse_system,
)

gemma3 = dataclasses.replace(
  gemma,
  name='gemma3',
  settle=frames.trimmed_after_system,
  arrange=frames.merge_system,
)


# ---- tags -----------------------------------------------------------------


def with_tags(
  base: ChatFormat,
  name: str,
  tools: Mapping[str, Tag],
  answer: str | None = 'answer',
  cut_mark: str = '\n[... truncated]',
) -> ChatFormat:
  """`base` with tools as plain tags: results stand inside the turn.

  A turn's text is no longer rewritten, so histories are always kept.
  """
  return dataclasses.replace(
    base,
    name=name,
    syntax=tags.syntax(tools, answer),
    rewrite=list,
    cut_mark=cut_mark,
  )


def plain_tags(
  name: str,
  tools: Mapping[str, Tag],
  answer: str | None = 'answer',
  cut_mark: str = '\n[... truncated]',
) -> ChatFormat:
  """Tags without a template, for base models: the prompt is the bare text."""
  return with_tags(plain, name, tools, answer, cut_mark)


# A base model without tools: the prompt is the bare text.
plain = ChatFormat(name='plain', frame=frames.PLAIN, syntax=calls.NONE)

# Search-R1 (arXiv 2503.09516), section 3.2: the tags and the layout of results.
SEARCH = {
  'search': Tag('search', 'query', '\n\n<information>', '</information>\n\n'),
}

# ReTool (arXiv 2504.11536), section 2: code in a fence.
CODE = {
  'code': Tag(
    'code_interpreter',
    'code',
    '\n<interpreter>\n',
    '</interpreter>\n\n',
    fenced=True,
  ),
}

search_r1 = plain_tags('search_r1', SEARCH)
search_r1_qwen2_5 = with_tags(qwen2_5, 'search_r1_qwen2_5', SEARCH)
# As the released code, which cuts a block that is too long without a mark; the
# environment's `released_information` goes with them.
search_r1_released = plain_tags('search_r1_released', SEARCH, cut_mark='')
search_r1_released_qwen2_5 = with_tags(
  qwen2_5, 'search_r1_released_qwen2_5', SEARCH, cut_mark=''
)
retool_qwen2_5 = with_tags(qwen2_5, 'retool_qwen2_5', CODE)
smollm2_code = with_tags(smollm2, 'smollm2_code', CODE)

# The quickstart: a turn's glue is two tokens, `<result>` and `</result>`.
arithmetic = plain_tags(
  'arithmetic',
  {'calc': Tag('calculator', 'expression', '<result>', '</result>')},
  cut_mark='...',
)
