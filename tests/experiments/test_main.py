"""The command line: what it takes, and how it refuses the rest."""

import pathlib
import subprocess
import sys

import ml_collections
import pytest

from agentjax import workdir
from experiments import main as command
from experiments import overrides, study

ROOT = pathlib.Path(__file__).resolve().parents[2]

CONFIG = """
from ml_collections import ConfigDict, config_dict


def get_config(variant='plain'):
  return ConfigDict({
    'seed': 0,
    'variant': variant,
    'optimizer': {
      'rate': 1e-3,
      'steps': 10,
      'name': 'adam',
      'clip': None,
      'limit': config_dict.placeholder(int),
      'nesterov': False,
      'betas': (0.9, 0.95),
      'sizes': (1, 2),
      'freeze': ('embed',),
      'empty': (),
    },
    'model': {'width': 64},
    'loss': {'function': 'a.b', 'clip': 0.2},
  })
"""


@pytest.fixture
def config_file(tmp_path):
  path = tmp_path / 'config.py'
  path.write_text(CONFIG)
  return path


@pytest.fixture
def parse(config_file):
  def call(*arguments):
    return command.parse(
      [
        'main',
        f'--config={config_file}',
        '--workdir=runs/x',
        *arguments,
      ]
    )

  return call


def test_config_and_workdir(parse):
  config, workdir = parse()
  assert workdir == 'runs/x'
  assert isinstance(config, ml_collections.FrozenConfigDict)
  assert config.optimizer.rate == 1e-3 and config.variant == 'plain'
  with pytest.raises(AttributeError):
    config.seed = 3


def test_argument_of_the_config_file(config_file):
  config, _ = command.parse(
    ['main', '--config', f'{config_file}:other', '--workdir', 'w']
  )
  assert config.variant == 'other'


@pytest.mark.parametrize(
  ('argument', 'path', 'value'),
  [
    ('seed=7', 'seed', 7),
    ('seed=-7', 'seed', -7),
    ('optimizer.rate=1', 'optimizer.rate', 1.0),
    ('optimizer.rate=2e-4', 'optimizer.rate', 2e-4),
    ('optimizer.name=a=b', 'optimizer.name', 'a=b'),
    ('optimizer.name=', 'optimizer.name', ''),
    ('optimizer.name=3', 'optimizer.name', '3'),
    ('optimizer.nesterov=true', 'optimizer.nesterov', True),
    ('optimizer.nesterov=False', 'optimizer.nesterov', False),
    ('optimizer.betas=(0, 0.5)', 'optimizer.betas', (0.0, 0.5)),
    ('optimizer.betas=()', 'optimizer.betas', ()),
    ('optimizer.sizes=[3, 4, 5]', 'optimizer.sizes', (3, 4, 5)),
    ('optimizer.freeze=("a", "b")', 'optimizer.freeze', ('a', 'b')),
    ('optimizer.empty=(1, "a")', 'optimizer.empty', (1, 'a')),
    ('optimizer.clip=0.5', 'optimizer.clip', 0.5),
    ('optimizer.clip=None', 'optimizer.clip', None),
    ('optimizer.clip=norm', 'optimizer.clip', 'norm'),
    ('optimizer.limit=3', 'optimizer.limit', 3),
    ('optimizer.limit=None', 'optimizer.limit', None),
  ],
)
def test_overrides_have_the_type_of_what_they_replace(
  parse, argument, path, value
):
  config, _ = parse(f'--config.{argument}')
  for name in path.split('.'):
    config = config[name]
  assert config == value and type(config) is type(value)


def test_the_last_of_two_overrides_stands(parse):
  assert parse('--config.seed=1', '--config.seed=2')[0].seed == 2


