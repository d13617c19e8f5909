"""Log-probs of a tempered, truncated distribution, as our sampler gives them.

It draws by an inverse CDF, so a wanted token is drawn by the number that lies
in the middle of its share.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.rollout import sampling
from parity_maps import Case, Result
from parity_maps.logprobs import asked


def processed(case: Case) -> Result:
  o = case.options(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
  logits, wanted = case.take('logits', 'sampled')
  n, V = logits.shape
  z = jnp.asarray(logits, jnp.float32)
  full = lambda x, dtype=jnp.float32: jnp.full((n,), x, dtype)  # noqa: E731
  options = (
    full(o.temperature), full(o.top_k, jnp.int32), full(o.top_p), full(o.min_p)
  )  # fmt: skip
  kept = np.asarray(_kept(z, options))
  mass = np.where(
    kept, np.exp(np.float64(logits - logits.max(-1, keepdims=True))
                 / o.temperature), 0.0,
  )  # fmt: skip
  upto = mass.cumsum(-1)
  at = np.arange(n), wanted
  u = (upto[at] - mass[at] / 2) / upto[:, -1]
  out = _sample(z, jnp.float32(u), *options)
  drawn = np.asarray(out.token) == wanted
  if not (drawn == kept[at]).all():
    raise AssertionError('the sampler drew another token than was asked for')
  # What is not kept is never drawn: the policy gives it no probability.
  tempered = asked(logits, wanted, o.temperature).stats().logprobs_N
  return Result(
    {
      'processed_logprob': np.where(drawn, out.logprob, -np.inf),
      'tempered_full_logprob': np.where(drawn, out.logprob_full, tempered),
      'log_kept_mass': out.log_kept_mass,
      'raw_logprob': asked(logits, wanted).stats().logprobs_N,
      'keep_mask': kept,
    }
  )


_sample = jax.jit(sampling.sample)


@jax.jit
def _kept(z, options) -> jax.Array:
  """What the sampler keeps, by the floor that it computes itself.

  Nothing public says so, and a token of little mass would hardly be drawn.
  """
  temperature, top_k, top_p, min_p = options
  largest = z.max(-1)
  tempered, mass = sampling._tempered(z, largest, temperature)
  cut = (top_k > 0) | (top_p < 1) | (min_p > 0)
  floor = sampling._floor(tempered, mass, cut, top_k, top_p, min_p)
  return (tempered >= jnp.where(cut, floor, -jnp.inf)[:, None]) & (mass > 0)


FUNCTIONS = {'processed_logprobs': processed}
