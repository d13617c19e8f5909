"""Weights that arrive in the middle of a collect: recorded, run again once."""

import dataclasses
import threading

import numpy as np
import pytest
import tiny_model as tiny
from fakes import IdChat, IdEnvironment, id_task

from agentjax.records import trajectory_from_record, trajectory_to_record
from agentjax.rollout.collect import CollectStats, collect
from agentjax.rollout.engine import StaleKV
from agentjax.rollout.episode import Limits
from agentjax.rollout.sampling import Sampling, trajectory_key
from agentjax.types import Source, Status

LIMITS = Limits(
  turns=4, turn_tokens=16, model_tokens=48, context=96, observation_tokens=8
)
TASKS = [id_task(f't{i}', tiny.tokens(i, 4 + i)) for i in range(3)]
SECOND = tiny.params(1, tiny.PLAIN)


class Counting(IdChat):
  """Calls a function with the number of each turn, or of each opening.

  In the thread of the device, and so it may load weights there.
  """

  def __init__(self, at_turn=lambda n: None, at_opening=lambda n: None):
    super().__init__()
    self.at_turn, self.at_opening = at_turn, at_opening
    self.turns = self.openings = 0

  def render_prompt(self, messages, tools=()):
    self.openings += 1
    self.at_opening(self.openings)
    return super().render_prompt(messages, tools)

  def parse_turn(self, tokens, stop):
    self.turns += 1
    self.at_turn(self.turns)
    return super().parse_turn(tokens, stop)


def new_engine(stale_kv, slots):
  return tiny.engine(
    stop_strings=list('aeiou'), slots=slots, config=tiny.PLAIN,
    stale_kv=stale_kv,
  )  # fmt: skip


def run(engine, tasks=TASKS, **kw):
  options = {
    'group_size': 3, 'chat': IdChat(), 'make_environment': IdEnvironment,
    'limits': LIMITS, 'sampling': Sampling(), 'seed': 0, 'draw': 0,
  } | kw  # fmt: skip
  return collect(tasks, engine=engine, **options)


def run_with_update(engine, **kw):
  """The second weights when group t0 is complete; till then others wait.

  All the others are at their first tool then, or cut by a limit.
  """
  loaded = threading.Event()

  class Waits(IdEnvironment):
    def reset(self, task):
      self.waits = task.id != 't0'
      return super().reset(task)

    def step(self, turn):
      assert not self.waits or loaded.wait(60)
      return super().step(turn)

  def on_group(group):
    if group.task.id == 't0':
      try:
        engine.load(SECOND, 1)
      finally:
        loaded.set()

  return run(
    engine, on_group=on_group, make_environment=Waits, in_flight=9, **kw
  )


def members(groups):
  return [t for g in groups for t in g.trajectories]


def sampled_on(trajectory):
  """Per MODEL token (its version, oldest version of the state below it)."""
  out, position = [], 0
  for s in trajectory.segments:
    for i in range(len(s)):
      if s.source is Source.MODEL:
        below = [v for at, v in s.kv_versions if at < position]
        out.append((int(s.versions[i]), min(below)))
      position += 1
  return out


def test_what_was_sampled_on_an_old_state_is_written_down():
  """Keep: prompts and observations of the first weights, below later turns."""
  engine = new_engine(StaleKV.KEEP, 2)
  groups = run_with_update(engine)
  assert engine.version == 1
  seen = set()
  for t in members(groups):
    turns = [s for s in t.segments if s.source is Source.MODEL]
    first = turns[0].kv_versions[0]
    assert first[0] == 0 and all(s.kv_versions[0] == first for s in turns)
    end = 0
    for s in t.segments:
      end += len(s)
      if s.source is not Source.MODEL:
        assert s.kv_versions == ()
        continue
      starts, versions = zip(*s.kv_versions, strict=True)
      assert list(starts) == sorted(set(starts)) and starts[-1] < end
      assert list(versions) == sorted(set(versions))
      # The state of a sampled token is of the weights that sampled it.
      assert versions[-1] == s.versions[-1]
    pairs = sampled_on(t)
    assert all(below <= version for version, below in pairs)
    seen |= set(pairs)
  assert {(0, 0), (1, 0)} <= seen <= {(0, 0), (1, 0), (1, 1)}
  old = sum(b < v for t in members(groups) for v, b in sampled_on(t))
  assert engine.stats.tokens_on_old_kv == old > 0
  metrics = CollectStats().metrics(engine.stats)
  assert metrics['tokens_on_old_kv'] == old


def test_the_record_of_an_old_state_comes_back_from_disk():
  engine = new_engine(StaleKV.KEEP, 2)
  groups = run_with_update(engine)
  for t in members(groups):
    record, arrays = trajectory_to_record(t)
    again = trajectory_from_record(record, arrays)
    assert [s.kv_versions for s in again.segments] == [
      s.kv_versions for s in t.segments
    ]
    for s in record['segments']:  # of before there was such a record
      del s['kv_versions']
    old = trajectory_from_record(record, arrays)
    assert {s.kv_versions for s in old.segments} == {()}


