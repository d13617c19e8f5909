"""Frames between host and runner, and what the runner judges by itself."""

import ast
import json
import pathlib
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sandboxes import SPEC

from agentjax.env.sandbox import Call, CallStatus, SandboxBug, runner
from agentjax.env.sandbox.channel import MAX_FRAME, Channel
from agentjax.env.sandbox.runner import counters, streams
from agentjax.env.sandbox.session import RunnerSandbox, runner_program
from agentjax.env.sandbox.spec import (
  Died,
  HostDeadline,
  ProtocolError,
  as_text,
  classify,
)

EXIT_0 = {
  **{'end': 'exit', 'wait': 0, 'oom': 0, 'pids': 0},
  **{'disk_full': False, 'alive': True},
}


def frame(header, *blobs):
  head = json.dumps(dict(header, blobs=[len(b) for b in blobs])).encode()
  rest = struct.pack('>I', len(head)) + head + b''.join(blobs)
  return struct.pack('>I', len(rest)) + rest


@pytest.fixture
def ends():
  """(channel, the runner's end of its socket)."""
  ours, theirs = socket.socketpair()
  channel = Channel(ours, multiplexed=False)
  yield channel, theirs
  channel.shutdown()
  theirs.close()


def test_reply_in_pieces(ends):
  channel, theirs = ends
  data = frame({'id': 1, 'nonce': channel.nonce, 'x': 'é'}, b'ab', b'', b'c')

  def answer():
    for i in range(len(data)):
      theirs.send(data[i : i + 1])

  threading.Thread(target=answer).start()
  facts, blobs = channel.ask({'op': 'ping'}, timeout_s=5)
  assert facts['x'] == 'é' and blobs == [b'ab', b'', b'c']


def test_engine_packets_are_told_apart():
  ours, theirs = socket.socketpair()
  channel = Channel(ours, multiplexed=True)
  data = frame({'id': 1, 'nonce': channel.nonce}, b'x')
  for stream, part in ((1, data[:7]), (2, b'a traceback'), (1, data[7:])):
    theirs.send(struct.pack('>BxxxI', stream, len(part)) + part)
  assert channel.ask({'op': 'ping'}, timeout_s=5)[1] == [b'x']
  assert channel.stderr() == 'a traceback'
  theirs.close()
  with pytest.raises(Died, match='a traceback'):
    channel.ask({'op': 'ping'}, timeout_s=5)
  channel.shutdown()


def test_foreign_replies_are_counted_and_then_refused(ends):
  channel, theirs = ends
  for id_, nonce in ((1, 'forged'), (7, channel.nonce)):
    theirs.send(frame({'id': id_, 'nonce': nonce}, b'forged'))
  theirs.send(frame({'id': 1, 'nonce': channel.nonce}, b'true'))
  assert channel.ask({'op': 'ping'}, timeout_s=5)[1] == [b'true']
  assert channel.foreign == 2
  theirs.send(frame({'id': 2, 'nonce': None}))
  with pytest.raises(ProtocolError, match='foreign'):
    channel.ask({'op': 'ping'}, timeout_s=5)


@pytest.mark.parametrize(
  'data',
  [
    struct.pack('>II', 0xFFFFFFFF, 4),
    struct.pack('>II', 8, 99),
    struct.pack('>II', 8, 4) + b'nope',
    struct.pack('>II', 6, 2) + b'[]',
    frame({'id': 1}) + b'',
    b'\x00\x00\x00\x20' + frame({'id': 1})[4:] + b'xx' * 20,
  ],
)
def test_unreadable_replies_are_infrastructure(ends, data):
  channel, theirs = ends
  theirs.send(data)
  theirs.shutdown(socket.SHUT_WR)
  with pytest.raises((ProtocolError, Died)):
    channel.ask({'op': 'ping'}, timeout_s=5)


def test_deadlines_are_the_hosts(ends):
  channel, _ = ends
  start = time.monotonic()
  with pytest.raises(HostDeadline, match='ping'):
    channel.ask({'op': 'ping'}, timeout_s=0.2)
  with pytest.raises(HostDeadline, match='sent'):  # nobody reads
    channel.ask({'op': 'ping'}, [bytes(8 << 20)], timeout_s=0.2)
  assert time.monotonic() - start < 5
  with pytest.raises(SandboxBug, match='send less'):
    channel.ask({'op': 'ping'}, [bytes(MAX_FRAME)], timeout_s=0.2)


@pytest.mark.parametrize('limit', [CallStatus.OOM, None])
def test_runner_that_dies_in_a_call(limit):
  """The policy's doing if a limit was hit meanwhile; else infrastructure."""
  ours, theirs = socket.socketpair()
  channel = Channel(ours, multiplexed=False)

  def answer():
    theirs.recv(1 << 16)
    hello = {**EXIT_0, 'id': 1, 'nonce': channel.nonce}
    hello = {**hello, 'python': '3', 'shell': '/bin/sh'}
    theirs.send(frame({**hello, 'counters': {}, 'dropped': [0, 0]}))
    theirs.recv(1 << 16)
    theirs.close()

  threading.Thread(target=answer).start()
  sandbox = RunnerSandbox(
    SPEC,
    channel,
    {},
    rlimits={},
    stop=lambda: None,
    hit_limit=lambda began, kills: limit,
  )
  if limit is None:
    with pytest.raises(Died):
      sandbox.call(Call(code='1'))
  else:
    for _ in range(2):
      result = sandbox.call(Call(code='1'))
      assert (result.status, result.alive) == (CallStatus.OOM, False)
    assert sandbox.get(['x']).refused == {'x': 'the sandbox is gone'}
  sandbox.close()


