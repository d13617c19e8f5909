"""verl's `agg_loss` (two versions) and tunix's reductions, as ours."""

from __future__ import annotations

import numpy as np

from agentjax.rl import aggregation
from parity_maps import CannotMap, Case, Result
from parity_maps.tables import flat, graded, total, weigh


def verl(
  mode: str, mask, *, legacy: bool = False, dp_size: int = 1,
  batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None,
  **more,
) -> aggregation.Weighting:  # fmt: skip
  """The weighting of a mode of verl; data parallelism divides its count."""
  by = {
    'token-mean': (aggregation.token_mean, batch_num_tokens),
    'token-sum': (aggregation.token_sum, 1),
    'seq-mean-token-sum': (
      aggregation.sequence_mean_token_sum,
      global_batch_size,
    ),
    'seq-mean-token-mean': (
      aggregation.sequence_mean_token_mean,
      global_batch_size,
    ),
    'seq-mean-token-sum-norm': (
      aggregation.sequence_mean_token_sum_norm,
      1 if legacy else global_batch_size,
    ),
  }
  if mode not in by:
    raise CannotMap(f'loss_agg_mode {mode!r}')
  aggregate, count = by[mode]
  if count is None and dp_size > 1:
    raise CannotMap('dp_size without the count of the whole batch')
  options = {} if count is None else {'count': count / dp_size}
  if mode == 'seq-mean-token-sum-norm':
    options['length'] = loss_scale_factor or np.shape(mask)[-1]
    if legacy:  # a plain sum over a constant, whatever the parallelism
      options['count'] = 1
  return weigh(aggregate, mask, **options, **more)


def _verl(case: Case, legacy: bool) -> Result:
  o = case.options(
    loss_agg_mode='token-mean', dp_size=1, batch_num_tokens=None,
    global_batch_size=None, loss_scale_factor=None,
  )  # fmt: skip
  x, mask = case.take('loss_mat', 'loss_mask')
  options = vars(o)
  weighting = verl(options.pop('loss_agg_mode'), mask, legacy=legacy, **options)
  loss, gradient, _ = graded(lambda x_N: x_N, x, weighting)
  return Result({'loss': loss, 'grad_loss_mat': gradient})


def _tunix(case: Case) -> Result:
  o = case.options(loss_agg_mode='token-mean', norm=None)
  x, mask = case.take('loss', 'mask')
  B, T = x.shape
  by = {
    'token-mean': (aggregation.token_mean, {}),
    # These two divide by all rows, empty ones too: row 11 of B2.
    'sequence-mean-token-mean': (
      aggregation.sequence_mean_token_mean,
      {'count': B},
    ),
    'sequence-mean-token-scale': (
      aggregation.sequence_mean_token_sum_norm,
      {'count': B, 'length': o.norm or T},
    ),
    'seq-mean-token-sum': (aggregation.sequence_mean_token_sum, {}),
    'sequence-mean-token-sum-norm': (
      aggregation.token_sum,
      {'count': o.norm or B},
    ),
  }
  if o.loss_agg_mode not in by:
    raise CannotMap(f'loss_agg_mode {o.loss_agg_mode!r}')
  aggregate, options = by[o.loss_agg_mode]
  weighting = weigh(aggregate, mask, **options)
  return Result({'loss_out': total(flat(x), weighting)})


def _tunix_packed(case: Case) -> Result:
  o = case.options(loss_agg_mode='token-mean', num_segments=None, norm=None)
  x, mask, segments = case.take('loss', 'mask', 'segment_ids')
  B = x.shape[0]
  mask = np.asarray(mask) > 0
  # Segment 0 is padding; the others of a row are sequences of their own.
  sequences = np.arange(B)[:, None] * (segments.max() + 1) + segments
  real = mask & (segments > 0)
  n = len(np.unique(sequences[real]))
  by = {
    'token-mean': (aggregation.token_mean, {}),
    'sequence-mean-token-mean': (aggregation.sequence_mean_token_mean, {}),
    'sequence-mean-token-scale': (
      aggregation.sequence_mean_token_sum_norm,
      {'length': o.norm},
    ),
    'seq-mean-token-sum': (aggregation.sequence_mean_token_sum, {}),
    'sequence-mean-token-sum-norm': (
      aggregation.token_sum,
      {'count': o.norm or n},
    ),
  }
  if o.loss_agg_mode not in by:
    raise CannotMap(f'loss_agg_mode {o.loss_agg_mode!r}')
  if o.loss_agg_mode == 'sequence-mean-token-scale' and o.norm is None:
    raise CannotMap('a packed token-scale without its norm: the peer raises')
  aggregate, options = by[o.loss_agg_mode]
  by_token = aggregate in (aggregation.token_mean, aggregation.token_sum)
  weighting = aggregate(mask if by_token else real, sequences, **options)
  return Result({'loss_out': total(flat(x), weighting)})


FUNCTIONS = {
  'agg_loss@verl-project/verl': lambda case: _verl(case, legacy=False),
  'agg_loss@volcengine/verl': lambda case: _verl(case, legacy=True),
  'reduced_loss_agg@tunix': _tunix,
  '_reduced_loss_agg_segmented@tunix': _tunix_packed,
}
