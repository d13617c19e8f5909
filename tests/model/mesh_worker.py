"""Run by test_mesh on 8 virtual devices: one line of JSON per case.

A line is {"case": name, "error": what was wrong, or ""}.
"""

import functools
import json
import sys
import traceback

import jax

jax.config.update('jax_num_cpu_devices', 8)

import made  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import test_learner  # noqa: E402
import test_lora  # noqa: E402
import tiny_model as tiny  # noqa: E402

from agentjax import compiles, forward, update  # noqa: E402
from agentjax.learner import Learner  # noqa: E402
from agentjax.model import lora, transformer  # noqa: E402
from agentjax.model import mesh as meshes  # noqa: E402
from agentjax.model.cache import Spans  # noqa: E402
from agentjax.model.mesh import make_mesh  # noqa: E402
from agentjax.optimizers import adamw  # noqa: E402
from agentjax.rl import kl  # noqa: E402
from agentjax.rl.masked import weighted  # noqa: E402
from agentjax.rollout.sampling import Sampling, trajectory_key  # noqa: E402

MESHES = {
  'data8': {'data': 8},
  'fsdp4_tensor2': {'fsdp': 4, 'tensor': 2},
  'data2_fsdp2_tensor2': {'data': 2, 'fsdp': 2, 'tensor': 2},
  'tensor4_of_2_kv_heads': {'tensor': 4},
}
ENGINES = {
  'tensor2': {'tensor': 2},
  'data2_tensor2': {'data': 2, 'tensor': 2},
  'tensor4_of_2_kv_heads': {'tensor': 4},
}
BATCH = test_learner.packed(8, 24)


def same(name, got, want, rtol=1e-5):
  """Equal within rtol of the largest value, leaf by leaf."""
  for (path, a), b in zip(
    jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True
  ):
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(
      a,
      b,
      rtol=0,
      atol=rtol * max(np.abs(b).max(), 1e-3),
      err_msg=f'{name}{jax.tree_util.keystr(path)}',
    )


def learner(mesh=None, optimizer=None, **kw):
  optimizer = optimizer or optax.sgd(1.0)
  return Learner(
    tiny.PLAIN, optimizer=optimizer, rows=8, length=24, chunk=16, mesh=mesh,
    **kw,
  )  # fmt: skip


def params():
  return jax.tree.map(np.array, tiny.params(config=tiny.PLAIN))


def hidden(mesh=None):
  """Hidden states of the batch, with parameters split over the mesh."""
  forward = jax.jit(functools.partial(transformer.forward, config=tiny.PLAIN))
  weights = params()
  arrays = (BATCH.tokens, BATCH.positions, BATCH.pack_ids)
  if mesh is None:
    return forward(weights, *arrays)
  with jax.set_mesh(mesh):
    return forward(jax.device_put(weights, learner(mesh).shardings()), *arrays)


def gradient(mesh=None):
  """An update's metrics, and its gradient as SGD with rate 1 takes it."""
  l = learner(mesh, kl_coef=0.1, remat=False)  # compiles in less time
  reference = tiny.params(1, config=tiny.PLAIN)
  if mesh is not None:
    reference = jax.device_put(reference, l.shardings())
  state, metrics = l.update(l.init(params()), BATCH, reference)
  return metrics, jax.tree.map(
    lambda a, b: a - np.array(b), params(), state.params
  )


@functools.cache
def split_learner():
  return learner(make_mesh(fsdp=4, tensor=2), adamw(1e-3))


@functools.cache
def alone(function):
  return function()


def check_forward(shape):
  same('hidden', hidden(make_mesh(**shape)), alone(hidden))


def check_update(shape):
  same('update', gradient(make_mesh(**shape)), alone(gradient))


SPANS = functools.partial(Spans, first=16)


def play(engine):
  """Turns, an observation, forks at the end and in the past, a row that moves
  to host memory in the middle of a turn and comes back elsewhere."""
  slots = [engine.acquire() for _ in range(engine.n_slots)]
  for i in slots[:3]:
    engine.reset(i)
    engine.extend(i, tiny.tokens(i, 5 + 4 * i))
  marks = [engine.mark(i) for i in slots[:3]]
  segments = {}

  def turn(which, name):
    for i in which:
      key = trajectory_key(0, 0, f'{name} {i}', 0, 0)
      engine.start(i, key, Sampling(), turn_budget=7, trajectory_budget=50)
    while engine.n_decoding:
      for i, segment in engine.step():
        segments[name, i] = segment

  turn(slots[:3], 'first')
  for i in slots[:3]:
    engine.extend(i, tiny.tokens(10 + i, 3 + i))
  turn(slots[:3], 'resumed')
  engine.fork(marks[0], slots[3])
  engine.fork(marks[2], slots[1])
  turn(slots, 'forked')
  engine.fork(engine.mark(slots[2], 9), slots[0])
  key = trajectory_key(0, 0, 'moved', 0, 0)
  engine.start(slots[0], key, Sampling(), turn_budget=7, trajectory_budget=50)
  engine.step(2)
  parked = engine.park(slots[0])
  engine.unpark(parked, slots[3])
  while engine.n_decoding:
    segments |= {('moved', i): segment for i, segment in engine.step()}
  for i in slots:
    engine.release(i)
  return segments


