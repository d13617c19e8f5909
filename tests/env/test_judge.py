"""Judges on real sandboxes: verdicts, and faults of ours that are none."""

import ast
import contextlib
import functools
import os
import random
import subprocess
import sys
import threading
import time

import pytest
from sandboxes import SPEC, backend_or_skip

from agentjax.env.base import InfraError
from agentjax.env.judge import (
  FunctionTask,
  JudgeFailed,
  Outcome,
  ProgramTask,
  Reason,
  Rule,
  Submission,
  as_tested,
  decide,
  judge_spec,
  take,
  verdicts,
)
from agentjax.env.judge.submission import program_source, unpacked
from agentjax.env.judge.workplace import Workplace
from agentjax.env.sandbox import Call, SandboxSpec, open_sandbox

ADD = FunctionTask(
  'add',
  lambda a, b: a + b,
  edges=((0, 0), (2, 3)),
  draw=lambda rng: (rng.randint(-99, 99), rng.randint(-99, 99)),
  draws=6,
)
RIGHT = {'solution.py': b'def add(a, b):\n  return a + b\n'}
HELLO = ProgramTask(
  lambda text: f'{sum(map(int, text.split()))}\n',
  edges=('0 0\n',),
  draw=lambda rng: f'{rng.randint(-99, 99)} {rng.randint(-99, 99)}\n',
  draws=3,
)


@pytest.fixture
def opener(backend):
  return functools.partial(open_sandbox, judge_spec(SPEC), backend)


# A container for each of many cases takes too long for every day.
MOSTLY = ['bwrap', pytest.param('docker', marks=pytest.mark.long)]


@pytest.fixture(params=MOSTLY)
def open_mostly(request):
  backend = backend_or_skip(request.param)
  return functools.partial(open_sandbox, judge_spec(SPEC), backend)


@pytest.fixture(params=MOSTLY)
def mostly(request):
  with open_sandbox(SPEC, backend_or_skip(request.param)) as sandbox:
    yield sandbox


def function(source, task=ADD):
  return Submission({'solution.py': source.encode()}), task.judge()


def verdict(opener, source, task=ADD):
  return decide(*function(source, task), opener)


# ---- functions -------------------------------------------------------------


def test_each_input_in_a_process_of_its_own(opener):
  source = (
    'N = []\ndef add(a, b):\n  N.append(1)\n  return a + b if len(N) < 2 else 0'
  )
  each = FunctionTask('add', ADD.reference, ADD.edges, ADD.draw, batch=1)
  assert verdict(opener, source, each).outcome is Outcome.PASS
  assert verdict(opener, source).reason is Reason.WRONG


def test_the_deadline_is_of_one_process(open_mostly):
  source = 'import time\ndef add(a, b):\n  time.sleep(0.4)\n  return a + b'
  task = FunctionTask(
    'add', ADD.reference, ADD.edges, ADD.draw, draws=3, timeout_s=1.5
  )
  assert verdict(open_mostly, source, task).reason is Reason.TIMEOUT
  each = FunctionTask(
    'add', ADD.reference, ADD.edges, ADD.draw, draws=3, timeout_s=1.5, batch=1
  )
  assert verdict(open_mostly, source, each).outcome is Outcome.PASS


def test_values_of_every_kind_travel(opener):
  values = [None, True, 0, -1, 2**200, 0.1, -0.0, 1e308, 'é\n\0', '', [], {}]
  values += [[1, [2.5, None]], {'a': {'b': [False]}}, float('inf')]
  echo = FunctionTask(
    'echo', lambda x: x, [(v,) for v in values], lambda rng: (values,), draws=1
  )
  source = 'def echo(x):\n  return x'
  assert str(verdict(opener, source, echo)) == 'PASS'
  nan = FunctionTask('echo', lambda x: x, [(float('nan'),)], lambda rng: (1,))
  assert str(verdict(opener, source, nan)) == 'PASS'


def test_a_reference_cannot_be_led_astray_by_its_input(open_mostly):
  task = FunctionTask('f', lambda x: x.pop(), [([1, 2],)], lambda rng: ([3],))
  assert str(verdict(open_mostly, 'def f(x):\n  return x[-1]', task)) == 'PASS'


