"""What every loss owes: masks, splits, and REINFORCE at the ratio 1."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made import BAD, LOCAL, LOSSES, made

from agentjax.rl import aggregation, losses, masked, surrogates
from agentjax.rl.losses import Tokens

FIELDS = ('old', 'advantages', 'weights', 'behaviour', 'reference')


def graded(loss, new, tokens, weights=None, count=None):
  """(sum, count), per-token loss and gradient of the sum."""
  weights = tokens.mask * 1.0 if weights is None else weights

  def total(new):
    out = loss(new, tokens)
    pair = masked.weighted(out.loss_N, weights, count)
    return pair.sum, (pair, out)

  gradient, (pair, out) = jax.grad(total, has_aux=True)(new)
  return pair, gradient, out


@pytest.mark.parametrize('name', LOSSES)
def test_what_the_mask_hides_changes_nothing(name):
  """Invariant 3: NaN, infinities and ids, in values, gradients and clips."""
  new, tokens = made()
  want = graded(LOSSES[name], new, tokens)
  hidden = ~np.asarray(tokens.mask)
  assert not np.asarray(want[1])[hidden].any()
  for bad in BAD:
    spoiled = {
      k: jnp.where(tokens.mask, getattr(tokens, k), bad) for k in FIELDS
    }
    ids = {
      k: jnp.where(tokens.mask, getattr(tokens, k), 1)
      for k in ('sequences', 'turns')
    }
    got = graded(
      LOSSES[name],
      jnp.where(tokens.mask, new, bad),
      tokens._replace(**spoiled, **ids),
    )
    jax.tree.map(np.testing.assert_array_equal, want, got)


@pytest.mark.parametrize('name', LOSSES)
def test_nothing_to_learn_from_is_exactly_zero(name):
  """Invariant 6, with NaN everywhere."""
  new, tokens = made()
  nothing = {k: jnp.full(24, jnp.nan) for k in FIELDS}
  tokens = tokens._replace(mask=jnp.zeros(24, bool), **nothing)
  pair, gradient, out = graded(LOSSES[name], jnp.full(24, jnp.nan), tokens)
  assert pair.sum == 0 and pair.mean() == 0
  assert not np.asarray(gradient).any()
  assert not any(np.asarray(x).any() for x in out)


# ---- splits -----------------------------------------------------------------


def part(new, tokens, weights, chosen):
  """The tokens of some trajectories, shuffled and padded to the same N."""
  at = np.flatnonzero(np.isin(tokens.sequences, chosen))
  at = np.random.default_rng(len(chosen)).permutation(at)
  n = len(new) - len(at)

  def cut(x, fill):
    return jnp.asarray(np.pad(np.asarray(x)[at], (0, n), constant_values=fill))

  def ranks(ids):
    """Numbered from 0, as every micro-batch numbers its own."""
    _, rank = np.unique(np.asarray(ids)[at], return_inverse=True)
    return jnp.asarray(np.pad(rank.astype(np.int32), (0, n)))

  return at, cut(new, np.nan), Tokens(
    mask=cut(tokens.mask, False),
    sequences=ranks(tokens.sequences),
    turns=ranks(tokens.turns),
    **{k: cut(getattr(tokens, k), np.nan) for k in FIELDS},
  ), cut(weights, 0.0)  # fmt: skip


def split_and_whole(loss, aggregate):
  new, tokens = made(4)
  groups = np.asarray(tokens.sequences) // 2
  weighting = aggregate(
    np.asarray(tokens.mask), np.asarray(tokens.sequences), groups,
    np.asarray(tokens.turns),
  )  # fmt: skip
  weights = jnp.float32(weighting.weights)
  whole, gradient, _ = graded(loss, new, tokens, weights, weighting.count)
  for split in ([[0, 1, 2, 3, 4]], [[4, 0], [3], [1, 2]],
                [[i] for i in range(5)]):  # fmt: skip
    total, put = 0.0, np.zeros(24, np.float32)
    for chosen in split:
      at, *given = part(new, tokens, weights, chosen)
      pair, own, _ = graded(loss, *given, weighting.count)
      total += pair.sum
      put[at] = own[: len(at)]
    np.testing.assert_allclose(
      total / weighting.count, whole.mean(), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(put, gradient, rtol=1e-5, atol=1e-6)
  assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize('name', LOCAL)
def test_no_split_packing_or_order_changes_a_loss(name):
  """Invariant 4, with padding that is NaN."""
  split_and_whole(LOCAL[name], aggregation.sequence_mean_token_mean)


@pytest.mark.parametrize(
  'aggregate',
  [
    aggregation.token_mean,
    aggregation.token_sum,
    aggregation.sequence_mean_token_sum,
    functools.partial(aggregation.sequence_mean_token_sum_norm, length=8),
    aggregation.group_mean_token_mean,
    aggregation.turn_mean_token_mean,
  ],
)
def test_no_split_changes_an_aggregation(aggregate):
  split_and_whole(losses.ppo_clip, aggregate)


# ---- the ratio 1 ------------------------------------------------------------


@pytest.mark.parametrize(
  'loss',
  [
    losses.ppo_clip,
    functools.partial(losses.ppo_clip, dual_clip=3.0, delta=2.0),
    surrogates.gspo,
    functools.partial(surrogates.gspo, log_ratio=losses.turn_ratio),
    losses.cispo,
    surrogates.sapo,
    surrogates.dppo_tv,
    surrogates.vespo,
  ],
)
def test_at_the_ratio_1_every_surrogate_has_reinforces_gradient(loss):
  """Invariant 5."""
  new, tokens = made()
  tokens = tokens._replace(old=new, weights=None)
  ours, reinforce = (
    graded(f, new, tokens)[1] for f in (loss, losses.reinforce)
  )
  np.testing.assert_allclose(ours, reinforce, rtol=1e-5, atol=1e-6)
  assert np.abs(reinforce).max() > 0.1
