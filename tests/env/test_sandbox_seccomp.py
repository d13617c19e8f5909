"""The system calls that a sandbox refuses, and the programs that still run."""

import ctypes
import ctypes.util
import errno
import json
import platform
import struct

import pytest
from requirements import require

from agentjax.env.sandbox import Call, CallStatus, seccomp, syscalls

ARCH = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}
NONE = (0,) * 6


def verdict(machine, number, arguments=NONE, arch=None):
  """What the filter says of a call: 0 (allowed) or the errno."""
  arch = ARCH[machine] if arch is None else arch
  halves = [half for a in arguments for half in (a & 0xFFFF_FFFF, a >> 32)]
  words = [number, arch, 0, 0, *halves]
  steps = list(struct.iter_unpack('=HBBI', seccomp.program(machine)))
  at, value = 0, None
  while True:
    code, yes, no, operand = steps[at]
    at += 1
    if code == 0x20:
      value = words[operand // 4]
    elif code == 0x06:
      assert operand >> 16 in (0x7FFF, 0x0005)
      return 0 if operand >> 16 == 0x7FFF else operand & 0xFFFF
    else:
      holds = {
        0x15: value == operand,
        0x35: value >= operand,
        0x45: bool(value & operand),
      }[code]
      at += yes if holds else no


@pytest.mark.parametrize('machine', sorted(ARCH))
def test_the_filter_by_number(machine):
  numbers = syscalls.numbers(machine)
  by_number = {number: name for name, number in numbers.items()}
  for number in (*range(520), 0x3FFF_FFFF):
    name = by_number.get(number)
    if name in seccomp.REFUSED:
      expected = errno.EPERM
    elif name is None or name in seccomp.MISSING:
      expected = errno.ENOSYS
    elif name == 'socket':  # of no family
      expected = errno.EPERM
    else:
      expected = 0
    assert verdict(machine, number) == expected, (number, name)
  x32 = 0x4000_0000 + numbers['read']
  assert verdict(machine, x32) == verdict(machine, 2**32 - 1) == errno.EPERM
  other = 0x40000003  # i386, where 1 is exit and 11 is execve
  assert verdict(machine, numbers['read'], arch=other) == errno.EPERM


@pytest.mark.parametrize('machine', sorted(ARCH))
@pytest.mark.parametrize(
  'name, arguments, refused',
  [
    ('clone', (0x11, 0), False),  # a process: SIGCHLD
    ('clone', (0x3D0F00, 0), False),  # a thread
    *(('clone', (1 << bit | 0x11,), True) for bit in (17, *range(25, 31))),
    ('socket', (1,), False),
    ('socket', (2,), False),
    ('socket', (10,), False),
    *(('socket', (family,), True) for family in (0, 3, 16, 17, 38, 40, 44)),
    ('personality', (0xFFFFFFFF,), False),
    ('personality', (0x20008,), False),
    ('personality', (0x40000,), True),  # addresses that do not vary
    ('prlimit64', (1, 7), True),
    ('prlimit64', (0, 7), False),
    ('prlimit64', (11, 7), False),
    ('setpriority', (0, 1), True),
    ('setpriority', (2, 0), True),
    ('setpriority', (0, 0), False),
    ('sched_setaffinity', (1,), True),
  ],
)
def test_the_filter_by_arguments(machine, name, arguments, refused):
  number = syscalls.numbers(machine)[name]
  arguments = (*arguments, *NONE)[:6]
  assert verdict(machine, number, arguments) == (errno.EPERM if refused else 0)


def test_unknown_machines_have_no_filter():
  assert seccomp.program('riscv64') is None


def test_the_numbers_are_the_kernels():
  """By libseccomp, which comes with every Docker engine."""
  path = ctypes.util.find_library('seccomp')
  require('libseccomp', path is not None, 'install libseccomp2')
  resolve = ctypes.CDLL(path).seccomp_syscall_resolve_name_arch
  for machine, arch in ARCH.items():
    checked = 0
    for name, number in syscalls.numbers(machine).items():
      theirs = resolve(ctypes.c_uint32(arch), name.encode())
      assert theirs in (number, -1), (machine, name)  # -1: newer than it
      checked += theirs == number
    assert checked > 290


def test_every_refused_name_is_a_call_of_some_machine():
  known = set(syscalls.numbers('x86_64')) | set(syscalls.numbers('aarch64'))
  assert known >= seccomp.REFUSED | seccomp.MISSING


def test_the_profile_and_the_filter_agree():
  profile = json.loads(seccomp.docker_profile())
  assert profile['defaultAction'] == 'SCMP_ACT_ERRNO'
  plain, special = set(), {}
  for rule in profile['syscalls']:
    if rule['action'] == 'SCMP_ACT_ALLOW' and 'args' not in rule:
      plain |= set(rule['names'])
    else:
      special.setdefault(rule['names'][0], []).append(rule)
  assert set(special) == {'clone', 'clone3', 'socket', 'personality'}
  assert special['clone3'][0]['errnoRet'] == errno.ENOSYS
  for machine in ARCH:
    for name, number in syscalls.numbers(machine).items():
      if name not in special:
        assert (name in plain) == (verdict(machine, number) == 0), name


TRY = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
out = {}
for name, number in json.load(sys.stdin).items():
  out[name] = ctypes.get_errno() if libc.syscall(number, *[-1] * 6) else 0
print(json.dumps(out))
"""


def test_each_refused_call_is_tried_and_fails(shared):
  numbers = syscalls.numbers(platform.machine())
  names = (seccomp.REFUSED | seccomp.MISSING) & set(numbers)
  request = json.dumps({name: numbers[name] for name in names}).encode()
  result = shared.call(Call(code=TRY, stdin=request))
  assert result.status is CallStatus.OK, result.stderr
  found = json.loads(result.stdout)
  assert found.pop('clone3') == errno.ENOSYS
  for name, error in found.items():
    # An engine says ENOSYS of those that are newer than its libseccomp.
    newer = numbers[name] > 450 and error == errno.ENOSYS
    assert error == errno.EPERM or newer, name


def test_name_spaces_and_odd_sockets_cannot_be_made(shared):
  numbers = syscalls.numbers(platform.machine())
  code = f"""
import ctypes, socket
libc = ctypes.CDLL(None, use_errno=True)
for bit in (17, *range(25, 31)):
  assert libc.syscall({numbers['clone']}, 1 << bit | 17, 0, 0, 0, 0) == -1
  print(ctypes.get_errno(), end=' ')
for family in (17, 38, 40, 44):
  try: socket.socket(family, socket.SOCK_RAW)
  except OSError as e: print(e.errno, end=' ')
print(libc.personality(0x0040000), ctypes.get_errno())
"""
  result = shared.call(Call(code=code))
  assert result.stdout == '1 ' * 7 + '1 ' * 4 + '-1 1\n'


@pytest.mark.skipif(platform.machine() != 'x86_64', reason='of x86_64')
def test_other_tables_of_system_calls_are_closed(shared):
  code = """
import ctypes, mmap, sys
def run(machine_code):
  page = mmap.mmap(-1, 4096, prot=7)
  page.write(machine_code)
  address = ctypes.addressof(ctypes.c_char.from_buffer(page))
  return ctypes.CFUNCTYPE(ctypes.c_int)(address)()
if sys.stdin.read() == 'x32':  # mov eax, 0x40000027 (getpid); syscall; ret
  print(run(bytes.fromhex('b827000040' '0f05' 'c3')))
else:  # push rbx; mov eax, 20 (getpid); int 0x80; pop rbx; ret
  print(run(bytes.fromhex('53' 'b814000000' 'cd80' '5b' 'c3')))
"""
  for table in (b'x32', b'i386'):
    result = shared.call(Call(code=code, stdin=table))
    # An error, or the end of the process: never a process id.
    assert result.stdout in ('-1\n', '-38\n', ''), table
    if result.stdout == '':
      assert result.status is CallStatus.SIGNAL


def test_nothing_of_system_v_outlives_its_call(shared):
  """It did, in both backends: memory that no later call could be rid of."""
  for name in ('shm', 'msg', 'sem'):
    number = syscalls.numbers(platform.machine())[f'{name}get']
    code = (
      'import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n'
      f'print(libc.syscall({number}, 0x1234, 4096, 0o1600))'
    )
    assert shared.call(Call(code=code)).stdout == '-1\n'
  listed = 'cat /proc/sysvipc/shm /proc/sysvipc/msg /proc/sysvipc/sem | wc -l'
  assert shared.call(Call(argv=['sh', '-c', listed])).stdout == '3\n'
  queue = 'touch /dev/mqueue/x || mkdir /dev/mqueue'
  assert shared.call(Call(argv=['sh', '-c', queue])).exit == 1


NORMAL = """
import concurrent.futures, ctypes, multiprocessing, os, select, shutil, socket
import signal, sqlite3, subprocess, tempfile, threading, time
from multiprocessing import shared_memory

def square(x): return x * x

if __name__ == '__main__':
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(square, range(4))) == [0, 1, 4, 9]
  context = multiprocessing.get_context('fork')
  with context.Pool(2) as pool:
    assert pool.map(square, range(4)) == [0, 1, 4, 9]
  queue, lock = context.Queue(), context.Lock()
  with lock: queue.put(1)
  assert queue.get(timeout=5) == 1
  block = shared_memory.SharedMemory(create=True, size=4096)
  block.buf[0] = 7; block.close(); block.unlink()
  assert subprocess.run('echo a | tr a b', shell=True, capture_output=True,
                        text=True).stdout == 'b\\n'
  with tempfile.TemporaryDirectory() as folder:
    sqlite3.connect(folder + '/db').execute('create table t (x)')
    os.mkfifo(folder + '/pipe'); os.symlink('a', folder + '/b')
  server = socket.create_server(('127.0.0.1', 0))
  client = socket.create_connection(server.getsockname()); client.close()
  a, b = socket.socketpair(); a.send(b'x'); assert b.recv(1) == b'x'
  assert select.select([server], [], [], 1)[0]
  for seconds in (9, 0): signal.setitimer(signal.ITIMER_REAL, seconds)
  os.sched_setaffinity(0, os.sched_getaffinity(0)); os.nice(1)
  assert os.waitstatus_to_exitcode(os.system('exit 3')) == 3
  import asyncio
  async def echo():
    process = await asyncio.create_subprocess_exec('echo', 'hi', stdout=-1)
    return (await process.communicate())[0]
  assert asyncio.run(echo()) == b'hi\\n'
  print('fine')
"""


def test_normal_programs_run(fresh):
  assert fresh.put({'normal.py': NORMAL.encode()}).status is CallStatus.OK
  result = fresh.call(Call(argv=['python3', 'normal.py']))
  assert (result.stdout, result.stderr) == ('fine\n', '')
  script = (
    'mkdir -p a/b && echo x > a/b/c && tar cf a.tar a && mkdir out && '
    'tar xf a.tar -C out && cmp a/b/c out/a/b/c && seq 3 | sort -r | head -1 '
    '&& find . -name c | wc -l && (command -v git >/dev/null || exit 0; '
    'git init -q r && cd r && git config user.email a@b && git config '
    'user.name a && echo 1 > f && git add f && git commit -qm m && '
    'git log --oneline | wc -l >&2)'
  )
  result = fresh.call(Call(argv=['sh', '-c', script]))
  assert (result.exit, result.stdout) == (0, '3\n2\n'), result.stderr
  assert result.stderr in ('', '1\n')
