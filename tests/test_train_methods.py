"""Whole runs with the learner's other parts, and the configs that are refused.

Each run is taken back to its last but one checkpoint and goes on from there:
what critic, controller and reference had become must come back with it.
"""

import dataclasses
import functools
import shutil

import numpy as np
import optax
import pytest
import tiny_run

from agentjax import anchor, recorder, references, storage, update
from agentjax.model import lora
from agentjax.rl import (
  advantages,
  aggregation,
  correction,
  kl,
  losses,
  regression,
  returns,
  seam,
  shaping,
  trees,
  turns,
)
from agentjax.rollout import branches, sampling
from agentjax.train import train
from agentjax.training import ConfigError, parts

SMALL = ('cold_start.steps=6', 'steps=4', 'evaluation.tasks.n=2', 'pages=False')


def of(base, **learner):
  """The options of a tiny run, with others for its learner."""
  return dataclasses.replace(
    base, learner=functools.partial(base.learner, **learner)
  )


def critic(**kw):
  return update.Critic(optax.adam(1e-2), **kw)


def ppo(base):
  return dataclasses.replace(
    of(base, critic=critic(warmup=2, clip=0.5)),
    advantages=functools.partial(returns.gae, lam=0.95),
    value_targets=functools.partial(returns.value_targets, lam=1.0),
    group_size=1,
    groups=8,
    use_reference=True,
    reward_kl_coef=0.1,
    kl_control=functools.partial(kl.adapted, target=0.01, horizon=100),
  )


def turn_ppo(base):
  return dataclasses.replace(
    of(base, critic=critic(own_trunk=True, turn_ends=True)),
    advantages=turns.turn_gae,
    value_targets=functools.partial(returns.value_targets, lam=1.0),
    use_reference=False,
  )


def decoupled(base):
  loss = functools.partial(
    correction.decoupled, loss=losses.ppo_clip, weigh=correction.icepop
  )
  keep = functools.partial(
    correction.keep_divergence, divergence=correction.k3, high=1e-4
  )
  return dataclasses.replace(
    of(
      base,
      loss=loss,
      reject=(keep,),
      stale=functools.partial(correction.keep_fresh, bound=0),
      kl_coef=0.1,
      kl_value=kl.full,
      micro_batches=2,
    ),
    aggregation=aggregation.sequence_mean_token_mean,
    rejected=aggregation.over_effective,
    recompute_old=True,
    move_reference=functools.partial(references.moving_average, decay=0.5),
    shape=functools.partial(shaping.overlong, limit=12, buffer=8),
    select=shaping.informative,
  )


def adapted(base):
  return dataclasses.replace(
    of(base, lora=lora.LoRA(rank=4, alpha=8.0), kl_coef=0.1),
    use_reference=True,
  )


def truncated(base):
  return dataclasses.replace(
    of(base, kl_coef=0.1, kept=8),
    engine=functools.partial(base.engine, kept=8),
    sampling=sampling.Sampling(temperature=0.9, top_k=8, top_p=0.9),
    use_reference=True,
  )


LONG = (turn_ppo, adapted, truncated)
EACH = pytest.mark.parametrize(
  'method',
  [ppo, decoupled] + [pytest.param(m, marks=pytest.mark.long) for m in LONG],
)


def rows(workdir):
  return [
    {k: v for k, v in r.items() if 'seconds' not in k and '_per_' not in k}
    for r in recorder.read_metrics(workdir)
    if r['phase'] == 'reinforcement'
  ]


