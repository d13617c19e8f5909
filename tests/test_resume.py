"""Killed anywhere, resumed exactly: real processes, real SIGKILL.

One run goes through without a break; another is killed time and again, each
time started with the same command. What they leave must be the same.
"""

import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny_run
from disks import small_disk

from agentjax import recorder, records, storage, tally

# In the order of a run: in the cold start, at the commit of a checkpoint,
# between the two updates of a step, after a step's metrics and before its
# trajectories, in the last evaluation, before the summary.
MOMENTS = (
  ('agentjax.run.Run.cold_start_step:after', 7),
  ('commit', 5),
  ('agentjax.learner.Learner.update:after', 37),
  ('agentjax.recorder.Recorder.trajectories:before', 3),
  ('agentjax.evaluate.score:before', 1),
  ('agentjax.run.Run.summarize:before', 1),
)


def clocks_apart(row):
  return {k: v for k, v in row.items() if not tally.is_clock(k)}


def left_in(workdir):
  """What a run left, clocks apart, in a form that can be compared."""
  trajectories = {}
  for step in recorder.trajectory_steps(workdir):
    groups, advantages = recorder.read_trajectories(workdir, step)
    for t in (t for g in groups for t in g.trajectories):
      record, arrays = records.trajectory_to_record(t)
      arrays = {k: np.asarray(v).tobytes() for k, v in arrays.items()}
      trajectories[step, t.id] = record, arrays, advantages[t.id].tobytes()
  return {
    'metrics': [clocks_apart(r) for r in recorder.read_metrics(workdir)],
    'evaluations': recorder.read_evaluations(workdir),
    'trajectories': trajectories,
    'summary': clocks_apart(storage.read_json(workdir / 'summary.json')),
    'pages': sorted(p.name for p in (workdir / 'pages').rglob('*.html')),
    'events': storage.names(workdir / 'events'),
  }


def saved_in(workdir):
  """(step, state, meta) of the newest checkpoint."""
  with ocp.CheckpointManager((workdir / 'checkpoints').resolve()) as manager:
    step = manager.latest_step()
    found = manager.restore(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(), meta=ocp.args.JsonRestore()
      ),
    )
  del found['meta']['totals']['seconds']
  return step, found['state'], found['meta']


def assert_same_run(workdir, other):
  a, b = left_in(workdir), left_in(other)
  for name in a:
    assert a[name] == b[name], name
  step_a, state_a, meta_a = saved_in(workdir)
  step_b, state_b, meta_b = saved_in(other)
  assert (step_a, meta_a) == (step_b, meta_b)
  jax.tree.map(np.testing.assert_array_equal, state_a, state_b)
  assert 'reference' in state_a and 'learner' in state_a


def wait_for(found, process):
  deadline = time.monotonic() + 200
  while not found():
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.02)


def run_until(workdir, moment, n):
  """Starts a run that kills itself at a moment of `kill_at`."""
  script = str(tiny_run.ROOT / 'tests/kill_at.py')
  done = subprocess.run(
    [sys.executable, script, moment, str(n), *tiny_run.command(workdir)[3:]],
    env=tiny_run.environment(),
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert done.returncode == -signal.SIGKILL, (moment, done.stderr)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A run without a break; while it runs, a second one is refused."""
  workdir = tmp_path_factory.mktemp('whole') / 'run'
  process = tiny_run.start(workdir)
  wait_for(lambda: storage.names(workdir / 'metrics'), process)
  second = tiny_run.run(workdir)
  out, err = process.communicate(timeout=240)
  assert process.returncode == 0, err
  return workdir, out, second, process.pid


def test_a_second_start_is_refused_and_the_first_goes_on(whole):
  workdir, out, (code, second_out, second_err), pid = whole
  assert code == 1
  assert f'is in use by pid {pid} on host' in second_err
  assert 'Traceback' not in second_err and second_out == ''
  assert [r['step'] for r in recorder.read_metrics(workdir)] == list(
    range(1, 46)
  )
  assert out.splitlines()[-1].startswith('figure success_after ')


def test_killed_time_and_again_it_equals_a_run_without_a_break(whole, tmp_path):
  workdir = tmp_path / 'run'
  reached = []
  for moment, n in MOMENTS:
    run_until(workdir, moment, n)
    assert not (workdir / 'summary.json').exists()
    reached.append([r['step'] for r in recorder.read_metrics(workdir)][-1])
  # Each process got to where it was to be killed.
  assert reached == [7, 10, 42, 45, 45, 45]
  code, out, err = tiny_run.run(workdir)
  assert code == 0, err
  assert 'going on after step 45 of' in out
  assert_same_run(whole[0], workdir)


def test_killed_from_outside(whole, tmp_path):
  workdir = tmp_path / 'run'
  process = tiny_run.start(workdir)
  wait_for(lambda: len(storage.names(workdir / 'metrics')) >= 42, process)
  process.kill()
  process.communicate()
  assert tiny_run.run(workdir)[0] == 0
  assert_same_run(whole[0], workdir)


def test_a_full_disk_ends_a_run_and_nothing_is_lost(whole, tmp_path):
  disk = tmp_path / 'disk'
  workdir = disk / 'run'
  with small_disk(disk, 8) as leave:
    run_until(workdir, 'agentjax.run.Run.collect:before', 3)
    # Not a byte for a record; then enough for records and no checkpoint.
    for left, file in ((0, 'metrics/'), (150_000, 'checkpoints/44')):
      leave(left)
      code, out, err = tiny_run.run(workdir)
      assert code == 1 and 'going on after step 42' in out, err
      said = err.splitlines()[-1]
      assert f'No space left on device while writing {workdir}/{file}' in said
      assert 'it goes on from the last checkpoint' in said
      assert 'Traceback' not in err and 'figure' not in out
    leave(None)
    code, out, err = tiny_run.run(workdir)
    assert code == 0 and 'going on after step 42' in out, err
    assert_same_run(whole[0], workdir)
