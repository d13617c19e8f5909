"""The engine's arrays on the device, and the calls that change them.

Floor 2, rollout/, under `engine`. The hidden state and the KV row of each slot;
every call here is one or a few calls of a compiled program. What a slot's row
means is the engine's to know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from agentjax.rollout.decode import Chunk, Plan
from agentjax.rollout.programs import Programs
from agentjax.rollout.weights import Weights


class State:
  """Arrays of an engine; see `Engine` for the arguments."""

  def __init__(
    self, programs: Programs, buckets: Sequence[int], weights: Weights
  ):
    self._programs, self._buckets = programs, tuple(buckets)
    self._weights = weights
    self.hidden, self.cache = programs.state()

  @property
  def cache_bytes(self) -> int:
    return sum(
      math.prod(x.sharding.shard_shape(x.shape))
      * x.dtype.itemsize
      * len(x.sharding.device_set)
      for x in jax.tree.leaves(self.cache)
    )

  @property
  def layout(self) -> Any:
    """The weights, laid out for decoding."""
    return self._weights.layout

  def compile(self, idle: Plan) -> int:
    """Runs every program once on a slot that nobody uses; their number."""
    for bucket in self._buckets:
      self._extend(0, np.zeros(bucket, np.int32), 0, 0)
    chunk = self.chunk(idle)
    hidden_D = self.hidden_of(0)
    prefixes = self._programs.store.prefixes
    for n in prefixes:
      self.fork(0, 0, hidden_D, n)
      self.put(0, hidden_D, self.take(0, n))
    jax.block_until_ready((self.hidden, chunk))
    return len(self._buckets) + 2 + 3 * len(prefixes)

  def run(self, slot: int, tokens: np.ndarray, start: int) -> None:
    """Runs tokens on top of the first `start` positions of a slot's row."""
    at = 0
    while at < len(tokens):
      rest = len(tokens) - at
      size = next((b for b in self._buckets if b >= rest), self._buckets[-1])
      count = min(rest, size)
      piece = np.zeros(size, np.int32)
      piece[:count] = tokens[at : at + count]
      self._extend(slot, piece, start + at, count)
      at += count

  def _extend(self, slot, piece, start, count):
    self.hidden, self.cache = self._programs.extend(
      self.layout,
      self.hidden,
      self.cache,
      np.int32(slot),
      piece,
      np.int32(start),
      np.int32(count),
    )

  def chunk(self, plan: Plan) -> Chunk:
    """One decode chunk; what it made, on the host."""
    self.hidden, self.cache, chunk = self._programs.chunk(
      self.layout, self.hidden, self.cache, plan
    )
    return jax.device_get(chunk)

  def hidden_of(self, slot: int) -> jax.Array:
    """A slot's hidden state [D]."""
    return self._programs.take(self.hidden, np.int32(slot))

  def fork(
    self, source: int, target: int, hidden_D: jax.Array, length: int
  ) -> None:
    """Copies `length` positions of a row; the hidden state is given."""
    self.hidden, self.cache = self._programs.fork(
      self.hidden,
      self.cache,
      np.int32(source),
      np.int32(target),
      hidden_D,
      n=self._prefix(length),
    )

  def take(self, slot: int, length: int) -> Any:
    """The first `length` positions of a row, in host memory."""
    n = self._prefix(length)
    # On a TPU or a GPU what a program returns is in device memory still.
    return jax.device_get(
      self._programs.take_row(self.cache, np.int32(slot), n=n)
    )

  def put(self, slot: int, hidden_D: jax.Array, row: Any) -> None:
    """What `take` gave, in a slot, with its hidden state."""
    self.hidden, self.cache = self._programs.put_row(
      self.hidden, self.cache, np.int32(slot), hidden_D, row
    )

  def clear(self, slot: int) -> None:
    """Zeros throughout a slot's row."""
    row = self.take(slot, self._programs.store.prefixes[-1])
    # Its hidden state is not used before there is another.
    self.put(slot, self.hidden_of(slot), jax.tree.map(np.zeros_like, row))

  def _prefix(self, length: int) -> int:
    """The shortest stretch of a row that can be moved and holds `length`."""
    return next(n for n in self._programs.store.prefixes if n >= length)