@pytest.mark.parametrize(
  ('argument', 'message'),
  [
    # Unknown sections, and sections that are none.
    (
      'optimiser.rate=1',
      'there is no key optimiser: did you mean --config.optimizer.rate?',
    ),
    (
      'optimizr.rat=1',
      'there is no key optimizr: did you mean --config.optimizer.rate?',
    ),
    ('qqq.zzz=1', 'there is no key qqq: there are loss, model, optimizer'),
    # What is far from all names is likened to none.
    ('model.lora.rank=4', 'no key model.lora: there is model.width; an option'),
    ('mdel.widht=4', 'no key mdel: did you mean --config.model.width?'),
    (
      'optimizer.name.x=1',
      "optimizer.name is a value ('adam'), not a section: write "
      '--config.optimizer.name=value',
    ),
    ('optimizer=1', 'optimizer is a section: override its keys (--config.opt'),
    ('model=3', 'override its keys (--config.model.width), or give all of it'),
    ('model={"width": ', 'as in --config.model="{\'key\': value}"'),
    ('loss={"clip": 3}', "--config.loss=\"{'function': 'a.b', 'option': val"),
    ('model={3: 4}', '3 is no name of a key'),
    # Keys that the file leaves out.
    ('+seed=3', 'seed is there already: write --config.seed=value'),
    ('model.+width=3', 'model.width is there already'),
    ('modle.+depth=3', 'no key modle: did you mean --config.model?'),
    ('+=3', "'' is no name of a key"),
    ('seed.+x=3', 'seed is a value (0), not a section'),
    # Unknown leaves.
    ('sed=1', 'there is no key sed: did you mean --config.seed?'),
    (
      'optimizer.rates=1',
      'no key optimizer.rates: did you mean --config.optimizer.rate?',
    ),
    ('width=3', 'no key width: did you mean --config.model.width?'),
    ('model.zzz=3', 'no key model.zzz: there is model.width'),
    ('=3', 'there is no key '),
    # Wrong types.
    ('seed=abc', "'abc' is not an int"),
    ('seed=1.5', "'1.5' is not an int"),
    ('seed=1e3', "'1e3' is not an int"),
    ('seed=', "'' is not an int"),
    ('seed=true', "'true' is not an int"),
    ('seed=None', "'None' is not an int"),
    ('optimizer.rate=fast', "'fast' is not a float"),
    ('optimizer.rate=None', "'None' is not a float"),
    ('optimizer.name=None', 'the value is text and cannot be None'),
    ('optimizer.nesterov=1', "'1' is not a bool: write true or false"),
    ('optimizer.limit=x', "'x' is not an int"),
    # Tuples.
    ('optimizer.sizes=3', "'3' is not a tuple: write it as Python does"),
    ('optimizer.sizes=3,a', "'3,a' is not a tuple"),
    (
      'optimizer.sizes=(3, "a")',
      "'a' is not an int, as the elements of (1, 2)",
    ),
    ('optimizer.sizes=(3.5,)', '3.5 is not an int, as the elements'),
    ('optimizer.sizes=(True,)', 'True is not an int, as the elements'),
    ('optimizer.betas=(None,)', 'None is not a float, as the elements'),
    ('optimizer.freeze=a,b', "'a,b' is not a tuple"),
  ],
)
def test_wrong_overrides_are_refused_with_a_remedy(parse, argument, message):
  with pytest.raises(overrides.UsageError) as error:
    parse(f'--config.{argument}')
  assert message in str(error.value)
  assert str(error.value).startswith(f'--config.{argument}: ')


def test_a_section_is_replaced_whole_and_what_is_left_out_is_added(parse):
  config, _ = parse(
    '--config.loss={"function": "c.d", "cap": {"call": "e.f", "at": (1, 2)}}',
    '--config.loss.cap.at=(3, 4)',
    '--config.loss.+why=None',
    '--config.+in_flight=3',
    '--config.+name=a b',
    '--config.+name_2={"value": "g.h"}',
    '--config.optimizer.clip={"call": "i.j"}',
  )
  assert config.loss.to_dict() == {
    'function': 'c.d', 'cap': {'call': 'e.f', 'at': (3, 4)}, 'why': None,
  }  # fmt: skip
  assert (config.in_flight, config.name) == (3, 'a b')
  assert config.name_2.value == 'g.h' and config.optimizer.clip.call == 'i.j'
  assert parse()[0].loss.to_dict() == {'function': 'a.b', 'clip': 0.2}


