"""The reference policy of a run, and the weight of the KL to it.

Floor 3, under `run`. Both are in the checkpoint. Where the KL is in the
reward, updates do not see the reference, and its log-probs are asked for once
a draw (`credit`).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from agentjax import references
from agentjax.learner import Learner
from agentjax.training import Training


class Anchor:
  """What the policy is held to.

  Attributes:
    params: trained parameters of the reference, or None.
    kl_coef: weight of the KL, in the loss or in the reward.
  """

  def __init__(self, o: Training, learner: Learner):
    self.o = o
    self.params: Any = None
    self.kl_coef = learner.kl_coef or o.reward_kl_coef
    self._move: Any = None

  @property
  def in_loss(self) -> Any:
    """The reference that updates see."""
    return None if self.o.reward_kl_coef else self.params

  @property
  def loss_coef(self) -> float:
    """The weight of the KL to it, in the loss."""
    return 0.0 if self.o.reward_kl_coef else self.kl_coef

  def take(self, params: Any) -> None:
    """Begins with a copy of this policy, where a reference is asked for."""
    if self.o.use_reference:
      self.params = jax.tree.map(lambda x: x.copy(), params)

  def compile(self, params: Any) -> None:
    if self.o.move_reference is not None:
      self._move = references.compiled(
        self.o.move_reference, self.params, params
      )

  def after_update(self, metrics: dict[str, float], n: int) -> None:
    """Controls the coefficient by what n trajectories showed; notes it.

    A KL that is not finite, of updates that were skipped, shows nothing.

    Raises:
      ValueError: the next coefficient is not finite, or below 0.
    """
    if self.o.kl_control is None:
      return
    metrics['kl_coef'] = self.kl_coef
    if not np.isfinite(metrics['kl']):
      return
    found = float(self.o.kl_control(self.kl_coef, metrics['kl'], n=n))
    if not 0 <= found < np.inf:
      raise ValueError(
        f'kl_control makes {found} of {self.kl_coef} after {n} trajectories '
        f'with a KL of {metrics["kl"]}: give one that stays finite and 0 or '
        'more'
      )
    self.kl_coef = found

  def restore(self, params: Any, kl_coef: float | None) -> None:
    """Takes up what a checkpoint holds of it.

    A coefficient that nobody controls is the config's, which may have changed.
    """
    self.params = params
    if self.o.kl_control is not None and kl_coef is not None:
      self.kl_coef = kl_coef

  def after_step(self, params: Any, step: int) -> None:
    """Moves the reference as the run says."""
    if self._move is not None:
      self.params = self._move(self.params, params, np.int32(step))
