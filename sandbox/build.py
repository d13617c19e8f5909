"""Builds the image of the Python tool without a registry.

    python sandbox/build.py [--rebuild]

Debian packages are put together by mmdebstrap and given to `docker import`.
Where the image exists nothing is done (a fraction of a second); a build takes
half a minute and a Debian mirror. Hosts that reach a registry may use
`sandbox/images/Dockerfile` instead. Needs: docker, mmdebstrap, and root.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile

IMAGE = 'agentjax-python:latest'
SUITE = 'bookworm'
PACKAGES = ('python3',)
_LEFT_OUT = ('man', 'doc', 'locale', 'info')


def exists(image: str) -> bool:
  """True if the engine has `image`."""
  command = ['docker', 'image', 'inspect', image]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode and 'No such image' not in done.stderr:
    sys.exit(f'the Docker engine does not answer: {done.stderr.strip()}')
  return done.returncode == 0


def build(image: str) -> None:
  """Makes `image`, or ends the program and says which step failed."""
  for program in ('docker', 'mmdebstrap'):
    if shutil.which(program) is None:
      sys.exit(f'{program} is not installed: apt-get install {program}')
  with tempfile.TemporaryDirectory() as folder:
    archive = pathlib.Path(folder) / 'root.tar'
    _run(
      [
        'mmdebstrap',
        '--quiet',
        '--variant=essential',
        f'--include={",".join(PACKAGES)}',
        '--components=main',
        '--aptopt=Acquire::Languages "none"',
        *(f'--dpkgopt=path-exclude=/usr/share/{n}/*' for n in _LEFT_OUT),
        SUITE,
        str(archive),
      ]
    )
    _run(
      [
        'docker',
        'import',
        '--change=ENV PATH=/usr/local/bin:/usr/bin:/bin',
        '--change=CMD ["python3"]',
        str(archive),
        image,
      ]
    )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rebuild', action='store_true')
  arguments = parser.parse_args()
  if exists(IMAGE) and not arguments.rebuild:
    print(f'{IMAGE} is there')
    return
  build(IMAGE)
  print(f'{IMAGE} built')


def _run(command: list[str]) -> None:
  done = subprocess.run(command)
  if done.returncode:
    sys.exit(f'{command[0]} failed with exit code {done.returncode}')


if __name__ == '__main__':
  main()
