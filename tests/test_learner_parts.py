"""The learner's parts beside the policy loss: counts, scores, critic, KL."""

import functools

import jax
import numpy as np
import optax
import pytest
from fakes import trajectory
from test_learner import (
  CONFIG,
  CREDIT,
  EXAMPLES,
  close,
  learner,
  packed,
  params,
)

from agentjax import update
from agentjax.model import lora, transformer
from agentjax.rl import aggregation, correction, kl, losses
from agentjax.rl.batch import label_mask, pack, places, turn_numbers, unpack

GROUPS = np.array([0, 0, 0, 1, 1, 2])
AT = places(EXAMPLES, rows=2, length=24)


def copied(tree):
  return jax.tree.map(np.array, tree)


def stepped(l, batch, reference=None, **kw):
  state, metrics = l.update(l.init(copied(params())), batch, reference, **kw)
  gradient = jax.tree.map(
    lambda a, b: np.asarray(a) - np.asarray(b), params(), state.params
  )
  return gradient, metrics


def weighed(aggregate, rows=2, length=24):
  weights, count = aggregation.over_trajectories(
    aggregate,
    [label_mask(e) for e in EXAMPLES],
    groups=GROUPS,
    turns=[turn_numbers(e) for e in EXAMPLES],
  )
  return pack(
    EXAMPLES, CREDIT, rows=rows, length=length, weights=weights, count=count
  )


# ---- counts -----------------------------------------------------------------


@pytest.mark.parametrize(
  'aggregate',
  [
    aggregation.sequence_mean_token_mean,
    functools.partial(aggregation.sequence_mean_token_sum_norm, length=50),
    aggregation.group_mean_token_mean,
    aggregation.turn_mean_token_mean,
  ],
)
def test_aggregations_do_not_depend_on_packing_or_micro_batches(aggregate):
  base = stepped(learner(), weighed(aggregate))
  close(base, stepped(learner(6), weighed(aggregate, 6)))
  close(base, stepped(learner(1), weighed(aggregate, 1)))
  scanned = learner(micro_batches=3)
  close(base, stepped(scanned, weighed(aggregate)))


def test_a_mean_of_sequences_is_the_mean_of_their_losses():
  alone = []
  for e, c in zip(EXAMPLES, CREDIT, strict=True):
    batch = pack([e], [c], rows=2, length=24)
    alone.append(stepped(learner(), batch)[1]['loss'])
  batch = weighed(aggregation.sequence_mean_token_mean)
  found = stepped(learner(), batch)[1]
  np.testing.assert_allclose(found['loss'], np.mean(alone), rtol=1e-5)
  assert found['loss_tokens'] == (packed().weights > 0).sum()


def test_empty_micro_batches_fill_the_last_call():
  batch = packed(2)
  n = batch.tokens.shape[0] // 2
  assert n % 4  # so that some are missing
  close(stepped(learner(), batch), stepped(learner(micro_batches=4), batch))


# ---- scores -----------------------------------------------------------------


def test_log_probs_are_those_that_the_update_sees():
  l = learner()
  batch = packed()
  found = l.logprobs(l.init(copied(params())).params, batch)
  shown = batch.weights > 0
  assert not found[~shown].any() and (found[shown] < 0).all()
  # As behaviour policy they leave no gap and a ratio of 1.
  again = batch._replace(logprobs=found, old=found)
  metrics = stepped(l, again)[1]
  assert metrics['max_logprob_gap'] < 1e-6
  np.testing.assert_allclose(metrics['max_ratio'], 1, atol=1e-6)
  back = unpack(found, AT)
  assert all(len(b) == len(e) for b, e in zip(back, EXAMPLES, strict=True))
  assert (back[1][label_mask(EXAMPLES[1])] < 0).all()


def test_what_a_rejection_keeps_is_the_rows_own():
  l = learner(
    reject=(functools.partial(correction.keep_ratio, low=0.5, high=2.0),),
    stale=functools.partial(correction.keep_fresh, bound=1),
  )
  batch = packed()
  shown = batch.weights > 0
  old = np.where(batch.tokens % 2, batch.logprobs + 2, batch.logprobs)
  versions = np.where(shown, batch.tokens % 3, -1).astype(np.int32)
  kept = l.keep(batch._replace(old=old, versions=versions), 2)
  want = shown & (batch.tokens % 2 == 0) & (versions >= 1)
  np.testing.assert_array_equal(kept, want)
  assert 0 < want.sum() < shown.sum()


