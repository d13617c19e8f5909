"""The programs compile for TPU chips that are not there, and fit them.

XLA's TPU compiler comes with the package libtpu (`pip install '.[tpu]'`) and
needs no TPU. What it says is printed: `pytest -rP -m long -k tpu`.
"""

import importlib.util
import math
import re

import jax
import pytest
import requirements

from agentjax.learner import Learner
from agentjax.model import ahead, remat, transformer
from agentjax.model.cache import Spans
from agentjax.model.mesh import make_mesh
from agentjax.model.presets import QWEN2_5_0_5B, QWEN2_5_1_5B, QWEN2_5_7B
from agentjax.model.ragged import Ragged
from agentjax.model.stores import best_store
from agentjax.optimizers import adamw
from agentjax.rollout.programs import Programs
from agentjax.text.stop import StopAutomaton

pytestmark = pytest.mark.long

TOPOLOGY = 'v5p:2x2x2'  # two hosts of four chips
GB = 1e9
CHIP = 'TPU v5'
SLOTS, CONTEXT, ROWS, LENGTH = 32, 2048, 8, 2048


@pytest.fixture(scope='module')
def compiler():
  requirements.require(
    'the TPU compiler',
    importlib.util.find_spec('libtpu') is not None,
    "pip install '.[tpu]'",
  )


@pytest.fixture(scope='module')
def chips(compiler):
  with ahead.chips(TOPOLOGY) as devices:
    yield devices


def compiled(name, lowered):
  """(arguments, other bytes per chip, collectives and their shapes)."""
  found = ahead.needs(lowered)
  print('\n'.join(found.lines(name)))
  assert found.bytes < ahead.HBM[CHIP]
  return found.arguments, found.bytes - found.arguments, found.collectives


@pytest.fixture(scope='module')
def learner(chips):
  """Its lowered programs on both hosts."""
  return Learner(
    QWEN2_5_0_5B,
    optimizer=adamw(1e-5),
    rows=ROWS,
    length=LENGTH,
    dtype='bfloat16',
    mesh=make_mesh(data=2, fsdp=2, tensor=2, devices=chips),
  ).lower()


