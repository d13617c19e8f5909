"""The learner: one masked, jitted update from packed trajectories.

Floor 2. Joins `model` and `rl`, and knows no environment and no engine. A
batch of any number of rows is cut into micro-batches of one fixed shape;
unnormalised gradients and (sum, count) pairs are summed over them (and by the
mesh over devices and hosts) and divided once. An empty mask, or a gradient
that is not finite, leaves weights and optimizer untouched and is counted.

Letters: B rows, T tokens, N loss-carrying tokens of a micro-batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentjax.model import mesh as meshes
from agentjax.model import transformer
from agentjax.model.config import ModelConfig
from agentjax.rl import kl, losses
from agentjax.rl.batch import Batch
from agentjax.rl.losses import Pair, PolicyLoss, weighted
from agentjax.rl.token_stats import compact, token_stats

Loss = Callable[..., PolicyLoss]


class State(NamedTuple):
  """Everything that an update changes; checkpointed as it is."""

  params: Any
  opt_state: Any
  step: jax.Array  # int32: updates that changed the weights
  skipped: jax.Array  # int32: updates with a gradient that was not finite


def adamw(
  learning_rate: float,
  *,
  warmup_steps: int = 0,
  decay_steps: int = 0,
  weight_decay: float = 0.0,
  b1: float = 0.9,
  b2: float = 0.95,
  eps: float = 1e-8,
  max_grad_norm: float = 1.0,
) -> optax.GradientTransformation:
  """AdamW behind a global-norm clip, with a schedule by optimizer step.

  Linear warm-up from learning_rate / warmup_steps, then constant, or with
  `decay_steps` (counted from the start) a cosine to a tenth of it.
  """
  if decay_steps and decay_steps <= warmup_steps:
    raise ValueError(
      f'decay_steps {decay_steps} must exceed warmup_steps {warmup_steps}'
    )

  def schedule(count):
    warm = jnp.minimum(1.0, (count + 1) / max(warmup_steps, 1))
    if not decay_steps:
      return learning_rate * warm
    done = (count - warmup_steps) / (decay_steps - warmup_steps)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(done, 0.0, 1.0)))
    return learning_rate * warm * (0.1 + 0.9 * cosine)

  return optax.chain(
    optax.clip_by_global_norm(max_grad_norm),
    optax.adamw(schedule, b1, b2, eps, weight_decay=weight_decay),
  )


@dataclasses.dataclass(frozen=True)
class Sums:
  """What micro-batches add up: gradients, pairs for means, maxima."""

  grads: Any
  pairs: dict[str, Pair]
  maxima: dict[str, jax.Array]


jax.tree_util.register_dataclass(
  Sums, data_fields=['grads', 'pairs', 'maxima'], meta_fields=[]
)

_PAIRS = ('loss', 'kl', 'behaviour_kl', 'entropy', 'clip_fraction')
_MAXIMA = ('logprob_gap', 'ratio')


class Learner:
  """Updates a policy.

  Args:
    config: the model's. optimizer: an Optax transformation.
    loss: a policy loss of `rl.losses`, options bound.
    rows, length: shape of a micro-batch; rows divide over data * fsdp.
    shares: fractions of a micro-batch's tokens that may carry loss; one
      program each, the smallest that fits is used.
    kl_coef: weight of k3 to the reference, with the ratio's gradient.
    entropy_coef: weight of the entropy bonus.
    chunk: tokens whose logits exist at once. dtype: of compute.
    remat, unroll: see `transformer.forward`.
    mesh: None for one device.
  """

  def __init__(
    self,
    config: ModelConfig,
    *,
    optimizer: optax.GradientTransformation,
    loss: Loss = losses.ppo_clip,
    rows: int,
    length: int,
    shares: Sequence[float] = (1.0,),
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    chunk: int = 1024,
    dtype: str = 'float32',
    remat: bool = True,
    unroll: bool = False,
    mesh: Mesh | None = None,
  ):
    if list(shares) != sorted(set(shares)) or shares[-1] != 1.0:
      raise ValueError(f'shares {shares}: give ascending fractions up to 1.0')
    if length > config.context:
      raise ValueError(
        f'length {length} exceeds the {config.context} positions of the model'
      )
    self.config, self.rows, self.length = config, rows, length
    self.kl_coef = kl_coef
    self.mesh, self._optimizer = mesh, optimizer
    self._capacities = [max(1, int(rows * length * s)) for s in shares]
    if mesh is not None:
      meshes.check(config, mesh)
      ways = mesh.shape['data'] * mesh.shape['fsdp']
      if rows % ways:
        raise ValueError(
          f'rows {rows} do not divide over data * fsdp = {ways} devices'
        )
    add = functools.partial(
      _add,
      config=config,
      loss=loss,
      kl_coef=kl_coef,
      entropy_coef=entropy_coef,
      chunk=chunk,
      dtype=jnp.dtype(dtype),
      remat=remat,
      unroll=unroll,
    )
    self._zeros = jax.jit(_zeros)
    self._add = jax.jit(add, static_argnames='capacity', donate_argnums=2)
    self._apply = jax.jit(
      functools.partial(_apply, optimizer=optimizer), donate_argnums=0
    )

  # ---- state --------------------------------------------------------------

  def shardings(self) -> Any:
    """Shardings of the parameters, or None without a mesh."""
    if self.mesh is None:
      return None
    return meshes.shardings(
      meshes.param_axes(self.config),
      self.mesh,
      transformer.init_shapes(self.config),
    )

  def init(self, params: Any) -> State:
    """A state with `params`, which it takes over, and a fresh optimizer."""
    if (shardings := self.shardings()) is not None:
      params = jax.device_put(params, shardings)
    with self._on_mesh():
      opt_state = jax.jit(self._optimizer.init)(params)
      zero = jax.jit(lambda: (jnp.int32(0), jnp.int32(0)))
      return State(params, opt_state, *zero())

  def _on_mesh(self):
    if self.mesh is None:
      return contextlib.nullcontext()
    return jax.set_mesh(self.mesh)

  def compile(self, state: State, reference: Any = None) -> State:
    """Runs every program once on an empty batch, which changes nothing."""
    empty = np.zeros((self.rows, self.length))
    batch = Batch(*(empty.astype(d) for d in _DTYPES))
    for capacity in self._capacities:
      state, _ = self._update(state, [(batch, capacity)], reference)
    return state

  # ---- update -------------------------------------------------------------

  def update(
    self, state: State, batch: Batch, reference: Any = None
  ) -> tuple[State, dict[str, float]]:
    """One optimizer step on a batch of this host's rows.

    Args:
      state: given up. batch: arrays [B, length], B a multiple of `rows` of
        this process (`rows` / number of processes on a mesh over several).
      reference: parameters of the KL's reference policy, or None.

    Returns:
      The new state, and metrics averaged over all loss-carrying tokens.
    """
    local = (
      self.rows // jax.process_count() if self._spans_hosts() else self.rows
    )
    B = batch.tokens.shape[0]
    if B % local or batch.tokens.shape[1] != self.length:
      raise ValueError(
        f'batch of shape {batch.tokens.shape}: rows must be a multiple of '
        f'{local} and the length {self.length}, as rl.batch.pack makes them'
      )
    pieces = []
    for i in range(0, B, local):
      piece = Batch(*(x[i : i + local] for x in batch))
      pieces.append((piece, self._capacity(piece)))
    return self._update(state, pieces, reference)

  def _spans_hosts(self) -> bool:
    return self.mesh is not None and jax.process_count() > 1

  def _capacity(self, piece: Batch) -> int:
    if self._spans_hosts():  # every process must pick the same program
      return self._capacities[-1]
    count = int((piece.weights > 0).sum())
    return next(c for c in self._capacities if c >= count)

  def _update(self, state, pieces, reference):
    with self._on_mesh():
      sums = self._zeros(state.params)
      for piece, capacity in pieces:
        sums = self._add(
          state.params, reference, sums, self._put(piece), capacity=capacity
        )
      state, metrics = self._apply(state, sums)
    return state, {k: float(v) for k, v in jax.device_get(metrics).items()}

  def _put(self, piece: Batch) -> Any:
    if self.mesh is None:
      return piece
    sharding = NamedSharding(self.mesh, PartitionSpec(meshes.RULES['batch']))
    return Batch(
      *(jax.make_array_from_process_local_data(sharding, x) for x in piece)
    )


_DTYPES = (
  np.int32, np.int32, np.int32, np.float32, np.float32, np.float32,
  np.float32, np.int32,
)  # fmt: skip


# ---- jitted programs ------------------------------------------------------


def _zeros(params) -> Sums:
  zero = jnp.zeros(())
  return Sums(
    jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
    {name: Pair(zero, zero) for name in _PAIRS},
    {name: zero for name in _MAXIMA},
  )


class _Tokens(NamedTuple):
  """The loss-carrying tokens of a micro-batch, flat [N]."""

  ids: jax.Array
  mask: jax.Array
  weights: jax.Array
  logprobs: jax.Array
  advantages: jax.Array
  temperature: jax.Array
  sampled: jax.Array  # False for an observation that an ablation trains on


def _tokens(batch: Batch, capacity: int) -> tuple[_Tokens, jax.Array]:
  """Those tokens, and the flat index of the state that predicts each."""
  index_N, mask_N = compact(batch.weights > 0, capacity)

  def take(x, fill):
    return jnp.where(mask_N, x.reshape(-1)[index_N], fill)

  tokens = _Tokens(
    take(batch.tokens, 0),
    mask_N,
    take(batch.weights, 0.0),
    take(batch.logprobs, 0.0),
    take(batch.advantages, 0.0),
    take(batch.temperature, 1.0),
    take(batch.versions, -1) >= 0,
  )
  # Rows are packed from their first token on, which carries no loss: the
  # state before a loss-carrying token is always in the same row.
  return tokens, jnp.maximum(index_N - 1, 0)


def _stats(params, batch, tokens: _Tokens, before_N, config, dtype, **options):
  hidden = transformer.forward(
    params, batch.tokens, batch.positions, batch.pack_ids, config,
    dtype=dtype, remat=options['remat'], unroll=options['unroll'],
  )  # fmt: skip
  kernel = transformer.head_kernel(params)
  return token_stats(
    hidden.reshape(-1, config.width)[before_N],
    tokens.ids,
    tokens.temperature,
    lambda h: transformer.unembed(kernel, h, config),
    chunk=options['chunk'],
  )


def _add(
  params, reference, sums: Sums, batch: Batch, *, capacity, loss, kl_coef,
  entropy_coef, config, dtype, **options,
) -> Sums:  # fmt: skip
  """Adds one micro-batch's unnormalised gradients and pairs to `sums`."""
  tokens, before_N = _tokens(batch, capacity)
  mask, weights = tokens.mask, tokens.weights

  def objective(params):
    now = _stats(params, batch, tokens, before_N, config, dtype, **options)
    frozen = jax.lax.stop_gradient(now.logprobs_N)
    # Nothing sampled an observation: an ablation that trains on one takes it
    # as on-policy.
    old = jnp.where(tokens.sampled, tokens.logprobs, frozen)
    policy = loss(now.logprobs_N, old, tokens.advantages, mask)
    total = policy.loss_N
    toward = jnp.zeros_like(total)
    if reference is not None:
      far = _stats(
        jax.lax.stop_gradient(reference),
        batch, tokens, before_N, config, dtype, **options,
      )  # fmt: skip
      toward = kl.k3(now.logprobs_N, far.logprobs_N, mask)
      if kl_coef:
        total += kl_coef * kl.ratio_gradient(toward, now.logprobs_N, mask)
    if entropy_coef:
      total -= entropy_coef * losses.hide(now.entropy_N, mask)
    gap = losses.log_ratio(now.logprobs_N, old, mask)
    pairs = {
      'loss': weighted(total, weights),
      'kl': weighted(toward, weights),
      # k3 of the behaviour policy to this one: how far it has moved.
      'behaviour_kl': weighted(jnp.exp(gap) - gap - 1, weights),
      'entropy': weighted(now.entropy_N, weights),
      'clip_fraction': weighted(policy.clipped_N, weights),
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


def _apply(state: State, sums: Sums, *, optimizer) -> tuple[State, dict]:
  """Divides once, and steps the optimizer if there is something finite."""
  count = sums.pairs['loss'].count
  grads = jax.tree.map(
    lambda g, p: (g / jnp.maximum(count, 1.0)).astype(p.dtype),
    sums.grads,
    state.params,
  )
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(norm)
  go = finite & (count > 0)
  safe = jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)
  updates, opt_state = optimizer.update(safe, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
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
