"""Trees of trajectories in rows: what they share stands there once.

Floor 1, rl/. Host-side numpy. A tree is written down depth first, so that
everything that comes after a token lies behind it, up to one place: the end of
its span. A token sees those whose span it is in, which are its ancestors; a
trajectory alone is the tree whose spans all end with it.

Letters: N trajectories, T tokens of a trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentjax.rl.batch import Places, fill_rows
from agentjax.rl.draw import Tree
from agentjax.types import Trajectory


def with_prompts(
  tree: Tree, groups_N: np.ndarray, trajectories: Sequence[Trajectory]
) -> Tree:
  """The tree in which trajectories of a group share an equal prompt, too."""
  parents, shared = tree.parents_N.copy(), tree.shared_N.copy()
  first: dict[tuple[int, bytes], int] = {}
  for i, t in enumerate(trajectories):
    if parents[i] >= 0 or not t.segments:
      continue
    prompt = t.segments[0].tokens
    root = first.setdefault((int(groups_N[i]), prompt.tobytes()), i)
    if root != i:
      parents[i], shared[i] = root, len(prompt)
  return Tree(parents, shared)


def tree_places(
  lengths: Sequence[int], tree: Tree, *, rows: int, length: int
) -> Places:
  """Places for N trajectories, of which each tree stands in one row.

  A tree that has more tokens than a row is written as several, which repeat
  what their roots share.

  Raises:
    ValueError: a trajectory has more tokens than a row.
  """
  parents, shared = _fitting(*_own_forks(tree), lengths, length)
  laid = [
    _Laid(i, lengths, parents, shared) for i in np.flatnonzero(parents < 0)
  ]
  starts, n_rows = fill_rows(
    [len(x.before) for x in laid], rows=rows, length=length,
    name=lambda i: f'trajectory {laid[i].root}',
  )  # fmt: skip
  index: list = [None] * len(lengths)
  spans = {}
  for (row, start), x in zip(starts, laid, strict=True):
    for i, own in x.index.items():
      index[i] = (row, own + start)
    spans[row, start] = x
  before = np.full((n_rows, length), -1, np.int32)
  ends = np.zeros((n_rows, length), np.int32)
  ids = np.zeros((n_rows, length), np.int32)
  for number, ((row, start), x) in enumerate(sorted(spans.items())):
    at = slice(start, start + len(x.before))
    before[row, at] = np.where(x.before < 0, -1, x.before + start)
    ends[row, at] = x.ends + start
    ids[row, at] = 1 + sum(r == row for r, _ in sorted(spans)[:number])
  return Places(n_rows, length, tuple(index), before, ends, ids)


def _own_forks(tree: Tree) -> tuple[np.ndarray, np.ndarray]:
  """Parents and shared lengths where each is forked within its parent's own.

  What a child shares may all be its grandparent's: then that is its parent.
  """
  parents, shared = tree.parents_N.copy(), tree.shared_N
  for i in tree.order():
    while (
      parents[i] >= 0
      and shared[i] <= shared[parents[i]]
      and (parents[parents[i]] >= 0)
    ):
      parents[i] = parents[parents[i]]
  return parents, shared


def _fitting(parents, shared, lengths, most: int):
  """Parents and shared lengths of trees that each have at most `most` tokens.

  Whoever makes a tree too large begins one of its own.
  """
  parents, shared = parents.copy(), shared.copy()
  roots = np.arange(len(parents))
  size = np.zeros(len(parents), int)
  for i in Tree(parents, shared).order():
    if parents[i] >= 0:
      root, more = roots[parents[i]], lengths[i] - shared[i]
      if size[root] + more <= most:
        roots[i] = root
        size[root] += more
        continue
      parents[i], shared[i] = -1, 0
    size[i] = lengths[i]
  return parents, shared


class _Laid:
  """One tree, depth first, from place 0 on.

  Attributes:
    index: of each trajectory, the place of each of its tokens.
    before: the place of the token before, -1 for the first. ends: of spans.
  """

  def __init__(self, root: int, lengths, parents, shared):
    self.root, self.index = int(root), {}
    self._lengths, self._shared = lengths, shared
    self._children: dict[int, list[int]] = {}
    for i, p in enumerate(parents):
      if p >= 0:
        self._children.setdefault(int(p), []).append(i)
    before: list[int] = []
    ends: list[int] = []
    # (trajectory, its tokens so far, what it still has to be given)
    stack = [self._begun(self.root, np.zeros(0, int))]
    while stack:
      i, places, forks = stack[-1]
      upto = forks[0][0] if forks else self._lengths[i]
      while len(places) < upto:
        before.append(places[-1] if places else -1)
        places.append(len(ends))
        ends.append(-1)
      if forks:
        _, child = forks.pop(0)
        stack.append(self._begun(child, places))
        continue
      stack.pop()
      self.index[i] = np.array(places, int)
      for place in places[shared[i] if i != self.root else 0 :]:
        ends[place] = len(ends)
    self.before, self.ends = np.array(before, int), np.array(ends, int)

  def _begun(self, i: int, places):
    first = [] if i == self.root else list(places[: self._shared[i]])
    forks = sorted((int(self._shared[c]), c) for c in self._children.get(i, ()))
    return i, first, forks
