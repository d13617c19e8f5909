"""Scripted episodes: what policies do in a sandbox, well and badly, by seed.

An episode is a list of steps, each a function of a sandbox; `run` gives what
the policy would read of each, and the whole result beside it without what no
two runs share. Nothing here prints what `verification.VARIES` lists.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from agentjax.env.sandbox import Call, CallResult, Sandbox
from agentjax.env.tools import PythonTool, readable

TIMEOUT_S, MAX_CHARS = 15.0, 400
Step = Callable[[Sandbox], Any]


@dataclasses.dataclass(frozen=True)
class Episode:
  """`ruins`: it needs a sandbox of its own, or leaves one hard to clean."""

  name: str
  steps: tuple[Step, ...]
  ruins: bool = False


def run(sandbox: Sandbox, episode: Episode) -> list[Any]:
  """Observations and results, to be compared between backends."""
  return [_plain(step(sandbox)) for step in episode.steps]


def _plain(result: Any) -> Any:
  if isinstance(result, CallResult):
    text = readable(result, TIMEOUT_S, MAX_CHARS)
    return text, dataclasses.replace(result, duration_s=0.0, reaped=0)
  return result


def clean(sandbox: Sandbox) -> None:
  """Empties what calls can write to, for the next episode."""
  folders = '/task /tmp /dev/shm'
  script = f'find {folders} -mindepth 1 -delete'
  result = sandbox.call(Call(argv=['sh', '-c', script]))
  assert result.exit == 0, result


# ---- steps ------------------------------------------------------------------


def tool(code: str) -> Step:
  """As a policy calls it: the text that it reads."""
  return lambda sandbox: PythonTool(
    timeout_s=TIMEOUT_S, max_chars=MAX_CHARS, sandbox=sandbox
  )({'code': code})


def code(source: str, stdin: bytes = b'', timeout_s: float = TIMEOUT_S) -> Step:
  call = Call(code=source, stdin=stdin, timeout_s=timeout_s)
  return lambda sandbox: sandbox.call(call)


def shell(script: str, timeout_s: float = TIMEOUT_S) -> Step:
  call = Call(argv=['sh', '-c', script], timeout_s=timeout_s)
  return lambda sandbox: sandbox.call(call)


def argv(*words: str, stdin: bytes = b'') -> Step:
  call = Call(argv=words, stdin=stdin, timeout_s=TIMEOUT_S)
  return lambda sandbox: sandbox.call(call)


def put(files: dict[str, bytes], mode: int = 0o644) -> Step:
  return lambda sandbox: sandbox.put(files, mode)


def get(*paths: str, max_bytes: int = 1 << 20) -> Step:
  return lambda sandbox: sandbox.get(paths, max_bytes)


def archived(*paths: str) -> Step:
  """An archive out, and in again under another folder's files."""

  def step(sandbox):
    data, refused = sandbox.get_tar(paths)
    return data, refused, _plain(sandbox.put_tar(data))

  return step


def snapshot(sandbox: Sandbox):
  return sandbox.snapshot()


def session(kind: str, *texts: str, timeout_s: float = TIMEOUT_S) -> Step:
  """Several calls of one session, and whether it lives on."""

  def step(sandbox):
    with sandbox.session(kind) as opened:
      out = [_plain(opened.run(text, timeout_s)) for text in texts]
      return [*out, opened.alive]

  return step


# ---- kinds of episodes ------------------------------------------------------
# Each is a function of a generator of random numbers: (steps, ruins).


def sums(rng):
  a, b = rng.randrange(10, 999), rng.randrange(10, 999)
  return [
    tool(f'print({a} * {b} - {a} // 7)'),
    code(f'x = {a}\nfor i in range({b % 9}): x = x * 3 % {b}\nprint(x)'),
    tool(f'import math; print(math.comb({a % 40}, 5), math.sqrt({b}))'),
    tool(f'{a} + {b}'),
  ]


ERRORS = (
  '1 / 0',
  'print("before"); {}["key"]',
  'def f(n):\n  if n: return f(n - 1)\n  raise ValueError("deep")\nf(4)',
  'print("x"',
  'import no_such_module',
  'assert 1 == 2, "not so"',
  'class Odd(Exception): pass\nraise Odd("é漢🙂")',
  'def f(n): return f(n + 1)\nf(0)',
  'raise SystemExit(7)',
  'import sys; sys.exit("with words")',
  'open("/etc/passwd", "w")',
  'open("/usr/bin/x", "w")',
  'open("/home/x", "w")',
  'open("missing")',
  '"\\ud800".encode()',
  'try:\n  1/0\nexcept ZeroDivisionError:\n  int("x")',
  'import os; os._exit(9)',
  'raise KeyboardInterrupt',
  'raise ExceptionGroup("g", [ValueError(1), TypeError(2)])',
  'import warnings; warnings.warn("careful"); print("on")',
  'import socket; socket.create_connection(("1.1.1.1", 53), 2)',
  'import socket; socket.gethostbyname("example.com")',
  'import os; os.setuid(0)',
  'import os; os.mknod("n", 0o20600, os.makedev(1, 3))',
)


