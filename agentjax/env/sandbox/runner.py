"""The process that lives in a sandbox and runs what the host asks for.

It stands at the far end of every tool call: PID 1 of the container, started
with its whole source on the command line, so that any image with a python3
will do. It knows nothing of the package it is shipped in, imports the
standard library alone, and keeps to Python 3.8. It is one file because it is
one argument of `python3 -c`.

What it promises:
  * Requests and replies are frames over the stdin and stdout it was started
    with; children never hold these files, and the runner is not dumpable, so
    that they cannot be reached through /proc either.
  * Children run in a session of their own, under another uid where the
    runner is root. After each call everything that it left is killed with
    kill(-1) and reaped: the next call finds no process of the last.
  * End of file on stdin (the host is gone) ends the runner, and with it, it
    being PID 1, every process of the sandbox, in the middle of a call too.
  * No signal of a child ends the runner. The end of its lifetime in a call is
    that call's timeout, and is reported.

A frame is a big-endian uint32 (length of the rest), a uint32 (length of the
header), the header as JSON, and blobs whose lengths the header lists in
`blobs`. Requests carry `id` and `op`; replies carry `id`, `nonce` and facts,
which are judged on the host.
Ops: hello (limits, once, first) and run.
"""

# ruff: noqa: B905 (zip has no strict= before Python 3.10)
import atexit
import ctypes
import gc
import json
import os
import resource
import selectors
import signal
import struct
import sys
import time
import types

MAX_FRAME = 64 << 20
_CHUNK = 1 << 16
_PR_SET_DUMPABLE = 4


class BecomeCode(BaseException):
  """Unwinds a forked child to the top of this file, which runs `source`."""

  def __init__(self, source):
    self.source = source


class Link:
  """Frames over two file descriptors that no child inherits."""

  def __init__(self, fd_in, fd_out):
    self.fd_in, self.fd_out = fd_in, fd_out
    self.buffer = bytearray()
    self.end = None  # monotonic time at which the runner's life is over

  def fill(self):
    """Reads what is there; ends the runner where nothing will come again."""
    data = os.read(self.fd_in, _CHUNK)
    if not data or len(self.buffer) > MAX_FRAME + 8:
      os._exit(0)
    self.buffer += data

  def receive(self):
    """The next request: (header, blobs)."""
    with selectors.DefaultSelector() as selector:
      selector.register(self.fd_in, selectors.EVENT_READ)
      while True:
        frame = self._take()
        if frame is not None:
          return frame
        left = None if self.end is None else self.end - time.monotonic()
        if left is not None and left <= 0:
          os._exit(0)
        if selector.select(left):
          self.fill()

  def _take(self):
    if len(self.buffer) < 8:
      return None
    total, head = struct.unpack_from('>II', self.buffer)
    if total > MAX_FRAME:
      os._exit(3)
    if len(self.buffer) < 4 + total:
      return None
    header = json.loads(bytes(self.buffer[8 : 8 + head]).decode())
    blobs, at = [], 8 + head
    for size in header.get('blobs', ()):
      blobs.append(bytes(self.buffer[at : at + size]))
      at += size
    del self.buffer[: 4 + total]
    return header, blobs

  def send(self, header, blobs):
    header = dict(header, blobs=[len(b) for b in blobs])
    head = json.dumps(header).encode()
    rest = struct.pack('>I', len(head)) + head + b''.join(blobs)
    data = memoryview(struct.pack('>I', len(rest)) + rest)
    while data:
      data = data[os.write(self.fd_out, data) :]


class Capture:
  """Keeps the first and the last bytes of a stream and counts the rest."""

  def __init__(self, cap):
    self.head_cap = cap // 4
    self.tail_cap = cap - self.head_cap
    self.head, self.tail = bytearray(), bytearray()
    self.seen = 0

  def add(self, data):
    self.seen += len(data)
    room = self.head_cap - len(self.head)
    self.head += data[:room]
    self.tail += data[room:]
    if len(self.tail) > 2 * self.tail_cap + _CHUNK:
      del self.tail[: len(self.tail) - self.tail_cap]

  def parts(self):
    """(head, tail, number of bytes dropped between them)."""
    tail = bytes(self.tail[max(0, len(self.tail) - self.tail_cap) :])
    return bytes(self.head), tail, self.seen - len(self.head) - len(tail)


def read_counter(text, key):
  """The number after `key` in the lines of a cgroup file; None if absent."""
  for line in text.splitlines():
    words = line.split()
    if len(words) == 2 and words[0] == key:
      return int(words[1])
  return None


