"""ReTool's vectors, of the public recipe."""

from __future__ import annotations

from agentjax.env import retool
from vector_maps import differences


def _reward(case):
  value, verdict = retool.released_score(
    case['solution'], case['gt'], case['num_turns']
  )
  return differences(
    case,
    {'score': value, 'acc': verdict.right, 'pred': verdict.answer or ''},
  )


def _code_rewrite(case):
  ours = retool.released_print_last(case['code'])
  return differences(case, {'sent_to_sandbox': ours})


SECTIONS = {'reward': _reward, 'code_rewrite': _code_rewrite}
