"""Other systems: a virtual environment and a process for each.

Benchmarks. A peer's packages never meet ours: `Peer` makes its environment
under the cache folder, once, with the ordinary installer, starts the worker in
it, and asks it one JSON line at a time.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Spec:
  """How to get a peer: its worker's module, and what is installed for it.

  What requires nothing runs in the environment of the benchmark itself.
  """

  name: str
  worker: str
  requires: tuple[str, ...]


# PyTorch 2.13 has CPU wheels for Python 3.11; tunix needs 3.11 or newer.
PYTHON = (3, 11)
SPECS = {
  'tunix': Spec('tunix', 'benchmarks.worker_tunix', ('google-tunix==0.1.7',)),
  'hf': Spec(
    'hf',
    'benchmarks.worker_transformers',
    ('torch==2.13.0', 'transformers==5.24.0'),
  ),
}


class PeerError(RuntimeError):
  """A peer could not be installed, ended, or failed at a request."""


def parse_answer(line: str, name: str) -> dict[str, Any]:
  """What a worker's line says.

  Raises:
    PeerError: the worker is gone (an empty line), said something that is no
      JSON object, or reports an error.
  """
  if not line:
    raise PeerError(f'the worker of {name} ended: its log says why')
  try:
    answer = json.loads(line)
  except json.JSONDecodeError:
    answer = None
  if not isinstance(answer, dict):
    raise PeerError(f'the worker of {name} said {line[:200]!r}, no JSON object')
  if 'error' in answer:
    raise PeerError(f'{name} failed:\n{answer["error"]}')
  return answer


def find_python(version: tuple[int, int] = PYTHON) -> str:
  """An interpreter of that version which really runs.

  Raises:
    PeerError: there is none on PATH.
  """
  if sys.version_info[:2] == version:
    return sys.executable
  name = 'python{}.{}'.format(*version)
  found = shutil.which(name)
  check = f'import sys; sys.exit(sys.version_info[:2] != {version})'
  if found and not subprocess.run([found, '-c', check], check=False).returncode:
    return found
  raise PeerError(f'no {name} was found on PATH: peers need it')


def install(spec: Spec, cache: pathlib.Path) -> pathlib.Path:
  """The interpreter of the peer's environment, made if it is not there yet.

  Raises:
    PeerError: the installer failed; its output stands above.
  """
  if not spec.requires:
    return pathlib.Path(sys.executable)
  home = cache / 'venvs' / spec.name
  python = home / 'bin' / 'python'
  stamp = home / 'installed.txt'
  wanted = '\n'.join(spec.requires)
  if stamp.exists() and stamp.read_text() == wanted:
    return python
  print(f'installing {" ".join(spec.requires)} into {home}', flush=True)
  base = find_python()
  if base == sys.executable:
    venv.create(home, clear=True, with_pip=True)
  else:
    subprocess.run([base, '-m', 'venv', '--clear', home], check=True)
  code = subprocess.run(
    [python, '-m', 'pip', 'install', '--quiet', *spec.requires], check=False
  ).returncode
  if code:
    raise PeerError(f'pip could not install {spec.requires}')
  stamp.write_text(wanted)
  return python


class Peer:
  """A peer's running worker.

  Attributes:
    versions: of its packages, as it reports them.
  """

  def __init__(self, spec: Spec, cache: pathlib.Path):
    python = install(spec, cache)
    self.name = spec.name
    self.log = cache / f'{spec.name}.log'
    self._log = self.log.open('w')
    self._process = subprocess.Popen(
      [python, '-m', spec.worker],
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._log,
      text=True,
    )
    self.versions = self._answer()['versions']

  def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
    """Sends a request and waits for its answer, however long.

    Raises:
      PeerError: the worker ended or failed.
    """
    self._process.stdin.write(json.dumps({'do': do, **arguments}) + '\n')
    self._process.stdin.flush()
    return self._answer()

  def _answer(self) -> dict[str, Any]:
    try:
      return parse_answer(self._process.stdout.readline(), self.name)
    except PeerError as error:
      raise PeerError(f'{error}\n(log: {self.log})') from None

  def close(self) -> None:
    """Ends the worker."""
    self._process.stdin.close()
    try:
      self._process.wait(30)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    self._process.stdout.close()
    self._log.close()


def start(names: Sequence[str], cache: pathlib.Path) -> dict[str, Peer]:
  """Starts the named peers; all of them or none."""
  peers: dict[str, Peer] = {}
  try:
    for name in names:
      peers[name] = Peer(SPECS[name], cache)
  except BaseException:
    for peer in peers.values():
      peer.close()
    raise
  return peers