def test_the_record_of_an_old_state_is_what_a_replay_needs():
  """Run with the weights that it names, a turn is the same to the bit."""
  engine = new_engine(StaleKV.KEEP, 2)
  groups = run_with_update(engine)
  t = next(
    t
    for t in members(groups)
    if len(t.turns) > 1
    and set(t.turns[0].versions) == {0}
    and set(t.turns[1].versions) == {1}
  )
  prompt, first, seen, second = t.segments[:4]
  at = len(prompt) + len(first)
  assert second.kv_versions == ((0, 0), (at, 1))  # also of the observation
  key = trajectory_key(0, 0, t.task.id, t.sample, 0)

  def sample(engine, slot):
    engine.start(slot, key, Sampling(), turn_budget=16, trajectory_budget=48)
    done = {}
    while engine.n_decoding:
      done |= dict(engine.step())
    return done[slot]

  def begun(engine, tokens):
    slot = engine.acquire()
    engine.reset(slot)
    engine.extend(slot, tokens)
    return slot

  again = new_engine(StaleKV.KEEP, 2)
  slot = begun(again, prompt.tokens)
  sample(again, slot)
  again.load(SECOND, 1)
  again.extend(slot, seen.tokens)
  turn = sample(again, slot)
  for name in ('tokens', 'logprobs', 'versions', 'kv_versions'):
    np.testing.assert_array_equal(getattr(turn, name), getattr(second, name))
  fresh = new_engine(StaleKV.KEEP, 2)
  fresh.load(SECOND, 1)
  other = sample(fresh, begun(fresh, t.tokens()[: at + len(seen)]))
  assert other.kv_versions == ((0, 1),)
  assert abs(other.logprobs[0] - second.logprobs[0]) > 1e-4


@pytest.mark.parametrize('stale_kv', [StaleKV.KEEP, StaleKV.RECOMPUTE])
def test_on_group_may_load_weights(stale_kv):
  """Turns are under way then; all go on, and say which weights sampled."""
  engine = new_engine(stale_kv, 3)
  groups = run_with_update(engine)
  assert engine.version == 1
  versions = {v for t in members(groups) for s in t.turns for v in s.versions}
  assert versions == {0, 1}
  for t in members(groups):
    assert t.status in (Status.DONE, Status.TOKEN_LIMIT), t.error
    pairs = sampled_on(t)
    if stale_kv is StaleKV.RECOMPUTE:
      after = [below for version, below in pairs if version == 1]
      assert set(after) <= {1}
  assert (engine.stats.tokens_recomputed > 0) == (stale_kv is StaleKV.RECOMPUTE)


def test_an_engine_that_refuses_does_not_go_on_after_an_update():
  engine = new_engine(StaleKV.REFUSE, 3)
  with pytest.raises(ValueError, match='set stale_kv to keep or recompute'):
    run_with_update(engine)
  assert engine.n_decoding == 0


@pytest.mark.parametrize('slots, in_flight', [(1, 1), (2, 1), (1, 3), (2, 4)])
@pytest.mark.parametrize('more', [1, 2])
def test_a_prompt_is_run_once_for_each_weights(slots, in_flight, more):
  """After an update the group's first recomputes it, the others fork.

  It comes as somebody opens who had to wait until another one was done.
  """
  engine = new_engine(StaleKV.RECOMPUTE, slots)
  ran = []
  prompt = tiny.tokens(0, 9)

  def load(n):
    if n == in_flight + more:
      engine.load(SECOND, 1)

  real = engine._state.run

  def run_tokens(slot, tokens, start):
    if start == 0 and np.array_equal(tokens, prompt):
      ran.append(engine.version)
    return real(slot, tokens, start)

  engine._state.run = run_tokens
  groups = run(
    engine, tasks=[id_task('x', prompt)], group_size=6, in_flight=in_flight,
    chat=Counting(at_opening=load),
  )  # fmt: skip
  assert {int(t.turns[0].versions[0]) for t in members(groups)} == {0, 1}
  assert ran == [0, 1]


def test_who_forks_a_recomputed_prompt_samples_as_from_its_own():
  """One slot, an update before the second: it and the third as in a new run."""
  limits = dataclasses.replace(LIMITS, turns=1)
  task = [id_task('x', tiny.tokens(0, 9))]
  engine = new_engine(StaleKV.RECOMPUTE, 1)
  chat = Counting(at_opening=lambda n: n == 2 and engine.load(SECOND, 1))
  (updated,) = run(engine, tasks=task, limits=limits, chat=chat)
  fresh = new_engine(StaleKV.RECOMPUTE, 1)
  fresh.load(SECOND, 1)
  (whole,) = run(fresh, tasks=task, limits=limits)
  for k in (1, 2):
    a, b = (g.trajectories[k].turns[0] for g in (updated, whole))
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.logprobs, b.logprobs)
    assert a.kv_versions == b.kv_versions == ((0, 1),)
  # The prompt twice, once by each of the weights, and no observation.
  assert engine.stats.tokens_prefilled == 9
  assert engine.stats.tokens_recomputed == 9
