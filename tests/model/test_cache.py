"""Stores: every layout and kernel gives what plain attention gives."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import literals
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from agentjax.model import attention
from agentjax.model.cache import Fresh, Spans
from agentjax.model.config import ModelConfig
from agentjax.model.fused import Fused
from agentjax.model.ragged import Ragged
from agentjax.model.stores import best_store

CONFIG = ModelConfig(
  vocab_size=40,
  width=32,
  layers=((('local', 'global'), 1),),
  heads=4,
  kv_heads=2,
  head_size=128,
  mlp=32,
  context=512,
  window=12,
  attn_softcap=5.0,
)
LENGTH = 320
STORES = {
  'spans': functools.partial(Spans, first=64),
  'one span': functools.partial(Spans, first=LENGTH),
  'ragged': functools.partial(Ragged, page=64),
  # What cuDNN computes, by the other implementation of the same function.
  'fused': functools.partial(Fused, first=64, implementation='xla'),
}


@pytest.fixture
def interpreted(monkeypatch):
  """The Pallas kernel runs in the interpreter: no TPU is here.

  The kernel has no switch for it, and the interpreter of JAX 0.10 asks a
  literal number for its shape.
  """

  class Interpreted:
    def __getattr__(self, name):
      return getattr(pl, name)

    def pallas_call(self, *args, **kw):
      return pl.pallas_call(*args, interpret=True, **kw)

  monkeypatch.setattr(kernel, 'pl', Interpreted())
  if not hasattr(literals.TypedInt, 'shape'):
    monkeypatch.setattr(literals.TypedInt, 'shape', (), raising=False)


def whole(keys, kind, config):
  """Plain attention of the last T tokens over all, per row."""
  q, k, v = keys
  n, T = k.shape[0], q.shape[0]
  at = np.arange(n - T, n)[:, None]
  mask = np.arange(n) <= at
  if kind == 'local':
    mask &= at - np.arange(n) < config.window
  out = attention.attend(q[None], k[None], v[None], mask[None], config)
  return np.asarray(out[0], np.float32)


@pytest.mark.parametrize('name', STORES)
@pytest.mark.parametrize('kind', ['global', 'local'])
@pytest.mark.parametrize('softcap', [0.0, 5.0])
def test_every_store_attends_to_what_is_there(name, kind, softcap, interpreted):
  """Rows of 1 to 300 tokens, filled in pieces, then a token in some."""
  config = dataclasses.replace(CONFIG, attn_softcap=softcap)
  if name == 'fused':
    config = dataclasses.replace(config, layers=(((kind,), 2),))
    if kind == 'local' or softcap:
      assert not Fused.fits(config, 'bfloat16', None)
      return
  store = STORES[name](config, 4, LENGTH, jnp.float32)
  H, K, Q = config.heads, config.kv_heads, config.head_size
  rng = np.random.default_rng(0)

  def random(n, heads):
    return jnp.asarray(rng.normal(size=(n, heads, Q)), jnp.float32)

  @jax.jit
  def attend(layer, q, k, v, start, count, slot=None):
    seen = store.see(Fresh(start, count, slot), q.shape[1])
    return store.attend(q, k, v, layer, kind, seen)

  layer = store.init()[0]
  past = {}
  for slot, pieces in {0: (1,), 1: (64, 40), 3: (100, 200)}.items():
    k, v = random(0, K), random(0, K)
    for n in pieces:
      T = -(-n // 64) * 64  # padded, as by a bucket
      q = random(T, H)
      k, v = (jnp.concatenate([x, random(T, K)[:n]]) for x in (k, v))
      start = len(k) - n
      out, layer = attend(
        layer, q[None],
        *(jnp.pad(x[start:], ((0, T - n), (0, 0), (0, 0)),
                  constant_values=jnp.nan)[None] for x in (k, v)),
        jnp.array([start]), jnp.array([n]), jnp.int32(slot),
      )  # fmt: skip
      np.testing.assert_allclose(
        out[0, :n], whole((q[:n], k, v), kind, config), atol=2e-5
      )
    past[slot] = k, v
  # One token in slots 0, 1 and 3; slot 2 is empty, and nobody's.
  q, k, v = random(4, H), random(4, K), random(4, K)
  live = [0, 1, 3]
  start = jnp.array([len(past[s][0]) if s in past else 0 for s in range(4)])
  count = jnp.array([int(s in live) for s in range(4)])
  out, layer = attend(layer, q[:, None], k[:, None], v[:, None], start, count)
  for s in live:
    keys = [
      jnp.concatenate([old, new[s : s + 1]])
      for old, new in zip(past[s], (k, v), strict=True)
    ]
    np.testing.assert_allclose(
      out[s], whole((q[s : s + 1], *keys), kind, config), atol=2e-5
    )
  # A row moves to another slot as far as it is filled.
  n = next(n for n in store.prefixes if n >= 105)
  cache = store.put([layer], jnp.int32(2), store.take([layer], jnp.int32(1), n))
  q = random(4, H)
  start = start.at[1].add(1).at[2].set(105)
  both, _ = attend(
    cache[0], q[1][None, None].repeat(4, 0), k[:, None].at[2].set(k[1][None]),
    v[:, None].at[2].set(v[1][None]), start, jnp.array([0, 1, 1, 0]),
  )  # fmt: skip
  np.testing.assert_array_equal(both[1], both[2])


def test_the_kernel_is_refused_where_it_does_not_fit():
  assert Ragged.fits(CONFIG, 'bfloat16', None)
  assert not Ragged.fits(CONFIG, 'float32', None)
  small = dataclasses.replace(CONFIG, head_size=64)
  assert not Ragged.fits(small, 'bfloat16', None)
  plain = dataclasses.replace(
    CONFIG, layers=((('global',), 1),), attn_softcap=0.0
  )
  assert Fused.fits(plain, 'bfloat16', None)
  assert not Fused.fits(plain, 'float32', None)
  wide = dataclasses.replace(plain, head_size=256)
  assert not Fused.fits(wide, 'bfloat16', None)


@pytest.mark.parametrize('platform, store', [('gpu', Fused), ('cpu', Spans)])
def test_the_store_goes_by_the_platform(platform, store, monkeypatch):
  device = types.SimpleNamespace(platform=platform)
  monkeypatch.setattr(jax, 'devices', lambda: [device])
  plain = dataclasses.replace(
    CONFIG, layers=((('global',), 1),), attn_softcap=0.0
  )
  assert best_store(plain, 'bfloat16', None) is store
  assert best_store(plain, 'float32', None) is Spans


@pytest.mark.parametrize('slot', [None, 1])
def test_the_store_of_gpus_calls_cudnn(slot, monkeypatch):
  """Lowered for CUDA; no GPU and no cuDNN is here, so both are claimed."""
  monkeypatch.setattr(cudnn, 'check_cudnn_version', lambda: 91200)
  monkeypatch.setattr(cudnn, 'check_compute_capability', lambda _: True)
  monkeypatch.setattr(
    cudnn, 'is_cuda_compute_capability_equal', lambda _: False
  )
  config = dataclasses.replace(
    CONFIG, layers=((('global',), 1),), attn_softcap=0.0
  )
  store = Fused(config, 4, 1024)
  B, T = (4, 1) if slot is None else (1, 64)

  def attend(layer, q, k, v, start, count):
    seen = store.see(Fresh(start, count, slot), T)
    return store.attend(q, k, v, layer, 'global', seen)

  def heads(n):
    return jax.ShapeDtypeStruct((B, T, n, 128), jnp.bfloat16)

  row = jax.ShapeDtypeStruct((B,), jnp.int32)
  text = (
    jax.jit(attend)
    .trace(store.init()[0], heads(4), heads(2), heads(2), row, row)
    .lower(lowering_platforms=('cuda',))
    .as_text()
  )
  # One call for decoding; one a prefix of the row for a prompt.
  calls = text.count('custom_call @__cudnn')
  assert calls == (1 if slot is None else len(store.prefixes))
