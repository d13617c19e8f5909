"""The audit of a config: with its own tasks, chat and limits."""

import pytest

from experiments import audit

CONFIG = '--config=configs/quickstart.py'


def test_the_quickstart_pays_nobody_but_its_expert(capsys):
  assert audit.main([CONFIG, '--n=16', '--config.tasks.n=64']) == 0
  said = capsys.readouterr().out.splitlines()
  assert (
    said[0] == 'agentjax.env.arithmetic, as in the config: 16 tasks, seed 0'
  )
  assert said[-1].split()[:4] == ['gold', 'tokens', '16', '1.000']


def test_limits_that_no_expert_can_keep_are_seen(capsys):
  flags = [CONFIG, '--n=8', '--config.tasks.n=64', '--config.limits.turns=2']
  assert audit.main(flags) == 1
  assert 'BELOW (turn_limit 8)' in capsys.readouterr().out


@pytest.mark.parametrize(
  ('flags', 'said'),
  [
    ([CONFIG, '--n=0'], '--n is 0: give 1 or more'),
    (['--n=4'], '--config is missing'),
    ([CONFIG, '--config.taks.n=4'], 'taks'),
    ([CONFIG, '--nn=4'], 'nn'),
  ],
)
def test_wrong_flags_end_with_what_to_do(flags, said, capsys):
  with pytest.raises(SystemExit) as stop:
    audit.parse(flags)
  assert stop.value.code == 2
  assert said in capsys.readouterr().err


def test_a_config_that_cannot_be_built_ends_with_its_key(capsys):
  assert audit.main([CONFIG, '--config.tasks.n=-1']) == 2
  assert 'config.tasks: n is -1' in capsys.readouterr().err
