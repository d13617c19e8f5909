"""Sampling of one token per slot, with the log-prob of what was really done.

Floor 2, rollout/. Pure functions of arrays; they know no cache and no text.
The behaviour log-prob is that of the distribution sampled from (tempered,
truncated, renormalised); beside it stand the untruncated tempered log-prob
and the log of the kept mass, so that full - behaviour == log kept mass.

Letters: S slots, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Named, so that no flag of JAX changes what is sampled.
_IMPL = 'threefry2x32'
NEAR = 128  # of the largest logits are looked at before the others


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How a slot samples. The default truncates nothing.

  Who trains on truncated sampling needs the ids that were kept: see `fits`.

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
    # Near 1e30 it would flatten away the bias that hides ids without text.
    if not 0 <= self.temperature <= 1e6:
      raise ValueError(f'temperature {self.temperature}: give 0 to 1e6')
    if self.top_k != int(self.top_k) or not 0 <= self.top_k < 2**31:
      raise ValueError(
        f'top_k {self.top_k}: give 0 (off) or a positive integer'
      )
    if not 0 < self.top_p <= 1:
      raise ValueError(f'top_p {self.top_p}: give a number in (0, 1]')
    if not 0 <= self.min_p <= 1:
      raise ValueError(f'min_p {self.min_p}: give a number in [0, 1]')

  @property
  def truncates(self) -> bool:
    """Whether it keeps less than the whole distribution, as greedy does."""
    whole = self.top_k == 0 and self.top_p == 1 and self.min_p == 0
    return self.temperature == 0 or not whole

  def fits(self, kept: int) -> bool:
    """Whether `kept` ids hold all that it keeps; True if it keeps all."""
    if self.temperature == 0:
      return kept >= 1
    return not self.truncates or 1 <= self.top_k <= kept


def trajectory_key(
  seed: int, draw: int, task_id: str, sample: int, branch: int
) -> np.ndarray:
  """uint32[2] key of a trajectory; `uniform` folds the position in.

  Keys depend on what is sampled, never on where or when (design promise 5).
  Other numbers, another key: each is folded in whole.

  Raises:
    ValueError: a number is below 0 or has more than 32 bits.
  """
  numbers = {'seed': seed, 'draw': draw, 'sample': sample, 'branch': branch}
  for name, value in numbers.items():
    # JAX would take the lower 32 bits, and two runs would sample the same.
    if value != int(value) or not 0 <= value < 2**32:
      raise ValueError(f'{name} {value}: give an integer of 0 to {2**32 - 1}')
  digest = hashlib.blake2b(task_id.encode(), digest_size=8).digest()
  task = np.frombuffer(digest, '<u4')
  key = jax.random.key(int(seed), impl=_IMPL)
  for value in (draw, *task, sample, branch):
    key = _fold(key, np.uint32(value))
  return np.asarray(jax.random.key_data(key))


_fold = jax.jit(jax.random.fold_in)


def uniform(key_S2: jax.Array, position_S: jax.Array) -> jax.Array:
  """float32[S] in [0, 1): one number a slot, from its key and position."""

  def one(key, position):
    key = jax.random.wrap_key_data(key, impl=_IMPL)
    return jax.random.uniform(jax.random.fold_in(key, position))

  return jax.vmap(one)(key_S2, position_S)


class Sampled(NamedTuple):
  """One token a slot: int32[S] ids and float32[S] log-probs.

  `kept` is int32[S, M] or None: the ids that truncation kept, -1 where there
  are fewer, and throughout where it kept all.
  """

  token: jax.Array
  logprob: jax.Array
  logprob_full: jax.Array
  log_kept_mass: jax.Array
  kept: jax.Array | None = None


def sample(
  logits_SV: jax.Array,
  u_S: jax.Array,
  temperature_S: jax.Array,
  top_k_S: jax.Array,
  top_p_S: jax.Array,
  min_p_S: jax.Array,
  *,
  kept: int = 0,
) -> Sampled:
  """Draws one token per slot by the inverse CDF of one uniform number.

  Args:
    logits_SV: float32. u_S: float32 in [0, 1).
    temperature_S, top_k_S, top_p_S, min_p_S: see `Sampling`.
    kept: M, at most V: whoever truncates keeps the M largest of what it would
      keep, and says which; ties beyond M are not sampled either, the largest
      ids first. 0 is off.
  """
  greedy = temperature_S == 0
  plain = (top_k_S == 0) & (top_p_S == 1) & (min_p_S == 0) & ~greedy
  divisor_S = jnp.where(greedy, 1.0, temperature_S)
  largest_S = logits_SV.max(-1)
  blocks = _blocks(logits_SV)

  def above(logits, floor_S):
    """Masses of the ids that reach a floor, 0 for the others."""
    z, mass = _tempered(logits, largest_S, divisor_S)
    return jnp.where(z >= _wide(floor_S, z), mass, 0.0)

  def truncated():
    z, mass = _tempered(logits_SV, largest_S, divisor_S)
    cut = ~plain & ~greedy
    floor_S = jax.lax.cond(
      cut.any(),
      lambda: _floor(z, mass, cut, top_k_S, top_p_S, min_p_S),
      lambda: jnp.zeros_like(largest_S),
    )
    # Greedy is a truncation too: to the largest logit, the first id of equals.
    floor_S = jnp.where(plain, -jnp.inf, jnp.where(greedy, 0.0, floor_S))
    masses, ids = above(blocks, floor_S), None
    if kept:
      ids = _largest(z, floor_S, cut, kept)
      masses = jnp.where(_named(ids, cut, blocks.shape), masses, 0.0)
    sums = masses.sum(-1)
    return floor_S, jnp.where(plain[:, None], all_sums, sums), ids

  # Without truncation one pass for the largest logit and one over the masses
  # are all that is done to the vocabulary. A slot that does not truncate gets
  # these very sums beside one that does: another way to them rounds otherwise.
  all_sums = _tempered(blocks, largest_S, divisor_S)[1].sum(-1)
  total_S = all_sums.sum(-1)
  no_ids = jnp.full((len(u_S), kept), -1, jnp.int32) if kept else None
  floor_S, sums, ids = jax.lax.cond(
    plain.all(),
    lambda: (jnp.full_like(largest_S, -jnp.inf), all_sums, no_ids),
    truncated,
  )

  def inside(block):
    masses = above(
      jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0], floor_S
    )
    if kept:
      own = block[:, None] * masses.shape[1] + jnp.arange(masses.shape[1])
      named = (own[:, :, None] == ids[:, None, :]).any(-1)
      masses = jnp.where(named | (plain | greedy)[:, None], masses, 0.0)
    return masses

  token, kept_S = _inverse_cdf(sums, inside, jnp.where(greedy, 0.0, u_S))
  chosen_S = jnp.take_along_axis(logits_SV, token[:, None], 1)[:, 0]
  full = _tempered(chosen_S, largest_S, divisor_S)[0] - jnp.log(total_S)
  # A greedy choice keeps one token: its own log-prob is then log 1.
  log_kept = jnp.where(greedy, full, jnp.log(kept_S) - jnp.log(total_S))
  log_kept = jnp.where(plain, 0.0, log_kept)
  if kept:
    ids = ids.at[:, 0].set(jnp.where(greedy, token, ids[:, 0]))
  return Sampled(token, full - log_kept, full, log_kept, ids)


def _tempered(logits, largest_S, divisor_S) -> tuple[jax.Array, jax.Array]:
  """(logits - largest) / divisor, at most 0, and its exponential."""
  z = (logits - _wide(largest_S, logits)) / _wide(divisor_S, logits)
  return z, jnp.exp(z)


def _wide(x_S, like) -> jax.Array:
  return x_S.reshape((-1,) + (1,) * (like.ndim - 1))


def _largest(z_SV, floor_S, cut_S, n: int) -> jax.Array:
  """int32[S, n]: the largest ids by z that reach the floor, -1 beyond.

  Whatever the order of equals is on a device, what is named here is what is
  sampled from.
  """
  at, ids = jax.lax.top_k(z_SV, n)
  return jnp.where((at >= floor_S[:, None]) & cut_S[:, None], ids, -1)


def _named(ids_SM, cut_S, shape: tuple[int, ...]) -> jax.Array:
  """bool [S, blocks, ids of a block]: named ids, and all of who cuts not."""
  S, n, width = shape
  at = jnp.where(ids_SM < 0, n * width, ids_SM)
  none = jnp.zeros((S, n * width), bool)
  named = none.at[jnp.arange(S)[:, None], at].set(True, mode='drop')
  return (named | ~cut_S[:, None]).reshape(shape)


def _floor(z_SV, mass_SV, cut_S, top_k_S, top_p_S, min_p_S) -> jax.Array:
  """The smallest z that is kept, per slot: top-k, then top-p, then min-p.

  Never a sort of the vocabulary. The NEAR best are enough for most slots; for
  the others (of `cut_S`) the floor is searched. Which of the two a slot needs
  hangs on its own logits alone, and so does every bit of its floor.
  """
  V = z_SV.shape[1]
  near = jax.lax.top_k(z_SV, min(NEAR, V))[0]
  k_S = jnp.minimum(top_k_S, V)
  by_k, by_p = top_k_S > 0, top_p_S < 1
  far_k = cut_S & (k_S > near.shape[1])
  at_k = jnp.take_along_axis(near, (k_S - 1)[:, None], 1, mode='clip')[:, 0]
  at_k = _search(z_SV, far_k, at_k, lambda kept: kept.sum(-1) >= k_S)
  at_k = jnp.where(by_k, at_k, -jnp.inf)
  mass_SV = jnp.where(z_SV >= at_k[:, None], mass_SV, 0.0)
  wanted_S = top_p_S * mass_SV.sum(-1)
  # A token stays while the mass before it is below what is wanted.
  upto = jnp.cumsum(jnp.exp(near), -1)
  n = (upto < wanted_S[:, None]).sum(-1)
  at_p = jnp.take_along_axis(near, n[:, None], 1, mode='clip')[:, 0]
  at_p = _search(
    z_SV,
    cut_S & by_p & (n >= near.shape[1]),
    at_p,
    lambda kept: jnp.where(kept, mass_SV, 0.0).sum(-1) >= wanted_S,
  )
  floor_S = jnp.maximum(at_k, jnp.where(by_p, at_p, -jnp.inf))
  floor_S = jnp.maximum(floor_S, jnp.log(min_p_S))
  return jnp.minimum(floor_S, 0.0)  # the best always stays


def _search(z_SV, needed_S, else_S, enough: Callable) -> jax.Array:
  """The largest floor whose kept set is enough; `else_S` where not needed.

  Non-negative floats are ordered as their bits are, so the depth -z is found
  bit by bit: 31 passes over the vocabulary, exact. Nothing runs if no slot
  needs it.
  """
  depth_SV = jax.lax.bitcast_convert_type(jnp.abs(z_SV), jnp.int32)
  infinite = jax.lax.bitcast_convert_type(jnp.float32(jnp.inf), jnp.int32)

  def halve(_, bounds):
    low, high = bounds
    middle = low + (high - low) // 2
    ok = enough(depth_SV <= middle[:, None])
    return jnp.where(ok, low, middle + 1), jnp.where(ok, middle, high)

  def run():
    low = jnp.zeros(z_SV.shape[0], jnp.int32)
    _, depth = jax.lax.fori_loop(
      0, 31, halve, (low, jnp.full_like(low, infinite))
    )
    return -jax.lax.bitcast_convert_type(depth, jnp.float32)

  found_S = jax.lax.cond(needed_S.any(), run, lambda: else_S)
  return jnp.where(needed_S, found_S, else_S)


def _blocks(logits_SV: jax.Array) -> jax.Array:
  """Logits as [S, blocks, ids of a block], padded by ids that have no mass."""
  S, V = logits_SV.shape
  width = _block_width(V)
  n = -(-V // width)
  if n * width > V:
    padding = ((0, 0), (0, n * width - V))
    logits_SV = jnp.pad(logits_SV, padding, constant_values=-jnp.inf)
  return logits_SV.reshape(S, n, width)


def _inverse_cdf(
  sums_Sn: jax.Array, inside: Callable, u_S: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """int32[S] first ids at which the running mass exceeds u * total; the total.

  Two levels, sums of blocks and then the ids of one block: a running sum over
  a whole vocabulary would cost more than a small model. Never an id without
  mass.

  Args:
    sums_Sn: mass of each block. inside: blocks [S] -> masses in them [S, W].
  """
  upto = jnp.cumsum(sums_Sn, -1)
  target = u_S * upto[:, -1]
  block = _first_above(upto, target, sums_Sn)
  before = jnp.where(
    block == 0,
    0.0,
    jnp.take_along_axis(upto, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0],
  )
  mass = inside(block)
  at = _first_above(jnp.cumsum(mass, -1), target - before, mass)
  return (block * mass.shape[1] + at).astype(jnp.int32), upto[:, -1]


def _block_width(n: int) -> int:
  """A divisor of n near its root, so that nothing is padded; else the root."""
  root = math.isqrt(n)
  near = [w for w in range(max(1, root // 3), 3 * root + 1) if n % w == 0]
  return min(near, key=lambda w: abs(w - root), default=root)


def _first_above(upto_Sn, target_S, mass_Sn) -> jax.Array:
  """First index whose running sum exceeds the target, with mass there.

  Rounding may leave none: then the last index that has mass.
  """
  n = upto_Sn.shape[1]
  ok = (upto_Sn > target_S[:, None]) & (mass_Sn > 0)
  last = n - 1 - jnp.argmax(mass_Sn[:, ::-1] > 0, -1)
  return jnp.where(ok.any(-1), jnp.argmax(ok, -1), last)