def test_a_section_that_stands_twice_is_replaced_twice():
  shared = ml_collections.ConfigDict({'n': 3})
  config = ml_collections.ConfigDict({'a': shared, 'b': {'c': shared}})
  overrides.apply(config, [('a', "{'m': 4}"), ('a.+k', '5')])
  assert config.b.c.to_dict() == config.a.to_dict() == {'m': 4, 'k': 5}


def test_all_that_is_wrong_is_said_at_once(parse):
  with pytest.raises(overrides.UsageError) as error:
    parse('--config.sed=1', '--config.seed=3', '--config.model.width=x')
  assert [x.split(':')[0] for x in str(error.value).splitlines()] == [
    '--config.sed=1',
    '--config.model.width=x',
  ]


@pytest.mark.parametrize(
  ('argument', 'message'),
  [
    ('--config.seed', '--config.seed: write --config.seed=value'),
    ('--noconfig.optimizer.nesterov', '--config.optimizer.nesterov=value'),
    ('--confg.seed=3', "Unknown command line flag 'confg.seed'"),
    ('--seed=3', "Unknown command line flag 'seed'"),
    ('stray', "'stray' is not a flag"),
  ],
)
def test_other_arguments_are_refused(parse, argument, message):
  with pytest.raises(overrides.UsageError) as error:
    parse(argument)
  assert message in str(error.value)


def test_what_is_missing_is_named(config_file, tmp_path):
  for arguments, message in (
    (['--workdir=w'], '--config is missing: as in --config=configs/'),
    ([f'--config={config_file}'], '--workdir is missing: as in --workdir='),
    ([f'--config={config_file}', '--workdir='], '--workdir is missing'),
    (
      [f'--config={tmp_path}/no.py', '--workdir=w'],
      f'--config={tmp_path}/no.py: there is no such file',
    ),
  ):
    with pytest.raises(overrides.UsageError) as error:
      command.parse(['main', *arguments])
    assert message in str(error.value)
  (tmp_path / 'dict.py').write_text('def get_config():\n  return {}\n')
  with pytest.raises(overrides.UsageError, match='returns a dict, not an ml_'):
    command.parse(['main', f'--config={tmp_path}/dict.py', '--workdir=w'])


@pytest.mark.parametrize(
  ('text', 'said'),
  [
    ('def get_config(:\n', ', line 1: SyntaxError: '),
    ('x = 1\n', "has no attribute 'get_config'"),
    (
      "def get_config():\n  return int('x')\n",
      ', line 2: ValueError: invalid literal',
    ),
    (
      "def get_config():\n  return open('/no/file')\n",
      ', line 2: FileNotFoundError: [Errno 2]',
    ),
    ('def get_config(a):\n  return a\n', 'TypeError: get_config() missing 1'),
    (
      'def get_config():\n  return 1 / 0\n',
      ', line 2: ZeroDivisionError: division by zero',
    ),
    ('import no_such_module\n', ', line 1: ModuleNotFoundError: No module'),
    ('\x00\x01', 'SyntaxError: '),
  ],
)
def test_a_config_file_that_is_none(tmp_path, monkeypatch, text, said):
  # A process reads one config; the loader would add to that of another test.
  monkeypatch.delitem(sys.modules, 'config_config', raising=False)
  path = tmp_path / 'bad.py'
  path.write_text(text)
  for argument in ([f'--config={path}'], ['--config', str(path)]):
    with pytest.raises(overrides.UsageError) as error:
      command.parse(['main', *argument, '--workdir=w'])
    assert str(error.value).startswith(f'--config={path}')
    assert said in str(error.value) and 'function get_config' in str(
      error.value
    )


def test_a_config_file_that_is_no_python(tmp_path, monkeypatch):
  monkeypatch.delitem(sys.modules, 'config_config', raising=False)
  path = tmp_path / 'config.yaml'
  path.write_text('a: 1\n')
  with pytest.raises(overrides.UsageError, match=f'--config={path}'):
    command.parse(['main', f'--config={path}', '--workdir=w'])


def test_a_section_that_has_steps_is_switched_off_by_them(parse):
  with pytest.raises(overrides.UsageError) as error:
    parse('--config.optimizer=None')
  assert str(error.value).endswith(
    '; --config.optimizer.steps=0 switches it off'
  )


