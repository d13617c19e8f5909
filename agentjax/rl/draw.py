"""What an advantage estimator sees of one draw, and the seam it fits into.

Floor 1, rl/. Host-side numpy in float64; knows no model, no text, no JAX. An
estimator is a function

  estimator(draw: Draw, **options) -> list of float64[T], one a trajectory,

0 at every token that the policy did not sample and in every trajectory that is
not valid. What depends on tokens is indexed by label position: entry t belongs
to token t, and the value at t is that of the state before it. A `Draw` is
clean once it is made: nothing that stands under the mask is in it any more.

Letters: N trajectories, T tokens (of one trajectory), K turns (of one).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Estimator = Callable[..., list[np.ndarray]]
# (rewards_T, mask_T) -> rewards on sampled slots alone, how many were not.
Place = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, int]]


class MissingData(ValueError):
  """An estimator needs what this draw does not hold."""


class MissingParts(MissingData):
  """It needs parts that not every reward of this draw has."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
  """Which leading tokens of a row are copies of another row's.

  Attributes:
    parents_N: the row that this one was forked from, -1 for none.
    shared_N: how many leading tokens are the parent's.
  """

  parents_N: np.ndarray
  shared_N: np.ndarray

  def __post_init__(self):
    n = len(self.parents_N)
    for i, p in enumerate(self.parents_N):
      if not -1 <= p < n or p == i:
        raise ValueError(f'row {i} of {n} has row {p} for a parent')
    self.order()

  def order(self) -> list[int]:
    """All rows, each behind its parent."""
    done: list[int] = []
    placed = np.zeros(len(self.parents_N), bool)
    while len(done) < len(placed):
      ready = [
        i
        for i, p in enumerate(self.parents_N)
        if not placed[i] and (p < 0 or placed[p])
      ]
      if not ready:
        raise ValueError(f'parents {list(self.parents_N)} go in a circle')
      done += ready
      placed[ready] = True
    return done

  def roots(self) -> np.ndarray:
    """int[N]: the row that the tree of each row began with."""
    out = np.arange(len(self.parents_N))
    for i in self.order():
      if self.parents_N[i] >= 0:
        out[i] = out[self.parents_N[i]]
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class Draw:
  """One draw. Made by `make`, which checks and cleans what it is given.

  Attributes:
    rewards_N: outcome of each trajectory; 0 where it is not valid.
    groups_N: int; equal numbers, one group.
    valid_N: False for what tells nothing of the policy (infrastructure): it is
      in no statistic and has no advantage.
    masks: bool[T]: this token was sampled by the policy.
    turns: int32[T]: turn of each sampled token, from 0 on; -1 where not
      sampled.
    turn_rewards: float64[K], of each turn alone, without the outcome.
    state_keys: K names of the state before each turn, None where unknown.
    token_rewards: float64[T], rewards beside those of turns and outcome.
    values: float64[T], or None.
    bootstrap_N: value of the state that a trajectory was cut in; 0 where it
      ended by itself.
    misplaced: rewards that stood where nothing was sampled.
    tree: which rows share what they begin with, or None if nobody knows.
    parts: rewards by name, float64[N] each.
    baselines_N: reward of the greedy answer, or None.
    turn_values: float64[K], value of the state before each turn, or None.
    answer_probs: float64[K], probability of the right answer in the state
      before each turn, or None.
    logprobs, sum_squares: float64[T], of each token and of its distribution
      (the sum of squared probabilities), or None.
  """

  rewards_N: np.ndarray
  groups_N: np.ndarray
  valid_N: np.ndarray
  masks: tuple[np.ndarray, ...]
  turns: tuple[np.ndarray, ...]
  turn_rewards: tuple[np.ndarray, ...]
  state_keys: tuple[tuple[str | None, ...], ...]
  token_rewards: tuple[np.ndarray, ...]
  bootstrap_N: np.ndarray
  values: tuple[np.ndarray, ...] | None = None
  misplaced: int = 0
  tree: Tree | None = None
  parts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  baselines_N: np.ndarray | None = None
  turn_values: tuple[np.ndarray, ...] | None = None
  answer_probs: tuple[np.ndarray, ...] | None = None
  logprobs: tuple[np.ndarray, ...] | None = None
  sum_squares: tuple[np.ndarray, ...] | None = None

  def __len__(self) -> int:
    return len(self.rewards_N)

  def need(self, *names: str) -> tuple:
    """These optional fields.

    Raises:
      MissingData: one of them is not there.
    """
    found = tuple(getattr(self, name) for name in names)
    for name, value in zip(names, found, strict=True):
      if value is None:
        raise MissingData(f'this estimator needs {name}, and the draw has none')
    return found

  def masks_valid(self) -> list[np.ndarray]:
    """The masks, all False in a trajectory that is not valid."""
    return [
      m if ok else np.zeros_like(m)
      for m, ok in zip(self.masks, self.valid_N, strict=True)
    ]

  def turn_ends(self) -> list[np.ndarray]:
    """int[K] a trajectory: the last sampled token of each turn."""
    out = []
    for mask, turn, rewards in zip(
      self.masks, self.turns, self.turn_rewards, strict=True
    ):
      ends, at = np.zeros(len(rewards), int), np.flatnonzero(mask)
      ends[turn[at]] = at  # of equal indices the last one stays
      out.append(ends)
    return out


