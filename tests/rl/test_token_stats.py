"""token_stats against whole logits: values, gradients, and what is stored."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.rl.token_stats import Head, TokenStats, compact, token_stats

N, D, V = 21, 6, 11
CAP = 4.0


def capped(logits):
  """A soft-cap, and one padding id."""
  z = CAP * jnp.tanh(logits / CAP)
  return jnp.where(jnp.arange(V) < V - 1, z, -1e30)


@pytest.fixture(scope='module')
def given():
  rng = np.random.default_rng(0)

  def random(*shape, scale=1.0):
    return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

  return {
    'head': Head(random(N, D), random(D, V, scale=3)),
    'ids': jnp.asarray(rng.integers(0, V - 1, N)),
    'temperature': jnp.asarray(rng.uniform(0.5, 2, N), jnp.float32),
    'reference': Head(random(N, D), random(D, V, scale=3)),
    # Some kept sets hold the label, some do not; some are shorter, and some
    # rows kept all.
    'kept': jnp.asarray(
      [
        [*rng.permutation(V - 1)[:n], *[-1] * (4 - n)]
        for n in rng.integers(0, 5, N)
      ]
    ),
    'weights': [random(N) for _ in TokenStats._fields],
  }


def whole(head, given, reference, kept):
  """All of it from [N, V] arrays, by jax's own functions."""
  tau = given['temperature'][:, None]
  z = capped(head.hidden_ND @ head.kernel_DV) / tau
  total = jax.nn.logsumexp(z, -1)
  logp = z - total[:, None]
  p = jnp.exp(logp)
  own = jnp.take_along_axis(logp, given['ids'][:, None], 1)[:, 0]
  entropy = -jnp.sum(jnp.where(p > 0, p * logp, 0), -1)
  kl = log_kept = jnp.zeros(N)
  if reference is not None:
    far = capped(reference.hidden_ND @ reference.kernel_DV) / tau
    q = jax.nn.log_softmax(far, -1)
    kl = jnp.sum(jnp.where(p > 0, p * (logp - q), 0), -1)
  if kept is not None:
    inside = (kept[:, :, None] == jnp.arange(V)).any(1)
    inside |= given['ids'][:, None] == jnp.arange(V)
    inside |= (kept < 0).all(1)[:, None]
    log_kept = jax.nn.logsumexp(jnp.where(inside, logp, -jnp.inf), -1)
  return TokenStats(own - log_kept, entropy, total, kl, log_kept)


@pytest.mark.parametrize('chunk', [1, 7, 64])
@pytest.mark.parametrize('extra', [(), ('reference',), ('reference', 'kept')])
def test_values_and_gradients_equal_whole_logits(chunk, extra, given):
  reference = given['reference'] if 'reference' in extra else None
  kept = given['kept'] if 'kept' in extra else None

  def mixed(stats):
    return sum(
      jnp.sum(w * x) for w, x in zip(given['weights'], stats, strict=True)
    ), stats

  @jax.jit
  def ours(head):
    return mixed(
      token_stats(
        head, given['ids'], given['temperature'], finish=capped,
        reference=reference, kept_NM=kept, chunk=chunk,
      )
    )  # fmt: skip

  @jax.jit
  def theirs(head):
    return mixed(whole(head, given, reference, kept))

  a, b = (
    jax.value_and_grad(f, has_aux=True)(given['head']) for f in (ours, theirs)
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=3e-5), a, b
  )


def test_finite_differences(given):
  """The gradients that were derived by hand, in float64, by no other hand."""
  with jax.enable_x64(True):
    f64 = jax.tree.map(
      lambda x: (
        jnp.asarray(np.asarray(x, np.float64)) if x.dtype == jnp.float32 else x
      ),
      given,
    )

    def total(head):
      stats = whole(head, f64, f64['reference'], f64['kept'])
      return sum(
        jnp.sum(w * x) for w, x in zip(f64['weights'], stats, strict=True)
      )

    rng = np.random.default_rng(1)
    toward = jax.tree.map(lambda x: rng.normal(size=x.shape), f64['head'])
    step = 1e-6

    def at(by):
      return total(jax.tree.map(lambda x, d: x + by * d, f64['head'], toward))

    slope = float(at(step) - at(-step)) / (2 * step)

  def ours(head):
    stats = token_stats(
      head, given['ids'], given['temperature'], finish=capped,
      reference=given['reference'], kept_NM=given['kept'], chunk=8,
    )  # fmt: skip
    return sum(
      jnp.sum(w * x) for w, x in zip(given['weights'], stats, strict=True)
    )

  grad = jax.grad(ours)(given['head'])
  mine = sum(
    float(jnp.vdot(jnp.asarray(d, jnp.float32), g))
    for d, g in zip(toward, grad, strict=True)
  )
  np.testing.assert_allclose(mine, slope, rtol=1e-4)


