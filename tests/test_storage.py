"""Whole files on real disks: full, killed, and in a bucket."""

import errno
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax import storage, workdir

ROOT = pathlib.Path(__file__).resolve().parents[1]

HOSTILE = 'a\u2028b\u2029c\x85d\re\nf\x00g\ud800h\udfffi\x1bj\ufeffk漢é😀'


def test_round_trips(tmp_path):
  storage.write_bytes(tmp_path / 'new/deep/a', b'\x00\xff')
  assert storage.read_bytes(tmp_path / 'new/deep/a') == b'\x00\xff'
  storage.write_text(tmp_path / 't', 'x\r\ny漢')
  assert storage.read_text(tmp_path / 't') == 'x\r\ny漢'
  storage.write_json(tmp_path / 'j', {'a': [1, None, True]})
  assert storage.read_json(tmp_path / 'j') == {'a': [1, None, True]}
  arrays = {'x': np.arange(3, dtype=np.int32), 'y': np.zeros((0, 2))}
  storage.write_npz(tmp_path / 'z.npz', arrays)
  back = storage.read_npz(tmp_path / 'z.npz')
  assert sorted(back) == ['x', 'y']
  assert back['x'].dtype == np.int32 and back['x'].tolist() == [0, 1, 2]
  assert back['y'].shape == (0, 2)


def test_writing_replaces_and_leaves_nothing_else(tmp_path):
  for data in (b'first', b'second'):
    storage.write_bytes(tmp_path / 'f', data)
  assert os.listdir(tmp_path) == ['f']
  assert (tmp_path / 'f').read_bytes() == b'second'


def test_object_arrays_are_refused(tmp_path):
  with pytest.raises(ValueError, match="array 'x' has dtype object"):
    storage.write_npz(tmp_path / 'z.npz', {'x': np.array([{}])})
  assert os.listdir(tmp_path) == []


def test_json_lines_hold_any_text(tmp_path):
  rows = [{'text': HOSTILE}, {'text': ''}, {HOSTILE: [HOSTILE]}]
  storage.write_jsonl(tmp_path / 'r.jsonl', rows)
  assert storage.read_jsonl(tmp_path / 'r.jsonl') == rows
  text = (tmp_path / 'r.jsonl').read_bytes().decode('utf-8')  # valid UTF-8
  assert len(text.splitlines()) == 3  # even for readers that split at U+2028
  assert '漢é😀' in text  # and people can read it


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(), max_size=20))
def test_json_of_any_text_is_one_line(text):
  line = storage.dump_json({'t': text})
  assert len((line + '.').splitlines()) == 1
  # A surrogate pair in two halves is the one thing JSON cannot tell apart.
  paired = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
  if '\ufffd' not in paired or '\ufffd' in text:
    assert storage.parse_json(line) == {'t': text}


def test_floats_that_json_lacks():
  value = {'a': math.nan, 'b': [math.inf, -math.inf], 'c': 0.1}
  line = storage.dump_json(value)
  strict = json.loads(line, parse_constant=lambda c: pytest.fail(c))
  assert strict['a'] == {'$float': 'nan'}
  back = storage.parse_json(line)
  assert math.isnan(back['a']) and back['b'] == [math.inf, -math.inf]
  assert back['c'] == 0.1


@pytest.mark.parametrize(
  'value',
  [
    {'$float': 'nan'},
    {'$float': 3},
    {'$$float': 'inf'},
    {'$float': 'nan', 'more': 1},
    {'a': {'$float': 'text'}},
  ],
)
def test_a_mapping_that_looks_like_a_float_stays_a_mapping(value):
  assert storage.parse_json(storage.dump_json(value)) == value


def test_numpy_values_become_json():
  value = {
    'f': np.float32(0.5),
    'i': np.int64(3),
    'b': np.bool_(True),
    'a': np.array([[1.0, np.nan]]),
    't': (1, 2),
  }
  assert storage.dump_json(value) == (
    '{"f": 0.5, "i": 3, "b": true, "a": [[1.0, {"$float": "nan"}]], '
    '"t": [1, 2]}'
  )


def test_json_errors_name_the_place():
  with pytest.raises(TypeError, match=r'\$\.a\[1\]: a set has no JSON form'):
    storage.dump_json({'a': [0, set()]})
  with pytest.raises(TypeError, match=r'\$\.a: key 3 is not text'):
    storage.dump_json({'a': {3: 'x'}})


def test_nesting_cannot_overflow_the_stack():
  deep = []
  for _ in range(100_000):
    deep = [deep]
  assert 'nested deeper than 64' in storage.dump_json(deep)


