"""Whatever a layer keeps, gradients are the same; and it keeps what it says."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model as tiny

from agentjax.model import attention, remat, transformer

B, T = 2, 24
POLICIES = {
  name: getattr(remat, name)
  for name in ('nothing', 'keep_attention', 'keep_products')
}
OFFLOADS = {
  name: getattr(remat, name) for name in ('offload_blocks', 'offload_attention')
}
WAYS = {
  'plain': attention.plain,
  'blocks': functools.partial(attention.in_blocks, block=16),
}


def batch():
  tokens = jnp.stack([tiny.tokens(i, T) for i in range(B)])
  positions = jnp.broadcast_to(jnp.arange(T), (B, T))
  return tokens, positions, jnp.ones((B, T), jnp.int32)


def total(params, remat, way='plain', unroll=False):
  hidden = transformer.forward(
    params, *batch(), tiny.CONFIG, remat=remat, unroll=unroll,
    attention=WAYS[way],
  )  # fmt: skip
  return jnp.sum(jnp.sin(hidden))


@functools.cache
def gradient(policy, way='plain', unroll=False):
  f = functools.partial(total, remat=policy, way=way, unroll=unroll)
  return jax.jit(jax.grad(f))(tiny.params())


def same(got, want):
  for (path, a), b in zip(
    jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True
  ):
    scale = np.abs(b).max()
    np.testing.assert_allclose(
      a, b, rtol=0, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path)
    )


@pytest.mark.parametrize('name', [*POLICIES, *OFFLOADS])
def test_gradients_do_not_depend_on_it(name):
  policy = (POLICIES | OFFLOADS)[name]
  same(gradient(policy), gradient(False))


def test_nor_where_attention_goes_in_blocks_or_layers_are_unrolled():
  same(gradient(remat.keep_attention, 'blocks'), gradient(False))
  same(gradient(remat.nothing, unroll=True), gradient(None))
  assert gradient(True) is not gradient(remat.nothing)
  same(gradient(True), gradient(remat.nothing))


def kept(policy) -> int:
  """Bytes that the forward pass leaves for the backward pass, per layer."""
  f = functools.partial(total, remat=policy)
  residuals = jax.eval_shape(lambda p: jax.vjp(f, p)[1], tiny.params())
  sizes = [4 * math.prod(x.shape) for x in jax.tree.leaves(residuals)]
  return sum(sizes)


def test_a_policy_keeps_the_values_that_it_names():
  c = tiny.CONFIG
  one = 4 * B * T * c.n_layers  # bytes of a number per token and layer
  least = kept(remat.nothing)
  heads = c.heads * c.head_size
  assert kept(True) == least
  assert kept(remat.keep_attention) - least == one * heads
  products = one * (
    2 * heads + 2 * c.kv_heads * c.head_size + c.width + 2 * c.mlp
  )
  assert kept(remat.keep_products) - least == products
  assert kept(False) - least > products


def test_offloading_goes_to_the_memory_of_the_host():
  def program(policy):
    f = functools.partial(total, remat=policy)
    return str(jax.make_jaxpr(jax.grad(f))(tiny.params()))

  assert 'host' in program(remat.offload_blocks).lower()
  assert 'host' not in program(remat.nothing).lower()


def test_what_is_no_policy_is_refused():
  with pytest.raises(ValueError, match='agentjax.model.remat.nothing'):
    total(tiny.params(), 'nothing')
