"""Answers the host's requests, one at a time.

Ops: hello (limits), run (a program or code), open (a session), say (a call of
it), close (it).
"""

import ctypes
import errno
import gc
import os
import signal
import sys
import time

from . import shell
from .children import Child, fork
from .counters import Counters, disk_full
from .frames import Link
from .processes import end_all, settle, take_signals
from .sessions import Session
from .streams import Capture, Mark, drain
from .watch import Feed, Watched, watch

_PR_SET_DUMPABLE = 4
_CAPABILITY_VERSION_3 = 0x20080522
_REFUSED = 126 << 8  # the wait status of what could not be started


class Runner:
  """Serves requests one at a time."""

  def __init__(self, link):
    self.link = link
    self.limits = None
    self.nonce = None
    self.folders = ()
    self.counters = Counters()
    self.sessions = {}
    self.child = None  # that of the next call
    self.wake, wake_in = os.pipe()
    for fd in (self.wake, wake_in):
      os.set_blocking(fd, False)
    take_signals(wake_in)

  def serve(self):
    while True:
      header, blobs = self.link.receive()
      facts, out = getattr(self, 'op_' + header['op'])(header, blobs)
      facts.update(id=header['id'], nonce=self.nonce)
      self.link.send(facts, out)
      if not facts['alive']:
        os._exit(0)
      if header['op'] in ('hello', 'run'):
        self.child, _ = self.make_child()

  def op_hello(self, header, blobs):
    self.limits, self.nonce = header['limits'], header['nonce']
    self.link.end = time.monotonic() + self.limits['lifetime_s']
    settle(self.limits)
    places = (self.limits['workdir'], '/tmp', '/dev/shm')
    self.folders = [place for place in places if os.path.isdir(place)]
    gc.freeze()  # children need not look through what the runner made
    # Proves that the change of uid works before anything of the policy runs.
    facts, out = self.call(None, '', b'', 10.0, 4096)
    facts['counters'] = self.counters.read()
    facts['python'] = '.'.join(str(n) for n in sys.version_info[:3])
    facts['shell'] = shell.program()[0][0]
    return facts, out

  def op_run(self, header, blobs):
    argv = header['argv']
    code = blobs[1].decode('utf-8', 'replace') if argv is None else ''
    return self.call(
      argv, code, blobs[0], header['timeout_s'], header['output_cap']
    )

  def op_open(self, header, blobs):
    """Starts an interpreter, and proves that it answers an empty call."""
    self.discard_child()
    before = self.counters.read()
    session = Session(header['kind'])
    try:
      session.started(fork(self.limits, session.theirs, session.become))
    except OSError as error:
      session.started(None)
      session.close()
      facts, out = self.refused(error, before)
      return dict(facts, session_alive=False), out
    self.sessions[header['session']] = session
    return self.op_say(header, [b''])

  def op_say(self, header, blobs):
    """Runs text in a session, whose process is frozen between such calls."""
    self.discard_child()
    number, before = header['session'], self.counters.read()
    session = self.sessions.get(number)
    if session is None:
      facts, out = self.finish(None, Watched('gone', 0, {}), {}, before)
    else:
      deadline = self.deadline(header['timeout_s'])
      mark = Mark(session.done, os.urandom(12).hex())
      asked = session.ask(mark.token, blobs[0])
      os.kill(session.pid, signal.SIGCONT if asked else signal.SIGKILL)
      cap = header['output_cap']
      streams = {session.out: Capture(cap), session.err: Capture(cap)}
      watched = self.watch(session.pid, streams, deadline, mark)
      facts, out = self.finish(session.pid, watched, streams, before)
    return dict(facts, session_alive=number in self.sessions), out

  def op_close(self, header, blobs):
    """Ends a session: what is not kept is killed."""
    self.discard_child()
    session = self.sessions.pop(header['session'], None)
    if session is not None:
      session.close()
    return self.finish(None, Watched('exit', 0, {}), {}, self.counters.read())

  def call(self, argv, code, stdin, timeout_s, cap):
    """Runs `argv` or `code` in a child, ends it all, and reports."""
    deadline = self.deadline(timeout_s)
    before = self.counters.read()
    child, error = self.child, None
    self.child = None
    if child is not None and child.has_ended():
      child.close()
      child = None
    if child is None:
      child, error = self.make_child()
    if child is None:
      return self.refused(error, before)
    child.tell(argv, code)
    source = Feed(child.stdin, stdin)
    child.stdin = None
    streams = {child.out: Capture(cap), child.err: Capture(cap)}
    watched = self.watch(child.pid, streams, deadline, source)
    report = self.finish(child.pid, watched, streams, before)
    source.close()
    child.close()
    return report

  def make_child(self):
    """(child, None), or (None, error) where the kernel refuses one."""
    try:
      return Child(self.limits), None
    except OSError as error:
      return None, error

  def discard_child(self):
    """Before a session runs, which shall find nobody else of its uid."""
    if self.child is not None:
      self.child.discard()
    self.child = None

  def deadline(self, timeout_s):
    return min(time.monotonic() + timeout_s, self.link.end)

  def watch(self, pid, streams, deadline, source):
    kill = self.limits['output_kill']
    return watch(self.link, self.wake, pid, streams, deadline, kill, source)

  def refused(self, error, before):
    """The report of a call whose process could not be made.

    What the policy left frozen in its sessions used up a limit.
    """
    facts, out = self.finish(None, Watched('exit', _REFUSED, {}), {}, before)
    facts['pids' if error.errno == errno.EAGAIN else 'oom'] += 1
    return facts, out

  def finish(self, pid, watched, streams, before):
    """Ends what a call left behind, and reports it: (facts, blobs).

    Sessions are kept, and frozen; not that of a call which had to be killed.
    """
    ended = dict(watched.ended)
    kept = {s.pid for s in self.sessions.values()} - set(ended)
    if watched.status is None:
      kept.discard(pid)
    killed, last = end_all(kept, self.wake)
    ended.update(last)
    for fd, capture in streams.items():
      drain(fd, capture)  # every writer is dead or stopped: this ends
    for number, session in list(self.sessions.items()):
      if session.pid in ended:
        self.sessions.pop(number).close()
    after = self.counters.read()
    captures = list(streams.values()) or [Capture(0), Capture(0)]
    status = watched.status
    facts = {
      'end': watched.end,
      'wait': ended.get(pid, 0) if status is None else status,
      'reaped': len(killed - {pid}),
      'disk_full': disk_full(self.folders),
      'alive': time.monotonic() < self.link.end,
      'dropped': [c.parts()[2] for c in captures],
    }
    for name in ('oom', 'pids'):
      known = before[name] is not None and after[name] is not None
      facts[name] = after[name] - before[name] if known else 0
    return facts, [p for c in captures for p in c.parts()[:2]]


def keep_rights(libc):
  """Makes the capabilities of this process none that children inherit."""
  header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
  sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
  if libc.capget(header, sets) == 0:
    sets[2] = sets[5] = 0
    libc.capset(header, sets)


def main():
  # kill(-1) anywhere else than in a PID namespace of its own is a disaster.
  if os.getpid() != 1:
    sys.exit(f'the runner must be PID 1 of a sandbox, not {os.getpid()}')
  libc = ctypes.CDLL(None, use_errno=True)
  keep_rights(libc)
  if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
    sys.exit(f'prctl(PR_SET_DUMPABLE) failed: errno {ctypes.get_errno()}')
  # Out of the way of 0, 1 and 2, which are the child's own later.
  link = Link(os.dup(0), os.dup(1))
  null = os.open(os.devnull, os.O_RDWR)
  os.dup2(null, 0)
  os.dup2(null, 1)
  Runner(link).serve()
