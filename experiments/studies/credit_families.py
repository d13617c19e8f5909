"""Families of credit beside outcome broadcast, on two small problems.

A table for a policy (`experiments.tabular`), so that a run takes seconds and
the score is exact: the probability of the right answer, over the turns that
decide. In `first_decides` the first of six turns decides and luck blurs the
outcome; in `each_counts` all of six turns do. All arms of a problem have the
same seeds, tasks, rows (but for those that say otherwise) and settings.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from agentjax import storage
from agentjax.rl import advantages, anchors, returns, trees, turns, values
from agentjax.rl.seam import total
from experiments import chains, tabular
from experiments.tabular import Algorithm, Settings

CLAIM = (
  'Credit by turn, and credit by search and structure, learn faster than '
  'outcome broadcast where the first turn decides and the outcome is noisy, '
  'or where every turn counts.'
)
SEEDS = (0, 1, 2, 3, 4)
# Student's, of n - 1 degrees of freedom.
T_95 = {
  2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365,
  9: 2.306, 10: 2.262,
}  # fmt: skip

# ---- what estimators need beside the outcome --------------------------------


def outcome_alone(chain, sampled, probs, rng):
  """No reward of any turn."""
  del chain, probs, rng
  return {'turn_rewards': np.zeros(sampled.there_NK.shape)}, 0


def answer_probs(chain, sampled, probs, rng):
  """The exact expected outcome stands for the right answer's probability.

  So information gain is given more than it would find by itself.
  """
  del rng
  return {'answer_probs': chains.expected_outcome(chain, probs, sampled)}, 0


def continuations(chain, sampled, probs, rng, *, n: int):
  """Mean outcome of n fresh continuations before each turn."""
  means, used = chains.mean_continuations(rng, chain, probs, sampled, n)
  fields, _ = outcome_alone(chain, sampled, probs, rng)
  return fields | {'turn_values': means}, used


# ---- families ---------------------------------------------------------------


def with_critic(estimator, targets, *, learns=None, **options) -> Algorithm:
  """Outcome alone, and a critic of its own, of lambda 1."""
  return Algorithm(
    functools.partial(estimator, **options),
    targets=targets,
    data=outcome_alone,
    **({} if learns is None else {'critic': learns}),
  )


GRPO = Algorithm(advantages.grpo, data=outcome_alone)
GRPO_TOTAL = Algorithm(functools.partial(advantages.grpo, scores=total))
GAE = with_critic(returns.gae, returns.value_targets, lam=0.9)
TURN_GAE = with_critic(
  turns.turn_gae, turns.turn_value_targets, learns=values.turn_ends, lam=0.5
)
BI_LEVEL_GAE = with_critic(
  turns.bi_level_gae, turns.bi_level_value_targets, lam=0.9, turn_lam=0.5
)
TURN_RETURNS = Algorithm(functools.partial(turns.turn_returns, gamma=0.5))
PROCESS = Algorithm(turns.process_supervision)
MT_GRPO = Algorithm(turns.mt_grpo)
IGPO = Algorithm(turns.igpo, data=answer_probs)
GIGPO = Algorithm(
  functools.partial(anchors.gigpo, gamma=1.0), data=outcome_alone
)
GIGPO_REWARDS = dataclasses.replace(GIGPO, data=Algorithm().data)
TREE_GRPO = Algorithm(trees.tree_grpo, data=outcome_alone, leaves=2)
TREERL = dataclasses.replace(TREE_GRPO, estimator=trees.treerl)
ARPO_HARD = dataclasses.replace(TREE_GRPO, estimator=trees.arpo_hard)
VINEPPO = Algorithm(trees.vineppo, data=functools.partial(continuations, n=4))


@dataclasses.dataclass(frozen=True)
class Arm:
  """One row of the table.

  Attributes:
    fair: the arm of outcome broadcast with the same rewards and about as many
      sampled turns.
  """

  algorithm: Algorithm
  fair: str = 'grpo'
  group_size: int = 8


@dataclasses.dataclass(frozen=True)
class Part:
  """A problem, and after how many updates its arms are compared."""

  make: Callable
  settings: Settings
  measured_at: int
  arms: dict[str, Arm]


BOUND = 0.9
_SETTINGS = Settings(
  updates=100, learning_rate=0.05, critic_rate=0.3, shared=0.5
)
PARTS = {
  'first_decides': Part(
    functools.partial(chains.first_decides, tasks=16, luck=0.2),
    _SETTINGS,
    40,
    {
      'grpo': Arm(GRPO),
      'grpo_total': Arm(GRPO_TOTAL, 'grpo_total'),
      'grpo_12_rows': Arm(GRPO, 'grpo_12_rows', 12),
      'grpo_120_rows': Arm(GRPO, 'grpo_120_rows', 120),
      'gae': Arm(GAE),
      'turn_gae': Arm(TURN_GAE),
      'bi_level_gae': Arm(BI_LEVEL_GAE),
      'turn_returns': Arm(TURN_RETURNS, 'grpo_total'),
      'process': Arm(PROCESS, 'grpo_total'),
      'mt_grpo': Arm(MT_GRPO, 'grpo_total'),
      'igpo': Arm(IGPO),
      'gigpo': Arm(GIGPO),
      'tree_grpo': Arm(TREE_GRPO, 'grpo_12_rows', 16),
      'treerl': Arm(TREERL, 'grpo_12_rows', 16),
      'arpo_hard': Arm(ARPO_HARD, 'grpo_12_rows', 16),
      'vineppo': Arm(VINEPPO, 'grpo_120_rows'),
    },
  ),
  'each_counts': Part(
    functools.partial(chains.each_counts, tasks=8, turns=6),
    _SETTINGS,
    30,
    {
      'grpo': Arm(GRPO),
      'grpo_12_rows': Arm(GRPO, 'grpo_12_rows', 12),
      'grpo_120_rows': Arm(GRPO, 'grpo_120_rows', 120),
      'gae': Arm(GAE),
      'turn_gae': Arm(TURN_GAE),
      'turn_returns': Arm(TURN_RETURNS),
      'process': Arm(PROCESS),
      'mt_grpo': Arm(MT_GRPO),
      'igpo': Arm(IGPO),
      'gigpo': Arm(GIGPO_REWARDS),
      'tree_grpo': Arm(TREE_GRPO, 'grpo_12_rows', 16),
      'treerl': Arm(TREERL, 'grpo_12_rows', 16),
      'arpo_hard': Arm(ARPO_HARD, 'grpo_12_rows', 16),
      'vineppo': Arm(VINEPPO, 'grpo_120_rows'),
    },
  ),
}
ARMS = {
  f'{part}.{name}': arm
  for part, of in PARTS.items()
  for name, arm in of.arms.items()
}


# ---- runs -------------------------------------------------------------------


def curve(name: str, seed: int, updates: int | None = None) -> tabular.Curve:
  """Trains one arm; tasks are the seed's too, the same for all arms."""
  part, arm = PARTS[name.split('.')[0]], ARMS[name]
  settings = dataclasses.replace(
    part.settings,
    group_size=arm.group_size,
    updates=part.settings.updates if updates is None else updates,
  )
  return tabular.train(part.make(seed=seed), arm.algorithm, settings, seed=seed)