@EACH
def test_a_run_goes_on_as_if_it_had_not_stopped(method, tmp_path, capsys):
  base = tiny_run.training(*SMALL)
  whole = method(base)
  summary = train(tmp_path / 'a', whole)
  # As one that was killed before its last checkpoint: it had made all records.
  shutil.copytree(tmp_path / 'a', tmp_path / 'b')
  (tmp_path / 'b/summary.json').unlink()
  shutil.rmtree(tmp_path / 'b/checkpoints' / str(summary['steps']))
  train(tmp_path / 'b', whole)
  assert 'going on after step 8 of' in capsys.readouterr().out
  assert summary['compilations_after_warmup'] == 0
  assert summary['max_logprob_gap'] < 1e-4
  a, b = rows(tmp_path / 'a'), rows(tmp_path / 'b')
  assert len(a) == len(b) == 4
  timed = {'slot_occupancy', 'rows_parked', 'parked_bytes'}
  for x, y in zip(a, b, strict=True):
    assert {k: v for k, v in x.items() if k not in timed} == {
      k: v for k, v in y.items() if k not in timed
    }
  if method is ppo:
    # The two updates of the first step move the critic alone, so that the KL
    # stays 0 and its weight shrinks; a policy that has moved has one.
    assert [r['kl'] for r in a[:2]] == [0.0, 0.0] and a[2]['kl'] != 0.0
    assert a[1]['kl_coef'] < a[0]['kl_coef'] == 0.1
    assert a[3]['value_loss'] > 0 and a[3]['explained_variance'] != 0
  if method is decoupled:
    assert all(0 <= r['rejected_tokens'] < 1 for r in a)
    assert all(0 < r['effective_sample_size'] <= 1 + 1e-6 for r in a)
    # Against its own average, half of the way behind.
    assert a[1]['kl'] > 0 and 0 < a[0]['chosen'] <= 1

  if method is truncated:
    assert all(np.isfinite(r['entropy']) for r in a) and a[2]['kl'] > 0
    groups, _ = recorder.read_trajectories(tmp_path / 'b', summary['steps'])
    turns = [s for g in groups for t in g.trajectories for s in t.turns]
    assert turns and all(s.kept.shape == (len(s), 8) for s in turns)
    assert min(s.log_kept_mass.min(initial=0) for s in turns) < -0.01
  if method is adapted:
    assert a[1]['kl'] > 0
    # Adapters of another shape do not go on from these.
    other = of(base, lora=lora.LoRA(rank=2, alpha=8.0), kl_coef=0.1)
    with pytest.raises(storage.WorkdirMismatch, match='lora'):
      train(tmp_path / 'a', dataclasses.replace(other, steps=5))


def refused(tmp_path, training, match):
  with pytest.raises(ConfigError, match=match):
    train(tmp_path, training)


def test_truncation_that_the_learner_cannot_follow_is_refused(tmp_path):
  base = tiny_run.training(*SMALL)
  change = dataclasses.replace
  whole = truncated(base)
  other = functools.partial(base.engine, kept=16)
  few = sampling.Sampling(top_k=9)
  for training, match in (
    (change(whole, engine=base.engine), 'engine.kept is 0 and .*kept 8'),
    (change(whole, learner=base.learner), 'engine.kept is 8 and .*kept 0'),
    (change(whole, engine=other), 'engine.kept is 16 and .*kept 8'),
    (change(whole, sampling=few), 'at least top_k 9; or truncate in eval'),
    (of(whole, kept=-1), 'learner.kept is -1'),
    (change(whole, engine=functools.partial(base.engine, kept=-1)), 'kept -1'),
    (
      change(whole, evaluation=change(base.evaluation, sampling=few)),
      'evaluation.sampling .*top_k=9.* more than the 8 ids',
    ),
  ):
    refused(tmp_path, training, match)
  for endless in ({'top_p': 0.9}, {'min_p': 0.1}):
    with pytest.raises(ConfigError, match='give top_k too, and engine.kept'):
      change(whole, sampling=sampling.Sampling(**endless))
  with pytest.raises(ConfigError, match='temperature is 0'):
    change(whole, sampling=sampling.Sampling(0.0, top_k=8))


def test_an_estimator_that_lacks_its_data_is_refused(tmp_path):
  base = tiny_run.training(*SMALL)
  change = functools.partial(dataclasses.replace, base)
  refused(tmp_path, change(advantages=returns.gae), 'values.*learner.critic')
  refused(tmp_path, change(advantages=trees.vineppo), 'needs turn_values')