def test_a_correction_is_in_the_loss_and_its_sample_size_in_the_metrics():
  batch = packed()
  off = batch._replace(
    old=np.where(batch.weights > 0, batch.logprobs + 0.1 * CREDIT[0], 0)
  )
  loss = functools.partial(
    correction.decoupled,
    loss=losses.ppo_clip,
    weigh=functools.partial(correction.truncated, high=1.05),
  )
  metrics = stepped(learner(loss=loss), off)[1]
  np.testing.assert_allclose(metrics['weight'], 1.05, rtol=1e-5)
  np.testing.assert_allclose(metrics['effective_sample_size'], 1, rtol=1e-5)
  mixed = np.where(batch.tokens % 2, off.old, off.old - 3)
  metrics = stepped(learner(loss=loss), off._replace(old=mixed))[1]
  assert metrics['effective_sample_size'] < 0.9


# ---- KL ---------------------------------------------------------------------


def other():
  return jax.tree.map(lambda x: x + 0.02 * np.sign(x), copied(params()))


def test_the_weight_of_the_kl_is_data():
  l = learner(kl_coef=0.3)
  far = other()
  base = stepped(l, packed(), far)
  close(base, stepped(learner(), packed(), far, kl_coef=0.3))
  none = stepped(l, packed(), far, kl_coef=0.0)
  plain = stepped(learner(), packed())
  for a, b in zip(*map(jax.tree.leaves, (none[0], plain[0])), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-6)