def counters(root='/sys/fs/cgroup'):
  """Refusals of this cgroup so far: {'oom': n, 'pids': n}, None if unknown.

  The kernel's counters are the evidence for a limit that was hit: version 1
  and version 2 of cgroups name the files differently.
  """
  out = {}
  for name, key, paths in (
    ('oom', 'oom_kill', ('memory/memory.oom_control', 'memory.events')),
    ('pids', 'max', ('pids/pids.events', 'pids.events')),
  ):
    out[name] = None
    for path in paths:
      try:
        with open(os.path.join(root, path)) as file:
          out[name] = read_counter(file.read(), key)
        break
      except OSError:
        continue
  return out


class Runner:
  """Serves requests one at a time."""

  def __init__(self, link):
    self.link = link
    self.limits = None
    self.nonce = None
    # PID 1 is safe from signals without a handler alone; SIGINT has Python's.
    needed = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
    self.ignored = signal.valid_signals() - needed
    for number in self.ignored:
      signal.signal(number, signal.SIG_IGN)
    self.wake, wake_in = os.pipe()
    for fd in (self.wake, wake_in):
      os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)

  def serve(self):
    while True:
      header, blobs = self.link.receive()
      facts, out = getattr(self, 'op_' + header['op'])(header, blobs)
      facts.update(id=header['id'], nonce=self.nonce)
      self.link.send(facts, out)
      if not facts['alive']:
        os._exit(0)

  def op_hello(self, header, blobs):
    self.limits, self.nonce = header['limits'], header['nonce']
    self.link.end = time.monotonic() + self.limits['lifetime_s']
    gc.freeze()  # children need not look through what the runner made
    # Proves that the change of uid works before anything of the policy runs.
    facts, out = self.call(None, '', b'', 10.0, 4096)
    facts['counters'] = counters()
    facts['python'] = '.'.join(str(n) for n in sys.version_info[:3])
    return facts, out

  def op_run(self, header, blobs):
    argv = header['argv']
    code = blobs[1].decode('utf-8', 'replace') if argv is None else ''
    return self.call(
      argv, code, blobs[0], header['timeout_s'], header['output_cap']
    )

  def call(self, argv, code, stdin, timeout_s, cap):
    """Forks, runs `argv` or `code` in the child, ends it all, and reports."""
    deadline = min(time.monotonic() + timeout_s, self.link.end)
    before = counters()
    pipes = [os.pipe() for _ in range(3)]
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
      self.become_child([pipes[0][0], pipes[1][1], pipes[2][1]])
      if argv is None:
        raise BecomeCode(code)
      become_program(argv)
    for fd in (pipes[0][0], pipes[1][1], pipes[2][1]):
      os.close(fd)
    ours = (pipes[0][1], pipes[1][0], pipes[2][0])
    captures = Capture(cap), Capture(cap)
    end, status = self.watch(pid, ours, captures, stdin, deadline)
    reaped, last = kill_all(pid)
    for fd, capture in zip(ours[1:], captures):
      drain(fd, capture)  # every writer is dead: this ends
      os.close(fd)
    after = counters()
    facts = {
      'end': end,
      'wait': last if status is None else status,
      'reaped': reaped,
      'disk_full': self.disk_full(),
      'alive': time.monotonic() < self.link.end,
      'dropped': [c.parts()[2] for c in captures],
    }
    for name in ('oom', 'pids'):
      known = before[name] is not None and after[name] is not None
      facts[name] = after[name] - before[name] if known else 0
    return facts, [p for c in captures for p in c.parts()[:2]]

  def watch(self, pid, ours, captures, stdin, deadline):
    """Feeds and drains the child: ('exit'|'timeout'|'output', wait status)."""
    to_child, out, err = ours
    streams = {out: captures[0], err: captures[1]}
    stdin = memoryview(stdin)
    seen_cap = self.limits['output_kill']
    with selectors.DefaultSelector() as selector:
      for fd in (self.link.fd_in, self.wake, out, err):
        selector.register(fd, selectors.EVENT_READ)
      for fd in ours:
        os.set_blocking(fd, False)
      if stdin:
        selector.register(to_child, selectors.EVENT_WRITE)
      else:
        os.close(to_child)
      end = status = None
      while end is None:
        left = deadline - time.monotonic()
        for key, _ in selector.select(max(0.0, left)):
          if key.fd == self.link.fd_in:
            self.link.fill()  # ends the runner if the host is gone
          elif key.fd == self.wake:
            drain(self.wake, None)
            status = reap(pid)
          elif key.fd == to_child:
            stdin = feed(to_child, stdin)
            if not stdin:
              selector.unregister(to_child)
              os.close(to_child)
          elif not take(key.fd, streams[key.fd]):
            selector.unregister(key.fd)
        if status is not None:
          end = 'exit'
        elif sum(c.seen for c in captures) > seen_cap:
          end = 'output'
        elif time.monotonic() >= deadline:
          end = 'timeout'
      if stdin:
        os.close(to_child)
    return end, status

  def become_child(self, fds):
    """Gives up everything that the policy must not have. In the child."""
    try:
      signal.set_wakeup_fd(-1)
      signal.signal(signal.SIGCHLD, signal.SIG_DFL)
      # As a fresh interpreter has them.
      for number in self.ignored - {signal.SIGPIPE, signal.SIGXFSZ}:
        signal.signal(number, signal.SIG_DFL)
      signal.signal(signal.SIGINT, signal.default_int_handler)
      os.setsid()
      for target, fd in enumerate(fds):
        os.dup2(fd, target)
      os.closerange(3, 1024)
      try:  # the kernel shall choose a child, not the runner
        with open('/proc/self/oom_score_adj', 'w') as file:
          file.write('1000')
      except OSError:
        pass  # not allowed without root: the child is larger anyway
      for name, value in self.limits['rlimits'].items():
        resource.setrlimit(getattr(resource, name), (value, value))
      if os.geteuid() == 0:
        uid = self.limits['uid']
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
      os.umask(0o022)
      os.chdir(self.limits['workdir'])
      os.environ.clear()
      os.environ.update(self.limits['env'])
    except BaseException as error:  # never go on with the runner's rights
      os.write(2, f'runner: cannot become a child: {error!r}'.encode())
      os._exit(125)

  def disk_full(self):
    for path in (self.limits['workdir'], '/tmp'):
      info = os.statvfs(path)
      if info.f_bavail == 0 or (info.f_files and info.f_favail == 0):
        return True
    return False


