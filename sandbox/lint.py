"""Looks through an image for what no policy should find in one.

    python sandbox/lint.py IMAGE [...]

Compilers, repositories, answers, keys, caches, links and devices that lead out:
in every layer, so that what a later layer removed is found as well. Files that
run as somebody else or that anybody may change: as the last layer leaves them.
Exit code 1 where there is any. An image's folder may hold a file `allowed`: one
pattern a line, of paths that are meant to be there, with the reason behind a #.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import pathlib
import posixpath
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from typing import BinaryIO

_COMPILER = re.compile(
  r'(?:[a-z0-9_]+-linux-[a-z0-9]+-)?'
  r'(?:gcc|g\+\+|cc|c\+\+|cpp|c[89]9|clang(?:\+\+)?|ld(?:\.(?:bfd|gold|lld))?|as|tcc|'
  r'rustc|cargo|gfortran|ghc|javac|go|make|cmake)(?:-[0-9.]+)?'
)
_INNER_COMPILER = re.compile(r'cc1|cc1plus|collect2|lto1|libtcc\.\w+')
_PROGRAMS = re.compile(r'(?:usr/)?(?:local/)?s?bin')
_ANSWERS = re.compile(
  r'(?:answers?|expected|solutions?|rewards?|golden|hidden[-_]tests?)'
  r'(?:[-_.].*)?',
  re.IGNORECASE,
)
_CODE = re.compile(r'\.(?:so|pyc|h|mo)(?:\.|$)')
_KEYS = re.compile(
  r'id_(?:rsa|dsa|ecdsa|ed25519)|authorized_keys|ssh_host_.*_key|\.netrc|'
  r'\.pypirc|\.git-credentials|.*\.p12'
)
_PRIVATE = b'PRIVATE KEY-----'
_CACHES = (
  ('var/lib/apt/lists', 'a package list'),
  ('var/cache/apt/archives', 'a package'),
  ('var/cache/apt', 'a cache'),
  ('root/.cache', 'a cache'),
  ('root/.ssh', 'a key'),
)
_OPEN_TO_ALL = ('tmp', 'var/tmp', 'run/lock', 'dev/shm')
_SECRET_NAME = re.compile(r'TOKEN|SECRET|PASSW|API_?KEY|CREDENTIAL', re.I)
_SMALL = 64 << 10


def allowed(folder: pathlib.Path) -> list[str]:
  """The patterns of an image's folder."""
  path = folder / 'allowed'
  lines = path.read_text().splitlines() if path.exists() else []
  patterns = (line.split('#')[0].strip() for line in lines)
  return [p for p in patterns if p]


@dataclasses.dataclass
class Layer:
  """What is wrong with a layer, `path: reason` each.

  Attributes:
    wrong: whatever comes behind it. rights: of every path, what is wrong with
      its rights, if another layer does not change them. gone: paths that it
      removes from the layers below.
  """

  wrong: list[str]
  rights: dict[str, list[str]]
  gone: list[str]


def layer(stream: BinaryIO, patterns: Sequence[str] = ()) -> Layer:
  """Reads a tar once, from its beginning to its end."""
  out = Layer([], {}, [])
  with tarfile.open(fileobj=stream, mode='r|*') as members:
    for member in members:
      path = posixpath.normpath(member.name).lstrip('/')
      folder, name = posixpath.split(path)
      if name.startswith('.wh.'):  # a layer's mark of a removal
        inside = name == '.wh..wh..opq'
        removed = name.removeprefix('.wh.')
        out.gone.append(folder if inside else posixpath.join(folder, removed))
        continue
      out.rights[path] = []
      if any(fnmatch.fnmatch(path, p) for p in patterns):
        continue
      content = b''
      if member.isreg() and member.size <= _SMALL and _may_be_key(path):
        content = members.extractfile(member).read()
      out.wrong += [f'{path}: {why}' for why in reasons(member, path, content)]
      out.rights[path] = [f'{path}: {why}' for why in _rights(member, path)]
  return out


def archive(stream: BinaryIO, patterns: Sequence[str] = ()) -> list[str]:
  """What is wrong with a root file system as a tar."""
  return _together([layer(stream, patterns)])


def _together(layers: Sequence[Layer]) -> list[str]:
  """What is wrong with layers, the lowest first."""
  wrong: list[str] = []
  rights: dict[str, list[str]] = {}
  for one in layers:
    wrong += one.wrong
    for gone in one.gone:
      for path in [p for p in rights if f'{p}/'.startswith(f'{gone}/')]:
        del rights[path]
    rights |= one.rights
  return sorted(
    {*wrong, *(line for lines in rights.values() for line in lines)}
  )


def _may_be_key(path: str) -> bool:
  return path.endswith(('.pem', '.key')) or '/.ssh/' in f'/{path}'


