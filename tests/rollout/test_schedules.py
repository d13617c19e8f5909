"""Random schedules: whatever happens around it, a trajectory is the same.

Admit, pause, resume, fork at the end and in the past, park and unpark, weight
update, cancel, in chunks of any length, at every point that the engine has. A
trajectory keeps a history of what it asked for; the same history alone in an
empty engine gives the same bits. Nothing leaks, and nothing compiles.
"""

import functools

import numpy as np
import pytest
import tiny_model as tiny

from agentjax import compiles
from agentjax.model.cache import Spans
from agentjax.rollout.sampling import Sampling, trajectory_key
from agentjax.rollout.slots import Handle, Slot, StaleKV

VERSIONS = 3
SAMPLINGS = (
  Sampling(),
  Sampling(temperature=0.7, top_k=5),
  Sampling(top_p=0.8),
  Sampling(temperature=0.0),
)


def new_engine():
  engine = tiny.engine(
    stop_strings=list('ae'), slots=3, chunk=5, stale_kv=StaleKV.KEEP,
    config=tiny.PLAIN, context=64, store=functools.partial(Spans, first=16),
  )  # fmt: skip
  engine.load(weights(0), 0)
  engine.compile()
  for version in range(VERSIONS):  # every way in which weights may arrive
    engine.load(weights(version), version)
  return engine


def weights(version):
  return tiny.params(version % VERSIONS, tiny.PLAIN)


class Life:
  """A trajectory under way: where it is, and the history that made it."""

  def __init__(self, number, history=()):
    self.number = number
    self.history = list(history)
    self.segments = []
    self.slot = None
    self.parked = None
    self.turns = 0
    self.sampling = False

  def say(self, *event):
    self.history.append(event)

  def ran(self, n, version):
    if n and self.history[-1][0] == 'run' and self.history[-1][2] == version:
      n += self.history.pop()[1]
    if n:
      self.say('run', n, version)


class World:
  """One random schedule over an engine."""

  def __init__(self, engine, seed):
    self.engine = engine
    self.rng = np.random.default_rng(seed)
    self.seed = seed
    self.lives, self.ended = [], []
    self.made = 0

  def run(self, n):
    ops = (self.admit, self.turn, self.step, self.step, self.park, self.unpark,
           self.fork, self.update, self.cancel, self.end)  # fmt: skip
    for _ in range(n):
      ops[self.rng.integers(len(ops))]()
    while self.lives:
      self.unpark()
      while any(e.sampling and e.slot is not None for e in self.lives):
        self.step()
      for e in [e for e in self.lives if e.slot is not None]:
        self.finish(e)
    return self.ended

  def some(self, condition):
    found = [e for e in self.lives if condition(e)]
    return found[self.rng.integers(len(found))] if found else None

  def version(self):
    return self.engine.version

  def admit(self):
    if (slot := self.engine.acquire()) is None:
      return
    e = Life(self.made)
    self.made += 1
    e.slot = slot
    self.engine.reset(slot)
    tokens = self.tokens(1, 12)
    self.engine.extend(slot, tokens)
    e.say('extend', tokens, self.version())
    self.lives.append(e)

  def tokens(self, low, high):
    n = self.rng.integers(low, high + 1)
    return self.rng.integers(2, 40, n).astype(np.int32)

  def turn(self):
    """A pause ends: an observation, where there was a turn, and a turn."""
    e = self.some(lambda e: e.slot is not None and not e.sampling)
    if e is None:
      return
    seen = self.tokens(1, 9) if e.turns else self.tokens(0, 0)
    if self.engine.length(e.slot) + len(seen) + 2 > self.engine.context:
      self.finish(e)
      return
    if len(seen):
      self.engine.extend(e.slot, seen)
      e.say('extend', seen, self.version())
    options = (
      trajectory_key(self.seed, 0, 'task', e.number, e.turns),
      SAMPLINGS[self.rng.integers(len(SAMPLINGS))],
      int(self.rng.integers(1, 14)),
      int(self.rng.integers(1, 30)),
    )
    self.begin(e, options)
    e.say('turn', options, self.version())
    e.turns, e.sampling = e.turns + 1, True

  def begin(self, e, options):
    key, sampling, turn, total = options
    self.engine.start(
      e.slot, key, sampling, turn_budget=turn, trajectory_budget=total
    )

  def step(self):
    before = {e.slot: self.engine.length(e.slot) for e in self.lives
              if e.slot is not None and e.sampling}  # fmt: skip
    steps = int(self.rng.integers(1, 6))
    ended = None if self.rng.random() < 0.5 else int(self.rng.integers(1, 4))
    done = dict(self.engine.step(steps, ended))
    for e in self.lives:
      if e.slot in before:
        e.ran(self.engine.length(e.slot) - before[e.slot], self.version())
        if e.slot in done:
          e.sampling = False
          e.segments.append(done[e.slot])

  def park(self):
    if (e := self.some(lambda e: e.slot is not None)) is not None:
      e.parked, e.slot = self.engine.park(e.slot), None

  def unpark(self):
    e = self.some(lambda e: e.slot is None)
    if e is not None and (slot := self.engine.acquire()) is not None:
      self.engine.unpark(e.parked, slot)
      e.parked, e.slot = None, slot

  def fork(self):
    """Of a paused trajectory, at its end or anywhere in its past."""
    e = self.some(lambda e: e.slot is not None and not e.sampling)
    if e is None or (slot := self.engine.acquire()) is None:
      return
    at = None
    if self.rng.random() < 0.6:
      at = int(self.rng.integers(1, self.engine.length(e.slot) + 1))
    mark = self.engine.mark(e.slot, at)
    self.engine.fork(mark, slot)
    child = Life(self.made, e.history)
    self.made += 1
    child.say('fork', at, self.version())
    child.slot, child.turns = slot, e.turns
    self.lives.append(child)

  def update(self):
    version = self.version() + 1
    self.engine.load(weights(version), version)

  def cancel(self):
    e = self.some(lambda e: e.slot is not None and e.sampling)
    if e is not None:
      e.segments.append(self.engine.cancel(e.slot))
      e.sampling = False
      e.say('cancel')

  def end(self):
    e = self.some(lambda e: e.slot is not None and not e.sampling)
    if e is not None and self.rng.random() < 0.4:
      self.finish(e)

  def finish(self, e):
    assert self.engine.handle(e.slot).digest == Handle.digest_of(
      self.engine._slots[e.slot].tokens
    )
    self.engine.release(e.slot)
    self.lives.remove(e)
    self.ended.append(e)


