"""A whole run in this process: what it leaves, costs and refuses."""

import contextlib
import dataclasses
import hashlib
import io
import re
import shutil
import signal
import time

import jax
import numpy as np
import optax
import pytest
import tiny_run

from agentjax import compiles, recorder, storage
from agentjax.env.base import InfraError
from agentjax.run import Run
from agentjax.train import train
from agentjax.training import ConfigError, Diverged, TooManyFailures
from agentjax.types import Observation, Reward, Source, Status, Step
from experiments import launch
from experiments import main as command

SHORT = ('cold_start.steps=6', 'steps=2', 'use_reference=False')


@pytest.fixture(scope='module')
def done(tmp_path_factory):
  """(workdir, summary, stdout) of one run to its end."""
  workdir = tmp_path_factory.mktemp('train') / 'run'
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    config = launch.plain(tiny_run.config(*SHORT))
    summary = train(workdir, launch.training(config), config)
  return workdir, summary, out.getvalue()


def hashes(workdir):
  return {
    str(p): hashlib.sha256(p.read_bytes()).hexdigest()
    for p in workdir.rglob('*')
    if p.is_file() and p.name != '.lock'
  }


def test_the_summary_says_what_came_of_it(done):
  workdir, summary, _ = done
  assert storage.read_json(workdir / 'summary.json') == summary
  for name, step in (('before', 6), ('after', 8)):
    found = summary[name]
    low, high = found['pass@1_interval']
    assert 0 <= low <= found['pass@1'] <= high <= 1
    assert found['n'] == 8 and found['tasks'] == 4 and found['step'] == step
    assert sum(found['statuses'].values()) == 8
  assert summary['steps'] == 8 and summary['cold_start_steps'] == 6
  assert summary['seconds'] > 0
  assert summary['compilations_after_warmup'] == 0
  assert 0 < summary['max_logprob_gap'] <= 1e-4
  # Two evaluations of 8 and two draws of 12, each trajectory with a token.
  assert summary['tokens_sampled'] >= 40
  assert summary['tokens_prefilled'] == summary['tokens_expected'] > 0


def test_the_figures_are_printed_last(done):
  _, summary, out = done
  assert out.splitlines()[-2:] == [
    f'figure success_before {summary["before"]["pass@1"]:.4f}',
    f'figure success_after {summary["after"]["pass@1"]:.4f}',
  ]


def test_what_silence_earns_is_printed_before_step_1_and_kept(done, capsys):
  workdir, summary, out = done
  lines = out.splitlines()
  (at,) = [i for i, line in enumerate(lines) if line.startswith('null policy')]
  assert lines[at].endswith(', of 16 episodes that say nothing')
  assert lines[at - 1].startswith('engine: ')
  # Graded pays by what was said: of nothing it says so.
  assert summary['null_episodes'] == 16
  assert summary['null_reward'] == summary['null_success'] == 0.0
  longer = train(workdir, tiny_run.training(*SHORT, 'steps=2'))
  assert longer == summary
  assert 'null policy' not in capsys.readouterr().out


def test_the_run_can_be_looked_at(done):
  workdir, summary, _ = done
  png = (workdir / 'learning_curve.png').read_bytes()
  assert png[:8] == b'\x89PNG\r\n\x1a\n' and len(png) > 10_000
  pages = list((workdir / 'pages/step_00000008').rglob('*.html'))
  assert len(pages) == 12 + 1  # the last draw, and an index
  assert 'Where to look first' in (workdir / 'pages/report.html').read_text()
  assert recorder.trajectory_steps(workdir) == [7, 8]
  rows = recorder.read_metrics(workdir)
  assert [r['step'] for r in rows] == list(range(1, 9))
  assert [r['phase'] for r in rows[5:7]] == ['cold_start', 'reinforcement']
  evaluations = recorder.read_evaluations(workdir)
  assert [(r['step'], r['when']) for r in evaluations] == [
    (6, 'before'),
    (8, 'after'),
  ]
  assert evaluations[1]['success'] == summary['after']['pass@1']


def test_what_was_trained_on_is_what_was_recorded(done):
  workdir, _, _ = done
  groups, advantages = recorder.read_trajectories(workdir, 8)
  assert [len(g.trajectories) for g in groups] == [4, 4, 4]
  for group in groups:
    ids = [t.id for t in group.trajectories]
    assert len(set(ids)) == 4
    credit = [advantages[i][t.loss_mask()] for i, t in
              zip(ids, group.trajectories, strict=True)]  # fmt: skip
    for t, one in zip(group.trajectories, credit, strict=True):
      assert len(set(one.tolist())) == 1  # one number a trajectory
      assert not advantages[t.id][~t.loss_mask()].any()
      # All tokens are of the weights of the step before.
      assert set(t.per_token('versions')[t.loss_mask()]) == {7}
    rewards = np.array([t.reward.value for t in group.trajectories])
    mine = np.array([c[0] for c in credit])
    if np.ptp(rewards) > 1e-6:
      expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    else:
      expected = np.zeros(4)
    np.testing.assert_allclose(mine, expected, atol=1e-5)


