"""Every limit of a spec, met: the policy's doing, and the sandbox goes on."""

import dataclasses
import os

import pytest
from sandboxes import SPEC, backend_or_skip

from agentjax.env.sandbox import Call, CallStatus, cgroup, open_sandbox
from agentjax.env.sandbox.bwrap import open_bwrap


def run(sandbox, code, **options):
  return sandbox.call(Call(code=code, **options))


BOMBS = {
  'files': 'open(f"{i}", "w").close()',
  'folders': 'os.mkdir(f"{i}")',
  'links': 'os.symlink("x", f"{i}")',
  'hard links': 'os.link("first", f"{i}")',
  'pipes': 'os.mkfifo(f"{i}")',
}


@pytest.mark.parametrize('bomb', BOMBS)
@pytest.mark.parametrize('folder', ['/task', '/tmp', '/dev/shm'])
def test_inode_bomb(shared, folder, bomb):
  code = (
    f'import itertools, os\nos.chdir("{folder}"); open("first", "w").close()\n'
    f'for i in itertools.count():\n  {BOMBS[bomb]}'
  )
  result = run(shared, code, timeout_s=20.0)
  assert result.status in (CallStatus.DISK, CallStatus.OOM)
  assert result.alive and result.duration_s < 10
  check = f'import os; print(len(os.listdir("{folder}")))'
  assert 1 < int(run(shared, check).stdout) <= SPEC.tmpfs_inodes
  tidy = f'rm -rf {folder}/* && ls -A {folder}'
  again = shared.call(Call(argv=['sh', '-c', tidy]))
  assert (again.exit, again.stdout) == (0, '')


@pytest.mark.parametrize('folder', ['/task', '/tmp', '/dev/shm'])
def test_full_folder(shared, folder):
  code = (
    f'import os\nwith open("{folder}/big", "wb") as f:\n'
    '  while True: os.write(f.fileno(), b"x" * (1 << 20))'
  )
  result = run(shared, code)
  assert result.status is CallStatus.DISK and result.alive
  size = f'import os; print(os.path.getsize("{folder}/big"))'
  assert run(shared, size).stdout == f'{16 << 20}\n'
  assert run(shared, f'import os; os.remove("{folder}/big")').exit == 0


def test_size_of_a_file(shared):
  """Holes take no room, but the size is limited too."""
  too_big = (SPEC.tmpfs_bytes >> 20) + 1
  grown = shared.call(Call(argv=['truncate', '-s', f'{too_big}M', 'big']))
  assert grown.status is CallStatus.DISK
  assert run(shared, 'import os; os.remove("big")').exit == 0
  python = run(shared, f'open("big", "w").truncate({too_big} << 20)')
  assert python.stderr.endswith('OSError: [Errno 27] File too large\n')
  assert run(shared, 'import os; os.remove("big")').exit == 0
  raised = (
    'import resource as r\n'
    'try: r.setrlimit(r.RLIMIT_FSIZE, (r.RLIM_INFINITY, r.RLIM_INFINITY))\n'
    'except (ValueError, PermissionError): print("no")'
  )
  assert run(shared, raised).stdout == 'no\n'


def test_open_files(shared):
  code = (
    'import os\nfds = []\n'
    'try:\n  while True: fds.append(os.open("/dev/null", 0))\n'
    'except OSError as e: print(e.errno, len(fds))'
  )
  error, count = run(shared, code).stdout.split()
  assert error == '24'
  assert SPEC.nofile - 10 < int(count) < SPEC.nofile


def test_no_core_is_left(shared):
  result = run(shared, 'import os; os.abort()')
  assert (result.status, result.signal) == (CallStatus.SIGNAL, 6)
  left = shared.call(Call(argv=['sh', '-c', 'ls -A; ls -A /tmp']))
  assert left.stdout == ''


