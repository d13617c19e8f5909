"""Advantages from search and structure: states met again, and trees.

Floor 1, rl/. Estimators of the seam that `draw` tells. Trajectories of a group
that pass the same state, or that were forked from one another, are compared
where they go apart. A tree is flattened into rows, so that what rows share
stands in each of them: `shared_once` and `per_leaf` say what such a token
weighs in a loss.

Letters: N trajectories (rows, the leaves of trees), K turns, T tokens.
"""

from __future__ import annotations

import numpy as np

from agentjax.rl import advantages
from agentjax.rl.advantages import Scale, group_std, standardized
from agentjax.rl.draw import Draw, Estimator
from agentjax.rl.normalize import labels, varies
from agentjax.rl.seam import Scores, broadcast, by_turn, outcome, step_rewards

# ---- Monte-Carlo values -----------------------------------------------------


def vineppo(draw: Draw, *, gamma: float = 1.0) -> list[np.ndarray]:
  """A_k = r_k + gamma V_{k+1} - V_k, V the mean return of fresh continuations.

  V_k is the value of the state before turn k (`turn_values`), behind the last
  turn 0, or the bootstrap where the trajectory was cut. With n continuations
  of a 0/1 reward its noise is about sqrt(p (1 - p) / n). Source: VinePPO,
  arXiv:2410.01679.
  """
  (values,) = draw.need('turn_values')
  out = []
  for r, v, last in zip(
    step_rewards(draw), values, draw.bootstrap_N, strict=True
  ):
    following = np.append(v[1:], last)[: len(v)]
    out.append(r + gamma * following - v)
  return by_turn(draw, out)


# ---- trees of forked trajectories -------------------------------------------


def tree_grpo(
  draw: Draw,
  *,
  scores: Scores = outcome,
  scale: Scale = group_std,
  ddof: int = 1,
  eps: float = 1e-6,
  raw_singletons: bool = False,
) -> list[np.ndarray]:
  """GRPO over the group (inter-tree) + GRPO over the own tree (intra-tree).

  Source: Tree-GRPO, arXiv:2509.21240.
  """
  options = dict(scale=scale, ddof=ddof, eps=eps, raw_singletons=raw_singletons)
  inter, tree = _inter(draw, scores, options)
  intra = standardized(scores(draw), tree, **options)
  return broadcast(draw, inter + intra)


def tree_grpo_2norm(
  draw: Draw,
  *,
  scores: Scores = outcome,
  scale: Scale = group_std,
  ddof: int = 1,
  eps: float = 1e-6,
  raw_singletons: bool = False,
) -> list[np.ndarray]:
  """Normalised over the group, then once more over the own tree.

  Source: the `tree_2norm` estimator of Tree-GRPO's code.
  """
  options = dict(scale=scale, ddof=ddof, eps=eps, raw_singletons=raw_singletons)
  inter, tree = _inter(draw, scores, options)
  return broadcast(draw, standardized(inter, tree, **options))


def _inter(draw: Draw, scores: Scores, options):
  """Advantages in the group, and labels of the trees."""
  (tree,) = draw.need('tree')
  group = labels(draw.groups_N, draw.valid_N)
  return standardized(scores(draw), group, **options), labels(
    tree.roots(), draw.valid_N
  )


def treerl(draw: Draw, *, scores: Scores = outcome) -> list[np.ndarray]:
  """Each stretch between forks: better than the group, and than what led to it.

  R(n) = [(V(n) - V(root)) + (V(n) - V(parent))] / sqrt(leaves(n)), V(n) the
  mean score of the valid leaves below n; the root is the task, so that V(root)
  is the group's mean. The root of a sqrt makes up for a shared stretch that
  stands in every row. Source: TreeRL, arXiv:2506.11902.
  """
  score, pieces = scores(draw), stretches(draw)
  group = labels(draw.groups_N, draw.valid_N)
  out = [np.zeros(len(m)) for m in draw.masks]
  for i in np.flatnonzero(varies(score, group)):
    parent = root = score[group == group[i]].mean()
    for begin, end, leaves in pieces[i]:
      value = score[leaves].mean()
      out[i][begin:end] = (2 * value - root - parent) / np.sqrt(len(leaves))
      parent = value
  return _sampled(draw, out)


def arpo_soft(
  draw: Draw, *, estimator: Estimator = advantages.grpo
) -> list[np.ndarray]:
  """Each row its own advantage, also where it shares tokens with others.

  A loss that sums over rows gives a shared token the sum by itself. Source:
  ARPO, arXiv:2507.19849, soft attribution, its default.
  """
  return estimator(draw)


def arpo_hard(
  draw: Draw, *, estimator: Estimator = advantages.grpo
) -> list[np.ndarray]:
  """A shared token has the mean advantage of the rows that share it.

  Source: ARPO, arXiv:2507.19849, hard attribution.
  """
  own = estimator(draw)
  out = [np.zeros(len(m)) for m in draw.masks]
  for i, pieces in enumerate(stretches(draw)):
    for begin, end, leaves in pieces:
      out[i][begin:end] = np.mean([own[j][begin:end] for j in leaves], 0)
  return _sampled(draw, out)


def per_leaf(draw: Draw) -> list[np.ndarray]:
  """float64[T]: 1 at each sampled token, however many rows it stands in."""
  return [m.astype(np.float64) for m in draw.masks_valid()]


def shared_once(draw: Draw) -> list[np.ndarray]:
  """float64[T]: 1 / (rows that share it) at each sampled token.

  A token of a tree then counts once in a mean over tokens, not once a leaf.
  """
  return [
    np.where(m, 1 / np.maximum(n, 1), 0.0)
    for m, n in zip(draw.masks_valid(), multiplicity(draw), strict=True)
  ]


def multiplicity(draw: Draw) -> list[np.ndarray]:
  """int[T]: how many valid rows share each token; 0 in a row not valid."""
  out = [np.zeros(len(m), int) for m in draw.masks]
  for i, pieces in enumerate(stretches(draw)):
    for begin, end, leaves in pieces:
      out[i][begin:end] = len(leaves)
  return out


def stretches(draw: Draw) -> list[list[tuple[int, int, np.ndarray]]]:
  """(begin, end, rows that share these tokens) of each row, in order.

  Rows that are not valid share nothing, and have none. Without a tree each row
  is one stretch.
  """
  shared = np.diag([len(m) for m in draw.masks])
  if draw.tree is not None:
    shared = _shared(draw)
  out = []
  for i, common in enumerate(np.where(draw.valid_N, shared, 0)):
    ends = np.unique(common[common > 0]) if draw.valid_N[i] else []
    begins = [0, *ends][:-1]
    out.append(
      [
        (int(begin), int(end), np.flatnonzero(common > begin))
        for begin, end in zip(begins, ends, strict=True)
      ]
    )
  return out


def _shared(draw: Draw) -> np.ndarray:
  """int[N, N]: leading tokens that two rows have in common, by their forks."""
  tree = draw.tree
  out = np.zeros((len(draw), len(draw)), int)
  done: list[int] = []
  for i in tree.order():
    p = tree.parents_N[i]
    if p >= 0:
      # With others a row shares what its parent does, up to its own fork.
      out[i, done] = np.minimum(tree.shared_N[i], out[p, done])
      out[done, i] = out[i, done]
    out[i, i] = len(draw.masks[i])
    done.append(i)
  return out


def _sampled(draw: Draw, tokens) -> list[np.ndarray]:
  return [
    np.where(m, a, 0.0) for m, a in zip(draw.masks_valid(), tokens, strict=True)
  ]
