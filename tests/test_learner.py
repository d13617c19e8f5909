"""The update: promise 2 at the gradient, splits, meshes' stand-in, guards."""

import functools

import jax
import numpy as np
import optax
import pytest
from fakes import trajectory
from tiny_model import PLAIN as CONFIG
from tiny_model import params as tiny_params

from agentjax import forward
from agentjax.learner import Learner
from agentjax.optimizers import adamw
from agentjax.rl import losses, surrogates
from agentjax.rl.batch import Batch, pack
from agentjax.types import Status

sgd = optax.sgd(1.0)
params = functools.partial(tiny_params, config=CONFIG)


def example(i, n, logprob=-3.0):
  rng = np.random.default_rng(i)
  return trajectory(
    [
      ('p', rng.integers(2, 40, 3)),
      ('m', rng.integers(2, 40, n)),
      ('o', rng.integers(2, 40, 4)),
      ('m', rng.integers(2, 40, 2)),
    ],
    str(i),
    logprob=logprob,
  )


EXAMPLES = [example(i, n) for i, n in enumerate([1, 9, 4, 2, 7, 3])]
CREDIT = [1.0, -0.5, 0.25, -2.0, 0.0, 1.5]


@functools.cache
def learner(rows=2, length=24, **kw):
  options = {'optimizer': sgd, 'chunk': 16} | kw
  return Learner(CONFIG, rows=rows, length=length, **options)


def step(batch, rows=2, length=24, reference=None, **kw):
  """The gradient as SGD with rate 1 takes it, and the metrics."""
  l = learner(rows, length, **kw)
  # A copy: an update gives its state up.
  state = l.init(jax.tree.map(np.array, params()))
  state, metrics = l.update(state, batch, reference)
  gradient = jax.tree.map(
    lambda a, b: np.asarray(a) - np.asarray(b), params(), state.params
  )
  return gradient, metrics


def close(a, b, atol=2e-6):
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=atol, rtol=1e-4),
    a[0],
    b[0],
  )
  for name in ('loss', 'entropy', 'behaviour_kl', 'clip_fraction'):
    np.testing.assert_allclose(a[1][name], b[1][name], rtol=1e-4, atol=1e-6)


def packed(rows=2, length=24, examples=EXAMPLES, credit=CREDIT):
  return pack(examples, credit, rows=rows, length=length)


def test_packing_order_and_micro_batches_change_nothing():
  base = step(packed())
  close(base, step(packed(1, 24), 1))
  close(base, step(packed(6, 24), 6))
  close(base, step(packed(2, 48), 2, 48))
  close(base, step(packed(2, 24, EXAMPLES[::-1], CREDIT[::-1])))
  # Alone in rows of their own: what packing must not mix.
  rows = [
    pack([e], [c], rows=1, length=24)
    for e, c in zip(EXAMPLES, CREDIT, strict=True)
  ]
  alone = Batch(*(np.concatenate(x) for x in zip(*rows, strict=True)))
  close(base, step(alone, 1))


def test_losses_of_trajectories_and_turns_know_which_is_which():
  """However they are packed; and tokens of two are never taken for one."""
  for ratio in (losses.trajectory_ratio, losses.turn_ratio):
    loss = functools.partial(
      surrogates.gspo, clip_low=9.0, clip_high=9.0, log_ratio=ratio
    )
    base = step(packed(), loss=loss)
    close(base, step(packed(2, 24, EXAMPLES[::-1], CREDIT[::-1]), loss=loss))
    alone = [
      step(pack([e], [c], rows=2, length=24), loss=loss)
      for e, c in zip(EXAMPLES, CREDIT, strict=True)
    ]
    tokens = [a[1]['loss_tokens'] for a in alone]
    mean = sum(a[1]['loss'] * n for a, n in zip(alone, tokens, strict=True))
    np.testing.assert_allclose(base[1]['loss'], mean / sum(tokens), rtol=1e-4)


def test_sequences_and_turns_are_numbered_along_a_part():
  batch = packed(2, 24)
  tokens = jax.jit(forward.pick, static_argnums=(1, 2))(batch, 48, 1)
  real = np.asarray(tokens.mask)[0]
  kept = batch.weights > 0
  for name, own in (
    ('sequences', [batch.pack_ids]),
    ('turns', [batch.pack_ids, batch.turns]),
  ):
    ids = np.asarray(getattr(tokens, name))[0]
    rows = np.nonzero(kept)[0]
    keys = list(zip(rows, *(x[kept] for x in own), strict=True))
    same = [[a == b for b in keys] for a in keys]
    got = ids[real]
    np.testing.assert_array_equal(got[:, None] == got[None, :], same)
    assert ids.min() == 0 and ids.max() < 48


def test_the_capacity_of_loss_tokens_changes_nothing():
  close(step(packed()), step(packed(), shares=(0.5, 1.0)))


def test_scan_unroll_and_remat_are_the_same():
  base = step(packed())
  close(base, step(packed(), remat=False, unroll=True))


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf, 1e38])
def test_masked_arrays_have_no_effect(bad):
  batch = packed()
  spoiled = batch._replace(
    logprobs=np.where(batch.weights > 0, batch.logprobs, bad),
    advantages=np.where(batch.weights > 0, batch.advantages, bad),
  )
  a, b = step(batch), step(spoiled)
  jax.tree.map(np.testing.assert_array_equal, a[0], b[0])
  assert a[1] == b[1]


def test_masked_rows_have_no_effect():
  """An infrastructure failure beside them: the others learn as without it."""
  lost = example(50, 9).append(status=Status.INFRA_FAILURE, reward=None)
  close(step(packed()), step(packed(2, 24, [*EXAMPLES, lost], [*CREDIT, 9.0])))