def test_factors_of_a_head_stand_for_their_product(given):
  hidden, kernel = given['head']
  a, b = kernel[:, :2], kernel[:2] / 3

  def mixed(parts, form):
    head = Head(hidden, form(parts))
    stats = token_stats(
      head, given['ids'], given['temperature'], finish=capped, chunk=7
    )
    return sum(
      jnp.sum(w * x) for w, x in zip(given['weights'], stats, strict=True)
    )

  grad = jax.value_and_grad(mixed)
  got, found = grad((kernel, a, b), lambda parts: parts)
  want, expected = grad((kernel, a, b), lambda p: p[0] + p[1] @ p[2])
  np.testing.assert_allclose(got, want, rtol=1e-5)
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5 * float(jnp.abs(y).max()))


def test_rows_without_a_cotangent_are_no_rows(given):
  """A NaN in a state that carries no loss reaches no gradient."""
  head, mask = given['head'], np.arange(N) % 3 > 0

  def loss(head):
    stats = token_stats(
      head, given['ids'], given['temperature'], chunk=8,
      reference=given['reference'],
    )  # fmt: skip
    return sum(jnp.sum(jnp.where(mask, x, 0)) for x in stats)

  want = jax.grad(loss)(head)
  spoiled = head._replace(
    hidden_ND=jnp.where(mask[:, None], head.hidden_ND, jnp.nan)
  )
  got = jax.grad(loss)(spoiled)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert not np.asarray(got.hidden_ND)[~mask].any()


def test_nothing_flows_into_the_reference(given):
  def loss(reference):
    stats = token_stats(
      given['head'], given['ids'], given['temperature'], reference=reference
    )
    return stats.kl_N.sum()

  grad = jax.grad(loss)(given['reference'])
  assert not any(np.asarray(g).any() for g in grad)


def test_bfloat16_sums_in_float32(given):
  """Against whole float32 logits of the same rounded operands."""
  head = jax.tree.map(lambda x: x.astype(jnp.bfloat16), given['head'])
  exact = jax.tree.map(lambda x: x.astype(jnp.float32), head)

  def loss(head, function):
    return function(head).logprobs_N.sum()

  def ours(head):
    return token_stats(
      head, given['ids'], given['temperature'], finish=capped, chunk=4
    )

  a, b = ours(head), whole(exact, given, None, None)
  np.testing.assert_allclose(a.logprobs_N, b.logprobs_N, rtol=1e-5, atol=1e-5)
  got = jax.grad(loss)(head, ours)
  want = jax.grad(loss)(exact, lambda h: whole(h, given, None, None))
  assert {g.dtype for g in got} == {jnp.dtype('bfloat16')}
  for g, w in zip(got, want, strict=True):
    np.testing.assert_allclose(
      np.asarray(g, np.float32), w, rtol=0.02, atol=0.02 * np.abs(w).max()
    )


def test_padded_ids_give_no_nan_in_entropy():
  def entropy(h):
    s = token_stats(
      Head(h, jnp.ones((2, 4))), jnp.zeros(3, int), jnp.full(3, 0.5),
      finish=lambda z: jnp.where(jnp.arange(4) < 3, z, -1e30),
    )  # fmt: skip
    return s.entropy_N.sum()

  value, grad = jax.value_and_grad(entropy)(jnp.ones((3, 2)))
  np.testing.assert_allclose(value, 3 * np.log(3), rtol=1e-6)
  assert np.isfinite(np.asarray(grad)).all()


def test_whole_logits_are_never_there():
  """Of 512 tokens and 2,048 ids no array is in the compiled gradient."""
  n, v, chunk = 512, 2048, 64

  def loss(head, ids, temperature):
    stats = token_stats(head, ids, temperature, chunk=chunk)
    return stats.logprobs_N.sum() + stats.entropy_N.sum()

  shape = jax.ShapeDtypeStruct
  compiled = (
    jax.jit(jax.grad(loss))
    .lower(
      Head(shape((n, 32), jnp.float32), shape((32, v), jnp.float32)),
      shape((n,), jnp.int32),
      shape((n,), jnp.float32),
    )
    .compile()
  )
  sizes = [
    int(np.prod([int(i) for i in dims.split(',')]))
    for dims in re.findall(r'\w+\[([\d,]+)\]', compiled.as_text())
  ]
  assert max(sizes) == max(chunk * v, 32 * v)
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4 * chunk * v


def test_compact_keeps_order_and_says_what_is_real():
  mask = jnp.array([[0, 1, 1], [0, 0, 1]], bool)
  index, real = compact(mask, 5)
  np.testing.assert_array_equal(index[:3], [1, 2, 5])
  np.testing.assert_array_equal(real, [1, 1, 1, 0, 0])
