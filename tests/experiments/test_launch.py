"""From a config to the parts of a run, and refusals with a remedy."""

import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest
import tiny_run
from ml_collections import ConfigDict

from agentjax.env import tasks as task_files
from agentjax.rl import losses
from agentjax.rollout.episode import Limits
from agentjax.types import Message, Task
from experiments import launch
from experiments import main as command

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMITS = 'agentjax.rollout.episode.Limits'


@dataclasses.dataclass(frozen=True)
class Part:
  """Takes one of each."""

  n: int
  rate: float = 0.5
  name: str = ''
  on: bool = False
  any: object = None


PART = f'{__name__}.Part'


def test_a_call_is_called_a_function_is_bound_a_value_is_itself():
  built = launch.build(
    {
      'a': {'call': LIMITS, 'turns': 3},
      'b': {'function': 'agentjax.rl.losses.ppo_clip', 'clip_low': 0.1},
      'c': {'value': 'agentjax.rl.losses.ppo_clip'},
      'd': ({'call': LIMITS}, 4),
      'e': {'call': PART, 'n': 1, 'any': {'call': LIMITS, 'turns': 2}},
      'f': {'function': LIMITS},
    }
  )
  assert built['a'] == Limits(turns=3)
  assert isinstance(built['b'], functools.partial)
  assert built['b'].func is losses.ppo_clip
  assert built['b'].keywords == {'clip_low': 0.1}
  assert built['c'] is losses.ppo_clip
  assert built['d'] == (Limits(), 4)
  assert built['e'].any == Limits(turns=2)
  assert built['f'] is Limits


@pytest.mark.parametrize(
  ('section', 'said'),
  [
    # Names.
    (
      {'call': 'agentjax.rollout.episode.Limit'},
      "no 'Limit', nearest is Limits",
    ),
    (
      {'call': 'agentjx.rollout'},
      "config.a.call: there is no module for 'agen",
    ),
    ({'function': ''}, "config.a.function is '': give a dotted name"),
    ({'value': '.rl'}, "config.a.value is '.rl': give a dotted name"),
    ({'call': 'a..b'}, "config.a.call is 'a..b': give a dotted name"),
    ({'call': 3}, 'config.a.call is 3: give a dotted name'),
    ({'value': 'agentjax.rl.losses.ppo'}, 'config.a.value: agentjax.rl.losses'),
    ({'call': 'agentjax.rl.losses'}, 'cannot be called'),
    # Keys.
    (
      {'call': LIMITS, 'turn': 3},
      'config.a.turn is not known, nearest is turns',
    ),
    ({'function': LIMITS, 'zzz': 3}, 'config.a.zzz is not known'),
    (
      {'call': PART, 'n': 1, 'any': {'call': LIMITS, 'x': 1}},
      'config.a.any.x is',
    ),
    ({'call': PART}, "config.a lacks ['n']"),
    ({'value': LIMITS, 'n': 1}, "config.a is a value and takes no ['n']"),
    ({'call': LIMITS, 'function': LIMITS}, 'config.a.function is not known'),
    # Types, and values that the callable refuses.
    (
      {'call': PART, 'n': 1.5},
      'config.a.n is 1.5, a float: give a value of typ',
    ),
    ({'call': PART, 'n': True}, 'config.a.n is True, a bool: give a value of'),
    (
      {'call': PART, 'n': '3'},
      "config.a.n is '3', a str: give a value of type i",
    ),
    ({'call': PART, 'n': 1, 'rate': 'x'}, "config.a.rate is 'x', a str"),
    (
      {'call': PART, 'n': 1, 'on': 1},
      'config.a.on is 1, a int: give a value of',
    ),
    ({'call': PART, 'n': 1, 'name': None}, 'config.a.name is None, a NoneType'),
    ({'function': PART, 'n': 'x'}, "config.a.n is 'x', a str"),
    (
      {'call': LIMITS, 'turns': 0},
      'config.a: limit turns is 0: give at least 1',
    ),
    (
      {'call': 'agentjax.env.tasks.read_tasks', 'path': '/no/such.jsonl'},
      'config.a: [Errno 2]',
    ),
  ],
)
def test_what_is_wrong_is_named_with_its_path(section, said):
  with pytest.raises(launch.ConfigError) as error:
    launch.build({'a': section})
  assert said in str(error.value)


