"""The jitted programs of the learner: zeros, add a micro-batch, apply.

Floor 2, under `learner`. Pure functions of (state, sums, batch): no mesh is
named and no process is known here. Gradients and (sum, count) pairs are summed
unnormalised, and divided once in `apply`.

Letters: B rows, T tokens, W parts that the mesh splits rows into, N
loss-carrying tokens of a part of a micro-batch.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agentjax.model import mesh as meshes
from agentjax.model import transformer
from agentjax.rl import kl, masked
from agentjax.rl.batch import Batch
from agentjax.rl.losses import Tokens
from agentjax.rl.masked import Pair, weighted
from agentjax.rl.token_stats import Head, compact, token_stats


class State(NamedTuple):
  """Everything that an update changes; checkpointed as it is."""

  params: Any
  opt_state: Any
  step: jax.Array  # int32: updates that changed the weights
  skipped: jax.Array  # int32: updates that were not finite


@dataclasses.dataclass(frozen=True)
class Sums:
  """What micro-batches add up: gradients, pairs for means, maxima."""

  grads: Any
  pairs: dict[str, Pair]
  maxima: dict[str, jax.Array]


jax.tree_util.register_dataclass(
  Sums, data_fields=['grads', 'pairs', 'maxima'], meta_fields=[]
)

_PAIRS = (
  'loss', 'kl', 'behaviour_kl', 'entropy', 'clip_fraction', 'clip_low_fraction',
  'clip_high_fraction', 'dual_clip_fraction', 'log_ratio_clipped',
)  # fmt: skip
_MAXIMA = ('logprob_gap', 'ratio')


def init(params, *, optimizer) -> State:
  return State(params, optimizer.init(params), jnp.int32(0), jnp.int32(0))


def zeros(params) -> Sums:
  zero = jnp.zeros(())
  return Sums(
    jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
    {name: Pair(zero, zero) for name in _PAIRS},
    {name: zero for name in _MAXIMA},
  )


class _Tokens(NamedTuple):
  """The loss-carrying tokens of a micro-batch, [W, N].

  Each part of the rows has its own, so that none leaves its chips.
  """

  ids: jax.Array
  mask: jax.Array
  weights: jax.Array
  logprobs: jax.Array
  advantages: jax.Array
  temperature: jax.Array
  sampled: jax.Array  # False for an observation that an ablation trains on
  before: jax.Array  # index of the state that predicts it, in its part
  sequences: jax.Array  # 0.. for the trajectories of a part
  turns: jax.Array  # 0.. for the turns of a part


def _by_part(x: jax.Array, parts: int) -> jax.Array:
  """[B, T, ...] -> [W, B / W * T, ...], where the rows already are."""
  x = x.reshape(parts, -1, *x.shape[2:])
  return meshes.constrain(x, 'batch', *['none'] * (x.ndim - 1))


def _tokens(batch: Batch, capacity: int, parts: int) -> _Tokens:
  index_WN, mask_WN = jax.vmap(lambda mask: compact(mask, capacity))(
    _by_part(batch.weights > 0, parts)
  )

  def take(x, fill):
    x = jnp.take_along_axis(_by_part(x, parts), index_WN, 1)
    return jnp.where(mask_WN, x, fill)

  # Compacting keeps the order, so that a trajectory's tokens are neighbours.
  trajectory = (index_WN // batch.tokens.shape[1], take(batch.pack_ids, 0))
  return _Tokens(
    take(batch.tokens, 0),
    mask_WN,
    take(batch.weights, 0.0),
    take(batch.logprobs, 0.0),
    take(batch.advantages, 0.0),
    take(batch.temperature, 1.0),
    take(batch.versions, -1) >= 0,
    # Rows are packed from their first token on, which carries no loss: the
    # state before a loss-carrying token is always in the same row.
    jnp.maximum(index_WN - 1, 0),
    _ranks(*trajectory),
    _ranks(*trajectory, take(batch.turns, 0)),
  )


def _ranks(*keys_WN: jax.Array) -> jax.Array:
  """int32[W, N], below N: counts the changes of any key along a part."""
  new = jnp.stack([k[:, 1:] != k[:, :-1] for k in keys_WN]).any(0)
  return jnp.pad(jnp.cumsum(new, 1, dtype=jnp.int32), ((0, 0), (1, 0)))


def _stats(params, batch, tokens: _Tokens, config, dtype, **options):
  hidden = transformer.forward(
    params, batch.tokens, batch.positions, batch.pack_ids, config,
    dtype=dtype, remat=options['remat'], unroll=options['unroll'],
    attention=options['attention'],
  )  # fmt: skip
  hidden = _by_part(hidden, options['parts'])
  kernel = transformer.head_kernel(params)
  stats = functools.partial(
    token_stats,
    finish=transformer.finisher(config),
    chunk=options['chunk'],
  )
  before = jax.vmap(lambda h, index: h[index])(hidden, tokens.before)
  return jax.vmap(lambda h, *rest: stats(Head(h, kernel), *rest))(
    before, tokens.ids, tokens.temperature
  )


def add(
  params, reference, sums: Sums, batch: Batch, *, capacity, loss, kl_coef,
  entropy_coef, config, dtype, **options,
) -> Sums:  # fmt: skip
  """Adds one micro-batch's unnormalised gradients and pairs to `sums`."""
  tokens = _tokens(batch, capacity, options['parts'])
  mask, weights = tokens.mask, tokens.weights

  def objective(params):
    now = _stats(params, batch, tokens, config, dtype, **options)
    frozen = jax.lax.stop_gradient(now.logprobs_N)
    # Nothing sampled an observation: an ablation that trains on one takes it
    # as on-policy.
    old = jnp.where(tokens.sampled, tokens.logprobs, frozen)
    far = None
    if reference is not None:
      far = _stats(
        jax.lax.stop_gradient(reference),
        batch, tokens, config, dtype, **options,
      ).logprobs_N  # fmt: skip
    # Each part is a batch of its own: no sequence is in two.
    policy = jax.vmap(loss)(
      now.logprobs_N,
      Tokens(
        mask, old, tokens.advantages, tokens.sequences, tokens.turns,
        reference=far,
      ),
    )  # fmt: skip
    total = policy.loss_N
    toward = jnp.zeros_like(total)
    if far is not None:
      toward = kl.k3(now.logprobs_N, far, mask)
      if kl_coef:
        total += kl_coef * kl.ratio_gradient(toward, now.logprobs_N, far, mask)
    if entropy_coef:
      total -= entropy_coef * masked.hide(now.entropy_N, mask)
    gap = masked.log_ratio(now.logprobs_N, old, mask)
    pairs = {
      'loss': weighted(total, weights),
      'kl': weighted(toward, weights),
      # k3 of the behaviour policy to this one: how far it has moved.
      'behaviour_kl': weighted(jnp.exp(gap) - gap - 1, weights),
      'entropy': weighted(now.entropy_N, weights),
      'clip_fraction': weighted(policy.clipped_N, weights),
      'clip_low_fraction': weighted(policy.low_N, weights),
      'clip_high_fraction': weighted(policy.high_N, weights),
      'dual_clip_fraction': weighted(policy.dual_N, weights),
      'log_ratio_clipped': weighted(
        masked.beyond(now.logprobs_N, old, mask), weights
      ),
    }
    maxima = {
      'logprob_gap': jnp.max(jnp.abs(gap)),
      'ratio': jnp.max(jnp.exp(gap)),
    }
    return pairs['loss'].sum, (pairs, maxima)

  grads, (pairs, maxima) = jax.grad(objective, has_aux=True)(params)
  return Sums(
    jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums.grads, grads),
    jax.tree.map(jnp.add, sums.pairs, pairs),
    jax.tree.map(jnp.maximum, sums.maxima, maxima),
  )


def _all_finite(tree) -> jax.Array:
  return jnp.all(
    jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)])
  )


def apply(state: State, sums: Sums, *, optimizer) -> tuple[State, dict]:
  """Divides once, and steps the optimizer if there is something finite."""
  count = sums.pairs['loss'].count
  grads = jax.tree.map(
    lambda g, p: (g / jnp.maximum(count, 1.0)).astype(p.dtype),
    sums.grads,
    state.params,
  )
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(norm)
  safe = jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)
  updates, opt_state = optimizer.update(safe, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  # A gradient may be finite and what the optimizer makes of it not.
  finite &= (count == 0) | _all_finite(params)
  go = finite & (count > 0)
  params, opt_state = jax.tree.map(
    lambda new, old: jnp.where(go, new, old),
    (params, opt_state),
    (state.params, state.opt_state),
  )
  metrics = {name: pair.mean() for name, pair in sums.pairs.items()}
  metrics |= {f'max_{name}': value for name, value in sums.maxima.items()}
  metrics |= {
    'grad_norm': norm,
    'loss_tokens': count,
    'skipped_updates': state.skipped + ~finite,
  }
  state = State(params, opt_state, state.step + go, state.skipped + ~finite)
  return state, metrics