def reasons(
  member: tarfile.TarInfo, path: str, content: bytes = b''
) -> Iterator[str]:
  """Why a member should not be there, whatever its rights."""
  folder, name = posixpath.split(path)
  parts = path.split('/')
  if parts[0] == '..':
    yield 'is outside of the root'
  program = not member.isdir() and _PROGRAMS.fullmatch(folder)
  if program and _COMPILER.fullmatch(name) or _INNER_COMPILER.fullmatch(name):
    yield 'a compiler'
  if name == '.git' or name.endswith('.git') and member.isdir():
    yield 'a repository, and its history'
  if name.endswith('.bundle') and not member.isdir():
    yield 'a repository, perhaps'
  if _ANSWERS.fullmatch(name) and not _CODE.search(name):
    yield 'its name is that of answers'
  if _KEYS.fullmatch(name) or _PRIVATE in content:
    yield 'a key'
  for place, what in _CACHES:
    if path.startswith(f'{place}/') and member.isreg() and name != 'lock':
      yield what
  if '.cache/pip' in path and member.isreg() or name.endswith('.whl'):
    yield 'a package of Python'
  if member.issym() or member.islnk():
    base = folder if member.issym() else ''
    to = posixpath.normpath(posixpath.join('/', base, member.linkname))
    depth = posixpath.normpath(posixpath.join(base, member.linkname))
    if not member.linkname.startswith('/') and depth.startswith('..'):
      yield f'a link out of the root, to {member.linkname}'
    elif to.startswith(('/host', '/var/run/docker.sock')):
      yield f'a link to {to}'


def _rights(member: tarfile.TarInfo, path: str) -> Iterator[str]:
  if member.mode & 0o6000 and not member.issym():
    yield f'runs as its owner or group (mode {member.mode & 0o7777:o})'
  if 'SCHILY.xattr.security.capability' in member.pax_headers:
    yield 'has capabilities'
  if member.mode & 0o002 and (member.isreg() or member.isdir()):
    if not any(path == p or path.startswith(f'{p}/') for p in _OPEN_TO_ALL):
      yield f'anybody may change it (mode {member.mode & 0o7777:o})'
  if (member.isblk() or member.ischr()) and not path.startswith('dev/'):
    yield 'a device'


def image(name: str, patterns: Sequence[str] = ()) -> list[str]:
  """What is wrong with an image of the engine."""
  command = ['docker', 'save', name]
  layers: dict[str, Layer] = {}
  wrong, order = [], []
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
  ) as save:
    try:
      with tarfile.open(fileobj=save.stdout, mode='r|') as members:
        for member in members:
          if member.issym():  # a layer that stands somewhere else, too
            layers[member.name] = Layer([], {}, [])
          if not member.isreg():
            continue
          inner = members.extractfile(member)
          if member.name == 'manifest.json':
            order = json.loads(inner.read())[0]['Layers']
          elif member.name.endswith('.json'):
            wrong += _config(inner.read())
          else:
            wrong += _read_blob(member.name, inner, layers, patterns)
    except tarfile.ReadError:
      pass  # the engine had nothing to say; its words are below
    said = save.stderr.read().decode('utf-8', 'replace').strip()
  if save.returncode or not order or set(order) - set(layers):
    sys.exit(f'docker save {name} failed: {said or "layers are missing"}')
  return sorted({*wrong, *_together([layers[n] for n in order])})


def _read_blob(name, stream, layers, patterns) -> list[str]:
  """A layer goes to `layers`; of a config what is wrong is returned."""
  if stream.peek(1)[:1] == b'{':
    return _config(stream.read())
  try:
    layers[name] = layer(stream, patterns)
  except tarfile.ReadError:  # neither, or a layer without a file
    layers[name] = Layer([], {}, [])
  return []


def _config(data: bytes) -> list[str]:
  """Secrets in the variables of an image."""
  try:
    config = json.loads(data)
  except ValueError:
    return []
  found = config.get('config') if isinstance(config, dict) else None
  variables = (found or {}).get('Env') or []
  return [
    f'variable {v.split("=")[0]}: a secret'
    for v in variables
    if _SECRET_NAME.search(v.split('=')[0])
  ]


def main(argv: Sequence[str] | None = None) -> int:
  """Looks through the images that are named; returns the exit code."""
  given = sys.argv[1:] if argv is None else list(argv)
  if not given or any(a.startswith('-') for a in given):
    print(__doc__)
    return 2
  folders = pathlib.Path(os.path.dirname(os.path.abspath(__file__))) / 'images'
  code = 0
  for name in given:
    short = name.split(':')[0].removeprefix('agentjax-')
    wrong = image(name, allowed(folders / short))
    for line in wrong:
      print(f'{name}: {line}')
    if not wrong:
      print(f'{name}: nothing found')
    code = max(code, int(bool(wrong)))
  return code


if __name__ == '__main__':
  sys.exit(main())