def errors(rng):
  return [f(e) for e in rng.sample(ERRORS, 3) for f in (tool, code)]


def text(rng):
  words = rng.sample(
    ['é漢🙂', '\x00\x1b[31m', '\u2028', '\r\n', 'ﬀ', '\ufeff'], 3
  )
  raw = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 60)))
  return [
    code(f'print({"".join(words)!r})'),
    tool(f'print({words[0]!r} * 5)'),
    code(f'import sys; sys.stdout.buffer.write({raw!r})'),
    code(f'import sys; sys.stderr.buffer.write({raw!r}); sys.exit(1)'),
    argv('cat', stdin=raw + words[1].encode()),
  ]


def output(rng):
  n = rng.randrange(2000, 20_000)
  return [
    code(f'for i in range({n}): print(i, "é")'),
    shell(f'seq 1 {n}; seq 1 {n} >&2; exit 4'),
    tool(f'print("漢" * {n})'),
  ]


def pipes(rng):
  n, word = rng.randrange(5, 60), ''.join(rng.choices('abcde', k=6))
  return [
    shell(f'seq 1 {n} | sort -r | head -n 4 | tr "\\n" ,'),
    shell(f'printf "%s\\n" {word} b a | sort | uniq -c | sed s/a/A/'),
    shell(f'echo {word} > f && cat f | wc -c; test -f g; echo $?'),
    shell(f'echo {word} | grep -c {word[0]} && false; exit {n % 5}'),
    argv('python3', '-c', f'import sys; print(sys.argv[1:], {n})', word),
    argv('no-such-program', word),
  ]


def surroundings(rng):
  probes = [
    'import os; print(sorted(os.environ.items()), os.getcwd())',
    'import os; print(os.getuid(), os.getgid(), os.getgroups())',
    'import getpass, os; print(getpass.getuser(), os.path.expanduser("~"))',
    'import socket; print(socket.gethostname())',
    'import socket; print(socket.gethostbyname("localhost"))',
    'import locale, sys; print(locale.getlocale(), sys.stdout.encoding)',
    'import time; print(time.tzname, time.strftime("%c", time.gmtime(0)))',
    'import os; print(oct(os.umask(0)), sorted(os.listdir("/proc/self/fd")))',
    'import os\nfor p in ("/task", "/tmp", "/dev/shm"):\n  s = os.statvfs(p)\n'
    '  print(p, s.f_bsize * s.f_blocks, oct(os.stat(p).st_mode))',
    'import resource as r\nfor n in sorted(dir(r)):\n  if n[:7] == "RLIMIT_" '
    'and n != "RLIMIT_NICE": print(n, r.getrlimit(getattr(r, n)))',
    'import os; print([os.isatty(i) for i in range(3)], os.getppid())',
    'import sys; print(sys.argv, sys.flags, sys.path[0], sys.executable)',
    'print(hash("agentjax"), {"a", "b", "c"}, __name__)',
    'import signal as s; print([int(n) for n in s.valid_signals() '
    'if s.getsignal(n) is s.SIG_IGN])',
    'print([l for l in open("/proc/self/status") if l[:5] in '
    '("CapEf", "NoNew", "SigIg", "SigBl", "Umask")])',
    'import os; print([n for n in ("home", "root", "var", "mnt", "opt") '
    'if os.path.isdir("/" + n)], os.access("/", os.W_OK))',
    'import multiprocessing as m\nif __name__ == "__main__":\n'
    '  with m.Pool(2) as p: print(p.map(abs, [-1, 2]))',
  ]
  return [
    *map(code, rng.sample(probes, 5)),
    shell('id; whoami; hostname; ulimit -n -c -f; umask; echo $0 $HOME $PATH'),
  ]


