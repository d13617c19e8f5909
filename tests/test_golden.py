"""The golden vectors through our functions, and a runner that can fail."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import parity
import pytest
from parity_maps import CannotMap, Case, Result

TESTS = pathlib.Path(__file__).resolve().parent
INDEX = TESTS / 'golden/index.json'


@pytest.fixture(scope='module')
def outcome():
  return parity.run(INDEX)


def test_no_golden_case_fails(outcome):
  assert [x for x in outcome[1] if x.startswith('failed')] == []
  assert outcome[0]['failed'] == 0
  assert sum(outcome[0].values()) == len(parity.cases(INDEX))


def test_only_recorded_faults_of_peers_are_listed(outcome):
  listed = {x.split()[1].rstrip(':') for x in outcome[1] if x[0] == 'l'}
  allowed = {
    c.name for c in parity.cases(INDEX)
    if c.expect.startswith(('raises', 'disagree'))
  }  # fmt: skip
  assert listed <= allowed


# ---- the runner -------------------------------------------------------------


def case(expect='allclose', function='double', **args):
  x = np.array([1.0, -2.0], np.float32)
  return Case(
    'a', 'someone/project@1', function, args, {'x': x}, {'y': 2 * x}, expect
  )


def doubled(off=0.0, **more):
  def function(case):
    case.options(scale=2)
    (x,) = case.take('x')
    return Result({'y': 2 * x + off}, **more)

  return {'double': function}


def test_equal_passes_and_another_fails():
  assert parity.check(doubled(), case())[0] == 'passed'
  assert parity.check(doubled(1e-6), case())[0] == 'passed'
  got = parity.check(doubled(0.5), case())
  assert got == ('failed', 'y: 2 of 2 differ, most 2.5, wanted 2')
  assert parity.check(doubled(np.nan), case())[0] == 'failed'


def test_what_is_unknown_missing_or_cannot_be_mapped_fails():
  known = doubled()
  assert 'unknown function' in parity.check(known, case(function='f'))[1]
  assert "args ['power']" in parity.check(known, case(power=2))[1]
  nothing = {'double': lambda case: Result({})}
  assert parity.check(nothing, case()) == ('failed', "no output ['y']")

  def refuse(case):
    raise CannotMap('mode 7')

  got = parity.check({'double': refuse}, case())
  assert got == ('failed', 'cannot map: mode 7')
  got = parity.check({'double': lambda case: 1 / 0}, case())
  assert got == ('failed', 'ZeroDivisionError: division by zero')
  flat = {'double': lambda case: Result({'y': np.float32(2)})}
  assert 'shape ()' in parity.check(flat, case())[1]


def test_a_case_of_which_nothing_is_compared_fails():
  given = Case('a', 's', 'double', {}, {'x': np.zeros(2)}, {})
  known = {'double': lambda case: Result({'y': np.zeros(2)})}
  assert parity.check(known, given) == ('failed', 'no output is compared')
  unlike = {'double': lambda case: Result({'y': 2.0}, ignored={'y': 'no'})}
  assert parity.check(unlike, case())[0] == 'failed'
  # What is not there is no disagreement either.
  other = case('disagree: x')
  nothing = {'double': lambda case: Result({'z': 1.0})}
  assert parity.check(nothing, other) == ('failed', "no output ['y']")
  flat = {'double': lambda case: Result({'y': 2.0})}
  assert parity.check(flat, other)[0] == 'failed'


def test_a_broken_file_fails_its_own_case_alone(tmp_path):
  x = np.zeros((2, 3), np.float32)
  options = {'in_loss_mat': x, 'in_loss_mask': x + 1, 'out_loss': np.sum(x),
             'out_grad_loss_mat': x + 1 / 6}  # fmt: skip
  np.savez(tmp_path / 'good.npz', **options)
  np.savez(tmp_path / 'strange.npz', neither=x)
  (tmp_path / 'torn.npz').write_bytes(b'PK\x03\x04')
  whole = {'source': 'verl-project/verl@1', 'function': 'agg_loss', 'args': {}}
  files = ('good', 'absent', 'torn', 'strange')
  listed = [{'name': f, 'file': f'{f}.npz', **whole} for f in files]
  listed.append({'name': 'bare', 'file': 'good.npz'})
  index = tmp_path / 'index.json'
  index.write_text(json.dumps({'cases': listed}))
  counts, lines = parity.run(index)
  assert counts == {'passed': 1, 'failed': 4, 'listed': 0}, lines
  assert [x.split(':')[0] for x in lines] == [
    f'failed {name}' for name in ('absent', 'torn', 'strange', 'bare')
  ]
  index.write_text('{"cases": []}')
  assert parity.run(index)[0] == {'passed': 0, 'failed': 0, 'listed': 0}
  command = [sys.executable, str(TESTS / 'parity.py'), '--index', str(index)]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert done.returncode == 1 and 'nothing was checked' in done.stdout


def test_a_map_of_a_project_comes_before_one_of_all():
  known = doubled() | {'double@PROJECT': lambda case: Result({'y': 0})}
  assert parity.check(known, case())[0] == 'failed'
  other = doubled() | {'double@elsewhere': lambda case: Result({'y': 0})}
  assert parity.check(other, case())[0] == 'passed'


def test_a_peers_fault_is_listed_if_ours_is_finite_and_another():
  assert parity.check(doubled(), case('raises:IndexError'))[0] == 'listed'
  bad = parity.check(doubled(np.nan), case('raises:IndexError'))
  assert bad == ('failed', "not finite: ['y']")
  assert parity.check(doubled(1.0), case('disagree: x'))[0] == 'listed'
  assert parity.check(doubled(0.0), case('disagree: x'))[0] == 'failed'


def test_a_decided_difference_is_listed_if_its_switched_form_is_the_peers():
  x = np.array([1.0, -2.0])
  good, bad = {'switched': {'y': 2 * x}}, {'switched': {'y': x}}
  assert parity.check(doubled(1.0, row=3, **good), case()) == (
    'listed', 'row 3',
  )  # fmt: skip
  assert parity.check(doubled(1.0, row=3, **bad), case())[0] == 'failed'
  assert parity.check(doubled(1.0, **good), case())[0] == 'failed'
  assert parity.check(doubled(0.0, row=3, **good), case())[0] == 'failed'


def test_labels_are_compared_as_partitions():
  def labels(*ids):
    return {'double': lambda case: Result({'y': np.array(ids)})}

  given = Case('a', 's', 'double', {}, {}, {'y': np.array(['p', 'q', 'p'])},
               'same partition')  # fmt: skip
  assert parity.check(labels(4, 2, 4), given)[0] == 'passed'
  assert parity.check(labels(4, 2, 2), given)[0] == 'failed'
  assert parity.check(labels(4, 4, 4), given)[0] == 'failed'


def test_entries_outside_where_are_not_compared():
  half = {'y': np.array([True, False])}
  got = Result({'y': np.array([2.0, 9.0])}, where=half)
  wrong = {'double': lambda case: got}
  assert parity.check(wrong, case())[0] == 'passed'


def test_the_command_says_how_many_and_fails_on_what_is_unknown(tmp_path):
  x = np.zeros(2, np.float32)
  np.savez(tmp_path / 'a.npz', in_x=x, out_y=x)
  (tmp_path / 'index.json').write_text(
    '{"cases": [{"name": "a", "file": "a.npz", "source": "s", "args": {},'
    ' "function": "unheard_of"}]}'
  )
  done = subprocess.run(
    [sys.executable, str(TESTS / 'parity.py'), '--index',
     str(tmp_path / 'index.json')],
    capture_output=True, text=True, timeout=120, cwd=tmp_path,
  )  # fmt: skip
  assert done.stdout.splitlines() == [
    "failed a: unknown function 'unheard_of' of s",
    '0 passed, 1 failed, 0 listed',
  ], done.stderr
  assert done.returncode == 1
