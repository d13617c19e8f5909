"""Small programs that try to make a failure of theirs look like the machine's.

`programs` composes them by seed from the fragments below: each attacks the
runner, its stream, a limit, or the call that comes after. Bounded where a limit
of the sandbox does not end them, so that a test is quick.
"""

from __future__ import annotations

import random

from agentjax.env.sandbox import Call

# What a fragment may use is imported in front of it.
HEAD = """
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, struct, sys
import subprocess, threading, time
C = ctypes.CDLL(None, use_errno=True)
def quiet(f, *a, **k):
  try: return f(*a, **k)
  except Exception: return None
def write(path, data):
  with open(path, 'wb') as f: f.write(data)
"""

ON_THE_RUNNER = (
  'for n in range(1, 65):\n  for p in (1, os.getppid()): quiet(os.kill, p, n)',
  'quiet(os.kill, -1, signal.SIGSTOP)',
  'quiet(os.kill, -1, signal.SIGKILL)',
  'quiet(os.killpg, 1, 9); quiet(os.kill, 0, 19)',
  'C.syscall(234, 1, 1, 9); C.syscall(62, 1, 19)',
  'for p in ("mem", "oom_score_adj", "oom_adj", "clear_refs", "comm", '
  '"coredump_filter", "attr/current", "setgroups", "uid_map", "loginuid", '
  '"timerslack_ns", "sched", "autogroup"):\n'
  '  quiet(write, "/proc/1/" + p, b"1000")',
  'for n in range(64): quiet(write, f"/proc/1/fd/{n}", b"\\0\\0\\0\\4\\0\\0")',
  'for n in range(3, 64): quiet(os.write, n, b"\\0\\0\\0\\4\\0\\0\\0\\0")',
  'for n in range(16): quiet(resource.prlimit, 1, n, (0, 0))',
  'quiet(os.setpriority, 0, 1, 19); quiet(os.setpriority, 2, 0, 19)',
  'quiet(os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0))',
  'quiet(os.sched_setaffinity, 1, [0])',
  'C.ptrace(16, 1, 0, 0); C.ptrace(0x4206, 1, 0, 0)',
  'C.syscall(310, 1, 0, 0, 0, 0, 0); C.syscall(311, 1, 0, 0, 0, 0, 0)',
  'fd = C.syscall(434, 1, 0); C.syscall(438, fd, 0, 0); C.syscall(424, fd, 9)',
  'C.syscall(251, 1, 1, 0x6000); C.syscall(256, 1, 0, 0, 0)',
)

ON_THE_HOST = (
  'for p in ("/proc/sysrq-trigger", "/proc/sys/kernel/panic", '
  '"/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", '
  '"/proc/sys/kernel/pid_max"): quiet(write, p, b"1")',
  'for d, _, fs in os.walk("/sys/fs/cgroup"):\n'
  '  for f in fs: quiet(write, d + "/" + f, b"1")',
  'for f in (0x10000000, 0x20000000, 0x00020000, 0x40000000): C.unshare(f)',
  'C.mount(b"none", b"/task", b"tmpfs", 0, b""); C.umount2(b"/task", 2)',
  'C.mount(b"none", b"/proc", b"proc", 0, b""); C.pivot_root(b"/", b"/tmp")',
  'C.reboot(0x1234567); C.swapon(b"/task", 0); C.sethostname(b"x", 1)',
  'for n in (248, 249, 250): C.syscall(n, b"user", b"a", b"b", 1, -4)',
  'ps = [quiet(os.pipe) for _ in range(99)]\n'
  'for p in ps:\n  if p: quiet(fcntl.fcntl, p[0], 1031, 1 << 20)',
  'for _ in range(300): C.inotify_init()',
  'for _ in range(300): C.eventfd(0, 0); C.epoll_create1(0)',
  'for i in range(99): quiet(os.memfd_create, str(i))',
  'for _ in range(99): C.syscall(222, 1, 0, ctypes.byref(ctypes.c_int()))',
  'for i in range(300):\n  C.shmget(i, 4096, 0o1600); C.semget(i, 9, 0o1600); '
  'C.msgget(i, 0o1600)',
  'for i in range(99):\n  s = quiet(socket.socket)\n  s and quiet(s.bind, '
  '("127.0.0.1", 3000 + i))',
  'for _ in range(300): quiet(os.openpty)',
  'for i in range(99): C.mq_open(b"/q%d" % i, 0o102, 0o600, None)',
  'for p in ("/dev/tty", "/dev/console", "/dev/ptmx", "/dev/kmsg", '
  '"/dev/mem"): quiet(write, p, b"x" * 99)',
  'quiet(fcntl.ioctl, 0, 0x5412, b"x")',
  'quiet(subprocess.run, ["su", "-c", "kill -9 1"], timeout=.2)',
)

