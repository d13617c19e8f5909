"""Files: the one module through which everything in a workdir is written.

Floor 0, beside types. Paths are `etils.epath`, so that a workdir can be a
bucket (gs://, s3://): every file is written whole, under its final name only
once it is complete, and nothing relies on append. This file knows no record,
no JAX and no run; it promises that what stands under a final name is a whole
file, after kill -9 and on a full disk too.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TEMPORARY = re.compile(r'\.(.+)\.tmp-\d+-[0-9a-f]{8}')


class StorageFull(OSError):
  """The disk or the quota is full; files under final names are whole."""


class WorkdirMismatch(ValueError):
  """What stands in this workdir is of another run."""


class Unusable(OSError):
  """A path that cannot hold files; the message names it, and the remedy."""


class Unreadable(ValueError):
  """A file is not what this code writes; its message names file and remedy."""

  def __init__(
    self,
    path: epath.PathLike,
    why: object,
    remedy: str = 'the file was cut off, or changed by something else; restore '
    'it, or remove it to go without',
  ):
    super().__init__(f'{os.fspath(path)}: {why}: {remedy}')


def is_bucket(path: epath.PathLike) -> bool:
  """True for object stores, which replace whole objects atomically."""
  return '://' in os.fspath(path)


# ---- whole files -----------------------------------------------------------


def write_bytes(path: epath.PathLike, data: bytes) -> None:
  """Writes a whole file, making its directory; replaces what was there.

  On a local file system the data go to a temporary name in the same
  directory and are renamed once they are on the disk. On a bucket the object
  is put in one piece, which is atomic there.

  Raises:
    StorageFull: no space or quota is left; the old file, if any, stands.
    OSError: any other failure; the old file, if any, stands.
  """
  path = epath.Path(path)
  with full_disk_named(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_bucket(path):
      path.write_bytes(data)
      return
    unique = f'{os.getpid()}-{os.urandom(4).hex()}'
    temporary = path.parent / f'.{path.name}.tmp-{unique}'
    try:
      with open(temporary, 'wb') as f:
        f.write(data)
        f.flush()
        # Network file systems tell of a full disk here, and without it a
        # power cut could leave the new name on an empty file.
        os.fsync(f.fileno())
      os.replace(temporary, path)
    except BaseException:
      with contextlib.suppress(OSError):
        os.unlink(temporary)
      raise


@contextlib.contextmanager
def full_disk_named(path: epath.PathLike) -> Iterator[None]:
  """Raises StorageFull, with `path` and the remedy, for a full disk."""
  try:
    yield
  except OSError as e:
    if e.errno not in _FULL:
      raise
    raise StorageFull(
      e.errno,
      f'{os.strerror(e.errno)} while writing {os.fspath(path)}: free some '
      'space or move the workdir, then start the same command again; it goes '
      'on from the last checkpoint',
    ) from e


@contextlib.contextmanager
def unusable_named(path: epath.PathLike, remedy: str) -> Iterator[None]:
  """Raises Unusable, with `path` and `remedy`, where no file can be."""
  try:
    yield
  except (StorageFull, Unusable):
    raise
  except ImportError as e:  # gs:// without its package; the text names it
    raise Unusable(f'{os.fspath(path)} cannot be used: {e}') from e
  except KeyError as e:  # how epath says that it does not know a scheme
    scheme = os.fspath(path).split('://')[0]
    raise Unusable(
      f'{os.fspath(path)} cannot be used: {scheme}:// is no kind of path that '
      f'is known: {remedy}'
    ) from e
  except OSError as e:
    at = os.fspath(e.filename or path)
    raise Unusable(
      f'{os.fspath(path)} cannot be used: {at}: {e.strerror or e}: {remedy}'
    ) from e


def write_text(path: epath.PathLike, text: str) -> None:
  """Writes UTF-8 text; as `write_bytes`. Lone surrogates become '?'."""
  write_bytes(path, text.encode('utf-8', errors='replace'))


def read_bytes(path: epath.PathLike) -> bytes:
  return epath.Path(path).read_bytes()


def read_text(path: epath.PathLike) -> str:
  """UTF-8 text, newlines as they stand in the file."""
  return read_bytes(path).decode('utf-8')


def write_npz(path: epath.PathLike, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes named arrays, compressed; as `write_bytes`.

  Raises:
    ValueError: an array has dtype object, which only pickle could hold.
  """
  for name, array in arrays.items():
    if np.asarray(array).dtype.hasobject:
      raise ValueError(
        f'array {name!r} has dtype object: npz files hold numbers only'
      )
  buffer = io.BytesIO()
  np.savez_compressed(buffer, **arrays)
  write_bytes(path, buffer.getvalue())


# zlib, zipfile and NumPy each have their own; a .npy file has no `files`.
_NO_NPZ = (
  ValueError,
  EOFError,
  OSError,
  AttributeError,
  KeyError,
  NotImplementedError,
  zipfile.BadZipFile,
  zlib.error,
)


def read_npz(path: epath.PathLike) -> dict[str, np.ndarray]:
  """Inverse of `write_npz`.

  Raises:
    Unreadable: it is no such file.
  """
  data = io.BytesIO(read_bytes(path))
  try:
    with np.load(data, allow_pickle=False) as arrays:
      return {name: arrays[name] for name in arrays.files}
  except _NO_NPZ as e:
    raise Unreadable(path, f'not an npz file ({e})') from e