def test_memory_and_swap_are_one_limit(shared):
  if 'oom' not in shared.facts['counted']:
    pytest.skip('no control group here')
  code = """
import os
root, found = '/sys/fs/cgroup/', {}
for name in ('memory/memory.limit_in_bytes', 'memory.max',
             'memory/memory.memsw.limit_in_bytes', 'memory.swap.max'):
  try: found[name] = int(open(root + name).read())
  except OSError: pass
print(found)
"""
  found = eval(run(shared, code).stdout)
  limit = SPEC.memory_bytes
  assert found.pop('memory/memory.limit_in_bytes', limit) == limit
  assert found.pop('memory.max', limit) == limit
  # Version 1 counts both together, version 2 swap alone. Without swap, or
  # the kernel's counting of it, there is no such file and no such way.
  assert found.pop('memory/memory.memsw.limit_in_bytes', limit) == limit
  assert found.pop('memory.swap.max', 0) == 0 and not found
  hog = run(shared, 'x = bytearray(250 << 20)')
  assert hog.status is CallStatus.OOM


def test_share_of_processors(backend):
  spec = dataclasses.replace(SPEC, cpus=0.25)
  with open_sandbox(spec, backend) as sandbox:
    if 'pids' not in sandbox.facts['counted']:
      pytest.skip('no control group here')
    code = (
      'import os, time\nos.fork()\nend = time.monotonic() + 1.2\n'
      'while time.monotonic() < end: pass\nprint(time.process_time())'
    )
    used = run(sandbox, 'import sys\n' + code).stdout.split()
    parent = float(used[-1])
    # Of both together, a quarter of 1.2 s and a period of the scheduler's.
    assert 0.02 < parent < 0.45


def test_limits_cannot_be_raised(shared):
  code = """
import os, resource as r
for name in ('NOFILE', 'FSIZE', 'CORE'):
  limit = getattr(r, 'RLIMIT_' + name)
  soft, hard = r.getrlimit(limit)
  try: r.setrlimit(limit, (hard + 1, hard + 1)); print('raised', name)
  except (ValueError, PermissionError): pass
for path in ('memory/memory.limit_in_bytes', 'memory.max', 'pids/pids.max',
             'pids.max', 'cpu/cpu.cfs_quota_us', 'cpu.max', 'cgroup.procs',
             'memory/cgroup.procs', 'pids/cgroup.procs'):
  try: open('/sys/fs/cgroup/' + path, 'w').write('-1'); print('wrote', path)
  except OSError: pass
try: open('/proc/self/oom_score_adj', 'w').write('-1000'); print('spared')
except OSError: pass
"""
  result = run(shared, code)
  assert (result.stdout, result.stderr) == ('', '')


def test_wall_time_counts_what_sleeps_and_what_stops(shared):
  for code in (
    'import time; time.sleep(99)',
    'import os; os.kill(os.getpid(), 19)',
    'import os\nwhile True: os.getpid()',
    'import os, signal; signal.pthread_sigmask(0, range(1, 65)); os.read(0, 1)'
    '; import threading; threading.Event().wait()',
  ):
    result = run(shared, code, timeout_s=0.3)
    assert result.status is CallStatus.TIMEOUT
    assert 0.3 <= result.duration_s < 5


def test_a_bomb_without_control_groups_meets_the_same_limits(monkeypatch):
  backend_or_skip('bwrap')
  monkeypatch.setattr(cgroup, 'make', lambda spec: None)
  with open_bwrap(SPEC) as sandbox:
    code = 'import itertools\nfor i in itertools.count(): open(f"{i}", "w")'
    result = run(sandbox, code)
    assert result.status is CallStatus.DISK
    assert run(sandbox, 'print(1)').stdout == '1\n'


def test_the_host_sees_nothing_of_the_folders():
  backend_or_skip('bwrap')
  before = mounts_of_shm()
  with open_bwrap(SPEC) as sandbox:
    run(sandbox, 'open("/dev/shm/here", "w").close()')
    assert mounts_of_shm() == before
    assert not os.path.exists('/dev/shm/work')


def mounts_of_shm():
  # Not those of engines that other tests have there.
  ours = {f'/dev/shm{name}' for name in ('', '/work', '/tmp', '/shm')}
  with open('/proc/self/mounts') as file:
    return [line for line in file if line.split()[1] in ours]