def test_hidden_inputs_differ_and_can_be_had_again(open_mostly):
  seen = []
  task = FunctionTask(
    'f', lambda x: x, [], lambda rng: (rng.randint(0, 2**60),), draws=3
  )
  spied = FunctionTask(
    'f', lambda x: seen.append(x) or x, [], task.draw, draws=3
  )
  submission = Submission({'solution.py': b'def f(x):\n  return x\n'})
  for rng in (None, None, random.Random(1), random.Random(1)):
    assert (
      decide(submission, spied.judge(rng), open_mostly).outcome is Outcome.PASS
    )
  first, second, third, fourth = (seen[i : i + 3] for i in range(0, 12, 3))
  assert len(set(first + second + third)) == 9 and third == fourth


def test_an_answer_that_cannot_travel_is_the_tasks_fault(opener):
  task = FunctionTask('f', lambda x: {x}, [(1,)], lambda rng: (1,))
  with pytest.raises(TypeError, match='set'):
    verdict(opener, 'def f(x):\n  return x', task)


def test_long_answers(open_mostly):
  source = 'def f(n):\n  return "x" * n'
  most = [(60_000,)] * 20
  task = FunctionTask('f', lambda n: 'x' * n, most, lambda rng: (1,))
  assert str(verdict(open_mostly, source, task)) == 'PASS'
  longer = FunctionTask('f', lambda n: 'x' * n, [(70_000,)], lambda rng: (1,))
  found = verdict(open_mostly, source, longer)
  assert found.reason is Reason.BAD_REPLY


def test_modules_beside_it(opener):
  files = {
    'solution.py': b'from pack.core import add\nimport random\n'
    b'assert random.here\n',
    'pack/__init__.py': b'',
    'pack/core.py': b'def add(a, b):\n  return a + b\n',
    'random.py': b'here = True\n',  # as its own interpreter had it
  }
  found = decide(Submission(files), ADD.judge(), opener)
  assert str(found) == 'PASS'


# ---- programs --------------------------------------------------------------


@pytest.mark.parametrize(
  'source, reason',
  [
    ('print(sum(map(int, input().split())))', None),
    ('import sys\nprint(sum(map(int, sys.stdin.read().split())))', None),
    ('print("0")', Reason.WRONG),
    ('print("sum:", sum(map(int, input().split())))', Reason.WRONG),
    ('pass', Reason.WRONG),
    (
      'print(sum(map(int, input().split())))\nimport sys\nsys.exit(1)',
      Reason.EXITED,
    ),
    ('import os, time\nos.kill(os.getpid(), 9)\ntime.sleep(9)', Reason.SIGNAL),
    ('while True: pass', Reason.TIMEOUT),
    ('while True: print("x" * 1000)', Reason.OUTPUT_CAP),
    ('x = []\nwhile True: x.append(bytes(1 << 20))', Reason.OOM),
  ],
)
def test_programs(open_mostly, source, reason):
  task = ProgramTask(HELLO.reference, HELLO.edges, HELLO.draw, timeout_s=2.0)
  found = verdict(open_mostly, source, task)
  assert found.reason is reason, found.details


def test_a_program_whose_right_output_is_empty_is_refused(open_mostly):
  task = ProgramTask(lambda text: '\n', ['1'], lambda rng: '1')
  with pytest.raises(ValueError, match='correct the task'):
    verdict(open_mostly, 'pass', task)


# ---- what is handed in -----------------------------------------------------


def taken(sandbox, script, rule=None, given=None):
  sandbox.put(given or {})
  last = sandbox.call(Call(argv=['sh', '-c', script], timeout_s=20))
  return take(sandbox, rule or Rule('solution.py'), given or {}, last=last)


def test_only_named_files_are_copied_and_as_bytes(fresh):
  script = """
    printf 'x = 1\\n' > solution.py; chmod 755 solution.py
    mkdir -p pack tests; echo y > pack/core.py; echo z > tests/a.py
    echo no > data.txt; ln -s solution.py link.py; mkfifo pipe.py
    printf '\\377\\000' > bytes.py; head -c 70000 /dev/zero > large.py
  """
  found = taken(fresh, script)
  assert found.problem is None and found.tamper == ()
  assert found.files == {
    'solution.py': b'x = 1\n',
    'pack/core.py': b'y\n',
    'bytes.py': b'\xff\x00',
  }
  assert found.refused == {
    'link.py': 'a link',
    'pipe.py': 'a special',
    'large.py': '70000 bytes, at most 65536',
  }


