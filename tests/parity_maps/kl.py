"""KL estimators of five systems, their clamps and gradients, as ours."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.rl import kl
from parity_maps import CannotMap, Case, Result
from parity_maps.tables import flat, table

UNCLIPPED_K3 = functools.partial(kl.k3, limit=None)


def estimate(estimator, new, reference, *, bound=None) -> np.ndarray:
  """A value over a table without a mask, and its bound."""
  value = estimator(flat(new), flat(reference), True)
  value = value if bound is None else kl.bounded(value, bound)
  return table(value, new.shape)


def graded(value, new) -> tuple[np.ndarray, np.ndarray]:
  """A value of [N] over a table, and the gradient of its sum."""

  def total(new_N):
    value_N = value(new_N)
    return value_N.sum(), value_N

  (_, value_N), gradient = jax.value_and_grad(total, has_aux=True)(flat(new))
  return table(value_N, new.shape), table(gradient, new.shape)


def _choose(by: dict, name: str):
  if name not in by:
    raise CannotMap(f'estimator {name!r}')
  return by[name]


def _verl(case: Case) -> Result:
  o = case.options(kl_penalty='k1')
  new, reference = case.take('logprob', 'ref_logprob')
  values = {'kl': kl.k1, 'k1': kl.k1, 'abs': kl.absolute, 'mse': kl.k2,
            'k2': kl.k2, 'low_var_kl': kl.k3, 'k3': kl.k3}  # fmt: skip
  name = o.kl_penalty.removesuffix('+')
  if name == 'full':  # the peer has it in its list, and raises
    everywhere = np.ones(len(new), bool)
    whole = kl.full(jnp.asarray(new), jnp.asarray(reference), everywhere)
    return Result({'kl': whole})
  estimator = _choose(values, name)
  gradient = kl.k2_gradient if '+' in o.kl_penalty else kl.naive_gradient
  reference_N = flat(reference)

  def value(new_N):
    plain = estimator(new_N, reference_N, True)
    if estimator is kl.k3:
      plain = kl.bounded(plain, 10.0)
    return gradient(plain, new_N, reference_N, True)

  out, grad = graded(value, new)
  return Result({'kl': out, 'grad_logprob': grad})


def _slime(case: Case) -> Result:
  o = case.options(kl_loss_type='k1', importance_ratio=None)
  new, reference = case.take('log_probs', 'log_probs_base')
  values = {'k1': kl.k1, 'k2': kl.k2, 'k3': UNCLIPPED_K3,
            'low_var_kl': UNCLIPPED_K3}  # fmt: skip
  estimator = _choose(values, o.kl_loss_type)
  if o.importance_ratio not in (None, 'exp(logp - stopgrad(logp))'):
    raise CannotMap(f'importance_ratio {o.importance_ratio!r}')
  gradient = kl.ratio_gradient if o.importance_ratio else kl.naive_gradient
  reference_N = flat(reference)

  def value(new_N):
    plain = estimator(new_N, reference_N, True)
    out = gradient(plain, new_N, reference_N, True)
    return kl.bounded(out, 10.0) if o.kl_loss_type == 'low_var_kl' else out

  out, grad = graded(value, new)
  return Result({'kl': out, 'grad_log_probs': grad})


_BOUNDED = {'k1': kl.k1, 'k2': kl.k2, 'k3': UNCLIPPED_K3}


def _openrlhf(case: Case) -> Result:
  o = case.options(kl_estimator='k1')
  pair = case.take('log_probs', 'log_probs_base')
  return Result({
    'kl': estimate(_choose(_BOUNDED, o.kl_estimator), *pair, bound=10.0),
  })  # fmt: skip


def _areal(case: Case) -> Result:
  o = case.options(kl_estimator='k1')
  pair = case.take('log_probs', 'log_probs_base')
  estimator = _choose(_BOUNDED, o.kl_estimator)
  return Result(
    {
      'kl': estimate(estimator, *pair, bound=10.0),
      'kl_noclamp': estimate(estimator, *pair),
    }
  )


def _tunix(case: Case) -> Result:
  o = case.options(method='low_var_kl', clamp_value=None)
  pair = case.take('logp', 'ref_logp')
  by = {'kl': kl.k1, 'mse_kl': kl.k2, 'low_var_kl': UNCLIPPED_K3}
  return Result({
    'kl': estimate(_choose(by, o.method), *pair, bound=o.clamp_value),
  })  # fmt: skip


def _verl_in_reward(case: Case) -> Result:
  o = case.options(kl_ratio=0.0)
  scores, old, reference = case.take(
    'token_level_scores', 'old_log_prob', 'ref_log_prob'
  )
  value = estimate(kl.k1, old, reference)
  return Result({
    'token_level_rewards': kl.in_reward(scores, value, True, o.kl_ratio),
  })  # fmt: skip


def _openrlhf_in_reward(case: Case) -> Result:
  o = case.options(kl_coef=0.0, reward_clip_range=None)
  outcome, value, mask = case.take('r', 'kl', 'action_mask')
  mask = mask > 0
  if o.reward_clip_range is not None:
    outcome = np.clip(outcome, *o.reward_clip_range)
  # The outcome stands at the last token that the policy sampled.
  last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
  scores = np.zeros(mask.shape, np.float32)
  scores[np.arange(len(last)), last] = outcome
  coef = max(o.kl_coef, 0.0)
  return Result(
    {'reward': kl.in_reward(scores, value, mask, coef)},
    where={'reward': mask},
  )


FUNCTIONS = {
  # A legacy version raised on every name with a +: ours does not.
  'kl_penalty': _verl,
  'compute_approx_kl@slime': _slime,
  'compute_approx_kl@OpenRLHF': _openrlhf,
  'KLEstimator@AReaL': _areal,
  'compute_kl_divergence@tunix': _tunix,
  'compute_rewards@verl': _verl_in_reward,
  'compute_reward@OpenRLHF': _openrlhf_in_reward,
}
