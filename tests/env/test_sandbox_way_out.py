"""No way out: what a sandbox could be left, watched or undone by.

Each is tried with real code in each backend, and fails. Values of the host
that could be found are made by the test.
"""

import io
import os
import pathlib
import platform
import secrets
import socket
import subprocess
import sys
import tarfile
import threading

import pytest
from sandboxes import SPEC

from agentjax.env.sandbox import (
  Call,
  CallStatus,
  SandboxBug,
  open_sandbox,
  syscalls,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(sandbox, code, **options):
  result = sandbox.call(Call(code=code, **options))
  assert result.alive
  return result


def refused(sandbox, *attempts):
  """Asserts that each statement raises OSError, or another that is named."""
  code = ['import ctypes, os, socket, subprocess']
  for number, attempt in enumerate(attempts):
    code += ['try:', *(f'  {line}' for line in attempt.split('\n'))]
    code += [f'  print({number})', 'except OSError: pass']
  result = run(sandbox, '\n'.join(code), timeout_s=20)
  done = [attempts[int(line)] for line in result.stdout.split()]
  assert (done, result.stderr) == ([], '')


# --- network


def test_no_network(shared):
  server = socket.create_server(('127.0.0.1', 0))
  port = server.getsockname()[1]
  hosts = ['1.1.1.1', '8.8.8.8', '10.0.0.1', '172.17.0.1', '192.168.0.1']
  refused(
    shared,
    *(f'socket.create_connection(("{host}", 53), 2)' for host in hosts),
    f'socket.create_connection(("127.0.0.1", {port}), 2)',
    'socket.create_connection(("::1", 22), 2)',
    'socket.create_connection(("2606:4700:4700::1111", 53), 2)',
    *(
      f's = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n'
      f's.settimeout(2); s.sendto(b"x", ("{host}", 53)); s.recv(1)'
      for host in hosts
    ),
    'socket.getaddrinfo("example.com", 80)',
    'socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)',
    'socket.socket(socket.AF_PACKET, socket.SOCK_RAW)',
    'socket.socket(40, socket.SOCK_STREAM)',  # to the host of the machine
  )
  server.close()
  interfaces = (
    'print([line.split(":")[0].strip() for line in open("/proc/net/dev")][2:])'
  )
  assert run(shared, interfaces).stdout == "['lo']\n"


def test_no_address_of_a_clouds_metadata(shared):
  refused(
    shared,
    'socket.create_connection(("169.254.169.254", 80), 2)',
    'socket.create_connection(("fd00:ec2::254", 80), 2)',
    'import urllib.request as u\n'
    'u.urlopen("http://169.254.169.254/latest/meta-data/", timeout=2)',
    'socket.getaddrinfo("metadata.google.internal", 80)',
  )


def test_unix_sockets_of_the_host_are_out_of_reach(shared):
  name = f'agentjax-{secrets.token_hex(8)}'
  server = socket.socket(socket.AF_UNIX)
  server.bind(f'\0{name}')  # in no folder: the network's name space has it
  server.listen()
  reached = []
  threading.Thread(
    target=lambda: reached.append(server.accept()), daemon=True
  ).start()
  connect = 's = socket.socket(socket.AF_UNIX); s.connect({!r})'
  paths = ['/var/run/docker.sock', '/run/docker.sock', '/run/containerd']
  paths += ['/run/containerd/containerd.sock', '/run/dbus/system_bus_socket']
  refused(
    shared,
    connect.format(f'\0{name}'),
    *(connect.format(path) for path in paths),
    *(f'os.stat("{path}")' for path in paths),
  )
  assert reached == []
  server.close()


# --- files of the host


def test_no_file_of_the_host(shared, tmp_path):
  secret = tmp_path / 'secret'
  secret.write_text('here')
  tmp_path.chmod(0o755)
  home = pathlib.Path.home()
  paths = {secret, ROOT, ROOT / 'README.md', home, pathlib.Path(__file__)}
  paths |= {home / '.ssh', pathlib.Path('/etc/shadow')}
  refused(
    shared,
    *(f'open({str(p)!r}).read()' for p in paths),
    *(f'os.listdir({str(p)!r})' for p in (tmp_path, ROOT, '/root')),
    *(
      f'print(open("/proc/{who}/root" + {str(secret)!r}).read())'
      for who in (1, 'self', 'thread-self')
    ),
  )
  # One level above the root is the root.
  up = f'print(os.path.exists("/../../../.." + {str(secret)!r}))'
  assert run(shared, 'import os; ' + up).stdout == 'False\n'


def test_nothing_is_written_anywhere_else(shared):
  code = """
import os
mine = {os.stat(p).st_dev for p in ('/task', '/tmp', '/dev/shm')}
for line in open('/proc/self/mountinfo'):
  words = line.split()
  if words[4] in ('/task', '/tmp', '/dev/shm', '/proc', '/dev/pts'): continue
  if os.path.isdir(words[4]) and 'ro' not in words[5].split(','):
    # Only root may write there then, and nobody is root.
    if os.access(words[4], os.W_OK): print('mounted', words[4])
for top, folders, files in os.walk('/'):
  if os.stat(top).st_dev in mine or top.count('/') > 3 or top == '/proc':
    folders[:] = []
    continue
  try: open(os.path.join(top, 'x'), 'w'); print('made', top)
  except OSError: pass
  for name in files:
    path = os.path.join(top, name)
    if os.path.isfile(path) and os.access(path, os.W_OK): print('writes', path)
"""
  result = run(shared, code, timeout_s=60)
  assert (result.stdout, result.stderr) == ('', '')
  refused(
    shared,
    *(f'open("{p}", "a")' for p in ('/etc/passwd', '/usr/bin/env', '/bin/sh')),
    *(f'os.unlink("{p}")' for p in ('/usr/bin/env', '/etc/ld.so.cache')),
    'os.rename("/usr", "/usr2")',
    'os.chmod("/", 0o777)',
    'os.mkdir("/x")',
    'os.symlink("/tmp", "/x")',
    'os.chmod("/task", 0o777)' if os.geteuid() == 0 else 'os.mkdir("/y")',
  )


def test_links_in_archives_lead_nowhere(fresh):
  for kind, target in (
    (tarfile.SYMTYPE, '/etc/passwd'),
    (tarfile.SYMTYPE, '../../..'),
    (tarfile.LNKTYPE, '/etc/passwd'),
  ):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode='w') as tar:
      info = tarfile.TarInfo('way')
      info.type, info.linkname = kind, target
      tar.addfile(info)
    with pytest.raises(SandboxBug, match='link'):
      fresh.put_tar(out.getvalue())
  # A link that is there already is neither read nor written through.
  run(fresh, 'import os; os.symlink("/etc", "way"); os.symlink("/", "root")')
  assert fresh.get(['way/passwd', 'way']).files == {}
  data, why = fresh.get_tar(['way', 'root'])
  assert set(why) == {'way', 'root'} and b'root:' not in data
  assert fresh.put({'way/x': b''}).status is CallStatus.NONZERO


