"""TRL's GRPO loss in all its types, as ours.

A type is a surrogate and an aggregation; levels, `delta`, the KL and the
off-policy mask are switches of their own. `mask` has observations out already.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from agentjax.rl import aggregation, correction, kl, losses, surrogates
from parity_maps import CannotMap, Case, Result
from parity_maps.tables import flat, graded, tokens, weigh

CLIPPED = ('grpo', 'bnpo', 'dr_grpo', 'dapo', 'luspo')


def loss(case: Case) -> Result:
  o = case.options(
    loss_type='dapo', importance_sampling_level='token', beta=0.0,
    epsilon_low=0.2, epsilon_high=0.2, delta=None,
    off_policy_mask_threshold=None, use_bias_correction_kl=True,
    max_completion_length=None, sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0,
    vespo_k_neg=3.0, vespo_lambda_neg=2.0, num_items_in_batch=None,
  )  # fmt: skip
  old, new, reference, advantages, mask, weights, sampled = case.take(
    'old_per_token_logps', 'per_token_logps', 'ref_per_token_logps',
    'advantages', 'mask', 'importance_sampling_ratio',
    'sampling_per_token_logps',
  )  # fmt: skip
  given = tokens(
    mask, old, advantages, weights=_weights(weights, mask, o.loss_type)
  )
  ratio = _ratio(o.importance_sampling_level)
  surrogate = _surrogate(o, ratio)

  def per_token(new_N):
    out = surrogate(new_N, given).loss_N
    if o.off_policy_mask_threshold is not None:
      behaviour = given.old if sampled is None else flat(sampled)
      out = jnp.where(
        correction.keep_opsm(
          new_N, behaviour, given.advantages, given.mask, given.sequences,
          delta=o.off_policy_mask_threshold,
        ),
        out, 0.0,
      )  # fmt: skip
    if not o.beta:
      return out
    toward = kl.k3(new_N, flat(reference), given.mask, limit=None)
    if o.use_bias_correction_kl and o.importance_sampling_level == 'token':
      toward = kl.ratio_gradient(
        toward, new_N, flat(reference), given.mask, old_N=given.old, limit=None
      )
    elif o.use_bias_correction_kl:
      toward *= jnp.exp(ratio(new_N, given))
    return out + o.beta * toward

  weighting = _weighting(o, mask, by_token=bool(o.beta) or weights is not None)
  value, gradient, _ = graded(per_token, new, weighting)
  return Result({'loss': value, 'grad_logps': gradient})


def _ratio(level: str):
  by = {
    'token': functools.partial(losses.token_ratio, limit=None),
    'sequence': functools.partial(losses.mean_ratio, cap=None),
  }
  if level not in by:
    raise CannotMap(f'importance_sampling_level {level!r}')
  return by[level]


def _surrogate(o, ratio):
  if o.loss_type in CLIPPED:
    return functools.partial(
      losses.ppo_clip, clip_low=o.epsilon_low, clip_high=o.epsilon_high,
      delta=o.delta, log_ratio=ratio,
    )  # fmt: skip
  if o.loss_type == 'cispo':
    return functools.partial(losses.cispo, cap=o.epsilon_high, log_ratio=ratio)
  if o.loss_type == 'sapo':
    return functools.partial(
      surrogates.sapo, tau_positive=o.sapo_temperature_pos,
      tau_negative=o.sapo_temperature_neg, log_ratio=ratio,
    )  # fmt: skip
  if o.loss_type == 'vespo':
    return functools.partial(
      surrogates.vespo, k_positive=o.vespo_k_pos,
      lambda_positive=o.vespo_lambda_pos, k_negative=o.vespo_k_neg,
      lambda_negative=o.vespo_lambda_neg, constant=False,
    )  # fmt: skip
  raise CannotMap(f'loss_type {o.loss_type!r}')


def _weights(weights, mask, loss_type):
  """Weights of tokens; one of a row is its tokens', or in vespo their share."""
  if weights is None:
    return None
  shape, n = np.shape(mask), np.sum(mask, 1, keepdims=True)
  if loss_type == 'vespo':
    if weights.shape == shape and not (weights[mask == 0] == 1).all():
      raise CannotMap('weights other than 1 under the mask, which vespo takes')
    if weights.shape != shape:
      weights = weights ** (1 / np.maximum(n, 1))
  return np.broadcast_to(weights, shape)


def _weighting(o, mask, by_token: bool) -> aggregation.Weighting:
  B, T = np.shape(mask)
  if o.loss_type in ('grpo', 'sapo'):
    # Over all rows, empty ones too: row 11 of B2.
    return weigh(aggregation.sequence_mean_token_mean, mask, count=B)
  if o.loss_type == 'dr_grpo':
    return weigh(
      aggregation.sequence_mean_token_sum_norm, mask, count=B,
      length=o.max_completion_length,
    )  # fmt: skip
  if o.loss_type == 'luspo':
    if o.importance_sampling_level == 'sequence' and not by_token:
      return weigh(aggregation.sequence_mean_token_sum, mask, count=B)
    # By token it is a mean over all places, the masked ones too.
    if not np.all(mask):
      raise CannotMap('luspo by token counts what the mask hides')
    n = np.broadcast_to(np.sum(mask, 1, keepdims=True), (B, T))
    return weigh(aggregation.token_sum, mask, token_weights=n, count=B * T)
  return weigh(aggregation.token_mean, mask, count=o.num_items_in_batch)


FUNCTIONS = {'GRPOTrainer._compute_loss': loss}
