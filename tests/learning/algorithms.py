"""Every algorithm, as `experiments.tabular` takes it, with usual options.

Trust regions are as wide as a table learns: a step of Adam moves a logit by
0.1, where one of a large network moves it by a thousandth.
"""

import dataclasses
import functools

from agentjax.rl import (
  advantages,
  aggregation,
  correction,
  kl,
  losses,
  regression,
  returns,
  seam,
  shaping,
  surrogates,
  trees,
  turns,
)
from experiments.studies import credit_families as families
from experiments.tabular import Algorithm

partial, replace = functools.partial, dataclasses.replace

by_sequence = aggregation.sequence_mean_token_mean
by_turn = aggregation.turn_mean_token_mean

# ---- losses and baselines ---------------------------------------------------


def plain_returns(draw):
  """REINFORCE without a baseline."""
  return returns.returns(draw)


def less_a_little(draw):
  """WebRL's released advantages have a price of 0.05 for each step."""
  return [a - 0.05 * (a != 0) for a in advantages.dr_grpo(draw)]


def informative(draw):
  return shaping.informative(draw.rewards_N, draw.groups_N, draw.valid_N)


WIDE = {'clip_low': 0.1, 'clip_high': 0.2}

LOSSES = {
  'ppo_clip': Algorithm(),
  'clip_higher': Algorithm(loss=partial(losses.ppo_clip, clip_high=0.28)),
  'dual_clip': Algorithm(loss=partial(losses.ppo_clip, dual_clip=3.0)),
  'grpo': Algorithm(aggregate=by_sequence, kl_coef=1e-3),
  'dr_grpo': Algorithm(
    advantages.dr_grpo,
    aggregate=partial(aggregation.sequence_mean_token_sum_norm, length=8),
  ),
  'dapo': Algorithm(
    loss=partial(losses.ppo_clip, clip_high=0.28), keep=informative
  ),
  'rloo': Algorithm(
    advantages.rloo,
    losses.reinforce,
    aggregation.sequence_mean_token_sum,
  ),
  'reinforce': Algorithm(plain_returns, losses.reinforce),
  'reinforce_plus_plus': Algorithm(
    advantages.reinforce_plus_plus,
    reward_kl_coef=1e-3,
  ),
  'reinforce_plus_plus_baseline': Algorithm(
    advantages.reinforce_plus_plus_baseline,
    kl_coef=1e-3,
    kl_value=kl.k2,
    kl_gradient=kl.naive_gradient,
  ),
  'gspo': Algorithm(loss=partial(surrogates.gspo, **WIDE),
                    aggregate=by_sequence),
  'gspo_turn': Algorithm(
    loss=partial(surrogates.gspo, log_ratio=losses.turn_ratio, **WIDE),
    aggregate=by_turn,
  ),
  'cispo': Algorithm(loss=losses.cispo),
  'sapo': Algorithm(loss=surrogates.sapo),
  'gmpo': Algorithm(loss=surrogates.gmpo, aggregate=by_sequence),
  'dppo_tv': Algorithm(loss=surrogates.dppo_tv),
  'dppo_kl': Algorithm(loss=surrogates.dppo_kl),
  'webrl': Algorithm(
    advantages.dr_grpo,
    partial(regression.webrl, beta=0.5),
    by_turn,
    phase=1,
  ),
  'webrl_released': Algorithm(
    less_a_little, regression.webrl_released, by_turn, phase=1
  ),
  'entropy_bonus': Algorithm(entropy_coef=1e-3),
  'kl_in_reward': Algorithm(
    partial(advantages.grpo, scores=seam.total),
    data=families.outcome_alone,
    reward_kl_coef=1e-3,
  ),
}  # fmt: skip

# ---- credit by turn, search and structure -----------------------------------


def steps_of_tools(chain, sampled, probs, rng):
  """StepTool: each call that was right succeeded, and contributed."""
  del chain, probs, rng
  right = sampled.right_NK & sampled.there_NK
  rewards = [
    turns.steptool_rewards(r[:n], r[:n], coef=0.5)
    for r, n in zip(right, sampled.there_NK.sum(1), strict=True)
  ]
  return {'turn_rewards': rewards}, 0


PPO = Algorithm(
  partial(returns.gae, lam=0.95),
  targets=returns.value_targets,
  value_clip=0.5,
  entropy_coef=1e-3,
)
CREDIT = {
  'ppo': PPO,
  'turn_gae': replace(families.TURN_GAE, estimator=turns.turn_gae),
  'bi_level_gae': replace(
    families.BI_LEVEL_GAE, estimator=partial(turns.bi_level_gae, lam=0.9)
  ),
  'turn_returns': Algorithm(turns.turn_returns),
  'process_supervision': families.PROCESS,
  'mt_grpo': families.MT_GRPO,
  'steptool': replace(PPO, data=steps_of_tools),
  'igpo': families.IGPO,
  'gigpo': families.GIGPO_REWARDS,
  'tree_grpo': families.TREE_GRPO,
  'tree_once': replace(families.TREE_GRPO, token_weights=trees.shared_once),
  'treerl': families.TREERL,
  'arpo_hard': families.ARPO_HARD,
  'vineppo': families.VINEPPO,
}

# ---- data of a policy three updates ago -------------------------------------


def corrected(weigh, **options) -> Algorithm:
  return Algorithm(
    loss=partial(
      correction.decoupled,
      loss=losses.ppo_clip,
      weigh=partial(weigh, **options),
    ),
    lag=3,
  )


STALE = {
  'decoupled': corrected(correction.importance),
  'tis_token': corrected(correction.truncated),
  'tis_sequence': corrected(
    correction.truncated, level=correction.sequence_sum
  ),
  'icepop': corrected(correction.icepop),
}
ALL = LOSSES | CREDIT | STALE


def names(*some: str) -> dict[str, Algorithm]:
  return {name: ALL[name] for name in some}
