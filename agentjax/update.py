"""The jitted programs of the learner: zeros, add micro-batches, apply.

Floor 2, under `learner`. Pure functions of (state, sums, batch): no mesh is
named and no process is known here. Gradients and (sum, count) pairs are summed
unnormalised over micro-batches, and divided once in `apply`: those of the
objective by the count of `rl.aggregation`, metrics by the number of tokens.

Letters: K micro-batches of one call, B rows, T tokens, W parts that the mesh
splits rows into, N loss-carrying tokens of a part of a micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agentjax.forward import Forward, Tokens, at, pick
from agentjax.model import heads
from agentjax.optimizers import check_numbers
from agentjax.rl import kl, losses, masked, values
from agentjax.rl.batch import Batch
from agentjax.rl.losses import PolicyLoss
from agentjax.rl.masked import Pair, weighted
from agentjax.rl.token_stats import Head

Loss = Callable[..., PolicyLoss]


class State(NamedTuple):
  """Everything that an update changes; checkpointed as it is."""

  params: Any  # what is trained of the policy: all, or adapters
  opt_state: Any
  step: jax.Array  # int32: updates that changed the weights
  skipped: jax.Array  # int32: updates that were not finite
  critic: Any = None  # its head, and its trunk where it has its own
  critic_opt_state: Any = None


@dataclasses.dataclass(frozen=True)
class Critic:
  """Predicts the value of the state before each token.

  Attributes:
    optimizer: of its parameters.
    own_trunk: a decoder of its own, which begins as the policy's; else the
      head reads the policy's hidden states.
    detach: of a shared trunk: the value loss moves the head alone.
    coef: of the value loss, which counts where a trunk is shared.
    clip, error: see `rl.values.value_loss`.
    warmup: updates that move the critic alone.
    turn_ends: it learns at the last token of each turn alone: for credit by
      turns, which reads it there alone.
  """

  optimizer: optax.GradientTransformation
  own_trunk: bool = False
  detach: bool = False
  coef: float = 0.5
  clip: float | None = None
  error: Callable[[jax.Array], jax.Array] = values.squared
  warmup: int = 0
  turn_ends: bool = False

  def __post_init__(self):
    if not isinstance(self.optimizer, optax.GradientTransformation):
      raise ValueError(
        f'critic.optimizer is {self.optimizer!r}: give an Optax '
        "transformation, in a config a section with 'call'"
      )
    clip = {} if self.clip is None else {'critic.clip': self.clip}
    check_numbers(
      **{'critic.coef': self.coef, 'critic.warmup': self.warmup}, **clip
    )
    if not self.coef:
      raise ValueError('critic.coef is 0: it would never learn anything')
    if self.own_trunk and self.detach:
      raise ValueError(
        'critic.detach is of a shared trunk: drop it, or own_trunk'
      )

  def init(self, policy: Any, config) -> Any:
    """Its parameters, from all parameters of the policy."""
    critic = {'value': heads.init_value(config)}
    if self.own_trunk:
      critic['trunk'] = {k: v for k, v in policy.items() if k != 'head'}
    return critic


@dataclasses.dataclass(frozen=True)
class Objective:
  """What is minimised.

  Attributes:
    loss: of `rl.losses`, options bound.
    kl_value, kl_gradient: of `rl.kl`; `kl.full` is exact, over the whole
      vocabulary.
    entropy_coef: weight of the entropy bonus.
    critic: or None.
  """

  loss: Loss = losses.ppo_clip
  kl_value: Callable = kl.k3
  kl_gradient: Callable = kl.ratio_gradient
  entropy_coef: float = 0.0
  critic: Critic | None = None


@dataclasses.dataclass(frozen=True)
class Sums:
  """What micro-batches add up: gradients, pairs for means, maxima."""

  grads: Any  # (of the policy, of the critic)
  count: jax.Array
  pairs: dict[str, Pair]
  maxima: dict[str, jax.Array]


jax.tree_util.register_dataclass(
  Sums, data_fields=['grads', 'count', 'pairs', 'maxima'], meta_fields=[]
)

_PAIRS = (
  'kl', 'behaviour_kl', 'entropy', 'clip_fraction', 'clip_low_fraction',
  'clip_high_fraction', 'dual_clip_fraction', 'log_ratio_clipped', 'weight',
  'squared_weight',
)  # fmt: skip
_CRITIC_PAIRS = (
  'value_loss', 'value_clip_fraction', 'return', 'squared_return',
  'value_error', 'squared_value_error',
)  # fmt: skip
_MAXIMA = ('logprob_gap', 'ratio')


def zeros(params, critic) -> Sums:
  zero = jnp.zeros(())
  grads = jax.tree.map(
    lambda p: jnp.zeros(p.shape, jnp.float32), (params, critic)
  )
  names = ('loss', *_PAIRS, *(_CRITIC_PAIRS if critic is not None else ()))
  return Sums(
    grads,
    zero,
    {name: Pair(zero, zero) for name in names},
    {name: zero for name in _MAXIMA},
  )


def init(params, frozen, *, optimizer, critic, model: Forward) -> State:
  zero = jnp.int32(0)
  state = State(params, optimizer.init(params), zero, zero)
  if critic is None:
    return state
  # Copies: an update gives its state up, and donates no array twice.
  own = jax.tree.map(
    jnp.copy, critic.init(model.whole(frozen, params), model.config)
  )
  return state._replace(critic=own, critic_opt_state=critic.optimizer.init(own))


# ---- add --------------------------------------------------------------------


def add(
  trained, frozen, reference, kl_coef, sums: Sums, batches: Batch, *,
  capacity: int, model: Forward, objective: Objective,
) -> Sums:  # fmt: skip
  """Adds micro-batches' unnormalised gradients and pairs to `sums`.

  Args:
    trained: (parameters of the policy, of the critic or None).
    frozen: parameters that take part and are not trained, or None.
    reference: trained parameters of the reference policy, or None.
    batches: arrays [K, B, T].
  """

  def one(sums, batch):
    more = _one(trained, frozen, reference, kl_coef, batch, capacity=capacity,
                model=model, objective=objective)  # fmt: skip
    return _added(sums, more), None

  if batches.tokens.shape[0] == 1:  # a loop would cost a little on a CPU
    return one(sums, jax.tree.map(lambda x: x[0], batches))[0]
  return jax.lax.scan(one, sums, batches)[0]


def _added(sums: Sums, more: Sums) -> Sums:
  return Sums(
    jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums.grads, more.grads),
    sums.count + more.count,
    jax.tree.map(jnp.add, sums.pairs, more.pairs),
    jax.tree.map(jnp.maximum, sums.maxima, more.maxima),
  )


def _one(
  trained, frozen, reference, kl_coef, batch: Batch, *, capacity,
  model: Forward, objective: Objective,
) -> Sums:  # fmt: skip
  tokens = pick(batch, capacity, model.parts)

  def total(trained):
    params, critic = trained
    policy = model.whole(frozen, params)
    hidden = model.hidden(policy, batch)
    far = None
    if reference is not None:
      there = jax.lax.stop_gradient(model.whole(frozen, reference))
      far = model.head(there, model.hidden(there, batch), tokens.before)
    loss_WN, pairs, maxima = _policy(
      model, objective, model.head(policy, hidden, tokens.before), far, kl_coef,
      tokens,
    )  # fmt: skip
    if objective.critic is not None:
      value_WN, more = _value(
        model, objective.critic, critic, hidden, batch, tokens
      )
      loss_WN += objective.critic.coef * value_WN
      pairs |= more
    pairs['loss'] = weighted(loss_WN, tokens.weights)
    return pairs['loss'].sum, (pairs, maxima)

  grads, (pairs, maxima) = jax.grad(total, has_aux=True)(trained)
  return Sums(grads, jnp.sum(batch.counts), pairs, maxima)


def _policy(
  model: Forward, objective: Objective, head: Head, far: Head | None, kl_coef,
  tokens: Tokens,
):  # fmt: skip
  """Loss per token, and metrics; KL and entropy bonus among them."""
  mask = tokens.mask
  exact = objective.kl_value is kl.full
  now = model.stats(head, tokens, far if exact else None)
  frozen = jax.lax.stop_gradient(now.logprobs_N)
  # Nothing sampled an observation: an ablation that trains on one takes it
  # as on-policy.
  behaviour, old = (
    jnp.where(tokens.sampled, x, frozen) for x in (tokens.logprobs, tokens.old)
  )
  toward = jnp.zeros_like(frozen)
  away = None
  if far is not None:
    away = model.stats(far, tokens).logprobs_N
    if exact:
      toward = masked.hide(now.kl_N, mask)
    else:
      toward = objective.kl_value(now.logprobs_N, away, mask)
  policy = lossed(
    objective.loss, now.logprobs_N, tokens, old=old, behaviour=behaviour,
    reference=away,
  )  # fmt: skip
  loss = policy.loss_N
  if far is not None:
    # An exact KL has its own gradient; a value at a token needs another one.
    term = toward
    if not exact:
      # The tokens are those of `old`: where the policy has moved since, only
      # weights of pi / old keep this a gradient of the KL of pi.
      term = objective.kl_gradient(
        toward, now.logprobs_N, away, mask, old_N=old
      )
    loss += kl_coef * term
  if objective.entropy_coef:
    loss -= objective.entropy_coef * masked.hide(now.entropy_N, mask)
  gap = masked.log_ratio(now.logprobs_N, behaviour, mask)
  ratio = masked.log_ratio(now.logprobs_N, old, mask)
  per_token = {
    'kl': toward,
    # k3 of the behaviour policy to this one: how far it has moved.
    'behaviour_kl': jnp.exp(gap) - gap - 1,
    'entropy': now.entropy_N,
    'clip_fraction': policy.clipped_N,
    'clip_low_fraction': policy.low_N,
    'clip_high_fraction': policy.high_N,
    'dual_clip_fraction': policy.dual_N,
    'log_ratio_clipped': masked.beyond(now.logprobs_N, old, mask),
    'weight': policy.weights_N,
    'squared_weight': jnp.square(policy.weights_N),
  }
  pairs = _means(per_token, mask)
  maxima = {
    'logprob_gap': jnp.max(jnp.abs(gap)),
    'ratio': jnp.max(masked.hide(jnp.exp(ratio), mask)),
  }
  return loss, pairs, maxima


def lossed(
  loss: Loss, logprobs_WN: jax.Array, tokens: Tokens, **policies
) -> PolicyLoss:
  """The loss of all parts as one, [W, N]: some look at all that they are given.

  Args:
    policies: log-probs [W, N] of others, fields of `losses.Tokens`.
  """
  shape = logprobs_WN.shape
  # No sequence is in two parts, and each part counts its own from 0.
  first = jnp.arange(shape[0], dtype=jnp.int32)[:, None] * shape[1]
  given = {
    'mask': tokens.mask,
    'advantages': tokens.advantages,
    'sequences': tokens.sequences + first,
    'turns': tokens.turns + first,
    **policies,
  }
  flat = {k: x.reshape(-1) for k, x in given.items() if x is not None}
  out = loss(logprobs_WN.reshape(-1), losses.Tokens(**flat))
  return PolicyLoss(*(x.reshape(shape) for x in out))


def _value(
  model: Forward, critic: Critic, params, hidden_WMD, batch: Batch,
  tokens: Tokens,
):  # fmt: skip
  """The critic's loss per token, and metrics."""
  if critic.own_trunk:
    hidden_WMD = model.hidden(params['trunk'], batch)
  elif critic.detach:
    hidden_WMD = jax.lax.stop_gradient(hidden_WMD)
  now = heads.value(params['value'], at(hidden_WMD, tokens.before))
  mask = tokens.mask & tokens.sampled
  if critic.turn_ends:
    mask = jax.vmap(values.turn_ends)(mask, tokens.turns)
  found = values.value_loss(
    now, tokens.values, tokens.returns, mask,
    clip=critic.clip, error=critic.error,
  )  # fmt: skip
  error = tokens.returns - now
  per_token = {
    'value_loss': found.loss_N,
    'value_clip_fraction': found.clipped_N,
    'return': tokens.returns,
    'squared_return': jnp.square(tokens.returns),
    'value_error': error,
    'squared_value_error': jnp.square(error),
  }
  return found.loss_N, _means(per_token, mask)


