"""token_stats against whole logits, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.rl.token_stats import compact, token_stats


def plain(hidden, kernel, ids, temperature):
  logp = jax.nn.log_softmax(hidden @ kernel / temperature[:, None], -1)
  entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
  return jnp.take_along_axis(logp, ids[:, None], 1)[:, 0], entropy


@pytest.mark.parametrize('chunk', [1, 5, 7, 64])
def test_values_and_gradients_equal_whole_logits(chunk):
  rng = np.random.default_rng(0)
  hidden = jnp.asarray(rng.normal(size=(21, 6)), jnp.float32)
  kernel = jnp.asarray(rng.normal(size=(6, 11)) * 3, jnp.float32)
  ids = jnp.asarray(rng.integers(0, 11, 21))
  temperature = jnp.asarray(rng.uniform(0.5, 2, 21), jnp.float32)
  w = jnp.asarray(rng.normal(size=(2, 21)), jnp.float32)

  def ours(hidden, kernel):
    s = token_stats(hidden, ids, temperature, lambda h: h @ kernel, chunk=chunk)
    return jnp.sum(w[0] * s.logprobs_N + w[1] * s.entropy_N)

  def theirs(hidden, kernel):
    logp, entropy = plain(hidden, kernel, ids, temperature)
    return jnp.sum(w[0] * logp + w[1] * entropy)

  a = jax.value_and_grad(ours, (0, 1))(hidden, kernel)
  b = jax.value_and_grad(theirs, (0, 1))(hidden, kernel)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5), a, b
  )


def test_padded_ids_give_no_nan_in_entropy():
  def unembed(h):
    return jnp.where(jnp.arange(4) < 3, h @ jnp.ones((2, 4)), -1e30)

  def entropy(h):
    s = token_stats(h, jnp.zeros(3, int), jnp.full(3, 0.5), unembed)
    return s.entropy_N.sum()

  value, grad = jax.value_and_grad(entropy)(jnp.ones((3, 2)))
  np.testing.assert_allclose(value, 3 * np.log(3), rtol=1e-6)
  assert np.isfinite(np.asarray(grad)).all()


def test_compact_keeps_order_and_says_what_is_real():
  mask = jnp.array([[0, 1, 1], [0, 0, 1]], bool)
  index, real = compact(mask, 5)
  np.testing.assert_array_equal(index[:3], [1, 2, 5])
  np.testing.assert_array_equal(real, [1, 1, 1, 0, 0])
