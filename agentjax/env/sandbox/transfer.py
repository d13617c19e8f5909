"""Files, archives and snapshots in and out of a sandbox: the host's side.

Floor 1, env/sandbox, used by `session.py`. `files.py` does the work inside, a
few megabytes at a time, so that the runner's memory stays small. What comes
back is judged here: names of the policy's may be anything. This file does not
know how requests are carried.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agentjax.env.sandbox import archive
from agentjax.env.sandbox.snapshot import Entry, Snapshot
from agentjax.env.sandbox.spec import (
  CallResult,
  CallStatus,
  Fetched,
  ProtocolError,
  SandboxBug,
  SandboxSpec,
)

MAX_FETCH = 60 << 20
_PIECE = 4 << 20
_BATCH_ENTRIES = 2000
_MAX_PATH = 255
# A path of 255 bytes is at most 6 times as long in JSON.
_LISTING_BYTES = archive.MAX_MEMBERS * 1700
# (request, contents, bytes that may come back) -> (result, what came back)
Carry = Callable[
  [Mapping[str, Any], Sequence[bytes], int], tuple[CallResult, bytes]
]
_OK = CallResult(CallStatus.OK, exit=0)


class Transfer:
  """Files of one sandbox. Not to be used by two threads at a time."""

  def __init__(self, spec: SandboxSpec, carry: Carry):
    self.spec, self._carry = spec, carry

  def put(self, files: Mapping[str, bytes], mode: int) -> CallResult:
    """See `Sandbox.put`."""
    entries = [(checked(path), mode, data) for path, data in files.items()]
    return self._put('.', entries)

  def put_tar(self, data: bytes) -> CallResult:
    """See `Sandbox.put_tar`."""
    try:
      members = archive.read(io.BytesIO(data), max_bytes=len(data))
    except archive.ArchiveError as error:
      raise SandboxBug(f'an archive that is not unpacked: {error}') from error
    return self._put('.', [(m.path, m.mode, m.data) for m in members])

  def get(self, paths: Sequence[str], max_bytes: int) -> Fetched:
    """See `Sandbox.get`."""
    if max_bytes > MAX_FETCH:
      raise SandboxBug(f'max_bytes {max_bytes} is above {MAX_FETCH}')
    pieces = [(checked(path), 0, None) for path in paths]
    answers, data = self._get('.', pieces, max_bytes)
    return Fetched(
      {p: d for p, d in zip(paths, data, strict=True) if d is not None},
      {p: a for p, a in zip(paths, answers, strict=True) if isinstance(a, str)},
    )

  def get_tar(
    self, paths: Sequence[str], max_bytes: int
  ) -> tuple[bytes, dict[str, str]]:
    """See `Sandbox.get_tar`."""
    paths = [path if path == '.' else checked(path) for path in paths]
    found, refused = self._list('.', '', paths)
    for path, (mode, *_) in list(found.items()):
      if mode & 0o7000:
        refused[path] = f'special mode bits: {mode:o}'
        del found[path]
    contents = self._contents('.', '', found, refused, max_bytes)
    members = []
    for path, (mode, size, link) in found.items():
      data = contents.get(link or path)
      if size is not None and data is None:
        refused.setdefault(path, refused.get(link, 'not read'))
      elif size is None:
        members.append(archive.Member(path, None, 0o755))
      else:
        mode = 0o755 if mode & 0o111 else 0o644
        members.append(archive.Member(path, data, mode))
    return archive.write(members), refused

  def snapshot(self, max_bytes: int | None) -> Snapshot:
    """See `Sandbox.snapshot`."""
    left = 2 * self.spec.tmpfs_bytes if max_bytes is None else max_bytes
    entries, members, refused = [], [], {}
    for root in _roots(self.spec.workdir):
      found, wrong = self._list(root, f'{root}/', ['.'])
      contents = self._contents(root, f'{root}/', found, wrong, left)
      left -= sum(len(data) for data in contents.values())
      refused.update(wrong)
      for path, (mode, size, link) in found.items():
        if size is None:
          entries.append(Entry(path, mode, 0, ''))
          members.append(archive.Member(path[1:], None, 0o755))
        elif (link or path) in contents:
          data = contents[link or path]
          digest = hashlib.sha256(data).hexdigest()
          entries.append(Entry(path, mode, size, digest, link))
          if not link:
            reduced = 0o755 if mode & 0o111 else 0o644
            members.append(archive.Member(path[1:], data, reduced))
        else:
          refused.setdefault(path, refused.get(link, 'not read'))
    return Snapshot(
      self.spec.workdir,
      tuple(sorted(entries, key=lambda entry: entry.path)),
      archive.write(members),
      dict(sorted(refused.items())),
    )

  def restore(self, snapshot: Snapshot) -> None:
    """Makes the files of a snapshot, in a sandbox that has none.

    Raises:
      SandboxBug: it is of another workdir, damaged, or does not fit.
    """
    if snapshot.workdir != self.spec.workdir:
      raise SandboxBug(
        f'a snapshot of the workdir {snapshot.workdir!r} cannot be restored '
        f'with SandboxSpec.workdir {self.spec.workdir!r}'
      )
    contents = _verified(snapshot)
    for root in _roots(snapshot.workdir):
      cut = len(root) + 1
      own = [e for e in snapshot.entries if e.path.startswith(f'{root}/')]
      files = [
        (e.path[cut:], 0o700, contents[e.path] if e.sha256 else None)
        for e in own
        if not e.link
      ]
      links = [[e.path[cut:], e.link[cut:]] for e in own if e.link]
      # Last, as a folder may be read-only; what is deepest first.
      modes = [[e.path[cut:], e.mode] for e in reversed(own)]
      result = self._put(root, files, links, modes)
      if result.status is not CallStatus.OK:
        raise SandboxBug(
          'a snapshot does not fit into a sandbox of this spec: '
          f'{result.status.value} {result.stderr}'.strip()
        )

  def _put(self, root, files, links=(), modes=()) -> CallResult:
    """Puts (path, mode, data or None for a folder) below `root`."""
    for batch in _batches(files):
      request = {
        **{'op': 'put', 'root': root, 'links': [], 'modes': []},
        'files': [
          [path, mode, None if data is None else len(data), at]
          for path, mode, data, at in batch
        ],
      }
      sent = [data for _, _, data, _ in batch if data is not None]
      result, _ = self._carry(request, sent, 4096)
      if result.status is not CallStatus.OK:
        return result
    for name, some in (('links', links), ('modes', modes)):
      for start in range(0, len(some), _BATCH_ENTRIES):
        request = {'op': 'put', 'root': root}
        request |= {'files': [], 'links': [], 'modes': []}
        request[name] = some[start : start + _BATCH_ENTRIES]
        result, _ = self._carry(request, (), 4096)
        if result.status is not CallStatus.OK:
          return result
    return _OK

  def _get(self, root, pieces, max_bytes):
    """([size or reason], [bytes or None]) of (path, at, size or None)."""
    request = {'op': 'get', 'root': root, 'max_bytes': max_bytes}
    request['pieces'] = pieces
    most = max_bytes + 1024 * (1 + len(pieces))
    answers, rest = self._asked(request, most, len(pieces))
    out, at = [], 0
    for answer in answers:
      if isinstance(answer, int):
        out.append(rest[at : at + answer])
        at += answer
      else:
        out.append(None)
    return answers, out

  def _list(self, root, prefix, paths):
    """({path: (mode, size or None, link)}, {path: reason}) below `paths`."""
    request = {
      **{'op': 'list', 'root': root, 'paths': paths},
      'max_entries': archive.MAX_MEMBERS,
      'max_path': _MAX_PATH - len(prefix.encode()),
    }
    answers, _ = self._asked(request, _LISTING_BYTES, None)
    if isinstance(answers, str):
      return {}, {f'{prefix}.': answers}
    found, refused = {}, {}
    for path, mode, size, link, reason in answers:
      path = prefix + path
      reason = reason or archive.why_not(path.lstrip('/'), size is None)
      if reason:
        path = path.encode('utf-8', 'backslashreplace').decode()
        refused[path] = reason
      else:
        link = prefix + link if link and prefix + link in found else ''
        found.setdefault(path, (mode, size, link))
    return found, refused

  def _contents(self, root, prefix, found, refused, max_bytes):
    """{path: bytes} of the files in `found`; the others go to `refused`."""
    out: dict[str, bytearray] = {}
    batch, size_of_batch, left = [], 0, max_bytes
    for path, (_, size, link) in found.items():
      if size is None or link:
        continue
      if size > left:
        refused[path] = f'too big: {size} bytes'
        continue
      left -= size
      out[path] = bytearray()
      for at in range(0, size, _PIECE):
        length = min(_PIECE, size - at)
        if size_of_batch + length > _PIECE or len(batch) >= _BATCH_ENTRIES:
          self._fetch(root, prefix, batch, out, refused)
          batch, size_of_batch = [], 0
        batch.append((path, at, length))
        size_of_batch += length
    if batch:
      self._fetch(root, prefix, batch, out, refused)
    return {path: bytes(data) for path, data in out.items()}

  def _fetch(self, root, prefix, batch, out, refused) -> None:
    pieces = [(path[len(prefix) :], at, size) for path, at, size in batch]
    answers, data = self._get(root, pieces, _PIECE)
    for (path, _, size), answer, part in zip(batch, answers, data, strict=True):
      if path not in out:
        continue
      if part is None or len(part) != size:
        refused[path] = answer if part is None else 'it changed'
        del out[path]
      else:
        out[path] += part

  def _asked(self, request, most, count):
    """(answers, contents): `count` of them, or one for all if it is None.

    Where the program inside did not end well, its status stands for each.
    """
    result, data = self._carry(request, (), most)
    if not result.alive or result.status is not CallStatus.OK:
      gone = 'the sandbox is gone'
      reason = f'not read: {result.status.value}' if result.alive else gone
      return (reason if count is None else [reason] * count), b''
    try:
      line, rest = data.split(b'\n', 1)
      answers = json.loads(line)
      if count is not None and len(answers) != count:
        raise ValueError(f'{len(answers)} answers to {count} questions')
    except ValueError as error:
      raise ProtocolError(f'files came back unreadable: {error}') from error
    return answers, rest


def checked(path: str) -> str:
  """`path`, if it is one below workdir; raises SandboxBug if not."""
  parts = path.split('/')
  if not path or '\0' in path or {'', '.', '..'} & set(parts):
    raise SandboxBug(
      f'path {path!r}: give one relative to workdir, without . and ..'
    )
  return path


def _roots(workdir: str) -> list[str]:
  """The writable folders, none of them inside of another."""
  inside = workdir == '/tmp' or workdir.startswith('/tmp/')
  return ['/tmp'] if inside else sorted([workdir, '/tmp'])


def _verified(snapshot: Snapshot) -> dict[str, bytes]:
  """{path: contents} of a snapshot's files that are no links."""
  try:
    members = archive.read(
      io.BytesIO(snapshot.tar), len(snapshot.tar), len(snapshot.entries)
    )
  except archive.ArchiveError as error:
    raise SandboxBug(f'a snapshot is damaged: {error}') from error
  out = {f'/{m.path}': m.data for m in members if m.data is not None}
  for entry in snapshot.entries:
    if entry.sha256:
      data = out.get(entry.link or entry.path)
      if data is None or hashlib.sha256(data).hexdigest() != entry.sha256:
        raise SandboxBug(f'a snapshot is damaged: {entry.path!r}')
  return out


def _batches(files: Iterable[tuple[str, int, bytes | None]]):
  """Lists of (path, mode, part, place of the part), a piece of bytes each."""
  batch, size = [], 0
  for path, mode, data in files:
    for at in range(0, max(len(data or b''), 1), _PIECE):
      part = None if data is None else data[at : at + _PIECE]
      length = len(part or b'')
      if batch and (size + length > _PIECE or len(batch) >= _BATCH_ENTRIES):
        yield batch
        batch, size = [], 0
      batch.append((path, mode, part, at))
      size += length
  if batch:
    yield batch
