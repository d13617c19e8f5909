"""Our engine under load, through its public methods alone.

Benchmarks. Clocks are of the host, around everything that a trajectory costs
on the device thread: keys, `extend`, `start` and `step`. Waiting for the
device is part of it: the last `step` of a turn returns its tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
import numpy as np

from agentjax.rollout.engine import Engine
from agentjax.rollout.sampling import Sampling, trajectory_key
from agentjax.text.stop import StopAutomaton
from benchmarks.measure import Measurement
from benchmarks.models import Model
from benchmarks.worker import Clock
from benchmarks.workloads import Conversations

# Pieces in which prompts and observations run. Multiples of both are exact,
# so that re-prefilling a longer past pays for no padding either.
BUCKETS = (64, 128)


def make_engine(
  model: Model, *, slots: int, context: int, stop_ids: Sequence[int] = ()
) -> Engine:
  """A compiled engine with the model's weights; nothing else may compile."""
  no_text = [b''] * model.config.vocab_size
  engine = Engine(
    model.config,
    StopAutomaton.build(no_text, [], stop_ids),
    slots=slots,
    context=context,
    buckets=BUCKETS,
  )
  engine.load(model.params, 0)
  engine.compile()
  return engine


def decode(
  engine: Engine, prompts: np.ndarray, new_tokens: int, seed: int
) -> Measurement:
  """Samples `new_tokens` after each prompt [B, P], in one slot each.

  Returns:
    `seconds` in all, `decode_seconds` without the prompts, `tokens` sampled.
  """
  clock = Clock()
  slots = [_fresh_slot(engine) for _ in prompts]
  for slot, prompt in zip(slots, prompts, strict=True):
    engine.extend(slot, prompt)
  _wait(engine, slots[-1])
  prefill = clock.read()['seconds']
  for i, slot in enumerate(slots):
    _start(engine, slot, seed, i, new_tokens)
  turns = _finish(engine)
  out = clock.read()
  for slot in slots:
    engine.release(slot)
  return {
    **out,
    'decode_seconds': out['seconds'] - prefill,
    'tokens': sum(len(segment) for segment in turns.values()),
  }


def multiturn(
  engine: Engine, work: Conversations, seed: int, *, reprefill: bool
) -> Measurement:
  """All trajectories turn by turn, in one slot each.

  Args:
    reprefill: empty the slot before every turn and give it the whole past, as
      an engine does that keeps no KV state over a tool call.

  Returns:
    `seconds`, `tokens` sampled, `prefilled_tokens`, and `processed_tokens`:
    both together, all that went through the model.
  """
  before = engine.stats.tokens_prefilled
  clock = Clock()
  slots = [_fresh_slot(engine) for _ in work.prompts]
  pasts = [[prompt] for prompt in work.prompts]
  sampled = 0
  for turn in range(work.turns):
    for i, slot in enumerate(slots):
      if reprefill:
        engine.reset(slot)
        engine.extend(slot, np.concatenate(pasts[i]))
      else:
        engine.extend(slot, pasts[i][-1])
      _start(engine, slot, seed, i, work.turn_tokens)
    segments = _finish(engine)
    sampled += sum(len(segment) for segment in segments.values())
    if turn + 1 < work.turns:
      for i, slot in enumerate(slots):
        pasts[i] += [segments[slot].tokens, work.observations[i, turn]]
  out = clock.read()
  for slot in slots:
    engine.release(slot)
  prefilled = engine.stats.tokens_prefilled - before
  return {
    **out,
    'tokens': sampled,
    'prefilled_tokens': prefilled,
    'processed_tokens': prefilled + sampled,
  }


def resume(
  engine: Engine, contexts: Sequence[int], ids: np.ndarray, seed: int
) -> Measurement:
  """Seconds from an observation to the first token after it, by context.

  Args:
    contexts: ascending lengths of what is in the slot by then.
    ids: int32[longest context + observation]; the observation is its end.

  Returns:
    `seconds` in all, and per context `resume_CONTEXT`, with `tokens_CONTEXT`:
    how many tokens the engine says it processed to resume.
  """
  observation = ids[contexts[-1] :]
  out = {}
  clock = Clock()
  slot = _fresh_slot(engine)
  held = 0
  for context in contexts:
    engine.extend(slot, ids[held:context])
    mark = engine.mark(slot)
    _wait(engine, slot)
    before = engine.stats.tokens_prefilled
    latency = Clock()
    engine.extend(slot, observation)
    _start(engine, slot, seed, context, 1)
    _finish(engine, steps=1)
    out[f'resume_{context}'] = latency.read()['seconds']
    out[f'tokens_{context}'] = engine.stats.tokens_prefilled - before
    engine.fork(mark, slot)
    held = context
  engine.release(slot)
  return {**clock.read(), **out}


def first_tokens(engine: Engine, prompts: np.ndarray) -> list[int]:
  """The likeliest next token of every prompt, to compare weights by."""
  slots = [_fresh_slot(engine) for _ in prompts]
  for i, slot in enumerate(slots):
    engine.extend(slot, prompts[i])
    _start(engine, slot, 0, i, 1, Sampling(temperature=0.0))
  turns = _finish(engine)
  for slot in slots:
    engine.release(slot)
  return [int(turns[slot].tokens[0]) for slot in slots]


def _fresh_slot(engine: Engine) -> int:
  slot = engine.acquire()
  if slot is None:
    raise RuntimeError(
      f'all {engine.n_slots} slots are held: give the engine one a trajectory'
    )
  engine.reset(slot)
  return slot


def _start(
  engine: Engine, slot: int, seed: int, i: int, tokens: int, sampling=None
) -> None:
  engine.start(
    slot,
    trajectory_key(seed & 0xFFFF, 0, str(i), 0, 0),
    sampling or Sampling(),
    turn_budget=tokens,
    trajectory_budget=tokens,
  )


def _finish(engine: Engine, steps: int | None = None) -> dict:
  """Steps until every turn has ended; slot -> MODEL segment."""
  out = {}
  while engine.n_decoding:
    out.update(engine.step(steps))
  return out


def _wait(engine: Engine, slot: int) -> None:
  """Until the device has done what it was given; a mark holds its last."""
  jax.block_until_ready(vars(engine.mark(slot)))


def usable_cores() -> int:
  return len(os.sched_getaffinity(0))
