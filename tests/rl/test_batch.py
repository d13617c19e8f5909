"""Packing loses nothing, mixes nothing, and trains on nothing but samples."""

import dataclasses

import numpy as np
import pytest
from fakes import trajectory

from agentjax.rl.batch import add_rows, empty_batch, pack, places, unpack
from agentjax.types import Source, Status


def example(i, n):
  return trajectory(
    [('p', [i, i]), ('m', [10 + i] * n), ('o', [90]), ('m', [20 + i])], str(i)
  )


def test_every_trajectory_stands_once_and_whole():
  trajectories = [example(i, n) for i, n in enumerate([1, 9, 4, 2, 7, 3])]
  batch = pack(trajectories, range(6), rows=2, length=16)
  found = []
  for row in range(batch.tokens.shape[0]):
    for k in range(1, batch.pack_ids[row].max() + 1):
      span = batch.pack_ids[row] == k
      tokens = batch.tokens[row, span]
      i = int(tokens[0])
      t = trajectories[i]
      np.testing.assert_array_equal(tokens, t.tokens())
      np.testing.assert_array_equal(
        batch.positions[row, span], np.arange(len(t))
      )
      np.testing.assert_array_equal(batch.weights[row, span], t.loss_mask())
      np.testing.assert_array_equal(
        batch.advantages[row, span], t.loss_mask() * i
      )
      np.testing.assert_array_equal(
        batch.logprobs[row, span], t.per_token('logprobs')
      )
      found.append(i)
  assert sorted(found) == list(range(6))
  empty = batch.pack_ids == 0
  assert not batch.weights[empty].any() and not batch.tokens[empty].any()
  assert batch.tokens.shape[0] % 2 == 0


def test_turns_are_numbered_where_they_were_sampled():
  """Explicit: neither rewards nor the loss mask say where a turn ends."""
  parts = [('p', [1, 1]), ('f', [2]), ('m', [3, 3]), ('o', [4]), ('m', [5]),
           ('m', [6, 6])]  # fmt: skip
  lost = trajectory(parts, status=Status.INFRA_FAILURE)
  for t in (trajectory(parts), lost):
    batch = pack([t, t], [1.0, 1.0], rows=1, length=18)
    want = [0, 0, 0, 1, 1, 0, 2, 3, 3]
    np.testing.assert_array_equal(batch.turns[0], want + want)
  assert not pack([], [], rows=1, length=4).turns.any()


def test_untrusted_trajectories_carry_no_weight():
  good, bad = example(0, 3), example(1, 3).append(status=Status.INFRA_FAILURE)
  batch = pack([good, bad], [1.0, 1.0], rows=1, length=32)
  assert set(batch.tokens[batch.weights > 0]) == {10, 20}


def test_each_token_has_an_advantage_of_its_own():
  t = example(0, 3)
  own = np.arange(len(t), dtype=float)
  batch = pack([t], [own], rows=1, length=16)
  np.testing.assert_array_equal(
    batch.advantages[0, : len(t)], np.where(t.loss_mask(), own, 0)
  )
  with pytest.raises(ValueError, match=r'7 tokens and advantages of shape'):
    pack([t], [own[:-1]], rows=1, length=16)


def test_observations_are_trained_on_in_the_ablation_alone():
  batch = pack(
    [example(0, 3)], [1.0], rows=1, length=16, mask_observations=False
  )
  assert set(batch.tokens[batch.weights > 0]) == {10, 20, 90}
  at = batch.tokens == 90
  assert batch.versions[at] == -1  # nothing sampled it: taken as on-policy


def test_a_model_token_without_a_past_has_no_label():
  batch = pack([trajectory([('m', [5, 6])])], [1.0], rows=1, length=4)
  np.testing.assert_array_equal(batch.weights[0], [0, 1, 0, 0])


def test_bad_input_is_refused():
  with pytest.raises(ValueError, match='0/9/0/0 has 13 tokens, a row 12'):
    pack([example(9, 9)], [1.0], rows=1, length=12)
  with pytest.raises(ValueError, match='temperature 0'):
    pack([example(0, 1)], [1.0], rows=1, length=12, temperature=0.0)
  assert pack([], [], rows=2, length=4).tokens.shape == (2, 4)


def kept(trajectory, M):
  """With M kept ids a token that count up from 0, the last of them none."""
  segments, n = [], 0
  for s in trajectory.segments:
    if s.source is Source.MODEL:
      ids = np.arange(n, n + len(s) * M).reshape(-1, M)
      ids[:, -1] = -1
      s, n = dataclasses.replace(s, kept=ids), n + len(s) * M
    segments.append(s)
  return dataclasses.replace(trajectory, segments=tuple(segments))


def test_kept_ids_stand_at_their_tokens_and_nowhere_else():
  made = [kept(example(0, 3), 2), example(1, 2), kept(example(2, 1), 3)]
  made.append(kept(example(3, 2), 3).append(status=Status.INFRA_FAILURE))
  at = places(made, rows=1, length=12)
  batch = pack(made, [1.0] * 4, rows=1, length=12, kept=3)
  assert batch.kept.shape == (*batch.tokens.shape, 3)
  a, b, c, lost = unpack(batch.kept, at)
  np.testing.assert_array_equal(
    a[[2, 3, 4, 6]], [[0, -1, -1], [2, -1, -1], [4, -1, -1], [6, -1, -1]]
  )
  np.testing.assert_array_equal(c[[2, 4]], [[0, 1, -1], [3, 4, -1]])
  assert (a[[0, 1, 5]] == -1).all() and (b == -1).all() and (lost == -1).all()
  assert (batch.kept[batch.pack_ids == 0] == -1).all()
  with pytest.raises(ValueError, match='up to 3 ids a token .* room for 2'):
    pack(made, [1.0] * 4, rows=1, length=12, kept=2)


@pytest.mark.parametrize('M', [0, 2])
def test_added_rows_are_empty(M):
  batch = pack([example(0, 3)], [1.0], rows=1, length=8, kept=M)
  more = add_rows(batch, 3)
  for whole, own, none in zip(more, batch, empty_batch(2, 8, M), strict=True):
    np.testing.assert_array_equal(whole, np.concatenate([own, none]))
  assert not more.weights[1:].any() and not more.pack_ids[1:].any()
  with pytest.raises(ValueError, match='3 rows do not fit into 2'):
    add_rows(more, 2)
