"""The optimal token baseline by hand."""

import draws
import numpy as np
from draws import row

from agentjax.rl.token_baseline import otb, tir_otb

SURE = -np.log(4.0)  # pi = 1/4


def rows():
  """Weights of a token: 1 - 2/4 + 1/2 = 1, and 2 where squares are 3/2."""
  return [
    row([1, 1], 1.0, logprobs=np.full(5, SURE), sum_squares=np.full(5, 0.5)),
    row([1, 2], 0.0, logprobs=np.full(6, SURE), sum_squares=np.full(6, 1.5)),
  ]


def test_by_hand():
  a, b = tir_otb(draws.draw(rows()))
  # W: 1, 2 and 2, 4, 6; rewards to go 1, 1 and 0, 0, 0.
  np.testing.assert_allclose(a, [0, 0, 1 - 1 / 3, 0, 1 - 2 / 6], rtol=1e-6)
  np.testing.assert_allclose(b, [0, 0, -1 / 3, 0, -2 / 6, 0], rtol=1e-6)


def test_the_tail_has_its_own_baseline_or_none():
  longer = rows()
  longer[1]['reward'] = 6.0
  _, own = tir_otb(draws.draw(longer))
  _, raw = tir_otb(draws.draw(longer), raw_tail=True)
  np.testing.assert_allclose(own[-1], 0, atol=1e-7)
  assert raw[-1] == 6
  np.testing.assert_array_equal(own[:-1], raw[:-1])


def test_a_singleton_has_none():
  one = draws.draw(rows()[:1])
  assert not tir_otb(one)[0].any()
  np.testing.assert_allclose(
    tir_otb(one, raw_singletons=True)[0], [0, 0, 1, 0, 1]
  )


def test_importance_enters_squared():
  d = draws.draw(rows())
  weights = [np.full(5, 2.0), np.ones(6)]
  a, _ = tir_otb(d, importance=weights)
  np.testing.assert_allclose(a[2], 1 - 4 / 6, rtol=1e-6)


def test_by_position_an_observation_parts_what_belongs_together():
  moved = rows()
  moved[1] = draws.insert(moved[1], 2, 1)
  d = draws.draw(moved)
  first, _ = otb(d)
  # At position 2 the first one stands alone: its own baseline.
  np.testing.assert_allclose(first[2], 0, atol=1e-7)
  np.testing.assert_allclose(tir_otb(d)[0][2], 1 - 1 / 3, rtol=1e-6)
