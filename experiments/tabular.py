"""A policy that is a table, trained by the library's own pieces.

Floor 4. The way of one draw, in small: sample, `rl.draw`, an estimator, a loss
of `rl.losses` weighted by `rl.aggregation`, Optax. An `Algorithm` is what a
paper changes of it. Knows no transformer and no engine: what it shows is that
the pieces learn, and how fast beside one another.

Letters: N tokens, flat; S states; M places in a turn; V vocabulary.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentjax.rl import advantages, aggregation, kl, losses, masked, values
from agentjax.rl.draw import Draw
from agentjax.rl.losses import Tokens
from experiments import chains
from experiments.chains import Chain, Sampled

# (chain, sampled, probs_SMV, rng) -> fields of the draw, turns sampled for it.
Data = Callable[..., tuple[dict[str, Any], int]]


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """What a method is made of; the default is GRPO with a mean over tokens.

  Attributes:
    estimator, loss, aggregate: of the seams of `rl`.
    targets: draw -> what a critic is to predict, where there is one. critic:
      (mask, turns) -> where it learns. value_clip: of its loss.
    data: what the estimator needs beside rewards.
    leaves: rows of a tree; 1 for none.
    keep: draw -> bool[N]: which rows have a loss, over the original count.
    token_weights: draw -> float[T] a row, or None for 1.
    reward_kl_coef: weight of the KL to the reference, in the reward.
    kl_coef, kl_value, kl_gradient: of a term in the loss.
    entropy_coef: of a bonus.
    lag: how many updates the sampler is behind.
    phase: updates after which the reference is renewed; 0, never.
  """

  estimator: Callable = advantages.grpo
  loss: Callable = losses.ppo_clip
  aggregate: Callable = aggregation.token_mean
  targets: Callable | None = None
  critic: Callable = lambda mask, turns: mask
  value_clip: float | None = None
  data: Data = lambda chain, sampled, probs, rng: ({}, 0)
  leaves: int = 1
  keep: Callable | None = None
  token_weights: Callable | None = None
  reward_kl_coef: float = 0.0
  kl_coef: float = 0.0
  kl_value: Callable = kl.k3
  kl_gradient: Callable = kl.ratio_gradient
  entropy_coef: float = 0.0
  lag: int = 0
  phase: int = 0


@dataclasses.dataclass(frozen=True)
class Settings:
  """How it is trained: `steps` optimizer steps on each draw, all of it each.

  `shared` is how much of a logit all states have in common, as weights of a
  network have.
  """

  updates: int = 60
  group_size: int = 8
  steps: int = 2
  learning_rate: float = 0.1
  critic_rate: float = 0.1
  shared: float = 0.0


@dataclasses.dataclass(frozen=True)
class Curve:
  """Exact scores before each update and at the end; turns sampled so far."""

  scores: np.ndarray
  turns: np.ndarray

  def reached(self, bound: float) -> int | None:
    """The first update before which the score was `bound`, if it ever was."""
    at = np.flatnonzero(self.scores >= bound)
    return int(at[0]) if len(at) else None


# ---- the table --------------------------------------------------------------


def init(chain: Chain, M: int) -> dict[str, jax.Array]:
  V = chain.vocabulary
  return {
    'own': jnp.zeros((chain.states * M, V)),
    'shared': jnp.zeros((M, V)),
    'values': jnp.zeros(chain.states * M),
  }


def log_policy(params, shared: float) -> jax.Array:
  """[S * M, V]: log-probs of each row of the table."""
  rows = len(params['own']) // len(params['shared'])
  every = jnp.tile(params['shared'], (rows, 1))
  return jax.nn.log_softmax(params['own'] + shared * every)


def _step(params, opt_state, batch, *, algorithm, settings, optimizer):
  """One optimizer step."""
  o, tokens = algorithm, batch['tokens']

  def objective(params):
    logprobs_NV = log_policy(params, settings.shared)[batch['slots']]
    at = jnp.take_along_axis(logprobs_NV, batch['ids'][:, None], 1)[:, 0]
    loss = o.loss(at, tokens).loss_N
    if o.kl_coef:
      far = tokens.reference
      value = o.kl_value(at, far, tokens.mask)
      term = o.kl_gradient(value, at, far, tokens.mask, old_N=tokens.old)
      loss += o.kl_coef * term
    if o.entropy_coef:
      entropy = -jnp.sum(jnp.exp(logprobs_NV) * logprobs_NV, -1)
      loss -= o.entropy_coef * masked.hide(entropy, tokens.mask)
    total = masked.weighted(loss, batch['weights'], batch['count']).mean()
    if o.targets is not None:
      there = batch['critic_mask']
      error = values.value_loss(
        params['values'][batch['slots']],
        batch['values'],
        batch['targets'],
        there,
        clip=o.value_clip,
      ).loss_N
      total += masked.mean(error, there)
    return total

  grads = jax.grad(objective)(params)
  updates, opt_state = optimizer.update(grads, opt_state)
  return optax.apply_updates(params, updates), opt_state


@functools.cache
def _programs(algorithm: Algorithm, settings: Settings):
  policy = optax.adam(settings.learning_rate)
  optimizer = optax.multi_transform(
    {'policy': policy, 'critic': optax.adam(settings.critic_rate)},
    {'own': 'policy', 'shared': 'policy', 'values': 'critic'},
  )
  step = jax.jit(
    functools.partial(
      _step, algorithm=algorithm, settings=settings, optimizer=optimizer
    )
  )
  return optimizer, step


_log_policy = jax.jit(log_policy, static_argnums=1)


# ---- the loop ---------------------------------------------------------------


def train(
  chain: Chain,
  algorithm: Algorithm,
  settings: Settings,
  *,
  seed: int,
  disturb: Callable | None = None,
) -> Curve:
  """Trains a table from uniform on.

  Args:
    disturb: (rng, advantages_NT, groups_N) -> advantages, for controls.
  """
  rng = np.random.default_rng([seed, 1])
  tasks_N = np.repeat(np.arange(len(chain.best)), settings.group_size)
  M = chain.best.shape[2]
  optimizer, step = _programs(_learned(algorithm), settings)
  params = init(chain, M)
  opt_state = optimizer.init(params)
  tables: collections.deque = collections.deque(maxlen=algorithm.lag + 1)
  scores, turns, used = [], [], 0
  for update in range(settings.updates + 1):
    log_table = np.asarray(_log_policy(params, settings.shared))
    tables.append(log_table)
    scores.append(chain.score(_probs(log_table, M)))
    turns.append(used)
    if update == settings.updates:
      break
    if update == 0 or (algorithm.phase and update % algorithm.phase == 0):
      reference = log_table
    probs_SMV = _probs(tables[0], M)
    sampled = _sampled(rng, chain, probs_SMV, tasks_N, algorithm.leaves)
    batch, more = _batch(
      rng, chain, algorithm, sampled, probs_SMV, log_table, reference,
      np.asarray(params['values']), disturb,
    )  # fmt: skip
    used += sampled.turns_sampled + more
    for _ in range(settings.steps):
      params, opt_state = step(params, opt_state, batch)
  return Curve(np.array(scores), np.array(turns))


def _probs(log_table: np.ndarray, M: int) -> np.ndarray:
  """float64[S, M, V]."""
  rows, V = log_table.shape
  return np.exp(log_table.astype(np.float64)).reshape(rows // M, M, V)


def _sampled(rng, chain, probs_SMV, tasks_N, leaves) -> Sampled:
  if leaves > 1:
    return chains.forked(rng, chain, probs_SMV, tasks_N, leaves)
  return chains.sample(rng, chain, probs_SMV, tasks_N)


def _learned(o: Algorithm) -> Algorithm:
  """What the jitted step knows of: one program for all that agree in it."""
  plain = Algorithm()
  return dataclasses.replace(
    o,
    targets=None if o.targets is None else len,
    **{
      name: getattr(plain, name)
      for name in (
        'estimator', 'aggregate', 'critic', 'data', 'leaves', 'keep',
        'token_weights', 'reward_kl_coef', 'lag', 'phase',
      )
    },
  )  # fmt: skip


def _batch(
  rng, chain, o, sampled, probs_SMV, log_table, reference, values_S, disturb
) -> tuple[dict, int]:
  """What an optimizer step is given, flat, and turns sampled beside."""
  arrays = chains.slots(chain, sampled)
  mask, slots, ids = arrays['mask'], arrays['slots'], arrays['tokens']
  own, far = (
    np.where(mask, table[slots, ids], np.nan)
    for table in (log_table, reference)
  )
  more, turns_sampled = o.data(chain, sampled, probs_SMV, rng)
  if o.targets is not None:
    more['values'] = np.where(mask, values_S[slots], np.nan)
  if o.reward_kl_coef:
    gap = np.asarray(own) - np.asarray(far)
    more['token_rewards'] = kl.in_reward(
      np.zeros(gap.shape), gap, mask, o.reward_kl_coef
    )
  draw = chains.draw(chain, sampled, arrays, **more)
  credit = np.stack(o.estimator(draw))
  if disturb is not None:
    credit = disturb(rng, credit, sampled.tasks_N)
  row = np.broadcast_to(np.arange(len(mask))[:, None], mask.shape)
  turn = np.maximum(arrays['turns'], 0)
  weigh = o.aggregate
  if o.keep is not None:
    kept = np.broadcast_to(o.keep(draw)[:, None], mask.shape)
    weigh = functools.partial(_over_kept, o.aggregate, kept)
  token_weights = (
    None if o.token_weights is None else np.stack(o.token_weights(draw))
  )
  weights, count = weigh(
    mask, row, sampled.tasks_N[:, None] + 0 * row, turn,
    token_weights=token_weights,
  )  # fmt: skip
  K = sampled.there_NK.shape[1]
  tokens = Tokens(
    mask=mask.reshape(-1),
    old=_flat(own),
    advantages=_flat(credit),
    sequences=row.reshape(-1).astype(np.int32),
    turns=(row * K + turn).reshape(-1).astype(np.int32),
    behaviour=_flat(arrays['logprobs']),
    reference=_flat(far),
  )
  batch = {
    'tokens': tokens,
    'slots': slots.reshape(-1).astype(np.int32),
    'ids': ids.reshape(-1).astype(np.int32),
    'weights': _flat(weights),
    'count': np.float32(count),
  }
  if o.targets is not None:
    batch |= _critic(o, draw, mask, tokens.turns, more['values'])
  return batch, turns_sampled


def _critic(o, draw: Draw, mask, turns_N, values_NT) -> dict:
  return {
    'values': _flat(values_NT),
    'targets': _flat(np.stack(o.targets(draw))),
    'critic_mask': np.asarray(o.critic(mask.reshape(-1), turns_N)),
  }


def _over_kept(aggregate, kept, mask, *ids, **options):
  return aggregation.over_original(aggregate, mask, kept, *ids, **options)


def _flat(x) -> np.ndarray:
  return np.asarray(x, np.float32).reshape(-1)


# ---- controls ---------------------------------------------------------------


def shuffled(rng, credit_NT, groups_N) -> np.ndarray:
  """Advantages of other trajectories of the group: who did well is lost."""
  out = credit_NT.copy()
  for g in np.unique(groups_N):
    rows = np.flatnonzero(groups_N == g)
    out[rows] = credit_NT[rng.permutation(rows)]
  return out


def reversed_sign(rng, credit_NT, groups_N) -> np.ndarray:
  del rng, groups_N
  return -credit_NT
