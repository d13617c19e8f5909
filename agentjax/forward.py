"""The learner's pass over a micro-batch: loss-carrying tokens and their stats.

Floor 2, under `update` and `score`. Joins the decoder with `token_stats`:
which tokens carry a loss, the state before each of them, and what the policy
says there. Pure and traced; it knows no loss and no optimizer.

Letters: B rows, T tokens, W parts that the mesh splits rows into, N
loss-carrying tokens of a part of a micro-batch, D width, M kept ids of a token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentjax.model import mesh as meshes
from agentjax.model import transformer
from agentjax.model.attention import Attention
from agentjax.model.config import ModelConfig
from agentjax.rl.batch import Batch
from agentjax.rl.token_stats import Head, TokenStats, compact, token_stats


def trained_alone(frozen: Any, params: Any) -> Any:
  """The `whole` of a policy all of whose parameters are trained."""
  del frozen
  return params


@dataclasses.dataclass(frozen=True)
class Forward:
  """How the decoder is run.

  Attributes:
    parts: W. chunk: tokens whose logits exist at once, on each part.
    remat, unroll, attention: see `transformer.forward`.
    whole: (frozen, trained parameters) -> all parameters of the policy.
    trees: rows may hold trees, so that attention looks at the ends of spans.
  """

  config: ModelConfig
  parts: int
  chunk: int
  dtype: Any
  remat: Any
  unroll: bool
  attention: Attention
  whole: Callable[[Any, Any], Any] = trained_alone
  trees: bool = False

  def hidden(self, params: Any, batch: Batch) -> jax.Array:
    """[W, B / W * T, D]: the state after each token."""
    hidden = transformer.forward(
      params, batch.tokens, batch.positions, batch.pack_ids, self.config,
      dtype=self.dtype, remat=self.remat, unroll=self.unroll,
      attention=self.attention, ends_BT=batch.ends if self.trees else None,
    )  # fmt: skip
    return by_part(hidden, self.parts)

  def head(self, params: Any, hidden_WMD: jax.Array, before_WN) -> Head:
    """The states before tokens, [W, N, D], and the head's kernel."""
    return Head(at(hidden_WMD, before_WN), transformer.head_kernel(params))

  def stats(
    self, head: Head, tokens: Tokens, reference: Head | None = None
  ) -> TokenStats:
    """[W, N] of each field; with the exact KL to a reference's head."""
    stats = functools.partial(
      token_stats, finish=transformer.finisher(self.config), chunk=self.chunk,
      whole=transformer.whole_head,
    )  # fmt: skip

    def part(h, far, ids, temperature, kept):
      if far is not None:
        far = Head(far, reference.kernel_DV)
      own = Head(h, head.kernel_DV)
      return stats(own, ids, temperature, reference=far, kept_NM=kept)

    far = None if reference is None else reference.hidden_ND
    return jax.vmap(part)(
      head.hidden_ND, far, tokens.ids, tokens.temperature, tokens.kept
    )


class Tokens(NamedTuple):
  """The loss-carrying tokens of a micro-batch, [W, N].

  Each part of the rows has its own, so that none leaves its chips.
  """

  ids: jax.Array
  mask: jax.Array
  weights: jax.Array
  logprobs: jax.Array
  old: jax.Array
  advantages: jax.Array
  values: jax.Array
  returns: jax.Array
  temperature: jax.Array
  versions: jax.Array  # -1 for an observation that an ablation trains on
  before: jax.Array  # index of the state that predicts it, in its part
  place: jax.Array  # index of the token itself, in its part
  sequences: jax.Array  # 0.. for the trajectories of a part
  turns: jax.Array  # 0.. for the turns of a part
  kept: jax.Array | None  # [W, N, M], see `rl.batch.Batch`; None where M is 0

  @property
  def sampled(self) -> jax.Array:
    return self.versions >= 0


def by_part(x: jax.Array, parts: int) -> jax.Array:
  """[B, T, ...] -> [W, B / W * T, ...], where the rows already are."""
  x = x.reshape(parts, -1, *x.shape[2:])
  return meshes.constrain(x, 'batch', *['none'] * (x.ndim - 1))


def at(x_WM: jax.Array, index_WN: jax.Array) -> jax.Array:
  """x at these places of each part."""
  return jax.vmap(lambda x, index: x[index])(x_WM, index_WN)


def pick(batch: Batch, capacity: int, parts: int) -> Tokens:
  """The tokens of positive weight, of which a part has `capacity` at most."""
  index_WN, mask_WN = jax.vmap(lambda mask: compact(mask, capacity))(
    by_part(batch.weights > 0, parts)
  )

  def take(x, fill):
    x = jnp.take_along_axis(by_part(x, parts), index_WN, 1)
    return jnp.where(mask_WN, x, fill)

  kept = None
  if batch.kept.shape[-1]:
    kept = at(by_part(batch.kept, parts), index_WN)
    kept = jnp.where(mask_WN[..., None], kept, -1)
  # Compacting keeps the order, so that a trajectory's tokens are neighbours.
  T = batch.tokens.shape[1]
  trajectory = (index_WN // T, take(batch.pack_ids, 0))
  return Tokens(
    ids=take(batch.tokens, 0),
    mask=mask_WN,
    weights=take(batch.weights, 0.0),
    logprobs=take(batch.logprobs, 0.0),
    old=take(batch.old, 0.0),
    advantages=take(batch.advantages, 0.0),
    values=take(batch.values, 0.0),
    returns=take(batch.returns, 0.0),
    temperature=take(batch.temperature, 1.0),
    versions=take(batch.versions, -1),
    # The first token of a trajectory carries no loss: the state before one
    # that does is always in the same row.
    before=index_WN // T * T + take(batch.before, 0),
    place=index_WN,
    sequences=_ranks(*trajectory),
    turns=_ranks(*trajectory, take(batch.turns, 0)),
    kept=kept,
  )


def put_back(x_WN: jax.Array, tokens: Tokens, shape: tuple) -> jax.Array:
  """[B, T]: values of loss-carrying tokens where they stood, 0 elsewhere."""
  parts = x_WN.shape[0]
  size = shape[0] * shape[1] // parts
  # Entries that stand for no token go beyond the end, and are dropped.
  place = jnp.where(tokens.mask, tokens.place, size)

  def scatter(x, index):
    return jnp.zeros(size, x.dtype).at[index].set(x, mode='drop')

  return jax.vmap(scatter)(x_WN, place).reshape(shape)


def _ranks(*keys_WN: jax.Array) -> jax.Array:
  """int32[W, N], below N: counts the changes of any key along a part."""
  new = jnp.stack([k[:, 1:] != k[:, :-1] for k in keys_WN]).any(0)
  return jnp.pad(jnp.cumsum(new, 1, dtype=jnp.int32), ((0, 0), (1, 0)))
