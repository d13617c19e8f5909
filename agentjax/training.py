"""What a run is made of: everything that a config names, and nothing else.

Floor 3. Values only; `train` tells what is done with them. Bad values are
refused here, before anything slow is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optax

from agentjax import probe
from agentjax.env.base import EnvironmentFactory
from agentjax.learner import Learner
from agentjax.model.config import ModelConfig
from agentjax.records import task_to_json
from agentjax.rl import advantages as estimators
from agentjax.rl import losses, returns, trees
from agentjax.rl.aggregation import (
  Aggregation,
  Weighting,
  over_original,
  token_mean,
)
from agentjax.rl.draw import Draw, Estimator, MissingData, MissingParts
from agentjax.rollout.branches import Branched
from agentjax.rollout.engine import Engine
from agentjax.rollout.episode import Limits
from agentjax.rollout.sampling import Sampling
from agentjax.sft import ColdStart
from agentjax.text.chat import Chat
from agentjax.types import Task


class ConfigError(ValueError):
  """The config is wrong; the message names the key and the remedy."""


class Diverged(RuntimeError):
  """Update after update is not finite, so that nothing is learned any more."""


class TooManyFailures(RuntimeError):
  """Environments or infrastructure fail so often that training is no use."""


@dataclasses.dataclass(frozen=True)
class Policy:
  """Where the weights come from: `load(config=...)`, or they are random."""

  config: ModelConfig
  load: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class Evaluating:
  """Held-out evaluation: `samples` trajectories of each task.

  `untrained` evaluates the weights that the run begins with, too.
  """

  tasks: Sequence[Task]
  samples: int = 1
  untrained: bool = False
  sampling: Sampling = Sampling()

  def __post_init__(self):
    _check_ids('evaluation.tasks', self.tasks)
    if self.samples < 1:
      raise ConfigError(
        f'evaluation.samples is {self.samples}: give at least 1'
      )


@dataclasses.dataclass(frozen=True)
class Training:
  """Everything that a run is made of.

  Attributes:
    engine, learner: called as `engine(config, stops)` and `learner(config,
      optimizer=...)`; all their other options are bound.
    cold_start: supervised steps before reinforcement, with an optimizer of
      their own.
    sampling: where it truncates, top_k is among it, and engine and learner have
      the same `kept`, which is at least that.
    advantages: an estimator of the seam that `rl.draw` tells.
    value_targets: another one, for the critic, where the learner has one.
    shape: what is done to a draw's rewards before; of `rl.shaping`.
    select: (rewards_N, groups_N, valid_N), before any shaping, -> bool[N]:
      which trajectories are in the loss at all; None is all.
    aggregation: how tokens are weighed; of `rl.aggregation`, as is `rejected`:
      what becomes of tokens that the learner's `reject` and `stale` take.
    prefix_weight: what a token weighs that several leaves of a tree share;
      `rl.trees.per_leaf` or `shared_once`.
    branch: (groups, go_on) -> Branched, of `rollout.branches`: what is tried
      again from states that the trajectories of a draw have been in.
    gold_answer: the right answer of a task, for credit by information gain;
      such as `gold.verified`.
    recompute_old: the ratio is against log-probs that the learner computes
      before the first update of a draw; else against the sampler's.
    steps: of reinforcement, after `cold_start.steps`. groups, group_size: of
      one draw. minibatches: optimizer steps a draw is split into.
    mask_observations: False is the ablation that trains on observations.
    use_reference: measure (and with kl_coef, hold) the KL to the policy after
      the cold start.
    move_reference: what becomes of that policy after a step; of `references`.
    reward_kl_coef: weight of the KL to it, k1, in the reward of each token.
    kl_control: (coefficient, kl, n=trajectories) -> the next coefficient,
      such as `rl.kl.adapted`, of whichever of the two is not 0.
    in_flight: episodes under way at once; None is one a slot.
    tool_threads: environments that run at once. tool_seconds: that a call of
      one may take before it is given up as an infrastructure failure.
    pages: write the last recorded step's trajectories as HTML.
    max_failure_rate: of a draw's trajectories, infrastructure failures and
      environment errors together; above it the run stops. max_mask_rate: of
      those that infrastructure failed, over `guards.MASKED_STEPS` steps.
  """

  policy: Policy
  chat: Chat
  make_environment: EnvironmentFactory
  tasks: Sequence[Task]
  evaluation: Evaluating
  engine: Callable[..., Engine]
  learner: Callable[..., Learner]
  limits: Limits
  optimizer: optax.GradientTransformation
  cold_start: ColdStart | None = None
  cold_start_optimizer: optax.GradientTransformation | None = None
  sampling: Sampling = Sampling()
  advantages: Estimator = estimators.grpo
  value_targets: Estimator = returns.value_targets
  branch: Callable[..., Branched] | None = None
  gold_answer: Callable[[Task], str] | None = None
  shape: Callable[[Draw], Draw] | None = None
  select: Callable[..., np.ndarray] | None = None
  aggregation: Aggregation = token_mean
  rejected: Callable[..., Weighting] = over_original
  prefix_weight: Estimator = trees.per_leaf
  recompute_old: bool = False
  steps: int = 10
  groups: int = 8
  group_size: int = 8
  minibatches: int = 1
  mask_observations: bool = True
  use_reference: bool = False
  move_reference: Callable[..., Any] | None = None
  reward_kl_coef: float = 0.0
  kl_control: Callable[..., float] | None = None
  seed: int = 0
  in_flight: int | None = None
  tool_threads: int = 8
  tool_seconds: float = 3600.0
  checkpoint_every: int = 5
  record_every: int = 1
  pages: bool = True
  max_failure_rate: float = 0.2
  max_mask_rate: float = 0.05

  def __post_init__(self):
    for name in ('groups', 'group_size', 'minibatches', 'checkpoint_every',
                 'record_every', 'tool_threads'):  # fmt: skip
      if getattr(self, name) < 1:
        raise ConfigError(f'{name} is {getattr(self, name)}: give at least 1')
    if self.in_flight is not None and self.in_flight < 1:
      raise ConfigError(f'in_flight is {self.in_flight}: give 1 or more')
    if not self.tool_seconds > 0:
      raise ConfigError(
        f'tool_seconds is {self.tool_seconds}: give a number above 0'
      )
    if self.steps < 0:
      raise ConfigError(f'steps is {self.steps}: give 0 or more')
    # JAX would take the lower 32 bits of a larger one, and NumPy none below 0.
    if not 0 <= self.seed < 2**32:
      raise ConfigError(f'seed is {self.seed}: give 0 to {2**32 - 1}')
    for name in ('max_failure_rate', 'max_mask_rate'):
      if not 0 <= getattr(self, name) <= 1:
        raise ConfigError(f'{name} is {getattr(self, name)}: give 0 to 1')
    self._check_data()
    self._check_learning()

  def _check_data(self) -> None:
    _check_ids('tasks', self.tasks)
    if self.groups > len(self.tasks):
      raise ConfigError(
        f'a draw of {self.groups} groups from {len(self.tasks)} tasks: lower '
        'groups, or add tasks'
      )
    ids, config = self.chat.vocab.size, self.policy.config
    if config.vocab_size != ids:
      raise ConfigError(
        f'the model has vocab_size {config.vocab_size} and the vocabulary '
        f'{ids} ids: they must be equal; ids that only pad the table count '
        'in padded_vocab'
      )

  def _check_learning(self) -> None:
    if self.minibatches > self.groups * self.group_size:
      raise ConfigError(
        f'{self.minibatches} minibatches of {self.groups} groups of '
        f'{self.group_size}: lower minibatches'
      )
    if (self.cold_start is None) != (self.cold_start_optimizer is None):
      raise ConfigError(
        'cold_start and cold_start_optimizer go together: give both or none'
      )
    sampling = self.sampling
    if sampling.temperature == 0:
      raise ConfigError(
        'sampling.temperature is 0: greedy choices have no policy gradient'
      )
    if sampling.truncates and not sampling.top_k:
      raise ConfigError(
        f'{sampling} truncates and may keep any number of ids, which the '
        'learner would have to know: give top_k too, and engine.kept and '
        'learner.kept at least as large; or truncate in evaluation.sampling '
        'alone'
      )
    self._check_reference()
    with _named('aggregation'):
      probe.weighing(self.aggregation, self.rejected)
    if self.select is not None:
      with _named('select'):
        probe.selecting(self.select)
    try:
      alone = self.advantages(probe.lone_groups())
    except MissingData:
      return  # `check_fit` knows whether there will be a critic.
    except ValueError as error:
      raise ConfigError(f'advantages: {error}') from error
    if self.group_size == 1 and self.steps and not np.any(alone):
      why = 'all would be 0'
      if self.branch is not None:
        why = 'one of a single turn has no branches, and would be alone'
      raise ConfigError(
        'group_size is 1, and these advantages compare the trajectories of a '
        f'group: {why}; give at least 2'
      )

  def _check_reference(self) -> None:
    if not 0 <= self.reward_kl_coef < np.inf:
      raise ConfigError(
        f'reward_kl_coef is {self.reward_kl_coef}: give a finite number, 0 or '
        'more'
      )
    for name in ('reward_kl_coef', 'move_reference'):
      if getattr(self, name) and not self.use_reference:
        raise ConfigError(
          f'{name} without a reference has no effect: set use_reference'
        )
    if self.move_reference is not None:
      with _named('move_reference'):
        probe.moving(self.move_reference)


@contextlib.contextmanager
def _named(key: str):
  """What a config's function says against its options is said of its key."""
  try:
    yield
  except MissingData:
    raise
  except (TypeError, ValueError) as error:
    raise ConfigError(f'{key}: {error}') from error


