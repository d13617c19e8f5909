"""Fixtures: open sandboxes of each backend."""

import os

import pytest
from sandboxes import BACKENDS, SPEC, backend_or_skip

from agentjax.env.sandbox import open_sandbox


@pytest.fixture(scope='session', autouse=True)
def own_journals(tmp_path_factory):
  """The journals of tests, also of processes that they start, lie apart."""
  before = os.environ.get('XDG_STATE_HOME')
  os.environ['XDG_STATE_HOME'] = str(tmp_path_factory.mktemp('state'))
  yield
  if before is None:
    del os.environ['XDG_STATE_HOME']
  else:
    os.environ['XDG_STATE_HOME'] = before


@pytest.fixture(scope='session', params=BACKENDS)
def backend(request):
  """Each backend in turn, skipped where it cannot run."""
  return backend_or_skip(request.param)


@pytest.fixture(scope='session')
def shared(backend):
  """One sandbox for the tests that leave nothing behind."""
  with open_sandbox(SPEC, backend) as sandbox:
    yield sandbox


@pytest.fixture
def fresh(backend):
  """A sandbox of the test's own, which it may ruin."""
  with open_sandbox(SPEC, backend) as sandbox:
    yield sandbox
