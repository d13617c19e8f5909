"""From a draw's rewards to what the learner is given, and what it says of it.

Floor 3, under `run`. Functions of groups, of the options of a run and of the
weights: what the policy, its reference and its critic say of the trajectories
is asked for where it is needed, once, before the first update of a draw.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from agentjax import gold
from agentjax.learner import Learner, State
from agentjax.rl import batch as packing
from agentjax.rl import draw_from, kl
from agentjax.rl.aggregation import over_trajectories
from agentjax.rl.batch import Batch
from agentjax.rl.draw import Draw
from agentjax.rl.tree_rows import tree_places, with_prompts
from agentjax.training import Training
from agentjax.types import Group, Trajectory

Arrays = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Policies:
  """Whose word is taken: of the draw's policy, its critic, its reference.

  Attributes:
    reference: trained parameters, or None.
    version: of the policy, as it stands on tokens that it samples now.
    kl_coef: of the KL in the reward.
  """

  learner: Learner
  state: State
  reference: Any = None
  version: int = 0
  kl_coef: float = 0.0


@dataclasses.dataclass(frozen=True)
class Credit:
  """What the trajectories of a draw, in its order, are learned with.

  Attributes:
    advantages: float64[T] each, 0 where there is no loss.
    groups_N: the group of each.
    chosen_N: bool: whether it is in the loss.
    columns: `old`, `values`, `returns` by name, float[T] each.
    prefix_weights: float64[T] each, of what leaves of a tree share.
    kept: bool[T] each: tokens that no rejection took; None if there is none.
    metrics: of the draw.
  """

  advantages: Arrays
  groups_N: np.ndarray
  chosen_N: np.ndarray
  prefix_weights: Arrays
  columns: Mapping[str, Arrays] = dataclasses.field(default_factory=dict)
  kept: Arrays | None = None
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


def members(groups: Sequence[Group]) -> list[Trajectory]:
  """The trajectories of all groups, in order."""
  return [t for g in groups for t in g.trajectories]


def credit(
  o: Training,
  policies: Policies,
  groups: Sequence[Group],
  found_by_branches: Mapping[str, list] | None = None,
) -> Credit:
  """What each token of a draw is worth, and how it is weighed.

  Args:
    found_by_branches: see `rollout.branches.Branched.found`.
  """
  trajectories = members(groups)
  groups_N = np.repeat(
    np.arange(len(groups)), [len(g.trajectories) for g in groups]
  )
  found, metrics = _measured(o, policies, trajectories, groups_N)
  # Numbered over all draws, so that no two groups of a run share a number.
  first = groups[0].draw * o.groups if groups else 0
  given = {k: found[k] for k in ('values', 'bootstrap') if k in found}
  given |= found_by_branches or {}
  if o.gold_answer is not None:
    given['answer_probs'] = gold.answer_probs(
      trajectories,
      answer=o.gold_answer,
      chat=o.chat,
      learner=policies.learner,
      params=policies.state.params,
      temperature=o.sampling.temperature,
    )
  if 'kl' in found:
    given['token_rewards'] = [
      kl.in_reward(np.zeros(len(x)), x, mask, policies.kl_coef)
      for x, mask in zip(
        found['kl'], map(packing.label_mask, trajectories), strict=True
      )
    ]
  raw = draw_from.groups(groups, first=first, **given)
  draw = raw if o.shape is None else o.shape(raw)
  chosen = np.ones(len(trajectories), bool)
  if o.select is not None:
    chosen = np.asarray(o.select(raw.rewards_N, raw.groups_N, raw.valid_N))
    metrics['chosen'] = float(np.mean(chosen))
  advantages = o.advantages(draw)
  columns = {k: found[k] for k in ('old', 'values') if k in found}
  if 'values' in found:
    columns['returns'] = o.value_targets(draw)
  metrics |= _of_draw(draw, advantages)
  kept = None
  if policies.learner.corrects:
    kept = _kept(o, policies, trajectories, groups_N, columns)
    metrics |= _rejected(kept, trajectories)
  return Credit(
    advantages, draw.groups_N, chosen, o.prefix_weight(draw), columns, kept,
    metrics,
  )  # fmt: skip


# ---- what policies and critics say ------------------------------------------


def _measured(
  o: Training, policies: Policies, trajectories, groups_N
) -> tuple[dict[str, Arrays], dict[str, float]]:
  learner, state = policies.learner, policies.state
  found: dict[str, Any] = {}
  metrics: dict[str, float] = {}
  if not (o.recompute_old or learner.critic or o.reward_kl_coef):
    return found, metrics
  at = _places(learner, trajectories, groups_N)
  batch = _packed(o, learner, trajectories, [0.0] * len(trajectories), at=at)

  def apart(array_BT):
    return packing.unpack(array_BT, at)

  if o.recompute_old or o.reward_kl_coef:
    old = learner.logprobs(state.params, batch)
    if o.recompute_old:
      found['old'] = apart(old)
  if o.reward_kl_coef:
    far = learner.logprobs(policies.reference, batch)
    found['kl'] = apart(old - far)
    sampled = batch.weights > 0
    metrics['kl'] = float((old - far)[sampled].mean()) if sampled.any() else 0.0
  if learner.critic is not None:
    after = apart(learner.values(state, batch))
    # A token's own value is that of the state before it.
    found['values'] = [np.concatenate([[0.0], v[:-1]])[: len(v)] for v in after]
    found['bootstrap'] = [float(v[-1]) if len(v) else 0.0 for v in after]
  return found, metrics


def _kept(o, policies: Policies, trajectories, groups_N, columns) -> Arrays:
  learner = policies.learner
  at = _places(learner, trajectories, groups_N)
  old = {k: v for k, v in columns.items() if k == 'old'}
  nothing = [0.0] * len(trajectories)
  batch = _packed(o, learner, trajectories, nothing, at=at, **old)
  return packing.unpack(learner.keep(batch, policies.version), at)


def _places(learner: Learner, trajectories, groups_N) -> packing.Places:
  shape = {'rows': learner.rows, 'length': learner.length}
  if not learner.trees:
    return packing.places(trajectories, **shape)
  tree = with_prompts(draw_from.tree(trajectories), groups_N, trajectories)
  return tree_places([len(t) for t in trajectories], tree, **shape)


def _rejected(kept: Arrays, trajectories) -> dict[str, float]:
  masks = [packing.label_mask(t) for t in trajectories]
  lost = [m & ~k for m, k in zip(masks, kept, strict=True)]
  tokens = sum(m.sum() for m in masks)
  rows = sum(m.any() for m in masks)
  return {
    'rejected_tokens': float(sum(x.sum() for x in lost) / max(tokens, 1)),
    'rejected_trajectories': sum(x.any() for x in lost) / max(rows, 1),
  }


def _of_draw(draw: Draw, advantages: Arrays) -> dict[str, float]:
  groups: dict[int, bool] = {}  # whether it says nothing
  for group, a in zip(draw.groups_N, advantages, strict=True):
    groups[int(group)] = groups.get(int(group), True) and not np.any(a)
  return {
    'groups_without_signal': float(np.mean([*groups.values()] or [0])),
    'misplaced_rewards': float(draw.misplaced),
  }


# ---- minibatches ------------------------------------------------------------


def batches(
  o: Training,
  learner: Learner,
  groups: Sequence[Group],
  given: Credit,
) -> Iterator[Batch]:
  """The minibatches of a draw, one optimizer step each."""
  trajectories = members(groups)
  advantages = given.advantages
  if not o.mask_observations:
    advantages = [
      _also_between(a, t.loss_mask())
      for a, t in zip(advantages, trajectories, strict=True)
    ]
  for part in np.array_split(np.arange(len(trajectories)), o.minibatches):

    def of(arrays, part=part):
      return [arrays[i] for i in part]

    own = of(trajectories)
    masks = [
      packing.label_mask(t, o.mask_observations) & chosen
      for t, chosen in zip(own, given.chosen_N[part], strict=True)
    ]
    weights, count = over_trajectories(
      o.aggregation,
      masks,
      groups=given.groups_N[part],
      turns=[packing.turn_numbers(t) for t in own],
      # An observation that an ablation trains on is shared by nobody.
      token_weights=[
        t.row_weight * np.where(t.loss_mask(), w, 1.0)
        for t, w in zip(own, of(given.prefix_weights), strict=True)
      ],
      kept=None if given.kept is None else of(given.kept),
      rejected=o.rejected,
    )
    at = _places(learner, own, given.groups_N[part])
    yield _packed(
      o, learner, own, of(advantages), weights=weights, count=count, at=at,
      **{k: of(v) for k, v in given.columns.items()},
    )  # fmt: skip


def _packed(o: Training, learner: Learner, trajectories, advantages, **more):
  return packing.pack(
    trajectories,
    advantages,
    rows=learner.rows,
    length=learner.length,
    temperature=o.sampling.temperature,
    mask_observations=o.mask_observations,
    kept=learner.kept,
    **more,
  )


def _also_between(advantages: np.ndarray, sampled: np.ndarray) -> np.ndarray:
  """Tokens that were not sampled get what the last sampled one before them has.

  For the ablation that trains on them; before the first it is the first's.
  """
  at = np.where(sampled, np.arange(len(sampled)), -1)
  # The first token has no label, and so no advantage.
  at[:1] = -1
  if (at < 0).all():
    return advantages
  before = np.maximum.accumulate(at)
  return advantages[np.where(before < 0, np.argmax(at >= 0), before)]


# ---- for the record ---------------------------------------------------------


def by_id(groups: Sequence[Group], given: Credit) -> dict[str, np.ndarray]:
  """Trajectory id -> float32[T]: its advantages, 0 where it has no loss."""
  return {
    t.id: a.astype(np.float32)
    for t, a in zip(members(groups), given.advantages, strict=True)
  }


def metrics(
  made: Sequence[Mapping[str, float]], given: Credit
) -> dict[str, float]:
  """Of the updates of one draw together, each for as many tokens as it had.

  One without any, of whose trajectories none was chosen, has no part in it.
  """
  tokens = [m['loss_tokens'] for m in made]
  weights = tokens if any(tokens) else None
  out = {
    k: float(np.average([m[k] for m in made], weights=weights)) for k in made[0]
  }
  out['loss_tokens'] = sum(m['loss_tokens'] for m in made)
  out['max_ratio'] = max(m['max_ratio'] for m in made)
  out['skipped_updates'] = made[-1]['skipped_updates']
  # The gap between sampler and learner is one only before weights move.
  out['max_logprob_gap'] = made[0]['max_logprob_gap']
  return out | given.metrics