def parts(training: Training) -> tuple[Engine, Learner, Learner]:
  """The engine, the learner, and who teaches in the cold start.

  Raises:
    ConfigError: one of them cannot be, or they do not go together.
  """
  model = training.policy.config
  stops = training.chat.stop_automaton(model.padded_vocab)
  try:
    engine = training.engine(model, stops)
    learner = training.learner(model, optimizer=training.optimizer)
    teacher = training.learner(
      model,
      optimizer=training.cold_start_optimizer or training.optimizer,
      loss=losses.cross_entropy,
      kl_coef=0.0,
      entropy_coef=0.0,
      critic=None,
      reject=(),
      stale=None,
      kept=0,  # nobody sampled demonstrations
    )
  except ValueError as error:
    raise ConfigError(f'engine or learner: {error}') from error
  check_fit(training, engine, learner)
  return engine, learner, teacher


def check_fit(training: Training, engine: Engine, learner: Learner) -> None:
  """Refuses parts that would not go together, before the first step.

  Raises:
    ConfigError: says which, and the remedy.
  """
  context = training.limits.context
  for name, has in (
    ('engine.context', engine.context),
    ('learner.length', learner.length),
  ):
    if context > has:
      raise ConfigError(
        f'limits.context {context} exceeds {name} {has}: lower it, or raise '
        f'{name}'
      )
  if learner.kl_coef and not training.use_reference:
    raise ConfigError(
      f'learner.kl_coef {learner.kl_coef} without a reference has no effect: '
      'set use_reference, or kl_coef to 0'
    )
  if learner.kl_coef and training.reward_kl_coef:
    raise ConfigError(
      f'learner.kl_coef {learner.kl_coef} and reward_kl_coef '
      f'{training.reward_kl_coef}: the KL has one place, set one of them to 0'
    )
  with _named('learner.kl_value'):
    probe.holding(learner)
  if training.kl_control and not (learner.kl_coef or training.reward_kl_coef):
    raise ConfigError(
      'kl_control has no coefficient to control: give learner.kl_coef or '
      'reward_kl_coef, to begin with'
    )
  if training.kl_control:
    with _named('kl_control'):
      probe.controlling(
        training.kl_control,
        learner.kl_coef or training.reward_kl_coef,
        training.groups * training.group_size,
      )
  _check_kept(training, engine.kept, learner.kept)
  _check_correction(training, learner)
  _check_credit(training, learner)


