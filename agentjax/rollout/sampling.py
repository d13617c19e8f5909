"""Sampling of one token per slot, with the log-prob of what was really done.

Floor 2, rollout/. Pure functions of arrays; they know no cache and no text.
The behaviour log-prob is that of the distribution sampled from (tempered,
truncated, renormalised); beside it stand the untruncated tempered log-prob
and the log of the kept mass, so that full - behaviour == log kept mass.

Letters: S slots, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How a slot samples. Defaults are what training needs: no truncation.

  Attributes:
    temperature: divides the logits; 0 is greedy.
    top_k: keep the k largest (ties with the k-th are kept); 0 is off.
    top_p: keep the smallest set of mass >= top_p (ties at its edge are kept);
      1 is off.
    min_p: keep what has at least min_p times the largest probability; 0 off.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0

  def __post_init__(self):
    if not (self.temperature >= 0 and math.isfinite(self.temperature)):
      raise ValueError(f'temperature {self.temperature}: give a number >= 0')
    if self.top_k < 0:
      raise ValueError(f'top_k {self.top_k}: give 0 (off) or more')
    if not 0 < self.top_p <= 1:
      raise ValueError(f'top_p {self.top_p}: give a number in (0, 1]')
    if not 0 <= self.min_p <= 1:
      raise ValueError(f'min_p {self.min_p}: give a number in [0, 1]')


def trajectory_key(
  seed: int, draw: int, task_id: str, sample: int, branch: int
) -> np.ndarray:
  """uint32[2] key of a trajectory; `uniform` folds the position in.

  Keys depend on what is sampled, never on where or when (design promise 5).
  """
  key = jax.random.key(seed)
  for value in (draw, zlib.crc32(task_id.encode()), sample, branch):
    key = _fold(key, np.uint32(value & 0xFFFFFFFF))
  return np.asarray(jax.random.key_data(key))


_fold = jax.jit(jax.random.fold_in)


def uniform(key_S2: jax.Array, position_S: jax.Array) -> jax.Array:
  """float32[S] in [0, 1): one number a slot, from its key and position."""

  def one(key, position):
    key = jax.random.fold_in(jax.random.wrap_key_data(key), position)
    return jax.random.uniform(key)

  return jax.vmap(one)(key_S2, position_S)


class Sampled(NamedTuple):
  """One token a slot: int32[S] ids and float32[S] log-probs."""

  token: jax.Array
  logprob: jax.Array
  logprob_full: jax.Array
  log_kept_mass: jax.Array


def sample(
  logits_SV: jax.Array,
  u_S: jax.Array,
  temperature_S: jax.Array,
  top_k_S: jax.Array,
  top_p_S: jax.Array,
  min_p_S: jax.Array,
) -> Sampled:
  """Draws one token per slot by the inverse CDF of one uniform number.

  Args:
    logits_SV: float32. u_S: float32 in [0, 1).
    temperature_S, top_k_S, top_p_S, min_p_S: see `Sampling`.
  """
  greedy = temperature_S == 0
  z = logits_SV / jnp.where(greedy, 1.0, temperature_S)[:, None]
  z = z - z.max(-1, keepdims=True)
  off = (top_k_S == 0) & (top_p_S == 1) & (min_p_S == 0)
  # The sort costs more than a small model: only if a slot truncates. A slot
  # that does not gets the same threshold on both paths.
  floor_S = jax.lax.cond(
    jnp.all(off | greedy),
    lambda: jnp.full(z.shape[0], -jnp.inf),
    lambda: jnp.where(off, -jnp.inf, _threshold(z, top_k_S, top_p_S, min_p_S)),
  )
  mass = jnp.exp(z)
  kept = jnp.where(z >= floor_S[:, None], mass, 0.0)
  total, kept_total = mass.sum(-1), kept.sum(-1)
  token = jnp.where(greedy, jnp.argmax(z, -1), _inverse_cdf(kept, u_S))
  full = jnp.take_along_axis(z, token[:, None], 1)[:, 0] - jnp.log(total)
  # A greedy choice keeps one token: its own log-prob is then log 1.
  log_kept = jnp.where(greedy, full, jnp.log(kept_total) - jnp.log(total))
  log_kept = jnp.where(off & ~greedy, 0.0, log_kept)
  return Sampled(token.astype(jnp.int32), full - log_kept, full, log_kept)


def _threshold(z_SV, top_k_S, top_p_S, min_p_S) -> jax.Array:
  """The smallest z that is kept, per slot: top-k, then top-p, then min-p."""
  V = z_SV.shape[1]
  down = -jnp.sort(-z_SV, -1)
  k = jnp.where(top_k_S == 0, V, jnp.minimum(top_k_S, V))
  at_k = jnp.take_along_axis(down, (k - 1)[:, None], 1)
  mass = jnp.where(down >= at_k, jnp.exp(down), 0.0)
  # A token stays while the mass before it is below top_p of the kept mass.
  before = jnp.cumsum(mass, -1) - mass
  inside = (before < top_p_S[:, None] * mass.sum(-1, keepdims=True)) & (
    down >= at_k
  )
  at_p = jnp.where(inside, down, jnp.inf).min(-1)
  at_p = jnp.where(top_p_S == 1, at_k[:, 0], at_p)
  at_min = jnp.where(min_p_S == 0, -jnp.inf, jnp.log(min_p_S))
  return jnp.minimum(jnp.maximum(at_p, at_min), 0.0)  # the best always stays


def _inverse_cdf(mass_SV: jax.Array, u_S: jax.Array) -> jax.Array:
  """int32[S]: the first id at which the running sum exceeds u * total.

  Two levels, blocks then ids of one block: a running sum over a whole
  vocabulary would cost more than the model. Never an id without mass.
  """
  S, V = mass_SV.shape
  width = max(1, int(math.isqrt(V)))
  n = -(-V // width)
  blocks = jnp.pad(mass_SV, ((0, 0), (0, n * width - V)))
  blocks = blocks.reshape(S, n, width)
  upto = jnp.cumsum(blocks.sum(-1), -1)
  target = u_S * upto[:, -1]
  block = _first_above(upto, target, blocks.sum(-1))
  start = jnp.where(
    block == 0,
    0.0,
    jnp.take_along_axis(upto, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0],
  )
  inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
  at = _first_above(jnp.cumsum(inside, -1), target - start, inside)
  return (block * width + at).astype(jnp.int32)


def _first_above(upto_Sn, target_S, mass_Sn) -> jax.Array:
  """First index whose running sum exceeds the target, with mass there.

  Rounding may leave none: then the last index that has mass.
  """
  n = upto_Sn.shape[1]
  ok = (upto_Sn > target_S[:, None]) & (mass_Sn > 0)
  last = n - 1 - jnp.argmax(mass_Sn[:, ::-1] > 0, -1)
  return jnp.where(ok.any(-1), jnp.argmax(ok, -1), last)
