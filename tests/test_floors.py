"""Imports point down only, read from the source of every file.

The floors are those of the design: what stands lower knows nothing of what
stands higher, siblings do not know each other, and flags live at the top.
"""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# The longest prefix decides. A number apart is one floor.
FLOORS = {
  'agentjax': 0,  # the package itself: empty
  'agentjax.types': 0,
  'agentjax.storage': 0,
  'agentjax.compiles': 0,
  'agentjax.records': 0,
  'agentjax.sandbox_record': 0,
  'agentjax.env.sandbox.runner': 0,  # goes into the sandbox: knows nobody
  'agentjax.env.sandbox.after': 0,  # a program of its own: knows nobody
  'agentjax.text': 1,
  'agentjax.model': 1,
  'agentjax.env': 1,
  'agentjax.rl': 1,
  'agentjax.optimizers': 1,
  'agentjax.references': 1,
  'agentjax.events': 1,
  'agentjax.rollout': 2,
  'agentjax.learner': 2,
  'agentjax.update': 2,
  'agentjax.score': 2,
  'agentjax.placing': 2,
  'agentjax.forward': 2,
  'agentjax.checkpoint': 2,
  'agentjax.recorder': 2,
  'agentjax.curriculum': 2,
  'agentjax.buffer': 2,
  'agentjax.refill': 2,
  'agentjax.dense': 2,
  'agentjax.datasets': 2,
  'agentjax.plots': 2,
  'agentjax.progress': 2,
  'agentjax.tally': 2,
  'agentjax.workdir': 2,
  'agentjax.train': 3,
  'agentjax.run': 3,
  'agentjax.anchor': 3,
  'agentjax.ledger': 3,
  'agentjax.guards': 3,
  'agentjax.credit': 3,
  'agentjax.gold': 3,
  'agentjax.training': 3,
  'agentjax.probe': 3,
  'agentjax.evaluate': 3,
  'agentjax.sft': 3,
  'agentjax.viewer': 3,
  'agentjax.audit': 3,
  'agentjax.exploits': 3,
  'agentjax.report': 3,
  'experiments': 4,
  'configs': 4,
  'colab': 4,
  'sandbox': 4,  # builds images; nothing imports it
}

# Floor 2 may import these parts of floor 1 and no others.
PARTS = {
  'agentjax.rollout': {'agentjax.text', 'agentjax.model', 'agentjax.env'},
  'agentjax.learner': {
    'agentjax.model',
    'agentjax.rl',
    'agentjax.optimizers',
  },
  'agentjax.update': {
    'agentjax.model',
    'agentjax.rl',
    'agentjax.optimizers',
  },
  'agentjax.score': {'agentjax.model', 'agentjax.rl'},
  'agentjax.placing': {'agentjax.model', 'agentjax.rl'},
  'agentjax.forward': {'agentjax.model', 'agentjax.rl'},
  'agentjax.checkpoint': {'agentjax.model'},
  'agentjax.recorder': {'agentjax.events'},
  'agentjax.refill': {'agentjax.rl'},
  'agentjax.dense': {'agentjax.model', 'agentjax.env'},
  'agentjax.datasets': {'agentjax.env'},
}

# The arrows between siblings: the run evaluates, starts cold, and ends with
# pages to read.
ARROWS = {
  'agentjax.types': {'agentjax.sandbox_record'},
  'agentjax.records': {'agentjax.types'},
  'agentjax.learner': {
    'agentjax.forward',
    'agentjax.placing',
    'agentjax.score',
    'agentjax.update',
  },
  'agentjax.update': {'agentjax.forward'},
  'agentjax.score': {'agentjax.forward'},
  'agentjax.placing': {'agentjax.update'},
  'agentjax.train': {'agentjax.run', 'agentjax.training'},
  'agentjax.anchor': {'agentjax.training'},
  'agentjax.audit': {'agentjax.exploits'},
  'agentjax.run': {
    'agentjax.anchor',
    'agentjax.audit',
    'agentjax.credit',
    'agentjax.evaluate',
    'agentjax.guards',
    'agentjax.ledger',
    'agentjax.sft',
    'agentjax.training',
  },
  'agentjax.ledger': {'agentjax.report', 'agentjax.viewer'},
  'agentjax.report': {'agentjax.viewer'},
  'agentjax.credit': {'agentjax.gold', 'agentjax.training'},
  'agentjax.guards': {
    'agentjax.credit',
    'agentjax.evaluate',
    'agentjax.training',
  },
  'agentjax.training': {'agentjax.probe', 'agentjax.sft'},
}

