"""Aggregations by hand; nothing that is hidden or empty is anywhere."""

import functools

import numpy as np
import pytest

from agentjax.rl import aggregation

# Three trajectories of 3, 1 and no tokens of two groups; an observation.
MASK = np.array([1, 0, 1, 1, 1, 0, 0], bool)
SEQUENCES = np.array([7, 7, 7, 7, 9, 12, 12])
GROUPS = np.array([0, 0, 0, 0, 0, 1, 1])
TURNS = np.array([1, 0, 1, 2, 1, 1, 1])  # restart in each trajectory
X = np.array([1.0, np.nan, 2, 6, 5, np.inf, np.nan])
IDS = (SEQUENCES, GROUPS, TURNS)

ALL = {
  'token_mean': (aggregation.token_mean, 14 / 4),
  'token_sum': (aggregation.token_sum, 14),
  'sequence_sum': (aggregation.sequence_mean_token_sum, (9 + 5) / 2),
  'sequence_mean': (aggregation.sequence_mean_token_mean, (3 + 5) / 2),
  'sequence_norm': (
    functools.partial(aggregation.sequence_mean_token_sum_norm, length=4),
    (9 + 5) / 2 / 4,
  ),
  'group_mean': (aggregation.group_mean_token_mean, 14 / 4),
  'turn_mean': (aggregation.turn_mean_token_mean, (1.5 + 6 + 5) / 3),
}
each = pytest.mark.parametrize('name', ALL)


def loss(weighting, x=X):
  shown = np.where(weighting.weights > 0, x, 0)
  total = (shown * weighting.weights).sum()
  return total / weighting.count if weighting.count else 0.0


@each
def test_by_hand(name):
  aggregate, want = ALL[name]
  np.testing.assert_allclose(loss(aggregate(MASK, *IDS)), want)


@each
def test_nothing_at_all_is_zero(name):
  got = ALL[name][0](np.zeros(7, bool), *IDS)
  assert got.count == 0 and not got.weights.any()


@each
def test_shape_order_names_and_hidden_tokens_do_not_matter(name):
  aggregate, want = ALL[name]
  rng = np.random.default_rng(0)
  order = rng.permutation(7)
  moved = [x[order] for x in (MASK, *IDS)]
  np.testing.assert_allclose(loss(aggregate(*moved), X[order]), want)
  table = [x[:6].reshape(2, 3) for x in (MASK, SEQUENCES, GROUPS, TURNS)]
  assert aggregate(*table).weights.shape == (2, 3)
  np.testing.assert_allclose(loss(aggregate(*table), X[:6].reshape(2, 3)), want)
  longer = [np.concatenate([x, np.full(3, 5, x.dtype)]) for x in IDS]
  got = aggregate(np.concatenate([MASK, np.zeros(3, bool)]), *longer)
  np.testing.assert_allclose(loss(got, np.concatenate([X, [np.nan] * 3])), want)


def test_two_groups_of_unequal_length_weigh_the_same_as_the_paper_has_it():
  mask = np.ones(5, bool)
  groups = np.array([0, 0, 0, 0, 1])
  got = aggregation.group_mean_token_mean(mask, np.arange(5), groups)
  np.testing.assert_allclose(got.weights, [0.25] * 4 + [1])
  assert got.count == 2


@each
def test_a_given_count_stands_for_the_number(name):
  if name == 'token_sum':
    assert loss(aggregation.token_sum(MASK, count=7)) == 2
    return
  aggregate, want = ALL[name]
  numbers = {'token_mean': 4, 'group_mean': 1, 'turn_mean': 3}
  own = numbers.get(name, 2)
  got = loss(aggregate(MASK, *IDS, count=2 * own))
  np.testing.assert_allclose(got, want / 2)
  with pytest.raises(ValueError, match='count is 0'):
    aggregate(MASK, *IDS, count=0)