def test_what_a_function_refuses_is_refused_before_the_cold_start(tmp_path):
  base = tiny_run.training(*SMALL)
  change = functools.partial(dataclasses.replace, base)
  held = functools.partial(change, use_reference=True)
  bind = functools.partial
  for match, options in (
    ('aggregation: length is 0', {'aggregation': bind(
      aggregation.sequence_mean_token_sum_norm, length=0)}),
    ('select: gives .0, 1. for two', {'select': lambda r, g, v: [0, 1]}),
  ):  # fmt: skip
    with pytest.raises(ConfigError, match=match):
      change(**options)
  with pytest.raises(ConfigError, match='move_reference: decay is 1.5'):
    held(move_reference=bind(references.moving_average, decay=1.5))
  for match, learner in (
    ('learner.loss: dual_clip is 0.5', {
      'loss': bind(losses.ppo_clip, dual_clip=0.5)}),
    ('learner.loss: clip_low is -0.2', {
      'loss': bind(losses.ppo_clip, clip_low=-0.2)}),
    ('learner.loss: this loss regresses', {'loss': regression.webrl}),
    ('stale: keep_fresh with bound -1', {
      'stale': bind(correction.keep_fresh, bound=-1)}),
    ('keep_ratio with low -1', {
      'reject': (bind(correction.keep_ratio, low=-1.0, high=2.0),)}),
    ('set recompute_old', {
      'reject': (bind(correction.keep_ratio, low=0.5, high=2.0),)}),
    ('set recompute_old', {
      'loss': bind(correction.decoupled, loss=losses.ppo_clip,
                   weigh=correction.truncated)}),
  ):  # fmt: skip
    refused(tmp_path, of(change(use_reference=False), **learner), match)
  # Where the KL is in the reward, no update sees the reference.
  rewarded = held(
    advantages=returns.returns, reward_kl_coef=0.1
  )  # fmt: skip
  refused(tmp_path, of(rewarded, loss=regression.webrl), 'loss regresses')


def test_a_kl_in_a_reward_that_nobody_looks_at_is_refused(tmp_path):
  base = tiny_run.training(*SMALL)
  change = functools.partial(
    dataclasses.replace, base, use_reference=True, reward_kl_coef=0.1
  )
  for estimator in (advantages.rloo, advantages.grpo, turns.turn_returns):
    refused(tmp_path, change(advantages=estimator), 'scores of seam.total')
  for estimator in (
    functools.partial(advantages.rloo, scores=seam.total),
    functools.partial(advantages.grpo, scores=seam.total),
    advantages.reinforce_plus_plus,
  ):
    parts(change(advantages=estimator))


def test_parts_of_rewards_are_the_verifiers_to_know():
  base = tiny_run.training(*SMALL)
  weights = {'format': 0.5, 'answer': 1.0}
  gdpo = functools.partial(advantages.gdpo, weights=weights)
  parts(dataclasses.replace(base, advantages=gdpo))


def test_a_critic_that_would_learn_the_wrong_thing_is_refused(tmp_path):
  base = of(tiny_run.training(*SMALL), critic=critic())
  change = functools.partial(dataclasses.replace, base)
  ends = change(advantages=turns.turn_gae,
                value_targets=turns.turn_value_targets)  # fmt: skip
  refused(tmp_path, ends, 'set learner.critic.turn_ends')
  parts(of(ends, critic=critic(turn_ends=True)))
  refused(tmp_path, base, 'predicts values that these advantages do not read')
  read = (returns.gae, turns.turn_gae, turns.bi_level_gae)
  for estimator in read:
    parts(of(change(advantages=estimator), critic=critic(turn_ends=True)))
  late = of(change(advantages=returns.gae), critic=critic(warmup=8))
  refused(tmp_path, late, 'warmup is 8, and the run has 8 updates')