def make(
  rewards: Sequence[float],
  groups: Sequence[int],
  masks: Sequence[np.ndarray],
  *,
  valid: Sequence[bool] | None = None,
  turns: Sequence[np.ndarray] | None = None,
  turn_rewards: Sequence[Sequence[float]] | None = None,
  state_keys: Sequence[Sequence[str | None]] | None = None,
  token_rewards: Sequence[np.ndarray] | None = None,
  bootstrap: Sequence[float] | None = None,
  place: Place | None = None,
  misplaced: int = 0,
  **others,
) -> Draw:
  """A clean Draw; what is not given is 0, unknown, or (turns) one turn.

  Args:
    turns: ids at sampled tokens, in order, none left out.
    place: what becomes of a token reward where nothing was sampled;
      `move_to_sampled` if None.
    misplaced: counted before.
    others: the optional fields of Draw, by name.

  Raises:
    ValueError: shapes disagree, turn ids leave one out or go back, or a
      valid trajectory has a reward that is no finite number.
  """
  masks = [np.array(m, bool) for m in masks]
  n = len(masks)
  valid = np.ones(n, bool) if valid is None else np.array(valid, bool)
  rewards = _numbers('rewards', rewards, n)
  if not np.isfinite(rewards[valid]).all():
    raise ValueError(
      f'rewards {rewards}: a valid trajectory has a finite one; say that it '
      'is not valid where there is none'
    )
  if turns is None:
    turns = [np.zeros(len(m), np.int32) for m in masks]
  turns = [
    _turn_ids(i, t, m)
    for i, (t, m) in enumerate(zip(turns, masks, strict=True))
  ]
  counts = [int(t.max(initial=-1)) + 1 for t in turns]
  if token_rewards is None:
    token_rewards = [np.zeros(len(m)) for m in masks]
  placed, astray = [], misplaced
  for given, mask in zip(token_rewards, masks, strict=True):
    kept, moved = (place or move_to_sampled)(
      _tokens('token_rewards', given, mask), mask
    )
    placed.append(kept)
    astray += moved
  return Draw(
    rewards_N=np.where(valid, rewards, 0.0),
    groups_N=np.array(groups).reshape(n),
    valid_N=valid,
    masks=tuple(masks),
    turns=tuple(turns),
    turn_rewards=_by_turn('turn_rewards', turn_rewards, counts, 0.0),
    state_keys=tuple(
      tuple(keys)
      for keys in _by_turn_list('state_keys', state_keys, counts, None)
    ),
    token_rewards=tuple(placed),
    bootstrap_N=_numbers('bootstrap', bootstrap, n),
    misplaced=astray,
    **_optional(others, masks, counts),
  )


_PER_TOKEN = ('values', 'logprobs', 'sum_squares')
_PER_TURN = ('turn_values', 'answer_probs')


