"""Runs restored tests in one process with the code: inside a sandbox.

Floor 1, env/judge. The host sends this source as the argument of a fresh
`python3 -I -c`; besides the standard library it imports pytest, before the
policy's folder is on the path. No configuration is read but the one given
here, no plugin is loaded but the one below. Reports go to a private pipe, the
call's stdout; what tests print goes to /dev/null.

The code under test lives in this process and may rewrite all of it. That
cannot be excluded, only noticed, on the host: see `repositories.py`.

stdin: JSON with `files` (of tests) and `conftest` (whether those of the tests
are needed). A report is a line {"id", "when", "outcome"}.
"""

import json
import os
import sys


class Reports:
  """The plugin: writes a line for each phase of each test."""

  def __init__(self, fd):
    self._fd, self._write, self._dumps = fd, os.write, json.dumps

  def pytest_runtest_logreport(self, report):
    outcome = report.outcome
    if hasattr(report, 'wasxfail'):
      outcome = f'x{outcome}'
    self._tell(report.nodeid, report.when, outcome)

  def pytest_collectreport(self, report):
    if report.failed:
      self._tell(report.nodeid, 'collect', report.outcome)

  def _tell(self, name, when, outcome):
    fields = {'id': name, 'when': when, 'outcome': outcome}
    data = memoryview(self._dumps(fields).encode() + b'\n')
    while data:
      data = data[self._write(self._fd, data) :]


def main():
  os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'
  import pytest  # the variable comes first

  request = json.loads(sys.stdin.buffer.read())
  replies = os.dup(1)
  null = os.open(os.devnull, os.O_RDWR)
  for target in (0, 1, 2):
    os.dup2(null, target)
  os.close(null)
  end = os._exit
  sys.path.insert(0, os.getcwd())
  arguments = ['-q', '-p', 'no:cacheprovider', '-c', os.devnull]
  arguments += ['--rootdir', os.getcwd(), '-o', 'addopts=']
  if not request['conftest']:
    arguments.append('--noconftest')
  end(int(pytest.main(arguments + request['files'], [Reports(replies)])))


if __name__ == '__main__':
  main()
