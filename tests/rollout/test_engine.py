"""Promises 3, 4 and 5 at the engine: pauses, log-probs, neighbours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model as tiny

from agentjax.model import transformer
from agentjax.model.cache import Spans
from agentjax.rollout.engine import StaleKV
from agentjax.rollout.sampling import Sampling, trajectory_key
from agentjax.types import Source, Stop


def start(engine, slot, seed, turn=10, total=100, **sampling):
  key = trajectory_key(0, 0, f'task {seed}', 0, 0)
  engine.start(
    slot, key, Sampling(**sampling), turn_budget=turn, trajectory_budget=total
  )


def run(engine, steps=None):
  """Steps until every turn has ended; {slot: segment}."""
  ended = {}
  while engine.n_decoding:
    ended |= dict(engine.step(steps))
  return ended


def new_slot(engine, seed, n=10):
  slot = engine.acquire()
  engine.reset(slot)
  engine.extend(slot, tiny.tokens(seed, n))
  return slot


def same(a, b):
  for name in ('tokens', 'logprobs', 'logprobs_full', 'log_kept_mass'):
    np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
  assert a.stop is b.stop


@pytest.mark.parametrize('n_observation', [1, 3, 5, 21])
def test_resumed_logits_equal_a_fresh_prefill(n_observation):
  engine = tiny.engine()
  slot = new_slot(engine, 1)
  start(engine, slot, 1)
  segment = run(engine)[slot]
  before = engine.stats.tokens_prefilled
  observation = tiny.tokens(2, n_observation)
  engine.extend(slot, observation)
  assert engine.stats.tokens_prefilled - before == n_observation
  whole = np.concatenate([tiny.tokens(1, 10), segment.tokens, observation])
  fresh = tiny.engine()
  other = fresh.acquire()
  fresh.reset(other)
  fresh.extend(other, whole)
  kernel = transformer.head_kernel(tiny.params())
  a, b = (
    transformer.unembed(kernel, e._state.hidden[s], tiny.CONFIG)[:40]
    for e, s in ((engine, slot), (fresh, other))
  )
  assert jnp.abs(a - b).max() < 1e-5 * jnp.abs(b).max()
  assert int(jnp.argmax(a)) == int(jnp.argmax(b))


def test_resuming_runs_the_observation_alone_at_every_context(monkeypatch):
  """What the device is given is counted, not what the engine says of it."""
  engine = tiny.engine()
  ran = []
  extend = engine._state._extend

  def count(slot, piece, start, n):
    ran.append((int(start), int(n)))
    return extend(slot, piece, start, n)

  monkeypatch.setattr(engine._state, '_extend', count)
  observation = 21  # two pieces: 16 and, in a bucket of 16, the other 5
  slot = engine.acquire()
  for context in (1, 3, 15, 16, 17, 40, 63, 70):
    engine.reset(slot)
    engine.extend(slot, tiny.tokens(1, context))
    start(engine, slot, context, turn=4)
    run(engine)
    held = engine.length(slot)
    ran.clear()
    before = engine.stats.tokens_prefilled
    engine.extend(slot, tiny.tokens(2, observation))
    assert [n for _, n in ran] == [16, 5]
    assert [at for at, _ in ran] == [held, held + 16]
    assert engine.stats.tokens_prefilled - before == observation


@pytest.mark.parametrize('temperature', [0.6, 1.0, 1.3])
def test_sampler_and_learner_agree(temperature):
  engine = tiny.engine()
  slot = new_slot(engine, 3)
  start(engine, slot, 3, turn=40, temperature=temperature)
  segment = run(engine)[slot]
  tokens = np.concatenate([tiny.tokens(3, 10), segment.tokens])[None]
  hidden = transformer.forward(
    tiny.params(),
    tokens,
    np.arange(tokens.shape[1])[None],
    np.ones_like(tokens),
    tiny.CONFIG,
  )
  logits = transformer.logits(tiny.params(), hidden, tiny.CONFIG)
  logprobs = jax.nn.log_softmax(logits / temperature, -1)[0, 9:-1]
  expected = np.take_along_axis(
    np.asarray(logprobs), segment.tokens[:, None], 1
  )[:, 0]
  assert len(segment) > 5
  np.testing.assert_allclose(segment.logprobs, expected, atol=1e-4)
  np.testing.assert_array_equal(segment.log_kept_mass, 0)


def test_neighbours_slots_and_chunks_change_nothing():
  """Alone, in every slot, among others, in chunks of 1, 3 and 8: same bits."""
  alone = tiny.engine()
  slot = new_slot(alone, 5)
  start(alone, slot, 5, turn=20)
  expected = run(alone)[slot]
  assert len(expected) > 3
  for place in range(4):
    for steps in (1, 3, 8):
      engine = tiny.engine()
      order = [9, 10, 11]
      order.insert(place, 5)
      slots = {seed: new_slot(engine, seed, 5 + seed) for seed in order[:place]}
      slots[5] = new_slot(engine, 5)
      slots |= {s: new_slot(engine, s, 5 + s) for s in order[place + 1 :]}
      for seed, s in slots.items():
        start(engine, s, seed, turn=20, temperature=1.0 + (seed != 5))
      same(run(engine, steps)[slots[5]], expected)


def test_another_number_of_slots_differs_by_rounding_only():
  found = []
  for slots in (1, 2, 7):
    engine = tiny.engine(slots=slots)
    slot = new_slot(engine, 6)
    start(engine, slot, 6, turn=20)
    found.append(run(engine)[slot])
  for other in found[1:]:
    np.testing.assert_array_equal(other.tokens, found[0].tokens)
    np.testing.assert_allclose(other.logprobs, found[0].logprobs, atol=1e-5)


def test_a_fork_samples_what_its_own_prefill_would():
  engine = tiny.engine()
  first = new_slot(engine, 7)
  mark = engine.mark(first)
  start(engine, first, 100)
  run(engine)  # the marked row has gone on; its prefix stands
  second = engine.acquire()
  engine.fork(mark, second)
  start(engine, second, 7)
  forked = run(engine)[second]
  engine.fork(mark, first)  # in place: back to the prompt
  start(engine, first, 7)
  same(run(engine)[first], forked)
  plain = tiny.engine()
  slot = new_slot(plain, 7)
  start(plain, slot, 7)
  same(run(plain)[slot], forked)
  assert engine.stats.tokens_prefilled == 10


def test_a_mark_ends_with_its_row():
  engine = tiny.engine()
  slot = new_slot(engine, 1)
  mark = engine.mark(slot)
  engine.release(slot)
  again = engine.acquire()
  assert again == slot
  engine.fork(mark, again)  # still there: nobody used the slot
  engine.reset(again)
  with pytest.raises(ValueError, match='no longer there'):
    engine.fork(mark, engine.acquire())


def test_a_parked_row_comes_back_bit_by_bit():
  """Out of one slot, into another, in the middle of a turn."""
  expected = tiny.engine()
  slot = new_slot(expected, 5, 30)
  start(expected, slot, 5, turn=20)
  whole = run(expected)[slot]

  engine = tiny.engine()
  slot = new_slot(engine, 5, 30)
  start(engine, slot, 5, turn=20)
  assert not engine.step(2)
  parked = engine.park(slot)
  assert parked.bytes >= 30 * 2 * 2 * 8 * 4 * 3  # k and v, K, Q, float32, L
  other = new_slot(engine, 6)  # somebody else uses the row
  start(engine, other, 6)
  run(engine)
  back = engine.acquire()
  assert back != slot == other
  engine.unpark(parked, back)
  same(run(engine)[back], whole)
  with pytest.raises(ValueError, match='not in use'):
    engine.park(3)


def test_a_fork_in_the_past_goes_on_as_its_own_prefill_would():
  engine = tiny.engine()
  slot = new_slot(engine, 8, 20)
  start(engine, slot, 8, turn=12, temperature=1.5)
  segment = run(engine)[slot]
  past = np.concatenate([tiny.tokens(8, 20), segment.tokens])
  for at in (1, 7, 20, 21, len(past)):
    before = engine.stats.tokens_prefilled
    second = engine.acquire()
    engine.fork(engine.mark(slot, at), second)
    assert engine.stats.tokens_prefilled == before  # nothing is run again ...
    start(engine, second, 9, turn=6, temperature=0.0)
    forked = run(engine)[second]
    fresh = tiny.engine()
    third = fresh.acquire()
    fresh.reset(third)
    fresh.extend(third, past[:at])
    start(fresh, third, 9, turn=6, temperature=0.0)
    expected = run(fresh)[third]
    np.testing.assert_array_equal(forked.tokens, expected.tokens)
    np.testing.assert_allclose(
      forked.logprobs_full, expected.logprobs_full, atol=1e-5
    )
    engine.release(second)
  assert engine.stats.tokens_recomputed == 4  # ... but one token in the past


def test_a_cancelled_turn_is_what_it_was():
  engine = tiny.engine()
  slot = new_slot(engine, 5)
  start(engine, slot, 5, turn=20)
  engine.step(3)
  cut = engine.cancel(slot)
  assert cut.stop is Stop.CANCELLED and len(cut) == 3
  assert engine.n_decoding == 0 and engine.length(slot) == 13
  start(engine, slot, 5, turn=20)
  assert len(engine.cancel(slot)) == 0
  with pytest.raises(ValueError, match='no turn under way'):
    engine.cancel(slot)


def test_weights_that_arrive_in_a_turn():
  """Refused, kept, or the past is run again with the new ones."""
  for policy in StaleKV:
    engine = tiny.engine(stale_kv=policy)
    slot = new_slot(engine, 13)
    start(engine, slot, 13, turn=20, temperature=0.0)
    engine.step(4)
    if policy is StaleKV.REFUSE:
      with pytest.raises(ValueError, match='1 turns of version 0 are under'):
        engine.load(tiny.params(1), 7)
      assert engine.version == 0
      continue
    engine.load(tiny.params(1), 7)
    segment = run(engine)[slot]
    assert list(segment.versions[:5]) == [0] * 4 + [7]
    kept = policy is StaleKV.KEEP
    versions = ((0, 0), (14, 7)) if kept else ((0, 7),)
    assert engine.handle(slot).versions == versions
    fresh = tiny.engine(loaded=False)
    fresh.load(tiny.params(1), 7)
    other = fresh.acquire()
    fresh.reset(other)
    fresh.extend(other, np.concatenate([tiny.tokens(13, 10),
                                        segment.tokens[:4]]))  # fmt: skip
    start(fresh, other, 13, turn=16, temperature=0.0)
    expected = run(fresh)[other]
    gap = np.abs(expected.logprobs_full[:1] - segment.logprobs_full[4:5]).max()
    assert (gap > 1e-4) if kept else (gap < 1e-5)


def test_a_turn_that_begins_with_forced_text_can_complete_a_stop_in_it():
  engine = tiny.engine(stop_strings=['bc'])
  b = tiny.BYTES.index(b'b')
  for seed in range(400):
    slot = engine.acquire()
    engine.reset(slot)
    engine.extend(slot, np.array([5, b], np.int32))
    key = trajectory_key(seed, 0, '', 0, 0)
    engine.start(
      slot, key, Sampling(temperature=9.0), said=(b,),
      turn_budget=1, trajectory_budget=9,
    )  # fmt: skip
    segment = run(engine)[slot]
    engine.release(slot)
    begins_with_c = tiny.BYTES[segment.tokens[0]].startswith(b'c')
    assert (segment.stop is Stop.STOP_STRING) == begins_with_c
    if begins_with_c:
      break
  assert begins_with_c
  slot = engine.acquire()
  engine.reset(slot)
  c = tiny.BYTES.index(b'c')
  engine.extend(slot, np.array([5, b, c], np.int32))
  with pytest.raises(ValueError, match='hold a stop'):
    engine.start(slot, key, Sampling(), said=(b, c), turn_budget=2,
                 trajectory_budget=9)  # fmt: skip


@pytest.mark.parametrize('first', [4, 16, 256])
def test_spans_change_rounding_only(first):
  """Rows cut into spans of 4, 8, 16, ... or not at all."""
  engine = tiny.engine(store=functools.partial(Spans, first=first))
  assert len(engine._state.cache[0]['k']) == {4: 6, 16: 4, 256: 1}[first]
  assert engine._state.cache_bytes == tiny.engine()._state.cache_bytes
  found = {}
  for seed, n in ((1, 3), (2, 17), (3, 40)):
    slot = new_slot(engine, seed, n)
    start(engine, slot, seed, turn=20, temperature=0.0)
    found[slot] = seed, n
  for slot, segment in run(engine).items():
    seed, n = found[slot]
    tokens = np.concatenate([tiny.tokens(seed, n), segment.tokens])[None]
    hidden = transformer.forward(
      tiny.params(), tokens, np.arange(tokens.shape[1])[None],
      np.ones_like(tokens), tiny.CONFIG,
    )  # fmt: skip
    logits = transformer.logits(tiny.params(), hidden, tiny.CONFIG)
    logprobs = jax.nn.log_softmax(logits, -1)[0, n - 1 : -1]
    expected = np.take_along_axis(
      np.asarray(logprobs), segment.tokens[:, None], 1
    )[:, 0]
    np.testing.assert_allclose(segment.logprobs_full, expected, atol=1e-5)


def test_long_neighbours_in_more_spans_change_no_bit():
  found = []
  for others in (0, 3):
    engine = tiny.engine(store=functools.partial(Spans, first=8))
    slot = new_slot(engine, 5, 4)
    start(engine, slot, 5, turn=3)
    for i in range(others):
      start(engine, new_slot(engine, 20 + i, 60 + i), 20 + i, turn=20)
    found.append(run(engine)[slot])
  same(*found)


def test_stops_are_carried_not_inferred():
  engine = tiny.engine(stop_strings=['b'])
  slot = new_slot(engine, 11)
  seen = set()
  for seed in range(60):
    mark = engine.mark(slot)
    start(engine, slot, seed, turn=8, temperature=2.0)
    segment = run(engine)[slot]
    seen.add(segment.stop)
    text = b''.join(tiny.BYTES[t] for t in segment.tokens)
    hit = [t for t in segment.tokens if b'b' in tiny.BYTES[t] or t == 1]
    if segment.stop is Stop.END_OF_TURN:
      assert segment.tokens[-1] == tiny.STOP_ID and len(hit) == 1
    elif segment.stop is Stop.STOP_STRING:
      assert b'b' in tiny.BYTES[segment.tokens[-1]] and len(hit) == 1
    else:
      assert segment.stop is Stop.TURN_BUDGET
      assert len(segment) == 8 and not hit, text
    engine.fork(mark, slot)
  assert seen == {Stop.END_OF_TURN, Stop.STOP_STRING, Stop.TURN_BUDGET}


@pytest.mark.parametrize(
  'turn, total, prompt, stop, n',
  [
    (5, 9, 10, Stop.TURN_BUDGET, 5),
    (9, 5, 10, Stop.TRAJECTORY_BUDGET, 5),
    (9, 9, 92, Stop.CONTEXT, 4),
  ],
)
def test_the_binding_limit_is_named(turn, total, prompt, stop, n):
  engine = tiny.engine()
  slot = new_slot(engine, 12, prompt)
  start(engine, slot, 0, turn=turn, total=total, temperature=0.0)
  segment = run(engine)[slot]
  assert (segment.stop, len(segment)) == (stop, n)
  assert segment.source is Source.MODEL


def test_no_room_is_refused():
  engine = tiny.engine()
  slot = new_slot(engine, 12, 96)
  with pytest.raises(ValueError, match='0 tokens left by CONTEXT'):
    start(engine, slot, 0)
  with pytest.raises(ValueError, match='exceed the context of 96'):
    engine.extend(slot, tiny.tokens(0, 1))
  with pytest.raises(ValueError, match='not in use'):
    engine.extend(3, tiny.tokens(0, 1))


def test_stale_kv_is_refused_kept_or_recomputed():
  other = tiny.params(1)
  for policy in StaleKV:
    engine = tiny.engine(stale_kv=policy)
    slot = new_slot(engine, 13)
    start(engine, slot, 13, turn=4, temperature=0.0)
    first = run(engine)[slot]
    engine.load(other, 7)
    if policy is StaleKV.REFUSE:
      with pytest.raises(ValueError, match='version 0.*version 7'):
        engine.extend(slot, tiny.tokens(14, 3))
      continue
    engine.extend(slot, tiny.tokens(14, 3))
    start(engine, slot, 14, turn=4, temperature=0.0)
    second = run(engine)[slot]
    assert set(first.versions) == {0} and set(second.versions) == {7}
    whole = np.concatenate(
      [tiny.tokens(13, 10), first.tokens, tiny.tokens(14, 3)]
    )
    fresh = tiny.engine()
    fresh.load(other, 7)
    s = fresh.acquire()
    fresh.reset(s)
    fresh.extend(s, whole)
    start(fresh, s, 14, turn=4, temperature=0.0)
    expected = run(fresh)[s]
    gap = np.abs(expected.logprobs_full - second.logprobs_full).max()
    if policy is StaleKV.RECOMPUTE:
      np.testing.assert_array_equal(expected.tokens, second.tokens)
      assert gap < 1e-5
      assert engine.stats.tokens_recomputed == 14
      assert engine.stats.tokens_prefilled == 13
    else:
      assert gap > 1e-4  # the old cache really was kept


def test_versions_are_recorded_per_token():
  engine = tiny.engine(stale_kv=StaleKV.KEEP, chunk=4)
  slot = new_slot(engine, 15)
  start(engine, slot, 15, turn=8, temperature=0.0)
  ended = engine.step()
  engine.load(tiny.params(), 1)
  while not ended:
    ended = engine.step()
  assert list(ended[0][1].versions) == [0] * 4 + [1] * (len(ended[0][1]) - 4)


def test_padded_ids_are_never_sampled():
  engine = tiny.engine()
  slot = new_slot(engine, 16)
  start(engine, slot, 16, turn=80, temperature=50.0)
  segment = run(engine)[slot]
  assert segment.tokens.max() < tiny.CONFIG.vocab_size
  # Nearly uniform over the 40 ids with text, not over the 48 rows.
  assert abs(segment.logprobs.mean() + np.log(40)) < 0.05


def test_bad_options_are_refused():
  with pytest.raises(ValueError, match='buckets'):
    tiny.engine(buckets=(16, 4))
  with pytest.raises(ValueError, match='128 positions'):
    tiny.engine(context=256)
  with pytest.raises(RuntimeError, match='no weights'):
    tiny.engine(loaded=False).compile()
