"""Episodes against a retrieval server that is slow, garbles and recovers.

The policy's turns are sampled by a real engine; a chat reads each as a search
or an answer, by its ids. Every episode that comes to its end must be what it
would have been with a perfect retriever, and every other one has no reward.
"""

import http.server
import random
import threading
import time

import numpy as np
import pytest
import tiny_model as tiny

from agentjax.env.retrieval import wire
from agentjax.env.retrieval.client import Remote
from agentjax.env.retrieval.passages import Passage
from agentjax.env.search import SearchEnvironment
from agentjax.rollout.collect import CollectStats, collect
from agentjax.rollout.episode import Limits
from agentjax.rollout.sampling import Sampling
from agentjax.types import (
  Message,
  Source,
  Status,
  Task,
  ToolCall,
  Turn,
  Verdict,
)

TIMEOUT_S = 0.5
WORDS = [f'w{i}' for i in range(7)]


def retrieve(queries, topk):
  """What a sound index finds: depends on the query alone."""
  return [
    [Passage(f'{q}-{i}', f'"{q}"\nits {i}') for i in range(topk)]
    for q in queries
  ]


class Chat:
  """Reads a turn by the sum of its ids: a search for a word, or an answer."""

  forced = np.array([], np.int32)

  def render_prompt(self, messages, tools=()):
    return np.array([2 + len(m.content) % 30 for m in messages], np.int32)

  def render_observation(self, observations, closed, budget=None):
    text = ''.join(o.body for o in observations)
    return np.array([2 + ord(c) % 38 for c in text][:budget], np.int32)

  def closes(self, tokens):
    return True

  def parse_turn(self, tokens, stop):
    total = int(np.sum(tokens))
    if total % 5 < 2:
      answer = WORDS[total % len(WORDS)]
      return Turn(answer, Verdict.ANSWER, answer=answer)
    query = WORDS[total % len(WORDS)]
    calls = (ToolCall('search', {'query': query}),)
    return Turn(query, Verdict.CALLS, calls=calls)


def garbled(chance) -> bytes:
  return chance.choice(
    [
      b'', b'{"result": [[{"docu', b'<html>Bad Gateway</html>', b'null',
      b'{"result": []}', b'{"result": [[{"document": {"contents": 3}}]]}',
      b'{"result": [[], []]}', b'\xff\xfe', b'{"result": [["w1"]]}',
    ]
  )  # fmt: skip


class Faulty:
  """Answers 5 % of requests too late, garbles 1 %; counts what it did."""

  def __init__(self):
    chance, lock = random.Random(0), threading.Lock()
    self.did = did = {'fine': 0, 'late': 0, 'garbled': 0}

    class Connection(http.server.BaseHTTPRequestHandler):
      def do_POST(self):
        body = self.rfile.read(int(self.headers['Content-Length']))
        queries, topk, scores = wire.read_request(body)
        answer = wire.answer(retrieve(queries, topk), scores)
        with lock:
          draw = chance.random()
          kind = 'late' if draw < 0.05 else 'fine'
          if draw > 0.99:
            kind, answer = 'garbled', garbled(chance)
          did[kind] += 1
        if kind == 'late':
          time.sleep(2 * TIMEOUT_S)
        self.send_response(200)
        self.send_header('Content-Length', str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

      def log_message(self, *_):
        pass

    class Quiet(http.server.ThreadingHTTPServer):
      daemon_threads = True
      request_queue_size = 128

      def handle_error(self, *_):
        pass

    self._http = Quiet(('127.0.0.1', 0), Connection)
    self.url = f'http://127.0.0.1:{self._http.server_address[1]}/retrieve'
    threading.Thread(target=self._http.serve_forever, daemon=True).start()

  def close(self):
    self._http.shutdown()
    self._http.server_close()


def run(tasks, make, retries, stats=None):
  return collect(
    tasks,
    group_size=4,
    engine=tiny.engine(stop_strings=list('aeiou'), slots=16),
    chat=Chat(),
    make_environment=make,
    limits=Limits(
      turns=4,
      turn_tokens=16,
      model_tokens=64,
      context=96,
      observation_tokens=12,
    ),
    sampling=Sampling(),
    seed=0,
    draw=0,
    in_flight=32,
    tool_threads=16,
    infra_retries=retries,
    stats=stats or CollectStats(),
  )


def said(trajectory):
  return [
    (s.source, s.tokens.tolist())
    for s in trajectory.segments
    if s.source is not Source.PROMPT
  ]


@pytest.mark.parametrize(
  ('episodes', 'attempts', 'retries'),
  [
    (160, 1, 0),
    (160, 3, 2),
    pytest.param(1000, 1, 0, marks=pytest.mark.long),
    pytest.param(1000, 2, 1, marks=pytest.mark.long),
  ],
)
def test_right_statuses_no_wrong_reward_in_bounded_time(
  episodes, attempts, retries
):
  tasks = [
    Task(f't{i}', (Message('user', 'x' * i),), {'answers': [WORDS[i % 7]]})
    for i in range(episodes // 4)
  ]
  perfect = run(tasks, lambda: SearchEnvironment(retrieve), 0)
  server = Faulty()
  remote = Remote(
    server.url, timeout_s=TIMEOUT_S, attempts=attempts, backoff_s=0.01
  )
  began = time.monotonic()
  try:
    groups = run(tasks, lambda: SearchEnvironment(remote), retries)
  finally:
    server.close()
  seconds = time.monotonic() - began

  failed = rewarded = compared = 0
  for want_group, group in zip(perfect, groups, strict=True):
    for want, got in zip(
      want_group.trajectories, group.trajectories, strict=True
    ):
      assert want.status is not Status.INFRA_FAILURE
      if got.status is Status.INFRA_FAILURE:
        failed += 1
        assert got.reward is None and 'failed' in got.error
        assert not got.status.train_on_tokens
        continue
      compared += 1
      rewarded += want.reward is not None and want.reward.success
      assert got.status is want.status
      assert got.reward == want.reward
      assert said(got) == said(want)
  searches = sum(server.did.values())
  assert compared + failed == episodes and searches > episodes / 2
  assert server.did['late'] and (server.did['garbled'] or episodes < 1000)
  assert rewarded, 'no answer was right: the comparison says little'
  if attempts == 1:  # every trouble is a failure, and nothing else is
    assert failed >= 0.5 * (server.did['late'] + server.did['garbled'])
    assert failed < 0.3 * episodes
  else:
    assert failed <= 0.02 * episodes
  # A call takes at most attempts * timeout and little more; 16 go at once.
  longest = 5 + 4 * episodes * attempts * (retries + 1) * TIMEOUT_S / 16
  assert seconds < max(longest, 60), seconds
  print(f'{episodes} episodes, {searches} requests in {seconds:.1f} s: '
        f'{server.did}, {failed} failed, {rewarded} right')  # fmt: skip
