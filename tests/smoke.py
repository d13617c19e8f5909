"""Does it run here at all? `python tests/smoke.py`, in under a minute.

Needs no pytest: imports every module, and trains a policy for one step of
cold start and one of reinforcement in a temporary directory.
"""

import importlib
import pathlib
import pkgutil
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]


def main() -> int:
  began = time.monotonic()
  import agentjax

  names = [
    m.name for m in pkgutil.walk_packages(agentjax.__path__, 'agentjax.')
  ]
  for name in names:
    importlib.import_module(name)
  print(f'Python {sys.version.split()[0]} imports {len(names)} modules')

  import tiny_run

  from experiments import main as command

  with tempfile.TemporaryDirectory() as workdir:
    changes = ('cold_start.steps=1', 'steps=1', 'evaluation.tasks.n=2')
    code = command.main(tiny_run.command(workdir, *changes)[2:])
    left = {p.name for p in pathlib.Path(workdir).iterdir()}
  wanted = {'summary.json', 'checkpoints', 'trajectories', 'learning_curve.png'}
  if code or not wanted <= left:
    print(f'exit code {code}, left: {sorted(left)}', file=sys.stderr)
    return 1
  print(f'trained two steps; all in {time.monotonic() - began:.0f} s')
  return 0


if __name__ == '__main__':
  sys.exit(main())
