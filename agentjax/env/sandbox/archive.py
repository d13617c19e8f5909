"""Tar streams that may be unpacked, and no others.

Floor 1, env/sandbox. `read` takes a stream that anybody may have made and
gives regular files and folders with plain relative names, or refuses all of
it; `write` makes one stream of each set of members, to the byte. Neither
touches a file system, so nothing in a stream can lead anywhere.

The format is POSIX ustar (IEEE Std 1003.1, pax, "ustar Interchange Format").
Of pax extensions only those are let through that change no member's name,
size or contents. Standard readers are not used: they follow what a stream
says in many more ways than a folder of files needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import BinaryIO

BLOCK = 512
MAX_MEMBERS = 20_000
_MAX_PAX = 64 << 10
_MAX_PADDING = 1 << 20  # tar pads to its record size
_NAME, _PREFIX = 100, 155
_HARMLESS = {'atime', 'ctime', 'mtime', 'uid', 'gid', 'uname', 'gname'}
_HARMLESS |= {'comment'}
_KINDS = {
  b'1': 'a hard link',
  b'2': 'a symbolic link',
  b'3': 'a character device',
  b'4': 'a block device',
  b'6': 'a pipe',
  b'7': 'a contiguous file',
  b'D': 'a listing of a folder',
  b'K': 'a long name of a link',
  b'L': 'a long name',
  b'S': 'a sparse file',
}


class ArchiveError(ValueError):
  """A stream or a member that is refused; the text says which and why."""


@dataclasses.dataclass(frozen=True)
class Member:
  """A file, or a folder, whose `data` is None; `mode` is 0644 or 0755."""

  path: str
  data: bytes | None
  mode: int = 0o644


def read(
  file: BinaryIO, max_bytes: int, max_members: int = MAX_MEMBERS
) -> list[Member]:
  """All members of a tar stream, in its order.

  Memory and time are bounded by `max_bytes` of contents and `max_members`,
  whatever the stream claims; nothing is read beyond them.

  Raises:
    ArchiveError: a name that is absolute, has `..`, is not UTF-8, too long,
      or there twice; anything but a file or a folder; special mode bits; an
      extension that changes names or sizes; more than the limits; a stream
      that is damaged, ends early or goes on after its end.
  """
  out: list[Member] = []
  tree = _Tree()
  left = max_bytes
  for _ in range(2 * max_members + 2):  # an extension each, and the end
    block = _take(file, BLOCK)
    if not block.strip(b'\0'):
      _check_end(file)
      return out
    kind, name, mode, size = _header(block)
    if kind in (b'x', b'g'):
      _check_pax(_contents(file, size, _MAX_PAX, 'extensions'))
      continue
    if len(out) >= max_members:
      break
    folder = kind == b'5'
    path = _name(name, folder)
    if path is None:  # './' itself
      continue
    if mode & 0o7000:
      raise ArchiveError(f'{path!r} has special mode bits: {mode:o}')
    tree.add(path, folder)
    if folder:
      if size:
        raise ArchiveError(f'the folder {path!r} claims {size} bytes')
      out.append(Member(path, None, 0o755))
      continue
    data = _contents(file, size, left, repr(path))
    left -= size
    out.append(Member(path, data, 0o755 if mode & 0o111 else 0o644))
  raise ArchiveError(f'more than {max_members} members')


def write(members: Iterable[Member]) -> bytes:
  """The one tar stream of these members, which `read` takes back.

  Raises:
    ArchiveError: a path that `read` would refuse.
  """
  out = bytearray()
  tree = _Tree()
  for member in sorted(members, key=lambda m: m.path):
    folder = member.data is None
    out += _header_of(member)
    tree.add(member.path, folder)
    if not folder:
      out += member.data
      out += bytes(-len(member.data) % BLOCK)
  return bytes(out + bytes(2 * BLOCK))


def why_not(path: str, folder: bool = False) -> str | None:
  """Why no archive can hold this path; None if one can."""
  try:
    name = path.encode()
  except UnicodeEncodeError:
    return 'its name is not UTF-8'
  try:
    if _name(name, False) != path:
      return 'its name is not plain'
    _split(name + b'/' * folder)
  except ArchiveError as error:
    return str(error)
  return None


class _Tree:
  """The paths so far; refuses one that stands in the way of another."""

  def __init__(self):
    self._kinds: dict[str, str] = {}

  def add(self, path: str, folder: bool) -> None:
    for i, letter in enumerate(path):
      if letter == '/':
        if self._kinds.setdefault(path[:i], 'implied') == 'file':
          raise ArchiveError(f'{path!r} is below a file')
    known = self._kinds.get(path)
    if known is not None and not (known == 'implied' and folder):
      raise ArchiveError(f'{path!r} is there twice')
    self._kinds[path] = 'folder' if folder else 'file'


def _take(file: BinaryIO, size: int) -> bytes:
  parts, left = [], size
  while left:
    part = file.read(left)
    if not part:
      raise ArchiveError('the archive ends early')
    parts.append(part)
    left -= len(part)
  return b''.join(parts)


def _contents(file: BinaryIO, size: int, most: int, of: str) -> bytes:
  if size > most:
    raise ArchiveError(f'{of}: {size} bytes are above the limit, {most} left')
  data = _take(file, size)
  _take(file, -size % BLOCK)
  return data


def _check_end(file: BinaryIO) -> None:
  if _take(file, BLOCK).strip(b'\0'):
    raise ArchiveError('the archive goes on after its end')
  padding = file.read(_MAX_PADDING + 1)
  if len(padding) > _MAX_PADDING or padding.strip(b'\0'):
    raise ArchiveError('the archive goes on after its end')


def _header(block: bytes) -> tuple[bytes, bytes, int, int]:
  """(kind, whole name, mode, size)."""
  total = sum(block[:148]) + 8 * ord(' ') + sum(block[156:])
  if _octal(block[148:156], 'checksum') != total:
    raise ArchiveError('a header has a wrong checksum')
  name = block[:_NAME].split(b'\0')[0]
  kind = b'0' if block[156:157] == b'\0' else block[156:157]
  if kind not in (b'0', b'5', b'x', b'g'):
    what = _KINDS.get(kind, f'of the unknown kind {kind!r}')
    raise ArchiveError(f'{name!r} is {what}: give files and folders alone')
  if block[157:257].strip(b'\0'):
    raise ArchiveError(f'{name!r} names a link')
  if block[257:265] == b'ustar\x0000':  # older formats have no such field
    prefix = block[345:500].split(b'\0')[0]
    name = prefix + b'/' + name if prefix else name
  mode, size = _octal(block[100:108], 'mode'), _octal(block[124:136], 'size')
  return kind, name, mode, size


def _octal(field: bytes, what: str) -> int:
  digits = field.strip(b' \0')
  if digits.strip(b'01234567'):  # base 256 too, for sizes of 8 GiB and more
    raise ArchiveError(f'a header has a {what} that is no octal: {field!r}')
  return int(digits or b'0', 8)


def _check_pax(data: bytes) -> None:
  while data:
    length, _, rest = data.partition(b' ')
    size = int(length) if length.isdigit() and len(length) < 6 else 0
    key, equal, _ = data[len(length) + 1 : size].partition(b'=')
    if not rest or not equal or data[size - 1 : size] != b'\n':
      raise ArchiveError('an extension is damaged')
    if key.decode('ascii', 'replace') not in _HARMLESS:
      raise ArchiveError(
        f'an extension gives {key!r}: write the archive in the format ustar'
      )
    data = data[size:]


def _name(name: bytes, folder: bool) -> str | None:
  """The path of a member; None for the top itself."""
  try:
    path = name.decode()
  except UnicodeDecodeError:
    raise ArchiveError(f'the name {name!r} is not UTF-8') from None
  if folder:
    path = path[:-1] if path.endswith('/') else path
  if folder and path == '.':
    return None
  path = path[2:] if path.startswith('./') else path
  if path.startswith('/'):
    raise ArchiveError(f'the name {path!r} is absolute')
  if {'', '.', '..'} & set(path.split('/')) or '\0' in path:
    raise ArchiveError(f'the name {path!r} is not plain')
  return path


def _split(name: bytes) -> tuple[bytes, bytes]:
  """(prefix, name) that fit their fields."""
  if len(name) <= _NAME:
    return b'', name
  at = name.rfind(b'/', 0, _PREFIX + 1)
  while at > 0 and name[at + 1 :] == b'':
    at = name.rfind(b'/', 0, at)
  if at <= 0 or len(name) - at - 1 > _NAME:
    raise ArchiveError('its name is too long')
  return name[:at], name[at + 1 :]


def _header_of(member: Member) -> bytes:
  folder = member.data is None
  reason = why_not(member.path, folder)
  if reason:
    raise ArchiveError(f'{member.path!r}: {reason}')
  prefix, name = _split(member.path.encode() + b'/' * folder)
  block = bytearray(BLOCK)
  block[: len(name)] = name
  for at, value, width in (
    (100, member.mode & 0o777, 7),
    (108, 0, 7),  # uid, gid and time say nothing, so that equal trees give
    (116, 0, 7),  # equal streams
    (124, 0 if folder else len(member.data), 11),
    (136, 0, 11),
  ):
    block[at : at + width] = b'%0*o' % (width, value)
  block[156:157] = b'5' if folder else b'0'
  block[257:265] = b'ustar\x0000'
  block[345 : 345 + len(prefix)] = prefix
  block[148:156] = b'        '
  block[148:156] = b'%06o\0 ' % sum(block)
  return bytes(block)
