"""The benchmark of pools runs, and prints a line for each of its figures."""

import sys

import pytest

from agentjax.env.base import InfraError
from agentjax.env.sandbox import SandboxSpec, choose_backend
from benchmarks import measure, pool


def test_quick_form(capsys, tmp_path):
  try:
    choose_backend(SandboxSpec(), 'bwrap')
  except InfraError as error:
    from requirements import require

    require('bwrap', False, str(error))
  arguments = ['--quick', '--only=bwrap', '--many=2', '--repetitions=3']
  assert pool.main([*arguments, f'--results={tmp_path}']) == 0
  found = measure.read_figures(capsys.readouterr().out)
  assert set(found) == {
    'pool_bwrap_warm_acquire_ms',
    'pool_bwrap_cold_start_s',
    'pool_bwrap_2_warm_s',
    'pool_bwrap_memory_mib_each',
  }
  assert all(value > 0 for value in found.values())
  assert list(tmp_path.iterdir()) == []


def test_wrong_options_end_it(capsys):
  with pytest.raises(SystemExit):
    pool.parse(['--many=-1'])
  assert 'at least 1' in capsys.readouterr().err
  assert sys.modules['benchmarks.pool'] is pool
