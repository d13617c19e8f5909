"""Archives: what is unpacked, and what never is."""

import io
import struct
import subprocess
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.env.sandbox import Call, CallStatus, SandboxBug, archive
from agentjax.env.sandbox.archive import ArchiveError, Member

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def tar_of(*members, form=tarfile.USTAR_FORMAT, **options):
  """A stream by the standard library of (name, data or None, fields)."""
  out = io.BytesIO()
  with tarfile.open(fileobj=out, mode='w', format=form, **options) as tar:
    for name, data, *fields in members:
      info = tarfile.TarInfo(name)
      info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
      info.size = len(data or b'')
      info.mode = 0o755 if data is None else 0o644
      for key, value in (fields or [{}])[0].items():
        setattr(info, key, value)
      tar.addfile(info, io.BytesIO(data or b''))
  return out.getvalue()


def read(data, max_bytes=1 << 20, **options):
  return archive.read(io.BytesIO(data), max_bytes, **options)


def changed(data, at, new):
  """A stream whose first header has other bytes and a right checksum."""
  block = bytearray(data[:512])
  block[at : at + len(new)] = new
  block[148:156] = b' ' * 8
  block[148:156] = b'%06o\0 ' % sum(block)
  return bytes(block) + data[512:]


@pytest.mark.parametrize('form', FORMATS)
def test_what_others_write_is_read(form):
  data = tar_of(
    ('a', None),
    ('a/b.txt', b'hello', {'mode': 0o600, 'mtime': 12, 'uname': 'me'}),
    ('a/run', b'x' * 512, {'mode': 0o700, 'uid': 1000}),
    ('empty', b''),
    ('./c/d', b'1'),
    form=form,
  )
  assert read(data) == [
    Member('a', None, 0o755),
    Member('a/b.txt', b'hello', 0o644),
    Member('a/run', b'x' * 512, 0o755),
    Member('empty', b'', 0o644),
    Member('c/d', b'1', 0o644),
  ]


def test_what_tar_writes_is_read(tmp_path):
  (tmp_path / 'folder').mkdir()
  (tmp_path / 'folder' / 'é').write_bytes(b'abc')
  command = ['tar', '-c', '-C', str(tmp_path), '.']
  data = subprocess.run(command, capture_output=True, check=True).stdout
  assert [m.path for m in read(data)] == ['folder', 'folder/é']


def test_harmless_extensions_are_read():
  data = tar_of(
    ('a', b'1', {'mtime': 1.5}),
    form=tarfile.PAX_FORMAT,
    pax_headers={'comment': '0123abcd'},
  )
  assert read(data) == [Member('a', b'1')]


GOOD = tar_of(('a', b'1'))


