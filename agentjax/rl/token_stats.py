"""Log-prob and entropy of tokens, without logits of a whole batch.

Floor 1, rl/. The head and the softmax cost more memory than the model: rows
that carry no loss are left out first (observations are most of an agent's
tokens), and the rest goes through the head in chunks that the backward pass
computes again. Knows no model: `unembed` maps hidden states to logits.

Letters: N tokens, C chunk, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenStats(NamedTuple):
  """float32[N] each, of the tempered distribution."""

  logprobs_N: jax.Array
  entropy_N: jax.Array


def token_stats(
  hidden_ND: jax.Array,
  ids_N: jax.Array,
  temperature_N: jax.Array,
  unembed: Callable[[jax.Array], jax.Array],
  *,
  chunk: int = 1024,
) -> TokenStats:
  """Log-prob of `ids_N` and entropy, both of softmax(logits / temperature).

  Args:
    hidden_ND: states before each token. unembed: [C, D] -> float32 [C, V].
    temperature_N: > 0.
    chunk: rows whose logits exist at once.
  """
  N, D = hidden_ND.shape
  chunk = min(chunk, N)
  n = -(-N // chunk)
  pad = n * chunk - N

  @jax.checkpoint
  def stats(args):
    hidden_CD, ids_C, temperature_C = args
    z = unembed(hidden_CD) / temperature_C[:, None]
    log_total = jax.nn.logsumexp(z, -1)
    logprob = jnp.take_along_axis(z, ids_C[:, None], 1)[:, 0] - log_total
    mass = jnp.exp(z - log_total[:, None])
    # Where a logit is a huge negative number its mass is 0, and so its share.
    entropy = log_total - jnp.sum(jnp.where(mass > 0, mass * z, 0.0), -1)
    return TokenStats(logprob, entropy)

  out = jax.lax.map(
    stats,
    (
      jnp.pad(hidden_ND, ((0, pad), (0, 0))).reshape(n, chunk, D),
      jnp.pad(ids_N, (0, pad)).reshape(n, chunk),
      jnp.pad(temperature_N, (0, pad), constant_values=1.0).reshape(n, chunk),
    ),
  )
  return TokenStats(*(x.reshape(-1)[:N] for x in out))


def compact(mask_BT: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
  """Flat indices of the True entries, padded to `capacity`, and which are real.

  The caller guarantees that there are no more than `capacity`.
  """
  flat = mask_BT.reshape(-1)
  index_N = jnp.nonzero(flat, size=capacity, fill_value=0)[0]
  return index_N, jnp.arange(capacity) < jnp.sum(flat)
