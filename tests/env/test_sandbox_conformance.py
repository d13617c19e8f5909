"""What every backend does alike: one suite, run on each."""

import dataclasses
import hashlib
import time

import pytest
from sandboxes import SPEC

from agentjax.env.sandbox import (
  Call,
  CallResult,
  CallStatus,
  SandboxBug,
  SandboxSpec,
  open_sandbox,
)
from agentjax.env.sandbox.spec import Died

PROCESSES = (
  'import os; print([p for p in os.listdir("/proc") if p.isdigit()'
  ' and p not in ("1", str(os.getpid()))])'
)

EVERY_SIGNAL = """
import os, signal, time
for number in range(1, signal.NSIG):
  for pid in (1, os.getppid()):
    try: os.kill(pid, number)
    except OSError: pass
time.sleep(.2)
print('alive')
"""


def run(sandbox, code, **options):
  return sandbox.call(Call(code=code, **options))


def shell(sandbox, script, **options):
  return sandbox.call(Call(argv=['sh', '-c', script], **options))


def test_argv_and_exit_codes(shared):
  result = shell(shared, 'echo out; echo err >&2; exit 3')
  assert (result.status, result.exit) == (CallStatus.NONZERO, 3)
  assert (result.stdout, result.stderr) == ('out\n', 'err\n')
  assert shell(shared, 'true').status is CallStatus.OK
  missing = shared.call(Call(argv=['no-such-program']))
  assert (missing.status, missing.exit) == (CallStatus.NONZERO, 127)
  killed = shell(shared, 'kill -TERM $$')
  assert (killed.status, killed.signal) == (CallStatus.SIGNAL, 15)
  assert killed.exit is None


@pytest.mark.parametrize(
  'code, exit_code, stdout, stderr_end',
  [
    ('print(6 * 7)', 0, '42\n', ''),
    ('raise SystemExit(4)', 4, '', ''),
    ('raise SystemExit', 0, '', ''),
    ('import sys; sys.exit("bad")', 1, '', 'bad\n'),
    ('1/0', 1, '', 'ZeroDivisionError: division by zero\n'),
    ('f(', 1, '', "SyntaxError: '(' was never closed\n"),
    ('import atexit; atexit.register(print, "bye")', 0, 'bye\n', ''),
    ('print(__name__, __import__("sys").argv)', 0, "__main__ ['-c']\n", ''),
    ('print(input()[::-1])', 0, 'olleh\n', ''),
    (
      'import threading as t, time\n'
      't.Thread(target=lambda: (time.sleep(.05), print("late"))).start()',
      0,
      'late\n',
      '',
    ),
  ],
)
def test_code_runs_as_an_interpreter_would(
  shared, code, exit_code, stdout, stderr_end
):
  result = run(shared, code, stdin=b'hello\n')
  assert (result.exit, result.stdout) == (exit_code, stdout)
  assert result.stderr.endswith(stderr_end)
  assert 'runner' not in result.stderr and '<string>' not in result.stderr


def test_traceback_shows_the_code_alone(shared):
  assert run(shared, 'def f():\n  return {}[1]\nf()').stderr == (
    'Traceback (most recent call last):\n'
    '  File "<code>", line 3, in <module>\n'
    '  File "<code>", line 2, in f\n'
    'KeyError: 1\n'
  )


def test_files_stay_and_variables_do_not(fresh):
  assert run(fresh, 'x = 1; f = open("note", "w"); f.write("kept")').exit == 0
  assert run(fresh, 'print(open("note").read())').stdout == 'kept\n'
  assert run(fresh, 'print(x)').stderr.endswith("'x' is not defined\n")


def test_output_is_valid_text(shared):
  code = (
    'import sys; w = sys.stdout.buffer.write\n'
    'w("é漢🙂\\u2028\\x00\\x1b[31m\\r\\n".encode()); w(b"\\xff\\xed\\xa0\\x80")'
  )
  result = run(shared, code)
  assert result.stdout.startswith('é漢🙂\u2028\x00\x1b[31m\r\n\ufffd')
  result.stdout.encode('utf-8')


