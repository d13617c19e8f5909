"""The steps of a run, and the state that lives between them.

Floor 3, under `train`, which calls these steps in order. What a step changes
is in the checkpoint (learner, curriculum, totals, evaluations) or on disk
under the step's own name, so that a run that was killed goes on exactly.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from agentjax import (
  audit,
  compiles,
  credit,
  guards,
  ledger,
  progress,
  storage,
  tally,
)
from agentjax.anchor import Anchor
from agentjax.checkpoint import Checkpoints
from agentjax.curriculum import Curriculum
from agentjax.env.sandbox import pools
from agentjax.evaluate import evaluate, fingerprint, rows
from agentjax.learner import Learner, State
from agentjax.model import transformer
from agentjax.recorder import Recorder
from agentjax.rl.batch import Batch
from agentjax.rollout import branches
from agentjax.rollout.collect import CollectStats
from agentjax.rollout.engine import Engine
from agentjax.sft import batches
from agentjax.training import Training
from agentjax.types import Group


class Run:
  """The state of a run, and its steps; `made` is of `training.parts`."""

  def __init__(
    self,
    workdir: epath.PathLike,
    training: Training,
    made: tuple[Engine, Learner, Learner],
    config: Mapping[str, Any] | None = None,
  ):
    self.workdir, self._config = epath.Path(workdir), config
    self.o = o = training
    self.began = time.monotonic()
    model = o.policy.config
    self.cold_steps = o.cold_start.steps if o.cold_start else 0
    self.engine, self.learner, self.teacher = made
    self.curriculum = Curriculum(o.tasks, o.seed)
    facts = {
      'cold_start.steps': self.cold_steps,
      'use_reference': o.use_reference,
    }
    if self.learner.lora is not None:
      facts['learner.lora'] = dataclasses.asdict(self.learner.lora)
    self.checkpoints = Checkpoints(self.workdir, model, facts)
    self.recorder = Recorder(self.workdir, decode=o.chat.vocab.decode)
    self.last_step = self.cold_steps + o.steps
    self.progress = progress.Progress(self.last_step)
    self.step = 0
    self.state: State | None = None
    self.anchor = Anchor(o, self.learner)
    self.totals = dict(tally.NOTHING)
    self.evaluations: dict[str, Any] = {}
    self.last: tuple[list[Group], dict[str, np.ndarray]] = ([], {})
    self.summary: dict[str, Any] | None = None  # of a run that is finished
    self._drawn = branches.Branched([])
    self._cold_batches = None
    self._skipped_in_a_row = 0
    self._masking = guards.Masking(o.max_mask_rate)
    self._compiled = 0
    self._step_began = 0.0

  # ---- start and resume ---------------------------------------------------

  def start(self) -> None:
    """Fresh weights, or the newest checkpoint's; then every program.

    Of a run that is finished already it reads the summary alone.
    """
    o, config = self.o, self.o.policy.config
    step = self.checkpoints.latest
    if step is None:
      self._find(None)
    if o.policy.load is not None:
      params = o.policy.load(config=config)
    else:
      params = jax.jit(functools.partial(transformer.init, config=config))(
        jax.random.key(o.seed)
      )
    self.state = self._learner_of(0).begin(params, o.seed)
    self.learner.frozen = self.teacher.frozen = self._learner_of(0).frozen
    if step is not None:
      self._restore(step)
      self._find(step)
    else:
      pieces = [
        o.chat.vocab.decode([i], keep_special=True)
        for i in range(o.chat.vocab.size)
      ]
      self.recorder.vocabulary(pieces)
    if self.summary is None:
      self._warm_up()
    self.progress.begin()

  def measure_null(self) -> None:
    """Prints what silence earns; once a run, of which it changes nothing."""
    o = self.o
    if 'null_reward' not in self.totals:
      of = (o.tasks, o.make_environment, o.chat, o.limits)
      self.totals |= audit.null_totals(*of, o.tool_threads, o.tool_seconds)

  def _find(self, step: int | None) -> None:
    """Takes up what stands in the workdir, up to `step` where it goes on."""
    # Before the evaluation of step 0 or of the cold start all is saved.
    first_save = min(self.cold_steps, self.o.checkpoint_every)
    if self.o.evaluation.untrained:
      first_save = 0
    ledger.begin(self.workdir, self.recorder, step, first_save, self._config)
    if step is None or step < self.last_step:
      return
    if step > self.last_step:
      print(
        f'step {step} is beyond the {self.last_step} steps that the config '
        'asks for: nothing is left to train'
      )
    self.summary = ledger.finished(self.workdir, step)

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
    self.anchor.restore(saved.get('reference'), meta.get('kl_coef'))
    self.curriculum.restore(meta['curriculum'])
    self.totals |= meta['totals']
    self.evaluations = meta['evaluations']
    tasks = meta.get('evaluation_tasks', self._evaluation_tasks())
    if self.evaluations and tasks != self._evaluation_tasks():
      raise storage.WorkdirMismatch(
        f'checkpoint {self.checkpoints.path}/{step} has an evaluation of other '
        'tasks, and those of before and after must be of the same: use those '
        'evaluation.tasks, or start in another workdir'
      )
    self.step = step

  def _evaluation_tasks(self) -> str:
    return fingerprint(self.o.evaluation.tasks)

  def _warm_up(self) -> None:
    """Compiles every program before the first step that needs it."""
    if self.step < self.cold_steps:
      self.state = self.teacher.compile(self.state)
    self._load_engine()
    n, seconds = self.engine.compile()
    print(f'engine: {n} programs compiled in {seconds:.1f} s')
    if 'before' in self.evaluations:
      self._compile_learner()
    self._compiled = compiles.count()

  def _load_engine(self) -> None:
    """The weights of this step; what is frozen goes to the engine once."""
    new = self.engine.version < 0
    given = self.learner.whole if new else self.learner.trained
    self.engine.load(given(self.state.params), self.step)

  def _compile_learner(self) -> None:
    """Every program of reinforcement, before its first step."""
    o = self.o
    self.state = self.learner.compile(
      self.state,
      self.anchor.in_loss,
      scores=bool(o.recompute_old or o.reward_kl_coef or o.gold_answer),
    )
    self.anchor.compile(self.state.params)

  def _tally_compilations(self) -> None:
    """Adds what was compiled since the last warm-up to the totals."""
    now = compiles.count()
    self.totals['compilations_after_warmup'] += now - self._compiled
    self._compiled = now

  def _begin_reinforcement(self) -> None:
    """Keeps the policy of the cold start as a reference, and compiles."""
    self._tally_compilations()
    self.state = self.learner.init(self.state.params)
    self.anchor.take(self.state.params)
    self._compile_learner()
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
    metrics = self._learn(self.teacher, next(self._cold_batches))
    self.step = step
    metrics = {
      'phase': 'cold_start',
      'loss': metrics['loss'],
      'entropy': metrics['entropy'],
      'grad_norm': metrics['grad_norm'],
      'loss_tokens': metrics['loss_tokens'],
      'skipped_updates': metrics['skipped_updates'],
      'seconds': time.monotonic() - began,
    }
    if step % o.record_every == 0 or step == self.cold_steps:
      self.recorder.metrics(step, metrics)
    self.progress.update(
      step,
      tokens=int(metrics['loss_tokens']),
      skipped=self.totals['skipped_updates'],
    )
    self._stop_if_diverged()
    if step == self.cold_steps:
      self._cold_batches = None
    elif step % o.checkpoint_every == 0:
      self._save()

  def _learn(self, learner: Learner, batch: Batch) -> dict[str, float]:
    """One update, counted if nothing came of it; returns its metrics."""
    before = int(self.state.skipped)
    held = ()
    if learner is not self.teacher:
      held = self.anchor.in_loss, self.anchor.loss_coef
    self.state, metrics = learner.update(self.state, batch, *held)
    skipped = int(metrics['skipped_updates']) - before
    self.totals['skipped_updates'] += skipped
    self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
    return metrics

  def _stop_if_diverged(self) -> None:
    guards.stop_if_diverged(
      self._skipped_in_a_row, self.step, self.checkpoints.latest
    )

  # ---- reinforcement ------------------------------------------------------

  def _collect_options(self) -> dict[str, Any]:
    o = self.o
    return {
      'engine': self.engine,
      'chat': o.chat,
      'make_environment': o.make_environment,
      'limits': o.limits,
      'seed': o.seed,
      'in_flight': o.in_flight,
      'tool_threads': o.tool_threads,
      'tool_seconds': o.tool_seconds,
    }

  def collect(self) -> tuple[list[Group], CollectStats]:
    """A draw of tasks, and the groups of trajectories made of them."""
    o, stats = self.o, CollectStats()
    self._step_began = time.monotonic()
    draw = self.curriculum.draws
    tasks = self.curriculum.draw(o.groups)
    self._drawn = drawn = branches.collected(
      tasks,
      o.branch,
      group_size=o.group_size,
      sampling=o.sampling,
      draw=draw,
      stats=stats,
      **self._collect_options(),
    )
    guards.stop_if_failing([*drawn.groups, *drawn.tried], o.max_failure_rate)
    self.curriculum.observe(drawn.groups)
    return drawn.groups, stats

  def update(self, groups: Sequence[Group]) -> dict[str, float]:
    """Credits, packs and learns; returns the metrics of the update."""
    o = self.o
    policies = credit.Policies(
      self.learner, self.state, self.anchor.params, self.step,
      self.anchor.kl_coef,
    )  # fmt: skip
    given = credit.credit(o, policies, groups, self._drawn.found)
    self.last = (list(groups), credit.by_id(groups, given))
    made = [
      self._learn(self.learner, batch)
      for batch in credit.batches(o, self.learner, groups, given)
    ]
    metrics = credit.metrics(made, given)
    self.anchor.after_update(metrics, len(credit.members(groups)))
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
    self.anchor.after_step(self.state.params, step)
    self._load_engine()
    metrics = {
      'phase': 'reinforcement',
      **tally.outcome(credit.members(groups)),
      **trained,
      **stats.metrics(self.engine.stats),
      **pools.metrics(),
      'seconds': time.monotonic() - self._step_began,
    }
    self._count([*groups, *self._drawn.tried], stats)
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
      kl=metrics['kl' if self.anchor.params is not None else 'behaviour_kl'],
      tokens=metrics['tokens_sampled'],
      skipped=self.totals['skipped_updates'],
    )
    self._stop_if_diverged()
    alarm = self._masking.alarm([*groups, *self._drawn.tried], step)
    if alarm or step % self.o.checkpoint_every == 0:
      self._save()
    if alarm:
      raise alarm

  def _count(self, groups: Sequence[Group], collected: CollectStats) -> None:
    """Adds to the totals what a draw cost."""
    stats = self.engine.stats
    tally.add_cost(self.totals, groups, stats, collected.tokens_reprefill)
    self.engine.stats = type(stats)()

  # ---- evaluation, saving, the end ----------------------------------------

  def evaluate(self, name: str) -> None:
    """Evaluates, unless a checkpoint has the evaluation of this step."""
    o = self.o
    due = self.cold_steps if name == 'before' else self.step
    if self.evaluations.get(name, {}).get('step') == due:
      return
    self._load_engine()
    self.progress.note(f'evaluating on {len(o.evaluation.tasks)} tasks')
    stats = CollectStats()
    result, groups = evaluate(
      o.evaluation.tasks,
      samples=o.evaluation.samples,
      sampling=o.evaluation.sampling,
      stats=stats,
      **self._collect_options(),
    )
    guards.stop_if_failing(groups, o.max_failure_rate)
    self._count(groups, stats)
    self.evaluations[name] = {'step': self.step, **result.to_json()}
    self.recorder.evaluation(self.step, rows(self.evaluations, self.step))
    self.progress.note(f'{name}: {result}')
    if name == 'before':
      self._begin_reinforcement()
    self.progress.begin()
    # What comes next at step 0 of a run without a cold start saves it too.
    next_saves = name == 'untrained' and self.cold_steps == 0
    if self.checkpoints.latest != self.step and not next_saves:
      self._save()

  def _save(self) -> None:
    arrays = {'learner': self.state}
    if self.anchor.params is not None:
      arrays['reference'] = self.anchor.params
    now = time.monotonic()
    self.totals['seconds'] += now - self.began
    self.began = now
    self._tally_compilations()
    meta = {
      'curriculum': self.curriculum.state(),
      'totals': self.totals,
      'evaluations': self.evaluations,
      'evaluation_tasks': self._evaluation_tasks(),
      'kl_coef': self.anchor.kl_coef,
    }
    self.checkpoints.save(self.step, arrays, meta)

  def summarize(self) -> dict[str, Any]:
    """Writes summary.json, the learning curve and the pages."""
    summary = self.summary
    if summary is None:
      self._tally_compilations()
      totals = dict(self.totals)
      totals['seconds'] += time.monotonic() - self.began
      summary = {
        **self.evaluations,
        'steps': self.step,
        'cold_start_steps': self.cold_steps,
        **totals,
        'cache_bytes': self.engine.cache_bytes,
      }
    o = self.o
    ledger.end(self.workdir, summary, pages=o.pages, method=o.advantages)
    self.progress.done()
    print(f'figure success_before {summary["before"]["pass@1"]:.4f}')
    print(f'figure success_after {summary["after"]["pass@1"]:.4f}')
    return summary

  def stopped(self) -> str:
    """What there is to say when a person stops the run."""
    # Threads of a save that is cut off would each print a traceback.
    threading.excepthook = lambda _: None
    kept = self.checkpoints.latest
    at = 'the start' if kept is None else f'the checkpoint of step {kept}'
    return f'stopped at step {self.step}; the same command goes on from {at}'

  def close(self) -> None:
    pools.close()
    self.progress.__exit__()
    self.checkpoints.close()