def test_the_learner_adds_a_micro_batch(learner):
  (name,) = (n for n in learner if n.startswith('add'))
  _, rest, found = compiled(name, learner[name])
  # The logits of all its tokens, and their gradient, are never there at once.
  assert rest < 2 * 4 * (ROWS // 4 * LENGTH) * (QWEN2_5_0_5B.padded_vocab // 2)
  # Weights cross chips; rows of activations stay where they are.
  gathered = [c.shape for c in found if c.kind == 'all-gather']
  assert gathered and not [s for s in gathered if f'[{ROWS},{LENGTH}' in s]


def test_the_learner_applies_split_sums_and_moments(learner):
  """Weights, sums and two moments, float32, over fsdp * tensor."""
  arguments, _, _ = compiled('apply', learner['apply'])
  share = 4 * 4 * transformer.n_params(QWEN2_5_0_5B) / 4
  assert share < arguments < 1.05 * share


@pytest.mark.parametrize('shape', [{'data': 2, 'tensor': 2}, {'data': 4}])
@pytest.mark.parametrize(
  'config, store', [(QWEN2_5_0_5B, Spans), (QWEN2_5_1_5B, Ragged)]
)
def test_an_engine_on_one_host(chips, config, store, shape):
  pieces = [b'', b''] + [b'x'] * (config.vocab_size - 2)
  mesh = make_mesh(**shape, devices=chips[:4])
  assert best_store(config, 'bfloat16', mesh) is store
  programs = Programs(
    config,
    StopAutomaton.build(pieces, [], [1]),
    slots=SLOTS,
    context=CONTEXT,
    chunk=16,
    dtype='bfloat16',
    cache_dtype='bfloat16',
    mesh=mesh,
    store=store,
  )
  row = CONTEXT * 2 * config.kv_heads * config.head_size
  for name, lowered in programs.lower((64,)).items():
    _, _, found = compiled(f'{shape} {name}', lowered)
    for c in found:
      for dims in re.findall(r'\[([\d,]+)\]', c.shape):
        dims = [int(n) for n in dims.split(',')]
        # At most one row of a layer's cache crosses the chips, never a cache.
        assert CONTEXT not in dims or math.prod(dims) <= row, c


# ---- the whole update of Qwen2.5-7B ----------------------------------------

# (topology, mesh, rows, length): bytes that a plain prototype needed, its
# arguments (weights and moments) and its temporaries.
SHAPES = {
  'v5p': (('v5p:2x2x2', {'fsdp': 8}, 8, 16_384), (11.4, 28.8)),
  'v5e': (('v5e:4x4', {'fsdp': 4, 'tensor': 4}, 4, 8192), (5.7, 8.1)),
}
CHUNK = 1024


def programs_7b(devices, mesh, rows, length, policy):
  return Learner(
    QWEN2_5_7B,
    optimizer=adamw(1e-6),
    rows=rows,
    length=length,
    chunk=CHUNK,
    dtype='bfloat16',
    remat=policy,
    mesh=make_mesh(**mesh, devices=devices),
  ).lower()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize('name', SHAPES)
def test_the_update_of_a_7b_needs_less_than_a_prototype(compiler, name):
  (topology, mesh, rows, length), (arguments, temporaries) = SHAPES[name]
  with ahead.chips(topology) as devices:
    lowered = programs_7b(devices, mesh, rows, length, remat.nothing)
    found = {n: ahead.needs(program) for n, program in lowered.items()}
    limit = ahead.HBM[devices[0].device_kind]
  for n, needs in found.items():
    print('\n'.join(needs.lines(n)))
  held = found.pop('apply')
  (add,) = found.values()
  assert add.arguments < arguments * GB and add.temporaries < temporaries * GB
  # Moments are no argument of `add`, but they are there; and sums that the
  # prototype, which knew no micro-batches, did not have.
  assert held.arguments + add.temporaries < (arguments + temporaries) * GB
  assert max(held.bytes, held.arguments + add.temporaries) < limit
  assert logits_beyond(add.text, CHUNK, QWEN2_5_7B, mesh) == []
  # The head crosses chips once a micro-batch, and the table never.
  vocab = QWEN2_5_7B.padded_vocab // mesh.get('tensor', 1)
  head = [
    c for c in add.collectives
    if str(vocab) in c.shape and c.kind == 'all-gather'
  ]  # fmt: skip
  assert sum(c.times for c in head) == 1, head


def logits_beyond(text, chunk, config, mesh) -> list[str]:
  """Arrays [..., V] of a compiled program for more rows than a chunk's."""
  vocab = config.padded_vocab // mesh.get('tensor', 1)
  width = config.width // mesh['fsdp']
  out = set()
  for array in re.findall(r'\b[a-z]+\d+\[([\d,]+)\]', text):
    dims = [int(n) for n in array.split(',') if n != '1']
    if vocab in dims and len(dims) > 1:
      rows = math.prod(dims) // vocab
      if rows not in (config.width, width) and rows > chunk:
        out.add(array)
  return sorted(out)


def test_logits_of_a_whole_batch_would_be_found():
  mesh = {'fsdp': 4, 'tensor': 4}
  fine = 'f32[1,1024,38016] bf16[3584,38016] f32[896,38016] s32[38016]'
  assert logits_beyond(fine, 1024, QWEN2_5_7B, mesh) == []
  found = logits_beyond(f'{fine} bf16[8,1024,38016]', 1024, QWEN2_5_7B, mesh)
  assert found == ['8,1024,38016']


@pytest.mark.timeout(1800)
def test_blocks_in_the_memory_of_the_host(compiler):
  """What grows with the number of layers leaves the chip."""
  (topology, mesh, rows, length), _ = SHAPES['v5e']
  with ahead.chips(topology) as devices:
    lowered = programs_7b(devices, mesh, rows, length, remat.offload_blocks)
    (name,) = (n for n in lowered if n.startswith('add'))
    found = ahead.needs(lowered[name])
  print('\n'.join(found.lines(name)))
  tokens = rows * length // mesh['fsdp'] // mesh['tensor']
  blocks = QWEN2_5_7B.n_layers * tokens * QWEN2_5_7B.width * 2
  assert found.host >= blocks


def test_a_mesh_that_does_not_lie_on_a_torus_is_refused(compiler):
  with ahead.chips('v5p:4x4x4') as devices:
    with pytest.raises(ValueError, match='fsdp=16 tensor=4'):
      make_mesh(fsdp=32, tensor=2, devices=devices)


def test_the_programs_have_not_changed_this_process():
  assert jax.default_backend() == 'cpu'
