"""Episodes over slots: promises 5 and 6, prefill counts, nothing left held."""

import dataclasses
import threading

import numpy as np
import pytest
import tiny_model as tiny
from fakes import IdChat, IdEnvironment, id_task

from agentjax.env.base import InfraError, Opening
from agentjax.records import trajectory_to_record
from agentjax.rollout.collect import CollectStats, collect
from agentjax.rollout.episode import Act, Decode, Limits, Reset, episode
from agentjax.rollout.sampling import Sampling
from agentjax.types import (
  Message,
  Observation,
  Source,
  Status,
  Step,
  Trajectory,
)

LIMITS = Limits(
  turns=4, turn_tokens=16, model_tokens=48, context=96, observation_tokens=8
)


def ids(seed, n):
  return [int(x) for x in tiny.tokens(seed, n)]


TASKS = [id_task(f't{i}', ids(i, 4 + i)) for i in range(3)]


def new_engine(slots=4):
  """Turns end soon: many tokens hold one of these letters."""
  return tiny.engine(stop_strings=list('aeiou'), slots=slots)


def run(engine=None, make=None, tasks=TASKS, group_size=3, **kw):
  engine = engine or new_engine()
  options = {
    'engine': engine,
    'chat': IdChat(),
    'make_environment': make or (lambda: IdEnvironment()),
    'limits': LIMITS,
    'sampling': Sampling(),
    'seed': 0,
    'draw': 5,
  } | kw
  groups = collect(tasks, group_size=group_size, **options)
  # Whatever happened, every slot is free again.
  assert engine.n_decoding == 0
  held = [engine.acquire() for _ in range(engine.n_slots)]
  assert None not in held
  for slot in held:
    engine.release(slot)
  return groups


def assert_same(a, b, exact=True):
  for x, y in zip(a, b, strict=True):
    for t, u in zip(x.trajectories, y.trajectories, strict=True):
      record_t, arrays_t = trajectory_to_record(t)
      record_u, arrays_u = trajectory_to_record(u)
      for record in (record_t, record_u):
        record['info'].pop('attempts')
        record['info'].pop('past_tokens')
      assert record_t == record_u
      for name in arrays_t:
        if exact or name in ('tokens', 'versions'):
          np.testing.assert_array_equal(arrays_t[name], arrays_u[name])
        else:
          np.testing.assert_allclose(arrays_t[name], arrays_u[name], atol=1e-5)


def test_order_status_and_rewards():
  groups = run()
  assert [g.task.id for g in groups] == ['t0', 't1', 't2']
  seen = set()
  for g in groups:
    assert [t.sample for t in g.trajectories] == [0, 1, 2]
    for t in g.trajectories:
      assert t.status in (Status.DONE, Status.TOKEN_LIMIT)
      assert t.reward is not None and t.draw == 5
      sources = [s.source.value[0] for s in t.segments]
      assert ''.join(sources) in ('pm', 'pmom', 'pmomom')
      assert len(t.turn_rewards) == len(t.state_keys)
      seen.add(tuple(t.tokens()))
  assert len(seen) == 9  # samples of a group differ


def test_delays_slots_and_neighbours_change_nothing():
  base = run()
  assert_same(base, run(make=lambda: IdEnvironment(delay=0.01)))
  assert_same(base, run(tool_threads=1))
  # Other tasks in between, and each task in a call of its own.
  alone = [run(tasks=[t])[0] for t in TASKS]
  assert_same(base, alone)
  backwards = run(tasks=TASKS[::-1])[::-1]
  assert_same(base, backwards)


def test_another_number_of_slots_differs_by_rounding_only():
  assert_same(run(), run(new_engine(1)), exact=False)
  assert_same(run(), run(new_engine(9)), exact=False)


def expected_prefill(groups):
  """Each group's prompt once, and every observation."""
  total = 0
  for g in groups:
    total += len(g.trajectories[0].segments[0])
    for t in g.trajectories:
      total += sum(len(s) for s in t.segments if s.source is Source.OBSERVATION)
  return total


