"""What holds for every estimator: order, observations, junk, validity."""

import functools

import draws
import numpy as np
import pytest
from draws import equal, example, insert, row

from agentjax.rl import advantages, anchors, returns, trees, turns
from agentjax.rl import token_baseline as baseline
from agentjax.rl.seam import total

GROUP_RELATIVE = {
  'grpo': advantages.grpo,
  'grpo_total': functools.partial(advantages.grpo, scores=total),
  'grpo_batch': functools.partial(advantages.grpo, scale=advantages.batch_std),
  'grpo_within': functools.partial(
    advantages.grpo, scale=advantages.within_std
  ),
  'dr_grpo': advantages.dr_grpo,
  'rloo': advantages.rloo,
  'opo': advantages.opo,
  'gpg': advantages.gpg,
  'pass_at_k': advantages.pass_at_k,
  'gdpo': advantages.gdpo,
  'rpp_baseline': advantages.reinforce_plus_plus_baseline,
  'turn_returns': turns.turn_returns,
  'process_supervision': turns.process_supervision,
  'igpo': turns.igpo,
  'mt_grpo': turns.mt_grpo,
  'gigpo': anchors.gigpo,
  'gigpo_std': functools.partial(anchors.gigpo, scale=advantages.group_std),
  'gigpo_rows': functools.partial(anchors.gigpo, episodes=anchors.step_rows),
  'tree_grpo': trees.tree_grpo,
  'tree_grpo_2norm': trees.tree_grpo_2norm,
  'treerl': trees.treerl,
  'arpo_hard': trees.arpo_hard,
  'arpo_soft': trees.arpo_soft,
  'tir_otb': baseline.tir_otb,
}
SKIPPING = GROUP_RELATIVE | {
  'rpp': functools.partial(advantages.reinforce_plus_plus, gamma=0.9),
  'remax': advantages.remax,
  'gae': functools.partial(returns.gae, gamma=0.9, lam=0.8),
  'value_targets': functools.partial(returns.value_targets, gamma=0.9, lam=0.8),
  'turn_gae': functools.partial(turns.turn_gae, gamma=0.9, lam=0.8),
  'bi_level_gae': functools.partial(
    turns.bi_level_gae, gamma=0.9, lam=0.8, turn_gamma=0.7
  ),
  'vineppo': functools.partial(trees.vineppo, gamma=0.9),
  'shared_once': trees.shared_once,
  'per_leaf': trees.per_leaf,
}
# For comparison with other systems: an observation is a step there.
STEPPING = {
  'gae_per_slot': functools.partial(returns.gae_per_slot, gamma=0.9),
  'otb': baseline.otb,
  'rpp_decay': functools.partial(
    advantages.reinforce_plus_plus, gamma=0.9, cross=returns.decay
  ),
}
ALL = SKIPPING | STEPPING
BAD = [np.nan, np.inf, -np.inf, 1e38]


def each(table):
  return pytest.mark.parametrize('name', table)


@each(ALL)
def test_the_form_of_the_seam(name):
  d = draws.draw(example())
  out = ALL[name](d)
  assert len(out) == len(d)
  for a, m in zip(out, d.masks, strict=True):
    assert a.dtype == np.float64 and a.shape == m.shape
    assert np.isfinite(a).all() and not a[~m].any()
  assert any(a.any() for a in out)


@each(ALL)
def test_order_of_rows_and_names_of_groups_do_not_matter(name):
  rows = example()
  out = ALL[name](draws.draw(rows))
  order = np.random.default_rng(1).permutation(len(rows))
  mixed = [rows[i] for i in order]
  names = {0: 7, 1: -3, 2: 0}
  renamed = [r | {'group': names[r['group']]} for r in mixed]
  # A fork finds its parent by what it is: the copies point to copies.
  copy = {id(r): c for r, c in zip(mixed, renamed, strict=True)}
  for r in renamed:
    r['parent'] = copy.get(id(r['parent']))
  equal(ALL[name](draws.draw(renamed)), [out[i] for i in order])


@each(SKIPPING)
def test_observations_that_are_inserted_change_nothing(name):
  rows = example()
  before = SKIPPING[name](draws.draw(rows))
  rng = np.random.default_rng(2)
  forked = {id(r['parent']): r['shared'] for r in rows}
  copies = {}
  for r in rows:
    own = max(r['shared'], forked.get(id(r), 0))
    at = int(rng.integers(own, len(r['mask']) + 1))
    longer = insert(r, at, int(rng.integers(1, 5)), junk=np.nan)
    # What a tree shares has to grow in all of its rows alike.
    longer = insert(longer, 1, 3, junk=1e30)
    longer['shared'] += 3 * (r['parent'] is not None)
    longer['parent'] = copies.get(id(r['parent']))
    copies[id(r)] = longer
  d = draws.draw(list(copies.values()))
  after = SKIPPING[name](d)
  for a, b, r, m in zip(before, after, rows, d.masks, strict=True):
    np.testing.assert_allclose(a[r['mask']], b[m], rtol=1e-9, atol=1e-12)


