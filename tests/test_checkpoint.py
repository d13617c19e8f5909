"""Checkpoints: round trips, refusals, and what a kill or a full disk leaves."""

import dataclasses
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_model
import tiny_run
from disks import small_disk

from agentjax import storage
from agentjax.checkpoint import Checkpoints, DamagedCheckpoint
from agentjax.learner import Learner
from agentjax.optimizers import adamw

CONFIG = tiny_model.PLAIN


def state(seed=0, optimizer=None):
  """A learner's state in which nothing is zero by accident."""
  learner = Learner(
    CONFIG, optimizer=optimizer or adamw(1e-3), rows=2, length=16
  )
  fresh = learner.init(tiny_model.params(seed, CONFIG))
  keys = iter(range(1000))
  return jax.tree.map(
    lambda x: (
      jax.random.normal(jax.random.key(next(keys) + 1000 * seed), x.shape)
      if x.dtype == jnp.float32
      else x + 7
    ),
    fresh,
  )


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)
  assert jax.tree.structure(a) == jax.tree.structure(b)


def test_round_trip_with_optimizer_counters_and_meta(tmp_path):
  saved = state()
  meta = {'curriculum': {'position': 3}, 'gap': 0.1 + 0.2, 'bad': float('nan')}
  checkpoints = Checkpoints(tmp_path, CONFIG, {'steps': 4})
  assert checkpoints.latest is None
  checkpoints.save(5, {'learner': saved}, meta)
  checkpoints.close()
  again = Checkpoints(tmp_path, CONFIG, {'steps': 4})
  assert again.latest == 5
  found, found_meta = again.restore({'learner': state(1)})
  assert_equal(found['learner'], saved)
  assert int(found['learner'].step) == 7
  assert found_meta['curriculum'] == meta['curriculum']
  assert found_meta['gap'] == meta['gap'] and np.isnan(found_meta['bad'])
  again.close()


def test_the_newest_are_kept_and_any_of_them_can_be_read(tmp_path):
  checkpoints = Checkpoints(tmp_path, CONFIG, keep=2)
  for step in (1, 4, 6):
    checkpoints.save(step, {'x': jnp.full(3, step)}, {'step': step})
  assert sorted(p.name for p in checkpoints.path.iterdir()) == ['4', '6']
  found, meta = checkpoints.restore({'x': jnp.zeros(3, int)}, 4)
  assert found['x'].tolist() == [4, 4, 4] and meta['step'] == 4
  checkpoints.close()


def files(root):
  return {p: p.read_bytes() for p in root.rglob('*') if p.is_file()}


@pytest.mark.parametrize(
  ('config', 'facts', 'said'),
  [
    (
      dataclasses.replace(CONFIG, width=64, mlp=32),
      {},
      'width is 32 there and 64 here; mlp is 64 there and 32 here',
    ),
    (
      CONFIG,
      {'cold_start.steps': 5},
      'cold_start.steps is None there and 5 here',
    ),
  ],
)
def test_another_model_or_fact_is_refused_by_name(
  tmp_path, config, facts, said
):
  checkpoints = Checkpoints(tmp_path, CONFIG)
  checkpoints.save(3, {'x': jnp.zeros(3)}, {})
  checkpoints.close()
  before = files(tmp_path)
  other = Checkpoints(tmp_path, config, facts)
  with pytest.raises(storage.WorkdirMismatch) as error:
    other.restore({'x': jnp.zeros(3)})
  assert f'{tmp_path}/checkpoints/3 is not of this config: {said}' in str(
    error.value
  )
  assert files(tmp_path) == before
  other.close()


def test_another_optimizer_is_refused(tmp_path):
  checkpoints = Checkpoints(tmp_path, CONFIG)
  checkpoints.save(3, {'learner': state()}, {})
  with pytest.raises(storage.WorkdirMismatch, match='its arrays do not fit'):
    checkpoints.restore({'learner': state(optimizer=optax.sgd(1.0))})
  checkpoints.close()


def cut(path):
  for file in path.rglob('*'):
    if file.is_file() and file.parent.name == 'd':
      file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def overwritten(path):
  for file in path.rglob('*'):
    if file.is_file() and file.parent.name == 'd':
      file.write_bytes(b'\xff' * file.stat().st_size)


def without(*names):
  def remove(path):
    for name in names:
      shutil.rmtree(path / name)

  return remove


def written(name, text):
  return lambda path: (path / name).write_text(text)