def replay(engine, history):
  """The same history, alone: the segments of its own turns."""
  slot = engine.acquire()
  engine.reset(slot)
  segments = []

  def version(v):
    if engine.version != v:
      engine.load(weights(v), v)

  for event in history:
    match event:
      case 'extend', tokens, v:
        version(v)
        engine.extend(slot, tokens)
      case 'turn', (key, sampling, turn, total), v:
        version(v)
        engine.start(
          slot, key, sampling, turn_budget=turn, trajectory_budget=total
        )
      case 'run', n, v:
        version(v)
        while n:
          steps = min(n, engine.chunk)
          n -= steps
          segments += [s for _, s in engine.step(steps)]
      case 'fork', at, v:
        version(v)
        engine.fork(engine.mark(slot, at), slot)
        segments = []
      case ('cancel',):
        segments.append(engine.cancel(slot))
  engine.release(slot)
  return segments


@pytest.fixture(scope='module')
def engine():
  return new_engine()


def check(engine, seed, n=60):
  before = compiles.count()
  ended = World(engine, seed).run(n)
  for e in ended:
    again = replay(engine, e.history)
    assert len(again) == len(e.segments), (seed, e.number)
    for a, b in zip(again, e.segments, strict=True):
      assert a.stop is b.stop, (seed, e.number)
      for name in ('tokens', 'logprobs', 'logprobs_full', 'log_kept_mass',
                   'versions'):  # fmt: skip
        np.testing.assert_array_equal(
          getattr(a, name), getattr(b, name), f'seed {seed}, {e.number}'
        )
  # No slot is left, and nothing compiled.
  assert engine.n_decoding == 0
  held = [engine.acquire() for _ in range(engine.n_slots)]
  assert None not in held and engine.acquire() is None
  for slot in held:
    engine.release(slot)
  assert compiles.count() == before, f'seed {seed} compiled'
  return ended


def test_schedules(engine):
  lives = [e for seed in range(150) for e in check(engine, seed)]
  # They did what they are for.
  kinds = {event[0] for e in lives for event in e.history}
  assert kinds == {'extend', 'turn', 'run', 'fork', 'cancel'}
  mixed = [s for e in lives for s in e.segments if len(set(s.versions)) > 1]
  assert len(mixed) > 20 and engine.stats.parked > 100


@pytest.mark.long
def test_ten_thousand_schedules(engine):
  for seed in range(1000, 11_000):
    check(engine, seed, n=40)


def test_a_row_that_changed_is_no_mark(engine):
  slot = engine.acquire()
  engine.reset(slot)
  engine.extend(slot, tiny.tokens(1, 4))
  short = engine.mark(slot)
  engine.extend(slot, tiny.tokens(2, 4))
  long = engine.mark(slot)
  engine.fork(short, slot)
  engine.extend(slot, tiny.tokens(3, 4))
  assert engine.holds(short) and not engine.holds(long)
  with pytest.raises(ValueError, match='no longer there'):
    engine.fork(long, slot)
  with pytest.raises(ValueError, match='8 tokens'):
    engine.check(slot, tiny.tokens(4, 8))
  with pytest.raises(ValueError, match='mark at 9'):
    engine.mark(slot, 9)
  engine.release(slot)
  assert Slot().version == -1
