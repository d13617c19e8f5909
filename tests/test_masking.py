"""The alarm over trajectories that infrastructure takes out of the loss."""

import dataclasses

import fakes
import pytest
import tiny_run

from agentjax import guards, recorder
from agentjax.env.base import InfraError
from agentjax.env.sandbox import pools
from agentjax.train import train
from agentjax.training import ConfigError, TooManyFailures
from agentjax.types import Group, Status

SHORT = ('cold_start.steps=4', 'steps=8', 'use_reference=False')


def draw(lost, n=20):
  """A draw of which `lost` of `n` trajectories were masked."""
  parts = [('p', [1]), ('m', [2])]
  members = [
    fakes.trajectory(
      parts, status=Status.INFRA_FAILURE if i < lost else Status.DONE, sample=i
    ).append(error='the engine is gone' if i < lost else None)
    for i in range(n)
  ]
  return [Group(members[0].task, 0, tuple(members))]


def test_it_takes_twenty_steps_above_the_rate():
  masking = guards.Masking(0.05)
  for step in range(19):
    assert masking.alarm(draw(5), step) is None
  alarm = masking.alarm(draw(5), 19)
  assert isinstance(alarm, TooManyFailures)
  for words in ('25.0%', 'last 20 steps', 'max_mask_rate 5.0%', 'step 19 is'):
    assert words in str(alarm)
  assert str(alarm).endswith('the last one:\nthe engine is gone')


def test_at_the_rate_it_is_quiet_and_a_bad_step_passes():
  masking = guards.Masking(0.05)
  assert all(masking.alarm(draw(1), step) is None for step in range(60))
  masking = guards.Masking(0.05)
  assert masking.alarm(draw(20), 0) is None  # a step is the other guard's
  for step in range(18):
    assert masking.alarm(draw(0), 1 + step) is None
  assert masking.alarm(draw(0), 19) is None  # 5 % over the 20, not more
  assert masking.alarm(draw(1), 20) is None  # the bad one is out of sight


class Failing(tiny_run.Graded):
  """Every fourth environment has no luck with its engine, and no retry."""

  made, healthy = 0, False

  def __init__(self):
    super().__init__()
    Failing.made += 1
    self.failing = Failing.made % 12 < 3 and not Failing.healthy

  def step(self, turn):
    if self.failing:
      raise InfraError('the fake engine is gone')
    return super().step(turn)


@pytest.mark.long
def test_a_run_stops_saved_and_goes_on_when_it_is_put_right(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(guards, 'MASKED_STEPS', 3)
  training = dataclasses.replace(
    tiny_run.training(*SHORT), make_environment=Failing, max_failure_rate=1.0,
    checkpoint_every=100, tool_threads=1, max_mask_rate=0.0001,
  )  # fmt: skip
  monkeypatch.setattr(
    'agentjax.rollout.collect.collect.__kwdefaults__',
    {**train_defaults(), 'infra_retries': 0},
  )
  with pytest.raises(TooManyFailures, match='max_mask_rate.*step 7 is saved'):
    train(tmp_path, training)
  steps = recorder.read_metrics(tmp_path)
  assert [r['step'] for r in steps][-1] == 7  # 4 of the cold start, and 3
  assert any(r.get('mask_rate', 0) > 0 for r in steps)
  Failing.healthy = True
  assert train(tmp_path, training)['steps'] == 12
  assert [r['step'] for r in recorder.read_metrics(tmp_path)][-5:] == [
    8, 9, 10, 11, 12
  ]  # fmt: skip


def train_defaults():
  from agentjax.rollout.collect import collect

  return collect.__kwdefaults__


def test_the_rate_is_checked():
  with pytest.raises(ConfigError, match='max_mask_rate is 2'):
    dataclasses.replace(tiny_run.training(), max_mask_rate=2)


class Fake:
  """A pool, as the run sees it."""

  closed = False

  def stats(self):
    return self

  def metrics(self):
    return {'sandbox_calls': 7, 'sandbox_calls_p95_s': 0.5}

  def close(self):
    Fake.closed = True


def test_numbers_of_the_pools_are_in_the_records_and_the_run_closes_them(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(pools, '_shared', {('a', 'b', 1): Fake()})
  short = ('cold_start.steps=1', 'steps=1', 'use_reference=False')
  train(tmp_path, tiny_run.training(*short))
  (*_, last) = recorder.read_metrics(tmp_path)
  assert last['sandbox_calls'] == 7 and last['sandbox_calls_p95_s'] == 0.5
  assert Fake.closed and pools.metrics() == {}
