"""A file system so small that a test can fill it."""

import contextlib
import os
import subprocess

from requirements import require


@contextlib.contextmanager
def small_disk(path, megabytes: int):
  """Mounts one on `path`; gives a function that leaves n bytes of it free.

  The test is skipped where nobody may mount.
  """
  path.mkdir()
  options = ['-t', 'tmpfs', '-o', f'size={megabytes}m', 'tmpfs', str(path)]
  try:
    done = subprocess.run(['mount', *options], capture_output=True, text=True)
    failed = done.stderr.strip() if done.returncode else ''
  except OSError as error:
    failed = str(error)
  require('a small file system', not failed, failed)

  def leave(n: int | None) -> None:
    (path / 'ballast').unlink(missing_ok=True)
    if n is not None:
      stat = os.statvfs(path)
      (path / 'ballast').write_bytes(bytes(stat.f_bavail * stat.f_bsize - n))

  try:
    yield leave
  finally:
    subprocess.run(['umount', '-l', str(path)], check=True)
