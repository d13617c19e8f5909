"""Recorded sandboxes: served byte for byte, and where another one differs."""

import dataclasses
import statistics
import threading
import time

import pytest
from sandboxes import SPEC

from agentjax import sandbox_record, storage
from agentjax.env.base import InfraError
from agentjax.env.sandbox import (
  Call,
  CallResult,
  CallStatus,
  SandboxBug,
  open_sandbox,
)
from agentjax.env.sandbox.replay import (
  Diverged,
  NoResult,
  Recording,
  Replaying,
  ReplayingOpener,
)
from agentjax.env.sandbox.spec import Died, HostDeadline
from agentjax.env.sandbox.verification import verify

CALLS = (
  Call(code='print(6 * 7)'),
  Call(argv=['sh', '-c', 'echo out; echo err >&2; exit 3']),
  Call(code='import sys; sys.stdout.buffer.write(b"\\xff\\x00" * 9)'),
  Call(code='print(input())', stdin='é\n'.encode()),
  Call(code='for i in range(9999): print(i)'),
  Call(argv=['sh', '-c', 'kill -9 $$']),
  Call(
    code='import time; print("a", flush=True); time.sleep(9)', timeout_s=0.3
  ),
  Call(code='x = "\ud83d\ude42"'),
)
FILES = {'a/b.bin': bytes(range(256)) * 99, '$bytes': b'', 'é': b'x'}


def exercise(sandbox):
  """What each operation returned, in order."""
  out = [sandbox.call(call) for call in CALLS]
  out.append(sandbox.put(FILES))
  out.append(sandbox.put({'a': b'in the way of a folder'}))
  out.append(sandbox.get([*FILES, 'none'], max_bytes=1 << 20))
  return out


def converse(sandbox):
  """Sessions in turns, one that ends itself, and one that a call ends."""
  python, shell = sandbox.session('python'), sandbox.session('shell')
  out = [
    python.run('x = 6\ndef f(): return x * 7'),
    shell.run('cd /tmp; y=2; echo $PWD'),
    python.run('print(f()); 1/0'),
    shell.run('echo $y > n; cat n; false'),
    sandbox.call(Call(code='print(open("/tmp/n").read())')),
    python.run('while True: pass', timeout_s=0.2),
    python.run('print(x)'),
    (python.alive, shell.alive),
    shell.run('exit 4'),
    (python.alive, shell.alive),
  ]
  with sandbox.session('python') as another:
    out.append(another.run('print("é漢")'))
  python.close()
  another.close()
  return [*out, another.alive, another.run('1')]


def pack_up(sandbox):
  """Archives and snapshots."""
  sandbox.put(FILES)
  data, refused = sandbox.get_tar(['.', 'none'])
  return [
    (data, refused),
    sandbox.snapshot(),
    sandbox.call(Call(argv=['sh', '-c', 'rm -r a; mkdir "b c"; mkfifo p'])),
    sandbox.put_tar(data),
    sandbox.snapshot(max_bytes=10),
    sandbox.snapshot(),
  ]


def recorded(backend, use=exercise, **options):
  with Recording(open_sandbox(SPEC, backend), **options) as sandbox:
    out = use(sandbox)
  return out, sandbox.record()


def on_disk(record):
  """As it comes back from a file."""
  text = storage.dump_json(sandbox_record.to_json(record))
  return sandbox_record.from_json(storage.parse_json(text), record.blobs)


def test_a_record_is_served_byte_for_byte(backend):
  results, record = recorded(backend)
  assert len(record.operations) == len(results) == 11
  again = on_disk(record)
  assert again == record
  replaying = Replaying(again)
  assert replaying.spec == SPEC or backend == 'bwrap'
  assert exercise(replaying) == results  # durations too
  assert replaying.left == 0
  assert results[4].truncated[0] > 0 and results[6].status is CallStatus.TIMEOUT
  assert results[10].files == FILES


def test_sessions_are_served_too(backend):
  results, record = recorded(backend, converse)
  replaying = Replaying(on_disk(record))
  assert converse(replaying) == results
  assert replaying.left == 0
  names = [o.name for o in record.operations]
  assert names.count('session') == 3 and names.count('session.close') == 1
  assert results[2].stdout == '42\n' and results[7] == (False, True)
  found = verify(record, lambda spec: open_sandbox(SPEC, backend))
  assert [str(d) for d in found.differences] == []
  replaying = Replaying(record)
  session = replaying.session('python')
  said = "with kind 'shell', asked for was kind 'python'"
  with pytest.raises(Diverged, match=said):
    replaying.session('python')
  with pytest.raises(Diverged, match='session'):
    session.run('x = 6')