def _optional(given: Mapping, masks, counts) -> dict:
  out = {k: v for k, v in given.items() if v is not None}
  for name in _PER_TOKEN:
    if name in out:
      pairs = zip(out[name], masks, strict=True)
      # Where first: whatever stands under the mask is gone from here on.
      out[name] = tuple(np.where(m, _tokens(name, x, m), 0.0) for x, m in pairs)
  for name in _PER_TURN:
    if name in out:
      out[name] = _by_turn(name, out[name], counts, 0.0)
  if 'tree' in out:
    _check_tree(out['tree'], masks)
  if 'parts' in out:
    out['parts'] = {
      k: _numbers(f'part {k}', v, len(masks)) for k, v in out['parts'].items()
    }
  if 'baselines_N' in out:
    out['baselines_N'] = _numbers('baselines', out['baselines_N'], len(masks))
  return out


def _check_tree(tree: Tree, masks) -> None:
  if len(tree.parents_N) != len(masks):
    raise ValueError(f'a tree of {len(tree.parents_N)} rows for {len(masks)}')
  for i, p in enumerate(tree.parents_N):
    n = tree.shared_N[i]
    if p >= 0 and not 0 <= n <= min(len(masks[i]), len(masks[p])):
      raise ValueError(f'row {i} shares {n} tokens with row {p}: too many')


def _numbers(name: str, given, n: int) -> np.ndarray:
  out = np.zeros(n) if given is None else np.array(given, np.float64)
  if out.shape != (n,):
    raise ValueError(f'{name} has shape {out.shape}: give one for each of {n}')
  return out


def _tokens(name: str, given, mask) -> np.ndarray:
  out = np.asarray(given, np.float64)
  if out.shape != mask.shape:
    raise ValueError(
      f'{name} has shape {out.shape} for {len(mask)} tokens: give one a token'
    )
  return out


def _turn_ids(row: int, given, mask) -> np.ndarray:
  out = np.where(mask, np.asarray(given, np.int32), -1).astype(np.int32)
  ids = out[mask]
  steps = np.diff(ids, prepend=-1)
  if ((steps != 0) & (steps != 1)).any() or (len(ids) and ids[0] != 0):
    raise ValueError(
      f'turn ids of row {row} are {ids.tolist()}: count from 0 in order, each '
      'turn with a sampled token'
    )
  return out


def _by_turn_list(name: str, given, counts, fill) -> list[list]:
  if given is None:
    return [[fill] * k for k in counts]
  out = [list(x) for x in given]
  for i, (x, k) in enumerate(zip(out, counts, strict=True)):
    if len(x) != k:
      raise ValueError(f'{name} of row {i} are {len(x)}, its turns {k}')
  return out


def _by_turn(name: str, given, counts, fill) -> tuple[np.ndarray, ...]:
  return tuple(
    np.array(x, np.float64) for x in _by_turn_list(name, given, counts, fill)
  )


# ---- where rewards stand ----------------------------------------------------


def move_to_sampled(rewards_T, mask_T) -> tuple[np.ndarray, int]:
  """Moves a reward to the last sampled token at or before it.

  Where there is none it is dropped: nothing that was sampled led to it. What
  is not finite where nothing was sampled is no reward. The default (a reward
  under the mask would silently be lost, as in the golden case
  verl__gae_reward_on_obs).
  """
  rewards = np.where(mask_T | np.isfinite(rewards_T), rewards_T, 0.0)
  before = np.maximum.accumulate(np.where(mask_T, np.arange(len(mask_T)), -1))
  stray = np.flatnonzero(~mask_T & (rewards != 0))
  out = np.where(mask_T, rewards, 0.0)
  has = before[stray] >= 0
  np.add.at(out, before[stray[has]], rewards[stray[has]])
  return out, len(stray)


def drop_unsampled(rewards_T, mask_T) -> tuple[np.ndarray, int]:
  """Drops what does not stand on a sampled token, as verl and tunix do."""
  stray = ~mask_T & np.isfinite(rewards_T) & (rewards_T != 0)
  return np.where(mask_T, rewards_T, 0.0), int(np.count_nonzero(stray))
