"""Optimizers by Optax: one schedule, one clip, three ways to step.

Floor 1. Every optimizer is a function that a config names; all
count optimizer steps, and none knows a batch. An update that is not finite is
the learner's affair: it skips the step and counts it.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

# Of a parameter's own name: what it sums over and what it gives, after the
# leading axis of stacked layers. Whatever is not here is no matrix to Muon.
_MATRICES = {
  'q': MuonDimensionNumbers((1,), (2, 3)),
  'k': MuonDimensionNumbers((1,), (2, 3)),
  'v': MuonDimensionNumbers((1,), (2, 3)),
  'o': MuonDimensionNumbers((1, 2), (3,)),
  'gate': MuonDimensionNumbers((1,), (2,)),
  'up': MuonDimensionNumbers((1,), (2,)),
  'down': MuonDimensionNumbers((1,), (2,)),
}


def check_numbers(**values: float) -> None:
  """Raises ValueError, with the name, unless all are finite and 0 or more."""
  for name, value in values.items():
    if not isinstance(value, numbers.Real) or not 0 <= value < math.inf:
      raise ValueError(f'{name} is {value!r}: give a finite number, 0 or more')


def _check_below_one(**values: float) -> None:
  check_numbers(**values)
  for name, value in values.items():
    if value >= 1:
      raise ValueError(f'{name} is {value}: give a number below 1')


def schedule(
  learning_rate: float, warmup_steps: int = 0, decay_steps: int = 0
) -> optax.Schedule:
  """Linear warm-up, then constant, or a cosine to a tenth of it.

  Args:
    learning_rate: at its highest; the first step has it over `warmup_steps`.
    decay_steps: where the cosine ends, counted from the start; 0 for none.

  Raises:
    ValueError: a number that is none, or a schedule shorter than its warm-up.
  """
  check_numbers(
    learning_rate=learning_rate,
    warmup_steps=warmup_steps,
    decay_steps=decay_steps,
  )
  if decay_steps and decay_steps <= warmup_steps:
    raise ValueError(
      f'decay_steps {decay_steps} must exceed warmup_steps {warmup_steps}'
    )

  def rate(count):
    warm = jnp.minimum(1.0, (count + 1) / max(warmup_steps, 1))
    if not decay_steps:
      return learning_rate * warm
    done = (count - warmup_steps) / (decay_steps - warmup_steps)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(done, 0.0, 1.0)))
    return learning_rate * warm * (0.1 + 0.9 * cosine)

  return rate


def _clipped(
  max_grad_norm: float, step: optax.GradientTransformation
) -> optax.GradientTransformation:
  check_numbers(max_grad_norm=max_grad_norm)
  if max_grad_norm == 0:
    raise ValueError('max_grad_norm is 0: nothing would ever be learned')
  return optax.chain(optax.clip_by_global_norm(max_grad_norm), step)


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
  """AdamW (arXiv:1711.05101) behind a global-norm clip; see `schedule`.

  Raises:
    ValueError: a number that no optimizer can have, such as NaN.
  """
  check_numbers(weight_decay=weight_decay, eps=eps)
  _check_below_one(b1=b1, b2=b2)
  rate = schedule(learning_rate, warmup_steps, decay_steps)
  return _clipped(
    max_grad_norm,
    optax.adamw(rate, b1, b2, eps, weight_decay=weight_decay),
  )


def adafactor(
  learning_rate: float,
  *,
  warmup_steps: int = 0,
  decay_steps: int = 0,
  weight_decay: float = 0.0,
  decay_rate: float = 0.8,
  max_grad_norm: float = 1.0,
) -> optax.GradientTransformation:
  """Adafactor (arXiv:1804.04235): second moments by rows and columns.

  Without momentum and without scaling by the parameter's size, so that
  `learning_rate` means what it means to AdamW.

  Raises:
    ValueError: a number that no optimizer can have, such as NaN.
  """
  check_numbers(weight_decay=weight_decay)
  _check_below_one(decay_rate=decay_rate)
  return _clipped(
    max_grad_norm,
    optax.adafactor(
      schedule(learning_rate, warmup_steps, decay_steps),
      decay_rate=decay_rate,
      multiply_by_parameter_scale=False,
      weight_decay_rate=weight_decay or None,
    ),
  )


def muon(
  learning_rate: float,
  *,
  warmup_steps: int = 0,
  decay_steps: int = 0,
  weight_decay: float = 0.0,
  beta: float = 0.95,
  b1: float = 0.9,
  b2: float = 0.95,
  max_grad_norm: float = 1.0,
) -> optax.GradientTransformation:
  """Muon for the blocks' matrices, AdamW for embeddings, head and norms.

  Momentum, orthogonalised by Newton-Schulz steps (Jordan et al., 2024), scaled
  so that its root mean square is AdamW's, 0.2 (arXiv:2502.16982, eq. 4): one
  learning rate serves both.

  Raises:
    ValueError: a number that no optimizer can have, such as NaN.
  """
  check_numbers(weight_decay=weight_decay)
  _check_below_one(beta=beta, b1=b1, b2=b2)
  return _clipped(
    max_grad_norm,
    optax.contrib.muon(
      schedule(learning_rate, warmup_steps, decay_steps),
      beta=beta,
      weight_decay=weight_decay,
      adam_b1=b1,
      adam_b2=b2,
      adam_weight_decay=weight_decay,
      muon_weight_dimension_numbers=matrices,
      consistent_rms=0.2,
    ),
  )


def matrices(params: Any) -> Any:
  """For each parameter what it sums over and what it gives; None: no matrix."""

  def numbers(path, _):
    names = [str(getattr(key, 'key', '')) for key in path]
    return _MATRICES.get(names[-1]) if 'stacks' in names else None

  return jax.tree_util.tree_map_with_path(numbers, params)