def test_a_folder_on_the_way_that_is_a_link(fresh):
  script = 'mkdir /tmp/p; echo y > /tmp/p/core.py; ln -s /tmp/p pack; '
  rule = Rule('solution.py', named=('pack/core.py',))
  found = taken(fresh, script + 'echo > solution.py', rule)
  assert set(found.files) == {'solution.py'}


@pytest.mark.parametrize(
  'script, rule, reason',
  [
    ('true', Rule('solution.py'), Reason.MISSING),
    ('mkdir solution.py', Rule('solution.py'), Reason.NOT_REGULAR),
    ('ln -s a solution.py', Rule('solution.py'), Reason.NOT_REGULAR),
    ('mkfifo solution.py', Rule('solution.py'), Reason.NOT_REGULAR),
    ('head -c 20 /dev/zero > s.py', Rule('s.py', max_file=19), Reason.TOO_BIG),
    (
      'for i in 1 2 3; do echo > a$i.py; done',
      Rule('a1.py', max_files=2),
      Reason.TOO_MANY,
    ),
    (
      'for i in 1 2 3; do head -c 9 /dev/zero > a$i.py; done',
      Rule('a1.py', max_bytes=20),
      Reason.TOO_BIG,
    ),
  ],
)
def test_nothing_fit_to_be_judged(mostly, script, rule, reason):
  assert taken(mostly, script, rule).problem.reason is reason


def test_modes_do_not_matter(fresh):
  script = 'echo x > solution.py; chmod 0 solution.py'
  assert taken(fresh, script).files == {'solution.py': b'x\n'}
  # Nothing is hidden from the look by closing a folder.
  found = taken(fresh, 'mkdir d; > d/conftest.py; chmod 0 d')
  assert found.tamper == ('configuration: d/conftest.py is new',)


def test_a_sandbox_that_the_policy_ended(backend):
  spec = SandboxSpec(lifetime_s=2.0)
  with open_sandbox(spec, backend) as sandbox:
    found = taken(sandbox, 'echo > solution.py; sleep 20')
    # What can be told without a look is told.
    told = take(sandbox, Rule('solution.py'), {}, commands=['> reward.txt'])
  assert told.tamper == ('reward file: reward.txt in a command',)
  assert found.tamper == () and found.problem.reason is Reason.GONE
  never = functools.partial(pytest.fail, 'no judge is needed')
  assert decide(found, ADD.judge(), never).reason is Reason.GONE


def test_a_folder_of_many_files_is_told_page_by_page(fresh):
  given = {f'tests/t{i}.py': b'' for i in range(60)}
  script = 'echo > solution.py; i=0; while [ $i -lt 300 ]; do echo > f$i; '
  script += 'i=$((i+1)); done; rm tests/t59.py'
  found = taken(fresh, script, given=given)
  assert found.tamper == ('tests: tests/t59.py is gone',)
  assert set(found.files) == {'solution.py'}


def test_names_that_are_no_text(mostly):
  script = """
    echo > solution.py; touch -- '-rf' "$(printf 'a\\377b')"
    touch "$(printf 'a\\nb')" "$(printf '%0250d' 0)"
    d=$(printf '%0200d' 0); for i in 1 2 3 4 5; do mkdir $d && cd $d; done
  """
  found = taken(mostly, script)
  assert found.problem is None and found.tamper == ()


def test_no_module_of_the_policys_is_imported_in_looking(mostly):
  script = 'for m in hashlib json stat time encodings _sha256 _hashlib; do '
  script += 'echo "import os; os._exit(0)" > $m.py; done; echo > solution.py'
  found = taken(mostly, script)
  assert set(found.files) >= {'solution.py', 'hashlib.py'}
  assert all(mark.startswith('shadow') for mark in found.tamper)