def test_an_empty_batch_changes_nothing_and_is_finite():
  lost = [e.append(status=Status.ABORTED) for e in EXAMPLES]
  l = learner()
  state = l.init(jax.tree.map(np.array, params()))
  state, metrics = l.update(state, packed(examples=lost))
  jax.tree.map(np.testing.assert_array_equal, state.params, params())
  assert int(state.step) == 0 and int(state.skipped) == 0
  assert all(np.isfinite(v) for v in metrics.values())


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
  l = learner(optimizer=adamw(1e-3))
  broken = jax.tree.map(np.array, params())
  broken['final_norm']['scale'][0] = np.nan
  state = l.init(broken)
  before = jax.tree.map(np.array, state)
  state, metrics = l.update(state, packed())
  jax.tree.map(np.testing.assert_array_equal, state.params, before.params)
  jax.tree.map(np.testing.assert_array_equal, state.opt_state, before.opt_state)
  assert int(state.skipped) == 1 and metrics['skipped_updates'] == 1
  assert int(state.step) == 0


def test_the_gradient_is_that_of_the_written_loss():
  """One unpacked trajectory at a time, from whole logits, by finite sums."""
  from agentjax.model import transformer

  longest = max(map(len, EXAMPLES))

  @jax.jit
  def whole(params, tokens, n):
    t = jax.numpy.arange(longest)
    hidden = transformer.forward(
      params, tokens[None], t[None], (t < n).astype(int)[None], CONFIG
    )
    logits = transformer.logits(params, hidden, CONFIG)
    return jax.nn.log_softmax(logits, -1)[0]

  def plain(params):
    total, count = 0.0, 0
    for e, c in zip(EXAMPLES, CREDIT, strict=True):
      tokens = np.pad(e.tokens(), (0, longest - len(e)))
      logp = whole(params, tokens, len(e))
      for t in np.flatnonzero(e.loss_mask()):
        ratio = jax.numpy.exp(logp[t - 1, tokens[t]] + 3.0)
        total += -jax.numpy.minimum(
          c * ratio, c * jax.numpy.clip(ratio, 0.8, 1.2)
        )
        count += 1
    return total / count

  value, gradient = jax.value_and_grad(plain)(params())
  got = step(packed())
  np.testing.assert_allclose(got[1]['loss'], value, rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-3),
    got[0],
    gradient,
  )


def test_kl_to_a_reference_has_a_gradient_and_vanishes_at_itself():
  flat = packed(credit=[0.0] * 6)
  here = step(flat, kl_coef=0.5, reference=params())
  assert abs(here[1]['kl']) < 1e-6
  assert max(np.abs(g).max() for g in jax.tree.leaves(here[0])) < 1e-5
  away = step(flat, kl_coef=0.5, reference=params(1))
  assert away[1]['kl'] > 0.1
  assert max(np.abs(g).max() for g in jax.tree.leaves(away[0])) > 1e-3


def test_sft_trains_the_one_token_of_a_short_answer():
  """Exactly one position has a loss: the one that predicts it."""
  t = trajectory([('p', [5, 6, 7]), ('m', [8])])
  batch = pack([t], [0.0], rows=2, length=24)
  assert np.argwhere(batch.weights > 0).tolist() == [[0, 3]]
  _, metrics = step(batch, loss=losses.cross_entropy)
  assert metrics['loss_tokens'] == 1


def test_bad_shapes_are_refused():
  with pytest.raises(ValueError, match='shares'):
    Learner(CONFIG, optimizer=sgd, rows=1, length=8, shares=(0.5,))
  # A row may be longer than the model's positions, a trajectory may not.
  long = Learner(CONFIG, optimizer=sgd, rows=1, length=4096)
  state, batch = (
    long.init(params()),
    pack(EXAMPLES, CREDIT, rows=1, length=4096),
  )
  last = CONFIG.context
  batch.positions[0, 4095] = last
  with pytest.raises(ValueError, match=f'{last + 1} tokens, the model {last}'):
    long.update(state, batch)
  l = learner()
  with pytest.raises(ValueError, match='multiple of 2'):
    l.update(l.init(params()), packed(1, 24, EXAMPLES[:1], [1.0]))


@pytest.mark.parametrize(
  'bad',
  [
    optax.sgd(float('nan')),
    optax.sgd(float('inf')),
    optax.chain(optax.sgd(1.0), optax.scale(1e38), optax.scale(1e38)),
  ],
)
def test_new_weights_that_are_not_finite_are_skipped_and_counted(bad):
  batch = pack(EXAMPLES, CREDIT, rows=2, length=24)
  gradient, metrics = step(batch, optimizer=bad)
  jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), gradient)
  assert metrics['skipped_updates'] == 1
  assert np.isfinite(metrics['grad_norm'])


@pytest.mark.parametrize(
  ('options', 'said'),
  [
    ({'kl_coef': float('nan')}, 'kl_coef is nan'),
    ({'kl_coef': -0.1}, 'kl_coef is -0.1'),
    ({'entropy_coef': float('inf')}, 'entropy_coef is inf'),
    ({'shares': ()}, r'shares \(\): give ascending'),
    ({'shares': (-0.5, 1.0)}, 'fractions above 0'),
    ({'rows': 0}, 'learner.rows is 0'),
    ({'length': -3}, 'learner.length is -3'),
    ({'chunk': 0}, 'learner.chunk is 0'),
  ],
)
def test_a_learner_of_no_numbers_is_refused(options, said):
  with pytest.raises(ValueError, match=said):
    Learner(CONFIG, optimizer=sgd, **{'rows': 2, 'length': 24} | options)
