"""The image's build script: quick where the image is, plain where it fails."""

import os
import pathlib
import subprocess
import sys
import time

from requirements import require

from agentjax.env.base import InfraError
from agentjax.env.sandbox import SandboxSpec, choose_backend

SCRIPT = pathlib.Path(__file__).parents[2] / 'sandbox/build.py'


def build(**environment):
  return subprocess.run(
    [sys.executable, str(SCRIPT)],
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
  )


def test_does_nothing_where_the_image_is():
  try:
    choose_backend(SandboxSpec(), 'docker')
    reason = ''
  except InfraError as error:
    reason = str(error)
  require('docker', not reason, reason)
  start = time.monotonic()
  done = build()
  assert (done.returncode, done.stdout) == (
    0,
    'agentjax-python:latest is there\n',
  )
  assert time.monotonic() - start < 10


def test_says_that_no_engine_answers():
  import shutil

  missing = shutil.which('docker') is None
  require('docker', not missing, 'the program docker is not installed')
  done = build(DOCKER_HOST='unix:///nonexistent/docker.sock')
  assert done.returncode == 1
  assert 'the Docker engine does not answer' in done.stderr


def test_image_is_the_one_that_sandboxes_ask_for():
  assert f"IMAGE = '{SandboxSpec().image}'" in SCRIPT.read_text()
  dockerfile = SCRIPT.parent / 'images/Dockerfile'
  assert SandboxSpec().image in dockerfile.read_text()