def test_files_with_holes_cost_no_time(mostly):
  script = 'echo > solution.py; i=0; while [ $i -lt 200 ]; do '
  script += 'truncate -s 16M h$i; i=$((i+1)); done'
  start = time.monotonic()
  assert taken(mostly, script).problem is None
  assert time.monotonic() - start < 15


PACK = """
import io, os, tarfile
def add(tar, name, data=b'x', **fields):
  info = tarfile.TarInfo(name)
  for field, value in fields.items():
    setattr(info, field, value)
  info.size = len(data)
  tar.addfile(info, io.BytesIO(data))
with tarfile.open('work.tar', 'w', format=tarfile.USTAR_FORMAT) as tar:
  add(tar, 'solution.py', b'def add(a, b): return a + b')
  add(tar, 'pack/core.py')
  {}
"""


@pytest.mark.parametrize(
  'line',
  [
    'add(tar, "../evil.py")',
    'add(tar, "/etc/evil.py")',
    'add(tar, "a/../../evil.py")',
    'add(tar, "h.py", b"", type=tarfile.LNKTYPE, linkname="/etc/passwd")',
    'add(tar, "l.py", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")',
    'add(tar, "d", b"", type=tarfile.CHRTYPE)',
    'add(tar, "p", b"", type=tarfile.FIFOTYPE)',
    'add(tar, "solution.py")',
    'add(tar, "s.py", mode=0o4755)',
    '[add(tar, f"m{i}.py") for i in range(100)]',
    'add(tar, "big.py", bytes(2 << 20))',
    'tar.fileobj.write(b"junk" * 200)',
  ],
)
def test_an_archive_that_no_folder_of_files_makes(mostly, line):
  rule = Rule('work.tar', named=(), max_file=4 << 20, max_bytes=4 << 20)
  mostly.call(Call(code=PACK.format(line)))
  found = take(mostly, rule, {})
  assert found.problem is None
  within = Rule('solution.py')
  opened = unpacked(found, 'work.tar', within)
  assert opened.problem.reason is Reason.BAD_ARCHIVE and opened.files == {}
  judgement = decide(opened, ADD.judge(), functools.partial(pytest.fail, 'no'))
  assert judgement.outcome is Outcome.FAIL
  assert judgement.tamper[0].startswith('archive: ')
  assert unpacked(opened, 'work.tar', within) == opened


def test_an_archive_of_files(fresh):
  fresh.call(Call(code=PACK.format('pass')))
  found = unpacked(take(fresh, Rule('work.tar'), {}), 'work.tar', Rule('s'))
  assert set(found.files) == {'solution.py', 'pack/core.py'}
  assert found.problem is None and found.tamper == ()


def test_a_workplace_remembers_what_sessions_did(backend):
  given = {'tests/a.py': b'assert True\n', 'solution.py': b''}
  open_one = functools.partial(open_sandbox, SPEC, backend)
  with Workplace(SPEC, open_one, given) as workplace:
    assert workplace.facts == {}
    shell, python = workplace.session('shell'), workplace.session('python')
    shell.run('echo 1 > /logs/verifier/reward.txt')
    python.run('import threading, time')
    python.run(
      '[threading.Thread(target=time.sleep, args=(9,)).start() '
      'for _ in range(20)]'
    )
    python.run('open("tests/a.py", "a").write("#")')
    found = workplace.hand_in(Rule('solution.py'))
    with pytest.raises(InfraError, match='closed'):
      workplace.call(Call(argv=['true']))
  assert [mark.split(':')[0] for mark in found.tamper] == [
    'tests',
    'reward file',
  ]
  assert set(found.files) == {'solution.py'}


# ---- faults of ours --------------------------------------------------------


def name_of(sandbox):
  return sandbox.facts.get('container') or sandbox.facts['pid']


def end(sandbox):
  """Ends a sandbox from outside, as a fault of the infrastructure does."""
  if sandbox.facts['backend'] == 'docker':
    command = ['docker', 'kill', name_of(sandbox)]
    subprocess.run(command, check=True, capture_output=True)
  else:
    os.kill(sandbox.facts['pid'], 9)


