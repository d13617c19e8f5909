"""Sessions: interpreters that live on over calls, and what may end them."""

import time

import pytest
from test_sandbox_conformance import PROCESSES

from agentjax.env.sandbox import Call, CallStatus, SandboxBug


@pytest.fixture
def python(shared):
  with shared.session('python') as session:
    yield session


@pytest.fixture
def shell(shared):
  with shared.session('shell') as session:
    yield session


def seen(result):
  return result.exit, result.stdout, result.stderr


def test_python_remembers(python):
  first = python.run('import math; x = 6\ndef f(): return x * 7')
  assert seen(first) == (0, '', '')
  result = python.run('print(f(), math.pi > 3)')
  assert seen(result) == (0, '42 True\n', '')
  assert (result.status, result.reaped) == (CallStatus.OK, 0)
  python.run('class A: pass\na = A()')
  assert python.run('print(type(a) is A, __name__)').stdout == (
    'True __main__\n'
  )


def test_what_python_does_not_catch_is_text_of_its_own_lines(python):
  python.run('x = 1\ndef f():\n  return {}[x]')
  result = python.run('print("out")\nf()')
  assert result.status is CallStatus.NONZERO and result.session_alive
  assert seen(result) == (
    1,
    'out\n',
    'Traceback (most recent call last):\n'
    '  File "<code 2>", line 2, in <module>\n'
    '  File "<code 1>", line 3, in f\n'
    'KeyError: 1\n',
  )
  result = python.run('y = 2\nf(')
  assert result.stderr.startswith('  File "<code 3>", line 2\n')
  assert result.stderr.endswith("SyntaxError: '(' was never closed\n")
  # Lines before an error have been run; a syntax error is none of those.
  assert python.run('print(x, "y" in globals())').stdout == '1 False\n'


@pytest.mark.parametrize(
  'text, exit_code, stdout, stderr',
  [
    ('import sys; sys.exit(3)', 3, '', ''),
    ('raise SystemExit("why")', 1, '', 'why\n'),
    ('exit()', 0, '', ''),
    ('import sys; print(sys.stdin.read() == "")', 0, 'True\n', ''),
    ('import sys; sys.stderr.write("e"); print("o")', 0, 'o\n', 'e'),
    ('print("no newline", end="")', 0, 'no newline', ''),
    ('', 0, '', ''),
    ('from __future__ import annotations\nprint("é漢\\0")', 0, 'é漢\0\n', ''),
  ],
)
def test_a_python_call(shared, text, exit_code, stdout, stderr):
  with shared.session('python') as python:
    assert seen(python.run(text)) == (exit_code, stdout, stderr)
    assert python.alive and python.run('print(1)').stdout == '1\n'


def test_reading_meets_the_end(python, shell):
  asked = python.run('input("name? ")')
  assert asked.stdout == 'name? '
  assert asked.stderr.endswith('EOFError: EOF when reading a line\n')
  assert seen(shell.run('read x; echo "[$x] $?"')) == (0, '[] 1\n', '')
  assert shell.run('cat; python3 -c "input()"').exit == 1


def test_a_fork_that_runs_on_answers_for_itself_alone(python):
  code = (
    'import os\n'
    'child = os.fork()\n'
    'if child: os.waitpid(child, 0)\n'
    'print("parent" if child else "child")'
  )
  result = python.run(code)
  assert seen(result) == (0, 'child\nparent\n', '')
  assert python.run('print(child > 1)').stdout == 'True\n'


def test_shell_remembers(shell):
  shell.run('x="a  b"; cd /tmp; f() { echo "$x" "$PWD" "$@"; }; export y=2')
  second = shell.run('f 1 "2  3"; sh -c \'echo $y\'; (exit 7)')
  assert seen(second) == (7, 'a  b /tmp 1 2  3\n2\n', '')
  if shell.run('[ -n "$BASH" ]').exit == 0:
    shell.run('a=(1 "2 3"); shopt -s extglob')
    assert shell.run('echo "${a[1]}"; shopt extglob').stdout == (
      '2 3\nextglob        \ton\n'
    )


