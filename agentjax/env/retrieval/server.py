"""An HTTP server for any retriever, which speaks the released protocol.

Floor 1, env. `POST /retrieve` answers, `GET /` says that it is there. What is
asked wrongly gets 400, what has to wait too long 503, a fault of its own 500:
never an answer that is not one. As a program it serves BM25 over a corpus:

  python -m agentjax.env.retrieval.server --corpus=wiki.jsonl --port=8000
"""

from __future__ import annotations

import argparse
import http.server
import socket
import threading

from agentjax.env.retrieval import wire
from agentjax.env.retrieval.passages import Corpus, Retriever

_MAX_REQUEST = 8 << 20


class Server:
  """Serves `retrieve` from threads until it is closed.

  Args:
    port: 0 is any free one; `url` says which.
    at_once: requests that are answered at a time.
    wait_s: that one beyond those waits, and that a client may take to say what
      it wants.
  """

  def __init__(
    self,
    retrieve: Retriever,
    *,
    host: str = '127.0.0.1',
    port: int = 0,
    at_once: int = 16,
    wait_s: float = 30.0,
  ):
    self._http = _Http((host, port), _make(retrieve, at_once, wait_s))
    self.port = self._http.server_address[1]
    self.url = f'http://{host}:{self.port}{wire.PATH}'
    self._thread = threading.Thread(
      target=self._http.serve_forever, daemon=True, name='retrieval server'
    )
    self._thread.start()

  def close(self) -> None:
    """Stops serving. Idempotent."""
    self._http.shutdown()
    self._http.server_close()
    self._thread.join()

  def wait(self) -> None:
    """Serves until it is closed or interrupted."""
    self._thread.join()

  def __enter__(self) -> Server:
    return self

  def __exit__(self, *_) -> None:
    self.close()


class _Http(http.server.ThreadingHTTPServer):
  daemon_threads = True
  request_queue_size = 128  # clients that come at once are not turned away

  def handle_error(self, request, client_address):
    """A client that goes away is no event."""


def _make(retrieve: Retriever, at_once: int, wait_s: float):
  """The class of a connection, as the standard library wants it."""
  places = threading.BoundedSemaphore(at_once)

  class Connection(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    timeout = wait_s

    def do_GET(self):
      self._send(200, b'{"status": "ok"}')

    def do_POST(self):
      length = self.headers.get('Content-Length', '')
      if self.path.partition('?')[0] != wire.PATH:
        return self._refuse(404, f'there is {wire.PATH} alone')
      if not length.isdigit() or int(length) > _MAX_REQUEST:
        return self._refuse(413, f'at most {_MAX_REQUEST} bytes')
      body = self.rfile.read(int(length))
      if not places.acquire(timeout=wait_s):
        return self._refuse(503, f'{at_once} requests are under way')
      try:
        queries, topk, scores = wire.read_request(body)
        answer = wire.answer(retrieve(queries, topk), scores)
      except wire.Garbled as error:
        return self._refuse(400, str(error))
      except Exception as error:
        return self._refuse(500, f'{type(error).__name__}: {error}')
      finally:
        places.release()
      self._send(200, answer)

    def _refuse(self, status: int, text: str) -> None:
      # What was not read of a request must not be read as the next one.
      self.close_connection = True
      self._send(status, text.encode('utf-8', 'replace'), 'text/plain')

    def _send(self, status: int, body: bytes, kind='application/json') -> None:
      self.send_response(status)
      self.send_header('Content-Type', kind)
      self.send_header('Content-Length', str(len(body)))
      self.end_headers()
      self.wfile.write(body)

    def setup(self):
      super().setup()
      self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, *_):
      """Thousands of searches a minute are no news."""

  return Connection


def main() -> None:
  """Serves BM25 over a corpus until it is interrupted."""
  from agentjax.env.retrieval.lexical import Bm25

  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--corpus', required=True, help='JSONL: id, contents')
  parser.add_argument('--host', default='127.0.0.1')
  parser.add_argument('--port', type=int, default=8000)
  arguments = parser.parse_args()
  retrieve = Bm25(Corpus(arguments.corpus))
  with Server(retrieve, host=arguments.host, port=arguments.port) as server:
    print(f'{len(retrieve.corpus)} passages at {server.url}', flush=True)
    try:
      server.wait()
    except KeyboardInterrupt:
      print('ended')


if __name__ == '__main__':
  main()