def files(rng):
  data = bytes(rng.randrange(256) for _ in range(rng.randrange(10, 5000)))
  return [
    put({'a/b/c.bin': data, 'é ü': b'x', 'empty': b''}),
    shell('find . -type f | sort | xargs -d "\\n" md5sum; chmod 600 empty'),
    code('import os; print(sorted(os.listdir("."))); os.rename("a", "z")'),
    put({'run.sh': b'#!/bin/sh\necho ran "$@"\nexit 3\n'}, 0o755),
    argv('./run.sh', 'one', 'two words'),
    put({'z': b'in the way'}),
    put({'link/x': b''}),
    shell('ln -s /etc/passwd out; ln -s z/b in; mkfifo p; echo hi > in/new'),
    get('z/b/c.bin', 'é ü', 'out', 'in', 'p', 'z', 'z/b/new', 'none'),
    get('z/b/c.bin', max_bytes=9),
    shell('cp run.sh /tmp/t && /tmp/t from tmp'),
  ]


def trees(rng):
  n = rng.randrange(2, 30)
  return [
    put({f'src/m{i}.py': f'x = {i}\n'.encode() * i for i in range(n)}),
    shell('mkdir -p src/deep/er; echo hi > src/deep/er/f; chmod 755 src/m0.py'),
    snapshot,
    shell('ln -s m0.py src/link; mkfifo p; ln src/m1.py hard; echo t > /tmp/t'),
    archived('src', 'p', 'none'),
    shell('rm -rf src/deep; echo new >> src/m0.py'),
    snapshot,
    archived('.'),
    shell('find . | sort; cat src/m0.py'),
  ]


def state(rng):
  n = rng.randrange(1, 99)
  return [
    tool(f'x = {n}; open("n", "w").write(str(x))'),
    tool('print(open("n").read())'),
    tool('print(x)'),
    tool('import json; json.dump({"a": [1, 2]}, open("d.json", "w"))'),
    tool('import json; print(json.load(open("d.json")))'),
    code('import sys; sys.path.insert(0, "/x"); import os; os.chdir("/")'),
    code('import os, sys; print(os.getcwd(), sys.path[0])'),
  ]


def sessions(rng):
  n = rng.randrange(2, 99)
  return [
    session(
      'python',
      f'import math; x = {n}\ndef f(): return x * 7',
      'print(f(), math.floor(2.5))',
      'y = [f() for _ in range(3)]\n1 / 0',
      'print(y, __name__)',
      'f(',
      'raise SystemExit("why")',
      'import sys; sys.stdout.buffer.write(b"\\xff\\x00")',
      'input()',
    ),
    session(
      'shell',
      f'x="a  {n}"; cd /tmp; f() {{ echo "$x" "$PWD" "$@"; }}',
      'f 1 "2  3"; (exit 7)',
      'nosuch; echo $?',
      'for i in 1 2; do echo $i; done | sort -r; sleep 99 & echo on',
      'if then',
      'cd /task; touch "b c" a; ls; echo *',
      'echo bye; exit 4',
      'echo gone',
    ),
    session('python', 'import time; time.sleep(99)', 'print(1)', timeout_s=0.3),
    session('python', 'import os; os.kill(os.getpid(), 9)', 'print(1)'),
    tool('print("apart")'),
  ]


def signals(rng):
  number = rng.choice((1, 2, 3, 6, 9, 10, 11, 13, 15))
  return [
    shell(f'echo so far; kill -{number} $$'),
    code(f'import os; print("a", flush=True); os.kill(os.getpid(), {number})'),
    tool(f'import os; os.kill(1, {number}); print("not mine")'),
    tool('import ctypes; ctypes.string_at(0)'),
    code('import os; os.abort()'),
    shell('sh -c "kill -9 $$"; echo after'),
    code('import os; os.kill(0, 15)'),
  ]


def left_behind(rng):
  n = rng.randrange(1, 5)
  return [
    shell(f'for i in $(seq {n}); do setsid sleep 1000 & done; echo started'),
    code('import os\nif os.fork():\n  print("parent")\nelse:\n'
         '  os.setsid()\n  import time; time.sleep(1000)'),
    code('import os; print(sorted(p for p in os.listdir("/proc") if '
         'p.isdigit() and p not in ("1", str(os.getpid()))))'),
    tool('import subprocess as s; print(s.run(["echo", "x"], '
         'capture_output=True))'),
  ]  # fmt: skip


def threads(rng):
  n = rng.randrange(2, 9)
  return [
    code(
      'import threading as t, time\nout = []\n'
      f'ts = [t.Thread(target=out.append, args=(i,)) for i in range({n})]\n'
      '[x.start() for x in ts]; [x.join() for x in ts]; print(sorted(out))'
    ),
    code('import atexit; atexit.register(print, "bye"); print("hi")'),
    code(
      'import asyncio\nasync def f(i): await asyncio.sleep(0); return i\n'
      f'async def g(): return await asyncio.gather(*map(f, range({n})))\n'
      'print(asyncio.run(g()))'
    ),
    code('import threading, time; threading.Thread(target=lambda: '
         '(time.sleep(.02), print("late"))).start(); 1/0'),
  ]  # fmt: skip


