"""From a submission to a verdict: a fresh sandbox, and no second guess.

Floor 1, env/judge. What all judges have in common: a sandbox of a clean image
that no policy has seen, up to three attempts where the infrastructure fails
(what was handed in is kept on the host), and the flag of the submission beside
the verdict. A judge is a function of an open sandbox and files; how it finds
out is its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from agentjax.env.base import InfraError
from agentjax.env.judge.judgement import Judgement, Outcome, Reason
from agentjax.env.judge.submission import Submission
from agentjax.env.sandbox import Call, Opener, Sandbox, SandboxSpec

ATTEMPTS = 3
PACE_S = 2.0
_PACE_TIMEOUT_S = 30.0
_MAX_OUTPUT = 8 << 20
# Not that of policies: the kernel counts pipes, signals and descriptors under
# way by user, over all sandboxes, and theirs shall not be missing here.
_UID = 65533
# (fresh sandbox, what was handed in) -> verdict
Judge = Callable[[Sandbox, Mapping[str, bytes]], Judgement]


def judge_spec(spec: SandboxSpec | None = None) -> SandboxSpec:
  """`spec` with what suits judging: floods end early, the host waits longer.

  Of an answer that is no flood nothing is left out. The host's patience is no
  matter of time for the policy, whose own deadline is kept inside: it keeps a
  busy machine from being taken for a broken one.
  """
  return dataclasses.replace(
    spec or SandboxSpec(),
    output_cap=_MAX_OUTPUT,
    output_kill=_MAX_OUTPUT,
    grace_s=60.0,
    uid=_UID,
  )


def decide(
  submission: Submission,
  judge: Judge,
  open_sandbox: Opener,
  attempts: int = ATTEMPTS,
) -> Judgement:
  """The verdict on `submission`; the policy's sandbox must be closed.

  Never raises for what the infrastructure does: after `attempts` failures the
  verdict is INFRA, with the last error in its details.
  """
  if submission.problem is not None:
    return _marked(submission.problem, submission)
  error: InfraError | None = None
  for _ in range(attempts):
    try:
      with open_sandbox() as sandbox:
        return _marked(judge(sandbox, submission.files), submission)
    except InfraError as caught:
      error = caught
  details = f'{attempts} attempts, the last: {type(error).__name__}: {error}'
  return Judgement(
    Outcome.INFRA, Reason.INFRA, submission.tamper, details=details
  )


def check_pace(sandbox: Sandbox) -> None:
  """Returns if the machine is fast enough for a deadline to mean something.

  To be asked after a deadline was missed, when nothing of the candidate runs
  any more: what it did cannot slow this down, another load of the host can.

  Raises:
    InfraError: an interpreter that does nothing took longer than PACE_S.
  """
  call = Call(argv=['python3', '-I', '-c', ''], timeout_s=_PACE_TIMEOUT_S)
  result = sandbox.call(call)
  if result.alive and result.duration_s > PACE_S:
    raise InfraError(
      f'this machine is too slow to judge: an interpreter that does nothing '
      f'took {result.duration_s:.1f} s; run fewer things at once'
    )


def _marked(judgement: Judgement, submission: Submission) -> Judgement:
  marks = (*submission.tamper, *judgement.tamper)
  return dataclasses.replace(judgement, tamper=tuple(dict.fromkeys(marks)))