@pytest.mark.parametrize(
  'text, exit_code, stdout, stderr_end',
  [
    ('echo a\nnosuch\necho b', 0, 'a\nb\n', 'nosuch: command not found\n'),
    ('false', 1, '', ''),
    ('if then', 2, '', "near unexpected token `then'\nshell: eval: line 1:"),
    ('kill -9 $$BASHPID', 1, '', ''),
    ('break; echo no', 0, '', ''),
    ('for i in 1 2; do continue; done; echo $i', 0, '2\n', ''),
    ('cat <<END\n$((6*7)) `echo "q\'"`\nEND', 0, "42 q'\n", ''),
    ('f() { return 5; }; f', 5, '', ''),
    ('exec 2>&1; nosuch', 127, 'shell: line 1: nosuch:', ''),
    ('printf "\\0\\377" | od -An -tx1', 0, ' 00 ff\n', ''),
    ('', 0, '', ''),
    ('# a comment', 0, '', ''),
    ('echo é漢 && echo x > /dev/stderr', 0, 'é漢\n', 'x\n'),
    ('ls /proc/self/fd | tr "\\n" " "', 0, '0 1 2 3 ', ''),
  ],
)
def test_a_shell_call(shared, text, exit_code, stdout, stderr_end):
  if not shared.facts['shell'].endswith('bash'):
    pytest.skip('messages and codes of bash')
  with shared.session('shell') as shell:
    result = shell.run(text)
    assert result.exit == exit_code and result.stdout.startswith(stdout)
    assert stderr_end in result.stderr
    assert shell.alive and shell.run('echo on').stdout == 'on\n'


def test_exit_ends_a_shell_and_another_can_be_opened(shared, shell):
  result = shell.run('echo bye; exit 4')
  assert (result.exit, result.stdout) == (4, 'bye\n')
  assert not result.session_alive and result.alive and not shell.alive
  again = shell.run('echo more')
  assert again.status is CallStatus.GONE and not again.session_alive
  assert again.stderr == ('the session is gone (exit code 4): open a new one\n')
  with shared.session('shell') as other:
    assert other.run('echo new').stdout == 'new\n'


def test_sessions_share_files_and_nothing_else(shared, python, shell):
  with shared.session('python') as other:
    python.run('x = 1; import os; os.chdir("/tmp"); os.environ["V"] = "1"')
    assert other.run('print(x)').stderr.endswith("'x' is not defined\n")
    code = 'import os; print(os.getcwd(), "V" in os.environ)'
    assert other.run(code).stdout == '/task False\n'
    assert shell.run('pwd; echo "[$V]"').stdout == '/task\n[]\n'
    python.run('open("/tmp/shared", "w").write("here")')
    assert shell.run('cat /tmp/shared; rm /tmp/shared').stdout == 'here'
  assert shared.call(Call(code='print(x)')).exit == 1


def test_a_plain_call_spares_the_sessions(shared, python, shell):
  python.run('x = 1')
  shell.run('x=2')
  daemon = 'setsid sleep 99 & setsid sleep 99 & echo on'
  result = shared.call(Call(argv=['sh', '-c', daemon]))
  assert (result.stdout, result.reaped) == ('on\n', 2)
  assert python.run('print(x)').stdout == '1\n'
  assert shell.run('echo $x').stdout == '2\n'


def test_no_process_outlives_its_call_and_none_a_closed_session(shared):
  with shared.session('shell') as shell, shared.session('python') as python:
    result = shell.run('setsid sleep 99 & sleep 99 & echo $!')
    assert result.exit == 0 and result.reaped == 2
    # Said by the shell of its job, it would be the next call's text.
    assert seen(shell.run('jobs; wait; echo done')) == (0, 'done\n', '')
    spawn = 'import subprocess as s; p = s.Popen(["sleep", "99"])'
    assert python.run(spawn).reaped == 1
    assert python.run('print(p.wait())').stdout == '-9\n'
    count = PROCESSES.replace('print(', 'print(len(').rstrip() + ')'
    assert shared.call(Call(code=count)).stdout == '2\n'
  assert shared.call(Call(code=PROCESSES)).stdout == '[]\n'


def test_between_its_calls_a_session_is_frozen(python):
  code = (
    'import threading, time\n'
    'n = 0\n'
    'def count():\n'
    '  global n\n'
    '  while True:\n'
    '    n += 1; print("tick"); time.sleep(0.001)\n'
    'threading.Thread(target=count, daemon=True).start()\n'
    'time.sleep(0.05); stopped = n'
  )
  python.run(code)
  time.sleep(0.4)
  ticks = python.run('print(n - stopped); time.sleep(0.05)').stdout
  assert int(ticks.replace('tick\n', '').split()[0]) < 100
  assert 'tick\n' in ticks  # and goes on in the calls


