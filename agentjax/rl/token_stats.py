"""Statistics of tokens from hidden states, without logits of a whole batch.

Floor 1, rl/. The head and the softmax cost more memory than the model: rows
that carry no loss are left out first (observations are most of an agent's
tokens), and the rest goes through the head in chunks. What the backward pass
needs of a chunk's logits it computes again; only numbers per token are kept.
Knows no model: what it is given is a kernel, and what becomes of its logits.

One operation serves the learner, its reference, supervised training, reward
models and filters by perplexity.

Letters: N tokens, C chunk, V vocabulary, D width, M kept ids of a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

ROWS = 16  # of a tile, on a TPU in bfloat16


class TokenStats(NamedTuple):
  """float32[N] each, of softmax(logits / temperature)."""

  logprobs_N: jax.Array  # of the tokens; renormalised where ids are kept
  entropy_N: jax.Array  # of the whole distribution, whatever is kept
  log_total_N: jax.Array  # log-sum-exp of the tempered logits
  kl_N: jax.Array  # KL(this || reference), exact; 0 without a reference
  log_kept_N: jax.Array  # log of the mass of the kept ids; 0 where all are


class Head(NamedTuple):
  """Hidden states before each token, and the kernel that unembeds them.

  A triple (kernel [D, V], a [D, R], b [R, V]) stands for kernel + a b, which
  is never formed.
  """

  hidden_ND: jax.Array
  kernel_DV: jax.Array | tuple[jax.Array, jax.Array, jax.Array]


class _Tokens(NamedTuple):
  ids: jax.Array
  temperature: jax.Array
  kept: jax.Array | None  # int32 [N, M], -1 where there are fewer

  @property
  def cut(self) -> jax.Array:
    """bool[N]: whether anything was left out."""
    return (self.kept >= 0).any(-1)


def as_it_is(logits: jax.Array) -> jax.Array:
  """The `finish` of a model without soft-cap and padding."""
  return logits


def token_stats(
  head: Head,
  ids_N: jax.Array,
  temperature_N: jax.Array,
  *,
  finish: Callable[[jax.Array], jax.Array] = as_it_is,
  reference: Head | None = None,
  kept_NM: jax.Array | None = None,
  chunk: int = 1024,
  whole: Callable[[Any], Any] = as_it_is,
) -> TokenStats:
  """Log-prob, entropy and more, with exact gradients to `head`.

  A row whose results have no cotangent has no effect on any gradient, even if
  its hidden state is NaN. Products are float32 after the matmul.

  Args:
    head: [N, D] states and the [D, V] kernel. What is not differentiated
      costs no product in the backward pass: XLA drops the sum for it.
    ids_N: int32 labels. temperature_N: > 0.
    finish: elementwise, from products to float32 logits: soft-cap, and what
      hides padding ids by a huge negative number.
    reference: gives `kl_N`, over the whole vocabulary and at the same
      temperature; nothing flows back into it.
    kept_NM: ids that the sampler kept (top-k, top-p, min-p), -1 where there
      are fewer; a token's own id always counts. `logprobs_N` are then those of
      the distribution that was sampled from. A row without ids kept all.
    chunk: rows whose logits exist at once, at most.
    whole: what is done to a kernel once for all chunks: on a mesh, gathering
      it. Its values stay what they are.

  Source: gradients of log-softmax and entropy by hand: with p = softmax(z),
  d logp_y = 1_y - p, d H = -p (z - sum p z), d KL = p (log p/q - KL).
  """
  N = ids_N.shape[0]
  n = -(-N // chunk)
  # As even as vectors allow: what the last chunk is padded with costs as much.
  chunk = min(chunk, N, -(-N // (n * ROWS)) * ROWS)

  def split(x, fill=0):
    pad = ((0, n * chunk - N),) + ((0, 0),) * (x.ndim - 1)
    x = jnp.pad(x, pad, constant_values=fill)
    return x.reshape(n, chunk, *x.shape[1:])

  tokens = _Tokens(
    split(ids_N),
    split(temperature_N, 1),
    None if kept_NM is None else split(kept_NM, -1),
  )
  if reference is not None:
    reference = reference._replace(hidden_ND=split(reference.hidden_ND))
  out = _stats(finish, whole)(
    split(head.hidden_ND), head.kernel_DV, tokens, reference
  )
  return TokenStats(*(x.reshape(-1)[:N] for x in out))


@functools.cache
def _stats(finish: Callable, whole: Callable) -> Callable:
  """The operation over chunks [n, C, ...], with a gradient of its own."""

  def ready(hidden, kernel, reference):
    """Kernels as the products of all chunks take them."""

    def once(kernel, dtype):
      return whole(jax.tree.map(lambda k: k.astype(dtype), kernel))

    if reference is not None:
      far = once(reference.kernel_DV, reference.hidden_ND.dtype)
      reference = reference._replace(kernel_DV=far)
    return once(kernel, hidden.dtype), reference

  def forward(hidden, kernel, tokens, reference):
    kernel, reference = ready(hidden, kernel, reference)

    def chunk(args):
      hidden_CD, tokens, ref_CD = args
      z = _tempered(hidden_CD, kernel, tokens, finish)
      log_ref = None
      if ref_CD is not None:
        log_ref = jax.nn.log_softmax(
          _tempered(ref_CD, reference.kernel_DV, tokens, finish), -1
        )
      return _measure(z, tokens, log_ref)

    ref = None if reference is None else reference.hidden_ND
    return jax.lax.map(chunk, (hidden, tokens, ref))

  @jax.custom_vjp
  def stats(hidden, kernel, tokens, reference):
    return forward(hidden, kernel, tokens, reference)

  def keep(hidden, kernel, tokens, reference):
    out = forward(hidden, kernel, tokens, reference)
    return out, (hidden, kernel, tokens, reference, out)

  def backward(residuals, cotangents: TokenStats):
    hidden, given, tokens, reference, out = residuals
    kernel, reference = ready(hidden, given, reference)

    def chunk(d_kernel, args):
      hidden_CD, tokens, ref_CD, out, cotangent = args
      # A row that nothing comes back to is no row, whatever it holds.
      live_C = functools.reduce(jnp.logical_or, [c != 0 for c in cotangent])
      hidden_CD = jnp.where(live_C[:, None], hidden_CD, 0)
      raw, pull = jax.vjp(finish, _product(hidden_CD, kernel))
      z = raw / tokens.temperature[:, None]
      log_ref = None
      if ref_CD is not None:
        log_ref = jax.nn.log_softmax(
          _tempered(ref_CD, reference.kernel_DV, tokens, finish), -1
        )
      d_z = _back(z, tokens, log_ref, out, cotangent)
      d_z = jnp.where(live_C[:, None], d_z, 0)
      (d_raw,) = pull(d_z / tokens.temperature[:, None])
      d_raw = d_raw.astype(hidden_CD.dtype)
      d_hidden, more = _product_back(hidden_CD, kernel, d_raw)
      d_kernel = jax.tree.map(jnp.add, d_kernel, more)
      return d_kernel, d_hidden.astype(hidden_CD.dtype)

    ref = None if reference is None else reference.hidden_ND
    zero = jax.tree.map(lambda k: jnp.zeros(k.shape, jnp.float32), kernel)
    d_kernel, d_hidden = jax.lax.scan(
      chunk, zero, (hidden, tokens, ref, out, cotangents)
    )
    d_kernel = jax.tree.map(lambda d, k: d.astype(k.dtype), d_kernel, given)
    return d_hidden, d_kernel, None, None

  stats.defvjp(keep, backward)
  return stats


def _dot(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """A product in float32, exact where its operands are."""
  exact = x.dtype == jnp.float32
  return jnp.einsum(
    formula,
    x,
    y,
    precision=jax.lax.Precision.HIGHEST if exact else None,
    preferred_element_type=jnp.float32,
  )


def _product(hidden_CD, kernel) -> jax.Array:
  dtype = hidden_CD.dtype
  if not isinstance(kernel, tuple):
    return _dot('cd,dv->cv', hidden_CD, kernel.astype(dtype))
  kernel_DV, a_DR, b_RV = kernel
  low_CR = _product(hidden_CD, a_DR).astype(dtype)
  return _product(hidden_CD, kernel_DV) + _product(low_CR, b_RV)


def _product_back(hidden_CD, kernel, d_CV) -> tuple[jax.Array, Any]:
  """float32 cotangents of `_product`'s hidden states and kernel."""
  dtype = hidden_CD.dtype
  if not isinstance(kernel, tuple):
    d_hidden = _dot('cv,dv->cd', d_CV, kernel.astype(dtype))
    return d_hidden, _dot('cd,cv->dv', hidden_CD, d_CV)
  kernel_DV, a_DR, b_RV = kernel
  low_CR = _product(hidden_CD, a_DR).astype(dtype)
  d_low, d_b = _product_back(low_CR, b_RV, d_CV)
  d_more, d_a = _product_back(hidden_CD, a_DR, d_low.astype(dtype))
  d_hidden, d_kernel = _product_back(hidden_CD, kernel_DV, d_CV)
  back = jax.tree.unflatten(jax.tree.structure(kernel), [d_kernel, d_a, d_b])
  return d_hidden + d_more, back