@pytest.mark.parametrize('slots', [1, 2, 4, 9])
@pytest.mark.parametrize('delay', [0.0, 0.01])
def test_a_group_prefills_its_prompt_once(slots, delay):
  engine = new_engine(slots)
  groups = run(engine, make=lambda: IdEnvironment(delay=delay), group_size=5)
  assert engine.stats.tokens_prefilled == expected_prefill(groups)
  sampled = sum(t.model_tokens for g in groups for t in g.trajectories)
  assert engine.stats.tokens_sampled == sampled


@pytest.mark.parametrize('slots', [1, 2, 4])
def test_eight_episodes_a_slot(slots):
  """More under way than slots: states move out and back, nothing changes."""
  tasks = [id_task(f't{i}', ids(i, 4 + i % 5)) for i in range(6)]
  base, stats = run(new_engine(slots), tasks=tasks), CollectStats()
  engine = new_engine(slots)
  groups = run(
    engine,
    make=lambda: IdEnvironment(delay=0.01),
    tasks=tasks,
    in_flight=8 * slots,
    tool_threads=8,
    stats=stats,
  )
  assert_same(base, groups)
  assert engine.stats.tokens_prefilled == expected_prefill(groups)
  assert engine.stats.parked > 0 and stats.parked_bytes > 0
  assert stats.tokens_reprefill == sum(
    sum(len(s) for s in t.segments[:i])
    for g in groups
    for t in g.trajectories
    for i, s in enumerate(t.segments)
    if s.source is Source.MODEL
  )


def test_a_slow_tool_never_holds_up_decoding():
  """While one episode waits, all others run to their end in its slot."""
  base = run(new_engine(1), group_size=1)
  slow = next(g.task.id for g in base if g.trajectories[0].turn_rewards)
  released = threading.Event()

  class Slow(IdEnvironment):
    def reset(self, task):
      self.task = task
      return super().reset(task)

    def step(self, turn):
      if self.task.id == slow:
        assert released.wait(60)
      return super().step(turn)

  done = []

  def on_group(group):
    done.append(group.task.id)
    if len(done) == 2:
      released.set()

  groups = run(
    new_engine(1), make=Slow, group_size=1, in_flight=3, on_group=on_group
  )
  assert sorted(done) == ['t0', 't1', 't2'] and done[-1] == slow
  assert_same(base, groups)


def test_forced_tokens_begin_every_turn():
  engine, forced = new_engine(), np.array([7, 8], np.int32)
  groups = run(engine, chat=IdChat(forced))
  for t in (t for g in groups for t in g.trajectories):
    sources = ''.join(s.source.value[0] for s in t.segments)
    assert sources in ('pfm', 'pfmofm', 'pfmofmofm')
    for s in t.segments:
      if s.source is Source.FORCED:
        np.testing.assert_array_equal(s.tokens, forced)
    for said, turn in zip(t.turn_tokens, t.turns, strict=True):
      np.testing.assert_array_equal(said[:2], forced)
      np.testing.assert_array_equal(said[2:], turn.tokens)
    assert t.loss_mask().sum() == t.model_tokens
  # What is forced is run for each trajectory, like an observation.
  assert engine.stats.tokens_prefilled == expected_prefill(groups) + sum(
    len(s)
    for g in groups
    for t in g.trajectories
    for s in t.segments
    if s.source is Source.FORCED
  )


class Odd(IdEnvironment):
  """Answers one call with what is no answer."""

  def __init__(self, call, value):
    super().__init__()
    self.call, self.value = call, value

  def _odd(self, call, answer):
    if call != self.call:
      return answer
    if isinstance(self.value, BaseException):
      raise self.value
    return self.value

  def reset(self, task):
    return self._odd('reset', super().reset(task))

  def step(self, turn):
    return self._odd('step', super().step(turn))

  def verify(self, status):
    return self._odd('verify', super().verify(status))


