"""Eight virtual devices do what one does; what does not divide is refused.

The devices need a process of their own, `mesh_worker`, which is run once for
all cases.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
import tiny_model as tiny
from jax.sharding import AbstractMesh, PartitionSpec

from agentjax.model import mesh as meshes
from agentjax.model import transformer
from agentjax.model.handover import copies

# One process runs the worker, also where tests are spread over several.
# A minute of compiling; far more on a machine that is busy.
pytestmark = [pytest.mark.xdist_group('mesh'), pytest.mark.timeout(600)]
TESTS = pathlib.Path(__file__).resolve().parents[1]
CASES = [
  'forward data8',
  'update data8',
  'forward fsdp4_tensor2',
  'update fsdp4_tensor2',
  'forward data2_fsdp2_tensor2',
  'update data2_fsdp2_tensor2',
  'forward tensor4_of_2_kv_heads',
  'update tensor4_of_2_kv_heads',
  'engine tensor2',
  'engine data2_tensor2',
  'engine tensor4_of_2_kv_heads',
  'losses data8',
  'losses fsdp4_tensor2',
  'everything',
  'moments',
  'hand-over all',
  'hand-over first',
  'hand-over last',
  'lora gradient',
  'lora hand-over',
  'compilations',
]


@pytest.fixture(scope='module')
def outcome():
  """({case: error}, all that the worker printed)."""
  path = [*map(str, (TESTS.parent, TESTS, TESTS / 'rl'))]
  path += [os.environ.get('PYTHONPATH', '')]
  run = subprocess.run(
    [sys.executable, str(TESTS / 'model/mesh_worker.py')],
    env=os.environ | {'PYTHONPATH': os.pathsep.join(path)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=560,
  )
  lines = [json.loads(s) for s in run.stdout.splitlines() if s[:1] == '{']
  return {line['case']: line['error'] for line in lines}, run.stdout


@pytest.mark.parametrize('case', CASES)
def test_eight_devices_equal_one(outcome, case):
  errors, printed = outcome
  assert case in errors, printed
  assert not errors[case], errors[case]


def test_every_case_of_the_worker_is_asked_for(outcome):
  assert list(outcome[0]) == CASES, outcome[1]


def test_one_process_has_all_of_these_tests(request):
  """Else each of them runs the worker: `xdist_group` has to be understood."""
  if 'PYTEST_XDIST_WORKER' in os.environ:
    assert request.node.nodeid.endswith('@mesh')


def test_activations_are_never_copied_to_every_chip(outcome):
  assert 'Involuntary full rematerialization' not in outcome[1]


def mesh(data=1, fsdp=1, tensor=1):
  return AbstractMesh((data, fsdp, tensor, 1, 1), meshes.AXES)


@pytest.mark.parametrize(
  'shape, sizes, message',
  [
    ({'tensor': 3}, {}, 'heads 4 does not divide over tensor = 3 devices'),
    ({'fsdp': 5}, {}, 'width 32 does not divide over fsdp = 5 devices'),
    (
      {'data': 2, 'fsdp': 2},
      {'rows': 6},
      r'rows 6 does not divide over data \* fsdp = 4 devices',
    ),
    ({'data': 2}, {'slots': 3}, 'slots 3 does not divide over data = 2'),
  ],
)
def test_what_does_not_divide_is_refused(shape, sizes, message):
  with pytest.raises(ValueError, match=message):
    meshes.check(tiny.CONFIG, mesh(**shape), **sizes)


def test_a_vocabulary_can_be_padded_so_that_it_divides():
  odd = dataclasses.replace(tiny.CONFIG, vocab_size=41, padded_vocab=41)
  with pytest.raises(ValueError, match='padded_vocab 41.*padded vocabulary'):
    meshes.check(odd, mesh(tensor=2))
  meshes.check(dataclasses.replace(odd, padded_vocab=48), mesh(tensor=2))


def test_too_few_devices_are_refused():
  want = 1 + len(jax.devices())
  with pytest.raises(ValueError, match=f'needs {want} devices'):
    meshes.make_mesh(data=want)


def test_kv_heads_that_do_not_divide_are_replicated():
  axes, shape = ('slots', 'none', 'kv_heads', 'none'), (4, 96, 2, 8)
  wide, narrow = mesh(data=2, tensor=4), mesh(data=2, tensor=2)
  assert meshes.spec(axes, wide, shape) == PartitionSpec(
    'data', None, None, None
  )
  assert meshes.spec(axes, narrow, shape) == PartitionSpec(
    'data', None, 'tensor', None
  )


@pytest.mark.parametrize(
  'options',
  [{}, {'tied': False, 'qkv_bias': True, 'post_norms': True}],
)
def test_every_parameter_has_axes(options):
  config = dataclasses.replace(tiny.CONFIG, **options)
  axes = jax.tree.map(
    lambda axes, x: len(axes) == x.ndim,
    meshes.param_axes(config),
    transformer.init_shapes(config),
    is_leaf=lambda x: isinstance(x, tuple),
  )
  assert all(jax.tree.leaves(axes))


@dataclasses.dataclass(frozen=True)
class Chip:
  """A device as far as a mesh looks at it."""

  id: int
  process_index: int


def test_the_groups_of_a_hand_over_are_the_same_on_every_process():
  """2 processes of 4 chips that alternate; an engine on each's second pair."""
  chips = [Chip(i, i // 2 % 2) for i in range(8)]
  grids = []
  for process in range(2):
    own = [c for c in chips if c.process_index == process][2:]
    engine = meshes.Mesh(
      [[[[[c]]] for c in own]], meshes.AXES
    )  # data 1, fsdp 2
    grid = copies(engine, chips).devices
    assert {c.process_index for c in grid[2 * process].flat} == {process}
    assert [c.id for c in grid[2 * process].flat] == [c.id for c in own]
    grids.append([c.id for c in grid.flat])
  assert grids[0] == grids[1] == [4, 5, 0, 1, 6, 7, 2, 3]


def test_an_engine_over_parts_of_hosts_is_refused():
  chips = [Chip(i, i // 4) for i in range(8)]
  across = meshes.Mesh([[[[[c]]] for c in chips[3:5]]], meshes.AXES)
  three = meshes.Mesh([[[[[c]]] for c in chips[:3]]], meshes.AXES)
  for engine in (across, three):
    with pytest.raises(ValueError, match='cannot take parameters of 8 devices'):
      copies(engine, chips)
