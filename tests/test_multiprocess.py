"""Two JAX processes that meet over loopback do what one does.

Each has two devices and packs its own trajectories: another number of rows
and of loss tokens than its peer. They agree on the micro-batches, count
globally, update together, and each takes the weights over into an engine of
its own.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import multiprocess_worker as worker
import numpy as np
import pytest

# One process runs the workers, also where tests are spread over several.
# A minute of compiling; far more on a machine that is busy.
pytestmark = [
  pytest.mark.xdist_group('multiprocess'),
  pytest.mark.timeout(600),
]
TESTS = pathlib.Path(__file__).resolve().parent


def free_port() -> int:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


@pytest.fixture(scope='module')
def found(tmp_path_factory):
  """What each process found."""
  where, port = tmp_path_factory.mktemp('found'), free_port()
  path = [str(TESTS.parent), str(TESTS), os.environ.get('PYTHONPATH', '')]
  env = os.environ | {'PYTHONPATH': os.pathsep.join(path)}
  logs = [open(where / f'{i}.log', 'w+') for i in range(worker.PROCESSES)]
  processes = [
    subprocess.Popen(
      [sys.executable, worker.__file__, str(i), str(port), where / f'{i}.json'],
      env=env,
      stdout=log,
      stderr=subprocess.STDOUT,
    )
    for i, log in enumerate(logs)
  ]
  try:
    end = time.monotonic() + 500
    for process in processes:
      process.wait(timeout=max(1, end - time.monotonic()))
  finally:
    for process in processes:
      process.kill()  # nothing, where it has ended
      process.wait()
    printed = []
    for log in logs:
      log.seek(0)
      printed.append(log.read()[-4000:])
      log.close()
  assert [p.returncode for p in processes] == [0] * len(processes), printed
  return [
    json.loads((where / f'{i}.json').read_text()) for i in range(len(processes))
  ]


@pytest.fixture(scope='module')
def alone():
  """The same updates and turns by this process, on the whole batches."""
  learner = worker.learner()
  # The credit of a trajectory is by its place in its own share.
  batches = []
  for shares in worker.SHARES:
    parts = [worker.batch_of(share, worker.ROWS) for share in shares]
    batches.append(
      type(parts[0])(*(np.concatenate(x) for x in zip(*parts, strict=True)))
    )
  metrics, params, _ = worker.updates(learner, batches)
  tokens = [worker.decode(params, i).tolist() for i in range(worker.PROCESSES)]
  return metrics, jax.tree.leaves(params), tokens


@pytest.mark.parametrize('mesh', worker.MESHES)
def test_the_shares_are_uneven(found, mesh):
  """Else the tests below would show nothing."""
  rows, tokens = (
    [f[mesh][what] for f in found] for what in ('rows', 'loss_tokens')
  )
  assert rows == [[8, 4], [4, 4]]
  assert tokens[0][0] > 5 * tokens[1][0] > 0 == tokens[0][1]


@pytest.mark.parametrize('mesh', worker.MESHES)
def test_updates_equal_those_of_one_process(found, alone, mesh):
  metrics, params, _ = alone
  for f in found:
    assert len(f[mesh]['metrics']) == len(worker.SHARES)
    for got, want in zip(f[mesh]['metrics'], metrics, strict=True):
      assert got.keys() == want.keys()
      for name in want:
        np.testing.assert_allclose(
          got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name
        )
    for got, want in zip(f[mesh]['params'], params, strict=True):
      np.testing.assert_allclose(
        got, want, rtol=0, atol=1e-5 * np.abs(want).max()
      )
  counts = [m['loss_tokens'] for m in metrics]
  sent = np.sum([f[mesh]['loss_tokens'] for f in found], 0)
  assert counts == sent.tolist()


@pytest.mark.parametrize('mesh', worker.MESHES)
def test_uneven_rows_compile_nothing(found, mesh):
  assert [f[mesh]['compiled'] for f in found] == [0, 0]


def test_each_process_decodes_with_the_new_weights(found, alone):
  assert [f['tokens'] for f in found] == alone[2]