TOP_ONLY = ('absl.flags', 'absl.app', 'ml_collections')
NO_JAX = ('agentjax.env', 'agentjax.text', 'agentjax.types', 'agentjax.storage')
JAX = ('jax', 'jaxlib', 'flax', 'optax', 'orbax', 'grain', 'chex')
FORBIDDEN_NAME = re.compile(
  r'(^|_)(utils?|helpers?|common|misc|managers?|handlers?)($|_)'
)
# Exceptions to 450 lines, with their number.
LONG_FILES: dict[str, int] = {}

FILES = sorted(
  p
  for top in ('agentjax', 'experiments', 'configs', 'colab', 'sandbox')
  for p in (ROOT / top).rglob('*.py')
)


def module_name(path: pathlib.Path) -> str:
  parts = path.relative_to(ROOT).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def imports(source: str, module: str, package: bool = False) -> set[str]:
  """Dotted names of everything imported anywhere in the source.

  `from a import b` gives a and a.b, as b may be a module.
  """
  found = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ''
      if node.level:
        up = module.split('.')
        up = up[: len(up) - node.level + package]
        base = '.'.join([*up, base] if base else up)
      found.add(base)
      found |= {f'{base}.{alias.name}' for alias in node.names}
  return found


def under(name: str, prefix: str) -> bool:
  return name == prefix or name.startswith(f'{prefix}.')


def part(module: str) -> str | None:
  """The longest entry of FLOORS that a module stands under."""
  fitting = [p for p in FLOORS if p != 'agentjax' and under(module, p)]
  if module == 'agentjax':
    return 'agentjax'
  return max(fitting, key=len) if fitting else None


def violations(module: str, imported: set[str]) -> list[str]:
  """What is wrong with a module's imports."""
  mine = part(module)
  if mine is None:
    return [f'{module} stands on no floor: give it one in FLOORS']
  wrong = []
  for name in sorted(imported):
    if FLOORS[mine] < 4 and any(under(name, t) for t in TOP_ONLY):
      wrong.append(f'{module} imports {name}: flags and configs live on top')
    if any(under(module, p) for p in NO_JAX) and name.split('.')[0] in JAX:
      wrong.append(f'{module} imports {name}: this part knows no JAX')
    if not under(name.split('.')[0], 'agentjax') and part(name) is None:
      continue
    theirs = part(name)
    if theirs is None:
      if name != 'agentjax':
        wrong.append(f'{module} imports {name}, which stands on no floor')
      continue
    if theirs in ('agentjax', mine) or under(name, mine):
      continue
    # The code around the runner may read its constants, never the reverse.
    if mine == 'agentjax.env' and theirs == 'agentjax.env.sandbox.runner':
      continue
    if FLOORS[theirs] > FLOORS[mine]:
      wrong.append(f'{module} imports {name}, which stands higher')
    elif FLOORS[theirs] == FLOORS[mine] and FLOORS[mine] != 4:
      if theirs not in ARROWS.get(mine, set()):
        wrong.append(f'{module} imports its sibling {name}')
    elif FLOORS[mine] == 2 and FLOORS[theirs] == 1:
      if theirs not in PARTS.get(mine, set()):
        wrong.append(f'{module} imports {name}: not among its parts')
  return wrong


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
  module = module_name(path)
  found = imports(
    path.read_text('utf-8'), module, package=path.name == '__init__.py'
  )
  assert violations(module, found) == []