def test_a_broken_line_is_named(tmp_path):
  (tmp_path / 'r.jsonl').write_text('{"a": 1}\n{"a":')
  with pytest.raises(ValueError, match=r'r\.jsonl: line 2 is not JSON'):
    storage.read_jsonl(tmp_path / 'r.jsonl')


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 64 KiB."""
  disk = tmp_path / 'disk'
  disk.mkdir()
  mount = ['mount', '-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', str(disk)]
  try:
    done = subprocess.run(mount, capture_output=True, text=True)
  except FileNotFoundError:
    pytest.skip('there is no mount command here')
  if done.returncode:
    pytest.skip(f'may not mount a tmpfs: {done.stderr.strip()}')
  yield disk
  subprocess.run(['umount', '-l', str(disk)], check=True)


def test_full_disk_keeps_old_files_and_leaves_no_half(small_disk):
  storage.write_text(small_disk / 'record', 'old')
  storage.write_bytes(small_disk / 'ballast', b'x' * 40_000)
  with pytest.raises(storage.StorageFull) as error:
    storage.write_bytes(small_disk / 'record', b'y' * 40_000)
  assert error.value.errno == errno.ENOSPC
  assert str(small_disk / 'record') in str(error.value)
  assert 'free some space' in str(error.value)
  assert sorted(os.listdir(small_disk)) == ['ballast', 'record']
  assert storage.read_text(small_disk / 'record') == 'old'
  with pytest.raises(storage.StorageFull):
    noise = np.random.default_rng(0).random(9000)  # does not compress
    storage.write_npz(small_disk / 'new.npz', {'x': noise})
  assert sorted(os.listdir(small_disk)) == ['ballast', 'record']
  storage.remove(small_disk / 'ballast')
  storage.write_bytes(small_disk / 'record', b'y' * 40_000)
  assert (small_disk / 'record').stat().st_size == 40_000


def test_a_write_cut_short_by_a_limit_leaves_no_half(tmp_path):
  # Needs no root: the kernel cuts the process's files at 4 KiB.
  code = f"""
    import resource
    from agentjax import storage, workdir
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    storage.write_bytes({str(tmp_path / 'small')!r}, b'x' * 4096)
    try:
      storage.write_bytes({str(tmp_path / 'big')!r}, b'x' * 4097)
    except OSError as e:
      print(type(e).__name__, e.errno)
  """
  assert _python(code).stdout == f'OSError {errno.EFBIG}\n'
  assert os.listdir(tmp_path) == ['small']


def test_kill_during_a_write_leaves_the_old_file(tmp_path):
  path = tmp_path / 'f'
  storage.write_text(path, 'old')
  code = f"""
    import os, signal
    from agentjax import storage, workdir
    # The last moment at which the new file may be lost: before the rename.
    os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
    storage.write_text({str(path)!r}, 'new')
  """
  assert _python(code, check=False).returncode == -signal.SIGKILL
  assert storage.read_text(path) == 'old'
  assert len(os.listdir(tmp_path)) == 2  # and a leftover
  assert storage.names(tmp_path) == ['f']
  assert len(storage.remove_leftovers(tmp_path)) == 1
  assert os.listdir(tmp_path) == ['f']


@pytest.mark.parametrize(
  'data', [b'', b'PK\x03\x04', b'\x93NUMPY\x01\x00', b'junk', b'whole'[:2]]
)
def test_a_damaged_array_file_is_named(tmp_path, data):
  path = tmp_path / 'a.npz'
  path.write_bytes(data)
  with pytest.raises(storage.Unreadable, match=r'a\.npz: not an npz file'):
    storage.read_npz(path)
  storage.write_npz(path, {'x': np.arange(1000), 'y': np.zeros(3)})
  whole = path.read_bytes()
  for cut in (len(whole) // 2, len(whole) - 30):
    path.write_bytes(whole[:cut])
    with pytest.raises(storage.Unreadable, match='restore it, or remove it'):
      storage.read_npz(path)
  middle = len(whole) // 4
  path.write_bytes(whole[:middle] + b'\xff' * 40 + whole[middle + 40 :])
  with pytest.raises(storage.Unreadable, match='restore it, or remove it'):
    storage.read_npz(path)


@pytest.mark.parametrize('data', [b'', b'{"a', b'\xff', b'[' * 100_000])
def test_a_damaged_json_file_is_named(tmp_path, data):
  (tmp_path / 'a.json').write_bytes(data)
  with pytest.raises(storage.Unreadable, match=r'a\.json: not JSON'):
    storage.read_json(tmp_path / 'a.json')


def test_names_of_a_directory_that_is_not_there(tmp_path):
  assert storage.names(tmp_path / 'no') == []
  assert storage.remove_leftovers(tmp_path / 'no') == []
  storage.remove(tmp_path / 'no' / 'file')


@pytest.fixture
def bucket():
  """An object store in memory behind the real epath and fsspec code."""
  known = fsspec.registry.get('s3')
  fsspec.register_implementation('s3', MemoryFileSystem, clobber=True)
  MemoryFileSystem.store.clear()
  yield 's3://bucket/run'
  MemoryFileSystem.store.clear()
  fsspec.register_implementation('s3', known or _NoStore, clobber=True)


class _NoStore(MemoryFileSystem):
  """What stands for s3 after the test, so that nothing uses it by chance."""

  def __init__(self, *args, **kwargs):
    raise RuntimeError('no object store is configured in the tests')


def test_a_bucket_holds_whole_objects_and_no_lock(bucket):
  assert storage.is_bucket(bucket)
  for text in ('one', 'two'):
    storage.write_text(f'{bucket}/metrics/a', text)
  storage.write_jsonl(f'{bucket}/metrics/b.jsonl', [{'x': 1}])
  storage.write_npz(f'{bucket}/metrics/c.npz', {'x': np.ones(2)})
  assert storage.read_text(f'{bucket}/metrics/a') == 'two'
  assert storage.read_jsonl(f'{bucket}/metrics/b.jsonl') == [{'x': 1}]
  assert storage.read_npz(f'{bucket}/metrics/c.npz')['x'].sum() == 2
  assert storage.names(f'{bucket}/metrics') == ['a', 'b.jsonl', 'c.npz']
  storage.remove(f'{bucket}/metrics/a')
  assert storage.names(f'{bucket}/metrics') == ['b.jsonl', 'c.npz']
  with workdir.WorkdirLock(bucket), workdir.WorkdirLock(bucket):
    assert storage.names(bucket) == ['metrics']


def _python(code, check=True):
  return subprocess.run(
    [sys.executable, '-c', textwrap.dedent(code)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=check,
    timeout=60,
  )
