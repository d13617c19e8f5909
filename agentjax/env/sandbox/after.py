"""Waits for a process to end, and removes the containers that it has left.

Floor 1, env/sandbox: a program of its own, started once beside a process that
opens sandboxes. Most of them end with the streams that end with that process;
one that was made and not started yet does not. It imports the standard
library alone and knows nothing of the package, so that it is small while it
waits and quick when it is needed; what it cannot do, the reaper does, which it
becomes in the end.

    python -I -S after.py PID JOURNAL COMMAND...
"""

import http.client
import json
import os
import select
import socket
import sys
import threading

_TIMEOUT_S = 20


class Engine(http.client.HTTPConnection):
  """A connection to an engine's Unix socket."""

  def __init__(self, path):
    super().__init__('localhost', timeout=_TIMEOUT_S)
    self.path = path

  def connect(self):
    self.sock = socket.socket(socket.AF_UNIX)
    self.sock.settimeout(self.timeout)
    self.sock.connect(self.path)


def left(journal):
  """(socket, name) of the containers that were begun and did not end."""
  begun = {}
  try:
    with open(journal, 'rb') as file:
      lines = file.read().split(b'\n')
  except OSError:
    return []  # it has ended as it should
  for line in lines:
    try:
      said = json.loads(line)
      if said['event'] == 'end':
        begun.pop(said['name'], None)
      elif said['event'] == 'begin' and said['engine'].startswith('unix://'):
        begun[said['name']] = said['engine'][len('unix://') :]
    except (ValueError, KeyError, TypeError, AttributeError):
      continue  # cut off by the end of its writer
  return [(path, name) for name, path in begun.items()]


def remove(path, name):
  try:
    engine = Engine(path)
    engine.request('DELETE', f'/containers/{name}?force=1')
    engine.getresponse().read()
    engine.close()
  except (OSError, http.client.HTTPException):
    pass  # the reaper's


def main(pid, journal, *command):
  try:
    ended = select.poll()
    ended.register(os.pidfd_open(int(pid)), select.POLLIN)
    ended.poll()
  except ProcessLookupError:
    pass  # sooner than this was ready
  threads = [
    threading.Thread(target=remove, args=pair) for pair in left(journal)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  os.execv(command[0], command)


if __name__ == '__main__':
  main(*sys.argv[1:])
