"""The parts of the benchmark that know no model: literal in, literal out."""

import itertools
import json
import pathlib
import sys

import numpy as np
import pytest

from benchmarks import engine, floor, measure, models, peers, rows, workloads


def test_figures_are_read_back_from_an_output():
  text = '\n'.join(
    [
      'decode_10m_b8 (12 s)',
      '  ours: 3 figures',
      measure.figure('decode_10m_b8_vs_tunix', 3.14159),
      'figure of speech',
      measure.figure('slow_tools_vs_fast', 0.9),
    ]
  )
  assert measure.read_figures(text) == {
    'decode_10m_b8_vs_tunix': 3.142,
    'slow_tools_vs_fast': 0.9,
  }


def test_a_ratio_above_one_says_that_ours_is_faster():
  found = {
    'ours': [{'seconds': 1.0}, {'seconds': 9.0}, {'seconds': 2.0}],
    'tunix': [{'seconds': 6.0}, {'seconds': 5.0}, {'seconds': 7.0}],
  }
  assert measure.speedup(found, 'tunix') == 3.0


def test_systems_take_turns_and_go_first_in_turn():
  calls = []

  def system(name):
    def run(i):
      calls.append((name, i))
      return {'seconds': 1.0}

    return run

  found = measure.interleave({'a': system('a'), 'b': system('b')}, 2)
  assert calls == [
    ('a', -1), ('b', -1), ('a', 0), ('b', 0), ('b', 1), ('a', 1),
  ]  # fmt: skip
  assert {name: len(ms) for name, ms in found.items()} == {'a': 2, 'b': 2}
  assert 'load' in found['a'][0]


def test_a_slow_system_is_measured_less_often(monkeypatch):
  # Each call of the clock is 10 s after the one before.
  clock = itertools.count(0, 10)
  monkeypatch.setattr(measure.time, 'perf_counter', lambda: next(clock))
  for limit, expected in ((45.0, 4), (15.0, 3), (1e9, 5)):
    found = measure.interleave(
      {'slow': lambda i: {'seconds': 10.0}}, 5, seconds_per_system=limit
    )
    assert len(found['slow']) == expected
  found = measure.interleave(
    {'slow': lambda i: {'seconds': 10.0}}, 2, seconds_per_system=1.0
  )
  assert len(found['slow']) == 2


def test_conversations_are_those_of_the_issue():
  work = workloads.conversations(4, 100)
  assert work.prefixes == [128, 224, 320, 416]
  assert work.prefilled_once == 2560
  padded = [1 << (n - 1).bit_length() for n in work.prefixes]
  assert 8 * sum(padded) == 11_264  # of a system that pads to powers of two
  assert work.padded_length == 512 + 32
  assert work.sampled == 8 * 4 * 32
  work = workloads.conversations(16, 100)
  assert work.length == 128 + 15 * 64 + 16 * 32
  assert work.prefilled_each_turn == 8 * 13_568
  assert work.padded_length == 2048 + 32


def test_a_smaller_batch_has_the_same_prompts_and_none_the_padding_id():
  small, large = workloads.prompts(1, 50), workloads.prompts(32, 50)
  np.testing.assert_array_equal(small[0], large[0])
  assert large.min() == 1 and large.max() == 49


def test_cost_of_a_step_of_the_10m_model():
  # 6 layers of 983,040 weights and a head of 4,194,304; 192 positions cached.
  cost = floor.cost(models.MODELS['10m'], 8, 192)
  assert cost == floor.Cost(50_331_648, 170_917_888)
  assert cost.seconds(25e9, 1e12) == pytest.approx(0.002013, rel=1e-3)
  assert cost.seconds(1e12, 100e9) == pytest.approx(0.001709, rel=1e-3)


def test_models_have_their_sizes():
  shapes = {
    name: models.transformer.n_params(config)
    for name, config in models.MODELS.items()
  }
  assert shapes == {'10m': 10_095_872, '135m': 134_515_008}


def test_every_figure_of_the_issue_has_a_row():
  names = list(rows.all_rows())
  assert names == [
    'decode_10m_b1', 'decode_10m_b8', 'decode_10m_b32', 'multiturn_4',
    'multiturn_16', 'resume', 'slow_tools', 'decode_135m_b1',
    'decode_135m_b8', 'decode_135m_b32',
  ]  # fmt: skip
  assert set(rows.quick_rows()) <= set(names)


def test_the_command_line():
  args = engine.parse([])
  assert args.repetitions == 5 and args.peers == ['tunix', 'hf']
  assert list(args.rows) == list(rows.all_rows())
  args = engine.parse(['--quick', '--only=b8'])
  assert args.repetitions == 3 and list(args.rows) == ['decode_10m_b8']


@pytest.mark.parametrize(
  'argument, says',
  [
    ('--only=b9', 'fits none of decode_10m_b1'),
    ('--only=(', '--only=('),
    ('--peers=vllm', "no peer is called ['vllm']"),
    ('--repetitions=0', 'give at least 1'),
  ],
)
def test_a_wrong_command_line_says_what_is_wrong(argument, says, capsys):
  with pytest.raises(SystemExit):
    engine.parse([argument])
  assert says in capsys.readouterr().err


# ---- peers -----------------------------------------------------------------


@pytest.mark.parametrize(
  'line, says',
  [
    ('', 'ended'),
    ('Loading weights\n', 'no JSON object'),
    ('[1]\n', 'no JSON object'),
    ('{"error": "ValueError: x"}\n', 'ValueError: x'),
  ],
)
def test_answers_that_are_none(line, says):
  with pytest.raises(peers.PeerError, match=says):
    peers.parse_answer(line, 'hf')


def _installed(cache: pathlib.Path) -> peers.Spec:
  """A peer whose environment is there already: this interpreter."""
  spec = peers.Spec('fake', 'tests.benchmarks.fake_worker', ('fake==1',))
  home = cache / 'venvs' / 'fake'
  (home / 'bin').mkdir(parents=True)
  (home / 'bin' / 'python').symlink_to(sys.executable)
  (home / 'installed.txt').write_text('fake==1')
  return spec


def test_a_worker_answers_fails_and_goes_on(tmp_path):
  peer = peers.Peer(_installed(tmp_path), tmp_path)
  try:
    assert peer.versions == {}
    assert peer.ask('double', value=21) == {'value': 42}
    with pytest.raises(peers.PeerError, match='no such weights'):
      peer.ask('fail')
    assert peer.ask('double', value=1) == {'value': 2}
    with pytest.raises(peers.PeerError, match='fake.log'):
      peer.ask('leave')
  finally:
    peer.close()
  assert 'a library that prints' in (tmp_path / 'fake.log').read_text()


def test_an_environment_that_is_there_is_not_made_again(tmp_path):
  spec = _installed(tmp_path)
  assert peers.install(spec, tmp_path) == (
    tmp_path / 'venvs' / 'fake' / 'bin' / 'python'
  )


def test_a_report_is_json(tmp_path):
  bench = rows.Bench({}, tmp_path, 1)
  bench.rates = {'bytes_per_second': 1.0, 'flops_per_second': 2.0}
  row = rows.Row({'ours': [{'seconds': 1.5}]}, {'x_vs_y': 2.0}, ['fast'])
  machine = measure.describe_machine()
  found = engine.report(['--only=x'], bench, machine, {'x': row}, False)
  found = json.loads(json.dumps(found))
  assert found['figures'] == {'x_vs_y': 2.0}
  assert found['rows']['x']['median_seconds'] == {'ours': 1.5}
  assert found['command'].endswith('benchmarks.engine --only=x')
  assert found['machine']['cores'] >= 1 and not found['complete']
