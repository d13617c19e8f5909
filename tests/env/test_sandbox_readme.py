"""Sandboxes as the README shows them: the lines there are run here."""

import pathlib
import re

import pytest
from requirements import require

from agentjax.env.sandbox import (
  SandboxSpec,
  SandboxUnavailable,
  choose_backend,
)

README = pathlib.Path(__file__).resolve().parents[2] / 'README.md'


@pytest.fixture
def snippet():
  try:
    choose_backend(SandboxSpec())
    reason = ''
  except SandboxUnavailable as error:
    reason = str(error)
  require('docker or bwrap', not reason, reason)
  section = README.read_text('utf-8').split('## Sandboxes and verdicts')[1]
  (code,) = re.findall(r'```python\n(.*?)```', section.split('\n## ')[0], re.S)
  return code


def test_the_sandbox_of_the_readme_runs(snippet, capsys):
  exec(snippet, {'__name__': 'readme'})
  assert capsys.readouterr().out.splitlines() == [
    '42',
    '',
    'CallStatus.TIMEOUT',
    '42',
    '',
    "{'data/note.txt': b'kept'}",
  ]
