"""What is promised outside of the code: wheel, commands, README, CI."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from requirements import require

from agentjax import types
from agentjax.env.base import InfraError
from agentjax.env.sandbox import SandboxSpec, choose_backend

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOT_INSTALLED = ('experiments', 'configs', 'sandbox', 'tests', 'colab')


def run(command, **options):
  return subprocess.run(
    command, capture_output=True, text=True, timeout=280, **options
  )


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """The wheel of this tree, built where no older build folder is."""
  folder = tmp_path_factory.mktemp('wheel')
  tree = folder / 'tree'
  shutil.copytree(
    ROOT / 'agentjax',
    tree / 'agentjax',
    ignore=shutil.ignore_patterns('__pycache__'),
  )
  for name in ('setup.py', 'README.md', 'LICENSE', 'pyproject.toml'):
    shutil.copy(ROOT / name, tree)
  for name in NOT_INSTALLED:
    (tree / name).mkdir()
    (tree / name / '__init__.py').touch()
  command = [sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps']
  command += ['--no-build-isolation', '-w', str(folder), str(tree)]
  done = run(command)
  assert done.returncode == 0, done.stderr
  (path,) = folder.glob('*.whl')
  return path


def test_the_wheel_holds_the_package_and_its_data_alone(wheel):
  names = zipfile.ZipFile(wheel).namelist()
  tops = {name.split('/')[0] for name in names}
  assert {t for t in tops if not t.endswith('.dist-info')} == {'agentjax'}
  here = {
    str(p.relative_to(ROOT))
    for p in (ROOT / 'agentjax').rglob('*')
    if p.is_file() and '__pycache__' not in p.parts
  }
  assert {n for n in names if n.startswith('agentjax/')} == here
  assert 'agentjax/env/sandbox/runner/serve.py' in here
  assert any(n.startswith('agentjax/text/data/') for n in here)
  assert any(n.endswith('/licenses/LICENSE') for n in names)


def test_the_wheel_works_outside_the_clone(wheel, tmp_path):
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(tmp_path / 'site')
  code = """
import importlib.resources, json, pathlib
from agentjax import recorder, types, viewer
from agentjax.env.sandbox import session
data = importlib.resources.files('agentjax.text') / 'data'
task = types.Task('t', (types.Message('user', 'q'),))
t = types.Trajectory(task, (types.Segment(types.Source.PROMPT, [1]),))
recorder.Recorder('run').trajectories(0, [types.Group(task, 0, (t,))])
print(json.dumps({
  'file': viewer.__file__,
  'data': sum(p.is_file() for p in data.iterdir()),
  'runner': 'def ' in session.runner_program(),
  'viewer': viewer.main(['--workdir', 'run']),
}))
"""
  site = str(tmp_path / 'site')
  done = run(
    [sys.executable, '-c', code],
    cwd=tmp_path,
    env={**os.environ, 'PYTHONPATH': site},
  )
  assert done.returncode == 0, done.stderr
  said = done.stdout.splitlines()[-1]
  assert f'"file": "{site}/agentjax/viewer.py"' in said
  assert '"data": 0' not in said and '"runner": true' in said
  assert '"viewer": 0' in said
  assert (tmp_path / 'run/pages/step_00000000/index.html').exists()


# A run without a config file, as somebody who installed the package writes it.
TRAINS = """
import agentjax, functools, json
from agentjax.env import arithmetic
from agentjax.learner import Learner
from agentjax.optimizers import adamw
from agentjax.model.config import ModelConfig
from agentjax.rollout.engine import Engine
from agentjax.rollout.episode import Limits
from agentjax.text import formats
from agentjax.text.chat import Chat
from agentjax.text.train_vocab import arithmetic_model
from agentjax.text.vocab import load_sentencepiece
from agentjax.train import train
from agentjax.training import Evaluating, Policy, Training

vocab = load_sentencepiece(arithmetic_model())
model = ModelConfig(vocab.size, 16, ((('global',), 1),), 1, 1, 16, 16, 64)
summary = train('run', Training(
  policy=Policy(model),
  chat=Chat(vocab, formats.arithmetic),
  make_environment=arithmetic.environment,
  tasks=arithmetic.tasks('train', 4),
  evaluation=Evaluating(arithmetic.tasks('test', 2)),
  engine=functools.partial(Engine, slots=4, context=64, chunk=8, buckets=(16,)),
  learner=functools.partial(Learner, rows=2, length=64),
  limits=Limits(2, 8, 16, 64, 16),
  optimizer=adamw(1e-3),
  steps=1, groups=2, group_size=2,
))
print(json.dumps([agentjax.__path__[0], summary['steps']]))
"""

CALLS = """
from agentjax.env.sandbox import Call, SandboxSpec, open_sandbox
with open_sandbox(SandboxSpec(), 'docker') as sandbox:
  print(sandbox.call(Call(code='print(6 * 7)')).stdout)