def test_a_finished_run_says_the_same_again_and_a_longer_one_goes_on(
  done, monkeypatch, capsys
):
  workdir, summary, _ = done
  before = recorder.read_metrics(workdir)
  with monkeypatch.context() as patch:
    patch.setattr('agentjax.run.evaluate', None)  # nothing is evaluated again
    again = train(workdir, tiny_run.training(*SHORT))
    assert again == summary == storage.read_json(workdir / 'summary.json')
    capsys.readouterr()
    shorter = train(workdir, tiny_run.training(*SHORT, 'steps=1'))
    assert shorter == summary
  said = 'step 8 is beyond the 7 steps that the config asks for'
  assert said in capsys.readouterr().out
  longer = train(workdir, tiny_run.training(*SHORT, 'steps=3'))
  assert longer['steps'] == 9 and longer['before'] == summary['before']
  # Evaluated anew: the evaluation of step 8 is not that of step 9.
  assert longer['after']['step'] == 9
  rows = recorder.read_metrics(workdir)
  assert rows[:-1] == before and rows[-1]['step'] == 9


def refused(workdir, *changes):
  """Exit code of the command line, in this process."""
  return command.main(tiny_run.command(workdir, *SHORT, *changes)[2:])


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    ('policy.config.mlp=48', 'mlp is 32 there and 48 here'),
    ('tasks.n=17', 'made with other tasks or another seed'),
    ('seed=1', 'made with other tasks or another seed'),
    ('cold_start.steps=7', 'cold_start.steps is 6 there and 7 here'),
    ('use_reference=True', 'use_reference is False there and True here'),
    ('evaluation.tasks.n=5', 'has an evaluation of other tasks'),
  ],
)
def test_a_workdir_of_another_config_is_left_alone(done, capsys, change, said):
  workdir = done[0]
  before = hashes(workdir)
  assert refused(workdir, change) == 1
  err = capsys.readouterr().err
  assert said in err and 'another workdir' in err and 'Traceback' not in err
  assert hashes(workdir) == before


def test_the_config_stands_in_the_workdir(done):
  found = storage.read_json(done[0] / 'config.json')
  assert found['config']['cold_start']['steps'] == 6
  assert found['config']['tasks']['call'] == 'agentjax.env.arithmetic.tasks'
  assert found['versions']['jax'] == jax.__version__
  assert not (done[0] / 'config_2.json').exists()


def test_a_finished_run_without_its_checkpoints_is_left_alone(
  done, tmp_path, capsys
):
  workdir = tmp_path / 'run'
  shutil.copytree(done[0], workdir)
  shutil.rmtree(workdir / 'checkpoints')
  before = hashes(workdir)
  assert refused(workdir) == 1
  assert 'restore checkpoints/, or choose' in capsys.readouterr().err
  assert hashes(workdir) == before


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    (('seed=-1',), 'seed is -1: give 0 to 4294967295'),
    (('seed=4294967296',), 'seed is 4294967296'),
    (('tasks.n=-1',), 'tasks: n is -1: give 0 or more'),
    (('policy.config.width=0',), 'config.policy.config: width is 0'),
    (('policy.config.head_size=15',), 'head_size is 15: rotary'),
    (('policy.config.layers=()',), 'layers is empty'),
    (('make_environment.function=',), "make_environment.function is '': give"),
    (('optimizer.learning_rate=nan',), 'learning_rate is nan'),
    (('optimizer.learning_rate=-1',), 'learning_rate is -1'),
    (('policy.config.vocab_size=280',), '280 and the vocabulary 285 ids'),
    (('groups=17',), 'a draw of 17 groups from 16 tasks'),
    (('group_size=1', 'minibatches=1'), 'group_size is 1, and these'),
    (('minibatches=13',), '13 minibatches of 3 groups of 4'),
    (('steps=-1',), 'steps is -1'),
    (('checkpoint_every=0',), 'checkpoint_every is 0'),
    (('evaluation.samples=0',), 'evaluation.samples is 0'),
    (('engine.context=100',), 'limits.context 112 exceeds engine.context 100'),
    (('learner.length=96',), 'limits.context 112 exceeds learner.length 96'),
    (('engine.buckets=(8, 4)',), 'buckets (8, 4): give ascending'),
    (('learner.rows=0',), 'learner.rows is 0'),
    (('cold_start.per_step=61',), '61 of 60 demonstrations'),
    (('cold_start_optimizer.warmup_steps=70',), 'config.cold_start_optim'),
    (('limits.turns=0',), 'config.limits: limit turns is 0'),
    (('tasks.split=no',), "split 'no': choose one of"),
  ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_before_anything_starts(
  tmp_path, capsys, changes, said
):
  assert refused(tmp_path / 'run', *changes) == 2
  err = capsys.readouterr().err
  assert said in err and 'Traceback' not in err
  assert not (tmp_path / 'run' / 'metrics').exists()