def test_processes_are_given_their_parts_of_a_constant_count():
  """Their counts are added up, and so are their sums."""
  mine = np.array([1, 0, 1, 0, 0, 0, 0], bool) & MASK
  whole = aggregation.token_sum(MASK, *IDS, count=3.0)
  parts = [
    aggregation.token_sum(mask, *IDS, count=3.0 / 2)
    for mask in (mine, MASK & ~mine)
  ]
  assert sum(p.count for p in parts) == whole.count
  np.testing.assert_array_equal(sum(p.weights for p in parts), whole.weights)


def test_a_shared_prefix_counts_once_however_many_leaves_repeat_it():
  """Tokens a of 2 leaves, b and c their own: as a row of the three."""
  mask, rows = np.ones(4, bool), np.array([0, 0, 1, 1])
  x = np.array([3.0, 5, 3, 7])
  half = np.array([0.5, 1, 0.5, 1])
  per_leaf = loss(aggregation.token_mean(mask, rows), x)
  once = loss(aggregation.token_mean(mask, rows, token_weights=half), x)
  np.testing.assert_allclose([per_leaf, once], [18 / 4, 15 / 3])
  got = aggregation.sequence_mean_token_mean(mask, rows, token_weights=half)
  np.testing.assert_allclose(loss(got, x), (6.5 / 1.5 + 8.5 / 1.5) / 2)
  with pytest.raises(ValueError, match='token weights down to -1'):
    aggregation.token_mean(mask, token_weights=-np.ones(4))


@each
def test_rejected_tokens_count_or_do_not(name):
  aggregate, want = ALL[name]
  kept = np.array([1, 1, 1, 1, 0, 1, 1], bool)  # all of trajectory 9 goes
  original = aggregation.over_original(aggregate, MASK, kept, *IDS)
  whole = aggregate(MASK, *IDS)
  assert original.count == whole.count and original.weights[4] == 0
  np.testing.assert_array_equal(original.weights[:4], whole.weights[:4])
  effective = aggregation.over_effective(aggregate, MASK, kept, *IDS)
  alone = aggregate(MASK & kept, *IDS)
  assert effective.count == alone.count
  np.testing.assert_array_equal(effective.weights, alone.weights)


def test_a_length_of_nothing_is_refused():
  with pytest.raises(ValueError, match='length is 0'):
    aggregation.sequence_mean_token_sum_norm(MASK, SEQUENCES, length=0)


def test_trajectories_get_back_what_is_theirs():
  """As arrays side by side, with weights of tokens and rejections."""
  masks = [[1, 0, 1, 1], [1], [0, 0]]
  turns = [[1, 0, 1, 2], [1], [0, 0]]
  options = {'groups': [0, 0, 1], 'turns': turns}
  for aggregate, _ in ALL.values():
    weights, count = aggregation.over_trajectories(aggregate, masks, **options)
    want = aggregate(MASK, *IDS)
    np.testing.assert_array_equal(np.concatenate(weights), want.weights)
    assert count == want.count and [len(w) for w in weights] == [4, 1, 2]
  shares = [[1.0, 1.0, 0.5, 0.5], [1.0], [1.0, 1.0]]
  weights, count = aggregation.over_trajectories(
    aggregation.token_mean, masks, token_weights=shares, **options
  )
  np.testing.assert_array_equal(weights[0], [1, 0, 0.5, 0.5])
  assert count == 3
  kept = [[1, 1, 0, 1], [1], [1, 1]]
  for rejected, count in (
    (aggregation.over_original, 4),
    (aggregation.over_effective, 3),
  ):
    weights, found = aggregation.over_trajectories(
      aggregation.token_mean, masks, kept=kept, rejected=rejected, **options
    )
    np.testing.assert_array_equal(weights[0], [1, 0, 0, 1])
    assert found == count
  empty, count = aggregation.over_trajectories(
    aggregation.token_mean, [], groups=[], turns=[]
  )
  assert empty == [] and count == 0