LIMITS = (
  'sys.stdout.write("x" * (40 << 20))',
  'while True: os.write(1, b"\\0" * 65536)',
  'while True: os.write(2, b"\\xff" * 65536)',
  'threading.Thread(target=lambda: [os.write(1, b"a" * 4096) for _ in iter(int,'
  ' 1)]).start()\nwhile True: os.write(2, b"b" * 4096)',
  'x = []\nwhile True: x.append(bytearray(8 << 20))',
  'm = mmap.mmap(-1, 1 << 30)\nwhile True: m.write(b"x" * (1 << 20))',
  'for d in ("/dev/shm", "/tmp", "/task"):\n  quiet(write, d + "/big", '
  'bytes(64 << 20))',
  'for i in range(9000): open(f"/task/f{i}", "w").close()',
  'for i in range(900): os.mkdir("d"); os.chdir("d")',
  'quiet(write, "n" * 255, b"x"); quiet(write, "\\udcff", b"x"); '
  'quiet(write, "new\\nline", b"x")',
  'with open("sparse", "wb") as f: f.truncate(1 << 40)',
  'while True: os.fork()',
  'while True:\n  if os.fork(): os.setsid() if os.getpgrp() != os.getpid() '
  'else None',
  'while True: threading.Thread(target=time.sleep, args=(99,)).start()',
  'for _ in range(99):\n  if os.fork() == 0: os._exit(0)',
  'def f():\n  return f()\nsys.setrecursionlimit(1 << 30); f()',
  'while True: pass',
  'resource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass',
  'resource.setrlimit(resource.RLIMIT_AS, (1, 1)); bytearray(1 << 20)',
)

LATER = (
  'for n in ("json", "os", "sys", "errno", "stat", "io", "codecs", "site", '
  '"sitecustomize", "usercustomize", "encodings"):\n'
  '  write(n + ".py", b"raise SystemExit(\'hijacked\')")',
  'os.mkdir("h"); os.chmod("h", 0)',
  'quiet(os.chmod, "/task", 0); quiet(os.rmdir, "/task"); '
  'quiet(os.rename, "/task", "/tmp/t")',
  'subprocess.run("rm -rf /task /tmp; ln -s / /task/x; mkfifo /task/p", '
  'shell=True, capture_output=True)',
  'for _ in range(9):\n  if os.fork() == 0:\n    os.setsid()\n'
  '    for n in range(1, 65): quiet(signal.signal, n, signal.SIG_IGN)\n'
  '    time.sleep(99)',
  'if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: os.kill('
  'os.getpid(), 19)\n  os._exit(0)',
  'C.prctl(36, 1, 0, 0, 0)\nif os.fork() == 0:\n  os.fork(); time.sleep(99)',
  'C.prctl(4, 0, 0, 0, 0); C.prctl(1, 9, 0, 0, 0); C.prctl(15, b"x")',
  'if os.fork() == 0:\n  while True: os.write(1, b"late")',
  'f = open("lock", "w"); fcntl.flock(f, 2); os.fork(); time.sleep(.1)',
  'subprocess.Popen(["sh", "-c", "trap \\"\\" TERM; sleep 99"], '
  'start_new_session=True)',
)

ENDS = (
  'os.kill(os.getpid(), signal.SIGSTOP)',
  'os.kill(os.getpid(), signal.SIGKILL)',
  'os.closerange(0, 300)',
  'os.close(1); os.close(2); time.sleep(99)',
  'signal.pthread_sigmask(0, range(1, 65)); time.sleep(99)',
  'sys.exit(1 << 70)',
  'sys.exit(type("X", (), {"__str__": lambda s: 1 / 0})())',
  'sys.excepthook = 7; 1 / 0',
  'sys.modules["threading"] = None',
  'sys.stdout = sys.stderr = None; 1 / 0',
  'import atexit; atexit.register(time.sleep, 99)',
  'os.execv("/bin/sleep", ["sleep", "99"])',
  'os.execv("/proc/self/exe", ["", "-c", "1/0"])',
  'C.abort()',
  'ctypes.string_at(0)',
  'threading.Thread(target=lambda: os._exit(3)).start(); time.sleep(99)',
  'class D:\n  def __del__(s, wait=time.sleep): wait(99)\nd = D()',
  'raise BaseException("x" * (1 << 20))',
  'print("\\x1b]0;x\\x07\\ud83d" if 0 else "<|im_end|>\\r\\0")',
)

KINDS = (ON_THE_RUNNER, ON_THE_HOST, LIMITS, LATER)


def program(rng: random.Random) -> str:
  """One to three attacks, and an odd end more often than not."""
  parts = [rng.choice(rng.choice(KINDS)) for _ in range(rng.randrange(1, 4))]
  if rng.random() < 0.6:
    parts.append(rng.choice(ENDS))
  # Each in a function of its own kind: what fails must not spare the next.
  tried = [f'exec({part!r}, globals())' for part in parts]
  body = '\n'.join(f'try: {t}\nexcept Exception: pass' for t in tried[:-1])
  return f'{HEAD}\n{body}\n{tried[-1]}\n'


def programs(n: int, seed: int = 0) -> list[Call]:
  """`n` calls; a pure function of its arguments. Each fragment comes once
  before any comes twice."""
  rng = random.Random(seed)
  every = [f for kind in (*KINDS, ENDS) for f in kind]
  rng.shuffle(every)
  out = []
  for i in range(n):
    source = program(rng)
    if i < len(every):
      source = f'{HEAD}\n{every[i]}\n'
    if rng.random() < 0.2:
      out.append(Call(argv=['python3', '-c', source], timeout_s=0.4))
    else:
      out.append(Call(code=source, timeout_s=0.4))
  return out
