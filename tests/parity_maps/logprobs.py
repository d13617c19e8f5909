"""Log-probs and entropies from logits of four systems, as ours.

The logits are the hidden states of `token_stats`, behind an identity for a
head. All of ours is float32 after the matmul, whatever the logits came in.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.rl.token_stats import Head, TokenStats, token_stats
from parity_maps import Case, Result


class Asked(NamedTuple):
  """Logits [N, V] and ids [N], flat."""

  logits: jax.Array
  ids: jax.Array
  temperature: float = 1.0

  def stats(self, logits=None) -> TokenStats:
    logits = self.logits if logits is None else logits
    temperature = jnp.full(self.ids.shape, self.temperature, jnp.float32)
    return _stats(logits, self.ids, temperature)


@jax.jit
def _stats(logits, ids, temperature) -> TokenStats:
  head = Head(logits, jnp.eye(logits.shape[-1]))
  return token_stats(head, ids, temperature)


def asked(logits, ids, temperature: float = 1.0) -> Asked:
  logits = jnp.asarray(logits, jnp.float32)
  return Asked(
    logits.reshape(-1, logits.shape[-1]), jnp.asarray(ids).reshape(-1),
    temperature,
  )  # fmt: skip


def sum_of_squares(of: Asked) -> jax.Array:
  """sum pi^2, by the log-prob of every id in turn."""
  N, V = of.logits.shape
  every = Asked(
    jnp.repeat(of.logits, V, 0), jnp.tile(jnp.arange(V), N), of.temperature
  )
  return jnp.exp(2 * every.stats().logprobs_N).reshape(N, V).sum(-1)


def _areal(case: Case) -> Result:
  o = case.options(temperature=1.0, dtype='float32')
  logits, labels = case.take('logits', 'labels')
  of = asked(logits, labels, o.temperature)
  out = of.stats()

  def total(logits):
    stats = of.stats(logits.astype(jnp.float32))
    return stats.logprobs_N.sum() + 0.3 * stats.entropy_N.sum()

  # The gradient comes in the logits' dtype; a last bit of it may fall either
  # way.
  dtype = jnp.dtype(o.dtype)
  gradient = jax.grad(total)(of.logits.astype(dtype)).astype(jnp.float32)
  last_bit = float(jnp.finfo(dtype).eps)
  return Result(
    {
      'logprob': out.logprobs_N,
      'entropy': out.entropy_N,
      'grad_logits': gradient,
    },
    rtol={'grad_logits': last_bit},
  )


def _plain(case: Case, ids: str) -> Result:
  case.options()
  logits, labels = case.take('logits', ids)
  out = asked(logits, labels).stats()
  return Result(
    {
      'logprob': out.logprobs_N.reshape(labels.shape),
      'entropy': out.entropy_N.reshape(labels.shape),
    }
  )


def _verl(case: Case) -> Result:
  o = case.options(dtype='float32')
  logits, labels = case.take('logits', 'labels')
  of = asked(np.asarray(logits, np.float32), labels)
  out = of.stats()
  outputs = {
    'logprob_v2': out.logprobs_N,
    'logprob_naive': out.logprobs_N,
    'ref_logprob_f64': out.logprobs_N,
    'entropy': out.entropy_N,
    'entropy_chunked_fp32': out.entropy_N,
    'ref_entropy_f64': out.entropy_N,
    'sum_pi_squared': sum_of_squares(of),
  }
  ignored = {}
  if o.dtype != 'float32':
    # The peer computes in the logits' dtype; its error is what is recorded.
    ignored = {
      k: f'made in {o.dtype}' for k in outputs if not k.startswith('ref_')
    }
  return Result(outputs, ignored=ignored)


FUNCTIONS = {
  '_gather_logprobs_entropy@AReaL': _areal,
  'selective_log_softmax/entropy_from_logits@trl': (
    lambda case: _plain(case, 'index')
  ),
  'selective_log_softmax/compute_entropy_from_logits@tunix': (
    lambda case: _plain(case, 'ids')
  ),
  'logprobs_from_logits_v2/naive, entropy_from_logits(_with_chunking), '
  'calculate_sum_pi_squared_from_logits': _verl,
}
