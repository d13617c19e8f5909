"""Every method of configs/arithmetic_methods.py is built; each takes a step.

The ones with parts that no other run of the tests has do so every day.
"""

import importlib.util
import math
import pathlib

import pytest

from agentjax import recorder
from agentjax.train import train
from experiments import launch, overrides

PATH = pathlib.Path(__file__).parents[1] / 'configs/arithmetic_methods.py'
SPEC = importlib.util.spec_from_file_location('arithmetic_methods', PATH)
methods = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(methods)

DAILY = ('tree_grpo', 'vineppo')
SMALL = {
  'policy.config.width': '32', 'policy.config.heads': '1',
  'policy.config.kv_heads': '1', 'policy.config.mlp': '32',
  'policy.config.layers': "((('global',), 1),)", 'tasks.n': '16',
  'cold_start.steps': '30', 'cold_start.demonstrations': '60',
  'cold_start.per_step': '12', 'cold_start_optimizer.warmup_steps': '1',
  'cold_start_optimizer.decay_steps': '60', 'evaluation.tasks.n': '2',
  'steps': '2', 'record_every': '1', 'engine.slots': '6',
  'engine.buckets': '(32,)', 'learner.shares': '(1.0,)',
  'checkpoint_every': '9',
}  # fmt: skip


def small(method):
  config = methods.get_config(method)
  changes = dict(SMALL)
  alone = config.group_size == 1
  changes |= {'groups': '6' if alone else '2'}
  changes |= {} if alone else {'group_size': '3'}
  if 'critic' in config.learner:
    changes |= {'learner.critic.warmup': '1'}
  overrides.apply(config, list(changes.items()))
  return launch.training(launch.plain(config))


@pytest.mark.parametrize('method', methods.METHODS)
def test_it_is_built(method):
  small(method)
  assert methods.METHODS[method].__doc__


@pytest.mark.parametrize(
  'method',
  [
    m if m in DAILY else pytest.param(m, marks=pytest.mark.long)
    for m in methods.METHODS
  ],
)
def test_it_takes_a_step(method, tmp_path):
  summary = train(tmp_path, small(method))
  assert summary['compilations_after_warmup'] == 0
  assert summary['tokens_prefilled'] == summary['tokens_expected']
  assert summary['max_logprob_gap'] < 1e-4
  assert summary['skipped_updates'] == 0
  rows = [
    r for r in recorder.read_metrics(tmp_path) if r['phase'] == 'reinforcement'
  ]
  assert len(rows) == 2
  for row in rows:
    assert all(math.isfinite(v) for v in row.values() if v != row['phase'])
    # Where none but groups that teach something are chosen, there may be none.
    assert row['loss_tokens'] > 0 or row['chosen'] == 0


def test_a_method_that_there_is_not_is_refused():
  with pytest.raises(ValueError, match="no method 'gpro': there are grpo, "):
    methods.get_config('gpro')