@each(STEPPING)
def test_where_an_observation_is_a_step_it_does(name):
  rows = example()
  before = STEPPING[name](draws.draw(rows))
  # The longest of those that no tree holds.
  i = max((0, 2, 3, 5, 6), key=lambda i: rows[i]['mask'].sum())
  mask = rows[i]['mask']
  rows[i] = insert(rows[i], int(np.flatnonzero(mask)[1]), 4)
  after = STEPPING[name](draws.draw(rows))
  assert not np.allclose(before[i][mask], after[i][rows[i]['mask']])


@pytest.mark.parametrize('bad', BAD)
@each(ALL)
def test_what_the_mask_hides_has_no_effect(name, bad):
  rows = example()
  before = ALL[name](draws.draw(rows))
  for r in rows:
    for field in ('values', 'logprobs', 'sum_squares'):
      r[field] = np.where(r['mask'], r[field], bad)
    if not np.isfinite(bad):
      r['token_rewards'] = np.where(r['mask'], r['token_rewards'], bad)
  for a, b in zip(before, ALL[name](draws.draw(rows)), strict=True):
    np.testing.assert_array_equal(a, b)


@each(ALL)
def test_an_invalid_trajectory_is_not_there(name):
  rows = example()
  before = ALL[name](draws.draw(rows))
  junk = example(5)[0] | {
    'valid': False,
    'reward': np.nan,
    'parts': {'a': np.nan, 'b': 1e9},
    'turn_rewards': [np.nan] * len(example(5)[0]['turn_rewards']),
    'values': np.full(len(example(5)[0]['mask']), np.nan),
    'baseline': np.inf,
  }
  child = example(6)[0] | {'valid': False, 'parent': rows[0], 'shared': 3}
  with np.errstate(all='ignore'):
    after = ALL[name](draws.draw([*rows[:2], junk, child, *rows[2:]]))
  assert not after[2].any() and not after[3].any()
  equal([*after[:2], *after[4:]], before)


@each(GROUP_RELATIVE)
def test_a_group_of_one_tells_nothing(name):
  one = row(
    [3],
    2.0,
    turn_rewards=[1.0],
    state_keys=['s'],
    answer_probs=[0.5],
    parts={'a': 3.0, 'b': 1.0},
  )
  (out,) = GROUP_RELATIVE[name](draws.draw([one]))
  assert not out.any()


def alike(value):
  """Four trajectories that differ in length alone, one forked."""
  rows = [
    row(
      [n, 2],
      value,
      turn_rewards=[0.0, 0.0],
      state_keys=['x', 'y'],
      answer_probs=[0.25, 0.25],
      parts={'a': value, 'b': -value},
    )
    for n in (1, 2, 3, 1)
  ]
  rows[3] |= {'parent': rows[0], 'shared': 3}
  return rows


@pytest.mark.parametrize('value', [0.0, 1.0, np.float32(0.1)])
@each(sorted(set(GROUP_RELATIVE) - {'tir_otb', 'process_supervision', 'igpo'}))
def test_a_group_of_equals_is_exactly_zero(name, value):
  """Of a sum that float32 rounded too: noise is not blown up."""
  out = GROUP_RELATIVE[name](draws.draw(alike(value)))
  assert all((a == 0).all() for a in out)


@each(ALL)
def test_nothing_sampled_is_nothing(name):
  empty = [row([], 1.0), row([], 0.0)]
  out = ALL[name](draws.draw(empty))
  assert [a.tolist() for a in out] == [[0, 0], [0, 0]]
  assert ALL[name](draws.draw([])) == []


# ---- one turn ---------------------------------------------------------------


def single_turns():
  rng = np.random.default_rng(3)
  return [
    row(
      [n],
      float(rng.normal()),
      group=i // 3,
      values=rng.normal(size=n + 2),
      bootstrap=float(rng.normal()),
    )
    for i, n in enumerate((3, 1, 2, 2, 4, 1))
  ]


@pytest.mark.parametrize(
  'estimator',
  [turns.turn_returns, turns.process_supervision, turns.igpo, turns.mt_grpo],
)
def test_with_one_turn_turns_are_trajectories(estimator):
  d = draws.draw(single_turns())
  equal(estimator(d), advantages.grpo(d))


def test_with_one_turn_gigpo_is_dr_grpo():
  d = draws.draw(single_turns())
  equal(anchors.gigpo(d), advantages.dr_grpo(d))
  # With the same state for all, the step's return adds the same once more.
  rows = [r | {'state_keys': ['s']} for r in single_turns()]
  twice = [2 * a for a in advantages.dr_grpo(d)]
  equal(anchors.gigpo(draws.draw(rows)), twice)


@pytest.mark.parametrize('whiten', [True, False])
def test_with_one_turn_bi_level_is_token_level(whiten):
  d = draws.draw(single_turns())
  options = {'gamma': 0.9, 'lam': 0.8, 'whiten': whiten}
  equal(
    turns.bi_level_gae(d, turn_gamma=0.9, **options), returns.gae(d, **options)
  )


def test_without_forks_a_tree_is_a_group():
  rows = [r | {'parent': None, 'shared': 0} for r in example()[:-2]]
  d = draws.draw(rows)
  for estimator in (trees.arpo_hard, trees.arpo_soft, trees.tree_grpo):
    equal(estimator(d), advantages.grpo(d))
  equal(trees.treerl(d), [2 * a for a in advantages.dr_grpo(d)])
  equal(trees.shared_once(d), trees.per_leaf(d))