def remove(path: epath.PathLike) -> None:
  """Removes a file or a directory of them; no error if there is none."""
  path = epath.Path(path)
  if path.is_dir():
    path.rmtree()
  else:
    path.unlink(missing_ok=True)


def names(directory: epath.PathLike) -> list[str]:
  """Sorted names of the whole files in a directory; [] if there is none."""
  directory = epath.Path(directory)
  if not directory.exists():
    return []
  return sorted(
    p.name for p in directory.iterdir() if not _TEMPORARY.fullmatch(p.name)
  )


def remove_leftovers(directory: epath.PathLike) -> list[str]:
  """Removes temporary files that a killed writer left; returns their names.

  Only for the holder of the workdir's lock: a live writer's file looks alike.
  """
  directory = epath.Path(directory)
  if is_bucket(directory) or not directory.exists():
    return []
  gone = [p for p in directory.iterdir() if _TEMPORARY.fullmatch(p.name)]
  for p in gone:
    remove(p)
  return sorted(p.name for p in gone)


# ---- JSON ------------------------------------------------------------------
# Text of policies and tools may hold anything. Non-ASCII letters stay
# readable; what breaks line readers, terminals or UTF-8 is escaped.

_UNSAFE = re.compile('[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]')
_FLOAT_KEY = re.compile(r'\$+float')
_NOT_FINITE = {'nan': math.nan, 'inf': math.inf, '-inf': -math.inf}
_MAX_DEPTH = 64


def dump_json(value: Any, indent: int | None = None) -> str:
  """Strict JSON in text that UTF-8 can hold, on one line without `indent`.

  NaN and infinities are written as {"$float": "nan" | "inf" | "-inf"}, so
  that any JSON reader takes the file. NumPy scalars and arrays become numbers
  and lists, tuples become lists. `parse_json` is the inverse, but for two
  lone surrogates in a row that form a pair, which JSON cannot tell from it,
  and for what is nested deeper than 64 levels: it is replaced by a note, as a
  policy that nests its arguments must not be able to overflow the stack.

  Raises:
    TypeError: a value or key has no JSON form; the message has its path.
  """
  text = json.dumps(
    _encode(value, '$', 0), ensure_ascii=False, allow_nan=False, indent=indent
  )
  return _UNSAFE.sub(lambda m: f'\\u{ord(m.group()):04x}', text)


def parse_json(text: str | bytes) -> Any:
  """Inverse of `dump_json`."""
  return json.loads(text, object_hook=_decode)


def _encode(value: Any, where: str, depth: int) -> Any:
  if value is None or isinstance(value, (bool, int, str)):
    return value
  if isinstance(value, float):
    if math.isfinite(value):
      return float(value)
    return {'$float': 'nan' if math.isnan(value) else str(float(value))}
  if depth > _MAX_DEPTH:
    return f'(left out: nested deeper than {_MAX_DEPTH} levels)'
  depth += 1
  if isinstance(value, Mapping):
    for key in value:
      if not isinstance(key, str):
        raise TypeError(f'{where}: key {key!r} is not text: use str(key)')
    out = {k: _encode(v, f'{where}.{k}', depth) for k, v in value.items()}
    if len(out) == 1 and _FLOAT_KEY.fullmatch(key := next(iter(out))):
      return {f'${key}': out[key]}  # a person's own '$float' key
    return out
  if isinstance(value, (list, tuple)):
    return [_encode(v, f'{where}[{i}]', depth) for i, v in enumerate(value)]
  if hasattr(value, 'tolist'):  # NumPy, and arrays that know how to be one
    return _encode(value.tolist(), where, depth)
  raise TypeError(
    f'{where}: a {type(value).__name__} has no JSON form: give text, numbers, '
    'lists or mappings'
  )


def _decode(value: dict[str, Any]) -> Any:
  if len(value) == 1 and _FLOAT_KEY.fullmatch(key := next(iter(value))):
    inner = value[key]
    if key != '$float':
      return {key[1:]: inner}
    if isinstance(inner, str) and inner in _NOT_FINITE:
      return _NOT_FINITE[inner]
  return value


def write_json(path: epath.PathLike, value: Any) -> None:
  """Writes one indented JSON file; as `write_bytes` and `dump_json`."""
  write_text(path, dump_json(value, indent=2) + '\n')


def read_json(path: epath.PathLike) -> Any:
  """Inverse of `write_json`.

  Raises:
    Unreadable: it is not JSON.
  """
  try:
    return parse_json(read_bytes(path))
  except (ValueError, RecursionError) as e:
    raise Unreadable(path, f'not JSON ({e})') from e


def write_jsonl(path: epath.PathLike, rows: Iterable[Any]) -> None:
  """Writes one JSON value a line, the whole file at once."""
  write_text(path, ''.join(dump_json(row) + '\n' for row in rows))


def read_jsonl(path: epath.PathLike) -> list[Any]:
  """Inverse of `write_jsonl`.

  Raises:
    Unreadable: a line is not JSON; the message names file and line.
  """
  rows = []
  # Split at the newline alone: text may hold other line separators.
  for i, line in enumerate(read_bytes(path).split(b'\n'), 1):
    if not line:
      continue
    try:
      rows.append(parse_json(line))
    except (ValueError, RecursionError) as e:
      raise Unreadable(path, f'line {i} is not JSON ({e})') from e
  return rows
