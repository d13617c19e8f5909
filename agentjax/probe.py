"""What the functions of a config do on next to nothing, before a run begins.

Floor 3, under `training`. An algorithm is a function with options bound, and
says only when it is called that an option is out of range, or that it lacks
what it needs. A run calls most of them after its cold start, so they are called
here first: on two or three trajectories of a few tokens, or traced without
being run. Knows no config and no run; what a function says is passed on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.learner import Learner
from agentjax.rl import correction, draw_from, kl
from agentjax.rl.aggregation import over_trajectories
from agentjax.rl.draw import Draw, Estimator, Tree
from agentjax.rl.losses import PolicyLoss, Tokens


def lone_groups(**more: Any) -> Draw:
  """Two groups of one: whoever takes each by itself has no baseline."""
  return draw_from.arrays(
    np.ones((2, 2)),
    rewards_B=[1.0, 0.0],
    groups_B=[0, 1],
    tree=Tree(np.array([-1, -1]), np.array([0, 0])),
    **more,
  )


def sees_tokens(advantages: Estimator, known: dict[str, Any]) -> bool:
  """Whether rewards of tokens, such as those of a KL, change anything.

  Args:
    known: optional fields of a draw that there will be, to their numbers in
      every place.
  """

  def given(rewards_BT):
    return advantages(_group(known, token_rewards=rewards_BT))

  pairs = zip(
    given(np.zeros((3, 4))),
    given(np.array([[0, 0.1, 0, 0.2], [0.3, 0, 0.9, 0], [0, 0.2, 0.6, 0]])),
    strict=True,
  )
  return any(not np.allclose(a, b) for a, b in pairs)


def sees_values(advantages: Estimator, known: dict[str, Any]) -> bool:
  """Whether a critic's values, which are among `known`, change anything."""
  some = [[0, 0.4, 0.1, 0.9], [0.3, 0, 0.7, 0.2], [1, 0, 0, 0.5]]
  found = [
    advantages(_group(known | {'values': values})) for values in (0.0, some)
  ]
  return any(not np.allclose(a, b) for a, b in zip(*found, strict=True))


def at_ends_alone(value_targets: Estimator, known: dict[str, Any]) -> bool:
  """Whether these are targets for the last tokens of turns, and 0 elsewhere."""
  targets = np.array(value_targets(_group(known)))
  ends = np.array([False, True, False, True])
  return bool(targets[:, ends].any() and not targets[:, ~ends].any())


def _group(known: dict[str, Any], **more: Any) -> Draw:
  """A group of three, two turns of two tokens each, all with a reward."""
  per = {
    'values': (3, 4), 'turn_values': (3, 2), 'answer_probs': (3, 2),
    'baselines_N': (3,),
  }  # fmt: skip
  fields = {
    k: np.broadcast_to(np.asarray(x, float), per[k]) for k, x in known.items()
  }
  return draw_from.arrays(
    np.ones((3, 4)),
    rewards_B=[1.0, 2.0, 4.0],
    turns_BT=np.tile([0, 0, 1, 1], (3, 1)),
    turn_rewards=[[1.0, 1.0]] * 3,
    tree=Tree(np.full(3, -1), np.zeros(3, int)),
    **fields,
    **more,
  )


def weighing(aggregation: Callable, rejected: Callable) -> None:
  """Weighs two trajectories of two tokens, of which one is rejected.

  Raises:
    ValueError: of no finite weights, or what the functions say.
  """
  on, ids = np.ones(2, bool), np.ones(2, np.int32)
  weights, count = over_trajectories(
    aggregation, [on, on], groups=[0, 0], turns=[ids, ids],
    token_weights=[on, on], kept=[on, np.array([True, False])],
    rejected=rejected,
  )  # fmt: skip
  numbers = np.array([*weights, [count, count]])
  if not (np.isfinite(numbers).all() and (numbers >= 0).all() and count):
    raise ValueError(
      f'gives weights {numbers[:-1].tolist()} over {count} to two '
      'trajectories: give one whose weights are finite, and count above 0'
    )


