"""The jitted programs of the engine: prefill one slot, fork one, decode all.

Floor 2, rollout/, under `engine`. Pure functions of arrays: no slot is known
here that is not an index. All decisions of a chunk are one fixed-shape `Plan`,
which a leader could broadcast; stops, budgets and sampling parameters are
data, never shapes.

Letters: S slots, C chunk, V vocabulary, D width, M kept ids of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.model import mesh as meshes
from agentjax.model import transformer
from agentjax.model.cache import Fresh
from agentjax.rollout.sampling import sample, uniform


class Plan(NamedTuple):
  """All decisions of one decode chunk; arrays over slots, and a step count."""

  steps: np.ndarray  # int32[]: iterations at most, at most the chunk size
  stay: np.ndarray  # int32[]: goes on while this many slots do, >= 1
  live_S: np.ndarray  # bool
  length_S: np.ndarray  # int32: tokens in the cache, also the RNG position
  budget_S: np.ndarray  # int32: tokens that may still be sampled, >= 1
  stop_state_S: np.ndarray  # int32: of the stop automaton
  key_S2: np.ndarray  # uint32
  temperature_S: np.ndarray  # float32
  top_k_S: np.ndarray  # int32
  top_p_S: np.ndarray  # float32
  min_p_S: np.ndarray  # float32


class Chunk(NamedTuple):
  """What a decode chunk made."""

  tokens_SC: jax.Array
  logprobs_SC: jax.Array
  logprobs_full_SC: jax.Array
  log_kept_mass_SC: jax.Array
  count_S: jax.Array  # int32: tokens sampled
  stop_S: jax.Array  # int32: GOES_ON, STRING, ID or BUDGET
  stop_state_S: jax.Array
  kept_SCM: jax.Array | None = None  # int32, see `sampling.Sampled`


GOES_ON, STRING, ID, BUDGET = range(4)


def extend(
  layout, hidden_SD, cache, slot, tokens, start, count, *, store, config, dtype
):
  """Runs one slot's tokens [T], of which `count` are real, from `start` on."""
  fresh = Fresh(start[None], count[None], slot)
  out, cache = transformer.extend(
    layout, tokens[None], fresh, cache, store, config, dtype=dtype
  )
  last_D = out[0, jnp.maximum(count - 1, 0)]
  last_D = jnp.where(count > 0, last_D, take(hidden_SD, slot, store.mesh))
  return put(hidden_SD, slot, last_D, store.mesh), cache


def take(hidden_SD, slot, mesh):
  """A slot's hidden state [D]."""
  return meshes.read_row(hidden_SD, slot, mesh)[0]


def put(hidden_SD, slot, hidden_D, mesh):
  """The hidden states with a slot's own."""
  return meshes.write_row(hidden_SD, hidden_D[None], slot, mesh)


def take_row(cache, slot, *, n, store):
  """The first n positions of a slot's row."""
  return store.take(cache, slot, n)


def put_row(hidden_SD, cache, slot, hidden_D, row, *, store):
  """What `take_row` gave, in a slot."""
  hidden_SD = put(hidden_SD, slot, hidden_D, store.mesh)
  return hidden_SD, store.put(cache, slot, row)


def fork(hidden_SD, cache, source, target, hidden_D, *, n, store):
  """Copies n positions of a row and the hidden state that goes with it."""
  row = store.take(cache, source, n)
  return put_row(hidden_SD, cache, target, hidden_D, row, store=store)


def chunk(
  layout, table, hidden_SD, cache, plan, *,
  capacity, stops, store, config, dtype, kept=0,
):  # fmt: skip
  """Samples up to plan.steps tokens in every live slot.

  A loop with a traced bound: any chunk size is the same program, and so the
  same rounding (design promise 5).
  """
  S = hidden_SD.shape[0]
  blank = jnp.zeros((S, capacity))
  out = Chunk(
    blank.astype(jnp.int32),
    blank,
    blank,
    blank,
    jnp.zeros(S, jnp.int32),
    jnp.where(plan.live_S, GOES_ON, BUDGET).astype(jnp.int32),
    plan.stop_state_S,
    jnp.full((S, capacity, kept), -1, jnp.int32) if kept else None,
  )

  # A slot that goes on has sampled in every iteration before, so that all
  # numbers of a chunk can be made at once, which costs no more than one.
  t = jnp.arange(capacity)
  u_SC = jax.vmap(uniform, (None, 1), 1)(
    plan.key_S2, plan.length_S[:, None] + t
  )

  def goes_on(carry):
    i, _, _, out = carry
    return (i < plan.steps) & ((out.stop_S == GOES_ON).sum() >= plan.stay)

  def body(carry):
    i, hidden_SD, cache, out = carry
    live_S = out.stop_S == GOES_ON
    length_S = plan.length_S + out.count_S
    drawn = sample(
      transformer.unembed(layout['head'], hidden_SD, config),
      jax.lax.dynamic_index_in_dim(u_SC, i, 1, keepdims=False),
      plan.temperature_S,
      plan.top_k_S,
      plan.top_p_S,
      plan.min_p_S,
      kept=kept,
    )

    def write(column, value):
      return column.at[:, i].set(jnp.where(live_S, value, 0))

    kept_SCM = out.kept_SCM
    if kept:
      ids = jnp.where(live_S[:, None], drawn.kept, -1)
      kept_SCM = kept_SCM.at[:, i].set(ids)

    count_S = out.count_S + live_S
    state_S = table[out.stop_state_S, drawn.token].astype(jnp.int32)
    stop_S = jnp.where(count_S >= plan.budget_S, BUDGET, GOES_ON)
    stop_S = jnp.where(state_S == stops.STRING, STRING, stop_S)
    stop_S = jnp.where(state_S == stops.ID, ID, stop_S)
    # The sampled token goes into the cache at once, also a turn's last one.
    new_SD, cache = transformer.extend(
      layout,
      drawn.token[:, None],
      Fresh(length_S, live_S.astype(jnp.int32), None),
      cache,
      store,
      config,
      dtype=dtype,
    )
    out = Chunk(
      write(out.tokens_SC, drawn.token),
      write(out.logprobs_SC, drawn.logprob),
      write(out.logprobs_full_SC, drawn.logprob_full),
      write(out.log_kept_mass_SC, drawn.log_kept_mass),
      count_S,
      jnp.where(live_S, stop_S, out.stop_S),
      jnp.where(live_S & (stop_S == GOES_ON), state_S, out.stop_state_S),
      kept_SCM,
    )
    hidden_SD = jnp.where(live_S[:, None], new_SD[:, 0], hidden_SD)
    return i + 1, hidden_SD, cache, out

  init = (jnp.int32(0), hidden_SD, cache, out)
  _, hidden_SD, cache, out = jax.lax.while_loop(goes_on, body, init)
  return hidden_SD, cache, out