@functools.cache
def played_alone():
  return play(tiny.engine(store=SPANS))


def check_engine(shape):
  found = play(tiny.engine(mesh=make_mesh(**shape), store=SPANS))
  want = played_alone()
  assert list(found) == list(want) and len(want) == 11, list(found)
  for name, segment in want.items():
    np.testing.assert_array_equal(found[name].tokens, segment.tokens, f'{name}')
    np.testing.assert_allclose(
      found[name].logprobs, segment.logprobs, atol=1e-5, err_msg=f'{name}'
    )


def everything(mesh=None):
  """As `gradient`, with a critic, an exact KL, an entropy bonus, a scan, and
  ids that truncated sampling kept at some of the tokens."""
  critic = update.Critic(optax.sgd(1.0), own_trunk=True)
  l = learner(
    mesh, kl_coef=0.1, kl_value=kl.full, entropy_coef=0.1, critic=critic,
    remat=False, micro_batches=2, kept=3,
  )  # fmt: skip
  reference = tiny.params(1, config=tiny.PLAIN)
  if mesh is not None:
    reference = jax.device_put(reference, l.shardings())
  shown = BATCH.weights > 0
  ids = np.random.default_rng(0).integers(2, 40, (*shown.shape, 3))
  ids[~shown | (BATCH.positions % 3 == 0)] = -1
  batch = BATCH._replace(
    returns=np.where(shown, BATCH.positions / 9, 0), kept=ids.astype(np.int32)
  )
  state, metrics = l.update(l.init(params()), batch, reference)
  values = l.values(state, batch)
  found = l.logprobs(state.params, batch)
  return metrics, jax.device_get(state[:4]), values, found


def check_everything(shape):
  same('everything', everything(make_mesh(**shape)), alone(everything))


def graded(mesh=None):
  """Of every loss: its sum and its gradient in each token's log-prob.

  The rest of an update is the same for all of them.
  """
  parts = 1 if mesh is None else learner(mesh)._parts
  capacity = BATCH.tokens.size // parts
  rng = np.random.default_rng(0)
  new, far = (rng.normal(-2, 0.4, (2, *BATCH.tokens.shape))).astype(np.float32)

  def grade(loss, new, far, batch):
    def total(new):
      tokens = forward.pick(batch, capacity, parts)

      def take(x):
        x = forward.by_part(x, parts)
        return forward.at(x, tokens.place) * tokens.mask

      found = update.lossed(
        loss, take(new), tokens, old=tokens.old, behaviour=tokens.old - 0.1,
        reference=take(far),
      )  # fmt: skip
      return weighted(found.loss_N, tokens.weights).sum

    return jax.value_and_grad(total)(new)

  @jax.jit
  def every(new, far, batch):
    return {k: grade(f, new, far, batch) for k, f in made.LOSSES.items()}

  batch = BATCH._replace(old=np.where(BATCH.weights > 0, far + 0.2, 0))
  if mesh is None:
    return every(new, far, batch)
  split = learner(mesh)._placing.batch()
  with jax.set_mesh(mesh):
    return every(*jax.device_put((new, far, batch), split))


def check_losses(shape):
  found, want = graded(make_mesh(**shape)), alone(graded)
  assert len(want) > 20 and all(np.any(g) for _, g in want.values())
  for name in want:
    same(name, found[name], want[name])


def check_moments():
  """Sums and moments are split as the parameters are, from the start on."""
  l = split_learner()
  state = l.init(params())

  def split(state):
    adam = next(
      s for s in jax.tree.leaves(
        state.opt_state, is_leaf=lambda s: hasattr(s, 'mu')
      ) if hasattr(s, 'mu')
    )  # fmt: skip
    for tree in (state.params, adam.mu, adam.nu):
      jax.tree.map(
        lambda x, s: check_equal(x.sharding.spec, s.spec), tree, l.shardings()
      )
    table = state.params['embed']['table']
    check_equal(table.addressable_shards[0].data.shape, (24, 8))

  split(state)
  split(l.update(state, BATCH)[0])
  grads = l._zeros(l.init(params()).params, None).grads[0]
  jax.tree.map(
    lambda x, s: check_equal(x.sharding.spec, s.spec), grads, l.shardings()
  )


def check_equal(a, b):
  assert a == b, f'{a} is not {b}'


