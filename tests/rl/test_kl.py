"""KL estimators in exact expectation, their clamps, and the KL in a reward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made import BAD, made

from agentjax.rl import kl

V = 7  # ids of a categorical: expectations are sums over all of them
ESTIMATORS = [kl.k1, kl.k2, kl.k3, kl.absolute]


def categorical():
  """theta, log ref and log old, each of V ids, in float64."""
  rng = np.random.default_rng(3)
  theta, ref, old = rng.normal(size=(3, V))
  ref, old = (jax.nn.log_softmax(jnp.asarray(x)) for x in (ref, old))
  return jnp.asarray(theta), ref, old


def reverse(theta, ref):
  """KL(pi || ref)."""
  lp = jax.nn.log_softmax(theta)
  return jnp.sum(jnp.exp(lp) * (lp - ref))


def forward(theta, ref):
  """KL(ref || pi)."""
  return jnp.sum(jnp.exp(ref) * (ref - jax.nn.log_softmax(theta)))


def expected(estimator, theta, sampled=None):
  """Gradient in expectation, where `sampled` (pi itself) drew the ids."""
  if sampled is None:
    sampled = jax.nn.log_softmax(theta)
  p = jnp.exp(jax.lax.stop_gradient(sampled))
  return jax.grad(
    lambda x: jnp.sum(p * estimator(jax.nn.log_softmax(x)))
  )(theta)  # fmt: skip


ALL = np.ones(V, bool)
same = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14)


def test_gradients_in_exact_expectation():
  """The table of A5, in float64, on-policy."""
  with jax.enable_x64(True):
    theta, ref, _ = categorical()
    to_reverse = jax.grad(reverse)(theta, ref)
    to_forward = jax.grad(forward)(theta, ref)
    assert np.abs(to_reverse - to_forward).max() > 0.1

    def through(value, gradient):
      return lambda lp: gradient(value(lp, ref, ALL), lp, ref, ALL)

    naive, ratio = kl.naive_gradient, kl.ratio_gradient
    same(expected(through(kl.k1, naive), theta), 0)
    same(expected(through(kl.k2, naive), theta), to_reverse)
    same(expected(through(kl.k3, naive), theta), to_forward)
    for value in (kl.k1, kl.k3):
      same(expected(through(value, ratio), theta), to_reverse)
    for value in ESTIMATORS:
      same(expected(through(value, kl.k2_gradient), theta), to_reverse)
    # k1 as a reward is the score function times a constant.
    lp = jax.nn.log_softmax(theta)
    same(expected(lambda x: x * kl.k1(lp, ref, ALL), theta), to_reverse)
    # The whole vocabulary needs no expectation.
    full = jax.grad(
      lambda x: kl.full(jax.nn.log_softmax(x)[None], ref[None], ALL[:1])[0]
    )
    same(full(theta), to_reverse)


def test_values_in_exact_expectation():
  with jax.enable_x64(True):
    theta, ref, _ = categorical()
    lp = jax.nn.log_softmax(theta)
    for value in (kl.k1, kl.k3):
      same(jnp.sum(jnp.exp(lp) * value(lp, ref, ALL)), reverse(theta, ref))
    same(kl.full(lp[None], ref[None], ALL[:1])[0], reverse(theta, ref))
    assert (np.asarray(kl.k3(lp, ref, ALL)) >= 0).all()


def test_off_policy_the_ratio_keeps_value_and_gradient():
  """Drawn by another policy: k1 and k3 with pi / pi_old; k2 is off."""
  with jax.enable_x64(True):
    theta, ref, old = categorical()
    to_reverse = jax.grad(reverse)(theta, ref)
    lp = jax.nn.log_softmax(theta)
    for value in (kl.k1, kl.k3):
      weighted = functools.partial(kl.ratio_gradient, old_N=old)
      got = expected(
        lambda x, v=value, f=weighted: f(v(x, ref, ALL), x, ref, ALL),
        theta, old,
      )  # fmt: skip
      same(got, to_reverse)
      mean = jnp.sum(jnp.exp(old) * weighted(value(lp, ref, ALL), lp, ref, ALL))
      same(mean, reverse(theta, ref))
    off = expected(lambda x: kl.k2(x, ref, ALL), theta, old)
    assert np.abs(off - to_reverse).max() > 1e-2


@pytest.mark.parametrize('estimator', ESTIMATORS)
def test_what_the_mask_hides_has_no_effect(estimator):
  new, tokens = made(5)

  def total(new, old):
    value = estimator(new, old, tokens.mask)
    out = [f(value, new, old, tokens.mask) for f in (
      kl.naive_gradient, kl.k2_gradient, kl.ratio_gradient)]  # fmt: skip
    return sum(x.sum() for x in out)

  value, grads = jax.value_and_grad(total, (0, 1))(new, tokens.old)
  for bad in BAD:
    spoiled = [jnp.where(tokens.mask, x, bad) for x in (new, tokens.old)]
    value2, grads2 = jax.value_and_grad(total, (0, 1))(*spoiled)
    assert value == value2
    jax.tree.map(np.testing.assert_array_equal, grads, grads2)


def test_the_full_kl_hides_tokens_and_ids_without_mass():
  lp = jnp.log(jnp.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [1.0, 0, 0]]))
  ref = jnp.log(jnp.array([[0.25, 0.75, 0.0], [0.2, 0.3, 0.5], [0, 1.0, 0]]))
  mask = jnp.array([1, 1, 0], bool)
  want = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
  np.testing.assert_allclose(kl.full(lp, ref, mask), [want, 0, 0], 1e-5, 1e-7)
  gradient = jax.grad(lambda x: kl.full(x, ref, mask).sum())(lp)
  assert np.isfinite(np.asarray(gradient)).all()
  assert not np.asarray(gradient)[2].any()


def test_clamps_bound_the_value_and_end_the_gradient():
  new, ref = jnp.array([-25.0, 25.0, 3.0]), jnp.zeros(3)
  mask = jnp.ones(3, bool)
  np.testing.assert_allclose(
    kl.k3(new, ref, mask)[0], np.exp(20.0) - 21, rtol=1e-5
  )
  unclipped = kl.k3(new, ref, mask, limit=None)
  np.testing.assert_allclose(unclipped[0], np.exp(25.0) - 26, rtol=1e-5)
  bounded = kl.bounded(kl.k1(new, ref, mask), 10.0)
  np.testing.assert_array_equal(bounded, [-10, 10, 3])
  gradient = jax.grad(
    lambda x: kl.bounded(kl.k3(x, ref, mask), 10.0).sum()
  )(new)  # fmt: skip
  assert gradient[0] == 0 and gradient[2] > 0.9


def test_in_a_reward_an_observation_has_no_kl():
  rewards, value = np.array([0.0, 0, 0, 1]), np.array([0.1, np.nan, 0.3, 0.2])
  mask = np.array([1, 0, 1, 1], bool)
  got = kl.in_reward(rewards, value, mask, 0.5)
  np.testing.assert_allclose(got, [-0.05, 0, -0.15, 0.9])


def test_the_controller_steps_at_most_a_fifth():
  step = functools.partial(kl.adapted, 0.1, target=6.0, n=64, horizon=1280)
  assert step(6.0) == 0.1
  np.testing.assert_allclose(step(6.6), 0.1 * (1 + 0.1 * 0.05))
  np.testing.assert_allclose(step(99.0), 0.1 * (1 + 0.2 * 0.05))
  np.testing.assert_allclose(step(0.0), 0.1 * (1 - 0.2 * 0.05))
