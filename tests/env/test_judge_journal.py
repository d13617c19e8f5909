"""One verdict an episode, and the first one is final."""

import concurrent.futures
import json
import pathlib
import subprocess
import sys

import pytest

from agentjax import storage
from agentjax.env.base import InfraError
from agentjax.env.judge import (
  Journal,
  JudgeFailed,
  Judgement,
  Outcome,
  Reason,
  as_tested,
  nothing_if_tampered,
)

ROOT = pathlib.Path(__file__).parents[2]
PASS = Judgement(Outcome.PASS)
FAIL = Judgement(Outcome.FAIL, Reason.WRONG, ('tests: a',), 'x\ud800y')
INFRA = Judgement(Outcome.INFRA, Reason.INFRA, details='engine down')


def test_the_first_verdict_is_final(tmp_path):
  journal = Journal(tmp_path)
  assert journal.get('a') is None
  assert journal.once('a', lambda: FAIL) == FAIL
  assert journal.once('a', lambda: pytest.fail('asked twice')) == FAIL
  assert journal.settle('a', PASS) == FAIL
  assert Journal(tmp_path).get('a') == FAIL
  assert journal.once('b', lambda: PASS) == PASS
  assert journal.once('c', lambda: INFRA) == INFRA
  assert journal.settle('c', PASS) == INFRA


def test_names_of_episodes_may_be_anything(tmp_path):
  journal = Journal(tmp_path)
  names = ['', '/', '../a', 'a/b', 'é', '\ud800', 'x' * 5000, 'a\nb', '.']
  for name in names:
    judgement = Judgement(Outcome.FAIL, Reason.WRONG, details=repr(name)[:99])
    assert journal.settle(name, judgement) == judgement
  assert len({journal.get(name).details for name in names}) == len(names)


def test_a_judge_that_fails_settles_nothing(tmp_path):
  journal = Journal(tmp_path)

  def broken():
    raise InfraError('engine down')

  with pytest.raises(InfraError):
    journal.once('a', broken)
  assert journal.once('a', lambda: PASS) == PASS


def test_threads_that_settle_at_once_agree(tmp_path):
  judgements = [
    Judgement(Outcome.FAIL, Reason.WRONG, details=str(i)) for i in range(8)
  ]
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    for episode in map(str, range(20)):
      settle = [
        pool.submit(Journal(tmp_path).settle, episode, j) for j in judgements
      ]
      assert len({s.result() for s in settle}) == 1
  left = [p for p in tmp_path.rglob('*') if p.is_file()]
  assert len(left) == 20  # no half-made file is left


SETTLER = """
import sys
from agentjax.env.judge import Journal, Judgement, Outcome, Reason
journal = Journal(sys.argv[1])
mine = Judgement(Outcome.FAIL, Reason.WRONG, details=sys.argv[2])
print(' '.join(journal.settle(str(i), mine).details for i in range(200)))
"""


def test_processes_that_settle_at_once_agree(tmp_path):
  started = [
    subprocess.Popen(
      [sys.executable, '-c', SETTLER, str(tmp_path), str(i)],
      stdout=subprocess.PIPE,
      text=True,
      cwd=ROOT,
    )
    for i in range(3)
  ]
  said = {process.communicate(timeout=120)[0] for process in started}
  assert len(said) == 1 and len(said.pop().split()) == 200


def test_what_a_killed_writer_left_is_no_verdict(tmp_path):
  journal = Journal(tmp_path)
  journal.settle('a', FAIL)
  (path,) = [p for p in tmp_path.rglob('*.json')]
  whole = path.read_bytes()
  path.unlink()
  # Killed before the link: a whole or a torn file under another name.
  path.with_name(path.name + '.1-00000000').write_bytes(whole)
  path.with_name(path.name + '.2-00000000').write_bytes(whole[:20])
  assert journal.get('a') is None
  assert journal.once('a', lambda: PASS) == PASS


@pytest.mark.parametrize('data', [b'', b'{', b'[]', b'{"episode": "b"}', b'1'])
def test_a_file_that_is_no_verdict_is_named(tmp_path, data):
  journal = Journal(tmp_path)
  journal.settle('a', PASS)
  (path,) = tmp_path.rglob('*.json')
  path.write_bytes(data)
  with pytest.raises(storage.Unreadable, match=path.name):
    journal.once('a', lambda: PASS)


def test_the_verdict_of_another_episode_is_refused(tmp_path):
  journal = Journal(tmp_path)
  journal.settle('a', PASS)
  (path,) = tmp_path.rglob('*.json')
  data = json.loads(path.read_text())
  path.write_text(json.dumps(data | {'episode': 'b'}))
  with pytest.raises(storage.Unreadable, match="'b'"):
    journal.get('a')


def test_what_a_verdict_is_worth():
  tampered = Judgement(Outcome.PASS, tamper=('tests: a has changed',))
  assert (as_tested(PASS), nothing_if_tampered(PASS)) == (1.0, 1.0)
  assert (as_tested(FAIL), nothing_if_tampered(FAIL)) == (0.0, 0.0)
  assert (as_tested(tampered), nothing_if_tampered(tampered)) == (1.0, 0.0)
  marked = Judgement(Outcome.INFRA, Reason.INFRA, ('tests: a',), 'engine down')
  for judgement in (INFRA, marked):
    for pay in (as_tested, nothing_if_tampered):
      with pytest.raises(JudgeFailed, match='engine down'):
        pay(judgement)
  assert issubclass(JudgeFailed, InfraError)


def test_judgements_that_contradict_themselves():
  for outcome, reason in (
    (Outcome.PASS, Reason.WRONG),
    (Outcome.FAIL, None),
    (Outcome.FAIL, Reason.INFRA),
    (Outcome.INFRA, Reason.WRONG),
    (Outcome.INFRA, None),
  ):
    with pytest.raises(ValueError, match='reason'):
      Judgement(outcome, reason)


def test_details_are_bounded_text():
  details = Judgement(Outcome.PASS, details='\ud800' + 'x' * 9999).details
  assert len(details) == 2000 and details.encode()
  for judgement in (PASS, FAIL, INFRA):
    assert Judgement.from_json(judgement.to_json()) == judgement
