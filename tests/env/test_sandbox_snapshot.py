"""Snapshots: what lies in a sandbox, compared and gone on from."""

import dataclasses
import hashlib

import pytest
from sandboxes import SPEC

from agentjax.env.sandbox import (
  Call,
  CallStatus,
  Entry,
  SandboxBug,
  open_sandbox,
)

TREE = r"""
import os
os.makedirs('src/deep'); open('src/deep/a.py', 'w').write('print(1)')
open('src/run', 'w').write('#!/bin/sh\necho ran'); os.chmod('src/run', 0o751)
open('/tmp/note', 'w').write('kept'); os.mkdir('/tmp/empty')
os.chmod('/tmp/empty', 0o700)
open('secret', 'w').write('mine'); os.chmod('secret', 0)
os.mkdir('shut'); open('shut/x', 'wb').write(bytes(range(256)) * 30_000)
os.chmod('shut', 0o555)
open('é', 'w').close()
"""


def digest(data):
  return hashlib.sha256(data).hexdigest()


def run(sandbox, code):
  result = sandbox.call(Call(code=code))
  assert result.status is CallStatus.OK, result.stderr
  return result.stdout


def test_a_snapshot_says_what_is_there(fresh):
  assert fresh.snapshot().entries == ()
  run(fresh, TREE)
  snapshot = fresh.snapshot()
  big = bytes(range(256)) * 30_000
  assert snapshot.entries == (
    Entry('/task/secret', 0o000, 4, digest(b'mine')),
    Entry('/task/shut', 0o555, 0, ''),
    Entry('/task/shut/x', 0o644, len(big), digest(big)),
    Entry('/task/src', 0o755, 0, ''),
    Entry('/task/src/deep', 0o755, 0, ''),
    Entry('/task/src/deep/a.py', 0o644, 8, digest(b'print(1)')),
    Entry('/task/src/run', 0o751, 18, digest(b'#!/bin/sh\necho ran')),
    Entry('/task/é', 0o644, 0, digest(b'')),
    Entry('/tmp/empty', 0o700, 0, ''),
    Entry('/tmp/note', 0o644, 4, digest(b'kept')),
  )
  assert snapshot.complete and snapshot.refused == {}
  assert fresh.snapshot() == snapshot  # and looking changes nothing
  run(fresh, 'open("src/deep/a.py", "a").write("#")')
  later = fresh.snapshot()
  different = set(later.entries) ^ set(snapshot.entries)
  assert {entry.path for entry in different} == {'/task/src/deep/a.py'}


def test_a_fork_begins_with_the_files_and_goes_its_own_way(fresh, backend):
  run(fresh, TREE)
  snapshot = fresh.snapshot()
  with open_sandbox(SPEC, backend, snapshot=snapshot) as fork:
    assert fork.snapshot() == snapshot
    assert fork.call(Call(argv=['./src/run'])).stdout == 'ran\n'
    run(fork, 'open("/tmp/note", "w").write("changed")')
    assert run(fresh, 'print(open("/tmp/note").read())') == 'kept\n'
    assert fork.snapshot() != snapshot == fresh.snapshot()


def test_a_fork_fits_wherever_its_sandbox_did(fresh, backend):
  """Holes and hard links would take many times their room as plain files."""
  code = """
import os
open('one', 'wb').write(os.urandom(5 << 20))
for i in range(9): os.link('one', f'link{i}')
for i in range(9): open(f'hole{i}', 'wb').truncate(3 << 20)
with open('end', 'wb') as f: f.seek((6 << 20) - 3); f.write(b'end')
open('rest', 'wb').write(b'x' * (10 << 20))
"""
  run(fresh, code)
  snapshot = fresh.snapshot(max_bytes=100 << 20)
  assert snapshot.complete
  # Of one file's names, the first stands for the others.
  links = [e for e in snapshot.entries if e.link]
  assert {e.link for e in links} == {'/task/link0'} and len(links) == 9
  with open_sandbox(SPEC, backend, snapshot=snapshot) as fork:
    assert fork.snapshot(max_bytes=100 << 20) == snapshot
    check = 'import os; print(os.stat("link3").st_nlink, os.stat("end").st_size'
    assert run(fork, check + ')') == f'10 {6 << 20}\n'


def test_what_cannot_be_taken_is_named(fresh):
  code = """
import os
os.symlink('/etc/passwd', 'link'); os.mkfifo('/tmp/pipe')
open('big', 'wb').write(bytes(2000)); open('small', 'w').close()
open('n' * 200, 'w').close()
"""
  run(fresh, code)
  snapshot = fresh.snapshot(max_bytes=1000)
  assert [e.path for e in snapshot.entries] == ['/task/small']
  assert not snapshot.complete
  assert snapshot.refused == {
    '/task/big': 'too big: 2000 bytes',
    '/task/link': 'a symbolic link',
    '/task/' + 'n' * 200: 'its name is too long',
    '/tmp/pipe': 'not a regular file',
  }


def test_a_live_session_is_left_alone(fresh):
  with fresh.session('python') as python:
    python.run('x = 1; open("a", "w").write("1")')
    assert [e.path for e in fresh.snapshot().entries] == ['/task/a']
    assert python.run('print(x)').stdout == '1\n'


def test_a_snapshot_of_a_spent_sandbox_is_empty(backend):
  spec = dataclasses.replace(SPEC, lifetime_s=1.0)
  with open_sandbox(spec, backend) as sandbox:
    run(sandbox, 'open("a", "w").close()')
    sandbox.call(Call(code='import time; time.sleep(9)'))
    snapshot = sandbox.snapshot()
    assert snapshot.entries == () and not snapshot.complete
    assert set(snapshot.refused.values()) == {'the sandbox is gone'}


def test_snapshots_that_cannot_be_restored(fresh, backend):
  run(fresh, 'open("a", "wb").write(b"x" * (3 << 20))')
  snapshot = fresh.snapshot()
  small = dataclasses.replace(SPEC, tmpfs_bytes=1 << 20)
  with pytest.raises(SandboxBug, match='does not fit'):
    open_sandbox(small, backend, snapshot=snapshot)
  elsewhere = dataclasses.replace(SPEC, workdir='/work')
  with pytest.raises(SandboxBug, match="workdir '/task'"):
    open_sandbox(elsewhere, backend, snapshot=snapshot)
  tar = snapshot.tar.replace(b'xxxx', b'yyyy', 1)
  damaged = dataclasses.replace(snapshot, tar=tar)
  with pytest.raises(SandboxBug, match="damaged: '/task/a'"):
    open_sandbox(SPEC, backend, snapshot=damaged)
