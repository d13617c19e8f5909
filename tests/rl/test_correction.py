"""Off-policy correction by hand: levels, weights, rejections, proximal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made import BAD, made

from agentjax.rl import correction, losses, mismatch

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)

# rho of 1, 4 and 2 in one trajectory, 8 and 1/4 in another; one token hidden.
MASK = jnp.array([1, 1, 0, 1, 1, 1], bool)
SEQUENCES = jnp.array([0, 0, 0, 0, 1, 1], jnp.int32)
RHO = jnp.array([1.0, 4.0, np.nan, 2.0, 8.0, 0.25])
AT = (jnp.log(RHO), MASK, SEQUENCES)
LEVELS = [correction.token, correction.sequence_sum, correction.sequence_mean]


def test_levels_by_hand():
  products = [8.0, 8, 0, 8, 2, 2]
  for level, want in (
    (correction.token, [1, 4, 0, 2, 8, 0.25]),
    (correction.sequence_sum, products),
    (correction.sequence_mean, [2, 2, 0, 2, 2**0.5, 2**0.5]),
    (correction.sequence_max, [4, 4, 0, 4, 8, 8]),
    (correction.sequence_min, [1, 1, 0, 1, 0.25, 0.25]),
  ):
    close(correction.importance(*AT, level=level), want)
  # A product beyond e^20 is clipped as a whole, not by token.
  far = jnp.array([15.0, 15, 0, -15, 30, 0]), MASK, SEQUENCES
  got = correction.importance(*far, level=correction.sequence_sum)
  close(got, np.exp([15.0, 15, -np.inf, 15, 20, 20]))


def test_truncation_and_icepop():
  close(correction.truncated(*AT), [1, 2, 0, 2, 2, 0.25])
  close(correction.truncated(*AT, low=0.5), [1, 2, 0, 2, 2, 0.5])
  got = correction.truncated(*AT, level=correction.sequence_sum, high=5.0)
  close(got, [5, 5, 0, 5, 2, 2])
  close(correction.icepop(*AT), [1, 4, 0, 2, 0, 0])
  got = correction.icepop(*AT, level=correction.sequence_sum)
  close(got, [0, 0, 0, 0, 2, 2])


@pytest.mark.parametrize('level', LEVELS)
def test_icepop_without_bounds_is_plain_importance_sampling(level):
  """And so is truncation: invariant 12."""
  plain = correction.importance(*AT, level=level)
  everything = {'level': level, 'low': 0.0, 'high': jnp.inf}
  np.testing.assert_array_equal(correction.icepop(*AT, **everything), plain)
  np.testing.assert_array_equal(correction.truncated(*AT, **everything), plain)


def test_normalized_weights_have_the_mean_1():
  weights = correction.truncated(*AT)
  mean = correction.mean_weight(weights, MASK)
  close(mean, 7.25 / 5)
  out = correction.normalized(weights, mean)
  close(correction.mean_weight(out, MASK), 1)
  by_row = correction.mean_sequence_weight(weights, MASK, SEQUENCES)
  close(by_row, (5 / 3 + 2.25 / 2) / 2)
  zeros = jnp.zeros(6)
  close(correction.normalized(zeros, correction.mean_weight(zeros, MASK)), 0)


def test_bounds_are_those_of_old_over_behaviour():
  """Row 16: 0.5 to 8 keeps rho = 8 and drops rho = 1/4."""
  got = correction.keep_ratio(*AT, low=0.5, high=8.01)
  np.testing.assert_array_equal(got, [1, 1, 0, 1, 1, 0])
  got = correction.keep_ratio(
    *AT, low=0.0, high=1.5, level=correction.sequence_mean
  )
  np.testing.assert_array_equal(got, [0, 0, 0, 0, 1, 1])


def test_divergences_at_every_level():
  log = np.log([1.0, 4, 2, 8, 0.25])
  k2 = log**2 / 2
  for level, high, want in (
    (correction.token, 1.0, [1, 1, 0, 1, 0, 1]),
    (correction.sequence_sum, k2[:3].sum() + 1e-4, [1, 1, 0, 1, 0, 0]),
    (correction.sequence_mean, k2[:3].mean() - 1e-4, [0] * 6),
    (correction.sequence_max, k2[3] - 1e-3, [1, 1, 0, 1, 0, 0]),
  ):
    got = correction.keep_divergence(
      *AT, divergence=correction.k2, high=high, level=level
    )
    np.testing.assert_array_equal(got, want)
  rho = np.array([4.0, 0.25])
  close(correction.k3(jnp.log(rho)), rho - 1 - np.log(rho))
  close(correction.k3_reverse(jnp.log(rho)), 1 / rho - 1 + np.log(rho))
  got = correction.keep_divergence(
    *AT, divergence=correction.k1, low=-0.1, high=1.4
  )
  np.testing.assert_array_equal(got, [1, 1, 0, 1, 0, 0])


def test_opsm_drops_far_trajectories_that_went_badly():
  behaviour = jnp.array([0.0, 0, np.nan, 0, 0, 0])
  new = jnp.array([-0.2, -0.4, np.nan, 0.0, -1.0, -1.0])
  for advantages, delta, want in (
    ([-1.0] * 4 + [-1.0] * 2, 0.5, [1, 1, 0, 1, 0, 0]),
    ([-1.0] * 4 + [1.0] * 2, 0.5, [1, 1, 0, 1, 1, 1]),
    ([-1.0] * 4 + [0.0] * 2, 0.1, [0, 0, 0, 0, 1, 1]),
  ):
    got = correction.keep_opsm(
      new, behaviour, jnp.array(advantages), MASK, SEQUENCES, delta=delta
    )
    np.testing.assert_array_equal(got, want)


def test_m2po_drops_the_largest_until_the_second_moment_fits():
  gap = jnp.array([0.1, -0.5, np.nan, 0.2, 1.0, 0.3])
  at = gap, MASK, SEQUENCES
  # Squares 0.01, 0.04, 0.09, 0.25, 1: means 0.01, 0.025, 0.047, 0.0975, 0.278.
  for high, want in (
    (0.05, [1, 0, 0, 1, 0, 1]),
    (0.03, [1, 0, 0, 1, 0, 0]),
    (1.00, [1, 1, 0, 1, 1, 1]),
    (1e-9, [0] * 6),
  ):
    got = correction.keep_second_moment(*at, high=high)
    np.testing.assert_array_equal(got, want)


def test_staleness_by_token_oldest_and_newest():
  versions = jnp.array([3, 5, -1, 6, 4, 4], jnp.int32)
  fresh = functools.partial(
    correction.keep_fresh, versions, MASK, SEQUENCES, now=7, bound=2
  )
  np.testing.assert_array_equal(fresh(), [0, 1, 0, 1, 0, 0])
  oldest = fresh(level=correction.sequence_max)
  np.testing.assert_array_equal(oldest, [0] * 6)
  newest = fresh(level=correction.sequence_min)
  np.testing.assert_array_equal(newest, [1, 1, 0, 1, 0, 0])


def test_the_proximal_policy_lies_between_by_versions():
  versions = jnp.array([4, 5, -1, 2, 3, 6], jnp.int32)
  share = correction.proximal_share(versions, now=6)
  close(share, [0.5, 0, 0, 0.75, 2 / 3, 0])
  new, behaviour = jnp.full(6, np.log(0.4)), jnp.full(6, np.log(0.1))
  got = correction.proximal_geometric(new, behaviour, MASK, share)
  close(jnp.exp(got[0]), 0.2)
  got = correction.proximal_arithmetic(new, behaviour, MASK, share)
  close(jnp.exp(got), [0.25, 0.1, 1, 0.325, 0.3, 0.1])
  assert not np.asarray(jax.grad(lambda x: correction.proximal_arithmetic(
    x, behaviour, MASK, share).sum())(new)).any()  # fmt: skip


def test_decoupled_ppo_is_ppo_where_the_sampler_is_the_proximal_policy():
  """Value and gradient: invariant 13; elsewhere it is not."""
  new, tokens = made()
  plain = tokens._replace(weights=None)

  def graded(loss, tokens):
    return jax.value_and_grad(lambda x: loss(x, tokens).loss_N.sum())(new)

  for weigh in (correction.truncated, correction.icepop):
    loss = functools.partial(
      correction.decoupled, loss=losses.ppo_clip, weigh=weigh
    )
    on_policy = plain._replace(behaviour=plain.old)
    a, b = graded(loss, on_policy), graded(losses.ppo_clip, plain)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert graded(loss, plain)[0] != b[0]
  with pytest.raises(ValueError, match='who sampled'):
    loss(new, plain._replace(behaviour=None))


def test_decoupled_ppo_weighs_by_old_over_behaviour():
  new, tokens = made()
  plain = tokens._replace(weights=None)
  out = correction.decoupled(
    new, plain, loss=losses.ppo_clip,
    weigh=functools.partial(correction.truncated, high=1.2),
  )  # fmt: skip
  rho = np.minimum(np.exp(np.asarray(tokens.old - tokens.behaviour)), 1.2)
  close(out.loss_N, losses.ppo_clip(new, plain).loss_N * rho)


def test_reweighted_reinforce_has_the_gradient_of_the_truncated_ratio():
  new, tokens = made()
  tokens = tokens._replace(weights=None, mask=jnp.ones(24, bool))
  gradient = jax.grad(
    lambda x: correction.reweighted(x, tokens).loss_N.sum()
  )(new)  # fmt: skip
  ratio = np.minimum(np.exp(np.asarray(new - tokens.old)), 2)
  close(gradient, -ratio * tokens.advantages)


def test_what_the_mask_hides_has_no_effect():
  new, tokens = made()
  mask, sequences = tokens.mask, tokens.sequences

  def everything(old, behaviour):
    rho = correction.log_rho(old, behaviour, mask)
    at = rho, mask, sequences
    out = [correction.keep_second_moment(*at)]
    for level in (*LEVELS, correction.sequence_max, correction.sequence_min):
      out += [
        correction.truncated(*at, level=level),
        correction.icepop(*at, level=level),
        correction.keep_ratio(*at, level=level, low=0.5, high=2.0),
        correction.keep_divergence(
          *at, level=level, divergence=correction.k3, high=0.1
        ),
      ]
    out += list(mismatch.divergences(old, behaviour, mask).values())
    out += list(mismatch.perplexities(old, behaviour, mask, sequences).values())
    out += [mismatch.sequence_chi2(old, behaviour, mask, sequences)]
    return out

  want = everything(tokens.old, tokens.behaviour)
  for bad in BAD:
    spoiled = [jnp.where(mask, x, bad) for x in (tokens.old, tokens.behaviour)]
    got = everything(*spoiled)
    jax.tree.map(np.testing.assert_array_equal, want, got)


@pytest.mark.parametrize(
  ('function', 'options', 'said'),
  [
    (correction.keep_ratio, {'low': -1.0, 'high': 2.0}, 'low -1.0'),
    (correction.icepop, {'low': 5.0, 'high': 0.5}, 'icepop with low 5.0'),
    (correction.truncated, {'high': 0.0}, 'high 0.0'),
    (correction.truncated, {'high': np.nan}, 'high nan'),
    (
      correction.keep_divergence,
      {'divergence': correction.k1, 'low': 1.0, 'high': 0.0},
      'give low <= high',
    ),
    (correction.keep_fresh, {'now': 1, 'bound': -1}, 'bound -1'),
  ],
)
def test_bounds_that_nothing_could_keep_are_refused(function, options, said):
  with pytest.raises(ValueError, match=said):
    function(*AT, **options)
