"""What must not go wrong silently: stale states, misuse, NaN, interruptions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model as tiny
from fakes import IdChat, IdEnvironment, id_task
from test_engine import new_slot, run, same, start

from agentjax.rollout.collect import collect
from agentjax.rollout.engine import Engine, StaleKV
from agentjax.rollout.episode import Limits
from agentjax.rollout.sampling import Sampling, trajectory_key
from agentjax.text.stop import StopAutomaton
from agentjax.types import Status, Stop, Trajectory


def turn(engine, slot, **kw):
  start(engine, slot, 1, **kw)
  return run(engine)[slot]


def test_what_is_not_a_number_ends_with_its_trajectory():
  """Weights of NaN, then good ones: the rows are as good as new ones."""
  engine = tiny.engine(stale_kv=StaleKV.KEEP)
  want = turn(engine, slot := new_slot(engine, 1, n=40))
  engine.load(jax.tree.map(lambda x: x * jnp.nan, tiny.params()), 1)
  engine.reset(slot)
  engine.extend(slot, tiny.tokens(2, 60))
  assert np.isnan(turn(engine, slot).logprobs).all()
  engine.load(tiny.params(), 2)
  engine.reset(slot)
  engine.extend(slot, tiny.tokens(1, 40))
  same(turn(engine, slot), want)


def test_a_parked_turn_goes_on_by_itself_each_time():
  engine = tiny.engine()
  want = turn(engine, new_slot(engine, 1), turn=12)
  slot = new_slot(engine, 1)
  start(engine, slot, 1, turn=12)
  engine.step(4)
  parked = engine.park(slot)
  slots = [engine.acquire(), engine.acquire()]
  for s in slots:
    engine.unpark(parked, s)
  done = run(engine)
  for s in slots:
    same(done[s], want)


def test_a_turn_under_way_is_not_written_over():
  engine = tiny.engine()
  slot = new_slot(engine, 1)
  mark = engine.mark(slot)
  start(engine, slot, 1)
  for call in (
    lambda: engine.extend(slot, tiny.tokens(2, 3)),
    lambda: engine.reset(slot),
    lambda: engine.fork(mark, slot),
  ):
    with pytest.raises(ValueError, match='a turn under way'):
      call()
  same(run(engine)[slot], turn(engine, new_slot(engine, 1)))


def test_the_engine_keeps_tokens_of_its_own():
  engine = tiny.engine()
  slot = engine.acquire()
  engine.reset(slot)
  mine = tiny.tokens(1, 10)
  engine.extend(slot, mine)
  mine[:] = 2
  np.testing.assert_array_equal(engine.mark(slot).tokens, tiny.tokens(1, 10))


@pytest.mark.parametrize('policy', StaleKV)
def test_a_fork_in_the_past_says_which_weights_ran_its_token(policy):
  engine = tiny.engine(stale_kv=policy)
  slot = new_slot(engine, 1)
  mark = engine.mark(slot, 6)
  engine.load(tiny.params(1), 1)
  other = engine.acquire()
  if policy is StaleKV.REFUSE:
    with pytest.raises(ValueError, match='of version 0'):
      engine.fork(mark, other)
    return
  engine.fork(mark, other)
  versions = {StaleKV.KEEP: ((0, 0), (5, 1)), StaleKV.RECOMPUTE: ((0, 1),)}
  assert engine.handle(other).versions == versions[policy]
  if policy is StaleKV.RECOMPUTE:
    fresh = engine.acquire()
    engine.reset(fresh)
    engine.extend(fresh, mark.tokens)
    a, b = (engine._state.hidden[s] for s in (other, fresh))
    np.testing.assert_array_equal(a, b)


def test_a_stale_parked_turn_is_refused_where_it_comes_back():
  """And not by a `step` that others need."""
  engine = tiny.engine()
  slot = new_slot(engine, 1)
  start(engine, slot, 1)
  engine.step(2)
  parked = engine.park(slot)
  engine.load(tiny.params(1), 1)
  neighbour = new_slot(engine, 2)
  start(engine, neighbour, 2)
  with pytest.raises(ValueError, match='parked turn is of version 0'):
    engine.unpark(parked, engine.acquire())
  assert run(engine)[neighbour]


@pytest.mark.parametrize(
  'tokens, said',
  [
    ([5, 99], 'token id 99 is not of the vocabulary'),
    ([-1], 'token id -1'),
    ([tiny.CONFIG.vocab_size], 'token id 40'),
    ([3.7], 'integer ids'),
    ([[1, 2]], 'a row of'),
  ],
)
def test_tokens_that_are_none(tokens, said):
  engine = tiny.engine()
  slot = new_slot(engine, 1)
  with pytest.raises(ValueError, match=said):
    engine.extend(slot, tokens)
  assert engine.length(slot) == 10


def test_slots_that_are_none():
  engine = tiny.engine()
  for slot in (-1, 4):
    with pytest.raises(ValueError, match='there are 0 to 3'):
      engine.reset(slot)
  with pytest.raises(ValueError, match='ended 0'):
    engine.step(ended=0)


def test_an_interrupted_step_leaves_nothing_that_could_be_wrong(monkeypatch):
  engine = tiny.engine()
  slot = new_slot(engine, 1)
  start(engine, slot, 1)
  chunk = engine._state.chunk

  def interrupted(plan):
    chunk(plan)
    raise KeyboardInterrupt

  monkeypatch.setattr(engine._state, 'chunk', interrupted)
  with pytest.raises(KeyboardInterrupt):
    engine.step()
  monkeypatch.undo()
  assert engine.n_decoding == 0 and engine.length(slot) == 0
  with pytest.raises(ValueError, match='cannot start a turn'):
    start(engine, slot, 1)
  engine.extend(slot, tiny.tokens(1, 10))
  same(turn(engine, slot), turn(engine, new_slot(engine, 1)))


def test_parameters_of_another_model_are_refused():
  engine = tiny.engine()
  with pytest.raises(ValueError, match='not parameters of this model'):
    engine.load(tiny.params(config=tiny.PLAIN), 1)
  assert engine.version == 0


@pytest.mark.parametrize('context', [96, 64])
def test_the_context_is_said_to_have_ended_a_turn(context):
  engine = Engine(
    tiny.PLAIN, StopAutomaton.build(tiny.BYTES, [], []), slots=1, context=96,
    chunk=16, buckets=(16,),
  )  # fmt: skip
  engine.load(tiny.params(config=tiny.PLAIN), 0)
  slot = new_slot(engine, 1)
  engine.start(
    slot, trajectory_key(0, 0, 'x', 0, 0), Sampling(), turn_budget=500,
    trajectory_budget=500, context=context,
  )  # fmt: skip
  assert run(engine)[slot].stop is Stop.CONTEXT
  assert engine.length(slot) == context


def test_collect_does_not_take_somebody_elses_turns():
  engine = tiny.engine()
  start(engine, new_slot(engine, 1), 1)
  limits = Limits(turns=1, turn_tokens=4, context=32, observation_tokens=4)
  with pytest.raises(ValueError, match='turns of somebody else'):
    collect(
      [id_task('x', [5, 6, 7])], group_size=1, engine=engine, chat=IdChat(),
      make_environment=IdEnvironment, limits=limits, sampling=Sampling(),
      seed=0, draw=0,
    )  # fmt: skip


@pytest.mark.parametrize('kind', ['rbg', 'unsafe_rbg'])
def test_no_flag_of_jax_changes_what_is_sampled(kind):
  want = trajectory_key(3, 1, 'task', 0, 0)
  with jax.default_prng_impl(kind):
    np.testing.assert_array_equal(trajectory_key(3, 1, 'task', 0, 0), want)


def test_a_stop_string_that_no_text_holds():
  with pytest.raises(ValueError, match='surrogate'):
    StopAutomaton.build(tiny.BYTES, ['\ud800'], [])


def test_prefill_has_its_own_time():
  """The device's work on a prompt is not the next chunk's."""
  engine = tiny.engine()
  slot = new_slot(engine, 1)
  start(engine, slot, 1, turn=1)
  before = engine.stats.prefill_seconds
  run(engine)
  assert engine.stats.prefill_seconds > before


# With a head of its own, so that only who reads an id has its NaN.
UNTIED = dataclasses.replace(tiny.PLAIN, tied=False)


def nan_for(token):
  """Parameters in which one id has no numbers."""
  params = tiny.params(config=UNTIED)
  table = np.array(params['embed']['table'])
  table[token] = np.nan
  return params | {'embed': {'table': jnp.asarray(table)}}


@pytest.mark.parametrize('cache_dtype', ['float32', 'float16'])
def test_nan_in_a_prompt_is_seen_and_stays_there(cache_dtype):
  """The rest of the trajectory does not go on as if nothing had been."""
  engine = tiny.engine(config=UNTIED, cache_dtype=cache_dtype, slots=1)
  want = turn(engine, slot := new_slot(engine, 1))
  engine.release(slot)
  engine.load(nan_for(7), 1)
  slot = engine.acquire()
  engine.reset(slot)
  engine.extend(slot, np.array([5, 7, 9, 11]))
  assert np.isnan(turn(engine, slot).logprobs).all()
  engine.release(slot)
  engine.load(tiny.params(config=UNTIED), 2)
  same(turn(engine, new_slot(engine, 1)), want)


def test_what_no_numbers_sampled_is_a_failure_of_infrastructure():
  engine = tiny.engine(config=UNTIED, slots=2)
  engine.load(nan_for(7), 1)
  tasks = [id_task('bad', [5, 7, 9]), id_task('good', [5, 6, 9])]
  limits = Limits(turns=2, turn_tokens=4, context=64, observation_tokens=4)
  groups = collect(
    tasks, group_size=2, engine=engine, chat=IdChat(),
    make_environment=IdEnvironment, limits=limits, sampling=Sampling(top_k=1),
    seed=0, draw=0,
  )  # fmt: skip
  bad, good = (g.trajectories for g in groups)
  assert all(t.status is Status.INFRA_FAILURE for t in bad)
  assert all('no numbers' in t.error and t.reward is None for t in bad)
  assert all(t.status is not Status.INFRA_FAILURE for t in good)


def test_a_prefix_goes_on_with_its_own_key():
  """Sample 2 of a recorded group, run again alone, is sample 2."""
  engine = tiny.engine(config=tiny.PLAIN)
  task = id_task('x', [5, 6, 7])
  limits = Limits(turns=1, turn_tokens=8, context=64, observation_tokens=4)
  options = {
    'engine': engine, 'chat': IdChat(), 'make_environment': IdEnvironment,
    'limits': limits, 'sampling': Sampling(), 'seed': 0, 'draw': 3,
  }  # fmt: skip
  (group,) = collect([task], group_size=3, **options)
  again = Trajectory(task, draw=3, sample=2)
  (alone,) = collect([task], group_size=1, prefixes=[[again]], **options)
  same(alone.trajectories[0].turns[0], group.trajectories[2].turns[0])


def test_values_that_would_stop_every_slot_are_refused_where_they_come_in():
  engine = tiny.engine()
  slot = new_slot(engine, 1)
  with pytest.raises(ValueError, match='uint32'):
    engine.start(
      slot, np.zeros(3, np.uint32), Sampling(), turn_budget=4,
      trajectory_budget=4,
    )  # fmt: skip
  for bad in (2**31, 2.5):
    with pytest.raises(ValueError, match='top_k'):
      Sampling(top_k=bad)
  with pytest.raises(ValueError, match='version'):
    engine.load(tiny.params(), 2**31)
  with pytest.raises(ValueError, match='acquire it first'):
    engine.reset(3)


@pytest.mark.parametrize('name', ['seed', 'draw', 'sample', 'branch'])
def test_every_number_of_a_key_is_folded_in_whole(name):
  numbers = {'seed': 3, 'draw': 1, 'task_id': 'task', 'sample': 0, 'branch': 0}
  keys = [
    tuple(trajectory_key(**numbers | {name: value}))
    for value in (5, 7, 2**31, 2**32 - 1, np.int64(6))
  ]
  assert len(set(keys)) == 5
  for bad in (-1, 2**32, 2**32 + 5, 0.5):
    with pytest.raises(ValueError, match=f'{name} {bad}'):
      trajectory_key(**numbers | {name: bad})


def test_an_automaton_of_fewer_ids_than_the_models_is_refused():
  n = tiny.CONFIG.vocab_size
  short = StopAutomaton.build(tiny.BYTES[: n - 1], [], [1])
  with pytest.raises(ValueError, match=f'{n - 1} ids and the model samples'):
    Engine(tiny.CONFIG, short, slots=1, context=32)


def test_rows_without_text_leave_a_stop_as_it_is():
  stops = StopAutomaton.build(tiny.BYTES, ['bc', 'cd'], [1])
  engine = Engine(tiny.CONFIG, stops, slots=1, context=32)
  table = np.asarray(engine._state._programs._table)
  states, ids = table.shape
  assert ids == tiny.CONFIG.padded_vocab > tiny.CONFIG.vocab_size
  for state in range(states):
    assert set(table[state, tiny.CONFIG.vocab_size :]) == {state}


def test_forced_text_that_does_not_end_the_slot_is_refused():
  engine = tiny.engine()
  slot = engine.acquire()
  engine.reset(slot)
  engine.extend(slot, np.array([5, 6, 7]))
  key = trajectory_key(0, 0, '', 0, 0)
  options = {'turn_budget': 2, 'trajectory_budget': 2}
  for said in ((8,), (5, 6), (4, 5, 6, 7), (7, 99)):
    with pytest.raises(ValueError, match='does not end with the forced'):
      engine.start(slot, key, Sampling(), said=said, **options)
  engine.start(slot, key, Sampling(), said=(6, 7), **options)
  assert engine.n_decoding == 1


def test_marks_are_told_apart_by_what_they_are():
  engine = tiny.engine()
  slot = new_slot(engine, 1)
  a, b = engine.mark(slot), engine.mark(slot)
  assert a == a and a != b and len({a, b, a}) == 2
  parked = engine.copy(a)
  assert parked == parked and parked != engine.copy(a) and hash(parked)


def test_a_version_names_its_weights():
  """The same ones again are nothing to do; others are seen."""
  engine = tiny.engine(stale_kv=StaleKV.REFUSE)
  slot = new_slot(engine, 1)
  start(engine, slot, 1)
  layout = engine._state.layout
  mine = tiny.params(config=tiny.CONFIG)  # those that it was made with
  engine.load(mine, 0)  # in the middle of a turn, too
  assert engine._state.layout is layout
  engine.load(jax.tree.map(jnp.copy, tiny.params()), 0)
  on_host = jax.tree.map(np.array, tiny.params())
  engine.load(on_host, 0)
  with pytest.raises(ValueError, match='version 0 is loaded, with other'):
    engine.load(tiny.params(1), 0)
  on_host['embed']['table'][3, 3] += 1  # the very array, written over
  with pytest.raises(ValueError, match='version 0 is loaded, with other'):
    engine.load(on_host, 0)
  plain = tiny.engine()
  same(run(engine)[slot], turn(plain, new_slot(plain, 1)))


def test_weights_that_are_no_numbers_are_the_same_again():
  engine = tiny.engine(stale_kv=StaleKV.KEEP)
  bad = jax.tree.map(lambda x: x * jnp.nan, tiny.params())
  engine.load(bad, 1)
  engine.load(jax.tree.map(jnp.copy, bad), 1)
  assert engine.version == 1
