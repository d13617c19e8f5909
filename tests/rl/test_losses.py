"""Losses by hand, at the mask, and against one another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.rl import kl, losses

BAD = [jnp.nan, jnp.inf, -jnp.inf, 1e38]
LOSSES = [losses.ppo_clip, losses.reinforce, losses.cross_entropy]


def data(seed=0, n=12):
  rng = np.random.default_rng(seed)
  new, old = rng.normal(size=(2, n)) - 2
  return (
    jnp.asarray(new, jnp.float32),
    jnp.asarray(old, jnp.float32),
    jnp.asarray(rng.normal(size=n), jnp.float32),
    jnp.asarray(rng.random(n) < 0.6),
  )


def test_ppo_by_hand():
  new = jnp.log(jnp.array([1.5, 1.5, 0.5, 0.5, 1.1]))
  advantages = jnp.array([1.0, -1.0, 1.0, -1.0, 2.0])
  out = losses.ppo_clip(
    new, jnp.zeros(5), advantages, jnp.ones(5, bool), clip_high=0.28
  )
  np.testing.assert_allclose(out.loss_N, [-1.28, 1.5, -0.5, 0.8, -2.2], 1e-6)
  np.testing.assert_array_equal(out.clipped_N, [1, 0, 0, 1, 0])


@pytest.mark.parametrize('loss', LOSSES)
@pytest.mark.parametrize('bad', BAD)
def test_what_the_mask_hides_has_no_effect(loss, bad):
  new, old, advantages, mask = data()

  def total(new, old, advantages):
    per_token = loss(new, old, advantages, mask).loss_N
    return losses.weighted(per_token, mask * 1.0).mean()

  value, grad = jax.value_and_grad(total)(new, old, advantages)
  spoiled = [jnp.where(mask, x, bad) for x in (new, old, advantages)]
  value2, grad2 = jax.value_and_grad(total)(*spoiled)
  assert value2 == value
  np.testing.assert_array_equal(grad, grad2)
  assert not np.asarray(grad)[~np.asarray(mask)].any()


@pytest.mark.parametrize('loss', LOSSES)
def test_an_empty_mask_gives_zero(loss):
  new, old, advantages, _ = data()
  mask = jnp.zeros(12, bool)

  def total(new):
    per_token = loss(new, old, advantages, mask).loss_N
    return losses.weighted(per_token, mask * 1.0).mean()

  value, grad = jax.value_and_grad(total)(new)
  assert value == 0 and not np.asarray(grad).any()


def test_on_policy_ppo_is_reinforce():
  new, _, advantages, mask = data()
  grads = [
    jax.grad(
      lambda x, loss=loss: losses.hide(
        loss(x, new, advantages, mask).loss_N, mask
      ).sum()
    )(new)
    for loss in (losses.ppo_clip, losses.reinforce)
  ]
  np.testing.assert_allclose(*grads, atol=1e-7)


def test_means_do_not_depend_on_the_split():
  """100 tokens at 2.0 and 900 at 0.5: 0.65 for every split, not 1.25."""
  x = jnp.array([2.0] * 100 + [0.5] * 900)
  for size in (1000, 500, 100):
    pairs = [
      losses.weighted(x[i : i + size], jnp.ones(size))
      for i in range(0, 1000, size)
    ]
    total = jax.tree.map(lambda *p: sum(p), *pairs)
    np.testing.assert_allclose(total.mean(), 0.65, rtol=1e-6)


def test_huge_ratios_stay_finite():
  new, old = jnp.array([0.0, -500.0]), jnp.array([-500.0, 0.0])
  out = losses.ppo_clip(new, old, jnp.array([-1.0, -1.0]), jnp.ones(2, bool))
  np.testing.assert_allclose(out.loss_N[0], np.exp(20.0), rtol=1e-5)
  assert np.isfinite(np.asarray(out.loss_N)).all()


def test_kl_estimators_in_exact_expectation():
  """Over all 7 tokens of a categorical, on-policy: the facts of A5."""
  rng = np.random.default_rng(3)
  theta = jnp.asarray(rng.normal(size=7), jnp.float32)
  ref = jax.nn.log_softmax(jnp.asarray(rng.normal(size=7), jnp.float32))
  mask = jnp.ones(7, bool)

  def reverse(theta):
    lp = jax.nn.log_softmax(theta)
    return jnp.sum(jnp.exp(lp) * (lp - ref))

  def forward(theta):
    return jnp.sum(jnp.exp(ref) * (ref - jax.nn.log_softmax(theta)))

  def expected_gradient(estimator):
    p = jax.lax.stop_gradient(jax.nn.softmax(theta))

    def loss(theta):
      lp = jax.nn.log_softmax(theta)
      return jnp.sum(p * estimator(lp))

    return jax.grad(loss)(theta)

  np.testing.assert_allclose(
    expected_gradient(lambda lp: kl.k1(lp, ref, mask)), 0, atol=1e-6
  )
  np.testing.assert_allclose(
    expected_gradient(lambda lp: kl.k2(lp, ref, mask)),
    jax.grad(reverse)(theta),
    atol=1e-6,
  )
  np.testing.assert_allclose(
    expected_gradient(lambda lp: kl.k3(lp, ref, mask)),
    jax.grad(forward)(theta),
    atol=1e-6,
  )
  np.testing.assert_allclose(
    expected_gradient(
      lambda lp: kl.ratio_gradient(kl.k3(lp, ref, mask), lp, mask)
    ),
    jax.grad(reverse)(theta),
    atol=1e-6,
  )
  p = jax.nn.softmax(theta)
  lp = jnp.log(p)
  for estimator in (kl.k1, kl.k3):
    np.testing.assert_allclose(
      jnp.sum(p * estimator(lp, ref, mask)), reverse(theta), rtol=1e-5
    )


@pytest.mark.parametrize('estimator', [kl.k1, kl.k2, kl.k3])
def test_kl_ignores_what_the_mask_hides(estimator):
  new, old, _, mask = data(5)

  def total(new, old):
    return estimator(new, old, mask).sum()

  value, grads = jax.value_and_grad(total, (0, 1))(new, old)
  for bad in BAD:
    spoiled = [jnp.where(mask, x, bad) for x in (new, old)]
    value2, grads2 = jax.value_and_grad(total, (0, 1))(*spoiled)
    assert value == value2
    jax.tree.map(np.testing.assert_array_equal, grads, grads2)
