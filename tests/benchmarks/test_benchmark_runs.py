"""The benchmark's machinery on a model of nothing: counts, never times."""

import dataclasses

import jax
import pytest

from agentjax.model.config import ModelConfig
from benchmarks import (
  engine,
  floor,
  measure,
  models,
  ours,
  slow_tools,
  workloads,
)

TINY = ModelConfig(
  vocab_size=96,
  width=16,
  layers=((('global',), 1),),
  heads=2,
  kv_heads=1,
  head_size=8,
  mlp=32,
  context=1024,
)


@pytest.fixture
def tiny(monkeypatch):
  monkeypatch.setitem(models.MODELS, '10m', TINY)
  monkeypatch.setattr(workloads, 'PROMPT', 16)
  monkeypatch.setattr(workloads, 'NEW_TOKENS', 8)
  monkeypatch.setattr(workloads, 'TRAJECTORIES', 2)
  monkeypatch.setattr(workloads, 'OBSERVATION', 8)
  monkeypatch.setattr(workloads, 'TURN_TOKENS', 4)
  monkeypatch.setattr(ours, 'BUCKETS', (8, 16))
  monkeypatch.setattr(floor, 'memory_rate', lambda: 1e10)
  monkeypatch.setattr(floor, 'product_rate', lambda: 1e11)
  return models.make('10m', None)


def test_the_quick_form_prints_its_figures(tiny, capsys, tmp_path):
  engine.main(
    [
      '--quick',
      '--repetitions=1',
      '--only=b8|multiturn',
      f'--results={tmp_path}',
    ]
  )
  figures = measure.read_figures(capsys.readouterr().out)
  assert set(figures) == {
    'decode_10m_b8_vs_floor',
    'multiturn_4_vs_reprefill',
  }
  assert all(value > 0 for value in figures.values())
  assert not list(tmp_path.iterdir())  # nothing is recorded


def test_turns_cost_what_was_observed_or_the_whole_past(tiny):
  work = dataclasses.replace(
    workloads.conversations(3, TINY.vocab_size, 2), turn_tokens=4
  )
  made = ours.make_engine(tiny, slots=2, context=64)
  found = {
    again: ours.multiturn(made, work, 0, reprefill=again)
    for again in (False, True)
  }
  assert found[False]['tokens'] == found[True]['tokens'] == work.sampled
  assert found[False]['prefilled_tokens'] == work.prefilled_once
  assert found[True]['prefilled_tokens'] == work.prefilled_each_turn
  assert found[False]['processed_tokens'] == work.prefilled_once + work.sampled
  assert made.acquire() is not None  # slots are given back


def test_resuming_processes_the_observation_alone(tiny):
  made = ours.make_engine(tiny, slots=1, context=128)
  ids = workloads.token_ids(0, (64 + 8,), TINY.vocab_size)
  found = ours.resume(made, (16, 32, 64), ids, 0)
  assert [found[f'tokens_{n}'] for n in (16, 32, 64)] == [8, 8, 8]
  assert all(found[f'resume_{n}'] > 0 for n in (16, 32, 64))


def test_slow_and_fast_tools_see_the_same_tokens(tiny, monkeypatch):
  monkeypatch.setattr(slow_tools, 'MEAN_TURN', 8)
  shape = slow_tools.Shape(slots=2, episodes=4, turns=2, context=512)
  made = ours.make_engine(
    tiny, slots=2, context=512, stop_ids=slow_tools.stop_ids(TINY.vocab_size)
  )
  slow, fast = (
    slow_tools.run(made, shape, TINY.vocab_size, latency, 0)
    for latency in ((0.01, 0.05), (0.0, 0.0))
  )
  assert slow['checksum'] == fast['checksum']
  assert slow['tokens'] == fast['tokens'] > 0
  assert slow['cut'] == 0 and 0 < slow['occupancy'] <= 1


def test_a_model_is_written_once_and_again_when_it_changes(
  tiny, tmp_path, monkeypatch
):
  file = models.make('10m', tmp_path).directory / 'model.safetensors'
  first = file.stat().st_mtime_ns
  models.make('10m', tmp_path)
  assert file.stat().st_mtime_ns == first
  other = dataclasses.replace(TINY, mlp=64)
  monkeypatch.setitem(models.MODELS, '10m', other)
  made = models.make('10m', tmp_path)
  assert file.stat().st_mtime_ns > first
  assert jax.tree.leaves(made.params['stacks'])
