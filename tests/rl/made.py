"""Made-up tokens, and every loss of the seam with an option or two."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from agentjax.rl import correction, losses, masked, regression, surrogates
from agentjax.rl.losses import Tokens

BAD = [np.nan, np.inf, -np.inf, 1e38]


def made(seed: int = 0, n: int = 24) -> tuple[jnp.ndarray, Tokens]:
  """Log-probs, and tokens of 5 trajectories of up to 3 turns with holes."""
  rng = np.random.default_rng(seed)
  new, old, behaviour, reference = rng.normal(size=(4, n)) * 0.4 - 2
  sequences = np.sort(rng.integers(0, 5, n)).astype(np.int32)
  turns = sequences * 3 + np.sort(rng.integers(0, 3, n)).astype(np.int32)
  turns = np.unique(turns, return_inverse=True)[1].astype(np.int32)
  advantages = rng.normal(size=5)[sequences]
  return jnp.float32(new), Tokens(
    mask=jnp.asarray(rng.random(n) < 0.7),
    old=jnp.float32(old),
    advantages=jnp.float32(advantages),
    sequences=jnp.asarray(sequences),
    turns=jnp.asarray(turns),
    weights=jnp.float32(rng.uniform(0.5, 2, n)),
    behaviour=jnp.float32(behaviour),
    reference=jnp.float32(reference),
  )


# Each is a sum over trajectories: no other trajectory changes a token's loss.
LOCAL = {
  'ppo_clip': losses.ppo_clip,
  'dual_clip': functools.partial(losses.ppo_clip, dual_clip=1.2),
  'delta': functools.partial(losses.ppo_clip, delta=1.1),
  'reinforce': losses.reinforce,
  'cross_entropy': losses.cross_entropy,
  'cispo': functools.partial(losses.cispo, cap=1.2, floor=0.8),
  'gspo': functools.partial(surrogates.gspo, clip_low=0.2, clip_high=0.2),
  'gspo_turn': functools.partial(
    surrogates.gspo, clip_low=0.2, clip_high=0.2, log_ratio=losses.turn_ratio
  ),
  'gspo_mean': functools.partial(
    surrogates.gspo, clip_low=0.2, clip_high=0.2, log_ratio=losses.mean_ratio
  ),
  'gmpo': surrogates.gmpo,
  'sapo': surrogates.sapo,
  'dppo_tv': functools.partial(surrogates.dppo_tv, low=0.02, high=0.02),
  'dppo_kl': functools.partial(surrogates.dppo_kl, low=0.01, high=0.01),
  'vespo': surrogates.vespo,
  'dro': regression.dro,
  'webrl': regression.webrl,
  'webrl_mean': functools.partial(
    regression.webrl, beta=0.5, total=masked.segment_mean
  ),
  'decoupled': functools.partial(
    correction.decoupled, loss=losses.ppo_clip, weigh=correction.truncated
  ),
  'reweighted': correction.reweighted,
}

# These look at all tokens that they are given.
LOSSES = LOCAL | {
  'clip_cov': functools.partial(
    surrogates.clip_cov, share=0.2, low=-1.0, high=9.0
  ),
  'kl_cov': functools.partial(surrogates.kl_cov, share=0.2),
  'webrl_released': functools.partial(
    regression.webrl_released, supervise=True
  ),
}