def _tempered(hidden_CD, kernel_DV, tokens: _Tokens, finish) -> jax.Array:
  """float32 logits [C, V], divided after they are float32."""
  z = finish(_product(hidden_CD, kernel_DV))
  return z / tokens.temperature[:, None]


def _kept_total(z_CV, tokens: _Tokens) -> tuple[jax.Array, jax.Array]:
  """Log-sum-exp over the kept ids and the label, and their logits' places.

  Returns [C] and int32 [C, M + 1]; a place that is not used holds V.
  """
  V = z_CV.shape[-1]
  ids = tokens.ids[:, None]
  places = jnp.where((tokens.kept >= 0) & (tokens.kept != ids), tokens.kept, V)
  places = jnp.concatenate([places, ids], 1)
  z = jnp.take_along_axis(z_CV, jnp.minimum(places, V - 1), 1)
  z = jnp.where(places < V, z, -jnp.inf)
  return jax.nn.logsumexp(z, -1), places


def _measure(z_CV, tokens: _Tokens, log_ref_CV) -> TokenStats:
  # Below the largest, so that nothing is lost where one id has all the mass.
  top = z_CV.max(-1)
  below = z_CV - top[:, None]
  mass = jnp.exp(below)
  whole = mass.sum(-1)
  total = jnp.log(whole)
  own = jnp.take_along_axis(below, tokens.ids[:, None], 1)[:, 0]

  def mean(x_CV):
    # Where a logit is a huge negative number its mass is 0, and so its share.
    return jnp.sum(jnp.where(mass > 0, mass * x_CV, 0.0), -1) / whole

  kl = log_kept = jnp.zeros_like(total)
  if log_ref_CV is not None:
    kl = mean(below - total[:, None] - log_ref_CV)
  if tokens.kept is not None:
    log_kept = _kept_total(below, tokens)[0] - total
    log_kept = jnp.where(tokens.cut, log_kept, 0.0)
  return TokenStats(
    own - total - log_kept, total - mean(below), top + total, kl, log_kept
  )