def become_program(argv):
  """Replaces the process by `argv`, or ends it as a shell would."""
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)
  try:
    os.execvpe(argv[0], argv, os.environ)
  except (OSError, ValueError) as error:  # ValueError: a zero byte
    os.write(2, f'{argv[0]}: {error}'.encode('utf-8', 'replace'))
    os._exit(127)


def take(fd, capture):
  """One read from a non-blocking `fd`; False at its end."""
  try:
    data = os.read(fd, _CHUNK)
  except BlockingIOError:
    return True
  if data and capture is not None:
    capture.add(data)
  return bool(data)


def drain(fd, capture):
  """Reads a non-blocking `fd` until nothing is there."""
  while True:
    try:
      data = os.read(fd, _CHUNK)
    except BlockingIOError:
      return
    if not data:
      return
    if capture is not None:
      capture.add(data)


def feed(fd, data):
  """Writes what fits; what is left, empty if nobody reads any more."""
  try:
    return data[os.write(fd, data[:_CHUNK]) :]
  except BlockingIOError:
    return data
  except BrokenPipeError:
    return data[:0]


def reap(pid):
  """Reaps all who have ended; the wait status of `pid` if it is among them."""
  status = None
  while True:
    try:
      ended, code = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
      return status
    if ended == 0:
      return status
    if ended == pid:
      status = code


def kill_all(pid):
  """Kills all but this process: (number besides `pid`, status of `pid`)."""
  reaped, status = 0, None
  while True:
    try:
      os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
      pass
    try:
      ended, code = os.waitpid(-1, 0)
    except ChildProcessError:
      return reaped, status
    if ended == pid:
      status = code
    else:
      reaped += 1


def main():
  # kill(-1) anywhere else than in a PID namespace of its own is a disaster.
  if os.getpid() != 1:
    sys.exit(f'the runner must be PID 1 of a sandbox, not {os.getpid()}')
  if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
    sys.exit(f'prctl(PR_SET_DUMPABLE) failed: errno {ctypes.get_errno()}')
  # Out of the way of 0, 1 and 2, which are the child's own later.
  link = Link(os.dup(0), os.dup(1))
  null = os.open(os.devnull, os.O_RDWR)
  os.dup2(null, 0)
  os.dup2(null, 1)
  Runner(link).serve()


def run_source(source):
  """Runs Python source as an interpreter's `-c` would; the exit code."""
  module = types.ModuleType('__main__')
  module.__builtins__ = __builtins__
  sys.modules['__main__'] = module
  sys.argv = ['-c']
  code = 0
  try:
    exec(compile(source, '<code>', 'exec'), module.__dict__)
  except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if not isinstance(end.code, (int, type(None))):
      print(end.code, file=sys.stderr)
  except BaseException as error:
    code = 1
    trace = error.__traceback__.tb_next  # without this frame
    sys.excepthook(type(error), error.with_traceback(trace), trace)
  # What an interpreter does at its end, without tearing down the runner's
  # modules, which would take longer than most calls.
  if 'threading' in sys.modules:
    sys.modules['threading']._shutdown()
  atexit._run_exitfuncs()
  module.__dict__.clear()
  gc.collect()
  for stream in (sys.stdout, sys.stderr):
    try:
      stream.flush()
    except (AttributeError, OSError, ValueError):
      code = code or 120  # as an interpreter says it
  return code & 0xFF


if __name__ == '__main__':
  try:
    main()
  except BecomeCode as _child:
    _source = _child.source
  os._exit(run_source(_source))  # only a forked child comes here
