"""The learner's benchmark: the work, its floor, and its forms on nothing."""

import json
import re

import jax
import numpy as np
import pytest

from agentjax.model import mesh as meshes
from agentjax.model.config import ModelConfig
from benchmarks import (
  floor,
  learner,
  learner_rows,
  learner_work,
  measure,
  models,
  worker_learner_ours,
  worker_memory,
)

TINY = ModelConfig(
  vocab_size=4096,
  width=8,
  layers=((('global',), 2),),
  heads=2,
  kv_heads=1,
  head_size=4,
  mlp=16,
  context=64,
)


@pytest.fixture
def tiny(monkeypatch):
  monkeypatch.setitem(models.MODELS, '10m', TINY)
  monkeypatch.setattr(learner_work, 'ROWS', 2)
  monkeypatch.setattr(learner_work, 'PROMPT', 16)
  monkeypatch.setattr(learner_work, 'TURN', 4)
  monkeypatch.setattr(learner_work, 'OBSERVATION', 5)
  monkeypatch.setattr(floor, 'product_rate', lambda: 1e11)


def test_the_work_is_that_of_the_issue():
  work = learner_work.make(16_384)
  assert work.tokens.shape == (8, 512) and work.tokens.min() >= 1
  assert work.mask.sum() == 8 * 4 * 51
  assert 1 - work.mask.mean() == pytest.approx(0.6, abs=0.01)
  assert not work.mask[:, :128].any() and work.mask[:, -51:].all()
  assert (work.advantages > 0).any() and (work.advantages < 0).any()
  assert work.advantages.mean() == pytest.approx(0, abs=1e-6)


def test_old_logprobs_are_near_and_survive_a_file(tmp_path):
  work = learner_work.make(100, rows=2).near(np.full((2, 512), -4.0))
  assert set(work.logprobs[~work.mask]) == {0.0}
  gap = np.exp(-4.0 - work.logprobs[work.mask])
  assert 0.9 < gap.mean() < 1.1 and 0 < np.mean(abs(gap - 1) > 0.2) < 0.2
  work.save(tmp_path / 'work.npz')
  again = learner_work.read(tmp_path / 'work.npz')
  np.testing.assert_array_equal(again.logprobs, work.logprobs)
  np.testing.assert_array_equal(again.mask, work.mask)


def test_flops_of_the_10m_step():
  # 4,096 tokens through 6 layers of 983,040 weights, 1,632 through a head of
  # 4,194,304, 131,328 pairs of a query and a key in each of 8 rows.
  mask = learner_work.make(16_384).mask
  flops = learner_work.flops(models.MODELS['10m'], mask)
  assert flops.blocks == 144_955_146_240
  assert flops.head == 41_070_624_768
  assert flops.attention == 19_365_101_568
  assert flops.total == 205_390_872_576


def test_packed_trajectories_are_the_work():
  work = learner_work.make(100, rows=2).near(np.full((2, 512), -4.0))
  batch = worker_learner_ours.packed(work)
  np.testing.assert_array_equal(batch.tokens, work.tokens)
  np.testing.assert_array_equal(batch.weights, work.mask)
  np.testing.assert_array_equal(batch.logprobs, work.logprobs)
  np.testing.assert_array_equal(
    batch.advantages, work.mask * work.advantages[:, None]
  )
  assert batch.turns.max() == 4


def test_the_quick_form_prints_its_figure(tiny, capsys, tmp_path):
  learner.main(['--quick', '--repetitions=1', f'--results={tmp_path}'])
  out = capsys.readouterr().out
  figures = measure.read_figures(out)
  assert list(figures) == ['learner_10m_vs_floor']
  assert 'GiB above' in out
  assert not list(tmp_path.iterdir())  # nothing is recorded


def test_no_buffer_of_the_step_holds_logits_of_all_tokens(tiny):
  work = learner_work.make(TINY.vocab_size)
  made, _ = worker_learner_ours.make(
    models.make('10m', None),
    work,
    learner_work.SETTINGS,
    chunk=16,
    mesh=meshes.make_mesh(devices=jax.devices()[:1]),
  )
  B, T = work.mask.shape
  name, lowered = next(iter(made.lower().items()))
  assert name.startswith('add')
  compiled = lowered.compile()
  logits = B * T * TINY.padded_vocab
  shapes = re.findall(r'\bf32\[([\d,]+)\]', compiled.as_text())
  sizes = [np.prod([int(n) for n in s.split(',')]) for s in shapes]
  assert 16 * TINY.padded_vocab <= max(sizes) < logits / 2
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * logits


def found(loss=0.5, norm=2.0, seconds=1.0):
  return {
    'loss': loss,
    'grad_norm': norm,
    'seconds': seconds,
    'cpu_seconds': seconds,
    'before_bytes': 2**30,
    'peak_bytes': 2**31,
  }


def test_a_peer_that_takes_another_step_ends_the_run():
  first = {'ours': found(), 'torch': found(loss=0.50001)}
  rows = {name: [m] for name, m in first.items()}
  (remark,) = learner_rows.agreement(first, rows)
  assert 'within 1.0e-05' in remark
  for other in (found(loss=0.6), found(norm=2.1), found(norm=float('nan'))):
    with pytest.raises(RuntimeError, match='same step'):
      learner_rows.agreement({**first, 'torch': other}, rows)


def test_memory_is_the_most_that_a_call_held():
  def call():
    return {'sum': float(np.ones(2**25).sum())}  # 256 MiB

  out = worker_memory.measured(call)
  assert out['sum'] == 2**25 and out['seconds'] > 0
  assert out['peak_bytes'] - out['before_bytes'] > 200 * 2**20
  # And of that call alone.
  out = worker_memory.measured(dict)
  assert out['peak_bytes'] - out['before_bytes'] < 50 * 2**20


def test_the_command_line():
  args = learner.parse([])
  assert args.repetitions == 5 and args.peers == ['tunix', 'torch']
  assert args.sizes == ['10m', '135m']
  args = learner.parse(['--quick'])
  assert args.sizes == ['10m'] and args.peers == [] and args.repetitions == 3


@pytest.mark.parametrize(
  'argument, says',
  [
    ('--only=b9', 'fits none of learner_10m'),
    ('--only=(', '--only=('),
    ('--peers=trl', "no peer is called ['trl']"),
    ('--repetitions=0', 'give at least 1'),
  ],
)
def test_a_wrong_command_line_says_what_is_wrong(argument, says, capsys):
  with pytest.raises(SystemExit):
    learner.parse([argument])
  assert says in capsys.readouterr().err


def test_a_report_is_json():
  bench = learner_rows.Bench([], None, 1, rates={'learner_10m': 1e11})
  row = learner_rows.Row({'ours': [found(seconds=1.5)]}, {'x_vs_y': 2.0}, [])
  report = learner.report(
    [], bench, measure.describe_machine(), {'x': row}, True
  )
  report = json.loads(json.dumps(report))
  assert report['figures'] == {'x_vs_y': 2.0}
  assert report['rows']['x']['median_seconds'] == {'ours': 1.5}
  assert report['machine']['flops_per_second'] == {'learner_10m': 1e11}