@pytest.mark.parametrize('kind', ['python', 'shell'])
@pytest.mark.parametrize(
  'text, status, why',
  [
    (
      {'python': 'while True: pass', 'shell': 'while :; do :; done'},
      *(CallStatus.TIMEOUT, 'timeout'),
    ),
    (
      {
        'python': 'x = bytearray(1 << 30)',
        'shell': 'x=$(head -c 1000000000 /dev/zero | tr "\\0" x)',
      },
      *(CallStatus.OOM, 'oom'),
    ),
    (
      {'python': 'while True: print("x" * 9999)', 'shell': 'yes'},
      *(CallStatus.OUTPUT_CAP, 'output_cap'),
    ),
    (
      {
        'python': 'import os; os.kill(os.getpid(), 15)',
        'shell': 'kill -TERM $$',
      },
      *(CallStatus.SIGNAL, 'signal'),
    ),
    (
      {'python': 'import os; os._exit(5)', 'shell': 'exec sh -c "exit 5"'},
      *(CallStatus.NONZERO, 'exit code 5'),
    ),
  ],
)
def test_what_ends_a_session(shared, kind, text, status, why):
  timeout_s = 0.3 if status is CallStatus.TIMEOUT else 20.0
  with shared.session(kind) as session:
    result = session.run(text[kind], timeout_s)
    assert result.status is status and result.alive
    assert not result.session_alive and not session.alive
    again = session.run('1')
    assert again.status is CallStatus.GONE and f'({why})' in again.stderr
  with shared.session(kind) as fresh:
    assert fresh.run('').status is CallStatus.OK
  assert shared.call(Call(code=PROCESSES)).stdout == '[]\n'


def test_limits_that_a_session_survives(shared):
  with shared.session('shell') as shell, shared.session('python') as python:
    code = 'open("/tmp/big", "wb").write(bytes(64 << 20))'
    full = python.run(code)
    assert full.status is CallStatus.DISK and full.session_alive
    assert python.run('import os; os.remove("/tmp/big")').exit == 0
    hog = shell.run('python3 -c "bytearray(1 << 30)"')
    assert (hog.status, hog.exit) == (CallStatus.OOM, 137)
    assert shell.run('echo on').stdout == 'on\n'
    long = python.run('for i in range(100_000): print(i)')
    assert long.status is CallStatus.OK and long.truncated[0] > 100_000
    assert 'bytes left out' in long.stdout


def test_a_call_of_another_may_kill_a_session(shared, python):
  killed = shared.call(Call(argv=['sh', '-c', 'kill -9 -1; true']))
  assert killed.status is CallStatus.OK
  gone = python.run('1')
  assert gone.status is CallStatus.GONE and 'another call' in gone.stderr


FORGED = """
import os, sys
frame = sys._getframe()
while 'token' not in frame.f_locals: frame = frame.f_back
token = frame.f_locals['token']
{}
"""


@pytest.mark.parametrize(
  'forged',
  [
    # Its own call may end before its time, with what it likes to say.
    'print("so far", flush=True); os.write(9, token + b" 0\\n"); '
    'import time; time.sleep(0.2)',
    'print("so far"); os.write(9, b"x 0\\n" * 9999 + token)',
    'print("so far"); os.write(9, token * 99 + b" 0" + b"\\n")',
    'print("so far"); sys.stdout.flush(); os.write(9, token + b" 0\\n" * 2)',
  ],
)
def test_a_forged_end_is_the_end_of_its_own_call_alone(shared, forged):
  with shared.session('python') as python, shared.session('python') as other:
    first = python.run(FORGED.format(forged), 0.5)
    assert first.stdout == 'so far\n'
    if not python.alive:
      return
    for session in (other, python):
      result = session.run('print("mine"); 1/0')
      assert (result.status, result.stdout) == (CallStatus.NONZERO, 'mine\n')
      assert result.stderr.endswith('ZeroDivisionError: division by zero\n')