def test_an_option_that_the_file_leaves_out_is_to_be_added(parse):
  with pytest.raises(overrides.UsageError, match=r'by --config.\+in_flight='):
    parse('--config.in_flight=3')


@pytest.mark.parametrize('where', ['file', 'file/under', 'foo://a', 'gs://b/x'])
def test_a_workdir_that_cannot_be_one(tmp_path, monkeypatch, capsys, where):
  monkeypatch.setitem(sys.modules, 'gcsfs', None)
  monkeypatch.setattr(sys, 'path', [*sys.path, str(ROOT / 'tests')])
  (tmp_path / 'file').write_text('mine')
  where = where if '://' in where else f'{tmp_path}/{where}'
  config = ROOT / 'tests' / 'tiny_run.py'
  assert command.main(['main', f'--config={config}', f'--workdir={where}']) == 2
  err = capsys.readouterr().err
  assert f'{where} cannot be used: ' in err and err.count('\n') == 1


def test_arms_are_named_by_their_end_where_it_is_their_own(capsys):
  arms = ['a.grpo', 'b.grpo', 'b.gae', 'gae']
  assert study.chosen(arms, None) == arms
  assert study.chosen(arms, ['gae', 'b.grpo']) == ['b.grpo', 'gae']
  assert study.chosen(arms[:3], ['gae']) == ['b.gae']
  for name, said in (
    ('grpo', "'grpo' is the end of a.grpo, b.grpo: name one"),
    ('rpo', "no arm 'rpo': choose of a.grpo, b.grpo, b.gae, gae"),
  ):
    with pytest.raises(ValueError) as error:
      study.chosen(arms, [name])
    assert str(error.value) == said
  with pytest.raises(SystemExit):
    study.main(['credit_families', '--workdir=w', '--arms', 'grpo'])
  assert 'is the end of first_decides.grpo, each_c' in capsys.readouterr().err


def test_a_variant_that_a_config_file_does_not_have_is_one_line(capsys):
  path = ROOT / 'configs/arithmetic_methods.py'
  with pytest.raises(overrides.UsageError) as error:
    command.parse(['main', f'--config={path}:gpro', '--workdir=w'])
  said = f"--config={path}:gpro: no method 'gpro': there are grpo, dr_grpo, "
  assert str(error.value).startswith(said)
  assert 'get_config' not in str(error.value)


def test_studies_are_listed(capsys):
  with pytest.raises(SystemExit) as error:
    study.main(['nope', '--workdir=w'])
  assert error.value.code == 2
  assert (
    "no study 'nope': choose of ['credit_families', 'quickstart']"
    in capsys.readouterr().err
  )


def test_a_wrong_command_line_exits_with_2_and_no_traceback(config_file):
  done = subprocess.run(
    [
      sys.executable,
      '-c',
      'import sys; from experiments import main; code = main.main(sys.argv); '
      'print("jax" in sys.modules); sys.exit(code)',
      f'--config={config_file}',
      '--workdir=w',
      '--config.sed=1',
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 2
  assert done.stderr == (
    '--config.sed=1: there is no key sed: did you mean --config.seed?\n'
    '(--help tells how this is called)\n'
  )
  assert done.stdout == 'False\n'  # and nothing slow was imported


def test_what_launch_refuses_is_a_message_too(tmp_path, capsys):
  (tmp_path / 'config.py').write_text(
    'from ml_collections import ConfigDict\n\n\n'
    "def get_config():\n  return ConfigDict({'step': 3})\n"
  )
  code = command.main(
    ['main', f'--config={tmp_path}/config.py', f'--workdir={tmp_path}/run']
  )
  assert code == 2
  assert 'config.step is not known' in capsys.readouterr().err


def test_a_workdir_in_use_is_a_message_too(tmp_path, capsys):
  config = ROOT / 'configs' / 'quickstart.py'
  with workdir.WorkdirLock(tmp_path):
    assert (
      command.main(['main', f'--config={config}', f'--workdir={tmp_path}']) == 1
    )
  assert 'is in use by pid' in capsys.readouterr().err


def test_help(capsys):
  assert command.main(['main', '--help']) == 0
  assert '--config.section.key=value' in capsys.readouterr().out
