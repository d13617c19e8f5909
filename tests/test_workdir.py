"""A workdir: held by one process, refused where none can live, described."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from agentjax import storage, workdir

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_lock_names_its_owner_and_is_freed_on_exit(tmp_path):
  with workdir.WorkdirLock(tmp_path / 'run'):
    with pytest.raises(workdir.WorkdirLocked) as error:
      with workdir.WorkdirLock(tmp_path / 'run'):
        pass
    message = str(error.value)
    assert f'pid {os.getpid()} on host ' in message
    assert str(tmp_path / 'run') in message
    assert 'choose another workdir' in message
  with workdir.WorkdirLock(tmp_path / 'run'):
    pass


def test_lock_waits_for_a_holder_that_is_going_away(tmp_path):
  holder = workdir.WorkdirLock(tmp_path)
  holder.__enter__()
  timer = threading.Timer(0.3, holder.__exit__)
  timer.start()
  with pytest.raises(workdir.WorkdirLocked):
    workdir.WorkdirLock(tmp_path, patience=0).__enter__()
  with workdir.WorkdirLock(tmp_path, patience=60):
    pass
  timer.join()


def test_lock_of_a_killed_process_is_free_though_its_child_lives(tmp_path):
  code = f"""
    import os, sys, time
    from agentjax import workdir
    workdir.WorkdirLock({str(tmp_path)!r}).__enter__()
    if not (child := os.fork()):
      time.sleep(60)
    print(child, flush=True)
    time.sleep(60)
  """
  holder = _start(code)
  child = int(holder.stdout.readline())
  try:
    with pytest.raises(workdir.WorkdirLocked, match=f'pid {holder.pid} on'):
      workdir.WorkdirLock(tmp_path).__enter__()
    holder.kill()
    holder.wait(timeout=10)
    os.kill(child, 0)  # the child is still there
    with workdir.WorkdirLock(tmp_path):
      pass
  finally:
    os.kill(child, signal.SIGKILL)
    holder.kill()
    holder.wait()
    holder.stdout.close()


@pytest.mark.parametrize(
  ('path', 'said'),
  [
    ('file', 'file cannot be used: .*file: (Not a directory|File exists)'),
    ('file/under', 'under cannot be used: .*: Not a directory: choose another'),
    ('/proc/no', '/proc/no cannot be used: .*: No such file or directory'),
    ('foo://a/b', 'foo:// is no kind of path that is known: choose another'),
    ('s4://a/b', 's4:// is no kind of path'),
  ],
)
def test_where_no_run_can_live(tmp_path, path, said):
  (tmp_path / 'file').write_text('mine')
  path = path if '://' in path else tmp_path / path
  with pytest.raises(storage.Unusable, match=said):
    workdir.WorkdirLock(path).__enter__()
  assert (tmp_path / 'file').read_text() == 'mine'


def test_a_bucket_without_its_package_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'gcsfs', None)
  with pytest.raises(storage.Unusable, match='gs://b/x cannot be used.*gcsfs'):
    workdir.WorkdirLock('gs://b/x').__enter__()


def test_a_read_only_workdir_is_named():
  with pytest.raises(storage.Unusable, match='/sys/kernel cannot be used: '):
    workdir.WorkdirLock('/sys/kernel').__enter__()


CONFIG = {'a': {'b': 1, 'c': (1, 2)}, 'rate': float('inf')}


def test_the_config_is_kept_with_its_versions(tmp_path):
  assert workdir.write_config(tmp_path, CONFIG, 0) == []
  found = storage.read_json(tmp_path / 'config.json')
  assert found['config'] == {'a': {'b': 1, 'c': [1, 2]}, 'rate': float('inf')}
  assert found['from_step'] == 0
  assert sorted(found['versions']) == ['agentjax', 'jax', 'python']
  json.loads((tmp_path / 'config.json').read_text())
  # The same again changes nothing.
  assert workdir.write_config(tmp_path, CONFIG, 7) == []
  assert storage.names(tmp_path) == ['config.json']


def test_a_changed_config_says_what_and_is_kept_beside_the_first(tmp_path):
  workdir.write_config(tmp_path, CONFIG, 0)
  other = {'a': {'b': 2, 'c': (1, 2)}, 'new': 'x'}
  assert workdir.write_config(tmp_path, other, 4) == [
    'a.b: 1 -> 2',
    'rate: {"$float": "inf"} -> nothing',
    'new: nothing -> "x"',
  ]
  assert storage.names(tmp_path) == ['config.json', 'config_2.json']
  assert storage.read_json(tmp_path / 'config_2.json')['from_step'] == 4
  assert workdir.write_config(tmp_path, other, 9) == []
  # Back again is a change too.
  assert len(workdir.write_config(tmp_path, CONFIG, 9)) == 3
  assert storage.names(tmp_path)[-1] == 'config_3.json'


def test_other_versions_are_a_change(tmp_path):
  workdir.write_config(tmp_path, CONFIG, 0)
  found = storage.read_json(tmp_path / 'config.json')
  found['versions']['jax'] = '0.1'
  storage.write_json(tmp_path / 'config.json', found)
  (change,) = workdir.write_config(tmp_path, CONFIG, 3)
  assert change.startswith('jax: "0.1" -> ')


@pytest.mark.parametrize('text', ['{', '[]', '{"config": 1}'])
def test_a_damaged_config_is_named(tmp_path, text):
  (tmp_path / 'config.json').write_text(text)
  with pytest.raises(storage.Unreadable, match='config.json: not '):
    workdir.write_config(tmp_path, CONFIG, 0)


def _start(code):
  return subprocess.Popen(
    [sys.executable, '-c', textwrap.dedent(code)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )
