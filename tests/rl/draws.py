"""Draws for the tests of estimators: rows as dicts, so that a test can change
one thing and build the draw again."""

import numpy as np

from agentjax.rl.draw import Draw, Tree, make

# Row fields of token length, and what an unsampled token holds in them.
TOKENS = {
  'mask': False,
  'turns': -1,
  'token_rewards': 0.0,
  'values': 0.0,
  'logprobs': 0.0,
  'sum_squares': 0.0,
}


def row(turns, reward=0.0, group=0, gap=1, **others) -> dict:
  """One trajectory: a prompt of 2, then turns of these lengths, `gap` apart."""
  ids = [-1, -1]
  for k, n in enumerate(turns):
    ids += [k] * n + [-1] * gap
  ids = np.array(ids[: len(ids) - gap] if len(turns) else ids)
  n, K = len(ids), len(turns)
  return {
    'mask': ids >= 0,
    'turns': ids,
    'token_rewards': np.zeros(n),
    'values': np.zeros(n),
    'logprobs': np.full(n, -1.0),
    'sum_squares': np.full(n, 0.5),
    'reward': reward,
    'group': group,
    'valid': True,
    'bootstrap': 0.0,
    'turn_rewards': [0.0] * K,
    'state_keys': [None] * K,
    'turn_values': [0.0] * K,
    'answer_probs': [0.0] * K,
    'baseline': 0.0,
    'parts': {'a': reward, 'b': 0.0},
    'parent': None,  # a row
    'shared': 0,
    **others,
  }


def draw(rows) -> Draw:
  number = {id(r): i for i, r in enumerate(rows)}

  def every(name):
    return [r[name] for r in rows]

  return make(
    every('reward'),
    every('group'),
    every('mask'),
    valid=every('valid'),
    turns=every('turns'),
    turn_rewards=every('turn_rewards'),
    state_keys=every('state_keys'),
    token_rewards=every('token_rewards'),
    bootstrap=every('bootstrap'),
    values=every('values'),
    logprobs=every('logprobs'),
    sum_squares=every('sum_squares'),
    turn_values=every('turn_values'),
    answer_probs=every('answer_probs'),
    baselines_N=every('baseline'),
    parts={k: [r['parts'][k] for r in rows] for k in ('a', 'b')},
    tree=Tree(
      np.array([number.get(id(r['parent']), -1) for r in rows]),
      np.array(every('shared')),
    ),
  )


def example(seed=0) -> list[dict]:
  """Three groups of uneven size, a tree among them, everything filled in."""
  rng = np.random.default_rng(seed)
  rows = []
  for group, size in enumerate((4, 3, 1)):
    for _ in range(size):
      r = row(
        rng.integers(1, 4, rng.integers(1, 4)),
        group=group,
        gap=int(rng.integers(1, 4)),
      )
      rows.append(_filled(r, rng))
  for r in (rows[1], rows[4]):
    rows.append(_forked(r, rng))
  return rows


def _filled(r, rng) -> dict:
  n, K = len(r['mask']), len(r['turn_rewards'])
  return r | {
    'token_rewards': np.where(r['mask'], rng.normal(size=n) / 10, 0),
    'values': rng.normal(size=n),
    'logprobs': -rng.exponential(size=n),
    'sum_squares': rng.uniform(0.1, 0.9, n),
    'reward': float(rng.normal()),
    'bootstrap': float(rng.integers(2) * rng.normal()),
    'turn_rewards': list(rng.normal(size=K)),
    'state_keys': [f's{i}' for i in rng.integers(0, 3, K)],
    'turn_values': list(rng.normal(size=K)),
    'answer_probs': list(rng.uniform(size=K)),
    'baseline': float(rng.normal()),
    'parts': {'a': float(rng.normal()), 'b': float(rng.normal())},
  }


def _forked(parent, rng) -> dict:
  """Shares the parent's first turn, and then goes on with one of its own."""
  shared = int(np.flatnonzero(parent['turns'] == 0)[-1]) + 1
  r = _filled(row([shared, 2], group=parent['group']), rng)
  ids = np.r_[parent['turns'][:shared], -1, 1, 1]
  r |= {name: r[name][: len(ids)] for name in TOKENS}
  for name in TOKENS:
    r[name] = np.r_[parent[name][:shared], r[name][shared:]][: len(ids)]
  r |= {'mask': ids >= 0, 'turns': ids, 'parent': parent, 'shared': shared}
  r['token_rewards'] = np.where(r['mask'], r['token_rewards'], 0)
  return r


def insert(r, at: int, n: int, junk=0.0) -> dict:
  """The row with n tokens that were not sampled before token `at`."""
  out = dict(r)
  for name, fill in TOKENS.items():
    put = junk if name in ('values', 'logprobs', 'sum_squares') else fill
    out[name] = np.insert(np.asarray(r[name]), at, [put] * n)
  return out


def equal(a, b, **options) -> None:
  """Two lists of token arrays are the same."""
  assert len(a) == len(b)
  for x, y in zip(a, b, strict=True):
    np.testing.assert_allclose(x, y, **{'rtol': 1e-9, 'atol': 1e-9} | options)


def numbers(tokens, d: Draw) -> list[float]:
  """The one number of each trajectory, which all sampled tokens have."""
  out = []
  for a, m in zip(tokens, d.masks, strict=True):
    assert not a[~m].any() and np.ptp(a[m]) == 0
    out.append(float(a[m][0]))
  return out
