"""Judging a repository whose tests must run in one process with its code.

Floor 1, env/judge. Weaker than input/output judging, which is to be preferred
wherever a task allows it: code under test can rewrite the test run that it is
in. What is done about it: a clean checkout, in which only the policy's named
files are replaced; tests restored last, from the host or the image; a test run
that reads no configuration of the policy's (`run_tests.py`); every expected
test must be reported as passed, once, in all of its phases; and canaries,
tests that must fail, stand among the restored ones under names like theirs. A
run that reports one as passed, or ends with another exit code than that of
failed tests, was forged: FAIL, with the flag. A forger that tells canaries
from tests would not be noticed.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import random
import secrets
from collections.abc import Mapping

from agentjax.env.judge.judgement import (
  JudgeFailed,
  Judgement,
  Reason,
  failed,
  passed,
)
from agentjax.env.judge.submission import (
  STATUS_REASONS,
  Rule,
  misfit,
  program_source,
)
from agentjax.env.judge.values import parse_strictly
from agentjax.env.judge.verdicts import Judge, check_pace
from agentjax.env.sandbox import Call, CallResult, CallStatus, Sandbox

_TESTS_FAILED = 1  # pytest's exit code where tests have failed
_WHENS = ('setup', 'call', 'teardown')
_COPY_S = 60.0


@dataclasses.dataclass(frozen=True)
class RepositoryTask:
  """A repository, and the tests that decide.

  Attributes:
    expected: ids of the tests that must pass, as pytest names them:
      'tests/test_a.py::test_b'.
    tests: the files of the tests, by path; never the policy's.
    base: the clean checkout's other files, by path.
    image_folder: a folder of the image that holds the checkout, instead.
    conftest: the tests need the conftest.py files among `tests`.
    rule: which files the policy hands in.
    timeout_s: of the whole test run.
  """

  expected: tuple[str, ...]
  tests: Mapping[str, bytes]
  rule: Rule
  base: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
  image_folder: str | None = None
  conftest: bool = False
  timeout_s: float = 60.0

  def __post_init__(self):
    if not self.expected:
      raise ValueError('expected is empty: then nothing decides')
    for name in self.expected:
      if name.split('::')[0] not in self.tests:
        raise ValueError(f'expected test {name!r} is in no file of tests')

  def judge(self, rng: random.Random | None = None) -> Judge:
    """A judge for `verdicts.decide`; `rng` makes the canaries."""
    rng = rng or random.Random(secrets.randbits(64))

    def judge(sandbox: Sandbox, files: Mapping[str, bytes]) -> Judgement:
      return judge_repository(rng, self, sandbox, files)

    return judge


def judge_repository(
  rng: random.Random,
  task: RepositoryTask,
  sandbox: Sandbox,
  files: Mapping[str, bytes],
) -> Judgement:
  """PASS if every expected test passes and every canary fails.

  Args:
    sandbox: fresh, of an image with pytest; of no use afterwards.

  Raises:
    InfraError: of the sandbox.
  """
  tests, canaries = plant_canaries(rng, task.tests, task.expected)
  laid_out = _lay_out(task, sandbox, files, tests)
  if (problem := misfit(laid_out)) is not None:
    return problem
  request = {
    'files': sorted({name.split('::')[0] for name in task.expected}),
    'conftest': task.conftest,
  }
  result = sandbox.call(
    Call(
      argv=['python3', '-I', '-B', '-c', program_source('run_tests.py')],
      stdin=json.dumps(request).encode(),
      timeout_s=task.timeout_s,
    )
  )
  if result.status is CallStatus.TIMEOUT:
    check_pace(sandbox)
  return _read(task, result, canaries)


def plant_canaries(
  rng: random.Random, tests: Mapping[str, bytes], expected: tuple[str, ...]
) -> tuple[dict[str, bytes], set[str]]:
  """(the tests with one that must fail in each file, the ids of these).

  Their names are made of the names beside them, and what they claim is false
  in a way that only working it out shows.
  """
  out, canaries = dict(tests), set()
  for path in sorted({name.split('::')[0] for name in expected}):
    names = [n.split('[')[0] for n in expected if n.split('::')[0] == path]
    stem = rng.choice(names).rsplit('::', 1)[-1]
    taken = out[path].decode('utf-8', 'replace')
    number = rng.randint(2, 99)
    while f'{stem}_{number}' in taken:
      number += 1
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    wrong = a * b + rng.choice((-2, -1, 1, 2))
    claim = rng.choice(
      (
        f'  assert {a} * {b} == {wrong}\n',
        f'  result = [x * {b} for x in ({a},)]\n  assert result == [{wrong}]\n',
        f'  if {a} * {b} != {wrong}:\n    raise ValueError({a})\n',
      )
    )
    canary = f'\n\ndef {stem}_{number}():\n{claim}'
    out[path] = out[path].rstrip(b'\n') + b'\n' + canary.encode()
    canaries.add(f'{path}::{stem}_{number}')
  return out, canaries


def _lay_out(task, sandbox: Sandbox, files, tests) -> CallResult:
  """The checkout, what was handed in, then the tests over both.

  Raises:
    JudgeFailed: the checkout does not come about, which is no doing of the
      policy's: nothing of it is there yet.
  """
  if task.image_folder is not None:
    argv = ['cp', '-R', '--', f'{task.image_folder}/.', '.']
    _check_ours(sandbox.call(Call(argv=argv, timeout_s=_COPY_S)))
  _check_ours(sandbox.put({**task.base, **tests}))
  put = sandbox.put(files)
  return put if put.status is not CallStatus.OK else sandbox.put(tests)


def _check_ours(result: CallResult) -> None:
  if result.status is not CallStatus.OK:
    raise JudgeFailed(
      f'the clean checkout cannot be laid out: {result.status.value}, '
      f'{result.stderr[:300]}: correct the task or the limits of the sandbox'
    )


def _read(task, result: CallResult, canaries: set[str]) -> Judgement:
  if result.status not in (CallStatus.OK, CallStatus.NONZERO):
    return failed(STATUS_REASONS[result.status], result.status.value)
  if result.truncated[0]:
    return failed(Reason.OUTPUT_CAP, f'{result.truncated[0]} bytes too many')
  try:
    reports = _reports(result.stdout)
  except ValueError as error:
    return failed(Reason.BAD_REPLY, str(error))
  sound = dict.fromkeys(_WHENS, 'passed')
  canary = {**sound, 'call': 'failed'}
  for name in sorted(canaries):
    if reports.get(name) != canary and name in reports:
      mark = 'judge: a test that must fail was not reported as failed'
      judgement = failed(Reason.CANARY, f'{name}: {reports[name]}')
      return dataclasses.replace(judgement, tamper=(mark,))
  wrong = [n for n in task.expected if reports.get(n) != sound]
  if wrong:
    found = reports.get(wrong[0], 'no report')
    return failed(
      Reason.WRONG,
      f'{len(wrong)} of {len(task.expected)} tests; {wrong[0]}: {found}',
    )
  if result.exit != _TESTS_FAILED or not canaries <= reports.keys():
    judgement = failed(Reason.CANARY, f'exit code {result.exit}')
    mark = 'judge: the test run ended as none with a failed test does'
    return dataclasses.replace(judgement, tamper=(mark,))
  return passed(f'{len(task.expected)} tests')


def _reports(text: str) -> dict[str, dict[str, str]]:
  """{id: {phase: outcome}}; a phase stands only once."""
  found: dict[str, dict[str, str]] = collections.defaultdict(dict)
  lines = text.split('\n')
  if lines.pop():
    raise ValueError('the last line has no end')
  for line in lines:
    data = parse_strictly(line)
    if not isinstance(data, dict) or data.keys() != {'id', 'when', 'outcome'}:
      raise ValueError('a line with other keys than id, when and outcome')
    if not all(isinstance(value, str) for value in data.values()):
      raise ValueError('a report that is not text')
    phases = found[data['id']]
    if data['when'] in phases:
      raise ValueError(f'two reports of {data["id"]}, {data["when"]}')
    phases[data['when']] = data['outcome']
  return dict(found)
