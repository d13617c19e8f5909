"""The sampler against plain numpy, and its keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.rollout import sampling
from agentjax.rollout.sampling import (
  Sampling,
  _blocks,
  _inverse_cdf,
  sample,
  trajectory_key,
  uniform,
)


def plain(z, u, temperature, top_k, top_p, min_p):
  """One slot in float64: the kept set and the log-probs, step by step."""
  if temperature == 0:
    p = np.exp(z - z.max())
    p /= p.sum()
    token = int(np.argmax(z))
    with np.errstate(divide='ignore'):
      full = np.log(p)
    return {token}, full, np.where(np.arange(len(z)) == token, 0, -np.inf)
  z = z / temperature
  p = np.exp(z - z.max())
  p /= p.sum()
  keep = np.ones(len(z), bool)
  if top_k:
    keep &= z >= np.sort(z)[-min(top_k, len(z))]
  if top_p < 1:
    order = np.argsort(-z)
    q = np.where(keep, p, 0) / p[keep].sum()
    before = np.cumsum(q[order]) - q[order]
    keep &= z >= z[order[before < top_p]].min()  # ties at the edge stay
  if min_p:
    keep &= p >= min_p * p.max()
  with np.errstate(divide='ignore'):
    return (
      set(np.flatnonzero(keep)),
      np.log(p),
      np.log(np.where(keep, p, 0) / p[keep].sum()),
    )


CASES = [
  (1.0, 0, 1.0, 0.0),
  (0.7, 0, 1.0, 0.0),
  (1.0, 5, 1.0, 0.0),
  (1.0, 0, 0.8, 0.0),
  (0.6, 20, 0.95, 0.0),
  (1.0, 0, 1e-6, 0.0),
  (1.3, 0, 1.0, 0.2),
  (0.0, 0, 1.0, 0.0),
  (0.0, 3, 0.5, 0.0),
]


def test_log_probs_are_of_the_distribution_sampled_from():
  rng = np.random.default_rng(0)
  n, V = len(CASES), 37
  z = rng.normal(size=(n, V)).astype(np.float32) * 3
  columns = [np.array(c) for c in zip(*CASES, strict=True)]
  run = jax.jit(sample)
  for _ in range(50):
    u = rng.random(n).astype(np.float32)
    out = jax.device_get(
      run(z, u, columns[0], columns[1].astype(np.int32), *columns[2:])
    )
    for i, case in enumerate(CASES):
      keep, full, behaviour = plain(z[i].astype(np.float64), u[i], *case)
      token = int(out.token[i])
      assert token in keep, case
      np.testing.assert_allclose(out.logprob_full[i], full[token], atol=1e-5)
      np.testing.assert_allclose(out.logprob[i], behaviour[token], atol=1e-5)
      np.testing.assert_allclose(
        out.logprob_full[i] - out.logprob[i], out.log_kept_mass[i], atol=1e-6
      )


@pytest.mark.parametrize('kept', [0, 3])
@pytest.mark.parametrize('V', [50, 16384])
def test_a_neighbour_that_truncates_changes_no_bit(V, kept):
  z = np.random.default_rng(1).normal(size=(2, V)).astype(np.float32)
  u = np.array([0.3, 0.6], np.float32)
  ones, zeros = np.ones(2, np.float32), np.zeros(2, np.float32)
  none = np.zeros(2, np.int32)
  run = jax.jit(sample)
  a = jax.device_get(run(z, u, ones, none, ones, zeros))
  three = np.array([0, 3], np.int32)
  run = jax.jit(functools.partial(sample, kept=kept))
  b = jax.device_get(run(z, u, ones, three, ones, zeros))
  for x, y in zip(a[:4], b[:4], strict=True):
    assert x[0] == y[0]
  if kept:
    np.testing.assert_array_equal(b.kept[0], [-1, -1, -1])
    best = np.argsort(-z[1])[:3]
    np.testing.assert_array_equal(b.kept[1], best)
    assert b.token[1] in best


def test_frequencies_follow_the_distribution():
  z = jnp.log(jnp.array([0.5, 0.3, 0.0, 0.2]))
  z = jnp.broadcast_to(jnp.maximum(z, -1e30), (4000, 4))
  u = jax.random.uniform(jax.random.key(0), (4000,))
  ones = jnp.ones(4000)
  out = sample(z, u, ones, jnp.zeros(4000, int), ones, ones * 0)
  share = np.bincount(out.token, minlength=4) / 4000
  assert share[2] == 0
  np.testing.assert_allclose(share, [0.5, 0.3, 0.0, 0.2], atol=0.03)


@pytest.mark.parametrize('near', [1, 6, 128])
def test_truncation_keeps_exactly_what_a_sort_would(near, monkeypatch):
  """Ties, whole vocabularies and extreme logits; thresholds without a sort."""
  monkeypatch.setattr(sampling, 'NEAR', near)
  rng = np.random.default_rng(3)
  n, V = 64, 41
  z = np.round(rng.normal(size=(n, V)) * 4, 1).astype(np.float32)  # ties
  z[::5] *= 40
  z[1::7, 3] = -1e30
  columns = (
    rng.choice([0.3, 1.0, 2.0], n).astype(np.float32),
    rng.choice([0, 1, 2, 7, V, 9 * V], n).astype(np.int32),
    rng.choice([1.0, 0.99, 0.5, 1e-6], n).astype(np.float32),
    rng.choice([0.0, 0.01, 1.0], n).astype(np.float32),
  )
  seen = [set() for _ in range(n)]
  run = jax.jit(lambda *args: sample(*args))
  for u in np.linspace(0, 1, 400, endpoint=False, dtype=np.float32):
    out = jax.device_get(run(z, np.full(n, u), *columns))
    for i in range(n):
      seen[i].add(int(out.token[i]))
  for i in range(n):
    keep, full, _ = plain(z[i].astype(np.float64), 0, *(c[i] for c in columns))
    mass = np.exp(full[list(keep)]).sum()
    likely = {t for t in keep if np.exp(full[t]) > 0.005 * mass}
    assert likely <= seen[i] <= keep, (i, [c[i] for c in columns])


@pytest.mark.parametrize('near', [6, 128])
def test_what_is_said_to_be_kept_is_what_is_sampled_from(near, monkeypatch):
  """The M largest of what truncation keeps, of equals the lowest ids."""
  monkeypatch.setattr(sampling, 'NEAR', near)
  rng = np.random.default_rng(3)
  n, V, M = 64, 41, 7
  z = np.round(rng.normal(size=(n, V)) * 2, 0).astype(np.float32)  # ties
  z[1::7, 3] = -1e30
  columns = (
    rng.choice([0.0, 0.5, 1.0, 2.0], n).astype(np.float32),
    rng.choice([0, 1, 2, 7], n).astype(np.int32),
    rng.choice([1.0, 0.99, 0.5], n).astype(np.float32),
    rng.choice([0.0, 0.01], n).astype(np.float32),
  )
  slots = [Sampling(*map(float, c)) for c in zip(*columns, strict=True)]
  assert {s.fits(M) for s in slots} == {True, False}
  seen = [set() for _ in range(n)]
  run = jax.jit(lambda *args: sample(*args, kept=M))
  for u in np.linspace(0, 1, 400, endpoint=False, dtype=np.float32):
    out = jax.device_get(run(z, np.full(n, u), *columns))
    for i in range(n):
      seen[i].add(int(out.token[i]))
  full = 0
  for i, slot in enumerate(slots):
    keep, whole, _ = plain(z[i].astype(np.float64), 0, *(c[i] for c in columns))
    said = out.kept[i].tolist()
    if not slot.truncates:
      assert said == [-1] * M
      continue
    want = sorted(keep, key=lambda t, i=i: (-z[i, t], t))[:M]
    assert said == want + [-1] * (M - len(want)), slot
    full += len(keep) > M and slot.fits(M)
    mass = np.exp(whole[want]).sum()
    likely = {t for t in want if np.exp(whole[t]) > 0.005 * mass}
    assert likely <= seen[i] <= set(want)
    np.testing.assert_allclose(
      out.logprob[i], whole[int(out.token[i])] - np.log(mass), atol=1e-5
    )
    np.testing.assert_allclose(out.log_kept_mass[i], np.log(mass), atol=1e-5)
  assert full  # ties beyond M were left out


def test_ties_beyond_what_can_be_named_are_not_sampled():
  z = np.array([[1, 2, 2, 0, 2]] * 300, np.float32)
  u = np.linspace(0, 1, 300, endpoint=False, dtype=np.float32)
  ones = np.ones(300, np.float32)
  for kept, ids in ((2, [1, 2]), (4, [1, 2, 4, -1]), (0, None)):
    out = sample(z, u, ones, 2 * ones.astype(int), ones, 0 * ones, kept=kept)
    named = {1, 2} if kept == 2 else {1, 2, 4}
    assert set(np.asarray(out.token).tolist()) == named
    np.testing.assert_allclose(out.logprob, -np.log(len(named)), atol=1e-6)
    if kept:
      np.testing.assert_array_equal(out.kept, [ids] * 300)
    else:
      assert out.kept is None


@pytest.mark.parametrize('V', [1, 2, 5, 16, 97])
def test_the_inverse_cdf_is_exact_and_never_picks_no_mass(V):
  rng = np.random.default_rng(V)
  mass = rng.random((200, V)) * (rng.random((200, V)) < 0.4)
  mass[:, rng.integers(V)] += 0.1
  mass = mass.astype(np.float32)
  u = rng.random(200).astype(np.float32)
  u[:2] = 0.0, np.nextafter(np.float32(1), np.float32(0))
  with np.errstate(divide='ignore'):
    blocks = np.exp(_blocks(np.log(mass)))
  token, total = _inverse_cdf(
    blocks.sum(-1), lambda block: blocks[np.arange(200), block], u
  )
  token = np.asarray(token)
  np.testing.assert_allclose(total, mass.sum(1), rtol=1e-5)
  upto = np.cumsum(mass.astype(np.float64), 1)
  at = np.arange(200)
  assert (mass[at, token] > 0).all()
  low = upto[at, token] - mass[at, token]
  target = u * upto[:, -1]
  assert (low - 1e-5 <= target).all() and (
    target <= upto[at, token] + 1e-5
  ).all()


def test_keys_differ_in_every_part_and_repeat():
  names = [
    (s, d, t, k, b)
    for s in (0, 1)
    for d in (0, 1)
    for t in ('a', 'b')
    for k in (0, 1)
    for b in (0, 1)
  ]
  keys = np.stack([trajectory_key(*n) for n in names])
  assert len({tuple(k) for k in keys}) == len(names)
  np.testing.assert_array_equal(keys[5], trajectory_key(*names[5]))
  u = uniform(jnp.asarray(keys), jnp.arange(len(keys)) % 3)
  assert len(set(np.asarray(u).tolist())) == len(keys)
  other = uniform(jnp.asarray(keys), jnp.arange(len(keys)) % 3 + 1)
  assert not np.any(np.asarray(u) == np.asarray(other))


def test_bad_values_are_refused():
  for bad in (
    {'temperature': -1.0},
    {'temperature': float('nan')},
    {'top_k': -1},
    {'top_p': 0.0},
    {'top_p': 1.5},
    {'min_p': 2.0},
  ):
    with pytest.raises(ValueError, match=next(iter(bad))):
      Sampling(**bad)
