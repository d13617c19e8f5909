"""The compile check's command line; what it compiles is test_tpu_fitness's."""

import importlib.util
import types

import pytest

from agentjax.model import ahead
from experiments import compile_check

CONFIG = '--config=configs/quickstart.py'


def test_flags_and_overrides_become_a_config():
  args, config = compile_check.parse(
    [CONFIG, '--topology=v5p:2x2x2', '--mesh=data=2,tensor=4',
     '--config.learner.rows=16']
  )  # fmt: skip
  assert args.mesh == {'data': 2, 'tensor': 4} and args.engine_mesh is None
  assert config['learner']['rows'] == 16


@pytest.mark.parametrize(
  'flags, said',
  [
    ([CONFIG], 'topology'),
    (['--topology=v5p:2x2x2'], '--config is missing'),
    ([CONFIG, '--topology=x', '--mesh=rows=2'], 'axes are data, fsdp'),
    ([CONFIG, '--topology=x', '--mesh=8'], 'write data=2'),
    ([CONFIG, '--topology=x', '--config.learner.row=2'], 'row'),
  ],
)
def test_wrong_flags_end_with_what_to_do(flags, said, capsys):
  with pytest.raises(SystemExit) as stop:
    compile_check.parse(flags)
  assert stop.value.code == 2
  assert said in capsys.readouterr().err


@pytest.mark.parametrize('moments, code', [(5, 0), (8, 1)])
def test_a_program_has_to_fit_beside_the_moments(
  moments, code, monkeypatch, capsys
):
  """The chip has 16 GiB, 17.2 GB: `add` alone would fit in either case."""
  gb = 10**9
  programs = {
    'add': ahead.Needs(4 * gb, 0, 6 * gb, 0, 1.0, (), ''),
    'apply': ahead.Needs((4 + moments) * gb, 0, gb, 0, 1.0, (), ''),
  }

  def _learner(args, config, chips):
    return 'a learner', programs

  def _engine(args, config, chips):
    return 'an engine', {'chunk': programs['add']}

  monkeypatch.setattr(compile_check, '_learner', _learner)
  monkeypatch.setattr(compile_check, '_engine', _engine)
  monkeypatch.setattr(ahead, 'needs', lambda lowered: lowered)
  chip = types.SimpleNamespace(device_kind='TPU v5 lite')
  assert compile_check._check(None, None, [chip]) == code
  said = capsys.readouterr().out
  assert f'learner add: {10 + moments}.00 GB with all that it holds' in said
  assert ('DOES NOT FIT' in said) == bool(code)
  assert 'engine chunk: 10.00 GB with all that it holds, of 17.2 GB: fits' in (
    said
  )


@pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is not None, reason='libtpu is here'
)
def test_without_the_compiler_it_says_how_to_get_it(capsys):
  assert compile_check.main([CONFIG, '--topology=v5p:2x2x2']) == 2
  assert "pip install 'agentjax[tpu]'" in capsys.readouterr().err