@pytest.mark.parametrize(
  'call, value, said',
  [
    ('reset', None, 'return an Opening'),
    ('reset', Opening((Message('user', ''),)), 'no tokens'),
    ('reset', StopIteration(), 'StopIteration'),
    ('step', None, 'return a Step'),
    ('step', StopIteration(), 'StopIteration'),
    ('step', Step(status='done'), "status 'done'"),
    ('step', Step(status=Status.RUNNING), 'goes on with None'),
    ('step', Step(status=Status.INFRA_FAILURE), 'raises InfraError'),
    ('step', Step((Observation('3'),), reward=float('nan')), 'finite'),
    ('step', Step((Observation('3'),), reward='much'), 'real number'),
    ('verify', None, 'returns a Reward'),
    ('verify', 1.0, 'returns a Reward'),
    ('verify', StopIteration(), 'StopIteration'),
  ],
)
def test_no_answer_of_an_environment_leaves_the_loop(call, value, said):
  groups = run(make=lambda: Odd(call, value), tasks=TASKS[:1])
  for t in groups[0].trajectories:
    reached = call == 'reset' or t.turns and t.turns[0].stop.is_limit is False
    if reached:
      assert t.status is Status.ENVIRONMENT_ERROR, t.status
      assert t.reward is None and said in t.error


def test_openings_and_pasts_may_differ_in_a_group():
  """Samples that open otherwise, or go on from a past, among fresh ones."""

  class Opens(IdEnvironment):
    def reset(self, task):
      super().reset(task)
      n = opened.pop()
      return Opening((Message('user', ' '.join(map(str, ids(50 + n, 5)))),))

  for slots in (1, 2, 3):
    opened = [0, 1, 1, 0, 2, 0]
    groups = run(new_engine(slots), make=Opens, tasks=TASKS[:1], group_size=6)
    assert {t.status for t in groups[0].trajectories} <= {
      Status.DONE,
      Status.TOKEN_LIMIT,
    }
  base = run(tasks=TASKS[:1], group_size=3)
  past = base[0].trajectories[1]
  past = dataclasses.replace(
    past, segments=past.segments[:2], status=Status.RUNNING, reward=None,
    turn_rewards=(), state_keys=(), info={},
  )  # fmt: skip
  fresh = [Trajectory(TASKS[0], draw=5, sample=k) for k in range(3)]
  for slots in (1, 2, 3):
    again = run(
      new_engine(slots),
      tasks=TASKS[:1],
      prefixes=[[fresh[0], past, fresh[2]]],
    )
    assert_same(base, again, exact=False)


def test_infrastructure_is_retried_with_the_same_keys_then_a_status():
  base, log, stats = run(), [], CollectStats()
  engine = new_engine()
  # The third and fifth call of step fail, whoever makes them.
  retried = run(
    engine,
    make=lambda: IdEnvironment(fail=(3, 5), log=log),
    stats=stats,
    tool_threads=1,
  )
  assert_same(base, retried)
  assert stats.retries == 2 and stats.infra_failures == 0
  stats, log = CollectStats(), []
  lost = run(
    make=lambda: IdEnvironment(error=InfraError('gone'), log=log), stats=stats
  )
  for g in lost:
    for t in g.trajectories:
      assert t.status in (Status.INFRA_FAILURE, Status.TOKEN_LIMIT)
      if t.status is Status.INFRA_FAILURE:
        assert t.reward is None and 'InfraError: gone' in t.error
        assert t.info['attempts'] == 3
  assert stats.infra_failures > 0
  assert log.count('reset') == log.count('close')


def test_an_environment_that_raises_ends_its_own_episode_alone():
  for error in (KeyError('x'), RecursionError(), ValueError('bad')):
    groups = run(make=lambda error=error: IdEnvironment(error=error))
    statuses = {t.status for g in groups for t in g.trajectories}
    assert statuses <= {Status.ENVIRONMENT_ERROR, Status.TOKEN_LIMIT}
    assert Status.ENVIRONMENT_ERROR in statuses


def test_an_environment_that_cannot_be_made_is_a_status_too():
  def make():
    raise RuntimeError('no such image')

  groups = run(make=make)
  for g in groups:
    for t in g.trajectories:
      assert t.status is Status.ENVIRONMENT_ERROR
      assert 'no such image' in t.error and not t.segments


