"""What a policy hands in: named files out of its sandbox, before that dies.

Floor 1, env/judge. The order is: the policy's last call ends, and with it
every process of its own; `take` copies what is named; the caller closes the
sandbox; only then a judge opens a fresh one. Nothing else of the policy's
sandbox goes on. Which files are named is a `Rule`; what they mean is for the
judges, which this file does not know.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import io
import json
from collections.abc import Mapping, Sequence

from agentjax.env.judge import tamper
from agentjax.env.judge.judgement import Judgement, Reason, failed
from agentjax.env.sandbox import Call, CallResult, CallStatus, Sandbox, archive

_TREE_S = 120.0
_MAX_ENTRIES = 20_000
STATUS_REASONS = {
  CallStatus.NONZERO: Reason.EXITED,
  CallStatus.SIGNAL: Reason.SIGNAL,
  CallStatus.TIMEOUT: Reason.TIMEOUT,
  CallStatus.OOM: Reason.OOM,
  CallStatus.PIDS: Reason.PIDS,
  CallStatus.OUTPUT_CAP: Reason.OUTPUT_CAP,
  CallStatus.DISK: Reason.DISK,
  CallStatus.GONE: Reason.GONE,
}


@dataclasses.dataclass(frozen=True)
class Rule:
  """Which files a task's policy hands in. Regular files, and nothing of them
  but path and contents: no modes, owners, times or links.

  Attributes:
    entry: the file that must be there.
    named: the others; those that are not there are not missed. None: every
      Python module of the policy's, but for tests and configuration.
    shadowing: with `named` None, also modules with names of the standard
      library's. A judge that shares no process with them can let them in.
    max_file: bytes of one file. max_files, max_bytes: of all.
  """

  entry: str
  named: tuple[str, ...] | None = None
  shadowing: bool = True
  max_file: int = 64 << 10
  max_files: int = 64
  max_bytes: int = 1 << 20

  def wants(self, path: str) -> bool:
    """True if `path` is handed in where it is a regular file."""
    if path == self.entry:
      return True
    if self.named is not None:
      return path in self.named
    *folders, name = path.split('/')
    stem, dot, suffix = name.partition('.')
    return (
      dot + suffix == '.py'
      and all(part.isidentifier() for part in (*folders, stem))
      and not {'test', 'tests', '__pycache__'} & set(folders)
      and not tamper.is_configuration(path)
      and (self.shadowing or not tamper.shadows(path))
    )


@dataclasses.dataclass(frozen=True)
class Submission:
  """What a judge is given.

  Attributes:
    problem: a FAIL that needs no judge: nothing fit to be judged is there.
    tamper: see `tamper.py`; the judge may add to it.
    refused: why other wanted files were left out, by path.
  """

  files: Mapping[str, bytes]
  problem: Judgement | None = None
  tamper: tuple[str, ...] = ()
  refused: Mapping[str, str] = dataclasses.field(default_factory=dict)


def take(
  sandbox: Sandbox,
  rule: Rule,
  given: Mapping[str, bytes],
  *,
  last: CallResult | None = None,
  commands: Sequence[str] = (),
) -> Submission:
  """Copies what the policy hands in. Close the sandbox after it.

  Args:
    given: the files that the policy was given in its folder, by path.
    last: how its last call ended, where it is known.
    commands: as in `tamper.reasons`.

  Raises:
    InfraError: of the policy's sandbox.
  """
  tree = read_tree(sandbox)
  if isinstance(tree, Judgement):
    # What it holds is not known, but for what the commands say.
    nothing = tamper.Tree({}, 0.0, cut=tree.reason is not Reason.GONE)
    marks = tamper.reasons({}, nothing, commands=commands)
    return Submission({}, tree, marks)
  strays = last is not None and last.reaped > 0
  marks = tamper.reasons(given, tree, strays=strays, commands=commands)
  wanted, refused, problem = _choose(rule, tree)
  if problem is None:
    got = sandbox.get(sorted(wanted), max_bytes=rule.max_bytes)
    refused.update(got.refused)
    if rule.entry in got.files:
      return Submission(got.files, None, marks, refused)
    why = refused[rule.entry]
    gone = 'sandbox is gone' in why
    problem = failed(Reason.GONE if gone else Reason.UNREADABLE, why)
  return Submission({}, problem, marks, refused)


def misfit(put: CallResult) -> Judgement | None:
  """A FAIL if what was handed in has no room where it was put."""
  if put.status is CallStatus.OK:
    return None
  reason = STATUS_REASONS[put.status]
  return failed(reason, f'the files do not fit: {put.stderr}')


def unpacked(submission: Submission, path: str, rule: Rule) -> Submission:
  """`submission` with the members of the archive `path` in its place.

  For tasks whose policy hands in an archive of its own making. One that holds
  anything but regular files and folders below it is a FAIL, and tampering:
  nobody makes such an archive by accident.
  """
  if submission.problem is not None:
    return submission
  source = io.BytesIO(submission.files[path])
  try:
    members = archive.read(source, rule.max_bytes, rule.max_files)
  except archive.ArchiveError as error:
    marks = (*submission.tamper, f'archive: {error}')
    problem = failed(Reason.BAD_ARCHIVE, str(error))
    return dataclasses.replace(
      submission, files={}, problem=problem, tamper=marks
    )
  files = {m.path: m.data for m in members if m.data is not None}
  return dataclasses.replace(submission, files=files)


def read_tree(sandbox: Sandbox) -> tamper.Tree | Judgement:
  """The policy's folder, or a FAIL where it leaves nothing to be read.

  Raises:
    InfraError: of the sandbox.
  """
  code = program_source('tree.py')
  room = sandbox.spec.output_cap // 4  # what is never left out of a stream
  entries: dict[str, tamper.Entry] = {}
  told, more, now = 0, True, 0.0
  while more and told < _MAX_ENTRIES:
    request = json.dumps({'skip': told, 'room': room - 100}).encode()
    result = sandbox.call(Call(code=code, stdin=request, timeout_s=_TREE_S))
    if not result.alive:
      return failed(Reason.GONE, result.status.value)
    if result.status is not CallStatus.OK or result.truncated[0]:
      said = f'{result.status.value}: {result.stderr[-500:]}'
      return failed(Reason.UNREADABLE, f'the folder: {said}')
    page = json.loads(result.stdout)
    for path, kind, size, sha256, mtime in page['entries']:
      entries[path] = tamper.Entry(kind, size, sha256, mtime)
    told += len(page['entries'])
    more, now = page['more'], now or page['now']
  return tamper.Tree(entries, now, cut=more)


def _choose(
  rule: Rule, tree: tamper.Tree
) -> tuple[set[str], dict[str, str], Judgement | None]:
  """(paths to copy, why not the others, what is wrong with the whole)."""
  entry = tree.entries.get(rule.entry)
  if entry is None:
    return set(), {}, failed(Reason.MISSING, f'no {rule.entry}')
  if entry.kind != 'file':
    why = f'{rule.entry} is a {entry.kind}'
    return set(), {}, failed(Reason.NOT_REGULAR, why)
  if entry.size > rule.max_file:
    why = f'{rule.entry}: {entry.size} bytes, at most {rule.max_file}'
    return set(), {}, failed(Reason.TOO_BIG, why)
  wanted, refused, total = set(), {}, 0
  for path, found in tree.entries.items():
    if found.kind == 'folder' or not rule.wants(path):
      continue
    if found.kind != 'file':
      refused[path] = f'a {found.kind}'
    elif found.size > rule.max_file:
      refused[path] = f'{found.size} bytes, at most {rule.max_file}'
    else:
      wanted.add(path)
      total += found.size
  if len(wanted) > rule.max_files:
    why = f'{len(wanted)} files, at most {rule.max_files}'
    return set(), refused, failed(Reason.TOO_MANY, why)
  if total > rule.max_bytes:
    why = f'{total} bytes of files, at most {rule.max_bytes}'
    return set(), refused, failed(Reason.TOO_BIG, why)
  return wanted, refused, None


def program_source(name: str) -> str:
  """The source of a file of this package that runs inside a sandbox."""
  package = importlib.resources.files('agentjax.env.judge')
  return package.joinpath(name).read_text('utf-8')