@pytest.mark.parametrize(
  'damage',
  [
    cut,
    overwritten,
    without('state'),
    without('meta'),
    without('state', 'meta'),
    written('meta/metadata', '{"a'),
    written('meta/metadata', '[1]'),
    written('meta/metadata', '{}'),
    written('state/_METADATA', 'x'),
    written('state/manifest.ocdbt', 'x'),
  ],
)
def test_a_damaged_checkpoint_is_no_fault_of_the_config(tmp_path, damage):
  checkpoints = Checkpoints(tmp_path, CONFIG)
  for step in (4, 5):
    checkpoints.save(step, {'x': jnp.arange(3000.0)}, {'step': step})
  checkpoints.close()
  damage(tmp_path / 'checkpoints/5')
  again = Checkpoints(tmp_path, CONFIG)
  like = {'x': jnp.zeros(3000)}
  with pytest.raises(DamagedCheckpoint) as error:
    again.restore(like)
  said = str(error.value)
  assert said.startswith(
    f'checkpoint {tmp_path}/checkpoints/5 is damaged: remove it, and the run '
    'goes on from step 4 ('
  )
  assert '\n' not in said and len(said) < 600
  again.close()
  # The remedy is one.
  shutil.rmtree(tmp_path / 'checkpoints/5')
  last = Checkpoints(tmp_path, CONFIG)
  found, meta = last.restore(like)
  assert meta['step'] == 4 and found['x'][7] == 7
  cut(tmp_path / 'checkpoints/4')
  with pytest.raises(DamagedCheckpoint, match='damaged: there is none before'):
    last.restore(like)
  last.close()


def test_arrays_of_another_shape_are_the_configs_fault(tmp_path):
  checkpoints = Checkpoints(tmp_path, CONFIG)
  checkpoints.save(5, {'x': jnp.arange(3000.0)}, {})
  for like in ({'x': jnp.zeros(30)}, {'y': jnp.zeros(3000)}):
    with pytest.raises(storage.WorkdirMismatch, match='arrays do not fit'):
      checkpoints.restore(like)
  checkpoints.close()


def test_nothing_to_restore(tmp_path):
  checkpoints = Checkpoints(tmp_path, CONFIG)
  with pytest.raises(ValueError, match=f'no checkpoint in {tmp_path}'):
    checkpoints.restore({})
  checkpoints.close()


SAVES = """
import sys
sys.path[:0] = [{root!r}, {root!r} + '/tests']
import jax.numpy as jnp
import kill_at, tiny_model
from agentjax.checkpoint import Checkpoints
kill_at.die_at_commit(int(sys.argv[2]))
checkpoints = Checkpoints(sys.argv[1], tiny_model.PLAIN)
for step in (1, 2, 3):
  checkpoints.save(step, {{'x': jnp.full(100, step)}}, {{'step': step}})
"""


@pytest.mark.parametrize('commit', [4, 6])
def test_killed_while_saving_the_one_before_stands(tmp_path, commit):
  code = SAVES.format(root=str(tiny_run.ROOT))
  done = subprocess.run(
    [sys.executable, '-c', code, str(tmp_path), str(commit)],
    capture_output=True,
    timeout=100,
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  left = {p.name for p in (tmp_path / 'checkpoints').iterdir()}
  assert any('tmp' in name for name in left)
  checkpoints = Checkpoints(tmp_path, CONFIG)
  found, meta = checkpoints.restore({'x': jnp.zeros(100, int)})
  assert checkpoints.latest == 1 and meta['step'] == 1
  assert set(found['x'].tolist()) == {1}
  # What was half written is gone, and the step can be saved again.
  assert {p.name for p in checkpoints.path.iterdir()} == {'1'}
  checkpoints.save(2, {'x': jnp.zeros(100)}, {})
  assert checkpoints.latest == 2
  checkpoints.close()


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, caplog):
  noise = np.random.default_rng(0).standard_normal(100_000, np.float32)
  disk = tmp_path / 'disk'
  with small_disk(disk, 8) as leave:
    checkpoints = Checkpoints(disk / 'run', CONFIG)
    checkpoints.save(1, {'x': jnp.asarray(noise)}, {'step': 1})
    # It would not fit; it seems to fit, and its directories do not.
    for n in (200_000, noise.nbytes):
      leave(n)
      with pytest.raises(storage.StorageFull) as error:
        checkpoints.save(2, {'x': jnp.asarray(noise)}, {'step': 2})
      assert f'writing {disk}/run/checkpoints/2: free some' in str(error.value)
      assert checkpoints.latest == 1
    # It is said once, by the error.
    assert 'No space left' not in caplog.text
    checkpoints.close()
    leave(None)
    again = Checkpoints(disk / 'run', CONFIG)
    found, _ = again.restore({'x': jnp.zeros(100_000)})
    np.testing.assert_array_equal(found['x'], noise)
    again.save(2, {'x': jnp.asarray(noise)}, {'step': 2})
    assert again.latest == 2
    again.close()
