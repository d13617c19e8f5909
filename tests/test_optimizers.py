"""Optimizers: schedules by hand, and what each of them steps on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_model as tiny

from agentjax import optimizers
from agentjax.optimizers import adafactor, adamw, muon


def test_the_learning_rate_by_hand():
  def rates(n, **kw):
    """Adam's first steps move a constant gradient's weight by the rate."""
    opt = adamw(0.1, b1=0.0, b2=0.0, eps=0.0, max_grad_norm=1e9, **kw)
    w = np.float32(0)
    state, out = opt.init(w), []
    for _ in range(n):
      update, state = opt.update(np.float32(1), state, w)
      out.append(-float(update))
    return out

  np.testing.assert_allclose(rates(3), [0.1, 0.1, 0.1], rtol=1e-5)
  np.testing.assert_allclose(
    rates(5, warmup_steps=4), [0.025, 0.05, 0.075, 0.1, 0.1], rtol=1e-5
  )
  np.testing.assert_allclose(rates(5, decay_steps=4)[-1], 0.01, rtol=1e-4)
  with pytest.raises(ValueError, match='decay_steps 3'):
    adamw(0.1, warmup_steps=3, decay_steps=3)


@functools.cache
def descend(optimizer, rate, steps=60):
  """Loss before and after, of a matrix toward a given one; and the state."""
  rng = np.random.default_rng(0)
  target = {
    'embed': {'table': jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)},
    'stacks': [{'0': {'mlp': {
      'up': jnp.asarray(rng.normal(size=(2, 130, 140)), jnp.float32)
    }}}],
  }  # fmt: skip
  opt = optimizer(rate, max_grad_norm=1e9)

  def loss(w):
    return optax.tree.norm(optax.tree.sub(w, target), squared=True)

  @jax.jit
  def step(w, state):
    updates, state = opt.update(jax.grad(loss)(w), state, w)
    return optax.apply_updates(w, updates), state

  w = optax.tree.zeros_like(target)
  state, before = opt.init(w), float(loss(w))
  for _ in range(steps):
    w, state = step(w, state)
  return before, float(loss(w)), state


@pytest.mark.parametrize(
  'optimizer, rate', [(adamw, 0.05), (adafactor, 0.05), (muon, 0.2)]
)
def test_they_all_go_down(optimizer, rate):
  before, after, _ = descend(optimizer, rate)
  assert after < 0.3 * before


def test_adafactor_keeps_rows_and_columns():
  """Of a matrix of 130 x 140 no second moment of that size."""
  _, _, state = descend(adafactor, 0.05)
  sizes = {x.shape for x in jax.tree.leaves(state)}
  assert (2, 130) in sizes and (2, 140) in sizes
  assert (2, 130, 140) not in sizes


def test_muon_steps_with_orthogonal_matrices():
  """Each layer's first step has equal singular values, at AdamW's size."""
  opt = muon(1.0, max_grad_norm=1e9)
  rng = np.random.default_rng(1)
  grad = {'stacks': [{'0': {'attn': {
    'q': jnp.asarray(rng.normal(size=(2, 24, 3, 8)), jnp.float32)
  }}}]}  # fmt: skip
  updates, _ = opt.update(grad, opt.init(grad), grad)
  for layer in updates['stacks'][0]['0']['attn']['q']:
    values = np.linalg.svd(layer.reshape(24, 24), compute_uv=False)
    assert values.max() < 1.6 * np.median(values)
    # Newton-Schulz of five steps: singular values of 0.7 to 1.2.
    rms = float(np.sqrt(np.mean(np.square(layer))))
    assert 0.2 * 0.7 < rms < 0.2 * 1.2


def test_muon_takes_every_matrix_of_a_block_and_nothing_else():
  numbers = optimizers.matrices(tiny.params())
  block = numbers['stacks'][0]['0']
  assert all(block['mlp'][name] for name in ('gate', 'up', 'down'))
  assert all(block['attn'][name] for name in 'qkvo')
  assert block['attn']['q_norm'] is None
  assert block['attn_norm']['scale'] is None
  assert numbers['embed']['table'] is None


@pytest.mark.parametrize('optimizer', [adamw, adafactor, muon])
@pytest.mark.parametrize(
  'bad, names',
  [
    ({'learning_rate': float('nan')}, 'learning_rate is nan'),
    ({'learning_rate': -1.0}, 'learning_rate is -1.0'),
    ({'learning_rate': float('inf')}, 'learning_rate is inf'),
    ({'weight_decay': -1.0}, 'weight_decay is -1.0'),
    ({'warmup_steps': -1}, 'warmup_steps is -1'),
    ({'max_grad_norm': 0.0}, 'max_grad_norm is 0'),
    ({'warmup_steps': 5, 'decay_steps': 5}, 'decay_steps 5 must exceed'),
  ],
)
def test_numbers_that_no_optimizer_can_have(optimizer, bad, names):
  with pytest.raises(ValueError, match=names):
    optimizer(**{'learning_rate': 1e-3} | bad)


@pytest.mark.parametrize(
  'optimizer, bad, said',
  [
    (adamw, {'eps': float('nan')}, 'eps is nan'),
    (adamw, {'b1': 1.0}, 'b1 is 1.0: give a number below 1'),
    (muon, {'b2': -0.5}, 'b2 is -0.5'),
    (muon, {'beta': 1.0}, 'beta is 1.0'),
    (adafactor, {'decay_rate': 1.5}, 'decay_rate is 1.5'),
  ],
)
def test_numbers_of_one_optimizer(optimizer, bad, said):
  with pytest.raises(ValueError, match=said):
    optimizer(1e-3, **bad)
