"""What is done to rewards before an estimator sees them, and to whole groups.

Floor 1, rl/. Host-side numpy in float64. Rewards are shaped here and nowhere
else: a length penalty, a KL penalty, clipping; and groups that teach nothing
are found by the raw metric, before any shaping.

Letters: N trajectories, B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from agentjax.rl.draw import Draw
from agentjax.rl.normalize import labels, varies

# ---- length -----------------------------------------------------------------


def policy_tokens(draw: Draw) -> np.ndarray:
  """int[N]: what the policy sampled. The length of an agent's answer."""
  return np.array([np.count_nonzero(m) for m in draw.masks])


def all_tokens(draw: Draw) -> np.ndarray:
  """int[N]: from the first sampled token on, observations among them."""
  return np.array([len(m) - np.argmax(m) if m.any() else 0 for m in draw.masks])


def overlong_penalty(
  lengths_N,
  *,
  limit: int,
  buffer: int,
  factor: float = 1.0,
  lowest: float = -np.inf,
) -> np.ndarray:
  """min(-(length - (limit - buffer)) / buffer * factor, 0), and >= lowest.

  To be added to rewards. The paper stops at -1 behind the limit (`lowest` =
  -factor); most systems, whose limit is a hard one, do not. Without a buffer
  it is all or nothing. Source: DAPO, arXiv:2503.14476, eq. 13.
  """
  over = np.asarray(lengths_N, np.float64) - (limit - buffer)
  share = over / buffer if buffer else np.where(over > 0, 1.0, 0.0)
  return np.maximum(np.minimum(-share * factor, 0.0), lowest)


# ---- scale ------------------------------------------------------------------


def rescaled(
  rewards_N, *, bias: float = 0.0, factor: float = 1.0,
  low: float = -np.inf, high: float = np.inf,
) -> np.ndarray:  # fmt: skip
  """(reward + bias) * factor, clipped."""
  rewards = (np.asarray(rewards_N, np.float64) + bias) * factor
  return np.clip(rewards, low, high)


# ---- KL in the reward -------------------------------------------------------


def k1(logprobs, ref_logprobs, mask) -> np.ndarray:
  """log pi - log ref at sampled tokens, 0 elsewhere.

  In a reward its gradient is the reverse KL's, exactly (algorithms that put
  the KL there never differentiate through it).
  """
  return np.where(mask, logprobs, 0.0) - np.where(mask, ref_logprobs, 0.0)


def kl_penalty(
  logprobs_BT,
  ref_logprobs_BT,
  mask_BT,
  *,
  coef: float,
  value: Callable = k1,
  most: float | None = None,
) -> np.ndarray:
  """-coef * KL of each sampled token; 0 elsewhere, whatever stands there.

  Token rewards of a draw. Masked here, before any return is summed: an
  observation's KL would be put on the policy's last token.

  Args:
    value: (logprobs, ref_logprobs, mask) -> KL of each token.
    most: clips the KL to +-most (B2 row 18: AReaL and OpenRLHF take 10).
  """
  mask = np.asarray(mask_BT, bool)
  kl = np.asarray(value(logprobs_BT, ref_logprobs_BT, mask), np.float64)
  if most is not None:
    kl = np.clip(kl, -most, most)
  return np.where(mask, -coef * kl, 0.0)


# ---- groups that teach nothing ----------------------------------------------


def informative(metric_N, groups_N, valid_N) -> np.ndarray:
  """bool[N]: valid, and in a group whose metric is not the same throughout.

  Dynamic sampling without a refill: what is False may be taken out of the
  loss, with counts as they were or without it. `metric_N` is the raw verdict:
  a length penalty would make a group of failures look as if it taught
  something. Source: DAPO, arXiv:2503.14476, eq. 11.
  """
  return varies(metric_N, labels(groups_N, valid_N))


def group_shares(metric_N, groups_N, valid_N) -> dict[str, float]:
  """Shares of the groups: without variance, and with one valid member.

  Among the groups that have a valid member; 0 where there are none.
  """
  label = labels(groups_N, valid_N)
  present, size = np.unique(label[label >= 0], return_counts=True)
  teaches = varies(metric_N, label)
  taught = np.unique(label[teaches])
  n = max(len(present), 1)
  return {
    'zero_variance_groups': (len(present) - len(taught)) / n,
    'singleton_groups': float(np.count_nonzero(size == 1)) / n,
  }