def test_what_only_looks_like_an_option_is_refused():
  base = tiny_run.training(*SHORT)
  sampling = dataclasses.replace(base.sampling, top_p=0.9)
  with pytest.raises(ConfigError, match='truncate in evaluation.sampling'):
    dataclasses.replace(base, sampling=sampling)
  with pytest.raises(ConfigError, match='temperature is 0'):
    dataclasses.replace(
      base, sampling=dataclasses.replace(sampling, temperature=0.0, top_p=1.0)
    )
  with pytest.raises(ConfigError, match='cold_start and cold_start_optimizer'):
    dataclasses.replace(base, cold_start=None)
  with pytest.raises(ConfigError, match="evaluation.tasks holds 8 tasks, .*'"):
    tasks = base.evaluation.tasks * 2
    dataclasses.replace(base.evaluation, tasks=tasks)


def test_a_kl_coefficient_without_a_reference_is_refused(tmp_path):
  base = tiny_run.training(*SHORT)

  def learner(*args, **kw):
    return base.learner(*args, **{'kl_coef': 0.1, **kw})

  with pytest.raises(ConfigError, match='kl_coef 0.1 without a reference'):
    train(tmp_path, dataclasses.replace(base, learner=learner))


def test_updates_that_are_not_finite_end_the_run(tmp_path, capsys):
  base = tiny_run.training(*SHORT, 'steps=9')
  bad = dataclasses.replace(base, optimizer=optax.sgd(float('nan')))
  with pytest.raises(Diverged) as error:
    train(tmp_path, bad)
  # Two updates a step: the fifth is in the third.
  assert str(error.value).startswith('the last 6 updates up to step 9 were sk')
  assert str(error.value).endswith('; the checkpoint of step 8 stands')
  assert '6 updates skipped' in capsys.readouterr().err
  rows = recorder.read_metrics(tmp_path)
  assert [r['skipped_updates'] for r in rows] == [0] * 6 + [2, 4, 6]
  assert not (tmp_path / 'summary.json').exists()
  # With an optimizer of the same shape it goes on from there.
  good = dataclasses.replace(bad, optimizer=optax.sgd(1e-3), steps=3)
  summary = train(tmp_path, good)
  assert summary['steps'] == 9 and summary['skipped_updates'] == 4


def test_a_person_stops_a_run_in_one_line(tmp_path):
  long = ('cold_start.steps=40000', 'cold_start_optimizer.decay_steps=50000')
  process = tiny_run.start(tmp_path / 'run', *long)
  deadline = time.monotonic() + 200
  while len(storage.names(tmp_path / 'run/metrics')) < 3:
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.05)
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=100)
  assert process.returncode == 130
  assert 'Traceback' not in err
  last = err.splitlines()[-1]
  assert re.fullmatch(
    r'stopped at step \d+; the same command goes on from .*', last
  )


# ---- environments that grow, and that fail ---------------------------------


class Growing:
  """Each observation is longer than the one before, over all episodes."""

  seen = 0

  def __init__(self):
    self.inner, self.turns = tiny_run.Graded(), 0
    self.reset, self.close = self.inner.reset, self.inner.close
    self.verify = self.inner.verify

  def step(self, turn):
    self.turns += 1
    if self.turns == 3:
      return Step(status=Status.DONE)
    Growing.seen += bool(turn.text)  # silence, before step 1, says nothing
    return Step((Observation('7' * Growing.seen),))


