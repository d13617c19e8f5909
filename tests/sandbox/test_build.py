"""The images' build script: quick where they are, plain where it fails."""

import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest
from requirements import require

from agentjax.env.base import InfraError
from agentjax.env.sandbox import (
  Call,
  SandboxSpec,
  choose_backend,
  open_sandbox,
)

SCRIPT = pathlib.Path(__file__).parents[2] / 'sandbox/build.py'
IMAGES = SCRIPT.parent / 'images'
NAMES = ('pytest', 'python')


def module():
  """The build script, which stands in no package."""
  sys.path.insert(0, str(SCRIPT.parent))
  try:
    spec = importlib.util.spec_from_file_location('image_build', SCRIPT)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
  finally:
    sys.path.remove(str(SCRIPT.parent))
  return made


BUILD = module()


def build(*arguments, **environment):
  return subprocess.run(
    [sys.executable, str(SCRIPT), *arguments],
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
  )


def spec_of(name):
  """A spec of that image, where the engine has it from this script."""
  spec = dataclasses.replace(SandboxSpec(), image=BUILD.tag_of(name))
  try:
    choose_backend(spec, 'docker')
    reason = ''
  except InfraError as error:
    reason = str(error)
  require('docker', not reason, reason)
  made = (BUILD.label(spec.image) or '').startswith('sha256:')
  require(
    spec.image, made, 'it is of an older script: python3 sandbox/build.py'
  )
  return spec


def test_does_nothing_where_the_image_is():
  spec_of('python')
  start = time.monotonic()
  done = build('python')
  assert done.returncode == 0
  assert done.stdout.splitlines()[0] == 'agentjax-python:latest is there'
  assert 'built' not in done.stdout
  assert time.monotonic() - start < 10


def test_says_that_no_engine_answers():
  missing = shutil.which('docker') is None
  require('docker', not missing, 'the program docker is not installed')
  done = build(DOCKER_HOST='unix:///nonexistent/docker.sock')
  assert done.returncode == 1
  assert 'the Docker engine does not answer' in done.stderr


def test_says_that_there_is_no_such_image():
  done = build('pythno')
  assert done.returncode == 2
  assert "['pythno']: there are ['pytest', 'python']" in done.stderr


def test_images_are_those_that_sandboxes_ask_for():
  assert BUILD.names() == list(NAMES)
  assert BUILD.tag_of('python') == SandboxSpec().image


# ---- one list of packages, and what it brought along ----------------------


@pytest.mark.parametrize('name', NAMES)
def test_the_dockerfile_installs_the_list_that_the_build_script_reads(name):
  text = (IMAGES / 'Dockerfile').read_text()
  assert 'COPY packages /tmp/packages\n' in text
  built = f'-t {BUILD.tag_of(name)} -f sandbox/images/Dockerfile'
  assert f'{built} \\\n#     sandbox/images/{name}\n' in text
  assert text.count('apt-get install') == 1
  piped = re.search(r'    (grep .*\\\n.*xargs .*);', text)[1]
  piped = piped.replace('/tmp/packages', str(IMAGES / name / 'packages'))
  said = subprocess.run(
    ['sh', '-c', piped.replace('apt-get', 'echo')],
    capture_output=True,
    text=True,
    check=True,
  ).stdout
  options = ['install', '-y', '--no-install-recommends']
  assert said.split() == [*options, *BUILD.packages(name)]


@pytest.mark.parametrize('name', NAMES)
def test_the_lock_has_all_that_is_asked_for_with_versions(name):
  lines = (IMAGES / name / 'packages.lock').read_text().splitlines()
  assert lines == sorted(lines, key=lambda line: line.encode())
  locked = dict(line.split('=', 1) for line in lines)
  assert len(locked) == len(lines) and all(locked.values())
  assert set(BUILD.packages(name)) <= set(locked)
  unwanted = {'gcc', 'gcc-12', 'g++', 'cpp', 'binutils', 'make', 'apt'}
  assert not unwanted & set(locked)


def test_images_of_one_suite_have_the_same_versions():
  locks = [
    dict(line.split('=', 1) for line in text.split())
    for text in ((IMAGES / n / 'packages.lock').read_text() for n in NAMES)
  ]
  for name in set(locks[0]) & set(locks[1]):
    assert locks[0][name] == locks[1][name], name


def test_what_differs_from_the_lock_is_said():
  assert BUILD.differences('a=1\nb=2\n', 'a=1\nb=2\n') == []
  assert BUILD.differences('a=1\nb=2:3=4\n', 'a=1.1\nc=3\n') == [
    'a: 1 in the lock, 1.1 in the build',
    'b: 2:3=4 in the lock, absent in the build',
    'c: absent in the lock, 3 in the build',
  ]


@pytest.mark.parametrize(
  ('name', 'code'),
  [
    ('python', 'import json, sqlite3, ssl, zoneinfo; print("fine")'),
    ('pytest', 'import os, pytest; print("fine"); os.stat("/usr/bin/git")'),
  ],
)  # fmt: skip
def test_the_images_have_what_they_are_for(name, code):
  with open_sandbox(spec_of(name), 'docker') as sandbox:
    result = sandbox.call(Call(argv=['python3', '-c', code]))
  assert (result.stdout, result.stderr) == ('fine\n', '')
