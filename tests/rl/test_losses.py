"""Losses by hand, at their bounds, and against one another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made import made

from agentjax.rl import losses, surrogates
from agentjax.rl.losses import Tokens

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def five(advantages, old=0.0):
  """One trajectory of one turn."""
  n = len(advantages)
  zeros = jnp.zeros(n, jnp.int32)
  return Tokens(
    jnp.ones(n, bool), jnp.full(n, old), jnp.array(advantages), zeros, zeros
  )


RATIOS = jnp.log(jnp.array([1.5, 1.5, 0.5, 0.5, 1.1]))
SIGNS = five([1.0, -1.0, 1.0, -1.0, 2.0])


def test_ppo_by_hand():
  out = losses.ppo_clip(RATIOS, SIGNS, clip_high=0.28)
  close(out.loss_N, [-1.28, 1.5, -0.5, 0.8, -2.2])
  np.testing.assert_array_equal(out.clipped_N, [1, 0, 0, 1, 0])
  np.testing.assert_array_equal(out.high_N, [1, 0, 0, 0, 0])
  np.testing.assert_array_equal(out.low_N, [0, 0, 0, 1, 0])
  assert not out.dual_N.any()


def test_the_dual_clip_bounds_what_a_bad_token_may_cost():
  new = jnp.log(jnp.array([5.0, 5.0, 2.0, 0.5, 5.0]))
  tokens = five([1.0, -1.0, -1.0, -1.0, 0.0])
  out = losses.ppo_clip(new, tokens, dual_clip=3.0)
  close(out.loss_N, [-1.2, 3.0, 2.0, 0.8, 0.0])
  np.testing.assert_array_equal(out.dual_N, [0, 1, 0, 0, 0])
  # What is bounded teaches nothing any more.
  gradient = jax.grad(
    lambda x: losses.ppo_clip(x, tokens, dual_clip=3.0).loss_N.sum()
  )(new)
  close(gradient, [0, 0, 2.0, 0, 0])
  with pytest.raises(ValueError, match='dual_clip is 0.5'):
    losses.ppo_clip(new, tokens, dual_clip=0.5)


def test_delta_bounds_the_ratio_for_either_sign():
  new = jnp.log(jnp.array([5.0, 5.0, 2.0, 0.5, 5.0]))
  tokens = five([1.0, -1.0, -1.0, -1.0, 0.0])
  out = losses.ppo_clip(new, tokens, delta=4.0)
  close(out.loss_N, [-1.2, 4.0, 2.0, 0.8, 0.0])
  # One below the clip bounds the unclipped branch of good tokens too.
  close(losses.ppo_clip(new, tokens, delta=1.1).loss_N[0], -1.1)


def test_cispo_caps_the_weight_and_keeps_every_gradient():
  new = jnp.log(jnp.array([8.0, 0.5, 2.0, 8.0, 0.01]))
  tokens = five([1.0, 1.0, -1.0, -1.0, 1.0])
  loss = functools.partial(losses.cispo, cap=5.0, floor=0.1)
  gradient = jax.grad(lambda x: loss(x, tokens).loss_N.sum())(new)
  close(gradient, [-5.0, -0.5, 2.0, 5.0, -0.1])
  out = loss(new, tokens)
  np.testing.assert_array_equal(out.high_N, [1, 0, 0, 1, 0])
  np.testing.assert_array_equal(out.low_N, [0, 0, 0, 0, 1])


def test_weights_multiply_and_teach_nothing_themselves():
  new, tokens = made()

  def total(weights, loss):
    given = tokens._replace(weights=weights)
    return loss(new, given).loss_N.sum()

  for loss in (losses.ppo_clip, losses.reinforce):
    plain = loss(new, tokens._replace(weights=None)).loss_N
    close(loss(new, tokens).loss_N, plain * tokens.weights)
    assert not np.asarray(jax.grad(total)(tokens.weights, loss)).any()


def test_huge_ratios_stay_finite_and_are_counted_elsewhere():
  new, old = jnp.array([0.0, -500.0]), jnp.array([-500.0, 0.0])
  tokens = five([-1.0, -1.0])._replace(old=old)
  out = losses.ppo_clip(new, tokens)
  close(out.loss_N[0], np.exp(20.0))
  assert np.isfinite(np.asarray(out.loss_N)).all()


# ---- one ratio for many tokens ----------------------------------------------


def test_a_trajectory_has_the_geometric_mean_of_its_ratios():
  """2, 4 and 8 have the mean 4, whatever the masked token says."""
  new = jnp.log(jnp.array([2.0, 4.0, 99.0, 8.0, 3.0]))
  zero, one = [0, 0, 0, 0, 1], [0, 0, 0, 1, 2]
  tokens = five([1.0] * 5)._replace(
    mask=jnp.array([1, 1, 0, 1, 1], bool),
    sequences=jnp.array(zero, jnp.int32),
    turns=jnp.array(one, jnp.int32),
  )
  for ratio in (losses.trajectory_ratio, losses.mean_ratio):
    close(jnp.exp(ratio(new, tokens)), [4, 4, 1, 4, 3])
  close(jnp.exp(losses.turn_ratio(new, tokens)), [8**0.5, 8**0.5, 1, 8, 3])
  # A token of 30 is clipped as part of the mean alone.
  far = new.at[0].set(30.0)
  mean = (30 + np.log(4) + np.log(8)) / 3
  close(losses.mean_ratio(far, tokens, cap=None)[0], mean)
  close(losses.trajectory_ratio(far, tokens)[0], 10.0)


def test_token_and_sequence_form_have_one_gradient_for_one_advantage():
  """In a mean over tokens; not for advantages that differ: row 21 of B2."""
  new, tokens = made(3)

  def gradient(tokens, ratio):
    count = jnp.zeros(24).at[tokens.sequences].add(tokens.mask * 1.0)
    share = 1 / jnp.maximum(count, 1)[tokens.sequences]

    def total(new):
      loss = surrogates.gspo(
        new, tokens, clip_low=0.3, clip_high=0.3, log_ratio=ratio
      )
      return jnp.sum(loss.loss_N * share)

    return jax.grad(total)(new)

  plain = tokens._replace(weights=None)
  one = [gradient(plain, r) for r in (losses.trajectory_ratio,
                                      losses.mean_ratio)]  # fmt: skip
  close(one[0], one[1], atol=1e-7)
  assert np.abs(one[0]).max() > 1e-3
  other = plain._replace(advantages=jnp.linspace(-1, 1, 24))
  two = [gradient(other, r) for r in (losses.trajectory_ratio,
                                      losses.mean_ratio)]  # fmt: skip
  assert np.abs(two[0] - two[1]).max() > 1e-2
