"""The released /retrieve protocol, as JSON: what is asked, what is answered.

Floor 1, env; under `server` and `client`. A request is `{queries, topk,
return_scores}`, an answer `{result: [[{document: {id, contents}, score}]]}`,
one list a query; without scores the documents stand alone. Whatever else comes
is refused: a garbled answer must not become an observation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from agentjax.env.retrieval.passages import MAX_TOPK, Passage, check_topk

PATH = '/retrieve'
DEFAULT_TOPK = 3  # of the released servers
MAX_QUERIES = 1024


class Garbled(ValueError):
  """What came is not in the protocol."""


def request(queries: Sequence[str], topk: int) -> bytes:
  """What a client sends. Scores are always asked for.

  Half a surrogate pair, which no UTF-8 can say, becomes a question mark.
  """
  clean = [q.encode('utf-8', 'replace').decode() for q in queries]
  return json.dumps(
    {'queries': clean, 'topk': topk, 'return_scores': True}
  ).encode()


def read_request(body: bytes) -> tuple[list[str], int, bool]:
  """(queries, topk, with scores) of a request.

  Raises:
    Garbled: it is none.
  """
  data = _json(body)
  queries, topk = data.get('queries'), data.get('topk')
  if not isinstance(queries, list) or not all(
    isinstance(q, str) for q in queries
  ):
    raise Garbled('queries is no list of texts')
  if len(queries) > MAX_QUERIES:
    raise Garbled(f'{len(queries)} queries, at most {MAX_QUERIES}')
  topk = DEFAULT_TOPK if topk is None else topk
  try:
    check_topk(topk)
  except ValueError as error:
    raise Garbled(str(error)) from None
  return queries, topk, data.get('return_scores') is True


def answer(found: Sequence[Sequence[Passage]], scores: bool) -> bytes:
  """What a server sends."""
  return json.dumps(
    {'result': [[_shown(p, scores) for p in passages] for passages in found]}
  ).encode()


def _shown(p: Passage, scores: bool) -> dict[str, Any]:
  document = {'id': p.id, 'contents': p.contents}
  return {'document': document, 'score': p.score} if scores else document


def read_answer(body: bytes, queries: int, topk: int) -> list[list[Passage]]:
  """The passages of an answer to so many queries.

  Some released servers say no id or no score: these are '' and 0.

  Raises:
    Garbled: it is no answer, or not to this request.
  """
  result = _json(body).get('result')
  if not isinstance(result, list) or len(result) != queries:
    size = len(result) if isinstance(result, list) else type(result).__name__
    raise Garbled(f'result is {size}, for {queries} queries')
  for found in result:
    if not isinstance(found, list) or len(found) > min(topk, MAX_TOPK):
      raise Garbled(f'a result is no list of at most {topk} passages')
  return [[_read_passage(item) for item in found] for found in result]


def _read_passage(item: Any) -> Passage:
  if not isinstance(item, dict):
    raise Garbled(f'a passage is {type(item).__name__}, no object')
  document = item.get('document', item)
  contents = document.get('contents') if isinstance(document, dict) else None
  if not isinstance(contents, str):
    raise Garbled('a passage has no contents')
  try:
    contents.encode()
  except UnicodeEncodeError:
    raise Garbled('contents hold half of a surrogate pair') from None
  id, score = document.get('id', ''), item.get('score', 0.0)
  if isinstance(id, (dict, list)):
    raise Garbled('an id is no name')
  if isinstance(score, bool) or not isinstance(score, (int, float)):
    raise Garbled(f'a score is {type(score).__name__}, no number')
  if not math.isfinite(score):
    raise Garbled(f'a score is {score}')
  return Passage(str(id), contents, float(score))


def _json(body: bytes) -> dict[str, Any]:
  try:
    data = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise Garbled(f'no JSON: {error}') from None
  if not isinstance(data, dict):
    raise Garbled(f'{type(data).__name__}, no object')
  return data
