"""Estimators of KL(pi || ref) at sampled tokens.

Floor 1, rl/. x = log pi - log ref at the token that pi sampled. Their values
differ in variance, and their gradients differ in what they are gradients of
(stated in each docstring, checked in exact expectation by
tests/rl/test_losses.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentjax.rl.losses import hide, log_ratio


def k1(logprobs_N, ref_logprobs_N, mask_N) -> jax.Array:
  """x: unbiased value; as a loss its expected gradient is 0."""
  return hide(logprobs_N, mask_N) - hide(ref_logprobs_N, mask_N)


def k2(logprobs_N, ref_logprobs_N, mask_N) -> jax.Array:
  """x^2 / 2: biased value; on-policy gradient of the reverse KL, exactly."""
  return jnp.square(k1(logprobs_N, ref_logprobs_N, mask_N)) / 2


def k3(logprobs_N, ref_logprobs_N, mask_N) -> jax.Array:
  """e^-x - 1 + x: unbiased, never negative. Schulman 2020, "Approximating KL".

  Its naive gradient is that of the forward KL; `ratio_gradient` mends it.
  """
  y = log_ratio(ref_logprobs_N, logprobs_N, mask_N)
  return jnp.exp(y) - y - 1


def ratio_gradient(value_N, logprobs_N, mask_N) -> jax.Array:
  """The same value, with the gradient of the reverse KL through pi itself."""
  logprobs = hide(logprobs_N, mask_N)
  return value_N * jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
