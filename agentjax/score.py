"""What policies and critics say of a batch, without a gradient.

Floor 2, under `learner`. Jitted programs of one micro-batch: log-probs of its
tokens (of the proximal or of the reference policy), values of its states, and
which tokens an off-policy correction keeps. All [B, T] and at the label.

Letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from agentjax.forward import Forward, pick, put_back
from agentjax.model import heads
from agentjax.rl import correction
from agentjax.rl.batch import Batch

# (log_rho_N, mask_N, sequences_N) -> bool[N]: what is kept.
Reject = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def logprobs(
  params, frozen, batch: Batch, *, capacity: int, model: Forward
) -> jax.Array:
  """Log-probs of the loss-carrying tokens; 0 elsewhere."""
  tokens = pick(batch, capacity, model.parts)
  policy = model.whole(frozen, params)
  head = model.head(policy, model.hidden(policy, batch), tokens.before)
  found = model.stats(head, tokens).logprobs_N
  return put_back(found, tokens, batch.tokens.shape)


def values(critic, params, frozen, batch: Batch, *, model: Forward):
  """The value of the state AFTER each token: before it, one place to the left.

  0 where there is no token.
  """
  trunk = critic['trunk'] if 'trunk' in critic else model.whole(frozen, params)
  after = heads.value(critic['value'], model.hidden(trunk, batch))
  return jnp.where(batch.pack_ids > 0, after.reshape(batch.tokens.shape), 0.0)


def keep(
  batch: Batch, version, *, reject: Sequence[Reject], stale: Callable | None
) -> jax.Array:
  """bool[B, T]: loss-carrying tokens that every rejection keeps.

  A row at a time, and a row holds whole trajectories.

  Args:
    version: of the policy now. stale: `correction.keep_fresh`, bound.
  """

  def row(logprobs, old, weights, versions, sequences):
    mask = weights > 0
    rho = correction.log_rho(old, logprobs, mask)
    kept = mask
    for function in reject:
      kept &= function(rho, mask, sequences)
    if stale is not None:
      kept &= stale(versions, mask, sequences, now=version) | (versions < 0)
    return kept & mask

  return jax.vmap(row)(
    batch.logprobs, batch.old, batch.weights, batch.versions, batch.pack_ids
  )
