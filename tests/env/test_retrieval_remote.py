"""The HTTP server and client, with servers that fail in every way."""

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from agentjax.env.base import InfraError
from agentjax.env.retrieval import wire
from agentjax.env.retrieval.client import Remote
from agentjax.env.retrieval.passages import Passage
from agentjax.env.retrieval.server import Server

FOUND = [Passage('1', '"A"\ntext', 2.5), Passage('2', '"B"\nmore', 1.0)]


def retrieve(queries, topk):
  return [[] if q == 'nothing' else FOUND[:topk] for q in queries]


def quick(url, **options):
  return Remote(url, **{'timeout_s': 5, 'backoff_s': 0.01} | options)


@contextlib.contextmanager
def raw(*replies):
  """A server that sends bytes as they are, one reply a connection.

  A float in a reply is a pause, a list is sent byte by byte over a second.
  """
  listener = socket.create_server(('127.0.0.1', 0))
  asked = []

  def serve():
    for reply in replies:
      try:
        connection, _ = listener.accept()
      except OSError:
        return
      with connection, contextlib.suppress(OSError):
        asked.append(connection.recv(1 << 16))
        for piece in reply if isinstance(reply, tuple) else (reply,):
          if isinstance(piece, float):
            time.sleep(piece)
          else:
            connection.sendall(piece)

  thread = threading.Thread(target=serve, daemon=True)
  thread.start()
  try:
    yield f'http://127.0.0.1:{listener.getsockname()[1]}/retrieve', asked
  finally:
    listener.close()
    thread.join(10)


def http(body: bytes, status=b'200 OK', length=None):
  n = len(body) if length is None else length
  return b'HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s' % (status, n, body)


GOOD = http(wire.answer([FOUND[:1]], True))


def test_what_a_server_finds_a_client_gets():
  with Server(retrieve) as server:
    remote = quick(server.url)
    assert remote(['a', 'nothing'], 2) == [FOUND, []]
    assert remote(['a'], 1) == [FOUND[:1]]
    assert remote([], 1) == []
    assert remote(['\ud800 ü'], 1) == [FOUND[:1]]