@pytest.mark.parametrize(
  'broken',
  [
    'os.close(9)',
    'os.close(7); os.close(8); os.close(9)',
    'os.dup2(0, 7)',
    'os.close(1)',
    'import gc\nfor o in gc.get_objects():\n'
    '  if type(o) is dict and o is not globals() and "token" in o: o.clear()',
    'os.ftruncate(8, 0)',
    'import signal as s; s.signal(14, lambda *a: 1/0); s.setitimer(0, .05)',
    'sys.excepthook = None; sys.stdout = None; sys.stderr = 3; 1/0',
    'import builtins; builtins.compile = builtins.exec = None',
  ],
)
def test_a_session_that_is_broken_from_within_harms_itself_alone(
  shared, broken
):
  with shared.session('python') as python, shared.session('python') as other:
    first = python.run('import os, sys\n' + broken, 0.5)
    second = python.run('print("on")', 0.5)
    for result in (first, second):
      assert result.alive and isinstance(result.status, CallStatus)
    assert other.run('print("mine")').stdout == 'mine\n'


FILL = """
import os
try: os.chmod('/proc/self/fd/7', 0o666)
except OSError: pass
fd = os.open('/proc/self/fd/7', os.O_WRONLY | os.O_NONBLOCK)
try:
  while True: os.write(fd, b'x' * 4096)
except BlockingIOError: print('full')
"""


def test_a_request_that_cannot_be_given_ends_the_session(shared, python):
  first = python.run(FILL, 5.0)
  again = python.run('print("on")', 5.0)
  assert first.alive and again.alive
  if first.stdout == 'full\n':  # no runner of another uid: it could
    assert again.status in (
      CallStatus.SIGNAL,
      CallStatus.TIMEOUT,
      CallStatus.OK,
    )
  else:
    assert first.stderr.endswith("Permission denied: '/proc/self/fd/7'\n")
    assert again.stdout == 'on\n'


@pytest.mark.parametrize(
  'hold',
  [
    'import threading, time\n'
    'while True: threading.Thread(target=time.sleep, args=(99,)).start()',
    'import os\nwhile True: os.fork() or os._exit(0)',
  ],
)
def test_processes_held_by_a_frozen_session_are_the_policys(fresh, hold):
  """Not the infrastructure's: the runner itself can start none then."""
  if 'pids' not in fresh.facts['counted']:
    pytest.skip('nothing counts refused processes here')
  python = fresh.session('python')
  held = python.run(hold, 10.0)
  assert held.status is CallStatus.PIDS
  assert held.session_alive
  result = fresh.call(Call(code='print(1)'))
  assert result.status is CallStatus.PIDS and result.alive
  late = fresh.session('shell')
  assert not late.alive and 'pids' in late.run('true').stderr
  assert fresh.put({'x': b''}).status is CallStatus.PIDS
  assert fresh.get(['x']).refused == {'x': 'not read: pids'}
  python.close()
  assert fresh.call(Call(code='print(1)')).stdout == '1\n'


LEADERLESS = """
import ctypes, os, threading, time
if os.fork() == 0:
  threading.Thread(target=time.sleep, args=(99,)).start()
  end = {'x86_64': 60, 'aarch64': 93}[os.uname().machine]  # of this thread
  ctypes.CDLL(None).syscall(end, 0)
time.sleep(0.2)
"""


def test_a_process_whose_first_thread_has_ended_is_no_dead_one(shared, python):
  result = shared.call(Call(code=LEADERLESS))
  assert (result.status, result.reaped) == (CallStatus.OK, 1)
  result = python.run(LEADERLESS)
  assert (result.status, result.reaped) == (CallStatus.OK, 1)


WAKERS = """
import os, signal
for _ in range(4): os.fork()
while True:
  try: os.fork()
  except OSError: pass
  try: os.kill(-1, signal.SIGCONT)
  except OSError: pass
"""


def test_processes_that_wake_each_other_are_ended(fresh):
  with fresh.session('python') as python:
    python.run('x = 1')
    result = fresh.call(Call(code=WAKERS, timeout_s=1.0))
    assert result.status in (CallStatus.PIDS, CallStatus.TIMEOUT)
    assert result.duration_s < 8
    after = python.run('print(x)')
    assert after.status is CallStatus.GONE or after.stdout == '1\n'
  assert fresh.call(Call(code=PROCESSES)).stdout == '[]\n'


def test_callers_are_told_what_no_session_does(shared, python):
  with pytest.raises(SandboxBug, match="'perl': choose python or shell"):
    shared.session('perl')
  with pytest.raises(SandboxBug, match='timeout_s is 0'):
    python.run('1', 0)
  opened = []
  with pytest.raises(SandboxBug, match='8 sessions are open'):
    for _ in range(9):
      opened.append(shared.session('shell'))
  for session in opened:
    session.close()
    session.close()
  with shared.session('shell') as again:
    assert again.run('echo 1').stdout == '1\n'