def test_big_stdin(shared):
  data = bytes(range(256)) * 40_000
  code = 'import sys, hashlib as h; print(h.md5(sys.stdin.buffer.read())'
  result = run(shared, code + '.hexdigest())', stdin=data)
  assert result.stdout.strip() == hashlib.md5(data).hexdigest()
  # A program that does not read it is no error either.
  assert run(shared, 'print(1)', stdin=data).stdout == '1\n'


def test_long_output_keeps_head_and_tail_and_says_so(shared):
  result = run(shared, 'for i in range(100_000): print(i)')
  whole = ''.join(f'{i}\n' for i in range(100_000))
  assert result.status is CallStatus.OK
  assert result.truncated == (len(whole) - 4096, 0)
  head, mark, tail = result.stdout.partition(
    f'\n[... {len(whole) - 4096} bytes left out ...]\n'
  )
  assert mark and head == whole[:1024] and tail == whole[-3072:]


def test_flood_is_ended(shared):
  result = shared.call(Call(argv=['yes']))
  assert result.status is CallStatus.OUTPUT_CAP
  assert len(result.stdout) < 5000 and result.truncated[0] > 30 << 20
  assert run(shared, 'print(1)').stdout == '1\n'


def test_timeout_kills_children_that_hid(shared):
  script = 'setsid sleep 1000 & setsid nohup sleep 1001 & sleep 1002'
  result = shell(shared, script, timeout_s=0.4)
  assert result.status is CallStatus.TIMEOUT
  assert 0.4 <= result.duration_s < 5
  assert result.reaped >= 2
  assert run(shared, PROCESSES).stdout == '[]\n'


def test_daemon_does_not_outlive_its_call(shared):
  result = shell(shared, 'setsid sleep 1000 & echo started')
  assert (result.status, result.stdout) == (CallStatus.OK, 'started\n')
  assert result.reaped == 1 and result.duration_s < 5
  assert run(shared, PROCESSES).stdout == '[]\n'


def test_output_before_a_timeout_is_kept(shared):
  code = 'import time; print("so far", flush=True); time.sleep(100)'
  result = run(shared, code, timeout_s=0.4)
  assert (result.status, result.stdout) == (CallStatus.TIMEOUT, 'so far\n')


def test_term_is_ignored_in_vain(shared):
  code = (
    'import signal, time\n'
    'for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(100)'
  )
  assert run(shared, code, timeout_s=0.4).status is CallStatus.TIMEOUT


def test_fork_bomb(fresh):
  result = run(fresh, 'import os\nwhile True: os.fork()', timeout_s=5)
  if 'pids' in fresh.facts['counted']:
    assert result.status is CallStatus.PIDS
  assert result.status is not CallStatus.OK
  again = run(fresh, 'print(1)')
  assert again.stdout == '1\n' and again.duration_s < 5
  assert run(fresh, PROCESSES).stdout == '[]\n'


def test_memory_hog(fresh):
  result = run(fresh, 'x = bytearray(1 << 30); print(len(x))')
  if 'oom' in fresh.facts['counted']:
    assert result.status is CallStatus.OOM
  assert result.status is not CallStatus.OK
  assert run(fresh, 'print(1)').stdout == '1\n'


def test_hog_below_a_program_that_ends_well_is_no_oom(fresh):
  script = 'python3 -c "bytearray(1 << 30)"; true'
  assert shell(fresh, script).status is CallStatus.OK


def test_full_disk(fresh):
  result = run(fresh, 'open("/tmp/big", "wb").write(bytes(64 << 20))')
  assert result.status is CallStatus.DISK
  assert run(fresh, 'open("/tmp/big", "w").close()').status is CallStatus.OK
  full = fresh.put({'a': bytes(20 << 20)})
  assert full.status is CallStatus.DISK


