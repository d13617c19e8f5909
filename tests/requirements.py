"""What a test needs from outside the package, and what if it is not there.

A test that needs Docker, Chromium, a package with weights and the like says
so through `require`. Where the thing is absent the test is skipped with the
reason; with AGENTJAX_REQUIRE_ALL=1, as in a full run, it fails instead.
"""

import os

import pytest


def require(name: str, available: bool, reason: str) -> None:
  """Skips the calling test, or fails it where everything is required."""
  if available:
    return
  text = f'{name} is not available: {reason}'
  if os.environ.get('AGENTJAX_REQUIRE_ALL') == '1':
    pytest.fail(text, pytrace=False)
  pytest.skip(text)