def test_a_gradient_of_nothing_is_refused(tmp_path):
  base = dataclasses.replace(tiny_run.training(*SMALL), use_reference=True)
  limited = functools.partial(kl.ratio_gradient, limit=3.0)
  for value, options, own in (
    (kl.k2, {}, 'k2_gradient'),
    (kl.k2, {'kl_gradient': limited}, 'k2_gradient'),
    (kl.absolute, {}, 'naive_gradient'),
  ):
    options |= {'kl_value': value}
    refused(tmp_path, of(base, kl_coef=0.1, **options), f'kl_value: .*{own}')
    parts(of(base, kl_coef=0.0, **options))
    options['kl_gradient'] = getattr(kl, own)
    parts(of(base, kl_coef=0.1, **options))


def test_a_group_of_one_with_branches_is_refused_and_says_why():
  options = {'group_size': 1, 'groups': 8, 'advantages': trees.tree_grpo}
  base = tiny_run.training(*SMALL)
  with pytest.raises(ConfigError, match='group_size is 1, .*a single turn has'):
    dataclasses.replace(base, branch=branches.grow, **options)
  with pytest.raises(ConfigError, match='all would be 0'):
    dataclasses.replace(base, **options)


def test_a_controller_that_would_end_in_no_number_is_refused(tmp_path):
  base = of(tiny_run.training(*SMALL), kl_coef=0.1)
  change = functools.partial(dataclasses.replace, base, use_reference=True)
  for match, options in (
    ('makes -', {'target': 0.1, 'horizon': 2}),
    ('target is 0', {'target': 0, 'horizon': 100}),
  ):
    control = functools.partial(kl.adapted, **options)
    refused(tmp_path, change(kl_control=control), f'kl_control: {match}')


def test_an_update_that_was_skipped_leaves_the_coefficient_alone():
  base = of(tiny_run.training(*SMALL), kl_coef=0.1)
  control = functools.partial(kl.adapted, target=0.1, horizon=100)
  o = dataclasses.replace(base, use_reference=True, kl_control=control)

  class Learner:
    kl_coef = 0.1

  held = anchor.Anchor(o, Learner())
  held.after_update({'kl': np.nan}, 12)
  assert held.kl_coef == 0.1
  held.after_update({'kl': 9.0}, 12)
  np.testing.assert_allclose(held.kl_coef, 0.1 * (1 + 0.2 * 0.12))
  with pytest.raises(ValueError, match='kl_control makes -'):
    held.after_update({'kl': 0.0}, 1000)
  # Only one that is controlled goes on from a checkpoint.
  held.restore(None, 0.7)
  assert held.kl_coef == 0.7
  plain = anchor.Anchor(dataclasses.replace(o, kl_control=None), Learner())
  plain.restore(None, 0.7)
  assert plain.kl_coef == 0.1


def test_a_kl_without_a_place_or_in_two_is_refused(tmp_path):
  base = tiny_run.training(*SMALL)
  held = of(base, kl_coef=0.1)
  change = dataclasses.replace
  refused(tmp_path, change(held, use_reference=False), 'without a reference')
  for name, value in (
    ('reward_kl_coef', 0.1),
    ('move_reference', references.moving_average),
  ):
    with pytest.raises(ConfigError, match=f'{name} without a reference'):
      change(base, use_reference=False, **{name: value})
  refused(tmp_path, change(held, reward_kl_coef=0.1), 'the KL has one place')
  control = functools.partial(kl.adapted, target=0.1, horizon=10)
  refused(tmp_path, change(base, kl_control=control), 'kl_control has no')
  with pytest.raises(ConfigError, match='reward_kl_coef is nan'):
    change(base, reward_kl_coef=np.nan)


def test_a_loss_that_is_none_is_refused_and_that_of_the_readme_is_one(tmp_path):
  base = tiny_run.training(*SMALL)
  for loss in (lambda logprobs_N, tokens: -logprobs_N, lambda *_: 0.0):
    refused(tmp_path, of(base, loss=loss), 'learner.loss.*PolicyLoss')
  text = (tiny_run.ROOT / 'README.md').read_text('utf-8')
  code = text.split('```python\n')[1].split('```')[0]
  space = {}
  exec(code, space)
  train(tmp_path, of(dataclasses.replace(base, steps=1), loss=space['squared']))