@pytest.mark.parametrize(
  'data, why',
  [
    (tar_of(('/etc/passwd', b'')), 'absolute'),
    (tar_of(('../x', b'')), 'not plain'),
    (tar_of(('a/../../x', b'')), 'not plain'),
    (tar_of(('..', None)), 'not plain'),
    (tar_of(('a//b', b'')), 'not plain'),
    (tar_of(('a/./b', b'')), 'not plain'),
    (tar_of(('', b'')), 'not plain'),
    (tar_of(('a/', b'x')), 'not plain'),
    (
      tar_of(('a', b'', {'type': tarfile.SYMTYPE, 'linkname': '/etc'})),
      'a symbolic link',
    ),
    (
      tar_of(('a', b'', {'type': tarfile.LNKTYPE, 'linkname': 'b'})),
      'a hard link',
    ),
    (tar_of(('a', b'', {'linkname': 'b'})), 'names a link'),
    (tar_of(('a', b'', {'type': tarfile.CHRTYPE})), 'a character device'),
    (tar_of(('a', b'', {'type': tarfile.BLKTYPE})), 'a block device'),
    (tar_of(('a', b'', {'type': tarfile.FIFOTYPE})), 'a pipe'),
    (tar_of(('a', b'', {'type': tarfile.CONTTYPE})), 'a contiguous file'),
    (tar_of(('a', b'', {'type': tarfile.GNUTYPE_SPARSE})), 'a sparse file'),
    (tar_of(('a', b'', {'type': b'Z'})), 'unknown kind'),
    (tar_of(('x' * 120, b''), form=tarfile.GNU_FORMAT), 'a long name'),
    (tar_of(('x' * 120, b''), form=tarfile.PAX_FORMAT), "gives b'path'"),
    (tar_of(('é', b''), form=tarfile.PAX_FORMAT), "gives b'path'"),
    (
      tar_of(
        ('a', b'', {'pax_headers': {'size': '9999'}}), form=tarfile.PAX_FORMAT
      ),
      "gives b'size'",
    ),
    (
      tar_of(
        ('a', b'', {'pax_headers': {'GNU.sparse.major': '1'}}),
        form=tarfile.PAX_FORMAT,
      ),
      'GNU.sparse',
    ),
    (
      tar_of(
        ('a', b''), form=tarfile.PAX_FORMAT, pax_headers={'path': '/etc/x'}
      ),
      "gives b'path'",
    ),
    (tar_of(('\udcff', b'')), 'not UTF-8'),
    (tar_of(('a', b'', {'mode': 0o4755})), 'special mode bits: 4755'),
    (tar_of(('a', None, {'mode': 0o1777})), 'special mode bits'),
    (tar_of(('a', b'1'), ('a', b'2')), 'there twice'),
    (tar_of(('a', b'1'), ('./a', b'2')), 'there twice'),
    (tar_of(('a', None), ('a', None)), 'there twice'),
    (tar_of(('a', b'1'), ('a/b', b'2')), 'below a file'),
    (tar_of(('a/b', b'2'), ('a', b'1')), 'there twice'),
    (tar_of(('a', b'x' * 2000)), 'above the limit'),
    (tar_of(*((f'{i}', b'') for i in range(11))), 'more than 10 members'),
    (changed(GOOD, 124, b'\x80' + bytes(10) + b'\x01'), 'no octal'),
    (changed(GOOD, 124, b'77777777777\0'), 'above the limit'),
    (changed(GOOD, 100, b'9999999\0'), 'no octal'),
    (changed(changed(GOOD, 156, b'5'), 124, b'00000000001\0'), 'claims 1'),
    (b'X' + GOOD[1:], 'wrong checksum'),
    (b'', 'ends early'),
    (GOOD[:700], 'ends early'),
    (GOOD[:1024], 'ends early'),
    (GOOD[:1024] + bytes(512), 'ends early'),
    (GOOD[:1024] + bytes(512) + GOOD, 'goes on'),
    (GOOD + b'x', 'goes on'),
    (GOOD + bytes(2 << 20), 'goes on'),
    (b'not an archive at all' * 99, 'no octal'),
  ],
)
def test_what_is_refused(data, why):
  with pytest.raises(ArchiveError) as refused:
    read(data, max_bytes=1000, max_members=10)
  assert why in str(refused.value)


class Endless:
  """A stream that never ends, and counts what is taken from it."""

  def __init__(self, block):
    self.block, self.taken, self.count = block, 0, 0

  def read(self, size):
    self.taken += size
    self.count += 1
    name = b'%d' % self.count
    return changed(self.block, 0, name + bytes(20))[:size]


@pytest.mark.parametrize('kind', ['file', 'extension'])
def test_a_million_members_are_not_looked_at(kind):
  stream = Endless(tar_of(('a', b''))[:512])
  if kind == 'extension':
    stream.block = changed(stream.block, 156, b'x')
  with pytest.raises(ArchiveError, match='more than 100 members'):
    archive.read(stream, 1 << 40, max_members=100)
  assert stream.taken <= 512 * 203


def test_a_claimed_size_takes_no_memory():
  stream = Endless(changed(GOOD[:512], 124, b'77777777777\0'))
  with pytest.raises(ArchiveError, match='8589934591 bytes'):
    archive.read(stream, 1 << 20)
  assert stream.taken == 512


NAME = st.text(
  st.characters(codec='utf-8', exclude_characters='\0/'), min_size=1, max_size=9
).filter(lambda name: name not in ('.', '..'))
PATHS = st.lists(NAME, min_size=1, max_size=3).map('/'.join)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(PATHS, st.none() | st.binary(max_size=600), max_size=8))
def test_what_is_written_is_read_by_us_and_by_others(tree):
  members = [
    Member(path, data, 0o755 if data is None or len(path) % 2 else 0o644)
    for path, data in sorted(tree.items())
    if not any(
      tree.get(path[:i]) is not None for i, c in enumerate(path) if c == '/'
    )
  ]
  data = archive.write(reversed(members))
  assert read(data) == members
  assert archive.write(read(data)) == data
  with tarfile.open(fileobj=io.BytesIO(data)) as tar:
    found = [
      Member(m.name, None if m.isdir() else tar.extractfile(m).read(), m.mode)
      for m in tar.getmembers()
    ]
  assert found == members


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_stream_is_read_or_refused(data):
  whole = bytearray(tar_of(('a', None), ('a/b', b'12345'), ('c', b'x' * 600)))
  for _ in range(data.draw(st.integers(1, 4))):
    whole[data.draw(st.integers(0, 2600))] = data.draw(st.integers(0, 255))
  try:
    for member in read(bytes(whole)):
      assert archive.why_not(member.path, member.data is None) is None
  except ArchiveError:
    pass