def _means(per_token: dict, mask: jax.Array) -> dict[str, Pair]:
  ones = mask.astype(jnp.float32)
  return {name: weighted(x, ones) for name, x in per_token.items()}


# ---- apply ------------------------------------------------------------------


def _all_finite(tree) -> jax.Array:
  return jnp.all(
    jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)])
  )


def _stepped(optimizer, sums, count, params, opt_state):
  """New parameters and optimizer state, the gradient's norm, are they finite.

  Gradients that are not finite are taken for 0.
  """
  # Of the sums: divided ones would all be written down for it.
  norm = masked.divide(optax.tree.norm(sums), count)
  finite = jnp.isfinite(norm)
  safe = jax.tree.map(
    lambda g, p: masked.divide(jnp.where(finite, g, 0), count).astype(p.dtype),
    sums,
    params,
  )
  updates, opt_state = optimizer.update(safe, opt_state, params)
  params = optax.apply_updates(params, updates)
  # A gradient may be finite and what the optimizer makes of it not.
  return params, opt_state, norm, finite & ((count == 0) | _all_finite(params))


def apply(
  state: State, sums: Sums, *, optimizer, critic: Critic | None
) -> tuple[State, dict]:
  """Divides once, and steps the optimizers if there is something finite."""
  count = sums.count
  params, opt_state, norm, finite = _stepped(
    optimizer, sums.grads[0], count, state.params, state.opt_state
  )
  moved = state._replace(params=params, opt_state=opt_state)
  metrics = {name: pair.mean() for name, pair in sums.pairs.items()}
  moves = jnp.bool_(True)
  if critic is not None:
    own, own_state, own_norm, own_finite = _stepped(
      critic.optimizer,
      sums.grads[1],
      count,
      state.critic,
      state.critic_opt_state,
    )
    moved = moved._replace(critic=own, critic_opt_state=own_state)
    finite &= own_finite
    moves = state.step >= critic.warmup
    metrics['critic_grad_norm'] = own_norm
    metrics |= _explained(metrics)
  go = finite & (count > 0)

  def keep_unless(go, new, old):
    return jax.tree.map(lambda new, old: jnp.where(go, new, old), new, old)

  state = State(
    *keep_unless(go & moves, moved[:2], state[:2]),
    state.step + go,
    state.skipped + ~finite,
    *keep_unless(go, moved[4:], state[4:]),
  )
  metrics |= {f'max_{name}': value for name, value in sums.maxima.items()}
  squares = metrics.pop('squared_weight')
  metrics |= {
    'loss': masked.divide(sums.pairs['loss'].sum, count),
    'grad_norm': norm,
    'loss_tokens': sums.pairs['entropy'].count,
    # Kish's: 1 where all tokens weigh the same.
    'effective_sample_size': masked.divide(metrics['weight'] ** 2, squares),
    'skipped_updates': state.skipped,
  }
  return state, metrics


def _explained(metrics: dict) -> dict:
  """1 - var(R - V) / var(R), of means that it takes out of `metrics`."""
  of_returns = metrics.pop('squared_return') - metrics['return'] ** 2
  of_errors = metrics.pop('squared_value_error') - metrics['value_error'] ** 2
  share = 1 - masked.divide(of_errors, of_returns)
  # What is left of float32 sums of returns that are all alike is rounding.
  varies = of_returns > 1e-5 * jnp.square(metrics['return'])
  return {'explained_variance': jnp.where(varies, share, 0.0)}
