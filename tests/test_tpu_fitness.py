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
from agentjax.model import ahead, transformer
from agentjax.model.cache import Spans
from agentjax.model.mesh import make_mesh
from agentjax.model.presets import QWEN2_5_0_5B, QWEN2_5_1_5B
from agentjax.model.ragged import Ragged
from agentjax.model.stores import best_store
from agentjax.optimizers import adamw
from agentjax.rollout.programs import Programs
from agentjax.text.stop import StopAutomaton

pytestmark = pytest.mark.long

TOPOLOGY = 'v5p:2x2x2'  # two hosts of four chips
CHIP = 'TPU v5'
SLOTS, CONTEXT, ROWS, LENGTH = 32, 2048, 8, 2048


@pytest.fixture(scope='module')
def chips():
  requirements.require(
    'the TPU compiler',
    importlib.util.find_spec('libtpu') is not None,
    "pip install '.[tpu]'",
  )
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
  gathered = [s for kind, s in found if kind == 'all-gather']
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
    for kind, text in found:
      for dims in re.findall(r'\[([\d,]+)\]', text):
        dims = [int(n) for n in dims.split(',')]
        # At most one row of a layer's cache crosses the chips, never a cache.
        assert CONTEXT not in dims or math.prod(dims) <= row, (kind, text)


def test_the_programs_have_not_changed_this_process():
  assert jax.default_backend() == 'cpu'
