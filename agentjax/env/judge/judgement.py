"""A verdict, and the reward that it is worth.

Floor 1, env/judge. Every judge ends in a `Judgement`; this file knows none of
them. PASS and FAIL speak of the policy. INFRA speaks of us: it is no reward
and becomes an `InfraError`, so that the episode is masked. A policy must not
be able to turn a FAIL into it; what its code can bring about is a FAIL.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import Any

from agentjax.env.base import InfraError

_MAX_DETAILS = 2000
_UNPRINTABLE = re.compile(r'[^\x20-\x7e]')


class JudgeFailed(InfraError):
  """No verdict could be had, after all attempts."""


class Outcome(enum.Enum):
  """What a judgement says."""

  PASS = 'PASS'
  FAIL = 'FAIL'
  INFRA = 'INFRA'


class Reason(enum.Enum):
  """Why not PASS."""

  # Of what was handed in.
  GONE = 'sandbox_gone'  # the policy's sandbox ended by its own doing
  MISSING = 'missing'
  NOT_REGULAR = 'not_a_regular_file'
  UNREADABLE = 'unreadable'
  TOO_BIG = 'too_big'
  TOO_MANY = 'too_many_files'
  BAD_ARCHIVE = 'bad_archive'
  # Of how its process ended.
  EXITED = 'exited'
  SIGNAL = 'signal'
  TIMEOUT = 'timeout'
  OOM = 'oom'
  PIDS = 'pids'
  DISK = 'disk'
  OUTPUT_CAP = 'output_cap'
  # Of what it answered.
  RAISED = 'raised'
  BAD_REPLY = 'bad_reply'
  WRONG = 'wrong'
  CANARY = 'canary'  # a test that must fail was reported as passed
  # Of us.
  INFRA = 'infra'


@dataclasses.dataclass(frozen=True)
class Judgement:
  """One verdict.

  Attributes:
    reason: None for PASS, and only then.
    tamper: what the policy changed that was not its own, as in `tamper.py`.
      Stands beside the outcome and does not decide it. Printable ASCII on one
      line: it names files of the policy's.
    details: for a person to read; bounded. May hold text of the policy and
      hidden inputs: never to be shown to a policy.
  """

  outcome: Outcome
  reason: Reason | None = None
  tamper: tuple[str, ...] = ()
  details: str = ''

  def __post_init__(self):
    if (self.outcome is Outcome.PASS) != (self.reason is None):
      raise ValueError(
        f'{self.outcome} with reason {self.reason}: all but PASS have one'
      )
    if (self.outcome is Outcome.INFRA) != (self.reason is Reason.INFRA):
      raise ValueError(f'{self.outcome} with reason {self.reason}')
    marks = tuple(_UNPRINTABLE.sub('?', mark) for mark in self.tamper)
    object.__setattr__(self, 'tamper', marks)
    text = self.details.encode('utf-8', 'backslashreplace').decode()
    if len(text) > _MAX_DETAILS:
      text = text[: _MAX_DETAILS - 3] + '...'
    object.__setattr__(self, 'details', text)

  def __str__(self) -> str:
    text = self.outcome.value
    if self.reason:
      text += f'({self.reason.value})'
    return text + (f' TAMPER({", ".join(self.tamper)})' if self.tamper else '')

  def to_json(self) -> dict[str, Any]:
    """As JSON; `from_json` is the inverse."""
    return {
      'outcome': self.outcome.value,
      'reason': None if self.reason is None else self.reason.value,
      'tamper': list(self.tamper),
      'details': self.details,
    }

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> Judgement:
    """Inverse of `to_json`.

    Raises:
      KeyError, TypeError, ValueError: it is not what `to_json` makes.
    """
    reason = data['reason']
    return cls(
      Outcome(data['outcome']),
      None if reason is None else Reason(reason),
      tuple(data['tamper']),
      data['details'],
    )


def failed(reason: Reason, details: str = '') -> Judgement:
  """A FAIL."""
  return Judgement(Outcome.FAIL, reason, details=details)


def passed(details: str = '') -> Judgement:
  """A PASS."""
  return Judgement(Outcome.PASS, details=details)


# Two ways to pay. Which one is a setting of the environment: pass the function.


def as_tested(judgement: Judgement) -> float:
  """1 for PASS, 0 for FAIL, tampered or not.

  Raises:
    JudgeFailed: there is no verdict.
  """
  if judgement.outcome is Outcome.INFRA:
    raise JudgeFailed(judgement.details)
  return float(judgement.outcome is Outcome.PASS)


def nothing_if_tampered(judgement: Judgement) -> float:
  """As `as_tested`, but 0 where the policy tampered.

  Raises:
    JudgeFailed: there is no verdict.
  """
  paid = as_tested(judgement)  # no verdict is none, tampered or not
  return 0.0 if judgement.tamper else paid