def test_nothing_compiles_while_turns_grow(tmp_path, monkeypatch):
  base = tiny_run.training(*SHORT, 'steps=5', 'limits.observation_tokens=40')
  counted = []

  class Run_(Run):
    def finish_step(self, step, *args):
      super().finish_step(step, *args)
      counted.append((step, compiles.count()))

  def make_engine(*args, **kw):
    engine = base.engine(*args, **kw)
    start = engine.start

    def grow(*args, turn_budget, **kw):
      start(*args, turn_budget=min(turn_budget, 2 * engine.version - 9), **kw)

    engine.start = grow
    return engine

  monkeypatch.setattr('agentjax.train.Run', Run_)
  summary = train(
    tmp_path,
    dataclasses.replace(
      base, engine=make_engine, make_environment=Growing, record_every=1
    ),
  )
  assert summary['compilations_after_warmup'] == 0
  assert len({n for _, n in counted}) == 1
  assert summary['tokens_prefilled'] == summary['tokens_expected']
  longest = {}
  for step in recorder.trajectory_steps(tmp_path):
    groups, _ = recorder.read_trajectories(tmp_path, step)
    for source in (Source.MODEL, Source.OBSERVATION):
      longest.setdefault(source, []).append(
        max(
          (len(s) for g in groups for t in g.trajectories
           for s in t.segments if s.source is source),
          default=0,
        )
      )  # fmt: skip
  # They did grow, over buckets and chunks.
  turns, seen = longest[Source.MODEL], longest[Source.OBSERVATION]
  assert turns == sorted(turns) and turns[-1] > 8 > turns[0]
  assert seen[-1] > 24 > seen[0]
  # And the count counts.
  n = compiles.count()
  jax.jit(lambda x: x * 3 + n)(np.zeros(n % 7 + 2))
  assert compiles.count() > n


class Broken(tiny_run.Graded):
  def __init__(self):
    super().__init__()
    self.reset = self.fail

  def fail(self, task):
    raise InfraError('the fake engine is gone')


def test_failures_of_infrastructure_stop_a_run_and_teach_nothing(
  tmp_path, capsys
):
  base = tiny_run.training(*SHORT)
  with pytest.raises(TooManyFailures) as error:
    train(tmp_path, dataclasses.replace(base, make_environment=Broken))
  said = str(error.value)
  assert said.startswith('100% of the trajectories failed by infrastructure')
  assert 'max_failure_rate 20%' in said and 'the fake engine is gone' in said
  out = capsys.readouterr().out
  assert 'null policy: 16 of 16 episodes failed: ' in out
  assert 'the fake engine is gone' in out
  assert [r['step'] for r in recorder.read_metrics(tmp_path)][-1] == 6
  # The same workdir goes on once it is repaired, and measures what it lacks.
  summary = train(tmp_path, base)
  assert summary['steps'] == 8 and summary['null_episodes'] == 16


class Sometimes(tiny_run.Graded):
  """One episode in four fails, and one earns what is no number."""

  made = 0

  def __init__(self):
    super().__init__()
    Sometimes.made += 1
    self.number = Sometimes.made % 8

  def step(self, turn):
    if self.number == 1:
      raise RuntimeError('a bug')
    if self.number == 2:
      raise SystemExit(0)
    return super().step(turn)

  def verify(self, status):
    reward = super().verify(status)
    return Reward(float('nan')) if self.number == 3 else reward


def test_bugs_of_an_environment_are_masked_counted_and_recorded(tmp_path):
  base = tiny_run.training(*SHORT, 'steps=1', 'group_size=8')
  summary = train(
    tmp_path,
    dataclasses.replace(base, make_environment=Sometimes, max_failure_rate=0.9),
  )
  (row,) = [r for r in recorder.read_metrics(tmp_path) if 'reward' in r]
  assert np.isfinite(row['reward'])
  assert row['skipped_updates'] == 0 and row['grad_norm'] > 0
  groups, advantages = recorder.read_trajectories(tmp_path, 7)
  failed = [
    t
    for g in groups
    for t in g.trajectories
    if t.status is Status.ENVIRONMENT_ERROR
  ]
  # 9, but for those whose first turn a limit cut: they reach no step.
  assert row['unscored'] == len(failed) >= 6
  for t in failed:
    assert t.reward is None and not advantages[t.id].any()
  said = ''.join(t.error for t in failed)
  assert 'RuntimeError: a bug' in said and 'SystemExit: 0' in said
  assert 'reward is nan' in said
  assert summary['before']['statuses']['environment_error'] >= 1


# ---- phases ----------------------------------------------------------------


def test_without_a_cold_start_and_without_steps(tmp_path):
  base = dataclasses.replace(
    tiny_run.training(*SHORT, 'steps=0', 'use_reference=True'),
    cold_start=None,
    cold_start_optimizer=None,
  )
  base = dataclasses.replace(
    base, evaluation=dataclasses.replace(base.evaluation, untrained=True)
  )
  summary = train(tmp_path, base)
  assert summary['steps'] == 0
  assert summary['untrained'] == summary['before'] == summary['after']
  assert [r['when'] for r in recorder.read_evaluations(tmp_path)] == [
    'untrained',
    'before',
    'after',
  ]
  assert recorder.read_metrics(tmp_path) == []
  # Step 0 was saved with its reference: reinforcement can go on from it.
  later = train(tmp_path, dataclasses.replace(base, steps=1))
  assert later['steps'] == 1 and later['before'] == summary['before']
  assert later['untrained'] == summary['untrained']