"""


@pytest.fixture
def outside(wheel, tmp_path):
  """Runs a program in another directory, with the wheel and no clone."""
  site = tmp_path / 'site'
  install = [sys.executable, '-m', 'pip', 'install', '-q', '--no-deps']
  done = run([*install, '--target', str(site), str(wheel)])
  assert done.returncode == 0, done.stderr

  def call(program):
    done = run(
      [sys.executable, '-P', '-c', program],
      cwd=tmp_path,
      env={**os.environ, 'PYTHONPATH': str(site)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()

  return call


def test_the_wheel_trains_outside_the_clone(outside, tmp_path):
  path, steps = json.loads(outside(TRAINS)[-1])
  assert path == f'{tmp_path}/site/agentjax' and steps == 1
  left = {p.name for p in (tmp_path / 'run').iterdir()}
  assert {'checkpoints', 'learning_curve.png', 'summary.json'} <= left


def test_the_wheel_calls_docker_outside_the_clone(outside):
  try:
    choose_backend(SandboxSpec(), 'docker')
    reason = ''
  except InfraError as error:
    reason = str(error)
  require('docker', not reason, reason)
  assert outside(CALLS)[0] == '42'


def metadata(wheel):
  archive = zipfile.ZipFile(wheel)
  (name,) = [n for n in archive.namelist() if n.endswith('METADATA')]
  return archive.read(name).decode('utf-8')


def test_the_wheel_says_what_it_needs(wheel):
  said = metadata(wheel)
  assert 'Requires-Python: >=3.11' in said
  assert 'Requires-Dist: jax<0.13,>=0.10\n' in said
  extras = set(re.findall(r'Provides-Extra: (.*)', said))
  assert extras == {
    'cuda12', 'data', 'fleet', 'tensorboard', 'test', 'tpu', 'web',
  }  # fmt: skip


def code_blocks():
  text = (ROOT / 'README.md').read_text('utf-8')
  return re.findall(r'```python\n(.*?)```', text, re.DOTALL)


def test_the_environment_of_the_readme_can_be_played(capsys):
  environment, play = code_blocks()[1:3]
  assert len(environment.splitlines()) <= 30
  space = {'__name__': 'readme'}
  exec(environment, space)
  exec(play, space)
  said = capsys.readouterr().out.splitlines()
  assert said[0] == 'Guess from 1 to 9.'
  assert "body='It is higher.'" in said[1] and 'status=None' in said[1]
  assert 'Status.DONE' in said[2]
  assert said[3] == 'Reward(value=1.0, success=True, parts={})'


def test_the_environment_of_the_readme_takes_any_turn():
  space = {'__name__': 'readme'}
  exec(code_blocks()[1], space)
  game = space['GuessNumber']()
  game.reset(types.Task('n', (types.Message('user', 'q'),), {'secret': 7}))
  for answer in (None, '', '\ud800', '9' * 10_000, '-7.5e', '٣'):
    step = game.step(
      types.Turn(answer or '', types.Verdict.MALFORMED, answer=answer)
    )
    assert step.status is None and len(step.observations) == 1
  assert game.verify(types.Status.TURN_LIMIT) == types.Reward(0.0)
  game.close()


def test_paths_that_the_readme_names_are_there():
  text = (ROOT / 'README.md').read_text('utf-8')
  named = set(
    re.findall(r'\b(?:agentjax|configs|tests|docs)/[\w/.]+\.\w+', text)
  )
  assert 'tests/test_floors.py' in named
  missing = [name for name in sorted(named) if not (ROOT / name).exists()]
  assert missing == []


def clean_environment(**changes):
  """Without what `make test` itself hands to the makes started here."""
  outer = ('MAKEFLAGS', 'MFLAGS', 'MAKELEVEL', 'MAKEOVERRIDES', 'PYTHON')
  kept = {k: v for k, v in os.environ.items() if k not in outer}
  return {**kept, **changes}


def test_the_makefile_refuses_an_old_python(tmp_path):
  old = tmp_path / 'python3'
  old.write_text(
    f'#!/bin/sh\nexec {sys.executable} -c "$(echo "$2" | sed '
    "'s/sys.version_info/(3, 10)/')\"\n"
  )
  old.chmod(0o755)
  make = ['make', '-C', str(ROOT), f'VENV={tmp_path}/venv', 'lint']
  done = run([*make, f'PYTHON={old}'], env=clean_environment())
  assert done.returncode == 2
  assert f'{old} is Python 3.10, agentjax needs 3.11 or newer' in done.stderr
  done = run([*make, 'PYTHON='], env=clean_environment())
  assert done.returncode == 2
  assert 'no Python 3.11 or newer was found' in done.stdout
  assert not (tmp_path / 'venv').exists()


def test_the_makefile_passes_over_an_old_python(tmp_path):
  # python3 is old here and python3.12 a launcher with nothing behind it.
  for name, body in (
    ('python3', 'exit 1'),
    ('python3.12', 'echo "not installed" >&2; exit 127'),
    ('python3.11', f'exec {sys.executable} "$@"'),
  ):
    (tmp_path / name).write_text(f'#!/bin/sh\n{body}\n')
    (tmp_path / name).chmod(0o755)
  done = run(
    ['make', '-n', '-C', str(ROOT), f'VENV={tmp_path}/venv', 'quickstart'],
    env=clean_environment(PATH=f'{tmp_path}:{os.environ["PATH"]}'),
  )
  assert f'python3.11 -m venv --clear {tmp_path}/venv' in done.stdout
  assert '--config=configs/quickstart.py' in done.stdout


def test_the_ci_script_is_a_script():
  assert run(['bash', '-n', str(ROOT / '.ci/run')]).returncode == 0
  assert os.access(ROOT / '.ci/run', os.X_OK)