# --- other processes


def test_other_sandboxes_are_not_seen(fresh, backend):
  with open_sandbox(SPEC, backend) as other:
    word = secrets.token_hex(8)
    other.put({'word': word.encode()})
    with other.session('shell') as shell:
      shell.run(f'exec -a {word} sleep 0 & echo {word} > /tmp/word')
      code = f"""
import os
word, found = {word!r}, []
for pid in filter(str.isdigit, os.listdir('/proc')):
  try: found.append(open(f'/proc/{{pid}}/cmdline').read())
  except OSError: pass
print(len(found) <= 2, any(word in line for line in found))
for top in ('/task', '/tmp', '/dev/shm'): print(os.listdir(top))
"""
      assert run(fresh, code).stdout == 'True False\n[]\n[]\n[]\n'


def test_the_hosts_processes_are_not_seen(shared):
  host = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1)
  try:
    code = (
      'import os\n'
      'pids = [int(p) for p in os.listdir("/proc") if p.isdigit()]\n'
      'print(sorted(pids) == [1, os.getpid()])'
    )
    assert run(shared, code).stdout == 'True\n'
    for name in ('pid', 'net', 'ipc', 'uts', 'mnt'):
      path = f'/proc/self/ns/{name}'
      theirs = run(shared, f'import os; print(os.stat("{path}").st_ino)')
      assert int(theirs.stdout) != os.stat(path).st_ino
    run(shared, f'import os\ntry: os.kill({host.pid}, 9)\nexcept OSError: 1')
    assert host.poll() is None
  finally:
    host.communicate(b'\n')


@pytest.mark.parametrize(
  'path',
  [
    *('/proc/1/root', '/proc/1/cwd', '/proc/1/exe', '/proc/1/environ'),
    *('/proc/1/mem', '/proc/1/maps', '/proc/1/fd/0', '/proc/1/fd/1'),
    *('/proc/1/fd/3', '/proc/1/fd/4', '/proc/1/fd', '/proc/1/stack'),
    *('/proc/1/task/1/mem', '/proc/1/map_files', '/proc/1/auxv'),
    *('/proc/1/syscall', '/proc/1/io', '/proc/1/personality'),
    *('/proc/kcore', '/proc/kmsg', '/proc/sched_debug', '/proc/timer_list'),
  ],
)
def test_what_is_not_read_in_proc(shared, path):
  code = f"""
import os
try:
  found = os.listdir({path!r}) if os.path.isdir({path!r}) else open(
    {path!r}, 'rb').read(1)
  print('read', found)
except OSError: pass
"""
  # What an engine masks is there and empty.
  assert run(shared, code).stdout in ('', "read b''\n", 'read []\n')


