"""Children: what they give up, and how all that they leave is ended.

For process 1 of a PID namespace alone: kill(-1) means everybody else.
"""

import _signal
import ctypes
import fcntl
import os
import resource
import select
import signal
import time

from .streams import drain

# Python and the runner ignore them; what is executed would go on doing so.
_IGNORED = (int(signal.SIGINT), int(signal.SIGPIPE), int(signal.SIGXFSZ))
_DEFAULT = _signal.SIG_DFL
# `signal.signal` without its enums, which touch many objects.
set_signal = _signal.signal
# The C library keeps these for itself, so that only a system call can set them:
# its number, by machine.
_HIDDEN = (32, 33)
_SIGACTION = {'x86_64': 13, 'aarch64': 134}
_FREEZE_S = 2.0


class Become(BaseException):
  """Unwinds a forked child to the top of the program, which calls `then`."""

  def __init__(self, then):
    self.then = then


def take_signals(wakeup):
  """Makes this process, as PID 1, safe from its children's signals.

  The kernel drops those without a handler; SIGINT has Python's, and SIGCHLD
  gets one here, which writes to the descriptor `wakeup`. What whoever started
  the sandbox ignores or blocks (nohup, a shell's background) does not show in
  it.
  """
  signal.pthread_sigmask(signal.SIG_SETMASK, ())
  for number in signal.valid_signals() - set(_IGNORED):
    if signal.getsignal(number) is signal.SIG_IGN:
      signal.signal(number, signal.SIG_DFL)
  call = _SIGACTION.get(os.uname().machine)
  for number in _HIDDEN if call else ():
    default = ctypes.create_string_buffer(64)  # of zeros
    ctypes.CDLL(None).syscall(call, number, default, None, ctypes.c_size_t(8))
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
  signal.signal(signal.SIGCHLD, lambda *_: None)


def settle(limits):
  """What children inherit as it is, done once: variables, folder, umask."""
  os.environ.clear()
  os.environ.update(limits['env'])
  os.umask(0o022)
  os.chdir(limits['workdir'])


def become_child(limits, fds):
  """Gives up everything that the policy must not have. In the child.

  Every object that is touched here is a page to be copied, so it is as plain
  as it can be. `fds` maps the numbers that it shall have to the runner's.
  """
  try:
    signal.set_wakeup_fd(-1)
    os.setsid()
    _take_fds(fds)
    try:  # the kernel shall choose a child, not the runner
      fd = os.open('/proc/self/oom_score_adj', os.O_WRONLY)
      os.write(fd, b'1000')
      os.close(fd)
    except OSError:
      pass  # not allowed without root: the child is larger anyway
    for name, value in limits['rlimits'].items():
      resource.setrlimit(getattr(resource, name), (value, value))
    if os.geteuid() == 0:
      uid = limits['uid']
      os.setgroups([])
      os.setresgid(uid, uid, uid)
      os.setresuid(uid, uid, uid)
  except BaseException as error:  # never go on with the runner's rights
    os.write(2, f'runner: cannot become a child: {error!r}'.encode())
    os._exit(125)


def set_signals(executed):
  """As a fresh program has them, or a fresh interpreter of Python."""
  if executed:  # what is handled is reset by the kernel
    for number in _IGNORED:
      set_signal(number, _DEFAULT)
  else:
    set_signal(signal.SIGCHLD, _DEFAULT)
    set_signal(signal.SIGINT, signal.default_int_handler)


def _take_fds(fds):
  top = max(fds)
  if min(fds.values()) <= top:  # out of the way of each other
    fds = {n: fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for n, fd in fds.items()}
  for number in fds:
    os.dup2(fds[number], number)
  if top > 2:
    for number in set(range(top)) - set(fds):
      os.closerange(number, number + 1)
  os.closerange(top + 1, 1024)


def become_program(argv, env):
  """Replaces the process by `argv`, or ends it as a shell would."""
  name = argv[0]
  folders = [''] if '/' in name else env.get('PATH', os.defpath).split(':')
  refused = None
  for folder in folders:
    path = f'{folder}/{name}' if folder else name
    try:
      os.execve(path, argv, env)
    except (FileNotFoundError, NotADirectoryError) as error:
      refused = refused or error
    except (OSError, ValueError) as error:  # ValueError: a zero byte
      refused = error
  reason = getattr(refused, 'strerror', None) or refused
  os.write(2, f'{name}: {reason}'.encode('utf-8', 'replace'))
  os._exit(127)


def reap():
  """{pid: wait status} of all children who have ended."""
  ended = {}
  while True:
    try:
      pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
      return ended
    if pid == 0:
      return ended
    ended[pid] = status


def end_all(kept, wake):
  """Ends every process but this one and `kept`, which it leaves stopped.

  Args:
    kept: pids of children. wake: descriptor that SIGCHLD writes to.

  Returns:
    (pids that were killed, {pid: wait status} of children that ended). Where
    somebody cannot be stopped, `kept` is among the killed.
  """
  if not kept:
    return _kill_all()
  killed, ended = set(), {}
  deadline = time.monotonic() + _FREEZE_S
  while time.monotonic() < deadline:
    # All at once, so that nobody forks away from the list below. A process
    # that was missed may have woken others: hence again, until all stand.
    _signal_all(signal.SIGSTOP)
    standing = all(_is_stopped(pid) for pid in kept - set(ended))
    others = _alive() - kept
    for pid in others:
      _signal(pid, signal.SIGKILL)
    killed |= others
    ended.update(reap())
    if standing and not others:
      return killed, ended
    select.select([wake], [], [], 0.001)
    drain(wake)
  more, last = _kill_all()
  return killed | more, {**ended, **last}


def _kill_all():
  ended = {}
  while True:
    _signal_all(signal.SIGKILL)
    try:
      pid, status = os.waitpid(-1, 0)
    except ChildProcessError:
      return set(ended), ended
    ended[pid] = status


def _signal_all(number):
  _signal(-1, number)


def _signal(pid, number):
  try:
    os.kill(pid, number)
  except ProcessLookupError:
    pass


def _is_stopped(pid):
  """True if every thread of this child is stopped."""
  flags = os.WSTOPPED | os.WNOWAIT | os.WNOHANG
  try:
    return os.waitid(os.P_PID, pid, flags) is not None
  except ChildProcessError:
    return False  # it has ended, and will not stop again


def _alive():
  """Pids of all processes but this one, without those that only wait to be
  reaped: a stopped parent does not."""
  out = set()
  for name in os.listdir('/proc'):
    if not name.isdigit() or name == '1':
      continue
    try:
      with open(f'/proc/{name}/stat', 'rb') as file:
        fields = file.read().rpartition(b')')[2].split()
    except (FileNotFoundError, ProcessLookupError):
      continue
    # State, and number of threads: the first one may end before the others.
    if fields[0] not in (b'Z', b'X') or fields[17] not in (b'0', b'1'):
      out.add(int(name))
  return out
