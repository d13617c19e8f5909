"""The same episodes, the same observations: Docker, bubblewrap, replaying."""

import ctypes
import platform
import signal

import pytest
import scripted_episodes as scripted
from sandboxes import SPEC, backend_or_skip

from agentjax.env.sandbox import Call, open_sandbox
from agentjax.env.sandbox.replay import Recording, Replaying
from agentjax.env.sandbox.verification import verify


def play(backend, batch):
  """(what each episode saw, the record) of a batch in one sandbox."""
  with Recording(open_sandbox(SPEC, backend)) as sandbox:
    seen = []
    for episode in batch:
      seen.append(scripted.run(sandbox, episode))
      if episode is not batch[-1]:
        scripted.clean(sandbox)
  return seen, sandbox.record()


def replayed(record, batch):
  sandbox = Replaying(record)
  seen = []
  for episode in batch:
    seen.append(scripted.run(sandbox, episode))
    if episode is not batch[-1]:
      scripted.clean(sandbox)
  assert sandbox.left == 0
  return seen


def compare(batches):
  """Names of the episodes that differ anywhere, with their first step."""
  wrong, steps = [], 0
  for batch in batches:
    seen = {b: play(b, batch) for b in ('docker', 'bwrap')}
    for record_of, (as_recorded, record) in seen.items():
      assert replayed(record, batch) == as_recorded, record_of
    for episode, a, b in zip(
      batch, seen['docker'][0], seen['bwrap'][0], strict=True
    ):
      steps += len(a)
      wrong += [
        f'{episode.name}, step {i}:\n  docker {x}\n  bwrap  {y}'
        for i, (x, y) in enumerate(zip(a, b, strict=True))
        if x != y
      ]
  return wrong, steps


@pytest.fixture
def both():
  for name in ('docker', 'bwrap'):
    backend_or_skip(name)
  versions = set()
  for name in ('docker', 'bwrap'):
    with open_sandbox(SPEC, name) as sandbox:
      facts = sandbox.facts
      versions.add((facts['python'], facts.get('limits', 'cgroup')))
  if len(versions) > 1:
    pytest.skip(f'another Python, or no control groups: {sorted(versions)}')


def test_a_hundred_episodes_are_the_same_everywhere(both):
  """They share sandboxes, ten at a time; `long` gives each its own."""
  made = scripted.episodes(100)
  wrong, steps = compare(scripted.batches(made, 10))
  assert len(made) == 100 and steps > 450
  assert wrong == [], '\n'.join(wrong)


def set_hidden(number, handler):
  """Past the C library, which refuses; the handler that was there."""
  call = {'x86_64': 13, 'aarch64': 134}[platform.machine()]
  new, old = (ctypes.c_uint64 * 8)(handler), (ctypes.c_uint64 * 8)()
  libc = ctypes.CDLL(None)
  assert libc.syscall(call, number, new, old, ctypes.c_size_t(8)) == 0
  return old[0]


def test_what_the_trainer_ignores_or_blocks_does_not_show(backend):
  """As under nohup, or started by a shell in the background."""
  code = (
    'import signal as s\n'
    'print([int(n) for n in s.valid_signals() if s.getsignal(n) is s.SIG_IGN],'
    ' s.pthread_sigmask(0, ()))'
  )
  numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
  hidden = set_hidden(32, signal.SIG_IGN)  # the C library's own
  kept = {n: signal.signal(n, signal.SIG_IGN) for n in numbers}
  blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
  try:
    sandbox = open_sandbox(SPEC, backend)
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    set_hidden(32, hidden)
    for number, handler in kept.items():
      signal.signal(number, handler)
  with sandbox:
    expected = f'[{signal.SIGPIPE:d}, {signal.SIGXFSZ:d}] set()\n'
    assert sandbox.call(Call(code=code)).stdout == expected
    shell = 'grep -E "Sig(Blk|Ign)" /proc/self/status'
    found = sandbox.call(Call(argv=['sh', '-c', shell])).stdout.split()
    assert found[1::2] == ['0' * 16, '0' * 16]


@pytest.mark.long
def test_a_hundred_episodes_in_a_hundred_sandboxes(both):
  wrong, _ = compare([[e] for e in scripted.episodes(100, seed=1)])
  assert wrong == [], '\n'.join(wrong)


@pytest.mark.long
def test_two_hundred_recorded_episodes_run_again(both):
  """All byte-equal from the record; of those run again few differ."""
  compared = differing = 0
  said = []
  for batch in scripted.batches(scripted.episodes(200, seed=2), 10):
    for backend in ('docker', 'bwrap'):
      seen, record = play(backend, batch)
      assert replayed(record, batch) == seen
      found = verify(record, lambda spec, b=backend: open_sandbox(SPEC, b))
      compared += found.compared
      differing += found.differing
      said += map(str, found.differences)
  print(f'\n{differing} of {compared} operations differ', *said, sep='\n')
  assert compared > 1800 and differing < 0.01 * compared
