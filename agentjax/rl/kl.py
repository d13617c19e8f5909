"""The KL of the policy to a reference: values, gradients, places.

Floor 1, rl/. x = log pi - log ref at the token that pi sampled. Three switches
are three functions: the value (k1, k2, k3, absolute, full), the gradient that
goes with it (naive, k2's, the ratio's), and the place (a term of the loss, or
`in_reward`). Estimators differ in variance, and their gradients differ in what
they are gradients of: stated in each docstring, checked in exact expectation
by tests/rl/test_kl.py.

Letters: N tokens, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from agentjax.rl.masked import MAX_LOG_RATIO, hide, log_ratio

# ---- values -----------------------------------------------------------------


def k1(logprobs_N, reference_N, mask_N) -> jax.Array:
  """x: unbiased value; as a loss its expected gradient is 0."""
  return log_ratio(logprobs_N, reference_N, mask_N, None)


def k2(logprobs_N, reference_N, mask_N) -> jax.Array:
  """x^2 / 2: biased value; on-policy gradient of the reverse KL, exactly."""
  return jnp.square(k1(logprobs_N, reference_N, mask_N)) / 2


def k3(
  logprobs_N,
  reference_N,
  mask_N,
  *,
  limit: float | None = MAX_LOG_RATIO,
) -> jax.Array:
  """e^-x - 1 + x: unbiased, never negative. Schulman 2020, "Approximating KL".

  Its naive gradient is that of the forward KL; `ratio_gradient` mends it. Where
  `limit` clips x, value and gradient know only that: it is worth a count.
  """
  y = log_ratio(reference_N, logprobs_N, mask_N, limit)
  return jnp.exp(y) - y - 1


def absolute(logprobs_N, reference_N, mask_N) -> jax.Array:
  """|x|: a distance, and no estimator of the KL."""
  return jnp.abs(k1(logprobs_N, reference_N, mask_N))


def full(logprobs_NV, reference_NV, mask_N) -> jax.Array:
  """sum over the vocabulary of pi (log pi - log ref): exact, no variance.

  Its gradient is exact too, so that it goes with `naive_gradient`.
  """
  mask_NV = mask_N[..., None] & (logprobs_NV > -jnp.inf)
  new, old = hide(logprobs_NV, mask_NV), hide(reference_NV, mask_NV)
  return jnp.sum(hide(jnp.exp(new) * (new - old), mask_NV), -1)


def bounded(value_N, limit: float) -> jax.Array:
  """A value clipped to +-limit, as some systems do; beyond, no gradient."""
  return jnp.clip(value_N, -limit, limit)


# ---- gradients --------------------------------------------------------------


# (value_N, logprobs_N, reference_N, mask_N, old_N=...) -> what is minimised;
# `old_N` are log-probs of the policy that sampled, where it is not this one.


def naive_gradient(
  value_N, logprobs_N, reference_N, mask_N, *, old_N=None
) -> jax.Array:
  """The value as it is, with its own gradient."""
  del logprobs_N, reference_N, mask_N, old_N
  return value_N


def k2_gradient(
  value_N, logprobs_N, reference_N, mask_N, *, old_N=None
) -> jax.Array:
  """The same value, with the gradient of k2: of the reverse KL, on-policy."""
  del old_N
  return straight_through(value_N, k2(logprobs_N, reference_N, mask_N))


def ratio_gradient(
  value_N,
  logprobs_N,
  reference_N,
  mask_N,
  *,
  old_N=None,
  limit: float | None = MAX_LOG_RATIO,
) -> jax.Array:
  """value * pi / sg(pi): the gradient of the reverse KL through pi itself.

  Of k1 and k3, whose expectation is the reverse KL. That of k2 and of |x| is
  not, and nor is their gradient then: those take another one.

  Args:
    old_N: log-probs of the policy that sampled, where it is not this one:
      then the ratio is pi / pi_old, and the value is weighted by it, so that
      value and gradient stay those of the reverse KL.

  Source: DeepSeek-V3.2, arXiv:2512.02556; "A Comedy of Estimators",
  arXiv:2512.21852.
  """
  del reference_N
  old_N = stop_gradient(logprobs_N) if old_N is None else old_N
  return value_N * jnp.exp(log_ratio(logprobs_N, old_N, mask_N, limit))


def straight_through(value_N, gradient_N) -> jax.Array:
  """The value of the one with the gradient of the other."""
  return stop_gradient(value_N) + gradient_N - stop_gradient(gradient_N)


# ---- in the reward ----------------------------------------------------------


def in_reward(rewards_N, kl_N, mask_N, coef: float) -> np.ndarray:
  """float[N] on the host: rewards - coef * kl where the policy sampled.

  Masked before any return sees it: a KL of an observation is nobody's. Give
  k1, whose score-function gradient is that of the reverse KL.
  """
  kl = np.where(mask_N, np.asarray(kl_N), 0)
  return np.asarray(rewards_N) - coef * kl


def adapted(
  coef: float, kl: float, *, target: float, n: int, horizon: float
) -> float:
  """The next coefficient: up where the KL exceeds its target, else down.

  coef * (1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon), n trajectories
  since the last one. Source: Ziegler et al., arXiv:1909.08593, section 2.2.
  """
  if not (target > 0 and horizon > 0):
    raise ValueError(
      f'target is {target}, horizon {horizon}: give numbers above 0'
    )
  error = min(max(kl / target - 1, -0.2), 0.2)
  return coef * (1 + error * n / horizon)