def test_an_int_is_a_float_and_what_has_no_plain_type_is_taken():
  assert launch.build({'call': PART, 'n': 1, 'rate': 2}).rate == 2
  assert launch.build({'call': PART, 'n': 1, 'any': '?'}).any == '?'


def test_a_module_that_lacks_a_dependency_says_which(tmp_path, monkeypatch):
  (tmp_path / 'needy.py').write_text('import no_such_package\nx = 1\n')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(launch.ConfigError, match='needy.x needs no_such_package'):
    launch.build({'value': 'needy.x'})


def test_a_bug_keeps_its_traceback():
  with pytest.raises(ZeroDivisionError):
    launch.build({'call': f'{__name__}.divides'})


def divides():
  return 1 / 0


def test_the_config_of_a_run_may_be_frozen():
  frozen = tiny_run.config('steps=3').copy_and_resolve_references()
  assert launch.training(launch.plain(frozen)).steps == 3


def start(tmp_path, change, capsys):
  """Exit code and stderr of the command line with a config of its own."""
  (tmp_path / 'config.py').write_text(
    f'import tiny_run\n\n\ndef get_config():\n  c = tiny_run.get_config()\n'
    f'  {change}\n  return c\n'
  )
  code = command.main(
    ['main', f'--config={tmp_path}/config.py', f'--workdir={tmp_path}/run']
  )
  return code, capsys.readouterr().err


def test_a_bad_line_in_a_task_file_is_named(tmp_path, capsys):
  path = tmp_path / 'tasks.jsonl'
  good = [Task(f't{i}', (Message('user', '1+1='),)) for i in range(3)]
  task_files.write_tasks(path, good)
  lines = path.read_text().splitlines()
  path.write_text('\n'.join([*lines[:1], lines[1][:-1], lines[2]]) + '\n')
  call = {'call': 'agentjax.env.tasks.read_tasks', 'path': str(path)}
  code, err = start(tmp_path, f'c.tasks = {call}', capsys)
  assert code == 2
  assert f'config.tasks: {path}, line 2: ' in err and 'Traceback' not in err
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('keep', [0, 40, 400])
def test_weights_that_were_cut_off_are_named(tmp_path, capsys, keep):
  path = tmp_path / 'weights.gguf'
  head = b'GGUF' + np.array([3, 0, 1, 0, 2, 0], '<u4').tobytes()
  path.write_bytes((head + b'\x07' * 1000)[:keep])
  call = {
    'function': 'agentjax.model.load.load_params',
    'path': str(path),
  }
  code, err = start(tmp_path, f'c.policy.load = {call}', capsys)
  assert code == 1, err
  assert str(path) in err and 'Traceback' not in err
  assert not list((tmp_path / 'run').glob('metrics/*'))


def test_weights_of_another_model_are_named(tmp_path, capsys):
  path = ROOT / 'tests/model/data/llama'
  call = {
    'function': 'agentjax.model.load.load_params',
    'path': str(path),
  }
  code, err = start(tmp_path, f'c.policy.load = {call}', capsys)
  assert code == 1
  assert str(path) in err and 'the config' in err and 'Traceback' not in err


def test_a_key_of_a_config_file_that_nobody_takes(tmp_path, capsys):
  code, err = start(tmp_path, 'c.step = 3', capsys)
  assert code == 2 and 'config.step is not known, nearest is steps' in err


def test_a_config_whose_parts_do_not_go_together_leaves_nothing(
  tmp_path, capsys
):
  code, err = start(tmp_path, 'c.learner.length = 8', capsys)
  assert code == 2 and 'limits.context 112 exceeds learner.length 8' in err
  assert not (tmp_path / 'run').exists()


def test_what_a_section_does_not_take_is_shown_without(tmp_path, capsys):
  """Another function, of which the old one's options are none."""
  section = {'function': 'agentjax.rl.losses.cispo', 'cap': 2.0, 'dual_clip': 3}
  code, err = start(tmp_path, f'c.learner.loss = {section}', capsys)
  assert code == 2 and 'config.learner.loss.dual_clip is not known' in err
  left = "{'cap': 2.0, 'function': 'agentjax.rl.losses.cispo'}"
  assert f'; without it: --config.learner.loss="{left}"' in err
  assert not (tmp_path / 'run').exists()


def test_configs_are_json_able():
  json.dumps(launch.plain(tiny_run.get_config()))
  assert launch.plain(ConfigDict({'a': (1, [2])})) == {'a': (1, (2,))}