def test_an_exact_kl_has_the_gradient_of_the_exact_kl():
  """Against logits of the whole batch, by JAX's own gradient."""

  batch, far = packed(), other()
  shown = batch.weights > 0
  exact = stepped(
    learner(loss=_nothing, kl_value=kl.full, kl_coef=1.0), batch, far
  )

  def logits(p):
    hidden = transformer.forward(
      p, batch.tokens, batch.positions, batch.pack_ids, CONFIG
    )
    z = transformer.logits(p, hidden, CONFIG)
    return jax.nn.log_softmax(z, -1)

  away = logits(far)

  def mean(p):
    new = logits(p)
    each = (jax.numpy.exp(new) * (new - away)).sum(-1)
    return jax.numpy.where(shown[:, 1:], each[:, :-1], 0).sum() / shown.sum()

  value, gradient = jax.value_and_grad(mean)(params())
  np.testing.assert_allclose(exact[1]['kl'], value, rtol=1e-4)
  for a, b in zip(*map(jax.tree.leaves, (exact[0], gradient)), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize('value', [kl.k1, kl.k3])
def test_off_policy_the_kl_is_that_of_the_policy_in_expectation(value):
  """Each id once, weighed by how often another policy samples it."""
  ids = np.arange(CONFIG.vocab_size)
  made = [trajectory([('p', [5, 6, 7]), ('m', [y])], str(y)) for y in ids]
  options = {'rows': 2, 'length': 4 * len(ids) // 2}
  state = np.array([[5, 6, 7]])

  def at(p):
    hidden = transformer.forward(
      p, state, np.arange(3)[None], np.ones((1, 3), int), CONFIG
    )
    z = transformer.logits(p, hidden, CONFIG)[0, -1]
    return jax.nn.log_softmax(z)[: len(ids)]

  far, sampler = other(), params(1)
  mu = np.asarray(at(sampler))
  weights = [np.array([0, 0, 0, p]) for p in np.exp(mu)]
  batch = pack(made, [0.0] * len(ids), weights=weights, count=1.0,
               old=[np.array([0, 0, 0, x]) for x in mu], **options)  # fmt: skip
  l = learner(loss=_nothing, kl_value=value, kl_coef=1.0, **options)
  found, metrics = stepped(l, batch, far)

  def exact(p):
    new = at(p)
    return (jax.numpy.exp(new) * (new - at(far))).sum()

  want, gradient = jax.value_and_grad(exact)(params())
  np.testing.assert_allclose(metrics['loss'], want, rtol=1e-4)
  for a, b in zip(*map(jax.tree.leaves, (found, gradient)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-6)


def test_a_kl_to_nobody_is_refused():
  l = learner(kl_coef=0.3)
  state = l.init(copied(params()))
  with pytest.raises(ValueError, match='kl_coef is 0.3, and there is no ref'):
    l.update(state, packed())
  with pytest.raises(ValueError, match='kl_coef is nan'):
    l.update(state, packed(), other(), kl_coef=np.nan)


def _nothing(logprobs_N, tokens):
  return losses.policy_loss(logprobs_N * 0.0, tokens)


# ---- critic -----------------------------------------------------------------


def with_values(batch, seed=0):
  rng = np.random.default_rng(seed)
  shown = batch.weights > 0
  returns = np.where(shown, rng.normal(1, 1, shown.shape), 0)
  return batch._replace(
    returns=returns.astype(np.float32),
    values=np.zeros(shown.shape, np.float32),
  )


def critics(**kw):
  return learner(critic=_critic(**kw))


@functools.cache
def _critic(**kw):
  return update.Critic(optimizer=optax.sgd(1.0), **kw)


@pytest.mark.parametrize('own_trunk', [False, True])
def test_values_are_those_that_the_update_sees(own_trunk):
  l = critics(own_trunk=own_trunk)
  state = l.init(copied(params()))
  batch = with_values(packed())
  assert not l.values(state, batch).any()
  state, first = l.update(state, batch)
  shown = batch.weights > 0
  np.testing.assert_allclose(
    first['value_loss'], (batch.returns[shown] ** 2).mean() / 2, rtol=1e-5
  )
  after = l.values(state, batch)
  before = np.pad(after, ((0, 0), (1, 0)))[:, :-1]
  error = batch.returns[shown] - before[shown]
  state, second = l.update(state, batch)
  np.testing.assert_allclose(
    second['value_loss'], (error**2).mean() / 2, rtol=1e-4
  )
  share = 1 - error.var() / batch.returns[shown].var()
  np.testing.assert_allclose(second['explained_variance'], share, atol=1e-4)
  # Where returns are all alike there is nothing to explain.
  alike = np.where(shown, 0.3, 0).astype(np.float32)
  _, third = l.update(state, batch._replace(returns=alike))
  assert third['explained_variance'] == 0


def test_a_critic_of_its_own_or_detached_leaves_the_policy_alone():
  batch = with_values(packed())
  plain = stepped(learner(), batch)
  for kw in ({'own_trunk': True}, {'detach': True}):
    found = stepped(critics(**kw), batch)
    for a, b in zip(*map(jax.tree.leaves, (found[0], plain[0])), strict=True):
      np.testing.assert_allclose(a, b, atol=2e-6)
  # A head of zeros sends nothing back; one that has moved does.
  l = critics()
  state, _ = l.update(l.init(copied(params())), batch)
  state = state._replace(params=jax.device_put(copied(params())))
  moved = copied(l.update(state, batch)[0].params)
  alone = copied(l.update(l.init(copied(params())), batch)[0].params)
  leaves = zip(*map(jax.tree.leaves, (moved, alone)), strict=True)
  assert max(np.abs(a - b).max() for a, b in leaves) > 1e-3


def test_the_warm_up_moves_the_critic_alone():
  l = learner(critic=_critic(warmup=2), optimizer=optax.adam(0.1))
  state = l.init(copied(params()))
  batch = with_values(packed())
  for i in range(3):
    before = copied(state)
    state, metrics = l.update(state, batch)
    same = all(
      np.array_equal(a, b)
      for a, b in zip(
        jax.tree.leaves((before.params, before.opt_state)),
        jax.tree.leaves((state.params, state.opt_state)),
        strict=True,
      )
    )
    assert same == (i < 2)
    kernel = before.critic['value']['kernel']
    assert not np.array_equal(kernel, state.critic['value']['kernel'])
    assert int(state.step) == i + 1 and metrics['critic_grad_norm'] > 0


def test_a_critic_of_turns_learns_at_their_ends():
  batch = with_values(packed())
  l = critics(turn_ends=True)
  ends = np.zeros(batch.weights.shape, bool)
  for row, (ids, turns) in enumerate(
    zip(batch.pack_ids, batch.turns, strict=True)
  ):
    for t in range(len(ids)):
      following = (ids[t + 1], turns[t + 1]) if t + 1 < len(ids) else (0, 0)
      ends[row, t] = turns[t] > 0 and (ids[t], turns[t]) != following
  _, metrics = l.update(l.init(copied(params())), batch)
  np.testing.assert_allclose(
    metrics['value_loss'], (batch.returns[ends] ** 2).mean() / 2, rtol=1e-5
  )


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_values_and_returns_under_the_mask_have_no_effect(bad):
  batch = with_values(packed())
  hidden = batch.weights == 0
  spoiled = batch._replace(
    returns=np.where(hidden, bad, batch.returns),
    values=np.where(hidden, bad, batch.values),
    old=np.where(hidden, bad, batch.old),
  )
  l = critics()
  a, b = (l.update(l.init(copied(params())), x) for x in (batch, spoiled))
  jax.tree.map(np.testing.assert_array_equal, copied(a), copied(b))


def test_a_critic_with_an_update_that_is_not_finite_skips_it_too():
  l = critics()
  batch = packed()
  state = l.init(copied(params()))
  broken = batch._replace(
    returns=np.where(batch.weights > 0, np.inf, 0).astype(np.float32)
  )
  before = copied(state)
  state, metrics = l.update(state, broken)
  assert metrics['skipped_updates'] == 1
  jax.tree.map(
    np.testing.assert_array_equal, before.critic, copied(state.critic)
  )
  jax.tree.map(
    np.testing.assert_array_equal, before.params, copied(state.params)
  )


def test_bad_critics_are_refused():
  with pytest.raises(ValueError, match='critic.detach'):
    update.Critic(optax.sgd(1.0), own_trunk=True, detach=True)
  with pytest.raises(ValueError, match='coef is -1'):
    update.Critic(optax.sgd(1.0), coef=-1.0)
  with pytest.raises(ValueError, match='coef is 0'):
    update.Critic(optax.sgd(1.0), coef=0.0)
  with pytest.raises(ValueError, match="critic.clip is '0.5': give a finite"):
    update.Critic(optax.sgd(1.0), clip='0.5')
  with pytest.raises(ValueError, match='turn_ends with learner.trees'):
    learner(critic=_critic(turn_ends=True), trees=True)


# ---- adapters ---------------------------------------------------------------


def test_adapters_are_trained_and_nothing_else():
  shape = lora.LoRA(rank=2, alpha=4.0)
  l = learner(lora=shape, optimizer=optax.sgd(5.0))
  batch = packed()
  frozen = copied(params())
  state = l.begin(jax.tree.map(np.array, frozen), seed=0)
  # They begin as the frozen policy.
  plain = learner()
  want = plain.logprobs(copied(params()), batch)
  np.testing.assert_array_equal(l.logprobs(state.params, batch), want)
  held = copied(state.params)
  state, first = l.update(state, batch, held)
  state, second = l.update(state, batch, held)
  assert first['kl'] == 0 < second['kl']
  assert second['loss'] < first['loss']
  jax.tree.map(np.testing.assert_array_equal, frozen, copied(l.frozen))
  merged = lora.merge(l.frozen, state.params, scale=shape.scale)
  np.testing.assert_allclose(
    l.logprobs(state.params, batch), plain.logprobs(merged, batch), atol=1e-5
  )
  assert lora.count(state.params) < 0.5 * transformer.n_params(CONFIG)


def test_a_critic_beside_adapters_shares_their_trunk():
  shape = lora.LoRA(rank=2, alpha=4.0)
  l = learner(lora=shape, critic=update.Critic(optax.adam(1e-2)))
  state = l.begin(copied(params()), seed=0)
  batch = with_values(packed())
  state, first = l.update(state, batch)
  state, second = l.update(state, batch)
  assert second['value_loss'] < first['value_loss']
  with pytest.raises(ValueError, match='own_trunk trains a decoder'):
    learner(lora=shape, critic=_critic(own_trunk=True))


def test_what_is_no_critic_and_no_adapters_is_refused():
  with pytest.raises(ValueError, match="critic.optimizer is .*'call'"):
    update.Critic(optimizer=functools.partial(optax.sgd, 1.0))
  with pytest.raises(ValueError, match=r"learner.lora is .*'call': '.*LoRA'"):
    learner.__wrapped__(lora={'rank': 4})
  with pytest.raises(ValueError, match=r"learner.critic is .*update.Critic'"):
    learner.__wrapped__(critic=functools.partial(update.Critic))
