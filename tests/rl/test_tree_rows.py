"""Trees in rows: each token stands once, sees its past, and is worth the same.

The reference is the flat batch, in which every branch repeats its past.
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from fakes import trajectory
from tiny_model import PLAIN as CONFIG
from tiny_model import params as tiny_params

from agentjax.learner import Learner
from agentjax.model import attention
from agentjax.records import kept_ids
from agentjax.rl import draw_from, losses
from agentjax.rl.batch import pack, unpack
from agentjax.rl.draw import Tree
from agentjax.rl.tree_rows import tree_places, with_prompts
from agentjax.types import Segment, Source, Status, Stop

LENGTHS = [9, 7, 8, 5, 6, 4]
# 1 is forked from 0 behind its 3rd token, 2 behind the 6th; 3 from 2, within
# what 2 has from 0; 4 from 1, in 1's own. 5 is a tree of its own.
TREE = Tree(np.array([-1, 0, 0, 2, 1, -1]), np.array([0, 3, 6, 4, 5, 0]))


def paths():
  """Tokens of each row by who sampled them first: (row, position)."""
  out = []
  for i, n in enumerate(LENGTHS):
    p = TREE.parents_N[i]
    past = [] if p < 0 else out[p][: TREE.shared_N[i]]
    out.append(past + [(i, t) for t in range(len(past), n)])
  return out


def test_each_token_stands_once_and_sees_its_past_alone():
  at = tree_places(LENGTHS, TREE, rows=1, length=40)
  stands = {}
  for (row, places), path in zip(at.index, paths(), strict=True):
    for place, token in zip(places, path, strict=True):
      assert stands.setdefault((row, place), token) == token
  assert (
    len(set(stands.values()))
    == len(stands)
    == sum(n - s for n, s in zip(LENGTHS, TREE.shared_N, strict=True))
  )
  assert (at.pack_ids > 0).sum() == len(stands)
  for (row, places), path in zip(at.index, paths(), strict=True):
    own = places[-1]
    sees = [
      stands[row, k]
      for k in range(own + 1)
      if (row, k) in stands and own < at.ends[row, k]
    ]
    assert sorted(sees) == sorted(path)
    np.testing.assert_array_equal(at.before[row, places[1:]], places[:-1])
    assert at.before[row, places[0]] == -1


@pytest.mark.parametrize('length', [9, 12, 16])
def test_a_tree_that_fits_no_row_is_written_as_several(length):
  """Each trajectory is still whole, and sees its past alone."""
  at = tree_places(LENGTHS, TREE, rows=1, length=length)
  assert at.rows > 1
  for (row, places), n in zip(at.index, LENGTHS, strict=True):
    assert len(places) == n and (np.diff(places) > 0).all()
    sees = [k for k in range(places[-1] + 1) if places[-1] < at.ends[row, k]]
    assert sees == list(places)
  with pytest.raises(ValueError, match='trajectory 0 has 9 tokens, a row 8'):
    tree_places(LENGTHS, TREE, rows=1, length=8)


def forked(base, turns, tokens, branch):
  """A trajectory that goes on otherwise behind so many turns of `base`."""
  rng = np.random.default_rng(branch)
  n = 1 + 2 * turns
  new = rng.integers(2, 40, tokens)
  lp = rng.normal(-3, 0.1, tokens).astype(np.float32)
  segment = Segment(
    Source.MODEL,
    new,
    lp,
    lp,
    np.zeros(tokens),
    np.zeros(tokens, int),
    stop=Stop.END_OF_TURN,
  )
  return dataclasses.replace(
    base, segments=(*base.segments[:n], segment), branch=branch,
    parent_id=base.id, turn_rewards=(0.0,) * (turns + 1),
    state_keys=(None,) * (turns + 1),
  )  # fmt: skip


@functools.cache
def collected():
  parts = [('p', [3, 4, 5]), ('m', [6, 7]), ('o', [8, 9]), ('m', [10, 11, 12]),
           ('o', [13]), ('m', [14, 15])]  # fmt: skip
  base = trajectory(parts, 'a')
  other = dataclasses.replace(trajectory(parts[:2], 'a'), sample=1)
  first = forked(base, 1, 4, 1)
  return [base, first, forked(base, 2, 3, 2), forked(first, 1, 2, 3), other]


CREDIT = [1.0, -0.5, 0.25, -2.0, 1.5]


@functools.cache
def learner(trees):
  return Learner(
    CONFIG, optimizer=optax.sgd(1.0), rows=1, length=48, chunk=16,
    trees=trees, remat=False, loss=losses.reinforce,
  )  # fmt: skip


def places(trajectories, groups=(0,) * 5):
  tree = with_prompts(
    draw_from.tree(trajectories), np.array(groups), trajectories
  )
  return tree_places([len(t) for t in trajectories], tree, rows=1, length=48)


def stepped(trees, batch):
  l = learner(trees)
  start = jax.tree.map(np.array, tiny_params(config=CONFIG))
  state, metrics = l.update(l.init(jax.tree.map(np.array, start)), batch)
  gradient = jax.tree.map(lambda a, b: a - np.array(b), start, state.params)
  return gradient, metrics


@pytest.mark.parametrize('once', [False, True])
def test_a_tree_has_the_loss_and_gradient_of_its_leaves(once):
  """`once`: a shared token weighs 1 in all its leaves together."""
  made = collected()
  at = places(made)
  masks = [t.loss_mask().astype(float) for t in made]
  if once:
    count = np.zeros((1, 48))
    for (row, span), m in zip(at.index, masks, strict=True):
      count[row, span] += m
    leaves = unpack(count, at)
    masks = [m / np.maximum(n, 1) for m, n in zip(masks, leaves, strict=True)]
  options = {'rows': 1, 'length': 48, 'weights': masks, 'count': 7.0}
  flat = pack(made, CREDIT, **options)
  tree = pack(made, CREDIT, at=at, **options)
  assert (flat.pack_ids > 0).sum() == sum(map(len, made)) == 52
  assert (tree.pack_ids > 0).sum() == 13 + 4 + 3 + 2 + 2
  (a, x), (b, y) = stepped(False, flat), stepped(True, tree)
  np.testing.assert_allclose(x['loss'], y['loss'], rtol=1e-5)
  for g, h in zip(*map(jax.tree.leaves, (a, b)), strict=True):
    np.testing.assert_allclose(g, h, atol=3e-6)
  # And the log-probs of each leaf are its own.
  found = learner(True).logprobs(tiny_params(config=CONFIG), tree)
  for t, own in zip(made, unpack(found, at), strict=True):
    alone = pack([t], [0.0], rows=1, length=48)
    want = learner(False).logprobs(tiny_params(config=CONFIG), alone)
    np.testing.assert_allclose(own, want[0, : len(t)], atol=1e-5)


def test_a_shared_token_has_the_mean_of_what_its_leaves_have():
  made = collected()
  at = places(made)
  tree = pack(made, CREDIT, rows=1, length=48, at=at)
  row, span = at.index[0]
  first, second = span[3], span[7]
  np.testing.assert_allclose(tree.weights[row, [first, second]], [4, 2])
  np.testing.assert_allclose(
    tree.advantages[row, [first, second]],
    [(1 - 0.5 + 0.25 - 2) / 4, (1 + 0.25) / 2],
  )
  assert tree.temperature[row, span].min() == 1.0


def test_tokens_that_are_not_shared_are_not_taken_for_shared():
  made = collected()
  lie = Tree(np.array([-1, 0, -1, -1, -1]), np.array([0, 9, 0, 0, 0]))
  at = tree_places([len(t) for t in made], lie, rows=1, length=48)
  with pytest.raises(ValueError, match='said to share'):
    pack(made, CREDIT, rows=1, length=48, at=at)


def test_prompts_are_shared_only_where_they_are_equal_and_of_one_group():
  a, b = (trajectory([('p', [1, 2]), ('m', [3])], 'x') for _ in range(2))
  c = trajectory([('p', [1, 9]), ('m', [3])], 'x')
  empty = trajectory([], 'x')
  alone = Tree(np.full(5, -1), np.zeros(5, int))
  tree = with_prompts(alone, np.array([0, 0, 0, 1, 0]), [a, b, c, a, empty])
  np.testing.assert_array_equal(tree.parents_N, [-1, 0, -1, -1, -1])
  np.testing.assert_array_equal(tree.shared_N, [0, 2, 0, 0, 0])


def test_blocks_of_queries_see_trees_as_plain_attention_does():
  at = tree_places(LENGTHS, TREE, rows=1, length=40)
  rng = np.random.default_rng(0)
  q, k, v = rng.normal(size=(3, 1, 40, 2, 8)).astype(np.float32)
  positions = np.zeros((1, 40), np.int32)
  for row, span in at.index:
    positions[row, span] = np.arange(len(span))
  rows = attention.Rows(
    at.pack_ids, positions, np.arange(40, dtype=np.int32)[None], at.ends
  )
  config = dataclasses.replace(CONFIG, window=3)
  for kind in ('global', 'local'):
    plain = attention.plain(q, k, v, rows, kind, config)
    blocks = attention.in_blocks(q, k, v, rows, kind, config, block=16)
    shown = at.pack_ids[0] > 0
    np.testing.assert_allclose(plain[0, shown], blocks[0, shown], atol=1e-6)
  with pytest.raises(ValueError, match='knows no trees'):
    attention.splash(q, k, v, rows, 'global', config)


def test_shared_tokens_were_sampled_from_the_same_ids():
  def kept(t, first):
    """Of each sampled token itself, and of the first turn another id."""
    segments, k = [], 0
    for s in t.segments:
      if s.source is Source.MODEL:
        other = np.full(len(s), first if k == 0 else -1)
        s = dataclasses.replace(s, kept=np.stack([s.tokens, other], 1))
        k += 1
      segments.append(s)
    return dataclasses.replace(t, segments=tuple(segments))

  made = [kept(t, 30) for t in collected()]
  at = places(made)
  options = {'rows': 1, 'length': 48, 'kept': 2}
  tree = pack(made, CREDIT, at=at, **options)
  for t, found in zip(made, unpack(tree.kept, at), strict=True):
    np.testing.assert_array_equal(found, kept_ids(t, 2))
  # A trajectory that nothing is learned from has no say.
  for i in (0, 3):
    lost = list(made)
    lost[i] = kept(made[i], 31).append(status=Status.INFRA_FAILURE)
    found = pack(lost, CREDIT, at=at, **options).kept
    own = unpack(found, at)[2]
    np.testing.assert_array_equal(own, kept_ids(made[2], 2))
  with pytest.raises(ValueError, match='sampled from other ids'):
    pack([*made[:1], kept(made[1], 31), *made[2:]], CREDIT, at=at, **options)