def selecting(select: Callable) -> None:
  """Selects of two groups of one.

  Raises:
    ValueError: what comes out is not one bool for each.
  """
  draw = lone_groups()
  chosen = np.asarray(select(draw.rewards_N, draw.groups_N, draw.valid_N))
  if chosen.shape != (2,) or chosen.dtype != bool:
    raise ValueError(
      f'gives {chosen.tolist()} for two trajectories: give a bool for each'
    )


def moving(move: Callable) -> None:
  """Traces a reference's move of one number."""
  tree = {'x': jax.ShapeDtypeStruct((1,), jnp.float32)}
  jax.eval_shape(move, tree, tree, jax.ShapeDtypeStruct((), jnp.int32))


def controlling(control: Callable, coef: float, n: int) -> None:
  """Asks for the next coefficient where the KL is 0, and where it is large.

  Raises:
    ValueError: it is not finite, or below 0.
  """
  for x in (0.0, 1e6):
    found = float(control(coef, x, n=n))
    if not 0 <= found < np.inf:
      raise ValueError(
        f'makes {found} of {coef} after {n} trajectories with a KL of {x:g}: '
        'give one that stays finite and 0 or more, such as with a longer '
        'horizon'
      )


def holding(learner: Learner) -> None:
  """Looks at what the KL's gradient in the loss is a gradient of.

  Raises:
    ValueError: of nothing: the value is biased, and goes on as if it were not.
  """
  value, gradient = (
    bare(f) for f in (learner.objective.kl_value, learner.objective.kl_gradient)
  )
  for biased, own in (
    (kl.k2, kl.k2_gradient),
    (kl.absolute, kl.naive_gradient),
  ):
    if value is biased and gradient is kl.ratio_gradient and learner.kl_coef:
      raise ValueError(
        'rl.kl.ratio_gradient, which is the default, is for unbiased values, '
        f'and {value.__name__} is none: set learner.kl_gradient to '
        f'agentjax.rl.kl.{own.__name__}'
      )


def losing(learner: Learner, reference: bool) -> None:
  """Traces the loss on two tokens; it may be told of a reference.

  Raises:
    ValueError: it gives something else than a loss of each token.
  """
  real, whole, truth = (
    jax.ShapeDtypeStruct((2,), d) for d in (jnp.float32, jnp.int32, bool)
  )
  tokens = Tokens(
    mask=truth, old=real, advantages=real, sequences=whole, turns=whole,
    behaviour=real, reference=real if reference else None,
  )  # fmt: skip
  found = jax.eval_shape(learner.objective.loss, real, tokens)
  if not isinstance(found, PolicyLoss) or found.loss_N.shape != (2,):
    raise ValueError(
      f'gives {found} for two tokens: a loss is loss(logprobs_N, tokens) -> '
      'PolicyLoss of values [N], as rl.losses.policy_loss makes it'
    )


def rejecting(learner: Learner) -> None:
  """Traces what the learner's `reject` and `stale` keep of two tokens."""
  real, whole, truth = (
    jax.ShapeDtypeStruct((2,), d) for d in (jnp.float32, jnp.int32, bool)
  )
  for reject in learner.reject:
    jax.eval_shape(reject, real, truth, whole)
  if learner.stale is not None:
    stale = functools.partial(learner.stale, now=0)
    jax.eval_shape(stale, whole, truth, whole)


def corrects(learner: Learner) -> bool:
  """Whether it asks how far the proximal policy is from who sampled."""
  loss = bare(learner.objective.loss)
  return bool(learner.reject) or loss is correction.decoupled


def bare(function: Callable) -> Callable:
  """The function that options were bound to."""
  while isinstance(function, functools.partial):
    function = function.func
  return function
