"""The learner's attention: every way gives what plain attention gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.model import attention
from agentjax.model.attention import Rows, causal, in_blocks, plain, splash
from agentjax.model.config import ModelConfig

CONFIG = ModelConfig(
  vocab_size=40,
  width=32,
  layers=((('local', 'global'), 1),),
  heads=4,
  kv_heads=2,
  head_size=64,
  mlp=32,
  context=512,
  window=40,
)
T = 256
WAYS = {
  'blocks': functools.partial(in_blocks, block=96),
  'one block': functools.partial(in_blocks, block=1024),
  'causal': functools.partial(causal, block=96),
  'causal, one block': functools.partial(causal, block=1024),
  'splash': functools.partial(splash, block=128, interpret=True),
}


def given():
  """Two rows: one of three sequences and padding, one of a single sequence."""
  rng = np.random.default_rng(0)

  def random(heads):
    x = rng.normal(size=(2, T, heads, CONFIG.head_size))
    return jnp.asarray(x, jnp.float32)

  lengths = [[100, 1, 90], [T]]
  ids, at = np.zeros((2, T), np.int32), np.zeros((2, T), np.int32)
  for row, parts in enumerate(lengths):
    start = 0
    for i, n in enumerate(parts):
      ids[row, start : start + n] = i + 1
      at[row, start : start + n] = np.arange(n)
      start += n
  return (random(4), random(2), random(2)), Rows(ids, at)


def by_hand(q, k, v, rows, kind, config):
  """One query at a time, in float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros(q.shape)
  for b, t in np.argwhere(np.asarray(rows.pack_ids) > 0):
    first = t - rows.positions[b, t]
    if kind == 'local':
      first = max(first, t - config.window + 1)
    for h in range(config.heads):
      K = h // (config.heads // config.kv_heads)
      s = k[b, first : t + 1, K] @ q[b, t, h] * config.head_size**-0.5
      if config.attn_softcap:
        s = config.attn_softcap * np.tanh(s / config.attn_softcap)
      w = np.exp(s - s.max())
      out[b, t, h] = w / w.sum() @ v[b, first : t + 1, K]
  return out


@pytest.mark.parametrize('kind, softcap', [('global', 0.0), ('local', 5.0)])
def test_plain_attention_by_hand(kind, softcap):
  config = dataclasses.replace(CONFIG, attn_softcap=softcap)
  qkv, rows = given()
  got = plain(*qkv, rows, kind, config)
  real = rows.pack_ids > 0
  want = by_hand(*qkv, rows, kind, config)
  np.testing.assert_allclose(got[real], want[real], atol=2e-5)


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('kind, softcap', [('global', 0.0), ('local', 5.0)])
def test_values_and_gradients_equal_plain_ones(way, kind, softcap):
  config = dataclasses.replace(CONFIG, attn_softcap=softcap)
  qkv, rows = given()
  real = (rows.pack_ids > 0)[..., None, None]
  weights = np.random.default_rng(1).normal(size=qkv[0].shape)

  def total(function, qkv):
    out = function(*qkv, rows, kind, config)
    return jnp.sum(jnp.where(real, out * weights, 0))

  a, b = (
    jax.jit(jax.value_and_grad(functools.partial(total, f)))(qkv)
    for f in (WAYS[way], plain)
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4), a, b
  )


def test_blocks_never_hold_all_scores():
  """Of 512 tokens and 4 heads, 4 * 512 * 512 scores stand nowhere."""
  n = 512
  row = jax.ShapeDtypeStruct((1, n), jnp.int32)

  def total(way, q, k, v, ids, at):
    out = way(q, k, v, Rows(ids, at), 'global', CONFIG)
    return out.sum()

  def heads(h):
    return jax.ShapeDtypeStruct((1, n, h, CONFIG.head_size), jnp.float32)

  def temp(way):
    f = jax.jit(jax.grad(functools.partial(total, way), (0, 1, 2)))
    compiled = f.lower(heads(4), heads(2), heads(2), row, row).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  scores = 4 * 4 * n * n
  assert temp(plain) > scores > temp(functools.partial(in_blocks, block=64))


def test_causal_blocks_leave_out_what_no_query_sees():
  """Half of the products of scores, where a row has many blocks."""
  n = 512
  qkv = [
    jax.ShapeDtypeStruct((1, n, h, CONFIG.head_size), jnp.float32)
    for h in (4, 2, 2)
  ]
  rows = Rows(*[jax.ShapeDtypeStruct((1, n), jnp.int32)] * 2)

  def flops(way, kind):
    f = jax.jit(lambda q, k, v, rows: way(q, k, v, rows, kind, CONFIG))
    return f.lower(*qkv, rows).cost_analysis()['flops']

  way = functools.partial(causal, block=64)
  assert flops(way, 'global') < 0.65 * flops(plain, 'global')
  assert flops(way, 'local') < 0.35 * flops(plain, 'local')


def test_the_way_goes_by_platform_and_length(monkeypatch):
  best = attention.best_attention
  assert best(CONFIG, 512, None) is causal
  assert best(CONFIG, 16384, None) is in_blocks

  class Chip:
    platform = 'tpu'

  monkeypatch.setattr(jax, 'devices', lambda: [Chip()])
  assert best(CONFIG, 512, None).keywords == {'block': 512}
  assert best(CONFIG, 384, None).keywords == {'block': 128}
  assert best(CONFIG, 500, None) is plain
  odd = dataclasses.replace(CONFIG, head_size=24)
  assert best(odd, 16384, None) is in_blocks