def test_archives_and_snapshots_are_served_too(backend):
  results, record = recorded(backend, pack_up)
  replaying = Replaying(on_disk(record))
  assert pack_up(replaying) == results
  assert replaying.left == 0
  for other in ('docker', 'bwrap'):
    found = verify(record, lambda spec, o=other: open_sandbox(SPEC, o))
    assert [str(d) for d in found.differences] == []
  short = dataclasses.replace(
    record, operations=record.operations[:-1], blobs={}
  )
  with pytest.raises(NoResult, match='larger max_bytes'):
    pack_up(Replaying(short))


def test_what_a_sandbox_began_with_is_part_of_its_record(backend):
  with open_sandbox(SPEC, backend) as first:
    first.put({'n': b'41'})
    snapshot = first.snapshot()

  def use(sandbox):
    return sandbox.call(Call(code='print(int(open("n").read()) + 1)'))

  opened = open_sandbox(SPEC, backend, snapshot=snapshot)
  with Recording(opened, begun_from=snapshot) as fork:
    result = use(fork)
  record = on_disk(fork.record())
  assert result.stdout == '42\n'
  assert [o.name for o in record.operations] == ['restore', 'call']
  assert use(Replaying(record)) == result

  def opener(spec, **options):
    return open_sandbox(SPEC, backend, **options)

  assert verify(record, opener).differences == ()
  # Another beginning is another chain, though the call is the same.
  _, plain = recorded(backend, use)
  assert plain.operations[0].chain != record.operations[1].chain
  found = verify(plain, lambda spec: opener(spec, snapshot=snapshot))
  assert 'stdout' in {d.field for d in found.differences}


def test_verification_on_each_backend_finds_nothing(backend):
  _, record = recorded(backend)
  for other in ('docker', 'bwrap'):
    found = verify(record, lambda spec, other=other: open_sandbox(SPEC, other))
    assert [str(d) for d in found.differences] == []
    assert (found.compared, found.differing) == (11, 0)


def test_verification_lists_what_varies(backend):
  def varies(sandbox):
    sandbox.call(Call(code='print("same")'))
    sandbox.call(Call(code='import uuid; print("id is", uuid.uuid4())'))
    sandbox.call(Call(code='open("n", "w").write("1")'))
    sandbox.put({'n': b'2'})
    sandbox.call(Call(code='import time; print(time.time_ns())'))

  _, record = recorded(backend, varies)
  found = verify(record, lambda spec: open_sandbox(spec, backend))
  assert (found.compared, found.differing) == (5, 2)
  first = found.differences[0]
  assert (first.index, first.name, first.field) == (1, 'call', 'stdout')
  assert 'id is' in first.expected and first.expected != first.got
  assert not {0, 2, 3} & {d.index for d in found.differences}
  # A file that the live sandbox does not have.
  _, reads = recorded(backend, lambda s: (s.put({'n': b''}), s.get(['n'])))
  without = dataclasses.replace(reads, operations=reads.operations[1:])
  found = verify(without, lambda spec: open_sandbox(spec, backend))
  assert [d.field for d in found.differences] == ['files', 'refused']


@pytest.mark.parametrize(
  'index, ask, expected, got',
  [
    (0, Call(code='print(6 * 8)'), 'print(6 * 7)', 'print(6 * 8)'),
    (0, Call(code='print(6 * 7)', timeout_s=31.0), '30.0', '31.0'),
    (0, Call(argv=['true']), 'None', 'true'),
    (0, Call(code='print(6 * 7)', stdin=b'x'), "''", "'x'"),
    (1, CALLS[0], 'argv', 'None'),
  ],
)
def test_another_request_is_refused_with_what_differs(
  index, ask, expected, got
):
  replaying = Replaying(_made(CALLS))
  for call in CALLS[:index]:
    replaying.call(call)
  with pytest.raises(Diverged) as diverged:
    replaying.call(ask)
  assert isinstance(diverged.value, InfraError)  # never a reward
  assert diverged.value.index == index
  assert f'operation {index} ' in str(diverged.value)
  assert expected in diverged.value.expected and got in diverged.value.got
  # It stays where it was: the right one is still served.
  assert replaying.call(CALLS[index]).stdout == str(index)


def test_other_kinds_of_requests_are_refused_too():
  replaying = Replaying(_made(CALLS[:1]))
  with pytest.raises(Diverged, match='recorded is call, asked for was put'):
    replaying.put({'x': b''})
  replaying.call(CALLS[0])
  with pytest.raises(Diverged, match='nothing more, asked for was a get'):
    replaying.get(['x'])


def test_no_more_sandboxes_than_were_opened():
  opener = ReplayingOpener([_made(CALLS[:1])])
  assert opener().call(CALLS[0]).stdout == '0'
  with pytest.raises(Diverged, match='1 sandboxes'):
    opener()


class Scripted:
  """A sandbox that answers as told: a result, or an error to raise."""

  def __init__(self, *answers):
    self.spec, self.facts = SPEC, {}
    self.answers = list(answers)

  def call(self, call):
    answer = self.answers.pop(0)
    if callable(answer):
      answer = answer()
    if isinstance(answer, BaseException):
      raise answer
    return answer

  def close(self):
    pass