def _back(
  z_CV, tokens: _Tokens, log_ref_CV, out: TokenStats, d: TokenStats
) -> jax.Array:
  """Cotangent of the tempered logits.

  One expression over [C, V]: XLA makes one pass of it.
  """
  V = z_CV.shape[-1]
  logp = z_CV - out.log_total_N[:, None]
  mass = jnp.exp(logp)
  own = jnp.arange(V) == tokens.ids[:, None]
  # log-prob: 1_y - p, and through the mass that is kept: see below.
  through = d.logprobs_N
  share = -through + d.log_total_N
  # entropy: -p (log p + H).
  factor = share[:, None] - d.entropy_N[:, None] * jnp.where(
    mass > 0, logp + out.entropy_N[:, None], 0.0
  )
  if log_ref_CV is not None:
    far = logp - log_ref_CV - out.kl_N[:, None]
    factor += d.kl_N[:, None] * jnp.where(mass > 0, far, 0.0)
  if tokens.kept is None:
    return jnp.where(own, through[:, None], 0.0) + mass * factor
  # logp = z_y - L_kept, log_kept = L_kept - L: p_kept is what L_kept moves by.
  moved = jnp.where(tokens.cut, d.log_kept_N - through, 0.0)
  factor -= moved[:, None]
  whole, places = _kept_total(z_CV, tokens)
  z = jnp.take_along_axis(z_CV, jnp.minimum(places, V - 1), 1)
  kept = moved[:, None] * jnp.exp(z - whole[:, None])
  rows = jnp.arange(z_CV.shape[0])[:, None]
  out_CV = jnp.where(own, through[:, None], 0.0) + mass * factor
  return out_CV.at[rows, places].add(kept, mode='drop')


def compact(mask_BT: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
  """Flat indices of the True entries, padded to `capacity`, and which are real.

  The caller guarantees that there are no more than `capacity`.
  """
  flat = mask_BT.reshape(-1)
  index_N = jnp.nonzero(flat, size=capacity, fill_value=0)[0]
  return index_N, jnp.arange(capacity) < jnp.sum(flat)
