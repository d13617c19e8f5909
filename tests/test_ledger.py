"""What a run finds in its workdir, and leaves there for people."""

import pytest

from agentjax import ledger, recorder, storage


def recorded(workdir, *steps):
  r = recorder.Recorder(workdir)
  for step in steps:
    r.metrics(step, {'reward': 0.5})
  return r


def files(workdir):
  return sorted(
    str(p.relative_to(workdir)) for p in workdir.rglob('*') if p.is_file()
  )


def begin(workdir, records, step=None, first_save=4, config=None):
  ledger.begin(workdir, records, step, first_save, config)


@pytest.mark.parametrize('steps', [(), (1,), (1, 2, 3, 4)])
def test_killed_before_its_first_checkpoint_a_run_starts_again(
  tmp_path, capsys, steps
):
  records = recorded(tmp_path, *steps)
  begin(tmp_path, records)
  assert recorder.recorded_steps(tmp_path) == []
  said = capsys.readouterr().out
  assert said == (
    f'{tmp_path} has no checkpoint yet: starting again from step 0, '
    f'{len(steps)} records of an earlier start removed\n'
    if steps
    else ''
  )


def test_a_run_whose_checkpoints_were_taken_away_is_kept(tmp_path):
  records = recorded(tmp_path, 1, 2, 3, 4, 5)
  before = files(tmp_path)
  with pytest.raises(storage.WorkdirMismatch) as error:
    begin(tmp_path, records, config={'a': 1})
  assert 'holds records up to step 5 but no checkpoint' in str(error.value)
  assert 'restore checkpoints/, or choose another workdir' in str(error.value)
  assert files(tmp_path) == before


def test_a_finished_run_is_kept_however_short(tmp_path):
  records = recorded(tmp_path, 1)
  storage.write_json(tmp_path / 'summary.json', {})
  with pytest.raises(storage.WorkdirMismatch, match='holds a summary but no'):
    begin(tmp_path, records)
  assert recorder.recorded_steps(tmp_path) == [1]


def test_a_resume_says_what_it_removes_and_what_has_changed(tmp_path, capsys):
  records = recorded(tmp_path, 1, 2, 3)
  storage.write_json(tmp_path / 'summary.json', {})
  begin(tmp_path, records, 3, config={'rate': 1})
  assert capsys.readouterr().out == f'going on after step 3 of {tmp_path}\n'
  assert (tmp_path / 'summary.json').exists()
  begin(tmp_path, records, 2, config={'rate': 2})
  assert capsys.readouterr().out == (
    f'going on after step 2 of {tmp_path}, 1 later records removed\n'
    'the config has changed; from step 2 on it is:\n'
    '  rate: 1 -> 2\n'
  )
  assert not (tmp_path / 'summary.json').exists()
  assert {'config.json', 'config_2.json'} <= set(files(tmp_path))


def test_finished_is_what_ended_at_this_step(tmp_path):
  assert ledger.finished(tmp_path, 5) is None
  summary = {'steps': 5, 'after': {'step': 5}}
  storage.write_json(tmp_path / 'summary.json', summary)
  assert ledger.finished(tmp_path, 5) == summary
  assert ledger.finished(tmp_path, 6) is None
  (tmp_path / 'summary.json').write_text('{"steps"')
  with pytest.raises(storage.Unreadable, match='summary.json: not JSON'):
    ledger.finished(tmp_path, 5)


def test_pictures_that_cannot_be_made_do_not_cost_the_end(tmp_path, capsys):
  recorded(tmp_path, 1)
  recorder.Recorder(tmp_path).trajectories(1, [])
  (tmp_path / 'vocabulary.json').write_text('[')
  (tmp_path / 'metrics/step_00000001.jsonl').write_text('')
  ledger.end(tmp_path, {'steps': 1}, pages=True, method=len)
  err = capsys.readouterr().err
  assert 'the pages could not be made: ' in err
  assert 'the learning curve could not be made: ' in err
  assert storage.read_json(tmp_path / 'summary.json') == {'steps': 1}


def test_the_name_of_the_method():
  assert ledger._name(len) == 'LEN'
  assert ledger._name(lambda: 0) == 'RL'