def test_environments_are_closed_once_also_when_the_loop_is_cut_off():
  made = []

  def make():
    made.append(IdEnvironment(delay=0.005))
    return made[-1]

  run(make=make)
  assert len(made) == 9 and all(e.closed == 1 for e in made)
  made.clear()

  def stop(group):
    raise KeyboardInterrupt

  engine = new_engine()
  with pytest.raises(KeyboardInterrupt):
    run(engine, make=make, on_group=stop)
  assert made and all(e.closed == 1 for e in made)
  assert engine.acquire() is not None


@pytest.mark.parametrize(
  'limits, prompt, status',
  [
    ({'context': 8}, 8, Status.PROMPT_TOO_LONG),
    ({'context': 8}, 7, Status.TOKEN_LIMIT),
    ({'model_tokens': 3}, 5, Status.TOKEN_LIMIT),
    ({'turns': 1, 'turn_tokens': 90}, 4, Status.TURN_LIMIT),
  ],
)
def test_limits_have_a_status_each(limits, prompt, status):
  engine = new_engine()
  groups = run(
    engine,
    tasks=[id_task('x', ids(8, prompt))],
    limits=dataclasses.replace(LIMITS, **limits),
    group_size=4,
  )
  statuses = {t.status for t in groups[0].trajectories}
  assert status in statuses
  assert statuses <= {status, Status.TOKEN_LIMIT}
  if status is Status.PROMPT_TOO_LONG:
    assert all(t.reward is None for t in groups[0].trajectories)


def test_bad_options_are_refused():
  with pytest.raises(ValueError, match='limits.context 97'):
    run(limits=dataclasses.replace(LIMITS, context=97))
  with pytest.raises(ValueError, match='2 tasks, 1 different ids'):
    run(tasks=[TASKS[0], TASKS[0]])
  with pytest.raises(ValueError, match='limit turns is 0'):
    Limits(turns=0)


# ---- the generator by hand ------------------------------------------------


def drive(trajectory, environment, segments, stop_at=None):
  """Answers an episode; returns what it returns, or the prefix at a yield.

  Decode requests are answered by the recorded segments, in order.
  """
  loop = episode(IdChat(), LIMITS, trajectory)
  request, n = next(loop), 0
  while True:
    if n == stop_at:
      loop.close()
      return request.trajectory
    n += 1
    if isinstance(request, Reset):
      answer = environment.reset(request.task)
    elif isinstance(request, Act):
      answer = environment.step(request.turn)
    else:
      assert isinstance(request, Decode)
      answer = segments[len(request.trajectory.turns)]
    try:
      request = loop.send(answer)
    except StopIteration as stop:
      return stop.value


def test_stopped_at_any_yield_and_rebuilt_it_goes_on_the_same():
  whole = next(
    t
    for g in run(limits=dataclasses.replace(LIMITS, turn_tokens=20))
    for t in g.trajectories
    if len(t.turns) == 3 and t.status is Status.DONE
  )
  blank = Trajectory(whole.task, draw=whole.draw, sample=whole.sample)
  for stop_at in range(7):  # reset, three turns of decode and act
    prefix = drive(blank, IdEnvironment(), whole.turns, stop_at)
    assert prefix.status is Status.RUNNING
    again = drive(prefix, IdEnvironment(), whole.turns)
    a, b = (
      trajectory_to_record(again),
      trajectory_to_record(whole.append(reward=None, info={})),
    )
    assert a[0] == b[0]
    for name in a[1]:
      np.testing.assert_array_equal(a[1][name], b[1][name])


def test_prefixes_go_on_through_the_engine_to_the_bit():
  base = run()
  for keep in (1, 2, 3):  # segments of the recorded trajectory
    prefixes = []
    for g in base:
      row = []
      for t in g.trajectories:
        turns = sum(s.source is Source.OBSERVATION for s in t.segments[:keep])
        ends = t.segments[:keep][-1].source is not Source.MODEL
        kept = t.segments[:keep] if ends else t.segments[: keep - 1]
        row.append(
          Trajectory(
            t.task, kept, draw=t.draw, sample=t.sample,
            turn_rewards=t.turn_rewards[:turns],
            state_keys=t.state_keys[:turns],
          )
        )  # fmt: skip
      prefixes.append(row)
    again = run(prefixes=prefixes)
    # A prefill in other pieces rounds differently: the same ids.
    assert_same(base, again, exact=False)
