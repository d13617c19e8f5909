"""Trees and Monte-Carlo values, by hand."""

import draws
import numpy as np
from draws import numbers, row

from agentjax.rl import trees
from agentjax.rl.advantages import dr_grpo, no_std


def family(rewards=(4.0, 0.0, 2.0, 2.0)):
  """A trunk, two forks of it, one of which forks again, and another tree.

  Shared: the first turn of 2 by the first three, the second of 1 by 1 and 2.
  """
  trunk = row([2, 1], rewards[0])
  fork = row([2, 1, 1], rewards[1], parent=trunk, shared=4)
  again = row([2, 1, 2], rewards[2], parent=fork, shared=6)
  return [trunk, fork, again, row([1], rewards[3])]


def test_what_rows_share():
  d = draws.draw(family())
  got = [a.tolist() for a in trees.multiplicity(d)]
  assert got == [
    [3, 3, 3, 3, 1, 1],
    [3, 3, 3, 3, 2, 2, 1, 1],
    [3, 3, 3, 3, 2, 2, 1, 1, 1],
    [1, 1, 1],
  ]
  weights = trees.shared_once(d)
  np.testing.assert_allclose(weights[0], [0, 0, 1 / 3, 1 / 3, 0, 1])
  # A token of the tree counts once: 2 + 1 + 1 + 1 + 2, and 1.
  np.testing.assert_allclose(sum(w.sum() for w in weights), 8)
  assert sum(w.sum() for w in trees.per_leaf(d)) == 3 + 4 + 5 + 1


def test_a_row_that_is_not_valid_shares_nothing():
  rows = family()
  rows[1]['valid'] = False
  got = trees.multiplicity(draws.draw(rows))
  assert got[0].tolist() == [2, 2, 2, 2, 1, 1]
  # The third still has from the first what it has through the second.
  assert got[2].tolist() == [2, 2, 2, 2, 1, 1, 1, 1, 1]
  assert not got[1].any()


def test_a_shared_token_has_the_mean_of_those_that_share_it():
  d = draws.draw(family())  # centred: 2, -2, 0, 0
  a, b, c, e = trees.arpo_hard(d, estimator=dr_grpo)
  np.testing.assert_allclose(a, [0, 0, 0, 0, 0, 2])
  np.testing.assert_allclose(b, [0, 0, 0, 0, 0, -1, 0, -2])
  np.testing.assert_allclose(c, [0, 0, 0, 0, 0, -1, 0, 0, 0])
  assert numbers(trees.arpo_soft(d, estimator=dr_grpo), d) == [2, -2, 0, 0]
  assert e.tolist() == [0, 0, 0]


def test_the_value_of_a_stretch_is_that_of_its_leaves():
  a, b, c, e = trees.treerl(draws.draw(family((4.0, 0.0, 2.0, 6.0))))
  # Root 3; trunk 2, of three; its own end 4; the fork 1, of two; ends 0, 2.
  trunk, fork = (2 * 2 - 3 - 3) / np.sqrt(3), (2 * 1 - 3 - 2) / np.sqrt(2)
  np.testing.assert_allclose(a, [0, 0, trunk, trunk, 0, 2 * 4 - 3 - 2])
  np.testing.assert_allclose(b, [0, 0, trunk, trunk, 0, fork, 0, 0 - 3 - 1])
  np.testing.assert_allclose(c[-2:], 2 * 2 - 3 - 1)
  np.testing.assert_allclose(e, [0, 0, 2 * 6 - 3 - 3])


def test_between_trees_and_inside_of_one():
  d = draws.draw(family((4.0, 0.0, 2.0, 6.0)))
  options = {'scale': no_std}
  # In the group: 1, -3, -1, 3; in the tree: 2, -2, 0, and one alone.
  assert numbers(trees.tree_grpo(d, **options), d) == [3, -5, -1, 3]
  assert numbers(trees.tree_grpo_2norm(d, **options), d) == [2, -2, 0, 0]
  raw = numbers(trees.tree_grpo(d, raw_singletons=True, **options), d)
  assert raw == [3, -5, -1, 9]


def test_the_gain_of_each_turn_by_monte_carlo():
  rows = [
    row([1, 2], 1.0, turn_rewards=[0.5, 0.0], turn_values=[0.25, 0.75]),
    row([1], 0.0, turn_values=[0.5], bootstrap=0.5),
  ]
  a, b = trees.vineppo(draws.draw(rows), gamma=0.5)
  np.testing.assert_allclose(
    a, [0, 0, 0.5 + 0.375 - 0.25, 0, 1 - 0.75, 1 - 0.75]
  )
  np.testing.assert_allclose(b, [0, 0, 0.25 - 0.5])