def standard_input(rng):
  lines = ''.join(f'{rng.randrange(99)}\n' for _ in range(5)).encode()
  return [
    code('import sys; print(sum(map(int, sys.stdin)))', stdin=lines),
    code('print(input(), input())', stdin=lines),
    code('print(input())'),
    argv('sort', '-n', stdin=lines),
    argv('head', '-c', '3', stdin=bytes(300_000)),
    code('import sys, hashlib as h; '
         'print(h.md5(sys.stdin.buffer.read()).hexdigest())',
         stdin=lines * 20_000),
  ]  # fmt: skip


def closed(rng):
  del rng
  return [
    code('import os; os.closerange(0, 30); print("x")'),
    code('import os; os.close(1); print("x")'),
    code('import os; os.close(2); 1/0'),
    code('import sys; sys.stdout.close()'),
    code('import sys; sys.stdout = None; print("x")'),
    code('import os; [os.open("/dev/null", 0) for _ in range(999)]'),
  ]


def too_long(rng):
  wait = rng.choice(('time.sleep(99)', 'os.kill(os.getpid(), 19)'))
  return [
    code(f'import os, time; print("so far", flush=True); {wait}', b'', 0.3),
    shell('trap "" TERM HUP INT; echo on; while :; do sleep 1; done', 0.3),
    tool('print("goes on")'),
  ]


def floods(rng):
  del rng
  return [argv('yes', 'flood'), tool('print("goes on")')]


def disk(rng):
  n = rng.randrange(17, 40)
  return [
    code(f'open("/tmp/big", "wb").write(bytes({n} << 20))'),
    tool('open("/task/small", "w").write("there is room"); print("yes")'),
    code('f = open("/task/big", "wb")\nwhile True: f.write(bytes(1 << 16))'),
    shell('echo more > /task/more'),
    put({'x': b'y' * 9999}),
    shell('rm /task/big /tmp/big; echo more > /task/more; cat /task/more'),
    code('f = open("sparse", "wb"); f.seek(1 << 30); f.write(b"x")'),
    code('for i in range(9000): open(f"f{i}", "w").close()'),
    shell('rm -rf f*; echo room > g; cat g'),
  ]


def memory(rng):
  n = rng.randrange(1, 4)
  return [
    code(f'print("a", flush=True); x = bytearray({n} << 30); print(len(x))'),
    shell('python3 -c "bytearray(1 << 30)"; echo the child alone: $?'),
    tool('print("goes on")'),
  ]


def forks(rng):
  del rng
  return [
    code(
      'import os\ntry:\n  while True: os.fork()\n'
      'except OSError: os._exit(1)'
    ),
    code('import threading as t, time\nwhile True: '
         't.Thread(target=time.sleep, args=(9,), daemon=True).start()'),
    tool('print("goes on")'),
  ]  # fmt: skip


# (kind, how many of a hundred, needs a sandbox of its own)
KINDS = (
  (sums, 9, False),
  (errors, 14, False),
  (text, 12, False),
  (output, 6, False),
  (pipes, 8, False),
  (surroundings, 12, False),
  (files, 6, False),
  (trees, 2, False),
  (state, 6, False),
  (sessions, 5, False),
  (signals, 6, False),
  (left_behind, 3, False),
  (threads, 3, False),
  (standard_input, 2, False),
  (closed, 1, False),
  (too_long, 1, False),
  (floods, 1, False),
  (disk, 1, True),
  (memory, 1, True),
  (forks, 1, True),
)


def episodes(n: int = 100, seed: int = 0) -> list[Episode]:
  """`n` of them, in the shares of `KINDS`; a pure function of its arguments."""
  order = [kind for kind, share, _ in KINDS for _ in range(share)]
  own = {kind for kind, _, alone in KINDS if alone}
  out = []
  for i in range(n):
    kind = order[i % len(order)]
    steps = kind(random.Random(f'{seed} {i}'))
    out.append(Episode(f'{i} {kind.__name__}', tuple(steps), kind in own))
  return out


def batches(made: Sequence[Episode], size: int) -> list[list[Episode]]:
  """Episodes that may share a sandbox, cleaned in between; others alone."""
  shared = [e for e in made if not e.ruins]
  out = [shared[i : i + size] for i in range(0, len(shared), size)]
  return out + [[e] for e in made if e.ruins]