def check_hand_over(at, shape):
  """fsdp * tensor to an engine on some of the chips, by one program."""
  devices = [jax.devices()[i] for i in at]
  source = learner(make_mesh(fsdp=4, tensor=2)).shardings()
  weights = jax.device_put(params(), source)
  engine = tiny.engine(
    loaded=False, config=tiny.PLAIN, mesh=make_mesh(**shape, devices=devices)
  )
  engine.load(weights, 3)
  before = compiles.count()
  engine.load(jax.tree.map(lambda x: x, weights), 4)
  check_equal(compiles.count(), before)
  want = transformer.decode_layout(params(), tiny.PLAIN, np.float32)
  same('layout', engine._state.layout, want, 0)
  jax.tree.map(
    lambda x: check_equal(x.sharding.device_set, set(devices)),
    engine._state.layout,
  )


def split_adapters(mesh, seed=0):
  axes = lora.axes(test_lora.UNTIED, test_lora.LORA)
  out = test_lora.adapters(seed)
  return jax.device_put(out, meshes.shardings(axes, mesh, out))


def adapter_gradient(mesh=None):
  """Of the squared logits, with respect to factors of every map."""
  config = test_lora.UNTIED
  frozen = jax.tree.map(np.array, tiny.params(config=config))

  @jax.jit
  def gradient(frozen, adapters):
    def objective(adapters):
      params = test_lora.attach(frozen, adapters)
      hidden = transformer.forward(
        params, BATCH.tokens, BATCH.positions, BATCH.pack_ids, config
      )
      logits = transformer.logits(params, hidden, config)
      return (logits[..., : config.vocab_size] ** 2).mean()

    return jax.grad(objective)(adapters)

  if mesh is None:
    return gradient(frozen, test_lora.adapters())
  axes = meshes.param_axes(config)
  frozen = jax.device_put(frozen, meshes.shardings(axes, mesh, frozen))
  with jax.set_mesh(mesh):
    return gradient(frozen, split_adapters(mesh))


def check_lora_gradient():
  mesh = make_mesh(data=2, fsdp=2, tensor=2)
  same('lora', adapter_gradient(mesh), adapter_gradient())
  up = split_adapters(mesh)['stacks'][0]['0']['mlp']['up']
  check_equal(up['a'].addressable_shards[0].data.shape, (2, 16, 3))
  check_equal(up['b'].addressable_shards[0].data.shape, (2, 3, 32))


def check_lora_hand_over():
  """Adapters alone, from all chips to an engine on two of them."""
  config, wide = test_lora.UNTIED, make_mesh(data=2, fsdp=2, tensor=2)
  devices = [jax.devices()[i] for i in (7, 6)]
  engine = tiny.engine(config=config, mesh=make_mesh(tensor=2, devices=devices))
  plain = engine._state.layout
  for version in (1, 2, 3):
    given = test_lora.attach(None, split_adapters(wide, version))
    before = compiles.count()
    engine.load(given, version)
    check_equal(version == 1 or compiles.count() == before, True)
  whole = test_lora.attach(tiny.params(config=config), test_lora.adapters(3))
  want = transformer.decode_layout(whole, config, np.float32)
  same('layout', engine._state.layout, want, 0)
  head = engine._state.layout['head']
  check_equal(head.kernel_DV is plain['head'], True)
  check_equal(head.b_RV.addressable_shards[0].data.shape, (3, 24))
  check_equal(head.b_RV.sharding.device_set, set(devices))


def check_compilations():
  """After `compile`, a step of training compiles nothing."""
  l = split_learner()
  state = l.compile(l.init(params()))
  mesh = make_mesh(data=2, tensor=2)
  engine = tiny.engine(loaded=False, config=tiny.PLAIN, mesh=mesh)
  engine.load(state.params, 0)
  engine.compile()
  before = compiles.count()
  for version in (1, 2):
    state, _ = l.update(state, BATCH)
    engine.load(state.params, version)
    play(engine)
    check_equal(compiles.count(), before)


def cases():
  for name, shape in MESHES.items():
    yield f'forward {name}', functools.partial(check_forward, shape)
    yield f'update {name}', functools.partial(check_update, shape)
  for name, shape in ENGINES.items():
    yield f'engine {name}', functools.partial(check_engine, shape)
  for name in ('data8', 'fsdp4_tensor2'):
    yield f'losses {name}', functools.partial(check_losses, MESHES[name])
  shape = MESHES['data2_fsdp2_tensor2']
  yield 'everything', functools.partial(check_everything, shape)
  yield 'moments', check_moments
  yield (
    'hand-over all',
    functools.partial(check_hand_over, range(8), {'data': 4, 'tensor': 2}),
  )
  yield (
    'hand-over first',
    functools.partial(check_hand_over, range(4), {'data': 2, 'tensor': 2}),
  )
  yield (
    'hand-over last',
    functools.partial(check_hand_over, (7, 6), {'tensor': 2}),
  )
  yield 'lora gradient', check_lora_gradient
  yield 'lora hand-over', check_lora_hand_over
  yield 'compilations', check_compilations


def main(chosen):
  for name, check in cases():
    if chosen and name not in chosen:
      continue
    try:
      check()
      error = ''
    except Exception:
      error = traceback.format_exc()
    print(json.dumps({'case': name, 'error': error}), flush=True)


if __name__ == '__main__':
  main(sys.argv[1:])