def run(workdir: pathlib.Path, name: str, seed: int) -> bool:
  """Runs one arm with one seed, if it is not finished."""
  path = workdir / 'summary.json'
  if path.exists():
    return True
  began = time.monotonic()
  found = curve(name, seed)
  at = PARTS[name.split('.')[0]].measured_at
  workdir.mkdir(parents=True, exist_ok=True)
  storage.write_json(
    path,
    {
      'scores': found.scores.tolist(),
      'score': float(found.scores[at]),
      'reached': found.reached(BOUND),
      'turns_per_update': float(found.turns[-1] / (len(found.turns) - 1)),
      'seconds': time.monotonic() - began,
    },
  )
  return True


# ---- the table --------------------------------------------------------------


def interval(numbers: Sequence[float]) -> tuple[float, float, float]:
  """Mean and 95 % interval by Student's t; 2 to 10 numbers."""
  mean, n = float(np.mean(numbers)), len(numbers)
  if n not in T_95:
    return mean, float('nan'), float('nan')
  half = T_95[n] * float(np.std(numbers, ddof=1)) / np.sqrt(n)
  return mean, mean - half, mean + half


def table(root: pathlib.Path, seeds: Sequence[int], arms: Sequence[str]) -> str:
  """Markdown: each arm's scores, and its lead over broadcast, seed by seed."""
  lines = [CLAIM]
  for name, part in PARTS.items():
    if not any(f'{name}.{arm}' in arms for arm in part.arms):
      continue
    lines += [
      '',
      f'| {name} | success after {part.measured_at} | minus grpo | minus its '
      f'fair broadcast | updates to {BOUND} | turns an update |',
      '|---|---|---|---|---|---|',
    ]
    found = {
      arm: [
        storage.read_json(path)
        for seed in seeds
        if (path := root / f'{name}.{arm}/seed_{seed}/summary.json').exists()
      ]
      for arm in part.arms
    }
    lines += [
      _row(arm, part, found) if rows else f'| {arm} | not run | | | | |'
      for arm, rows in found.items()
      if f'{name}.{arm}' in arms
    ]
  return '\n'.join(lines)


def _row(arm: str, part: Part, found) -> str:
  rows, fair = found[arm], part.arms[arm].fair
  cells = [arm, _cell([r['score'] for r in rows])]
  cells.append('' if arm == 'grpo' else _lead(rows, found['grpo']))
  if fair in ('grpo', arm):
    cells.append('' if fair == arm else 'the same')
  else:
    cells.append(f'{_lead(rows, found[fair])} ({fair})')
  cells.append(_updates([r['reached'] for r in rows]))
  cells.append(f'{np.mean([r["turns_per_update"] for r in rows]):,.0f}')
  return f'| {" | ".join(cells)} |'


def _lead(rows, others) -> str:
  if len(rows) != len(others):
    return 'not run'
  return _cell(
    [r['score'] - o['score'] for r, o in zip(rows, others, strict=True)], '+.3f'
  )


def _cell(numbers: Sequence[float], form: str = '.3f') -> str:
  mean, low, high = interval(numbers)
  if (n := len(numbers)) not in T_95:
    return f'{mean:{form}} ({"one seed" if n == 1 else f"{n} seeds"})'
  return f'{mean:{form}} [{low:{form}}, {high:{form}}]'


def _updates(reached: Sequence[int | None]) -> str:
  there = [n for n in reached if n is not None]
  if len(there) == len(reached):
    return _cell(there, '.0f')
  return f'{len(reached) - len(there)} of {len(reached)} never'