class Dying:
  """A sandbox that is ended as soon as it is asked for a call."""

  def __init__(self, inner):
    self._inner = inner

  def __getattr__(self, name):
    return getattr(self._inner, name)

  def call(self, call):
    end(self._inner)
    return self._inner.call(call)

  def __enter__(self):
    return self

  def __exit__(self, *exc):
    self._inner.close()


def failing(opener, times, opened):
  """An opener whose first `times` sandboxes die in a call."""

  def open_one():
    opened.append(opener())
    return Dying(opened[-1]) if len(opened) <= times else opened[-1]

  return open_one


SUM = 'def add(a, b):\n  return {}'


@pytest.mark.parametrize('answer, paid', [('a + b', 1.0), ('0', 0.0)])
def test_a_judge_that_dies_is_tried_again(opener, answer, paid):
  opened = []
  submission, judge = function(SUM.format(answer))
  found = decide(submission, judge, failing(opener, 2, opened))
  assert as_tested(found) == paid and len(opened) == 3
  assert len({name_of(sandbox) for sandbox in opened}) == 3


def test_a_judge_that_always_dies_is_no_verdict(opener):
  opened = []
  submission, judge = function(SUM.format('0'))
  found = decide(submission, judge, failing(opener, 9, opened))
  assert found.outcome is Outcome.INFRA and len(opened) == 3
  with pytest.raises(JudgeFailed, match='3 attempts'):
    as_tested(found)


def test_a_judge_that_dies_in_the_middle_is_no_verdict(opener):
  def open_one():
    sandbox = opener()
    threading.Timer(0.3, end, (sandbox,)).start()
    return sandbox

  source = 'import time\ndef add(a, b):\n  time.sleep(4)'
  found = decide(*function(source), open_one)
  assert found.outcome is Outcome.INFRA, found.details


def test_an_engine_that_is_down_is_no_verdict():
  def down():
    raise InfraError('engine down')

  found = decide(*function('x'), down)
  assert found.outcome is Outcome.INFRA and 'engine down' in found.details


def test_a_fault_of_ours_in_the_policys_sandbox_is_raised(fresh):
  fresh.put(RIGHT)
  end(fresh)
  with pytest.raises(InfraError):
    take(fresh, Rule('solution.py'), {})


def test_a_machine_too_slow_to_judge_is_no_verdict(opener, monkeypatch):
  source = 'import time\ndef add(a, b):\n  time.sleep(9)'
  task = FunctionTask(
    'add', ADD.reference, ADD.edges, ADD.draw, timeout_s=9, input_s=0.3
  )
  assert verdict(opener, source, task).reason is Reason.TIMEOUT
  monkeypatch.setattr(verdicts, 'PACE_S', 0.0)
  found = verdict(opener, source, task)
  assert found.outcome is Outcome.INFRA and 'too slow' in found.details


def test_sandboxes_of_judges_are_closed(opener):
  opened = []
  decide(*function('def add(a, b): return 0'), failing(opener, 0, opened))
  with contextlib.suppress(InfraError, Exception):
    opened[0].call(Call(argv=['true']))
    pytest.fail('the sandbox is open')


# ---- figures ---------------------------------------------------------------


@pytest.mark.long
def test_a_verdict_takes_less_than_a_second():
  backend = backend_or_skip('docker')
  opener = functools.partial(open_sandbox, judge_spec(), backend)
  took = []
  for _ in range(15):
    start = time.monotonic()
    assert decide(Submission(RIGHT), ADD.judge(), opener).reason is None
    took.append(time.monotonic() - start)
  assert sorted(took)[7] < 1.0, took


@pytest.mark.parametrize('name', ['tree', 'candidate', 'run_tests'])
def test_what_runs_inside_knows_nobody(name):
  tree = ast.parse(program_source(f'{name}.py'))
  names = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names |= {alias.name.split('.')[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      names.add(node.module.split('.')[0])
  assert names - set(sys.stdlib_module_names) <= {'pytest'}
  module = f'agentjax.env.judge.{name}'
  code = f'import sys; before = list(sys.path); import {module}; '
  code += 'print(before == sys.path, "pytest" in sys.modules)'
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True
  )
  assert done.stdout == 'True False\n', done.stderr
