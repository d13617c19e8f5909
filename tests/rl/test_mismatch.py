"""Metrics of the gap between policies, by hand."""

import functools

import jax.numpy as jnp
import numpy as np

from agentjax.rl import mismatch

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
MASK = jnp.array([1, 1, 0, 1], bool)
NONE = jnp.zeros(4, bool)


def test_the_effective_sample_size_is_that_of_the_weights():
  close(mismatch.effective_sample_size(jnp.array([2.0, 2, 9, 2]), MASK), 1)
  close(mismatch.effective_sample_size(jnp.array([1.0, 0, 9, 0]), MASK), 1 / 3)
  close(mismatch.effective_sample_size(jnp.array([1.0, 2, 9, 3]), MASK), 6 / 7)
  assert mismatch.effective_sample_size(jnp.ones(4), NONE) == 0
  assert mismatch.effective_sample_size(jnp.zeros(4), MASK) == 0


def test_rejected_shares():
  kept = jnp.array([1, 0, 0, 1], bool)
  close(mismatch.rejected_share(kept, MASK), 1 / 3)
  sequences = jnp.array([0, 0, 1, 2], jnp.int32)
  close(mismatch.rejected_sequences(kept, MASK, sequences), 1 / 2)
  assert mismatch.rejected_share(kept, NONE) == 0


def test_spread_and_what_is_outside():
  x = jnp.array([1.0, 2, np.nan, 6])
  got = mismatch.spread(x, MASK)
  close([got[k] for k in ('mean', 'std', 'min', 'max')],
        [3, np.std([1, 2, 6]), 1, 6])  # fmt: skip
  close(mismatch.spread(x, MASK, ddof=1)['std'], np.std([1, 2, 6], ddof=1))
  got = mismatch.outside(x, MASK, low=1.5, high=5.0)
  close([got['low'], got['high']], [1 / 3, 1 / 3])
  assert all(v == 0 for v in mismatch.spread(x, NONE).values())


def test_divergences_and_perplexities():
  old = jnp.log(jnp.array([0.5, 0.25, 1.0, 0.1]))
  behaviour = jnp.log(jnp.array([0.25, 0.5, 0.1, 0.1]))
  rho = np.array([2, 0.5, 1])
  got = mismatch.divergences(old, behaviour, MASK)
  close(got['kl'], 0)
  close(got['k3'], np.mean(rho - 1 - np.log(rho)))
  close(got['chi2'], np.mean(rho**2) - 1)
  sequences = jnp.array([0, 0, 1, 2], jnp.int32)
  close(mismatch.sequence_chi2(old, behaviour, MASK, sequences), 0)
  got = mismatch.perplexities(old, behaviour, MASK, sequences)
  close(got['old'], (8**0.5 + 10) / 2)
  close(got['log_behaviour'], (np.log(8) / 2 + np.log(10)) / 2)
  close([got['gap'], got['ratio']], [0, 1])
  assert not any(mismatch.divergences(old, behaviour, NONE).values())
