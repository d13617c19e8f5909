"""verl's off-policy correction as ours: weights, rejections, metrics, loss."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from agentjax.rl import correction, losses, masked, mismatch
from parity_maps import CannotMap, Case, Result
from parity_maps.aggregation import verl
from parity_maps.tables import (
  every_row,
  flat,
  graded,
  rows,
  shown,
  table,
  tokens,
)

LEVELS = {'token': correction.token, 'sequence': correction.sequence_sum}
STATISTICS = {
  'seq_sum': correction.sequence_sum,
  'seq_mean': correction.sequence_mean,
  'seq_max': correction.sequence_max,
}


# ---- weights ----------------------------------------------------------------


def threshold(spec) -> tuple[float | None, float]:
  """(low, high) of a threshold: "low_high", or a number that is the upper."""
  low, _, high = str(spec).rpartition('_')
  return (float(low) if low else None), float(high)


def rule(level: str, spec):
  """(log_rho_N, mask_N, sequences_N) -> weights_N, as its options say."""
  if level not in LEVELS:
    raise CannotMap(f'rollout_is {level!r}')
  low, high = threshold(spec)
  if low is None:
    return functools.partial(
      correction.truncated, level=LEVELS[level], high=high
    )
  return functools.partial(
    correction.icepop, level=LEVELS[level], low=low, high=high
  )


def normalized(level: str, weights, mask, sequences):
  """Weights of mean 1 over tokens, or over rows, and the mean they had."""
  if level == 'token':
    mean = correction.mean_weight(weights, mask)
  else:
    mean = correction.mean_sequence_weight(weights, mask, sequences)
  return correction.normalized(weights, mean), jnp.where(mean > 0, mean, 1.0)


def weights(case: Case) -> Result:
  o = case.options(
    rollout_is='token', rollout_is_threshold=2.0,
    rollout_is_batch_normalize=False,
  )  # fmt: skip
  log_rho, mask = case.take('log_ratio', 'response_mask')
  at = flat(log_rho), shown(mask), rows(mask.shape)
  applied = rule(o.rollout_is, o.rollout_is_threshold)(*at)
  metrics = _weight_metrics(o, at, applied, every_row(mask.shape))
  out = applied
  if o.rollout_is_batch_normalize:
    out, mean = normalized(o.rollout_is, applied, *at[1:])
    metrics['batch_norm_factor'] = mean
  return Result(
    {'weights': table(out, mask.shape)}
    | {f'metric_rollout_is_{k}': x for k, x in metrics.items()},
    where={'weights': mask > 0},
  )


def _weight_metrics(o, at, applied, all_rows) -> dict:
  """Peers count rows without tokens too: row 11 of B2."""
  mask, sequences = at[1:]
  low, high = threshold(o.rollout_is_threshold)
  cut_below = 1 / high if low is None else low
  raw = correction.importance(*at, level=LEVELS[o.rollout_is])
  tokens_of = mismatch.spread(jnp.clip(applied, 0, high), mask)
  row_means, _ = mismatch.per_sequence(applied, mask, sequences)
  raw_means, _ = mismatch.per_sequence(raw, mask, sequences)
  of_rows = mismatch.spread(row_means, all_rows, ddof=1)
  far = mismatch.outside(raw_means, all_rows, low=cut_below, high=high)
  out = {
    'mean': masked.mean(applied, mask),
    'std': tokens_of['std'],
    'eff_sample_size': mismatch.effective_sample_size(applied, mask),
    **{f'seq_{k}': of_rows[k] for k in ('mean', 'std', 'min', 'max')},
    'seq_max_deviation': jnp.max(
      jnp.where(all_rows, jnp.abs(row_means - 1), 0.0)
    ),
    'seq_fraction_high': far['high'],
    'seq_fraction_low': far['low'],
    'oob_ratio': masked.mean(jnp.float32((raw < (low or 0)) | (raw > high)),
                             mask),
  }  # fmt: skip
  if o.rollout_is == 'token':
    of = mismatch.spread(applied, mask)
    shares = mismatch.outside(raw, mask, low=cut_below, high=high)
  else:
    products = jnp.exp(
      jnp.minimum(masked.segment_sum(*at), masked.MAX_LOG_RATIO)
    )
    of = mismatch.spread(products, all_rows)
    shares = mismatch.outside(products, all_rows, low=cut_below, high=high)
  return out | {
    'max': of['max'], 'min': of['min'],
    'ratio_fraction_high': shares['high'], 'ratio_fraction_low': shares['low'],
  }  # fmt: skip


# ---- rejections -------------------------------------------------------------


def kept(options: str, spec, log_rho_N, mask_N, sequences_N):
  """bool[N]: what passes all of verl's comma-separated rules."""
  names = list(dict.fromkeys(x.strip() for x in options.split(',')))
  specs = [x.strip() for x in str(spec).split(',')]
  if len(specs) == 1:
    specs *= len(names)
  # It clips before it sums: row 8 of B2.
  limit = masked.MAX_LOG_RATIO
  at = jnp.clip(log_rho_N, -limit, limit), mask_N, sequences_N
  out = mask_N
  for name, spec in zip(names, specs, strict=True):
    out &= _passes(name, spec, at)
  return out


