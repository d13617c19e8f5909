"""More losses by hand: where they clip, gate and drop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made import made

from agentjax.rl import surrogates
from agentjax.rl.losses import Tokens

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def tokens(advantages, old=0.0, sequences=None):
  n = len(advantages)
  ids = jnp.array(sequences or [0] * n, jnp.int32)
  return Tokens(
    jnp.ones(n, bool), jnp.zeros(n) + old, jnp.array(advantages), ids, ids
  )


def test_gmpo_by_hand():
  """Clipped at +-0.4 in the log, on the pessimistic side alone."""
  new = jnp.array([0.9, -0.9, 0.9, -0.9])
  out = surrogates.gmpo(new, tokens([2.0, 2.0, -1.0, -1.0], 0.0, [0, 0, 1, 1]))
  # A > 0: min of 0.9, 0.4 and of -0.9, -0.4; A < 0: max of each.
  good, bad = np.exp((0.4 - 0.9) / 2), np.exp((0.9 - 0.4) / 2)
  close(out.loss_N, [-2 * good, -2 * good, bad, bad])
  np.testing.assert_array_equal(out.high_N, [1, 1, 0, 0])
  np.testing.assert_array_equal(out.low_N, [0, 0, 1, 1])


def test_gmpo_takes_the_geometric_mean_of_weights():
  new = jnp.zeros(2)
  given = tokens([1.0, 1.0])._replace(weights=jnp.array([2.0, 8.0]))
  close(surrogates.gmpo(new, given).loss_N, [-4, -4])
  given = given._replace(weights=jnp.array([2.0, 0.0]))
  close(surrogates.gmpo(new, given).loss_N, [0, 0])


def test_sapo_is_a_gate_that_closes_softly():
  given = tokens([1.0, -1.0])
  gradient = jax.grad(lambda x: surrogates.sapo(x, given).loss_N.sum())
  # At r = 1 it is REINFORCE; far off it is nothing.
  close(gradient(jnp.zeros(2)), [-1, 1])
  close(gradient(jnp.full(2, 4.0)), [0, 0], atol=1e-6)
  half = gradient(jnp.log(jnp.array([2.0, 2.0])))
  gate = 1 / (1 + np.exp(-1.0))
  close(half[0], -4 * gate * (1 - gate) * 2)
  with pytest.raises(ValueError, match='tau_negative 0'):
    surrogates.sapo(jnp.zeros(2), given, tau_negative=0)


def test_dppo_drops_what_moved_on_and_keeps_what_moved_back():
  old = jnp.log(jnp.array([0.5, 0.5, 0.5, 0.5]))
  new = jnp.log(jnp.array([0.7, 0.7, 0.3, 0.3]))
  given = tokens([1.0, -1.0, 1.0, -1.0], old)
  for loss in (surrogates.dppo_tv, surrogates.dppo_kl):
    out = loss(new, given, low=0.05, high=0.05)
    np.testing.assert_array_equal(out.clipped_N, [1, 0, 0, 1])
    np.testing.assert_array_equal(out.high_N, [1, 0, 0, 0])
    wide = loss(new, given, low=0.25, high=0.25)
    assert not wide.clipped_N.any()
    free = functools.partial(loss, tokens=given, low=9.0, high=9.0, cap=1.2)
    gradient = jax.grad(lambda x, f=free: f(x).loss_N.sum())(new)
    close(gradient, [-1.2, 1.2, -0.6, 0.6])


def test_clip_cov_drops_a_share_of_those_in_the_band():
  new, given = made(1)
  given = given._replace(weights=None)
  options = {'clip_low': 9.0, 'clip_high': 9.0, 'low': -9.0, 'high': 9.0}
  n = int(given.mask.sum())
  for share, dropped in ((1e-4, 1), (0.5, n // 2), (1.0, n)):
    out = surrogates.clip_cov(new, given, share=share, **options)
    assert int(out.clipped_N.sum()) == dropped
    assert not np.asarray(out.loss_N)[np.asarray(out.clipped_N)].any()
  none = surrogates.clip_cov(new, given, share=1.0, low=50.0, high=60.0)
  assert not none.clipped_N.any()


def test_clip_cov_chooses_by_seed_and_log_prob_not_by_place():
  new, given = made(1)
  loss = functools.partial(
    surrogates.clip_cov, share=0.3, low=-9.0, high=9.0, clip_low=9.0,
    clip_high=9.0,
  )  # fmt: skip
  order = np.random.default_rng(0).permutation(24)
  moved = Tokens(*(x[order] for x in given))
  first = np.asarray(loss(new, given).clipped_N)
  np.testing.assert_array_equal(loss(new[order], moved).clipped_N, first[order])
  other = np.asarray(loss(new, given, seed=1).clipped_N)
  assert (first != other).any()


def test_kl_cov_adds_a_distance_where_the_covariance_is_largest():
  new = jnp.array([-1.0, -2.0, -3.0, -4.0])
  given = tokens([3.0, 0.0, 0.0, -1.0], -2.5)
  plain = -given.advantages * jnp.exp(new - given.old)
  # (A - 0.5)(log pi + 2.5): 3.75, -0.25, 0.25, 2.25.
  for share, extra in ((0.25, [1.5, 0, 0, 0]), (0.5, [1.5, 0, 0, 1.5])):
    out = surrogates.kl_cov(new, given, share=share, coef=2.0)
    close(out.loss_N - plain, 2 * np.array(extra))


def test_vespo_weighs_a_whole_trajectory():
  new = jnp.log(jnp.array([1.5, 2.0, 0.5, 1.0]))
  given = tokens([1.0, 1.0, -1.0, -1.0], 0.0, [0, 0, 1, 1])
  gradient = jax.grad(lambda x: surrogates.vespo(x, given).loss_N.sum())(new)
  good = 3.0**2 * np.exp(3 * (1 - 3.0))
  bad = 0.5**3 * np.exp(2 * (1 - 0.5))
  close(gradient, [-good, -good, bad, bad])
  # A trajectory's weights stand for a part of its ratio.
  given = given._replace(
    old=-jnp.log(jnp.array([1.0, 2.0, 1.0, 1.0])),
    weights=jnp.array([1.0, 0.5, 1.0, 1.0]),
  )
  again = jax.grad(lambda x: surrogates.vespo(x, given).loss_N.sum())(new)
  close(again, gradient)
