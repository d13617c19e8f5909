"""Do our functions compute what papers and public systems compute?

  python tests/parity.py --index tests/golden/index.json

runs every case of an index of golden vectors through our functions and prints
`N passed, M failed, L listed`, with a line for each case that failed and for
each that is listed: deliberately different, its switched form checked. Exits
with 1 if any failed, cannot be read or has a function that no map knows, and
if there is no case.

An index names, for each case, the public function it was recorded from, its
arguments, and an npz file beside it with arrays in_* and out_*. The maps from
there to our functions are in tests/parity_maps/.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import pkgutil
import sys
import zipfile
from collections.abc import Callable, Mapping

TESTS = pathlib.Path(__file__).resolve().parent

if __name__ == '__main__':
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
for path in (TESTS, TESTS.parent):
  if str(path) not in sys.path:
    sys.path.insert(0, str(path))

import numpy as np  # noqa: E402
import parity_maps  # noqa: E402
from parity_maps import CannotMap, Case, Result  # noqa: E402

# Float32 on both sides, in another order of the same sums.
RTOL, ATOL = 5e-5, 2e-6
GRADIENT_RTOL = 2e-4  # and of ratios of e^20
EXTREME = 1e3

Map = Callable[[Case], Result]


def maps() -> dict[str, Map]:
  """Every map of every module of tests/parity_maps/."""
  found: dict[str, Map] = {}
  for info in pkgutil.iter_modules(parity_maps.__path__):
    module = importlib.import_module(f'parity_maps.{info.name}')
    functions = getattr(module, 'FUNCTIONS', {})
    if twice := sorted(set(found) & set(functions)):
      raise ValueError(f'mapped twice, again in {info.name}: {twice}')
    found |= functions
  return found


def find(known: Mapping[str, Map], case: Case) -> Map | None:
  """The map for a case: one for its project before one for all."""
  for key, function in known.items():
    name, _, project = key.rpartition('@')
    if name == case.function and project.lower() in case.source.lower():
      return function
  return known.get(case.function)


def cases(index: pathlib.Path) -> list[Case]:
  """The cases of an index, in its order."""
  return [read(index.parent, entry) for entry in entries(index)]


def entries(index: pathlib.Path) -> list[dict]:
  """What an index says of its cases."""
  return json.loads(index.read_text('utf-8'))['cases']


def read(folder: pathlib.Path, entry: dict) -> Case:
  """A case, with the arrays of its file.

  Raises:
    OSError, KeyError, ValueError: there is no such file, or it is none.
  """
  arrays: dict[str, dict] = {'in': {}, 'out': {}}
  with np.load(folder / entry['file'], allow_pickle=False) as data:
    for key in data.files:
      side, _, name = key.partition('_')
      arrays[side][name] = data[key]
  return Case(
    entry['name'], entry['source'], entry['function'], entry['args'],
    arrays['in'], arrays['out'], entry.get('expect', 'allclose'),
    entry.get('notes', ''),
  )  # fmt: skip


def check(known: Mapping[str, Map], case: Case) -> tuple[str, str]:
  """(passed, listed or failed; a word on it) for one case.

  A case that expects `raises:` or `disagree:` records a fault of a peer: ours
  must give something finite and (for the latter) something else, and is
  listed; so is a case that a row of B2 decides against, whose switched form is
  the one compared. `same partition` compares labels up to their names.
  Everything else is compared entry by entry.
  """
  function = find(known, case)
  if function is None:
    return 'failed', f'unknown function {case.function!r} of {case.source}'
  try:
    result = function(case)
  except CannotMap as error:
    return 'failed', str(error)
  except Exception as error:
    return 'failed', f'{type(error).__name__}: {error}'
  recorded_fault = case.expect.startswith(('raises', 'disagree'))
  if recorded_fault and (wrong := _not_finite(result.outputs)):
    return 'failed', wrong
  if case.expect.startswith('raises'):
    return 'listed', f'peer {case.expect}'
  if not set(case.expected) - set(result.ignored):
    return 'failed', 'no output is compared'
  if lacking := _lacking(case, result, result.outputs):
    return 'failed', lacking
  wrong = _compare(case, result, result.outputs)
  if result.switched is None and not case.expect.startswith('disagree'):
    return ('failed', wrong) if wrong else ('passed', '')
  if not wrong:
    return 'failed', 'ours is the same, where it is to be another'
  if result.switched is not None:
    if wrong := _compare(case, result, result.switched):
      return 'failed', f'switched: {wrong}'
  if result.row is None and not recorded_fault:
    return 'failed', 'is switched without a row of B2 that says why'
  return 'listed', f'row {result.row}' if result.row else case.expect


def _not_finite(outputs: Mapping) -> str:
  if not outputs:
    return 'ours gave nothing'
  bad = [k for k, x in outputs.items() if not np.isfinite(np.asarray(x)).all()]
  return f'not finite: {bad}' if bad else ''


def _lacking(case: Case, result: Result, outputs: Mapping) -> str:
  """Which outputs are not there or have another shape, or ''."""
  wanted = set(case.expected) - set(result.ignored)
  if missing := sorted(wanted - set(outputs)):
    return f'no output {missing}'
  for name in sorted(wanted):
    want, got = np.shape(case.expected[name]), np.shape(outputs[name])
    if want != got:
      return f'{name}: shape {got}, wanted {want}'
  return ''


def _compare(case: Case, result: Result, outputs: Mapping) -> str:
  """What is wrong, or ''."""
  if lacking := _lacking(case, result, outputs):
    return lacking
  wanted = set(case.expected) - set(result.ignored)
  for name in sorted(wanted):
    if wrong := _compare_one(case, result, name, outputs[name]):
      return f'{name}: {wrong}'
  return ''


def _compare_one(case: Case, result: Result, name: str, ours) -> str:
  want, got = case.expected[name], np.asarray(ours)
  if case.expect == 'same partition':
    return '' if _same_partition(got, want) else 'another partition'
  where = np.broadcast_to(np.asarray(result.where.get(name, True)), want.shape)
  want, got = want[where], got[where]
  if want.dtype.kind in 'bUiS':
    different = int((got != want).sum())
    return f'{different} of {want.size} differ' if different else ''
  want, got = want.astype(np.float64), got.astype(np.float64)
  rtol = GRADIENT_RTOL if name.startswith('grad') else RTOL
  rtol = np.where(np.abs(want) > EXTREME, GRADIENT_RTOL, rtol)
  rtol = np.maximum(rtol, result.rtol.get(name, 0.0))
  close = np.abs(got - want) <= ATOL + rtol * np.abs(want)
  close |= (got == want) | (np.isnan(got) & np.isnan(want))
  if close.all():
    return ''
  i = np.argmax(np.where(close, -1.0, np.abs(got - want)))
  return (
    f'{int((~close).sum())} of {close.size} differ, most '
    f'{got.reshape(-1)[i]:.8g}, wanted {want.reshape(-1)[i]:.8g}'
  )


def _same_partition(a: np.ndarray, b: np.ndarray) -> bool:
  pairs = set(zip(a.reshape(-1).tolist(), b.reshape(-1).tolist(), strict=True))
  return len(pairs) == len({x for x, _ in pairs}) == len({y for _, y in pairs})


def run(index: pathlib.Path) -> tuple[dict[str, int], list[str]]:
  """How many cases did what, and a line for each that did not just pass."""
  known = maps()
  counts = {'passed': 0, 'failed': 0, 'listed': 0}
  lines = []
  for entry in entries(index):
    name = entry.get('name', '(no name)')
    try:
      case = read(index.parent, entry)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
      outcome, word = 'failed', f'unreadable: {type(error).__name__}: {error}'
    else:
      outcome, word = check(known, case)
    counts[outcome] += 1
    if word:
      lines.append(f'{outcome} {name}: {word}')
  return counts, lines


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--index', type=pathlib.Path, required=True)
  counts, lines = run(parser.parse_args().index)
  if not sum(counts.values()):
    lines.append('the index has no case: nothing was checked')
  print(*lines, sep='\n')
  print(', '.join(f'{n} {outcome}' for outcome, n in counts.items()))
  return int(counts['failed'] > 0 or not sum(counts.values()))


if __name__ == '__main__':
  sys.exit(main())
