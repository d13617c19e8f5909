"""Bubblewrap without root: the runner and the policy's code share a uid.

Runs in a process of its own that gives up root, with everything imported
before: the files need not be readable to everybody.
"""

import json
import os
import subprocess
import sys

import pytest
from requirements import require
from sandboxes import backend_or_skip
from test_sandbox_conformance import EVERY_SIGNAL
from test_sandbox_sessions import FILL

# (status, alive, stdout) or the name of the InfraError of each program.
PLAY = """
import json, os, sys
import importlib.resources, secrets, shutil, subprocess, tempfile
import agentjax.env.sandbox.bwrap, agentjax.env.sandbox.docker
from agentjax.env.base import InfraError
from agentjax.env.sandbox import Call, SandboxSpec, open_sandbox, session
session.runner_program(), session._source('files.py')
if os.geteuid() == 0:
  os.setgroups([])
  os.setgid(12345)
  os.setuid(12345)
out = []
for code in json.loads(sys.argv[1]):
  try:
    with open_sandbox(SandboxSpec(), 'bwrap') as sandbox:
      run = sandbox.call
      if sys.argv[2] == 'session':
        session = sandbox.session('python')
        run = lambda call: session.run(call.code, call.timeout_s)
      for code in (code, 'print(1)'):
        result = run(Call(code=code, timeout_s=2))
        out.append((result.status.value, result.alive, result.stdout))
      if sys.argv[2] == 'session':
        out.append(sandbox.call(Call(code='print(2)')).stdout)
  except InfraError as error:
    out.append(f'{type(error).__name__}: {error}'[:300])
print(json.dumps(out))
"""


def play(*programs, by='call'):
  backend_or_skip('bwrap')
  done = subprocess.run(
    [sys.executable, '-c', PLAY, json.dumps(programs), by],
    capture_output=True,
    text=True,
    cwd='/',
    env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
  )
  assert done.returncode == 0, done.stderr
  out = json.loads(done.stdout)
  unavailable = str(out[0]).startswith('SandboxUnavailable')
  require('bwrap without root', not unavailable, str(out[0]))
  return out


# Each of these, if it were let through, would end or starve the runner.
ON_THE_RUNNER = (
  'import resource as r; r.prlimit(1, r.RLIMIT_NOFILE, (0, 0))',
  'import resource as r; r.prlimit(1, r.RLIMIT_AS, (1, 1))',
  'import resource as r; r.prlimit(1, r.RLIMIT_CPU, (0, 0))',
  'import os; os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))',
  'import os; os.sched_setaffinity(1, [0])',
  'import os; os.setpriority(os.PRIO_PROCESS, 1, 19)',
  'import os; os.setpriority(os.PRIO_PGRP, 1, 19)',
  'import os; os.setpriority(os.PRIO_USER, 0, 19)',
)


def test_limits_and_priorities_of_the_runner_are_out_of_reach():
  caught = 'try:\n  {}\nexcept PermissionError as e: print(e.errno)'
  own = (
    'import os, resource as r, subprocess as s\n'
    'r.setrlimit(r.RLIMIT_NOFILE, (50, 50)); os.nice(1)\n'
    'os.sched_setaffinity(0, os.sched_getaffinity(0))\n'
    'r.prlimit(os.getpid(), r.RLIMIT_NOFILE, (40, 40))\n'
    'print(s.run(["echo", "on"], capture_output=True, text=True).stdout)'
  )
  out = play(*(caught.format(code) for code in ON_THE_RUNNER), own)
  again = ['ok', True, '1\n']
  assert out[:-2] == [['ok', True, '1\n'], again] * len(ON_THE_RUNNER)
  assert out[-2:] == [['ok', True, 'on\n\n'], again]


@pytest.mark.parametrize(
  'code',
  [
    EVERY_SIGNAL,
    'import os, signal\nos.kill(1, signal.SIGINT)\nprint("alive")',
  ],
)
def test_signals_do_not_end_the_runner(code):
  assert play(code) == [['ok', True, 'alive\n'], ['ok', True, '1\n']]


def test_sessions():
  assert play('x = 1; print(x)', by='session') == [
    ['ok', True, '1\n'],
    ['ok', True, '1\n'],
    '2\n',
  ]
  # Of the runner's own uid, it can fill the pipe that it is asked through.
  full, again, after = play(FILL, by='session')
  assert full == ['ok', True, 'full\n'] and after == '2\n'
  assert again[0] in ('signal', 'timeout', 'ok') and again[1]


def test_inodes_are_limited_and_name_spaces_closed():
  bomb = 'import itertools\nfor i in itertools.count(): open(f"{i}", "w")'
  spaces = (
    'import ctypes, os\n'
    'print(ctypes.CDLL(None).unshare(0x10000000), os.getuid() != 0)\n'
    'print(open("/proc/self/status").read().count("Seccomp:\\t2"))'
  )
  again = ['ok', True, '1\n']
  assert play(bomb, spaces) == [
    *(['disk', True, ''], again),
    *(['ok', True, '-1 True\n1\n'], again),
  ]
