"""Builds the images of the sandboxes without a registry.

    python sandbox/build.py [NAME ...] [--rebuild] [--lock] [--strict]

For each folder of `sandbox/images`, or those that are named, the Debian
packages of its list are put together by mmdebstrap, looked through by
`lint.py`, and given to `docker import` as agentjax-NAME. Where an image exists
nothing is done (a fraction of a second); a build takes half a minute each and
a Debian mirror. Hosts that reach a registry may use the Dockerfile above the
lists instead. Needs: docker, mmdebstrap, and root.

What came in is compared with packages.lock, and what differs is said: a mirror
keeps the newest version alone. --strict refuses it; --lock writes the lock
anew; --mirror=http://snapshot.debian.org/archive/debian/20251201T000000Z/ has
what a mirror had that day.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import lint

IMAGES = pathlib.Path(__file__).parent / 'images'
SUITE = 'bookworm'
LABEL = 'agentjax.packages'
EPOCH = '1764547200'  # no file is younger, so that equal packages are equal
# The root is merged from the start, as Debian's own images are: else a package
# that merges it comes in, with all of Perl.
_MERGED = ('usr-is-merged', '/usr/share/mmdebstrap/hooks/merged-usr')
_LEFT_OUT = ('man', 'doc', 'locale', 'info', 'lintian')
_REMOVED = (
  'var/lib/apt/lists/*',
  'var/cache/*',
  'var/log/*',
  'etc/machine-id',
  'var/lib/dpkg/*-old',
)


def names() -> list[str]:
  """Names of the images that there are."""
  return sorted(p.parent.name for p in IMAGES.glob('*/packages'))


def packages(name: str) -> list[str]:
  """The Debian packages that an image is asked to have."""
  lines = (IMAGES / name / 'packages').read_text().splitlines()
  return [x.strip() for x in lines if x.strip() and not x.startswith('#')]


def tag_of(name: str, tag: str = 'latest') -> str:
  """What the engine calls an image."""
  return f'agentjax-{name}:{tag}'


def digest(versions: str) -> str:
  """Of name=version lines; what `LABEL` says of an image."""
  return 'sha256:' + hashlib.sha256(versions.encode()).hexdigest()


def differences(locked: str, built: str) -> list[str]:
  """What differs between two lists of name=version lines, in words."""
  old, new = (
    dict(line.split('=', 1) for line in text.split())
    for text in (locked, built)
  )
  return [
    f'{name}: {old.get(name, "absent")} in the lock, '
    f'{new.get(name, "absent")} in the build'
    for name in sorted(old | new)
    if old.get(name) != new.get(name)
  ]


def label(image: str) -> str | None:
  """The label of the image that the engine has; None if it has none."""
  form = f'{{{{index .Config.Labels "{LABEL}"}}}}'
  command = ['docker', 'image', 'inspect', '--format', form, image]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode == 0:
    return done.stdout.strip()
  if 'No such image' not in done.stderr:
    sys.exit(f'the Docker engine does not answer: {done.stderr.strip()}')
  return None


def make(name: str, folder: pathlib.Path, mirror: str | None) -> str:
  """Writes <folder>/<name>.tar; returns its name=version lines, sorted."""
  archive, found = folder / f'{name}.tar', folder / f'{name}.versions'
  cache = folder / 'debs'
  cache.mkdir(exist_ok=True)
  removed = ' '.join(f'"$1"/{path}' for path in _REMOVED)
  hooks = [
    # What one image has fetched the next one need not fetch.
    ('setup', f'mkdir -p "$1"/var/cache/apt/archives; cp -n "{cache}"/*.deb '
     '"$1"/var/cache/apt/archives/ 2>/dev/null || true'),
    ('customize', f'cp -n "$1"/var/cache/apt/archives/*.deb "{cache}"/ '
     '2>/dev/null || true'),
    ('customize', 'dpkg-query --admindir="$1"/var/lib/dpkg --show '
     f"--showformat '${{Package}}=${{Version}}\\n' | LC_ALL=C sort >'{found}'"),
    ('customize', f'rm -rf {removed}'),
    ('customize', 'find "$1" -xdev -perm /6000 -exec chmod a-s {} +'),
  ]  # fmt: skip
  _run(
    [
      'mmdebstrap',
      '--quiet',
      '--variant=essential',
      '--skip=download/empty',
      '--skip=essential/unlink',
      f'--include={",".join([_MERGED[0], *packages(name)])}',
      f'--hook-dir={_MERGED[1]}',
      '--components=main',
      '--aptopt=Acquire::Languages "none"',
      *(f'--dpkgopt=path-exclude=/usr/share/{n}/*' for n in _LEFT_OUT),
      *(f'--{stage}-hook={command}' for stage, command in hooks),
      SUITE,
      str(archive),
      *([mirror] if mirror else []),
    ],
    SOURCE_DATE_EPOCH=EPOCH,
  )
  return found.read_text()


def build(
  name: str,
  folder: pathlib.Path,
  *,
  tag: str = 'latest',
  mirror: str | None = None,
  lock: bool = False,
  strict: bool = False,
) -> None:
  """Makes an image, or ends the program and says what is wrong."""
  versions = make(name, folder, mirror)
  locked = IMAGES / name / 'packages.lock'
  if lock:
    locked.write_text(versions)
  differ = differences(locked.read_text() if locked.exists() else '', versions)
  for line in differ:
    print(f'{tag_of(name, tag)}: {line}')
  if differ and strict:
    sys.exit('not the locked packages: see --mirror, or take them by --lock')
  archive = folder / f'{name}.tar'
  with archive.open('rb') as stream:
    wrong = lint.archive(stream, lint.allowed(IMAGES / name))
  if wrong:
    sys.exit('\n'.join([*wrong, f'{tag_of(name, tag)} is not imported']))
  _run(
    [
      'docker',
      'import',
      '--change=ENV PATH=/usr/local/bin:/usr/bin:/bin',
      '--change=CMD ["python3"]',
      f'--change=LABEL {LABEL}={digest(versions)}',
      str(archive),
      tag_of(name, tag),
    ]
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('names', nargs='*', help=f'of {", ".join(names())}')
  parser.add_argument('--rebuild', action='store_true')
  parser.add_argument('--lock', action='store_true', help='write the locks')
  parser.add_argument('--strict', action='store_true', help='as locked, or not')
  parser.add_argument('--mirror', help='of Debian; default: deb.debian.org')
  parser.add_argument('--tag', default='latest')
  args = parser.parse_args()
  if unknown := sorted(set(args.names) - set(names())):
    parser.error(f'{unknown}: there are {names()}')
  missing = []
  for name in args.names or names():
    image = tag_of(name, args.tag)
    there = label(image)
    # One without the label is of an older script, or of none.
    if args.rebuild or args.lock or not (there or '').startswith('sha256:'):
      missing.append(name)
      continue
    print(f'{image} is there')
    locked = IMAGES / name / 'packages.lock'
    if locked.exists() and there != digest(locked.read_text()):
      print('  its packages are not those of packages.lock: see --rebuild')
  if missing:
    _build_all(missing, args)


def _build_all(missing: list[str], args: argparse.Namespace) -> None:
  for program in ('docker', 'mmdebstrap'):
    if shutil.which(program) is None:
      sys.exit(f'{program} is not installed: apt-get install {program}')
  options = {
    key: getattr(args, key) for key in ('tag', 'mirror', 'lock', 'strict')
  }
  with tempfile.TemporaryDirectory() as folder:
    for name in missing:
      began = time.monotonic()
      build(name, pathlib.Path(folder), **options)
      seconds = time.monotonic() - began
      print(f'{tag_of(name, args.tag)} built in {seconds:.0f} s', flush=True)


def _run(command: list[str], **environment: str) -> None:
  """Runs a program; what it said is shown where it fails."""
  done = subprocess.run(
    command,
    env={**os.environ, **environment},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    errors='replace',
  )
  if done.returncode:
    said = '\n'.join(done.stdout.splitlines()[-30:])
    sys.exit(f'{said}\n{command[0]} failed with exit code {done.returncode}')


if __name__ == '__main__':
  main()
