"""Adapters: the frozen policy at first, its merged form always, and cheap."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_model as tiny

from agentjax import compiles
from agentjax.checkpoint import Checkpoints
from agentjax.model import load, lora, save, transformer
from agentjax.model import mesh as meshes
from agentjax.rl.token_stats import Head, token_stats
from agentjax.rollout.sampling import Sampling, trajectory_key

ALL = (*lora.LINEARS, 'head')
UNTIED = dataclasses.replace(tiny.PLAIN, tied=False)
LORA = lora.LoRA(rank=3, alpha=6.0, targets=ALL)


def adapters(seed=0, config=UNTIED, shape=LORA):
  """Adapters that were trained: b is not zero."""
  out = lora.init(jax.random.key(seed), config, shape)
  leaves, tree = jax.tree.flatten(out)
  keys = jax.random.split(jax.random.key(100 + seed), len(leaves))
  return tree.unflatten(
    [
      x + 0.1 * jax.random.normal(k, x.shape)
      for x, k in zip(leaves, keys, strict=True)
    ]
  )


attach = functools.partial(lora.attach, scale=LORA.scale)
merge = functools.partial(lora.merge, scale=LORA.scale)
TOKENS = np.stack([tiny.tokens(i, 11) for i in range(2)])
POSITIONS = np.broadcast_to(np.arange(11), TOKENS.shape)


def loss(params, config=UNTIED, **options):
  """Mean negative log-likelihood of TOKENS, as the learner computes it."""
  hidden = transformer.forward(
    params, TOKENS, POSITIONS, np.ones_like(TOKENS), config, **options
  )
  head = Head(
    hidden[:, :-1].reshape(-1, config.width), transformer.head_kernel(params)
  )
  ids = jnp.asarray(TOKENS[:, 1:].reshape(-1))
  finish = transformer.finisher(config)
  stats = token_stats(head, ids, jnp.ones(ids.shape), finish=finish, chunk=5)
  return -stats.logprobs_N.mean()


@jax.jit
def value_and_grad(frozen, factors):
  return jax.value_and_grad(lambda f: loss(attach(frozen, f)))(factors)


def close(a, b, rtol=1e-5):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for (path, x), y in zip(
    jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True
  ):
    atol = rtol * max(float(jnp.abs(y).max()), 1e-3)
    name = jax.tree_util.keystr(path)
    np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=name)


def test_factors_of_every_map_have_its_sides_and_the_rank():
  fresh = lora.init_shapes(UNTIED, LORA)
  shapes = {
    'attn': {
      'q': ((2, 32, 3), (2, 3, 4, 8)),
      'k': ((2, 32, 3), (2, 3, 2, 8)),
      'v': ((2, 32, 3), (2, 3, 2, 8)),
      'o': ((2, 4, 8, 3), (2, 3, 32)),
    },
    'mlp': {
      'gate': ((2, 32, 3), (2, 3, 64)),
      'up': ((2, 32, 3), (2, 3, 64)),
      'down': ((2, 64, 3), (2, 3, 32)),
    },
  }
  found = jax.tree.map(lambda x: x.shape, fresh)
  for part, maps in shapes.items():
    for name, (a, b) in maps.items():
      assert found['stacks'][0]['0'][part][name] == {'a': a, 'b': b}
  assert found['head'] == {'kernel': {'a': (32, 3), 'b': (3, 48)}}
  assert found['stacks'][0]['0'].keys() == {'attn', 'mlp'}
  # Two layers of 3 (in + out) each, and the head.
  maps = (64, 48, 48, 64, 96, 96, 96)
  assert lora.count(fresh) == 2 * 3 * sum(maps) + 3 * (32 + 48)


def test_a_starts_with_variance_one_over_fan_in_and_b_at_zero():
  wide = dataclasses.replace(UNTIED, width=256, mlp=1024)
  shape = dataclasses.replace(LORA, rank=64, dtype='bfloat16')
  made = lora.init(jax.random.key(1), wide, shape)
  block = made['stacks'][0]['0']
  for a, fan_in in (
    (block['attn']['q']['a'], 256),
    (block['attn']['o']['a'], 32),
    (block['mlp']['down']['a'], 1024),
    (made['head']['kernel']['a'], 256),
  ):
    assert a.dtype == jnp.bfloat16
    variance = float(jnp.var(a.astype(jnp.float32)))
    assert abs(variance * fan_in - 1) < 0.1
  assert not np.array_equal(block['mlp']['gate']['a'], block['mlp']['up']['a'])
  for path, x in jax.tree.leaves_with_path(made):
    assert path[-1].key == 'a' or not x.any()


def test_only_targets_have_factors():
  shape = lora.LoRA(rank=2, alpha=2, targets=['v', 'down'])
  mixed = lora.init_shapes(tiny.CONFIG, shape)
  assert [list(stack) for stack in mixed['stacks']] == [['0', '1'], ['0']]
  for stack in mixed['stacks']:
    for block in stack.values():
      assert (list(block['attn']), list(block['mlp'])) == (['v'], ['down'])
  assert 'head' not in mixed


@pytest.mark.parametrize(
  'change, message',
  [
    ({'targets': ('q', 'embed')}, "choose at least one of .*not 'embed'"),
    ({'targets': ()}, 'choose at least one'),
    ({'rank': 0}, 'rank of at least 1'),
    ({'alpha': math.nan}, 'finite alpha'),
  ],
)
def test_shapes_that_are_none_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(LORA, **change)


def test_a_tied_head_is_no_target():
  with pytest.raises(ValueError, match='leave head out of the targets'):
    lora.init_shapes(tiny.PLAIN, LORA)
  with pytest.raises(ValueError, match='leave head out of the targets'):
    lora.axes(tiny.PLAIN, LORA)


def test_the_scale_is_alpha_over_rank_and_may_be_another_number():
  assert lora.LoRA(rank=8, alpha=16).scale == 2.0
  rs = lora.LoRA(rank=16, alpha=2 * 16**0.5)  # rsLoRA: alpha / sqrt(rank)
  assert rs.scale == 2 / 16**0.5
  frozen = tiny.params(config=UNTIED)
  some = adapters()
  for scale in (1.0, 0.25):
    out = lora.attach(frozen, some, scale=scale)
    b = some['stacks'][0]['0']['mlp']['up']['b']
    found = out['stacks'][0]['0']['mlp']
    np.testing.assert_array_equal(found['up_b'], scale * b)
    assert found['up'] is frozen['stacks'][0]['0']['mlp']['up']


def test_types_are_those_of_the_factors_and_of_the_frozen():
  frozen = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16), tiny.params(config=UNTIED)
  )
  out = attach(frozen, adapters())
  assert out['head']['kernel'].dtype == jnp.bfloat16
  assert {out['head'][f'kernel_{f}'].dtype for f in 'ab'} == {
    np.dtype('float32')
  }
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), adapters())
  dtypes = {x.dtype for x in jax.tree.leaves(attach(frozen, half))}
  assert dtypes == {np.dtype(jnp.bfloat16)}
  merged = merge(frozen, adapters())
  assert {x.dtype for x in jax.tree.leaves(merged)} == dtypes
  shape = jax.eval_shape(
    functools.partial(
      transformer.forward, config=UNTIED, dtype=jnp.bfloat16
    ),
    out, TOKENS, POSITIONS, np.ones_like(TOKENS),
  )  # fmt: skip
  assert shape.dtype == jnp.bfloat16


def test_merged_and_attached_are_one_policy_with_one_gradient():
  """Values to 1e-5, and the chain rule through w + scale a b."""
  frozen, some = tiny.params(config=UNTIED), adapters()
  value, grads = value_and_grad(frozen, some)

  @jax.jit
  def through_merged(some):
    return jax.value_and_grad(lambda f: loss(merge(frozen, f)))(some)

  want, want_grads = through_merged(some)
  assert abs(value - want) < 1e-5
  assert abs(value - loss(frozen)) > 1e-2
  close(grads, want_grads)
  assert all(float(jnp.abs(g).max()) > 1e-5 for g in jax.tree.leaves(grads))


# Local and global layers in two stacks, with biases and norms.
MIXED = dataclasses.replace(tiny.CONFIG, tied=False, qkv_bias=True)


@jax.jit
def logits(params):
  hidden = transformer.forward(
    params, TOKENS, POSITIONS, np.ones_like(TOKENS), MIXED
  )
  return transformer.logits(params, hidden, MIXED)[..., : MIXED.vocab_size]


def test_logits_are_the_frozen_ones_at_first_and_the_merged_ones_later():
  frozen = tiny.params(config=MIXED)
  base = logits(frozen)
  fresh = lora.init(jax.random.key(0), MIXED, LORA)
  np.testing.assert_allclose(
    logits(attach(frozen, fresh)), base, rtol=0, atol=1e-6
  )
  some = adapters(config=MIXED)
  a, b = logits(attach(frozen, some)), logits(merge(frozen, some))
  assert float(jnp.abs(a - b).max()) < 1e-5 * float(jnp.abs(b).max())
  assert float(jnp.abs(b - base).max()) > 0.1


def dots(compiled):
  """(result's shape, numbers summed over) of every product in a module."""
  text = compiled.as_text()
  shapes = {
    name: [int(n) for n in dims.split(',') if n]
    for name, dims in re.findall(r'(%[\w.-]+) = \w+\[([\d,]*)\]', text)
  }
  found = re.findall(
    r'(%[\w.-]+) = .*? dot\((%[\w.-]+),.*lhs_contracting_dims={([\d,]*)}', text
  )
  return [
    (shapes[out], math.prod(shapes[lhs][int(i)] for i in dims.split(',')))
    for out, lhs, dims in found
  ]


def test_no_gradient_of_a_frozen_map_is_computed():
  """A weight's gradient sums over all tokens: read in the compiled module."""
  frozen, some = tiny.params(config=UNTIED), adapters()
  options = {'remat': False, 'unroll': True}

  def compiled(function, x):
    return jax.jit(jax.grad(function)).lower(x).compile()

  factors = compiled(lambda f: loss(attach(frozen, f), **options), some)
  whole = compiled(lambda p: loss(p, **options), frozen)

  def gradients(module):
    """Shapes of what is summed over 22 tokens, or the 5 of a head's chunk."""
    shapes = [shape for shape, n in dots(module) if n in (22, 5)]
    return [shape for shape in shapes if 11 not in shape]  # attention's

  found = gradients(factors)
  assert len(found) >= 2 * 15 and all(LORA.rank in shape for shape in found)
  assert sum(LORA.rank not in s for s in gradients(whole)) == 2 * 7 + 1
  flops = [m.cost_analysis()['flops'] for m in (factors, whole)]
  assert flops[0] < 0.85 * flops[1]


def test_training_lowers_the_loss_and_leaves_the_frozen_alone():
  frozen = jax.tree.map(np.array, tiny.params(config=UNTIED))
  before = jax.tree.map(np.copy, frozen)
  factors = lora.init(jax.random.key(3), UNTIED, LORA)
  optimizer = optax.adam(1e-2)
  state = optimizer.init(factors)
  losses = []

  @jax.jit
  def step(factors, state, grads):
    updates, state = optimizer.update(grads, state, factors)
    return optax.apply_updates(factors, updates), state

  for _ in range(50):
    value, grads = value_and_grad(frozen, factors)
    factors, state = step(factors, state, grads)
    losses.append(float(value))
  assert losses[-1] < 0.1 * losses[0]
  jax.tree.map(np.testing.assert_array_equal, frozen, before)


def test_a_merged_policy_is_saved_and_an_attached_one_is_refused(tmp_path):
  config = dataclasses.replace(UNTIED, window=0)  # of no layer
  frozen, some = tiny.params(config=UNTIED), adapters()
  merged = merge(frozen, some)
  save.save_params(tmp_path, merged, config)
  back = load.load_params(tmp_path, config)
  for (path, a), b in zip(
    jax.tree.leaves_with_path(back), jax.tree.leaves(merged), strict=True
  ):
    rows = slice(UNTIED.vocab_size) if path[0].key == 'embed' else slice(None)
    columns = UNTIED.vocab_size if path[0].key == 'head' else None
    np.testing.assert_array_equal(
      a[rows][..., :columns], b[rows][..., :columns]
    )
  with pytest.raises(ValueError, match='lora.merge'):
    save.save_params(tmp_path, attach(frozen, some), config)


def test_a_checkpoint_of_adapters_comes_back_to_the_bit(tmp_path):
  some = adapters()
  saved = {'params': some, 'moments': optax.adam(1.0).init(some)}
  facts = {'lora': dataclasses.asdict(LORA)}
  checkpoints = Checkpoints(tmp_path, UNTIED, facts)
  checkpoints.save(1, saved, {})
  like = {'params': adapters(1), 'moments': saved['moments']}
  back, _ = checkpoints.restore(like)
  checkpoints.close()
  jax.tree.map(np.testing.assert_array_equal, back, saved)
  assert jax.tree.structure(back) == jax.tree.structure(saved)
  attach(tiny.params(config=UNTIED), back['params'])


def test_factors_that_fit_no_map_are_refused():
  frozen, some = tiny.params(config=UNTIED), adapters()
  narrow = dataclasses.replace(UNTIED, mlp=32)
  with pytest.raises(ValueError, match='do not fit'):
    attach(frozen, adapters(config=narrow))
  with pytest.raises(ValueError, match='do not fit'):
    merge(frozen, adapters(config=narrow))
  with pytest.raises(ValueError, match="'kernel', which these parameters lack"):
    attach(tiny.params(config=tiny.PLAIN), some)
  with pytest.raises(ValueError, match='2 stacks of layers'):
    attach(frozen, adapters(config=MIXED))
  broken = adapters()
  broken['head']['kernel']['b'] = jnp.zeros((2, 48))
  with pytest.raises(ValueError, match=r'\(32, 3\) and \(2, 48\) do not fit'):
    attach(frozen, broken)


def test_axes_are_those_of_the_maps_own_sides():
  axes, shapes = lora.axes(MIXED, LORA), lora.init_shapes(MIXED, LORA)
  fit = jax.tree.map(
    lambda a, x: len(a) == x.ndim,
    axes, shapes, is_leaf=lambda x: isinstance(x, tuple),
  )  # fmt: skip
  assert all(jax.tree.leaves(fit))
  attn = axes['stacks'][0]['1']['attn']
  assert attn['k'] == {
    'a': ('layers', 'width', 'rank'),
    'b': ('layers', 'rank', 'kv_heads', 'head_size'),
  }
  assert attn['o'] == {
    'a': ('layers', 'heads', 'head_size', 'rank'),
    'b': ('layers', 'rank', 'width'),
  }
  assert axes['head']['kernel'] == {
    'a': ('width', 'rank'),
    'b': ('rank', 'vocab'),
  }
  assert meshes.RULES['rank'] is None


# ---- the engine -----------------------------------------------------------


def turn(engine, slot, seed=1, n=12):
  """A prompt and a turn on top of it."""
  engine.reset(slot)
  engine.extend(slot, tiny.tokens(seed, 7))
  key = trajectory_key(0, 0, f'task {seed}', 0, 0)
  engine.start(slot, key, Sampling(), turn_budget=n, trajectory_budget=n)
  done = {}
  while engine.n_decoding:
    done |= dict(engine.step())
  return done[slot]


def test_an_engine_takes_adapters_alone(monkeypatch):
  """What it samples is the merged policy's; the frozen arrays stay."""
  frozen = tiny.params(config=UNTIED)
  engine = tiny.engine(loaded=False, config=UNTIED, buckets=(8,))
  with pytest.raises(RuntimeError, match='has no weights'):
    engine.load(attach(None, adapters()), 0)
  engine.load(attach(frozen, adapters()), 0)
  engine.compile()
  slot = engine.acquire()
  first = turn(engine, slot)
  before, given = compiles.count(), []
  layout, weights = engine._state.layout, engine._rows.weights
  place = weights._lay_out_factors
  monkeypatch.setattr(weights, '_lay_out', None)  # of frozen ones: not called
  monkeypatch.setattr(
    weights, '_lay_out_factors', lambda f: given.append(f) or place(f)
  )
  for version in (1, 2):
    engine.load(attach(None, adapters(version)), version)
    assert engine.handle(slot).versions == ((0, version - 1),)
    with pytest.raises(ValueError, match=f'of version {version - 1}'):
      engine.extend(slot, tiny.tokens(2, 3))
    second = turn(engine, slot)
  assert compiles.count() == before
  moved = [sum(x.nbytes for x in jax.tree.leaves(f)) for f in given]
  assert moved == [4 * lora.count(adapters())] * 2
  mine, theirs = layout['layers'][1]['attn'], engine._state.layout
  assert theirs['layers'][1]['attn']['o'] is mine['o']
  assert theirs['head'].kernel_DV is layout['head'].kernel_DV
  assert theirs['embed'] is layout['embed']

  assert second.tokens.tolist() != first.tokens.tolist()
  np.testing.assert_array_equal(second.versions, 2)
  merged = merge(frozen, adapters(2))
  other = tiny.engine(loaded=False, config=UNTIED, buckets=(8,))
  other.load(merged, 2)
  want = turn(other, other.acquire())
  np.testing.assert_array_equal(second.tokens, want.tokens)
  np.testing.assert_allclose(second.logprobs, want.logprobs, rtol=0, atol=1e-5)
  tokens = np.concatenate([tiny.tokens(1, 7), second.tokens])[None]
  attached = attach(frozen, adapters(2))
  hidden = transformer.forward(
    attached, tokens, np.arange(tokens.shape[1])[None], np.ones_like(tokens),
    UNTIED,
  )  # fmt: skip
  learner = jax.nn.log_softmax(transformer.logits(attached, hidden, UNTIED))
  learner = np.take_along_axis(learner[0, 6:-1], tokens[0, 7:, None], 1)[:, 0]
  np.testing.assert_allclose(second.logprobs, learner, rtol=0, atol=1e-4)


def test_what_an_engine_cannot_run_is_refused():
  engine = tiny.engine(config=UNTIED)
  with pytest.raises(ValueError, match=r'lora.attach\(None, adapters'):
    engine.load(adapters(), 1)
  with pytest.raises(ValueError, match='not parameters of this model'):
    engine.load({}, 1)
  narrow = dataclasses.replace(UNTIED, mlp=32)
  with pytest.raises(ValueError, match='do not fit'):
    engine.load(attach(None, adapters(config=narrow)), 1)
  assert engine.version == 0