def _check_correction(training: Training, learner: Learner) -> None:
  with _named('learner.loss'):
    # Where the KL is in the reward, updates do not see the reference.
    seen = training.use_reference and not training.reward_kl_coef
    probe.losing(learner, seen)
  with _named('learner.reject, stale'):
    probe.rejecting(learner)
  if probe.corrects(learner) and not training.recompute_old:
    raise ConfigError(
      'learner.reject and a decoupled loss compare who sampled with the '
      'proximal policy, which without recompute_old is the same: set '
      'recompute_old'
    )


def _check_credit(training: Training, learner: Learner) -> None:
  critic = learner.critic
  known = {} if critic is None else {'values': 0.0}
  if training.branch is not None:
    # What it finds of no groups has the names of what it finds of any.
    found = training.branch([], lambda prefixes, **_: []).found
    known |= dict.fromkeys(found, 0.0)
  if training.gold_answer is not None:
    known['answer_probs'] = 0.0
  try:
    sees = probe.sees_tokens(training.advantages, known)
    ends = critic and probe.at_ends_alone(training.value_targets, known)
  except MissingParts:
    return  # Only the verifier knows the parts of its rewards.
  except MissingData as error:
    raise ConfigError(
      f'advantages: {error}: give learner.critic for values, branch '
      'for turn_values or baselines_N, gold_answer for answer_probs; what else '
      'is missing no run records'
    ) from error
  if training.reward_kl_coef and not sees:
    raise ConfigError(
      f'reward_kl_coef {training.reward_kl_coef} has no effect on these '
      'advantages, which do not look at rewards of tokens: give those of '
      'whole trajectories scores of seam.total, or put the KL into the loss '
      '(learner.kl_coef)'
    )
  if critic is None:
    return
  if not probe.sees_values(training.advantages, known):
    raise ConfigError(
      'learner.critic predicts values that these advantages do not read: leave '
      'it out, or give advantages that do, such as returns.gae'
    )
  if ends and not critic.turn_ends:
    raise ConfigError(
      'value_targets are of the ends of turns, and 0 elsewhere would be '
      'learned too: set learner.critic.turn_ends'
    )
  updates = training.steps * training.minibatches
  if updates and critic.warmup >= updates:
    raise ConfigError(
      f'learner.critic.warmup is {critic.warmup}, and the run has {updates} '
      'updates, so that the policy would never move: lower it, or raise steps'
    )