def test_put_and_get(fresh):
  files = {'a/b/c.bin': bytes(range(256)) * 99, 'empty': b'', 'é': b'x'}
  assert fresh.put(files).status is CallStatus.OK
  assert fresh.put({'tool.sh': b'#!/bin/sh\necho ran'}, 0o755).exit == 0
  assert fresh.call(Call(argv=['./tool.sh'])).stdout == 'ran\n'
  assert fresh.put({'empty': b'no more'}).status is CallStatus.OK
  found = fresh.get([*files, 'none'])
  assert found.files == {**files, 'empty': b'no more'}
  assert found.refused == {'none': 'No such file or directory'}


def test_get_takes_regular_files_alone(fresh):
  script = (
    'ln -s /etc/passwd link; ln -s /etc folder; mkfifo pipe; mkdir real;'
    'truncate -s 10M sparse; echo ok > real/file'
  )
  assert shell(fresh, script).status is CallStatus.OK
  paths = ['link', 'folder/passwd', 'pipe', 'real', 'sparse', 'real/file']
  found = fresh.get(paths, max_bytes=1 << 20)
  assert found.files == {'real/file': b'ok\n'}
  assert set(found.refused) == set(paths[:-1])
  assert found.refused['link'] == 'not a regular file'
  assert found.refused['sparse'].startswith('too big')


def test_put_does_not_follow_links(fresh):
  shell(fresh, 'echo mine > target; ln -s target link; ln -s . folder')
  assert fresh.put({'link': b'other'}).status is CallStatus.OK
  assert fresh.get(['target', 'link']).files == {
    'target': b'mine\n',
    'link': b'other',
  }
  refused = fresh.put({'folder/x': b''})
  assert refused.status is CallStatus.NONZERO and refused.stderr


@pytest.mark.parametrize(
  'path', ['', '/etc/x', '../x', 'a/../b', 'a//b', './a']
)
def test_paths_stay_below_workdir(shared, path):
  with pytest.raises(SandboxBug, match='path'):
    shared.put({path: b''})
  with pytest.raises(SandboxBug, match='path'):
    shared.get([path])


def test_isolation(shared):
  code = """
import os, socket
lines = [l.split() for l in open('/proc/self/status')]
status = {l[0]: l[1] for l in lines if len(l) > 1}
print(os.getuid() > 1000, status['CapEff:'], status['NoNewPrivs:'])
try: socket.create_connection(('1.1.1.1', 53), 2)
except OSError as e: print(e.errno)
print([l.split()[0] for l in open('/proc/net/dev')][2:])
for path in ('/x', '/usr/x', '/etc/x', '/dev/x'):
  try: open(path, 'w')
  except OSError as e: print(type(e).__name__)
print(os.getcwd(), sorted(os.environ))
"""
  lines = run(shared, code).stdout.splitlines()
  assert lines[0] == 'True 0000000000000000 1'
  assert lines[1] in ('101', '99')  # network unreachable
  assert lines[2] == "['lo:']"
  assert all(l in ('PermissionError', 'OSError') for l in lines[3:7])
  assert lines[7].startswith("/task ['HOME', 'LANG', 'LC_ALL', 'PATH',")


def test_runner_cannot_be_reached(shared):
  code = """
import os, signal
for path in ('/proc/1/fd', '/proc/1/fd/4', '/proc/1/mem', '/proc/1/environ'):
  try: os.listdir(path) if path.endswith('fd') else open(path, 'r+b')
  except OSError as e: print(type(e).__name__)
for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
  try: os.kill(1, number)
  except PermissionError: pass
print(sorted(os.listdir('/proc/self/fd')))
"""
  lines = run(shared, code).stdout.splitlines()
  assert lines[:4] == ['PermissionError'] * 4
  assert lines[4] == "['0', '1', '2', '3']"  # 3 is the listing itself
  assert run(shared, 'print(1)').stdout == '1\n'