def _made(calls):
  """A record of calls that print their number."""
  results = [CallResult(CallStatus.OK, 0, stdout=str(i)) for i in range(99)]
  recording = Recording(Scripted(*results))
  for call in calls:
    recording.call(call)
  return recording.record()


def test_errors_are_recorded_and_raised_again():
  errors = [
    Died('it ended'),
    HostDeadline('no reply'),
    SandboxBug('closed'),
    InfraError('plain'),
    ZeroDivisionError('a bug in a backend'),
  ]
  recording = Recording(Scripted(*errors))
  for error in errors:
    with pytest.raises(type(error)):
      recording.call(CALLS[0])
  replaying = Replaying(on_disk(recording.record()))
  for error in errors[:4]:
    with pytest.raises(type(error)) as again:
      replaying.call(CALLS[0])
    assert type(again.value) is type(error) and str(again.value) == str(error)
  with pytest.raises(InfraError, match='ZeroDivisionError: a bug'):
    replaying.call(CALLS[0])


def test_what_is_over_the_bound_is_a_hash():
  big, small = 'b' * 3000, 's' * 2000
  results = [CallResult(CallStatus.OK, 0, stdout=text) for text in (
    big, big, small, 'short', small,
  )]  # fmt: skip
  recording = Recording(Scripted(*results), max_bytes=2500)
  for _ in results:
    recording.call(CALLS[0])
  record = on_disk(recording.record())
  assert sum(map(len, record.blobs.values())) <= 2500
  assert sorted(map(len, record.blobs.values())) == [0, 2000]
  replaying = Replaying(record)
  for text in (big, big, small, 'short', small):
    if text is big:
      with pytest.raises(NoResult, match='3000 bytes .* larger max_bytes'):
        replaying.call(CALLS[0])
    else:
      assert replaying.call(CALLS[0]).stdout == text


def test_a_request_over_the_bound_is_still_told_apart(backend):
  code = 'print(len({!r}))'
  one, other = code.format('x' * 9000), code.format('x' * 8999 + 'y')
  result, record = recorded(
    backend, lambda s: s.call(Call(code=one)), max_bytes=1000
  )
  assert record.blobs == {next(iter(record.blobs)): b''}
  assert Replaying(record).call(Call(code=one)) == result
  with pytest.raises(Diverged):
    Replaying(record).call(Call(code=other))
  found = verify(record, lambda spec: open_sandbox(spec, backend))
  assert [d.field for d in found.differences] == ['request']


def test_a_call_that_hangs_is_in_the_record_without_an_answer():
  begun, go_on = threading.Event(), threading.Event()

  def hang():
    begun.set()
    assert go_on.wait(30)
    return CallResult(CallStatus.OK, 0)

  recording = Recording(Scripted(CallResult(CallStatus.OK, 0), hang))
  recording.call(CALLS[0])
  thread = threading.Thread(target=recording.call, args=(CALLS[1],))
  thread.start()
  assert begun.wait(30)
  record = recording.record()
  go_on.set()
  thread.join()
  assert len(record.operations) == 2 and record.operations[1].result is None
  replaying = Replaying(on_disk(record))
  replaying.call(CALLS[0])
  with pytest.raises(NoResult, match=r'operation 1 \(call\) had no result'):
    replaying.call(CALLS[1])
  assert len(recording.record().operations) == 2


def test_a_changed_record_is_not_read():
  record = _made((Call(code='print(1)', stdin=b'abc'),))
  data = storage.parse_json(storage.dump_json(sandbox_record.to_json(record)))
  assert sandbox_record.from_json(data, record.blobs) == record
  name = next(n for n, blob in record.blobs.items() if blob == b'abc')
  with pytest.raises(ValueError, match=f'blob {name} were changed'):
    sandbox_record.from_json(data, {name: b'abd'})
  data['operations'][0]['request']['code'] = 'print(2)'
  with pytest.raises(ValueError, match='request 0 .* was changed'):
    sandbox_record.from_json(data, record.blobs)
  data['schema'] = 2
  with pytest.raises(ValueError, match='schema version 2, this code reads 1'):
    sandbox_record.from_json(data, record.blobs)


def test_recording_costs_little():
  """Far below what a call costs: 0.2 ms, and most are ten times longer."""
  result = CallResult(CallStatus.OK, 0, stdout='x' * 200)
  n, call = 300, Call(code='print(1)\n' * 40)
  seconds = []
  recording = Recording(Scripted(*[result] * n))
  for _ in range(n):
    start = time.perf_counter()
    recording.call(call)
    seconds.append(time.perf_counter() - start)
  assert statistics.median(seconds) < 0.2e-3, statistics.median(seconds)
