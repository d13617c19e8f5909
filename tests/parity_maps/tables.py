"""Peers' tables [B, T] as our flat tokens, and a loss with its gradient.

Glue that the other maps share; maps nothing itself. A row of a table is a
trajectory and, as no peer says where turns end, one turn. All are padded to a
multiple of PLACES, so that tables of any shape run the same small programs.

Letters: B rows, T columns, N tokens, the B T first of which are real.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.rl import aggregation, losses, masked
from agentjax.rl.aggregation import Weighting
from agentjax.rl.losses import PolicyLoss, Tokens

PLACES = 128


def flat(x) -> jax.Array:
  """[N] of a table: its entries and then zeros."""
  x = np.asarray(x).reshape(-1)
  return jnp.asarray(np.pad(x, (0, -x.size % PLACES)))


def table(x_N, shape) -> np.ndarray:
  """What `flat` made of a table of this shape, as one again."""
  return np.asarray(x_N)[: int(np.prod(shape))].reshape(shape)


def shown(mask) -> jax.Array:
  """A mask of numbers as bool[N]."""
  return flat(np.asarray(mask) > 0)


def rows(shape) -> jax.Array:
  """int32[N]: the row of each entry."""
  B, T = shape
  return flat(np.repeat(np.arange(B, dtype=np.int32), T))


def every_row(shape) -> jax.Array:
  """bool[N]: places of rows, for peers that count the empty ones."""
  return flat(np.arange(shape[0] * shape[1]) < shape[0])


def tokens(mask, old, advantages, **more) -> Tokens:
  """Tokens of a table; `advantages` may have one entry a row."""
  shape = np.shape(mask)
  advantages = np.asarray(advantages)
  if advantages.ndim == 1:
    advantages = np.broadcast_to(advantages[:, None], shape)
  row = rows(shape)
  more = {k: None if x is None else flat(x) for k, x in more.items()}
  return Tokens(shown(mask), flat(old), flat(advantages), row, row, **more)


def row_mean_advantages(given: Tokens) -> Tokens:
  """With the mean of its row for every token's advantage: row 20 of B2."""
  mean = masked.segment_mean(given.advantages, given.mask, given.sequences)
  return given._replace(advantages=mean[given.sequences])


def weigh(
  aggregate: Callable[..., Weighting], mask, kept=None, *, original=True, **more
) -> Weighting:
  """An aggregation over a table; `kept` is what a rejection left of it."""
  mask = np.asarray(mask) > 0
  row = np.broadcast_to(np.arange(mask.shape[0])[:, None], mask.shape)
  ids = (row, row, np.zeros_like(row))
  if kept is None:
    return aggregate(mask, *ids, **more)
  kept = table(kept, mask.shape)
  over = aggregation.over_original if original else aggregation.over_effective
  return over(aggregate, mask, kept, *ids, **more)


def total(x_N, weighting: Weighting) -> jax.Array:
  """sum(weights * x) / count."""
  weights = flat(weighting.weights.astype(np.float32))
  return masked.weighted(x_N, weights, weighting.count).mean()


def graded(
  per_token: Callable, x, weighting: Weighting
) -> tuple[jax.Array, np.ndarray, PolicyLoss | jax.Array]:
  """Loss, its gradient by a table `x`, and what per_token returned.

  Args:
    per_token: x_N -> PolicyLoss, or values [N].
  """

  def objective(x_N):
    out = per_token(x_N)
    loss_N = out.loss_N if isinstance(out, PolicyLoss) else out
    return total(loss_N, weighting), out

  (value, out), gradient = jax.value_and_grad(objective, has_aux=True)(flat(x))
  return value, table(gradient, np.shape(x)), out


def share(x_N, given: Tokens) -> jax.Array:
  """The mean over tokens of a bool."""
  return masked.mean(jnp.asarray(x_N, jnp.float32), given.mask)


def moved(logprobs, given: Tokens, limit=losses.MAX_LOG_RATIO) -> jax.Array:
  """Mean of log pi_old / pi, as peers log it."""
  gap = masked.log_ratio(flat(logprobs), given.old, given.mask, limit)
  return masked.mean(-gap, given.mask)