@pytest.mark.parametrize('by', ['code', 'argv'])
def test_no_signal_ends_the_runner(shared, by):
  if by == 'code':
    result = run(shared, EVERY_SIGNAL)
  else:
    result = shared.call(Call(argv=['python3', '-c', EVERY_SIGNAL]))
  assert (result.status, result.stdout) == (CallStatus.OK, 'alive\n')
  assert result.alive and run(shared, 'print(1)').stdout == '1\n'


def test_signals_end_the_policys_own_programs(shared):
  code = (
    'import signal as s\n'
    'print(s.getsignal(s.SIGINT) is s.default_int_handler)\n'
    'print([int(n) for n in s.valid_signals()'
    ' if s.getsignal(n) == s.SIG_IGN and n not in (s.SIGPIPE, s.SIGXFSZ)])'
  )
  assert run(shared, code).stdout == 'True\n[]\n'
  interrupted = run(shared, 'import os; os.kill(os.getpid(), 2)')
  assert interrupted.stderr.endswith('KeyboardInterrupt\n')
  for number in (1, 2, 3, 10, 13, 15):
    killed = shell(shared, f'kill -{number} $$')
    assert (killed.status, killed.signal) == (CallStatus.SIGNAL, number)


def test_environment_of_the_spec(backend):
  spec = dataclasses.replace(SPEC, env={'ANSWER': '42'})
  with open_sandbox(spec, backend) as sandbox:
    code = 'import os; print(os.environ["ANSWER"], hash("a") == hash("a"))'
    assert run(sandbox, code).stdout == '42 True\n'


def test_the_end_of_the_lifetime_in_a_call_is_the_policys(backend):
  spec = dataclasses.replace(SPEC, lifetime_s=1.5)
  with open_sandbox(spec, backend) as sandbox:
    start = time.monotonic()
    code = 'import time; print("so far", flush=True); time.sleep(100)'
    result = run(sandbox, code, timeout_s=90)
    assert time.monotonic() - start < 10
    assert (result.status, result.alive) == (CallStatus.TIMEOUT, False)
    assert result.stdout == 'so far\n'
    # And it stays so: what is asked of a spent sandbox is a timeout too.
    for again in (run(sandbox, 'print(1)'), sandbox.put({'x': b''})):
      assert again == CallResult(CallStatus.TIMEOUT, alive=False)
    assert sandbox.get(['x']).refused == {'x': 'the sandbox is gone'}


def test_the_end_of_the_lifetime_between_calls_is_infrastructure(backend):
  with open_sandbox(dataclasses.replace(SPEC, lifetime_s=1.0), backend) as idle:
    time.sleep(1.5)
    with pytest.raises(Died):
      run(idle, 'print(1)')


def test_hashes_do_not_vary(shared):
  code = 'print(hash("agentjax"))'
  assert run(shared, code).stdout == run(shared, code).stdout
  by_argv = shared.call(Call(argv=['python3', '-c', code]))
  assert by_argv.stdout == run(shared, code).stdout


def test_calls_and_specs_are_checked():
  with pytest.raises(SandboxBug, match='exactly one'):
    Call()
  with pytest.raises(SandboxBug, match='exactly one'):
    Call(argv=['true'], code='1')
  with pytest.raises(SandboxBug, match='list of words'):
    Call(argv='true')
  with pytest.raises(SandboxBug, match='timeout_s'):
    Call(code='1', timeout_s=0)
  with pytest.raises(SandboxBug, match='timeout_s is inf'):
    Call(code='1', timeout_s=float('inf'))
  with pytest.raises(ValueError, match='quarter'):
    SandboxSpec(memory_bytes=64 << 20, tmpfs_bytes=64 << 20)
  with pytest.raises(ValueError, match='60 s, and .*lifetime_s 60: raise'):
    dataclasses.replace(SPEC, lifetime_s=60.0).check_calls(6, 10.0)
  dataclasses.replace(SPEC, lifetime_s=61.0).check_calls(6, 10.0)
  assert 'network' not in {f.name for f in dataclasses.fields(SandboxSpec)}
