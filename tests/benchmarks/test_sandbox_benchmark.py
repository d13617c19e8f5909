"""The sandbox's benchmark: that it measures, never how long anything takes."""

import json

import pytest
from requirements import require

from agentjax.env.base import InfraError
from agentjax.env.sandbox import SandboxSpec, choose_backend
from benchmarks import measure, sandbox


@pytest.fixture
def both():
  for name in sandbox.BACKENDS:
    try:
      choose_backend(SandboxSpec(), name)
      reason = ''
    except InfraError as error:
      reason = str(error)
    require(name, not reason, reason)


def test_the_forms_print_their_figures(both, capsys, tmp_path):
  argv = ['--repetitions=2', f'--results={tmp_path}']
  sandbox.main([*argv, '--quick', '--only=session'])
  found = measure.read_figures(capsys.readouterr().out)
  assert set(found) == {
    *(
      f'sandbox_{backend}_session_{kind}_ms'
      for backend in ('docker', 'bwrap')
      for kind in ('python', 'shell')
    ),
    *(f'sandbox_session_{k}_bwrap_vs_docker' for k in ('python', 'shell')),
  }
  assert all(value > 0 for value in found.values())
  assert not list(tmp_path.iterdir())
  sandbox.main([*argv, '--only=exec_true'])
  found = measure.read_figures(capsys.readouterr().out)
  assert set(found) == {
    *('sandbox_docker_exec_true_ms', 'sandbox_bwrap_exec_true_ms'),
    *('sandbox_docker_run_ms', 'sandbox_call_vs_docker_run'),
    'sandbox_exec_true_bwrap_vs_docker',
  }
  (file,) = tmp_path.iterdir()
  report = json.loads(file.read_text())
  assert report['figures'].keys() == found.keys()
  assert report['repetitions']['exec_true'] == {'docker': 2, 'bwrap': 2}


def test_figures_are_medians_and_their_ratios():
  def of(*milliseconds):
    return [{'seconds': ms / 1000} for ms in milliseconds]

  assert sandbox.figures(
    {
      'exec_true': {'docker': of(1, 2, 9), 'bwrap': of(1, 1, 9)},
      'docker_run': {'docker': of(5), 'run': of(300, 400, 500)},
    }
  ) == pytest.approx(
    {
      'sandbox_docker_exec_true_ms': 2,
      'sandbox_bwrap_exec_true_ms': 1,
      'sandbox_docker_run_ms': 400,
      'sandbox_exec_true_bwrap_vs_docker': 2,
      'sandbox_call_vs_docker_run': 200,
    }
  )


@pytest.mark.parametrize('wrong', ['--only=nothing', '--repetitions=0'])
def test_wrong_command_lines_end(wrong, capsys):
  with pytest.raises(SystemExit):
    sandbox.parse([wrong])
  assert wrong.split('=')[0] in capsys.readouterr().err
