"""Search-R1's vectors."""

from __future__ import annotations

import numpy as np

from agentjax.env import search_r1
from agentjax.env.retrieval.passages import Passage, as_text
from agentjax.types import Segment, Source, Stop, Task, Trajectory
from vector_maps import differences


def _normalize(case):
  return differences(case, {'output': search_r1.normalize(case['input'])})


def _em_check(case):
  said, golden = case['prediction'], case['golden']
  return differences(
    case,
    {
      'em': int(search_r1.released_exact_match(said, golden)),
      'subem': int(search_r1.released_contains(said, golden)),
    },
  )


def _truncate_response(case):
  ours = search_r1.released_cut(case['input'])
  return differences(case, {'truncated': ours})


def _parse_action(case):
  action, content = search_r1.released_action(case['input'])
  return differences(case, {'action': action, 'content': content})


def _passages2string(case):
  found = []
  for doc in case['docs']:
    if isinstance(doc, dict):
      doc = doc.get('document', doc)['contents']
    found.append(Passage('', doc))
  return differences(case, {'out': as_text(found)})


def _info_mask(case):
  """Rows as trajectories of ours: the mask is who wrote a token."""
  pad, left = case['pad_id'], case.get('pad_to_left', False)
  infos = case.get('info') or [[]] * len(case['response'])
  rows = zip(
    case['prompt'], case['prompt_with_mask'], case['response'], infos,
    strict=True,
  )  # fmt: skip
  made = [_trajectory(*row, pad) for row in rows]
  given = (case['prompt'][0], case['response'][0], infos[0])
  ours = _padded(made, sum(map(len, given)), pad, left)
  # The recorded function and its caller differ in the columns of padding that
  # they keep: where none of ours is lost, those are the same.
  width = len(case['responses'][0])
  for name, values in ours.items():
    fill = pad if name.startswith('responses') else 0
    dropped = values[:, : -width or None] if left else values[:, width:]
    if values.shape[1] > width and (dropped == fill).all():
      ours[name] = values[:, -width:] if left else values[:, :width]
  return differences(case, {name: x.tolist() for name, x in ours.items()})


def _trajectory(prompt, with_mask, response, info, pad) -> Trajectory:
  shown = [m != pad for m in with_mask]
  tokens = [*prompt, *response, *info]
  sampled = [*shown, *[True] * len(response), *[False] * len(info)]
  out = Trajectory(Task('t', ()))
  for token, own in zip(tokens, sampled, strict=True):
    if token == pad:
      continue
    zero = np.zeros(1)
    out = out.append(
      Segment(Source.MODEL, [token], zero, zero, zero, zero,
              stop=Stop.END_OF_TURN)
      if own else Segment(Source.OBSERVATION, [token])
    )  # fmt: skip
  return out


def _padded(made, width, pad, left) -> dict[str, np.ndarray]:
  shape = len(made), width
  ours = {
    'responses': np.full(shape, pad),
    'responses_with_info_mask': np.full(shape, pad),
    'loss_mask': np.zeros(shape, int),
    'attention_mask': np.zeros(shape, int),
  }
  for i, t in enumerate(made):
    n = len(t)
    at = slice(width - n, width) if left else slice(0, n)
    ours['responses'][i, at] = t.tokens()
    masked = np.where(t.loss_mask(), t.tokens(), pad)
    ours['responses_with_info_mask'][i, at] = masked
    ours['loss_mask'][i, at] = t.loss_mask()
    ours['attention_mask'][i, at] = 1
  return ours


SECTIONS = {
  'normalize': _normalize,
  'em_check': _em_check,
  'truncate_response': _truncate_response,
  'parse_action': _parse_action,
  'passages2string': _passages2string,
  'info_mask': _info_mask,
}