@pytest.mark.parametrize(
  'path, why',
  [
    ('a' * 101, 'too long'),
    ('a/' * 130 + 'b', 'too long'),
    ('\udcff', 'not UTF-8'),
    ('../x', 'not plain'),
    ('a\0b', 'not plain'),
  ],
)
def test_paths_that_no_archive_holds(path, why):
  assert why in archive.why_not(path)
  with pytest.raises(ArchiveError, match=why):
    archive.write([Member(path, b'')])
  assert archive.why_not('a' * 100) is None
  assert archive.why_not('a' * 150 + '/' + 'b' * 100) is None


def test_numbers_in_other_bases_are_no_size():
  data = changed(GOOD, 124, struct.pack('>Q', 1) + bytes(4))
  with pytest.raises(ArchiveError, match='no octal'):
    read(data)


def test_an_archive_goes_in_and_out(fresh):
  data = tar_of(
    ('a', None),
    ('a/é.txt', b'hello'),
    ('a/run.sh', b'#!/bin/sh\necho ran', {'mode': 0o755}),
    ('b/empty', b''),
    ('big', bytes(range(256)) * 40_000),  # in several pieces
  )
  assert fresh.put_tar(data).status is CallStatus.OK
  assert fresh.call(Call(argv=['./a/run.sh'])).stdout == 'ran\n'
  found, refused = fresh.get_tar(['a', 'b', 'big'], max_bytes=16 << 20)
  expected = [*read(data, 16 << 20), Member('b', None, 0o755)]
  assert refused == {}
  assert read(found, 16 << 20) == sorted(expected, key=lambda m: m.path)
  everything, _ = fresh.get_tar(['.'], max_bytes=16 << 20)
  assert everything == found
  # What is there is replaced; a file where a folder should be is not.
  assert fresh.put_tar(tar_of(('a/é.txt', b'new'))).status is CallStatus.OK
  assert fresh.get(['a/é.txt']).files == {'a/é.txt': b'new'}
  wrong = fresh.put_tar(tar_of(('big', None)))
  assert wrong.status is CallStatus.NONZERO and wrong.stderr.startswith('big:')


def test_callers_archives_are_refused_as_a_whole(shared):
  data = tar_of(
    ('x-good', b'1'), ('a', b'', {'type': tarfile.SYMTYPE, 'linkname': '/'})
  )
  with pytest.raises(SandboxBug, match='symbolic link'):
    shared.put_tar(data)
  assert shared.get(['x-good']).refused


MESS = r"""
import os
os.makedirs('m/in'); os.chdir('m')
open('good', 'w').write('ok'); os.chmod('good', 0o777)
os.symlink('/etc/passwd', 'link'); os.symlink('/etc', 'folder')
os.link('good', 'hard')
os.mkfifo('pipe')
open('setuid', 'w').close(); os.chmod('setuid', 0o4755)
open(b'\xff\xfe', 'w').close()
open('n' * 101, 'w').close()
open('secret', 'w').write('mine'); os.chmod('secret', 0)
os.mkdir('closed'); open('closed/x', 'w').write('x'); os.chmod('closed', 0)
open('sparse', 'w').truncate(12 << 20)
import socket; socket.socket(socket.AF_UNIX).bind('socket')
deep = os.open('.', os.O_RDONLY)
for _ in range(200):
  os.mkdir('dd', dir_fd=deep); deep = os.open('dd', os.O_RDONLY, dir_fd=deep)
"""


def test_what_the_policy_made_is_taken_or_refused_one_by_one(fresh):
  assert fresh.call(Call(code=MESS)).stderr == ''
  data, refused = fresh.get_tar(['m', 'none'], max_bytes=1 << 20)
  found = {m.path: m for m in read(data)}
  assert found['m/good'] == Member('m/good', b'ok', 0o755)
  assert found['m/hard'].data == b'ok'
  assert found['m/secret'].data == b'mine'
  assert found['m/closed/x'].data == b'x'
  assert 'm/in' in found and 'm/dd/dd/dd' in found
  deepest = max(refused, key=len)
  assert refused.pop(deepest) == 'its name is too long'
  assert set(deepest.split('/')) == {'m', 'dd'}
  assert refused == {
    'm/link': 'a symbolic link',
    'm/folder': 'a symbolic link',
    'm/pipe': 'not a regular file',
    'm/socket': 'not a regular file',
    'm/setuid': 'special mode bits: 4755',
    'm/\\udcff\\udcfe': 'its name is not UTF-8',
    'm/' + 'n' * 101: 'its name is too long',
    'm/sparse': f'too big: {12 << 20} bytes',
    'none': 'No such file or directory',
  }
  # Nothing was changed by looking.
  code = 'import os; print([oct(os.stat("m/" + n).st_mode) for n in N])'
  modes = fresh.call(Call(code='N = ["secret", "closed"]; ' + code))
  assert modes.stdout == "['0o100000', '0o40000']\n"
