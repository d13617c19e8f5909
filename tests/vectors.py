"""Do our rewards and rules do what the released code of a paper does?

  python tests/vectors.py --dir tests/vectors

runs every vector of every JSON file of a folder through our functions, in the
form that follows the released code, and prints a line for each that fails and
`N passed, M failed` at the end. Exits with 1 if any failed, if a file, a
section or a vector cannot be read or has no map, and if there is no vector.

A file is an object of sections, each a list of vectors: the arguments of a
public function and what it returned. The maps from there to our functions are
in tests/vector_maps/, one module a system; a file belongs to the system with
which its name begins.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import pkgutil
import sys
from collections.abc import Callable, Mapping

TESTS = pathlib.Path(__file__).resolve().parent

if __name__ == '__main__':
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
for path in (TESTS, TESTS.parent):
  if str(path) not in sys.path:
    sys.path.insert(0, str(path))

import vector_maps  # noqa: E402

# One vector -> what is wrong, or ''.
Map = Callable[[Mapping], str]
# Files whose names begin so are left out, and why.
LEFT_OUT = {
  'chat': 'tests/chat_parity.py reads it',
  'smollm2': 'the parity of the model reads it',
  'swe_rl': 'this system is not in the package',
  'tau_bench': 'this system is not in the package',
  'webrl': 'this system is not in the package',
}


def maps() -> dict[str, dict[str, Map]]:
  """The sections of every system of tests/vector_maps/."""
  return {
    info.name: importlib.import_module(f'vector_maps.{info.name}').SECTIONS
    for info in pkgutil.iter_modules(vector_maps.__path__)
  }


def sections_for(
  name: str, known: Mapping[str, dict[str, Map]]
) -> dict[str, Map] | None:
  """The sections of the system with which a file's name begins, or None."""
  fitting = [system for system in known if name.startswith(system)]
  return known[max(fitting, key=len)] if fitting else None


def run(folder: pathlib.Path) -> tuple[int, list[str], list[str]]:
  """(how many passed, a line for each failure, what was not read and why)."""
  known = maps()
  passed, failed, left = 0, [], []
  for path in sorted(folder.glob('*.json')):
    sections = sections_for(path.stem, known)
    why = [w for name, w in LEFT_OUT.items() if path.stem.startswith(name)]
    if sections is None and why:
      left.append(f'left out {path.name}: {why[0]}')
      continue
    if sections is None:
      failed.append(f'failed {path.name}: no system of {sorted(known)}')
      continue
    ok, lines = run_file(path, sections)
    passed += ok
    failed += lines
  if not passed and not failed:
    failed.append(f'failed: {folder} has no vector, nothing was checked')
  return passed, failed, left


def run_file(
  path: pathlib.Path, sections: Mapping[str, Map]
) -> tuple[int, list[str]]:
  """(how many vectors of a file passed, a line for each that did not)."""
  try:
    content = json.loads(path.read_text('utf-8'))
    items = content.items()
  except (OSError, ValueError, AttributeError) as error:
    return 0, [f'failed {path.name}: {type(error).__name__}: {error}']
  passed, failed = 0, []
  for name, cases in items:
    if name not in sections or not isinstance(cases, list):
      failed.append(f'failed {path.name} {name}: no map for this section')
      continue
    for number, case in enumerate(cases):
      if wrong := check(sections[name], case):
        failed.append(f'failed {path.name} {name}[{number}]: {wrong}')
      else:
        passed += 1
  return passed, failed


def check(function: Map, case: Mapping) -> str:
  """What is wrong with one vector, or ''."""
  try:
    return function(case)
  except Exception as error:
    return f'{type(error).__name__}: {error}'


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--dir', type=pathlib.Path, required=True)
  passed, failed, left = run(parser.parse_args().dir)
  print(*left, *failed, f'{passed} passed, {len(failed)} failed', sep='\n')
  return int(bool(failed))


if __name__ == '__main__':
  sys.exit(main())
