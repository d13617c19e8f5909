"""A Ray cluster for tests: two machines, as far as Ray knows."""

import importlib.util

import pytest
from requirements import require
from sandboxes import backend_or_skip

HERE = importlib.util.find_spec('ray') is not None


def needed() -> None:
  """Skips where Ray is not installed, or no sandbox can run."""
  require('ray', HERE, 'pip install "agentjax[fleet]"')
  backend_or_skip('bwrap')


@pytest.fixture(scope='module')
def cluster():
  """Two machines of 2 processors each, as far as Ray knows."""
  needed()
  import ray
  from ray.cluster_utils import Cluster

  made = Cluster(
    initialize_head=True,
    head_node_args={'num_cpus': 2, 'include_dashboard': False},
  )
  made.add_node(num_cpus=2)
  ray.init(address=made.address, log_to_driver=False)
  made.wait_for_nodes()
  yield made
  ray.shutdown()
  made.shutdown()


@pytest.fixture(scope='module')
def backend(cluster):
  """In the place of docker and bwrap, for the tests that are run again."""
  return 'fleet'
