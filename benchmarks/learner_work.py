"""What every learner is given, and what a step of it costs at least.

Benchmarks, under `learner`. Plain numpy: peers' workers read the file that
`Work.save` wrote. Knows no model's code, only its sizes.

Letters: B rows, T tokens, N loss-carrying tokens.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np

ROWS = 8
PROMPT = 128
TURNS = 4
TURN = 51  # sampled tokens of a turn
OBSERVATION = 60  # between two turns
# AdamW and the loss, for every system.
SETTINGS = {
  'learning_rate': 1e-5,
  'b1': 0.9,
  'b2': 0.95,
  'eps': 1e-8,
  'weight_decay': 0.01,
  'max_grad_norm': 1.0,
  'clip': 0.2,
}


def spans() -> list[tuple[bool, int]]:
  """(sampled, tokens) of a row's parts: prompt, turn, observation, turn ..."""
  between = [(False, OBSERVATION), (True, TURN)]
  return [(False, PROMPT), (True, TURN), *between * (TURNS - 1)]


@dataclasses.dataclass(frozen=True)
class Work:
  """One batch of trajectories of equal shape, without padding.

  Attributes:
    tokens: int32[B, T]; none is 0, with which some systems pad.
    mask: bool[B, T], True where the policy sampled the token.
    advantages: float32[B], of both signs. logprobs: float32[B, T] of the
      behaviour policy, 0 where nothing was sampled.
  """

  tokens: np.ndarray
  mask: np.ndarray
  advantages: np.ndarray
  logprobs: np.ndarray

  def save(self, file: pathlib.Path) -> None:
    np.savez(file, **dataclasses.asdict(self))

  def near(self, logprobs_BT: np.ndarray) -> Work:
    """With old log-probs around the given ones, so that few ratios clip."""
    noise = np.random.default_rng(3).normal(scale=0.1, size=self.mask.shape)
    old = np.where(self.mask, logprobs_BT + noise, 0)
    return dataclasses.replace(self, logprobs=old.astype(np.float32))


def read(file: str | pathlib.Path) -> Work:
  with np.load(file) as arrays:
    return Work(**arrays)


def make(vocabulary: int, rows: int = ROWS) -> Work:
  """The batch, its log-probs 0: see `Work.near`."""
  sampled, lengths = zip(*spans(), strict=True)
  mask = np.tile(np.repeat(sampled, lengths), (rows, 1))
  rng = np.random.default_rng(4)
  rewards = rng.normal(size=rows)
  return Work(
    rng.integers(1, vocabulary, mask.shape, dtype=np.int32),
    mask,
    ((rewards - rewards.mean()) / rewards.std()).astype(np.float32),
    np.zeros(mask.shape, np.float32),
  )


@dataclasses.dataclass(frozen=True)
class Flops:
  """Of one step, forward and backward; a multiply-add counts as two."""

  blocks: int  # products with the weights of all layers
  head: int  # of loss-carrying tokens alone
  attention: int  # over the keys that each query may see

  @property
  def total(self) -> int:
    return self.blocks + self.head + self.attention


def flops(config: Any, mask_BT: np.ndarray) -> Flops:
  """What no step can do without, for rows of one trajectory each.

  The backward pass has two products for each of the forward pass, and nothing
  is computed twice. Norms, softmax and the optimizer are left out.

  Args:
    config: a `ModelConfig`, of layers that attend to the whole past.
  """
  B, T = mask_BT.shape
  D, Q = config.width, config.head_size
  layer = D * Q * (2 * config.heads + 2 * config.kv_heads) + 3 * D * config.mlp
  seen = T * (T + 1) // 2  # queries times keys
  return Flops(
    blocks=3 * 2 * B * T * config.n_layers * layer,
    head=3 * 2 * int(mask_BT.sum()) * D * config.padded_vocab,
    attention=3 * 4 * B * seen * config.heads * Q * config.n_layers,
  )
