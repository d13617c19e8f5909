"""The steps of a run, and the state that lives between them.

Floor 3, under `train`, which calls these steps in order. What a step changes
is in the checkpoint (learner, curriculum, totals, evaluations) or on disk
under the step's own name, so that a run that was killed goes on exactly.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from agentjax import compiles, plots, progress, storage, tally, viewer
from agentjax.checkpoint import Checkpoints
from agentjax.curriculum import Curriculum
from agentjax.evaluate import evaluate, failure_rate, rows
from agentjax.learner import Learner, State
from agentjax.model import transformer
from agentjax.recorder import (
  Recorder,
  read_evaluations,
  read_metrics,
  trajectory_steps,
)
from agentjax.rl import losses
from agentjax.rl.batch import pack
from agentjax.rollout.collect import CollectStats, collect
from agentjax.sft import batches
from agentjax.training import (
  ConfigError,
  TooManyFailures,
  Training,
  check_fit,
)
from agentjax.types import Group


class Run:
  """The state of a run, and its steps."""

  def __init__(self, workdir: epath.PathLike, training: Training):
    self.workdir = epath.Path(workdir)
    self.o = o = training
    self.began = time.monotonic()
    config = o.policy.config
    self.cold_steps = o.cold_start.steps if o.cold_start else 0
    stops = o.chat.stop_automaton(config.padded_vocab)
    try:
      self.engine = o.engine(config, stops)
      self.learner = o.learner(config, optimizer=o.optimizer)
      self.teacher = o.learner(
        config,
        optimizer=o.cold_start_optimizer or o.optimizer,
        loss=losses.cross_entropy,
        kl_coef=0.0,
        entropy_coef=0.0,
      )
    except ValueError as error:
      raise ConfigError(f'engine or learner: {error}') from error
    check_fit(o, self.engine, self.learner)
    self.curriculum = Curriculum(o.tasks, o.seed)
    facts = {
      'cold_start.steps': self.cold_steps,
      'use_reference': o.use_reference,
    }
    self.checkpoints = Checkpoints(self.workdir, config, facts)
    self.recorder = Recorder(self.workdir, decode=o.chat.vocab.decode)
    self.progress = progress.Progress(self.cold_steps + o.steps)
    self.step = 0
    self.state: State | None = None
    self.reference: Any = None
    self.totals = {
      'seconds': 0.0,
      'tokens_sampled': 0,
      'tokens_prefilled': 0,
      'tokens_expected': 0,
      'max_logprob_gap': 0.0,
      'compilations_after_warmup': 0,
    }
    self.evaluations: dict[str, Any] = {}
    self.last: tuple[list[Group], dict[str, np.ndarray]] = ([], {})
    self._cold_batches = None
    self._compiled = 0
    self._step_began = 0.0

  # ---- start and resume ---------------------------------------------------

  def start(self) -> None:
    """Fresh weights, or the newest checkpoint's; then every program."""
    o, config = self.o, self.o.policy.config
    if o.policy.load is not None:
      params = o.policy.load(config=config)
    else:
      params = jax.jit(functools.partial(transformer.init, config=config))(
        jax.random.key(o.seed)
      )
    self.state = self._learner_of(0).init(params)
    if (step := self.checkpoints.latest) is not None:
      self._restore(step)
    forgotten = self.recorder.forget_after(self.step)
    if step is not None:
      again = f', {len(forgotten)} later records removed' if forgotten else ''
      print(f'going on after step {self.step} of {self.workdir}{again}')
    else:
      pieces = [
        o.chat.vocab.decode([i], keep_special=True)
        for i in range(o.chat.vocab.size)
      ]
      self.recorder.vocabulary(pieces)
    self._warm_up()

  def _learner_of(self, step: int) -> Learner:
    """Who makes the step after `step`."""
    return self.teacher if step < self.cold_steps else self.learner

  def _restore(self, step: int) -> None:
    """Loads everything that the checkpoint of `step` holds."""
    like = {'learner': self.state}
    if step >= self.cold_steps:
      like['learner'] = self.learner.init(self.state.params)
      if self.o.use_reference:
        like['reference'] = self.state.params
    saved, meta = self.checkpoints.restore(like, step)
    self.state = saved['learner']
    self.reference = saved.get('reference')
    self.curriculum.restore(meta['curriculum'])
    self.totals = meta['totals']
    self.evaluations = meta['evaluations']
    self.step = step

  def _warm_up(self) -> None:
    """Compiles every program before the first step that needs it."""
    if self.step < self.cold_steps:
      self.state = self.teacher.compile(self.state)
    self.engine.load(self.state.params, self.step)
    n, seconds = self.engine.compile()
    print(f'engine: {n} programs compiled in {seconds:.1f} s')
    if 'before' in self.evaluations:
      self.state = self.learner.compile(self.state, self.reference)
    self._compiled = compiles.count()

  def _tally_compilations(self) -> None:
    """Adds what was compiled since the last warm-up to the totals."""
    now = compiles.count()
    self.totals['compilations_after_warmup'] += now - self._compiled
    self._compiled = now

  def _begin_reinforcement(self) -> None:
    """Keeps the policy of the cold start as a reference, and compiles."""
    self._tally_compilations()
    self.state = self.learner.init(self.state.params)
    if self.o.use_reference:
      self.reference = jax.tree.map(lambda x: x.copy(), self.state.params)
    self.state = self.learner.compile(self.state, self.reference)
    self._compiled = compiles.count()

  # ---- cold start ---------------------------------------------------------

  def cold_start_step(self, step: int) -> None:
    """One supervised step; the last one hands over to reinforcement."""
    o, began = self.o, time.monotonic()
    if self._cold_batches is None:
      self._cold_batches = batches(
        o.cold_start,
        o.chat,
        seed=o.seed,
        rows=self.teacher.rows,
        length=self.teacher.length,
        start=self.step,
      )
    self.state, metrics = self.teacher.update(
      self.state, next(self._cold_batches)
    )
    self.step = step
    metrics = {
      'phase': 'cold_start',
      'loss': metrics['loss'],
      'entropy': metrics['entropy'],
      'grad_norm': metrics['grad_norm'],
      'loss_tokens': metrics['loss_tokens'],
      'seconds': time.monotonic() - began,
    }
    if step % o.record_every == 0 or step == self.cold_steps:
      self.recorder.metrics(step, metrics)
    self.progress.update(step, tokens=int(metrics['loss_tokens']))
    if step == self.cold_steps:
      self._cold_batches = None
    elif step % o.checkpoint_every == 0:
      self._save()

  # ---- reinforcement ------------------------------------------------------

  def _collect_options(self) -> dict[str, Any]:
    o = self.o
    return {
      'engine': self.engine,
      'chat': o.chat,
      'make_environment': o.make_environment,
      'limits': o.limits,
      'seed': o.seed,
      'tool_threads': o.tool_threads,
    }

  def collect(self) -> tuple[list[Group], CollectStats]:
    """A draw of tasks, and the groups of trajectories made of them."""
    o, stats = self.o, CollectStats()
    self._step_began = time.monotonic()
    draw = self.curriculum.draws
    tasks = self.curriculum.draw(o.groups)
    groups = collect(
      tasks,
      group_size=o.group_size,
      sampling=o.sampling,
      draw=draw,
      stats=stats,
      **self._collect_options(),
    )
    self._stop_if_failing(groups)
    self.curriculum.observe(groups)
    return groups, stats

  def _stop_if_failing(self, groups: Sequence[Group]) -> None:
    rate = failure_rate(groups)
    if rate > self.o.max_failure_rate:
      errors = [t.error for g in groups for t in g.trajectories if t.error]
      raise TooManyFailures(
        f'{rate:.0%} of the trajectories failed by infrastructure or '
        f'environment, more than max_failure_rate '
        f'{self.o.max_failure_rate:.0%}; the first one:\n{errors[0]}'
      )

  def update(self, groups: Sequence[Group]) -> dict[str, float]:
    """Credits, packs and learns; returns the metrics of the update."""
    o = self.o
    trajectories = [t for g in groups for t in g.trajectories]
    credit = o.advantages(
      np.array([t.reward.value if t.reward else 0.0 for t in trajectories]),
      np.array([g.draw * o.groups + i for i, g in enumerate(groups)
                for _ in g.trajectories]),
      np.array([t.status.train_on_tokens for t in trajectories]),
    )  # fmt: skip
    by_id = {
      t.id: np.where(t.loss_mask(), a, 0).astype(np.float32)
      for t, a in zip(trajectories, credit, strict=True)
    }
    self.last = (list(groups), by_id)
    made: list[dict[str, float]] = []
    for part in np.array_split(np.arange(len(trajectories)), o.minibatches):
      batch = pack(
        [trajectories[i] for i in part],
        [credit[i] for i in part],
        rows=self.learner.rows,
        length=self.learner.length,
        temperature=o.sampling.temperature,
        mask_observations=o.mask_observations,
      )
      self.state, new = self.learner.update(self.state, batch, self.reference)
      made.append(new)
    metrics = {k: float(np.mean([m[k] for m in made])) for k in made[0]}
    metrics['loss_tokens'] = sum(m['loss_tokens'] for m in made)
    metrics['max_ratio'] = max(m['max_ratio'] for m in made)
    metrics['skipped_updates'] = made[-1]['skipped_updates']
    # The gap between sampler and learner is one only before weights move.
    metrics['max_logprob_gap'] = made[0]['max_logprob_gap']
    metrics['groups_without_signal'] = float(
      np.mean([not np.any(credit[i * o.group_size : (i + 1) * o.group_size])
               for i in range(len(groups))])
    )  # fmt: skip
    return metrics

  def finish_step(
    self,
    step: int,
    groups: Sequence[Group],
    trained: dict[str, float],
    stats: CollectStats,
  ) -> None:
    """Hands the weights over, records the step, saves where it is time to."""
    self.step = step
    self.engine.load(self.state.params, step)
    trajectories = [t for g in groups for t in g.trajectories]
    sampled = sum(t.model_tokens for t in trajectories)
    metrics = {
      'phase': 'reinforcement',
      **tally.outcome(trajectories),
      **trained,
      'tokens_sampled': sampled,
      'infra_retries': stats.retries,
      'seconds_collect': stats.seconds,
      'seconds_waiting_for_tools': stats.waiting_seconds,
      'tokens_per_second': sampled / max(stats.seconds, 1e-9),
      'seconds': time.monotonic() - self._step_began,
    }
    self._count(groups)
    # Not max(): it would hide a gap that is NaN.
    gaps = (self.totals['max_logprob_gap'], trained['max_logprob_gap'])
    self.totals['max_logprob_gap'] = float(np.maximum(*gaps))
    self.recorder.metrics(step, metrics)
    if step % self.o.record_every == 0:
      self.recorder.trajectories(step, *self.last)
    self.progress.update(
      step,
      reward=metrics['reward'],
      success=metrics['success'],
      kl=metrics['kl' if self.reference is not None else 'behaviour_kl'],
      tokens=sampled,
    )
    if step % self.o.checkpoint_every == 0:
      self._save()

  def _count(self, groups: Sequence[Group]) -> None:
    """Adds to the totals what a draw cost, and what it should have cost."""
    self.totals['tokens_expected'] += tally.expected_prefill(groups)
    stats = self.engine.stats
    self.totals['tokens_sampled'] += stats.tokens_sampled
    self.totals['tokens_prefilled'] += stats.tokens_prefilled
    self.engine.stats = type(stats)()

  # ---- evaluation, saving, the end ----------------------------------------

  def evaluate(self, name: str) -> None:
    """Evaluates, unless a checkpoint has the evaluation of this step."""
    o = self.o
    due = self.cold_steps if name == 'before' else self.step
    if self.evaluations.get(name, {}).get('step') == due:
      return
    self.engine.load(self.state.params, self.step)
    self.progress.note(f'evaluating on {len(o.evaluation.tasks)} tasks')
    result, groups = evaluate(
      o.evaluation.tasks,
      samples=o.evaluation.samples,
      sampling=o.evaluation.sampling,
      **self._collect_options(),
    )
    self._stop_if_failing(groups)
    self._count(groups)
    self.evaluations[name] = {'step': self.step, **result.to_json()}
    self.recorder.evaluation(self.step, rows(self.evaluations, self.step))
    self.progress.note(f'{name}: {result}')
    if name == 'before':
      self._begin_reinforcement()
    # What comes next at step 0 of a run without a cold start saves it too.
    next_saves = name == 'untrained' and self.cold_steps == 0
    if self.checkpoints.latest != self.step and not next_saves:
      self._save()

  def _save(self) -> None:
    arrays = {'learner': self.state}
    if self.reference is not None:
      arrays['reference'] = self.reference
    now = time.monotonic()
    self.totals['seconds'] += now - self.began
    self.began = now
    self._tally_compilations()
    meta = {
      'curriculum': self.curriculum.state(),
      'totals': self.totals,
      'evaluations': self.evaluations,
    }
    self.checkpoints.save(self.step, arrays, meta)

  def summarize(self) -> dict[str, Any]:
    """Writes summary.json, the learning curve and the pages."""
    self._tally_compilations()
    totals = dict(self.totals)
    totals['seconds'] += time.monotonic() - self.began
    summary = {
      **self.evaluations,
      'steps': self.step,
      'cold_start_steps': self.cold_steps,
      **totals,
    }
    storage.write_json(self.workdir / 'summary.json', summary)
    if self.o.pages and (recorded := trajectory_steps(self.workdir)):
      viewer.write_pages(self.workdir, recorded[-1])
    plots.learning_curve(
      read_metrics(self.workdir),
      read_evaluations(self.workdir),
      self.workdir / 'learning_curve.png',
    )
    print(f'figure success_before {self.evaluations["before"]["pass@1"]:.4f}')
    print(f'figure success_after {self.evaluations["after"]["pass@1"]:.4f}')
    return summary

  def close(self) -> None:
    self.progress.__exit__()
    self.checkpoints.close()
