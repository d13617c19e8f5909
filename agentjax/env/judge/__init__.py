"""Judging: verdicts that a hostile policy cannot fool.

Floor 1, env. The way to one: the policy's last call ends; `take` copies the
named files out of its sandbox, and notes what it tampered with; its sandbox is
closed; `decide` opens a fresh one of the clean image and lets a judge find
out; a `Journal` makes the verdict final. Judges: of functions (the default),
of programs, and of repositories whose tests must run in one process with the
code that they test. What is right never enters a sandbox.
"""

from agentjax.env.judge.functions import FunctionTask
from agentjax.env.judge.journal import Journal
from agentjax.env.judge.judgement import (
  JudgeFailed,
  Judgement,
  Outcome,
  Reason,
  as_tested,
  nothing_if_tampered,
)
from agentjax.env.judge.programs import ProgramTask
from agentjax.env.judge.repositories import RepositoryTask
from agentjax.env.judge.submission import Rule, Submission, take
from agentjax.env.judge.verdicts import decide, judge_spec

__all__ = [
  'FunctionTask',
  'Journal',
  'JudgeFailed',
  'Judgement',
  'Outcome',
  'ProgramTask',
  'Reason',
  'RepositoryTask',
  'Rule',
  'Submission',
  'as_tested',
  'decide',
  'judge_spec',
  'nothing_if_tampered',
  'take',
]
