"""Truncated sampling from the sampler to the gradient: promise 4 holds.

Slots that truncate and slots that do not, side by side in one engine, and what
they sampled side by side in one batch, with a demonstration among them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_model as tiny
from fakes import task, trajectory

from agentjax.learner import Learner
from agentjax.model import transformer
from agentjax.rl import losses
from agentjax.rl.batch import pack, places, unpack
from agentjax.rollout.sampling import Sampling, trajectory_key
from agentjax.types import Segment, Source, Status, Trajectory

M, T, TEMPERATURE = 5, 64, 0.7
SAMPLINGS = [
  Sampling(TEMPERATURE),
  Sampling(TEMPERATURE, top_k=5),
  Sampling(TEMPERATURE, top_k=5, top_p=0.9),
  Sampling(TEMPERATURE, top_k=4, top_p=0.95, min_p=0.1),
]


@functools.cache
def params(seed=0):
  # Less sharp than the tests of the engine have it: more than one id is kept.
  out = tiny.params(seed, tiny.PLAIN)
  return {**out, 'embed': {'table': out['embed']['table'] / 2}}


def engine():
  out = tiny.engine(config=tiny.PLAIN, loaded=False, kept=M)
  out.load(params(), 0)
  return out


@functools.cache
def sampled() -> tuple[Trajectory, ...]:
  """Two turns of each sampling, all at once in one engine."""
  e, out = engine(), []
  slots = [e.acquire() for _ in SAMPLINGS]
  for i, slot in enumerate(slots):
    e.reset(slot)
    e.extend(slot, tiny.tokens(i, 6 + i))
    out.append(
      Trajectory(task(str(i)), (Segment(Source.PROMPT, tiny.tokens(i, 6 + i)),))
    )
  for turn in range(2):
    for i, slot in enumerate(slots):
      if turn:
        seen = tiny.tokens(20 + i, 3)
        e.extend(slot, seen)
        out[i] = out[i].append(Segment(Source.OBSERVATION, seen))
      key = trajectory_key(turn, 0, str(i), 0, 0)
      e.start(slot, key, SAMPLINGS[i], turn_budget=18, trajectory_budget=50)
    while e.n_decoding:
      for slot, segment in e.step():
        i = slots.index(slot)
        out[i] = out[i].append(segment)
  return tuple(t.append(status=Status.DONE) for t in out)


@functools.cache
def learner(**kw):
  return Learner(
    tiny.PLAIN, optimizer=optax.sgd(1.0), rows=2, length=T, chunk=16,
    remat=False, kept=M, **kw,
  )  # fmt: skip


def packed(trajectories, kept=M):
  return pack(
    trajectories, [1.0] * len(trajectories), rows=2, length=T,
    temperature=TEMPERATURE, kept=kept,
  )  # fmt: skip


def shown():
  """A demonstration: nobody sampled it, so that nothing was left out."""
  return trajectory([('p', [3, 4]), ('m', [5, 6, 7])], 'shown')


def test_what_was_kept_is_written_down_where_something_was_left_out():
  plain, *cut = sampled()
  assert all(s.kept is None for s in plain.turns)
  sizes = set()
  for t, sampling in zip(cut, SAMPLINGS[1:], strict=True):
    assert t.model_tokens > 10
    for s in t.turns:
      assert s.kept.shape == (len(s), M)
      n = (s.kept >= 0).sum(1)
      assert (s.kept == s.tokens[:, None]).any(1).all()
      assert (np.diff(s.kept < 0, axis=1) >= 0).all()  # first ids, then -1
      assert n.max() <= sampling.top_k
      np.testing.assert_array_equal(n == 1, s.logprobs > -1e-6)
      sizes |= set(n.tolist())
    assert t.per_token('log_kept_mass').min() < -1e-3
  assert len(sizes) > 3


def whole(params, trajectories):
  """Log-probs [B, T] from whole logits, over the ids that were kept."""
  B, V = len(trajectories), tiny.PLAIN.padded_vocab
  tokens, there = np.zeros((2, B, T), np.int32)
  keep = np.ones((B, T, V), bool)
  for b, t in enumerate(trajectories):
    tokens[b, : len(t)], there[b, : len(t)] = t.tokens(), 1
    start = 0
    for s in t.segments:
      for i, ids in enumerate(() if s.kept is None else s.kept):
        keep[b, start + i] = np.isin(np.arange(V), ids)
      start += len(s)
  return written(params, tokens, there, keep)


@jax.jit
def written(params, tokens_BT, there_BT, keep_BTV):
  at = jnp.broadcast_to(jnp.arange(T), tokens_BT.shape)
  hidden = transformer.forward(params, tokens_BT, at, there_BT, tiny.PLAIN)
  z = transformer.logits(params, hidden, tiny.PLAIN)[:, :-1] / TEMPERATURE
  logp = jax.nn.log_softmax(jnp.where(keep_BTV[:, 1:], z, -jnp.inf), -1)
  own = jnp.take_along_axis(logp, tokens_BT[:, 1:, None], 2)[..., 0]
  return jnp.pad(own, ((0, 0), (1, 0)))


def test_sampler_and_learner_agree_on_truncated_tokens():
  trajectories = [*sampled(), shown()]
  at = places(trajectories, rows=2, length=T)
  found = unpack(learner().logprobs(params(), packed(trajectories)), at)
  for t, own in zip(trajectories[:-1], found, strict=False):
    np.testing.assert_allclose(own, t.per_token('logprobs'), atol=1e-4)
  # What nobody truncated is the whole distribution's.
  want = whole(params(), trajectories)[-1, 2:5]
  np.testing.assert_allclose(found[-1][2:], want, atol=1e-4)
  assert (found[-1][2:] < -0.01).all()


def test_the_gradient_is_that_of_the_renormalised_softmax():
  """And the KL to a reference is over the same ids."""
  trajectories = [*sampled(), shown()]
  masks = np.zeros((len(trajectories), T), bool)
  for t, mask in zip(trajectories, masks, strict=True):
    mask[: len(t)] = t.loss_mask()

  def mean(params):
    return -jnp.where(masks, whole(params, trajectories), 0).sum() / masks.sum()

  value, gradient = jax.jit(jax.value_and_grad(mean))(params())
  start = jax.tree.map(np.array, params())
  l = learner(loss=losses.cross_entropy)
  state, metrics = l.update(l.init(start), packed(trajectories), params(1))
  np.testing.assert_allclose(metrics['loss'], value, rtol=1e-5)
  for g, p, q in zip(
    *map(jax.tree.leaves, (gradient, params(), state.params)), strict=True
  ):
    np.testing.assert_allclose(p - q, g, atol=2e-6, rtol=1e-4)
  far = whole(params(1), trajectories) - whole(params(), trajectories)
  k3 = np.expm1(far) - far
  np.testing.assert_allclose(metrics['kl'], k3[masks].mean(), rtol=1e-3)
  assert all(np.isfinite(v) for v in metrics.values())
  assert metrics['entropy'] > 0.1


def test_a_batch_and_a_learner_have_the_same_room():
  with pytest.raises(ValueError, match='up to 5 ids .* room for 0: .*kept=5'):
    packed(sampled(), kept=0)
  with pytest.raises(ValueError, match='room for 6 kept ids .* for 5'):
    learner().logprobs(params(), packed(sampled(), kept=6))
  with pytest.raises(ValueError, match='learner.kept is 41: give 0'):
    Learner(tiny.PLAIN, optimizer=optax.sgd(1.0), rows=1, length=8, kept=41)


def test_an_engine_refuses_what_it_could_not_write_down():
  with pytest.raises(ValueError, match='kept 41: give 0'):
    tiny.engine(config=tiny.PLAIN, loaded=False, kept=41)
  e = engine()
  slot = e.acquire()
  e.reset(slot)
  e.extend(slot, [3, 4])
  key = trajectory_key(0, 0, 'a', 0, 0)
  budgets = {'turn_budget': 4, 'trajectory_budget': 4}
  for bad in ({'top_k': 6}, {'top_p': 0.9}, {'min_p': 0.1}):
    with pytest.raises(ValueError, match='more than the 5 ids .* top_k 1 to 5'):
      e.start(slot, key, Sampling(**bad), **budgets)
  e.start(slot, key, Sampling(temperature=0.0, top_p=0.9), **budgets)
  ((_, segment),) = e.step()
  want = np.full((len(segment), M), -1)
  want[:, 0] = segment.tokens
  np.testing.assert_array_equal(segment.kept, want)