def test_tool_side_loads_no_jax_even_at_second_hand():
  modules = [
    module_name(p)
    for p in FILES
    if any(under(module_name(p), part) for part in NO_JAX)
  ]
  assert 'agentjax.env.base' in modules and 'agentjax.types' in modules
  code = (
    f'import importlib, sys\n'
    f'for m in {modules}:\n  importlib.import_module(m)\n'
    f'print(sorted(set({JAX}) & set(sys.modules)))'
  )
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert (done.stdout, done.stderr) == ('[]\n', '')


def test_the_runner_imports_the_standard_library_alone():
  folder = ROOT / 'agentjax/env/sandbox/runner'
  inside = [path for path in FILES if folder in path.parents]
  assert len(inside) > 5
  for path in inside:
    found = imports(
      path.read_text('utf-8'),
      module_name(path),
      package=path.name == '__init__.py',
    )
    ours = {n for n in found if under(n, 'agentjax.env.sandbox.runner')}
    names = {name.split('.')[0] for name in found - ours}
    assert names - set(sys.stdlib_module_names) == set()


@pytest.mark.parametrize(
  ('module', 'source', 'message'),
  [
    ('agentjax.types', 'import agentjax.text.chat', 'stands higher'),
    ('agentjax.text.chat', 'from agentjax.model import cache', 'its sibling'),
    ('agentjax.text.chat', 'from agentjax import env', 'its sibling'),
    ('agentjax.rl.kl', 'from ..model import cache', 'its sibling'),
    ('agentjax.env.tools', 'def f():\n  import jax', 'knows no JAX'),
    ('agentjax.env.sandbox.docker', 'import flax.nnx', 'knows no JAX'),
    ('agentjax.model.load', 'from agentjax import learner', 'stands higher'),
    ('agentjax.rollout.engine', 'import agentjax.rl.kl', 'not among its parts'),
    ('agentjax.learner', 'import agentjax.env.base', 'not among its parts'),
    ('agentjax.recorder', 'import agentjax.model', 'not among its parts'),
    ('agentjax.learner', 'from agentjax import rollout', 'its sibling'),
    ('agentjax.viewer', 'from agentjax.train import train', 'its sibling'),
    ('agentjax.train', 'from agentjax import audit', 'its sibling'),
    ('agentjax.train', 'import experiments.launch', 'stands higher'),
    ('agentjax.train', 'from absl import flags', 'live on top'),
    ('agentjax.model.load', 'import ml_collections', 'live on top'),
    ('agentjax.env.sandbox.runner', 'import agentjax.env', 'stands higher'),
    ('agentjax.novel', 'import os', 'stands on no floor'),
    ('agentjax.train', 'import agentjax.novel', 'stands on no floor'),
  ],
)
def test_a_wrong_import_is_seen(module, source, message):
  wrong = violations_of(module, source)
  assert wrong and all(message in w for w in wrong)


def violations_of(module, source):
  return violations(module, imports(source, module))


@pytest.mark.parametrize(
  ('module', 'source'),
  [
    ('agentjax.text.chat', 'from . import vocab\nfrom agentjax import types'),
    ('agentjax.env.tools', 'from agentjax.env.sandbox import runner, spec'),
    ('agentjax.train', 'from agentjax import learner, recorder, storage'),
    ('agentjax.learner', 'import jax, optax\nfrom absl import logging'),
    ('experiments.launch', 'from experiments import overrides\nimport absl'),
  ],
)
def test_a_right_import_is_let_through(module, source):
  assert violations_of(module, source) == []


def test_files_have_names_that_say_something():
  names = [p for p in FILES if FORBIDDEN_NAME.search(p.stem)]
  assert names == []
  assert FORBIDDEN_NAME.search('token_utils')
  assert not FORBIDDEN_NAME.search('commonality')


def test_files_are_short_enough_to_read():
  long = {
    str(p.relative_to(ROOT)): n
    for p in FILES
    if (n := len(p.read_text('utf-8').splitlines())) > 450
  }
  assert long == LONG_FILES