def _check_kept(training: Training, engine: int, learner: int) -> None:
  """Refuses truncation that the learner could not follow.

  Its log-probs would be those of another distribution than was sampled from,
  at every token, and each ratio off by the mass that was kept.
  """
  sampling = training.sampling
  if sampling.truncates and (not sampling.fits(engine) or engine != learner):
    raise ConfigError(
      f'{sampling} truncates, and the learner has to know the ids that were '
      f'kept: engine.kept is {engine} and learner.kept {learner}, give both '
      f'the same number, at least top_k {sampling.top_k}; or truncate in '
      'evaluation.sampling alone'
    )
  if engine and not training.evaluation.sampling.fits(engine):
    raise ConfigError(
      f'evaluation.sampling {training.evaluation.sampling} may keep more than '
      f'the {engine} ids of engine.kept: give it top_k 1 to {engine}, or raise '
      'engine.kept'
    )


def _check_ids(name: str, tasks: Sequence[Task]) -> None:
  ids = [t.id for t in tasks]
  if not ids or len(set(ids)) != len(ids):
    twice = sorted(i for i, n in Counter(ids).items() if n > 1)[:3]
    raise ConfigError(
      f'{name} holds {len(ids)} tasks, ids standing twice: {twice}: give at '
      'least one task, each with an id of its own'
    )
  for task in tasks:
    try:
      json.dumps(task_to_json(task))
    except (TypeError, ValueError) as error:
      raise ConfigError(
        f'task {task.id!r} of {name} cannot be recorded ({error}): its verify '
        'and metadata hold text, numbers, lists and mappings alone'
      ) from error
