"""A Docker engine of the tests' own, to be killed, stopped and filled."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

import pytest
from requirements import require
from sandboxes import SPEC


class OwnEngine:
  """A dockerd with its own socket, folders and containerd.

  It makes no network and touches no firewall, so that the machine's engine
  beside it does not notice.
  """

  def __init__(self, data: pathlib.Path | None = None):
    # Short: a socket's path has 107 bytes.
    self.folder = pathlib.Path(tempfile.mkdtemp(prefix='aj-', dir='/tmp'))
    self._memory: pathlib.Path | None = None
    if data is None and shutil.disk_usage('/dev/shm').free > 2 << 30:
      # In memory an image of thousands of files comes and goes faster.
      self._memory = pathlib.Path(
        tempfile.mkdtemp(prefix='aj-', dir='/dev/shm')
      )
    self.data = data or self._memory or self.folder / 'data'
    self.host = f'unix://{self.folder}/docker.sock'
    self.process: subprocess.Popen | None = None

  def start(self, seconds: float = 90) -> None:
    """Starts it, however it ended before, and waits for its answer."""
    end = time.monotonic() + seconds
    while True:
      (self.folder / 'pid').unlink(missing_ok=True)
      with (self.folder / 'log').open('ab') as log:
        self.process = subprocess.Popen(
          ['dockerd', '--host', self.host, '--data-root', str(self.data),
           '--exec-root', f'{self.folder}/exec', '--pidfile',
           f'{self.folder}/pid', '--iptables=false', '--bridge=none'],
          stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
      while self.process.poll() is None and time.monotonic() < end:
        if self.answers():
          return
        time.sleep(0.1)
      assert time.monotonic() < end, (self.folder / 'log').read_text()[-4000:]

  def answers(self, seconds: float = 2) -> bool:
    try:
      return self.docker('version', timeout=seconds).returncode == 0
    except subprocess.TimeoutExpired:
      return False

  def docker(self, *words: str, timeout: float = 60):
    return subprocess.run(
      ['docker', '-H', self.host, *words],
      capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip

  def load(self, image: str) -> None:
    with subprocess.Popen(
      ['docker', 'save', image], stdout=subprocess.PIPE
    ) as save:
      subprocess.run(
        ['docker', '-H', self.host, 'load'], stdin=save.stdout,
        check=True, capture_output=True,
      )  # fmt: skip

  def signal(self, number: int) -> None:
    self.process.send_signal(number)

  def kill(self, alone: bool = True) -> None:
    """kill -9; its containers live on, and so does containerd if `alone`.

    An engine that finds what its containerd has left needs 15 s more to start
    again.
    """
    self.process.kill()
    self.process.wait()
    if not alone:
      for pid in self._left('containerd\0'):
        os.kill(pid, signal.SIGKILL)
      for path in (self.folder / 'exec/containerd').glob('*.[sp][oi]*'):
        path.unlink()  # sockets and the pid file

  def end(self) -> None:
    """Ends it and all that it started, and removes its folder."""
    if self.process is not None and self.process.poll() is None:
      self.signal(signal.SIGCONT)
      with contextlib.suppress(subprocess.TimeoutExpired):
        names = self.docker('ps', '-aq').stdout.split()
        if names:
          self.docker('rm', '-f', *names)
      self.kill()
    for pid in self._left():
      try:
        os.kill(pid, signal.SIGKILL)
      except ProcessLookupError:
        pass
    time.sleep(0.2)
    for mount in self._mounts():
      subprocess.run(['umount', '-l', mount], capture_output=True)
    for folder in filter(None, (self.folder, self._memory)):
      shutil.rmtree(folder, ignore_errors=True)

  def _left(self, name: str = '') -> list[int]:
    """Processes that name its folder: containerd, shims."""
    out = []
    for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
      try:
        words = path.read_bytes()
      except OSError:
        continue
      if f'{self.folder}/'.encode() in words and name.encode() in words:
        out.append(int(path.parent.name))
    return out

  def _mounts(self) -> list[str]:
    lines = pathlib.Path('/proc/self/mounts').read_text().splitlines()
    found = [line.split()[1] for line in lines]
    roots = [f'{self.folder}/', f'{self.data}/']
    if self._memory:  # which the engine mounts over itself
      roots.append(str(self._memory))
    return sorted(
      (m for m in found if m.startswith(tuple(roots))), reverse=True
    )


def needed() -> None:
  """Skips where no engine of one's own can be started."""
  root = os.geteuid() == 0 and shutil.which('dockerd') is not None
  require('an engine of our own', root, 'it needs dockerd, and root')


@pytest.fixture(scope='session')
def own_engine():
  """One with the sandbox image; a test leaves it running."""
  needed()
  engine = OwnEngine()
  try:
    engine.start()
    engine.load(SPEC.image)
    yield engine
  finally:
    engine.end()
