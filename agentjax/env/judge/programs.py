"""Input/output judging of a program: it reads stdin and prints.

Floor 1, env/judge. The form of programming contests. Each hidden input gets a
fresh process of the policy's program in the judge's sandbox; what it prints is
its answer by definition, so noise is wrong there. The text is compared on the
host, with what a reference says that is never in any sandbox.
"""

from __future__ import annotations

import dataclasses
import random
import secrets
from collections.abc import Callable, Mapping, Sequence

from agentjax.env.judge.judgement import Judgement, Reason, failed, passed
from agentjax.env.judge.submission import STATUS_REASONS, Rule, misfit
from agentjax.env.judge.values import SameText, same_tokens
from agentjax.env.judge.verdicts import Judge, check_pace
from agentjax.env.sandbox import Call, CallStatus, Sandbox


@dataclasses.dataclass(frozen=True)
class ProgramTask:
  """A program that a policy writes.

  Attributes:
    reference: what it must print, from its input; on the host alone.
    edges: inputs that every verdict uses. draw: makes a random one.
    same: compares what was printed with what is right.
    argv: runs `entry` in the folder that it lies in.
    timeout_s: of each input.
  """

  reference: Callable[[str], str]
  edges: Sequence[str]
  draw: Callable[[random.Random], str]
  entry: str = 'solution.py'
  argv: tuple[str, ...] = ('python3', '-s', '-E', '-B', 'solution.py')
  draws: int = 20
  same: SameText = same_tokens
  timeout_s: float = 5.0

  def rule(self, named: tuple[str, ...] | None = None) -> Rule:
    """Which files are handed in."""
    return Rule(self.entry, named)

  def judge(self, rng: random.Random | None = None) -> Judge:
    """A judge for `verdicts.decide`; `rng` makes the hidden inputs."""
    rng = rng or random.Random(secrets.randbits(64))

    def judge(sandbox: Sandbox, files: Mapping[str, bytes]) -> Judgement:
      return judge_program(rng, self, sandbox, files)

    return judge


def judge_program(
  rng: random.Random,
  task: ProgramTask,
  sandbox: Sandbox,
  files: Mapping[str, bytes],
) -> Judgement:
  """PASS if the program prints what is right for every hidden input.

  Args:
    sandbox: fresh; of no use afterwards.

  Raises:
    InfraError: of the sandbox. ValueError: the reference prints nothing.
  """
  inputs = [*task.edges, *(task.draw(rng) for _ in range(task.draws))]
  if (problem := misfit(sandbox.put(files))) is not None:
    return problem
  for number, text in enumerate(inputs, 1):
    expected = task.reference(text)
    call = Call(
      argv=list(task.argv), stdin=text.encode(), timeout_s=task.timeout_s
    )
    result = sandbox.call(call)
    where = f'input {number} of {len(inputs)}, {text[:200]!r}'
    if result.status is CallStatus.TIMEOUT:
      check_pace(sandbox)
    if result.status is not CallStatus.OK:
      said = f'{where}: {result.stderr[-300:]}'
      return failed(STATUS_REASONS[result.status], said)
    if result.truncated[0]:
      return failed(Reason.OUTPUT_CAP, where)
    if not task.same(result.stdout, expected):
      got = f'{result.stdout[:300]!r}, not {expected[:300]!r}'
      return failed(Reason.WRONG, f'{where}: {got}')
  return passed(f'{len(inputs)} inputs')