@pytest.mark.parametrize(
  'change, expected',
  [
    ({}, (CallStatus.OK, 0, 0)),
    ({'oom': 3, 'pids': 9, 'disk_full': True}, (CallStatus.OK, 0, 0)),
    ({'wait': 3 << 8}, (CallStatus.NONZERO, 3, 0)),
    ({'wait': 11}, (CallStatus.SIGNAL, None, 11)),
    ({'wait': 9, 'oom': 1}, (CallStatus.OOM, None, 9)),
    ({'wait': 1 << 8, 'pids': 1}, (CallStatus.PIDS, 1, 0)),
    ({'wait': 1 << 8, 'disk_full': True}, (CallStatus.DISK, 1, 0)),
    ({'wait': 25}, (CallStatus.DISK, None, 25)),
    ({'wait': 9, 'end': 'timeout'}, (CallStatus.TIMEOUT, None, 9)),
    ({'wait': 0, 'end': 'timeout'}, (CallStatus.TIMEOUT, None, 0)),
    ({'wait': 9, 'end': 'timeout', 'pids': 5}, (CallStatus.PIDS, None, 9)),
    ({'end': 'gone'}, (CallStatus.GONE, None, 0)),
    ({'wait': 9, 'end': 'output'}, (CallStatus.OUTPUT_CAP, None, 9)),
  ],
)
def test_classify(change, expected):
  assert classify({**EXIT_0, **change}) == expected


def test_cut_text_loses_whole_characters():
  assert as_text(b'abc', b'def', 0) == 'abcdef'
  assert as_text('é'.encode()[:1], 'é'.encode()[1:], 0) == 'é'
  mark = '\n[... 9 bytes left out ...]\n'
  assert as_text('aé'.encode()[:2], '漢b'.encode()[1:], 9) == f'a{mark}b'
  assert as_text('aé'.encode(), '漢b'.encode(), 9) == f'aé{mark}漢b'
  assert as_text(b'a\xff', b'\xffb', 9) == f'a{mark}\ufffdb'


@settings(max_examples=60, deadline=None)
@given(
  st.lists(st.binary(max_size=30), max_size=30),
  st.integers(1, 64),
)
def test_capture_keeps_both_ends(parts, cap):
  capture = streams.Capture(cap)
  for part in parts:
    capture.add(part)
  whole = b''.join(parts)
  head, tail, dropped = capture.parts()
  assert whole.startswith(head) and whole.endswith(tail)
  assert len(head) + len(tail) + dropped == len(whole)
  assert len(head) + len(tail) == min(cap, len(whole))
  as_text(head, tail, dropped).encode('utf-8')


def test_counters_of_both_versions_of_cgroups(tmp_path):
  one, two, none = (tmp_path / n for n in ('one', 'two', 'none'))
  (one / 'memory').mkdir(parents=True)
  (one / 'pids').mkdir()
  two.mkdir()
  (one / 'memory/memory.oom_control').write_text(
    'oom_kill_disable 0\nunder_oom 0\noom_kill 2\n'
  )
  (one / 'pids/pids.events').write_text('max 31\n')
  (two / 'memory.events').write_text(
    'low 0\nhigh 0\nmax 44\noom 5\noom_kill 3\noom_group_kill 0\n'
  )
  (two / 'pids.events').write_text('max 7\n')
  assert counters.Counters(str(one)).read() == {'oom': 2, 'pids': 31}
  assert counters.Counters(str(two)).read() == {'oom': 3, 'pids': 7}
  assert counters.Counters(str(none)).read() == {'oom': None, 'pids': None}


def test_runner_refuses_to_run_outside_of_a_sandbox():
  # It would kill every process of the machine at the end of its first call.
  done = subprocess.run(
    [sys.executable, '-c', runner_program()],
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1
  assert done.stderr.startswith('the runner must be PID 1 of a sandbox')


def test_runner_imports_the_standard_library_and_itself_alone():
  folder = pathlib.Path(runner.__file__).parent
  own = {path.stem for path in folder.glob('*.py')}
  names, relative = set(), set()
  for path in folder.glob('*.py'):
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
      if isinstance(node, ast.Import):
        names |= {alias.name.split('.')[0] for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        assert node.level == 1, path
        found = [node.module] if node.module else [a.name for a in node.names]
        relative |= set(found)
  assert names and names <= set(sys.stdlib_module_names)
  assert relative and relative <= own
  program = runner_program()
  assert all(f"'_runner.{name}'" in program for name in own - {'__init__'})
  assert len(program.encode()) < 64 << 10  # half of what one argument may be
