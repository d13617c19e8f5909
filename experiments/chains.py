"""Small problems with a known best answer, for learning in seconds.

Floor 4. Several turns, each a few tokens out of a small vocabulary, with
observations between them. What is sampled here becomes the library's own
records (`groups`) or padded arrays (`draw`): from there on nothing knows that
there was no transformer. Two problems:

  first_decides   the first turn opens one of two branches; how it ends hangs
                  on the branch and on luck, and nothing said later matters.
  each_counts     in every state another answer is right, and each counts.

The policy is a table of probabilities, one row for each place of each state.

Letters: N trajectories, K turns, M tokens of a turn, T tokens of a trajectory,
V vocabulary, S states.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from agentjax.rl import draw_from
from agentjax.rl.draw import Draw, Tree
from agentjax.types import (
  Group,
  Message,
  Reward,
  Segment,
  Source,
  Status,
  Stop,
  Task,
  Trajectory,
)

PROMPT, GAP = 2, 2  # tokens that the policy did not sample


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
  """A problem.

  Attributes:
    best: int[tasks, K, M], the right tokens of each turn.
    lengths: int[tasks], turns of each task.
    vocabulary: V.
    branches: whether a state knows if the first turn was right.
    luck: probability that the outcome is not what the first turn deserves;
      None: the outcome is the share of turns that were right.
    noise: size of the coin that is the reward of each turn but the first,
      where the first turn alone is right or wrong (reward 1 or 0).
  """

  best: np.ndarray
  lengths: np.ndarray
  vocabulary: int
  branches: bool = False
  luck: float | None = None
  noise: float = 0.0

  @property
  def states(self) -> int:
    tasks, K, _ = self.best.shape
    return tasks * K * (2 if self.branches else 1)

  def state(self, tasks, turns, first_right):
    """The number of the state before a turn."""
    K = self.best.shape[1]
    plain = np.asarray(tasks) * K + turns
    if not self.branches:
      return plain
    return 2 * plain + np.where(np.asarray(turns) > 0, first_right, 0)

  def score(self, probs_SMV: np.ndarray) -> float:
    """Exact: the probability of the right answer, over turns that decide."""
    tasks, K, _ = self.best.shape
    if self.luck is not None:
      K = 1
    out = []
    for t in range(tasks):
      for k in range(min(K, self.lengths[t])):
        rows = probs_SMV[self.state(t, k, 0)]
        out.append(np.take_along_axis(rows, self.best[t, k, :, None], 1).prod())
    return float(np.mean(out))


def first_decides(
  *, seed: int = 0, tasks: int = 4, turns: int = 6, tokens: int = 2,
  vocabulary: int = 4, luck: float = 0.1, noise: float = 0.5,
) -> Chain:  # fmt: skip
  """The best return is 1 - luck."""
  best = _best(seed, tasks, turns, tokens, vocabulary)
  lengths = np.full(tasks, turns)
  return Chain(best, lengths, vocabulary, True, luck, noise)


def each_counts(
  *, seed: int = 0, tasks: int = 4, turns: int = 4, tokens: int = 2,
  vocabulary: int = 4,
) -> Chain:  # fmt: skip
  """The best return is 1; tasks differ in how many turns they have."""
  best = _best(seed, tasks, turns, tokens, vocabulary)
  return Chain(best, turns - np.arange(tasks) % 3, vocabulary)


def _best(seed, tasks, turns, tokens, vocabulary) -> np.ndarray:
  rng = np.random.default_rng([seed, 7])
  return rng.integers(0, vocabulary, (tasks, turns, tokens))


@dataclasses.dataclass(frozen=True, eq=False)
class Sampled:
  """Trajectories of one draw, the rows of a group beside each other.

  `parents_N` and `kept_N`: of the row that was forked, and how many turns it
  has from it. `rows` says which trajectory stands where in the padded arrays.
  """

  tasks_N: np.ndarray
  actions_NKM: np.ndarray
  states_NK: np.ndarray
  right_NK: np.ndarray  # bool
  there_NK: np.ndarray  # bool: the turn is not behind the last one
  logprobs_NKM: np.ndarray
  rewards_N: np.ndarray
  turn_rewards_NK: np.ndarray
  parents_N: np.ndarray
  kept_N: np.ndarray
  turns_sampled: int

  def __len__(self) -> int:
    return len(self.tasks_N)


def sample(
  rng: np.random.Generator,
  chain: Chain,
  probs_SMV: np.ndarray,
  tasks_N: np.ndarray,
  *,
  like: Sampled | None = None,
  parents_N: np.ndarray | None = None,
  kept_N: np.ndarray | None = None,
) -> Sampled:
  """One trajectory for each of `tasks_N`.

  Args:
    like, parents_N, kept_N: a row's first `kept` turns are those of row
      `parent` of `like`; parent -1 for none.
  """
  N, (_, K, M) = len(tasks_N), chain.best.shape
  parents = np.full(N, -1) if parents_N is None else parents_N
  kept = np.zeros(N, int) if kept_N is None else kept_N
  cumulative = np.cumsum(probs_SMV, -1)
  actions, right = np.zeros((N, K, M), int), np.zeros((N, K), bool)
  states = np.zeros((N, K), int)
  for k in range(K):
    states[:, k] = chain.state(tasks_N, k, right[:, 0])
    at = rng.random((N, M, 1)) * cumulative[states[:, k], :, -1:]
    actions[:, k] = (at > cumulative[states[:, k]]).sum(-1)
    old = np.flatnonzero(kept > k)
    if len(old):
      actions[old, k] = like.actions_NKM[parents[old], k]
    right[:, k] = (actions[:, k] == chain.best[tasks_N, k]).all(-1)
  there = np.arange(K) < chain.lengths[tasks_N][:, None]
  chosen = np.take_along_axis(probs_SMV[states], actions[..., None], -1)
  rewards, turn_rewards = _rewards(rng, chain, right, there)
  if like is not None:
    old = np.arange(K) < kept[:, None]
    turn_rewards = np.where(old, like.turn_rewards_NK[parents], turn_rewards)
  return Sampled(
    tasks_N, actions, states, right, there, np.log(chosen[..., 0]), rewards,
    turn_rewards, parents, kept,
    int(there.sum() - np.minimum(kept, there.sum(1)).sum()),
  )  # fmt: skip


def _rewards(rng, chain: Chain, right_NK, there_NK):
  """Outcomes, and rewards of turns."""
  if chain.luck is None:
    right = right_NK & there_NK
    share = right / there_NK.sum(1, keepdims=True)
    return share.sum(1), share
  lucky = rng.random(len(right_NK)) < chain.luck
  coins = rng.integers(0, 2, right_NK.shape) * 2 - 1
  turn_rewards = chain.noise * coins
  turn_rewards[:, 0] = right_NK[:, 0]
  return (right_NK[:, 0] != lucky).astype(float), turn_rewards


def expected_outcome(chain: Chain, probs_SMV, sampled: Sampled) -> np.ndarray:
  """Exact, float[N, K]: of what is known before each turn."""
  tasks, K, _ = chain.best.shape
  task, turn = np.indices((tasks, K))
  rows = probs_SMV[chain.state(task, turn, 0)]
  hits = np.take_along_axis(rows, chain.best[..., None], -1)[..., 0].prod(-1)
  p_NK = hits[sampled.tasks_N] * sampled.there_NK
  known_NK = sampled.right_NK * sampled.there_NK
  if chain.luck is not None:
    p = np.repeat(known_NK[:, :1].astype(float), K, 1)
    p[:, 0] = p_NK[:, 0]
    return chain.luck + (1 - 2 * chain.luck) * p
  past = np.cumsum(known_NK, 1) - known_NK
  future = np.cumsum(p_NK[:, ::-1], 1)[:, ::-1]
  return (past + future) / sampled.there_NK.sum(1, keepdims=True)


def mean_continuations(
  rng, chain: Chain, probs_SMV, sampled: Sampled, n: int
) -> tuple[np.ndarray, int]:
  """float[N, K]: mean outcome of n fresh continuations before each turn.

  Also how many turns they took.
  """
  N, K = sampled.right_NK.shape
  row, turn = (x.reshape(-1) for x in np.indices((N, K, n))[:2])
  fresh = sample(
    rng, chain, probs_SMV, sampled.tasks_N[row],
    like=sampled, parents_N=row, kept_N=turn,
  )  # fmt: skip
  return fresh.rewards_N.reshape(N, K, n).mean(-1), fresh.turns_sampled


def forked(
  rng, chain: Chain, probs_SMV, tasks_N: np.ndarray, leaves: int
) -> Sampled:
  """Trees of `leaves` rows: one from the start, the others forked from it.

  Each at a turn of its own, behind the first. `tasks_N` is of all rows.
  """
  N = len(tasks_N)
  parents = np.arange(N) - np.arange(N) % leaves
  trunk = sample(rng, chain, probs_SMV, tasks_N)
  kept = rng.integers(1, np.maximum(chain.lengths[tasks_N], 2))
  kept[::leaves] = chain.lengths[tasks_N[::leaves]]
  out = sample(
    rng, chain, probs_SMV, tasks_N, like=trunk, parents_N=parents, kept_N=kept
  )
  roots = np.arange(N) % leaves == 0
  # The trunk's own rows that no tree begins with were never needed.
  used = out.turns_sampled + int(trunk.there_NK[roots].sum())
  return dataclasses.replace(
    out,
    rewards_N=np.where(roots, trunk.rewards_N, out.rewards_N),
    parents_N=np.where(roots, -1, parents),
    kept_N=np.where(roots, 0, kept),
    turns_sampled=used,
  )


# ---- as the library sees them -----------------------------------------------


def slots(chain: Chain, sampled: Sampled) -> dict[str, np.ndarray]:
  """Padded arrays [N, T]: mask, turn, and the row of the table (or 0).

  T: the prompt, then each turn's tokens and the observation behind them.
  """
  N, K, M = sampled.actions_NKM.shape
  there = np.repeat(sampled.there_NK[..., None], M, -1)
  row = sampled.states_NK[..., None] * M + np.arange(M)
  turn = np.broadcast_to(np.arange(K)[:, None], (N, K, M))
  return {
    'mask': spread(there, False),
    'turns': spread(np.where(there, turn, -1), -1),
    'slots': spread(row, 0),
    'tokens': spread(sampled.actions_NKM, 0),
    'logprobs': spread(sampled.logprobs_NKM, np.nan),
  }


def spread(x_NKM: np.ndarray, fill) -> np.ndarray:
  """[N, T], with `fill` at the prompt and at observations."""
  N = len(x_NKM)
  wide = np.pad(x_NKM, ((0, 0), (0, 0), (0, GAP)), constant_values=fill)
  return np.pad(
    wide.reshape(N, -1), ((0, 0), (PROMPT, 0)), constant_values=fill
  )


def draw(
  chain: Chain, sampled: Sampled, arrays: dict[str, np.ndarray], **others
) -> Draw:
  """The draw that an estimator sees; `others` by turn are [N, K]."""
  counts = sampled.there_NK.sum(1)

  def turns(x_NK):
    return [x[:n] for x, n in zip(x_NK, counts, strict=True)]

  M = sampled.actions_NKM.shape[2]
  given = {
    k: turns(v) if getattr(v, 'shape', 0) == sampled.there_NK.shape else v
    for k, v in others.items()
  }
  return draw_from.arrays(
    arrays['mask'],
    rewards_B=sampled.rewards_N,
    groups_B=sampled.tasks_N,
    turns_BT=arrays['turns'],
    state_keys=turns(_keys(sampled)),
    tree=Tree(
      sampled.parents_N,
      np.where(sampled.parents_N >= 0, PROMPT + sampled.kept_N * (M + GAP), 0),
    ),
    **{'turn_rewards': turns(sampled.turn_rewards_NK)} | given,
  )


def _keys(sampled: Sampled) -> list[list[str]]:
  return [[f's{s}' for s in row] for row in sampled.states_NK]


def groups(chain: Chain, sampled: Sampled) -> list[Group]:
  """The same as trajectories, segment by segment."""
  keys, rows = _keys(sampled), []
  for i, task in enumerate(sampled.tasks_N):
    n = int(sampled.there_NK[i].sum())
    segments = [Segment(Source.PROMPT, np.arange(PROMPT))]
    for k in range(n):
      segments += [_said(sampled, i, k), Segment(Source.OBSERVATION, [0] * GAP)]
    parent = sampled.parents_N[i]
    rows.append(
      Trajectory(
        Task(str(task), (Message('user', str(task)),)),
        tuple(segments),
        Status.DONE,
        Reward(sampled.rewards_N[i]),
        tuple(sampled.turn_rewards_NK[i, :n]),
        tuple(keys[i][:n]),
        sample=i,
        parent_id=f'0/{task}/{parent}/0' if parent >= 0 else None,
      )
    )
  members: dict[int, list[Trajectory]] = {}
  for task, row in zip(sampled.tasks_N, rows, strict=True):
    members.setdefault(int(task), []).append(row)
  return [Group(m[0].task, 0, tuple(m)) for m in members.values()]


def _said(sampled: Sampled, i: int, k: int) -> Segment:
  logprobs = sampled.logprobs_NKM[i, k]
  none = np.zeros(len(logprobs))
  return Segment(
    Source.MODEL, sampled.actions_NKM[i, k], logprobs, logprobs, none, none,
    Stop.END_OF_TURN,
  )  # fmt: skip