def _passes(name: str, spec: str, at):
  place, _, divergence = name.rpartition('_')
  by = {'token': correction.token} | STATISTICS
  if place not in by or divergence not in ('k1', 'k2', 'k3'):
    raise CannotMap(f'rollout_rs {name!r}')
  if divergence != 'k1':
    return correction.keep_divergence(
      *at, level=by[place], divergence=getattr(correction, divergence),
      high=float(spec),
    )  # fmt: skip
  if place == 'seq_max':
    raise CannotMap(f'rollout_rs {name!r}')
  low, high = threshold(spec)
  low = 1 / high if low is None else low
  # Its bounds are those of mu / old: row 16 of B2.
  return correction.keep_ratio(*at, level=by[place], low=1 / high, high=1 / low)


def rejection(case: Case) -> Result:
  o = case.options(rollout_rs='token_k1', rollout_rs_threshold=None)
  log_rho, mask = case.take('log_ratio', 'response_mask')
  at = flat(log_rho), shown(mask), rows(mask.shape)
  out = kept(o.rollout_rs, o.rollout_rs_threshold, *at)
  return Result({'mask': table(out, mask.shape).astype(mask.dtype)})


# ---- metrics ----------------------------------------------------------------


def metrics(case: Case) -> Result:
  case.options()
  old, behaviour, mask = case.take(
    'old_log_prob', 'rollout_log_prob', 'response_mask'
  )
  at = flat(old), flat(behaviour), shown(mask)
  sequences, all_rows = rows(mask.shape), every_row(mask.shape)
  of_tokens = mismatch.divergences(*at)
  of_rows = mismatch.perplexities(*at, sequences, all_rows)
  names = {
    'training_ppl': 'old', 'training_log_ppl': 'log_old',
    'rollout_ppl': 'behaviour', 'rollout_log_ppl': 'log_behaviour',
    'log_ppl_diff': 'gap', 'log_ppl_abs_diff': 'abs_gap',
    'log_ppl_diff_max': 'max_gap', 'log_ppl_diff_min': 'min_gap',
    'ppl_ratio': 'ratio',
  }  # fmt: skip
  return Result({k: of_rows[name] for k, name in names.items()} | {
    'kl': of_tokens['kl'],
    'k3_kl': of_tokens['k3'],
    'chi2_token': of_tokens['chi2'],
    'chi2_seq': mismatch.sequence_chi2(*at, sequences, all_rows),
  })  # fmt: skip


# ---- in a loss --------------------------------------------------------------


def bypass(case: Case) -> Result:
  """The sampler's policy is the old one; rejected tokens leave the count."""
  o = case.options(
    loss_type='ppo_clip', rollout_is=None, rollout_is_threshold=2.0,
    rollout_is_batch_normalize=False, rollout_rs=None,
    rollout_rs_threshold=None, loss_agg_mode='token-mean',
  )  # fmt: skip
  old, new, advantages, mask = case.take(
    'old_log_prob', 'log_prob', 'advantages', 'response_mask'
  )
  given = tokens(mask, old, advantages)
  at = (
    correction.log_rho(flat(new), given.old, given.mask),
    given.mask,
    given.sequences,
  )
  keep = None
  if o.rollout_rs is not None:
    keep = np.asarray(kept(o.rollout_rs, o.rollout_rs_threshold, *at))
  if o.loss_type == 'reinforce':
    loss = losses.reinforce
    if o.rollout_is is not None:
      loss = functools.partial(
        correction.reweighted, loss=losses.reinforce, weigh=_weigh(o)
      )
  elif o.loss_type == 'ppo_clip':
    # Its bounds come with a config that the index does not repeat.
    loss = functools.partial(losses.ppo_clip, clip_high=0.28, dual_clip=3.0)
  else:
    raise CannotMap(f'loss_type {o.loss_type!r}')
  weighting = verl(o.loss_agg_mode, mask, kept=keep, original=False)
  value, gradient, _ = graded(lambda x: loss(x, given), new, weighting)
  return Result({'loss': value, 'grad_log_prob': gradient})


def _weigh(o):
  plain = rule(o.rollout_is, o.rollout_is_threshold)
  if not o.rollout_is_batch_normalize:
    return plain

  def weigh(log_rho_N, mask_N, sequences_N):
    out = plain(log_rho_N, mask_N, sequences_N)
    return normalized(o.rollout_is, out, mask_N, sequences_N)[0]

  return weigh


FUNCTIONS = {
  'compute_rollout_correction_weights': weights,
  'compute_rollout_rejection_mask': rejection,
  'compute_offpolicy_metrics': metrics,
  'compute_policy_loss_bypass_mode': bypass,
}
