"""The suite of all backends, run on a Ray cluster in their place."""

import pytest
import test_sandbox_conformance as conformance
from fleets import backend, cluster  # noqa: F401
from sandboxes import SPEC
from test_sandbox_conformance import *  # noqa: F403

from agentjax.env.sandbox import open_sandbox

pytestmark = [pytest.mark.long, pytest.mark.xdist_group('fleet')]


@pytest.fixture(scope='module')
def shared(backend):  # noqa: F811
  with open_sandbox(SPEC, backend) as sandbox:
    yield sandbox


@pytest.fixture
def fresh(backend):  # noqa: F811
  with open_sandbox(SPEC, backend) as sandbox:
    yield sandbox


def test_the_suite_is_the_same():
  named = {n for n in vars(conformance) if n.startswith('test_')}
  assert len(named) > 25 and named <= set(globals())