@pytest.mark.parametrize(
  'path, data',
  [
    ('/proc/sysrq-trigger', 'h'),
    ('/proc/sys/kernel/core_pattern', '|/tmp/x'),
    ('/proc/sys/kernel/hostname', 'x'),
    ('/proc/sys/kernel/modprobe', '/tmp/x'),
    ('/proc/sys/vm/drop_caches', '1'),
    ('/proc/sys/vm/overcommit_memory', '1'),
    ('/proc/sys/fs/binfmt_misc/register', ':x:M::x::/tmp/x:'),
    ('/proc/sys/net/ipv4/ip_forward', '1'),
    ('/proc/irq/0/smp_affinity', '1'),
    ('/proc/1/oom_score_adj', '1000'),
    ('/proc/1/coredump_filter', '0'),
    ('/proc/1/clear_refs', '1'),
    ('/proc/1/mem', 'x'),
    ('/proc/1/fd/1', 'x'),
    ('/proc/1/fd/4', 'x'),
    ('/proc/1/task/1/comm', 'x'),
    ('/proc/1/timerslack_ns', '1'),
    ('/proc/self/uid_map', '0 0 1'),
    ('/sys/kernel/uevent_helper', '/tmp/x'),
    ('/sys/fs/cgroup/release_agent', '/tmp/x'),
    ('/sys/fs/cgroup/memory/release_agent', '/tmp/x'),
    ('/sys/fs/cgroup/memory/notify_on_release', '1'),
    ('/sys/fs/cgroup/pids/release_agent', '/tmp/x'),
    ('/sys/fs/cgroup/cgroup.procs', '0'),
    ('/sys/fs/cgroup/memory/cgroup.procs', '0'),
    ('/sys/fs/cgroup/memory.max', 'max'),
    ('/sys/fs/cgroup/memory/memory.limit_in_bytes', '-1'),
    ('/sys/power/state', 'mem'),
  ],
)
def test_what_is_not_written_in_proc_and_sys(shared, path, data):
  refused(shared, f'with open({path!r}, "w") as f: f.write({data!r})')


def test_no_group_is_made_and_none_left(shared):
  refused(
    shared,
    *(
      f'os.mkdir("/sys/fs/cgroup/{name}x")'
      for name in ('', 'memory/', 'pids/', 'cpu/', 'unified/')
    ),
    'os.mkdir("/tmp/g"); libc = ctypes.CDLL(None, use_errno=True)\n'
    'if libc.mount(b"none", b"/tmp/g", b"cgroup", 0, b"memory"):\n'
    '  raise OSError(ctypes.get_errno())',
  )
  shared.call(Call(argv=['rm', '-rf', '/tmp/g']))


def test_the_runner_is_not_traced_and_its_replies_not_forged(shared):
  code = """
import ctypes, os, struct, json
libc = ctypes.CDLL(None, use_errno=True)
tries = {'attach': (16, 1, 0, 0), 'seize': (0x4206, 1, 0, 0)}
for name, arguments in tries.items():
  print(name, libc.ptrace(*arguments), ctypes.get_errno())
head = json.dumps({'id': 1, 'nonce': 'x', 'blobs': []}).encode()
frame = struct.pack('>II', 4 + len(head), len(head)) + head
for fd in range(64):
  for path in (f'/proc/1/fd/{fd}', f'/proc/{os.getppid()}/fd/{fd}'):
    try: os.write(os.open(path, os.O_WRONLY), frame); print('wrote', path)
    except OSError: pass
for fd in range(3, 64):
  try: os.write(fd, frame); print('wrote', fd)
  except OSError: pass
"""
  result = run(shared, code)
  assert result.stdout == 'attach -1 1\nseize -1 1\n'
  assert shared._channel.foreign == 0
  assert run(shared, 'print(1)').stdout == '1\n'


def test_memory_of_others_is_not_touched(shared):
  with shared.session('python') as python:
    pid = python.run('import os; x = "of the session"; print(os.getpid())')
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for pid in (1, {int(pid.stdout)}):
  for call in (libc.process_vm_readv, libc.process_vm_writev):
    print(call(pid, None, 0, None, 0, 0), ctypes.get_errno())
"""
    assert run(shared, code).stdout == '-1 1\n' * 4


# --- rights


def test_no_rights_are_gained(shared):
  code = """
import os, subprocess
status = dict(l.split(':', 1) for l in open('/proc/self/status'))
for name in ('CapInh', 'CapPrm', 'CapEff', 'CapAmb'):
  assert int(status[name], 16) == 0, name