def test_the_released_protocol_to_the_letter():
  """As a script of the released code asks, and what it reads."""

  def ask(**payload):
    request = urllib.request.Request(
      server.url,
      json.dumps(payload).encode(),
      {'Content-Type': 'application/json'},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
      return json.load(response)

  with Server(retrieve) as server:
    assert ask(queries=['a'], topk=1, return_scores=True) == {
      'result': [
        [{'document': {'id': '1', 'contents': '"A"\ntext'}, 'score': 2.5}]
      ]
    }
    assert ask(queries=['a'], topk=1) == {
      'result': [[{'id': '1', 'contents': '"A"\ntext'}]]
    }
    assert len(ask(queries=['a'], topk=None)['result'][0]) == 2
    for wrong in ({}, {'queries': 'a'}, {'queries': ['a'], 'topk': 0}):
      with pytest.raises(urllib.error.HTTPError) as error:
        ask(**wrong)
      assert error.value.code == 400


@pytest.mark.parametrize(
  'body',
  [
    b'', b'{', b'null', b'[]', b'{}', b'<html>', b'\xff', b'[' * 100_000,
    b'{"result": []}', b'{"result": [[], []]}', b'{"result": [{}]}',
    b'{"result": [[1]]}', b'{"result": [[{}]]}',
    b'{"result": [[{"document": 1}]]}',
    b'{"result": [[{"document": {"id": "1"}}]]}',
    b'{"result": [[{"document": {"contents": 1}}]]}',
    b'{"result": [[{"document": {"contents": "a"}, "score": "b"}]]}',
    b'{"result": [[{"document": {"contents": "a"}, "score": NaN}]]}',
    b'{"result": [[{"document": {"contents": "\\ud800"}}]]}',
    b'{"result": [[{"contents": "a"}, {"contents": "a"}, {"contents": "a"}]]}',
  ],
)  # fmt: skip
def test_garbled_answers_are_refused_and_asked_again(body):
  with raw(http(body), http(body), GOOD) as (url, asked):
    assert quick(url)(['a'], 2) == [FOUND[:1]]
    assert len(asked) == 3
  with raw(http(body), http(body)) as (url, _):
    with pytest.raises(InfraError, match='failed 2 times'):
      quick(url, attempts=2)(['a'], 2)


def test_answers_without_id_or_score_are_answers():
  """As the released servers of web searches give them."""
  body = b'{"result": [[{"document": {"contents": "a\\nb"}}]]}'
  with raw(http(body)) as (url, _):
    assert quick(url)(['q'], 3) == [[Passage('', 'a\nb')]]


TRICKLE = tuple(p for c in GOOD for p in (bytes([c]), 0.05))


@pytest.mark.parametrize(
  'reply',
  [
    (2.0, GOOD), TRICKLE, (GOOD[:20], 2.0, GOOD[20:]), GOOD[:-5], b'',
    b'\x00\x01', b'SSH-2.0-x\r\n', http(b'{}', b'500 Internal'),
    http(b'', b'503 Busy'), http(b'', b'302 Found\r\nLocation: /'),
    (http(b'{"result":', length=500), 2.0),
  ],
)  # fmt: skip
def test_slow_cut_and_failing_servers_end_in_bounded_time(reply):
  with raw(reply, reply) as (url, _):
    began = time.monotonic()
    with pytest.raises(InfraError):
      quick(url, attempts=2, timeout_s=0.5)(['a'], 1)
    # The trickle alone would take longer, without an end to an attempt.
    assert time.monotonic() - began < 8


def test_nobody_there():
  with socket.create_server(('127.0.0.1', 0)) as listener:
    port = listener.getsockname()[1]
  with pytest.raises(InfraError, match='failed 3 times'):
    quick(f'http://127.0.0.1:{port}/retrieve')(['a'], 1)


def test_requests_under_way_are_bounded():
  now, most, lock = [0], [0], threading.Lock()

  def slow(queries, topk):
    with lock:
      now[0] += 1
      most[0] = max(most[0], now[0])
    time.sleep(0.05)
    with lock:
      now[0] -= 1
    return retrieve(queries, topk)

  with Server(slow) as server:
    remote, found = quick(server.url, at_once=3, timeout_s=5), []
    threads = [
      threading.Thread(target=lambda: found.append(remote(['a'], 1)))
      for _ in range(20)
    ]
    for t in threads:
      t.start()
    for t in threads:
      t.join(30)
  assert len(found) == 20 and 1 <= most[0] <= 3


def test_waiting_for_a_place_has_an_end():
  release = threading.Event()

  def stuck(queries, topk):
    release.wait(10)
    return retrieve(queries, topk)

  with Server(stuck) as server:
    remote = quick(server.url, at_once=1, wait_s=0.2, timeout_s=10)
    thread = threading.Thread(target=lambda: remote(['a'], 1))
    thread.start()
    time.sleep(0.2)
    with pytest.raises(InfraError, match='no place'):
      remote(['a'], 1)
    release.set()
    thread.join(20)


def test_a_server_that_cannot_keep_up_says_so():
  release = threading.Event()

  def stuck(queries, topk):
    release.wait(10)
    return retrieve(queries, topk)

  with Server(stuck, at_once=1, wait_s=0.2) as server:
    first = threading.Thread(
      target=lambda: quick(server.url, timeout_s=10)(['a'], 1)
    )
    first.start()
    time.sleep(0.2)
    with pytest.raises(InfraError, match='status 503'):
      quick(server.url, timeout_s=5, attempts=1)(['a'], 1)
    release.set()
    first.join(20)


def test_a_fault_of_the_retriever_is_no_answer():
  def broken(queries, topk):
    raise KeyError('index')

  with Server(broken) as server:
    with pytest.raises(InfraError, match='status 500'):
      quick(server.url)(['a'], 1)


@pytest.mark.parametrize(
  ('url', 'options'),
  [
    ('retrieve', {}), ('ftp://a/b', {}), ('http://', {}),
    ('http://a/retrieve', {'attempts': 0}),
    ('http://a/retrieve', {'timeout_s': 0}),
  ],
)  # fmt: skip
def test_bad_options_are_refused(url, options):
  with pytest.raises(ValueError, match='give'):
    Remote(url, **options)