assert int(status['NoNewPrivs']) == 1 and int(status['Seccomp']) == 2
assert 0 not in os.getresuid() + os.getresgid()
found = [os.path.join(top, f) for top, _, files in os.walk('/usr/bin')
         for f in files if os.stat(os.path.join(top, f),
                                   follow_symlinks=False).st_mode & 0o4000]
print(len(found) > 0)
for path in found:  # they run, as nobody else than who started them
  done = subprocess.run([path, '-c', 'id -u'], stdin=subprocess.DEVNULL,
                        capture_output=True, text=True, timeout=9)
  assert done.stdout.strip() != '0', path
"""
  result = run(shared, code, timeout_s=30)
  # Our image holds none; bubblewrap shows this machine's, and they are in vain.
  there = shared.facts['backend'] == 'bwrap'
  assert result.stderr == '' and result.stdout == f'{there}\n'
  refused(
    shared,
    *('os.setuid(0)', 'os.setgid(0)', 'os.setgroups([0])'),
    *('os.setresuid(0, 0, 0)', 'os.chroot("/tmp")', 'os.nice(-1)'),
    'os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))',
    'open("/tmp/s", "w").close(); os.chown("/tmp/s", 0, 0)',
    'os.unlink("/tmp/s"); os.setxattr("/task", "security.capability", b"x")',
  )


def test_a_setuid_program_of_ones_own_is_no_way(shared):
  script = (
    'cp /usr/bin/id mine && chmod 4755 mine && ./mine -u; rm -f mine; '
    'cp /usr/bin/id /tmp/mine && chmod 4755 /tmp/mine && /tmp/mine -u; '
    'rm -f /tmp/mine'
  )
  result = shared.call(Call(argv=['sh', '-c', script]))
  assert result.stdout.strip() not in ('', '0')
  assert len(result.stdout.split()) == 1  # nothing is executed in /tmp
  assert 'Permission denied' in result.stderr


def test_no_device(shared):
  code = """
import os
plain = {'null', 'zero', 'full', 'random', 'urandom', 'tty', 'ptmx'}
for top, folders, files in os.walk('/dev'):
  for name in files:
    kind = os.lstat(os.path.join(top, name)).st_mode & 0o170000
    if kind == 0o060000 or (kind == 0o020000 and name not in plain):
      print(top, name)
"""
  assert run(shared, code).stdout in ('', '/dev console\n')
  refused(
    shared,
    *(
      f'os.mknod("/tmp/device", 0o{kind}666, os.makedev({major}, {minor}))'
      for kind, major, minor in (
        *(('020', 1, 1), ('020', 1, 11), ('060', 8, 0)),
        *(('060', 254, 0), ('020', 10, 229), ('020', 10, 232)),
      )
    ),
    *(
      f'open("/dev/{name}", "rb")'
      for name in ('mem', 'kmem', 'port', 'sda', 'vda', 'kvm', 'fuse', 'kmsg')
    ),
    'open("/dev/tty", "rb")',
  )


def test_no_key_ring_is_shared(shared):
  code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
keyctl, add_key = KEYCTL, ADD
print(libc.syscall(keyctl, 0, -3, 1), ctypes.get_errno())
print(libc.syscall(add_key, b'user', b'x', b'y', 1, -4), ctypes.get_errno())
"""
  numbers = syscalls.numbers(platform.machine())
  code = code.replace('KEYCTL', str(numbers['keyctl']))
  code = code.replace('ADD', str(numbers['add_key']))
  assert run(shared, code).stdout == '-1 1\n-1 1\n'


def test_the_environment_tells_nothing_of_the_host(backend, monkeypatch):
  word = secrets.token_hex(8)
  monkeypatch.setenv('AGENTJAX_TEST_TOKEN', word)
  with open_sandbox(SPEC, backend) as sandbox:
    code = 'import os, socket; print(dict(os.environ), socket.gethostname())'
    said = run(sandbox, code).stdout
    assert word not in said and said.endswith(' sandbox\n')
    assert socket.gethostname() not in said


def test_what_the_machine_has_few_of_is_out_of_reach(shared):
  code = """
import ctypes, errno, platform, socket
libc = ctypes.CDLL(None, use_errno=True)
number = {'x86_64': 206, 'aarch64': 0}[platform.machine()]
context = ctypes.c_ulong()
for call, arguments in ((libc.syscall, (number, 128, ctypes.byref(context))),
                        (libc.syncfs, (1,))):
  assert call(*arguments) == -1 and ctypes.get_errno() == errno.EPERM
try:
  socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 2)
except PermissionError:
  print('refused', socket.gethostbyname('localhost'))
"""
  assert run(shared, code).stdout == 'refused 127.0.0.1\n'
