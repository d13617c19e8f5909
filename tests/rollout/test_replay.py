"""Trajectories with sandboxes: recorded, on disk, and run again from there."""

import dataclasses
import functools
import os
import signal
import subprocess

import numpy as np
import pytest
import tiny_model
from code_chat import CodeChat
from fakes import IdEnvironment, id_task
from requirements import require
from test_collect import assert_same

from agentjax import recorder, storage, workdir
from agentjax.env import word_problems
from agentjax.env.base import InfraError
from agentjax.env.sandbox import SandboxSpec, choose_backend, open_sandbox
from agentjax.env.sandbox.replay import Diverged
from agentjax.rollout.collect import CollectStats, collect
from agentjax.rollout.episode import Limits
from agentjax.rollout.replay import NotReplayable, replay
from agentjax.rollout.sampling import Sampling
from agentjax.types import Source, Status
from experiments import replay as command

SPEC = SandboxSpec(
  memory_bytes=192 << 20, tmpfs_bytes=16 << 20, pids=32, grace_s=20.0
)
LIMITS = Limits(
  turns=5, turn_tokens=16, model_tokens=80, context=640, observation_tokens=100
)


def task(i):
  made = id_task(f't{i}', [3 + i, 9, 3 + i])
  return dataclasses.replace(made, verify={'answer': str(9 * (i + 3))})


TASKS = [task(i) for i in range(3)]


@pytest.fixture(scope='module', params=['docker', 'bwrap'])
def backend(request):
  try:
    choose_backend(SPEC, request.param)
    reason = ''
  except InfraError as error:
    reason = str(error)
  require(request.param, not reason, reason)
  return request.param


def maker(backend, **options):
  return functools.partial(
    word_problems.environment, spec=SPEC, backend=backend, max_failures=9,
    **options,
  )  # fmt: skip


def collected(make_environment, tasks=TASKS, group_size=3, **options):
  engine = tiny_model.engine(
    stop_strings=list('abcdefghijklm'),
    slots=4,
    context=LIMITS.context,
    config=dataclasses.replace(tiny_model.PLAIN, context=LIMITS.context),
    buckets=(16, 64),
  )
  return collect(
    tasks, group_size=group_size, engine=engine, chat=CodeChat(),
    make_environment=make_environment, limits=LIMITS, sampling=Sampling(),
    seed=0, draw=2, tool_threads=3, **options,
  )  # fmt: skip


@pytest.fixture(scope='module')
def groups(backend):
  return collected(maker(backend))


def members(groups):
  return [t for g in groups for t in g.trajectories]


def replayed(trajectory, make_environment=None):
  make = make_environment or functools.partial(
    word_problems.environment, max_failures=9
  )
  return replay(trajectory, make, CodeChat(), LIMITS)


@pytest.fixture
def no_engine(monkeypatch):
  """Nothing can be started here."""
  monkeypatch.setenv('DOCKER_HOST', 'unix:///nonexistent/docker.sock')
  monkeypatch.setenv('PATH', '/nonexistent')
  with pytest.raises(InfraError):
    open_sandbox(SPEC)


def test_every_trajectory_is_replayed_from_disk_without_an_engine(
  groups, tmp_path, no_engine
):
  recorder.Recorder(tmp_path).trajectories(7, groups)
  back, _ = recorder.read_trajectories(tmp_path, 7)
  assert_same(groups, back)
  with_calls = 0
  for before, after in zip(members(groups), members(back), strict=True):
    assert after.sandboxes == before.sandboxes
    with_calls += bool(after.sandboxes)
    assert [str(d) for d in replayed(after)] == []
  assert with_calls > 4
  statuses = {t.status for t in members(back)}
  assert Status.TURN_LIMIT in statuses or Status.DONE in statuses


def test_what_differs_is_listed(groups):
  whole = next(t for t in members(groups) if len(t.sandboxes) == 1 and t.reward)
  (record,) = whole.sandboxes

  def changed(**changes):
    return replayed(dataclasses.replace(whole, **changes))

  (found,) = changed(reward=dataclasses.replace(whole.reward, value=0.5))
  assert found.where == 'reward' and "'value': 0.5" in str(found)
  (found,) = changed(state_keys=('x', *whole.state_keys[1:]))
  assert found.where == 'state_keys'
  at = next(
    i for i, s in enumerate(whole.segments) if s.source is Source.OBSERVATION
  )
  segments = list(whole.segments)
  segments[at] = dataclasses.replace(
    segments[at], tokens=segments[at].tokens[::-1]
  )
  (found,) = changed(segments=tuple(segments))
  assert found.where == f'segment {at}' and 'observation' in found.got
  # Another environment than then: it stops, and says at which operation.
  other = functools.partial(
    word_problems.environment, max_failures=9, timeout_s=3
  )
  found = {d.where: d for d in replayed(whole, other)}
  assert found['status'].got == 'infra_failure'
  assert 'operation 0 ' in found['error'].got and '3' in found['error'].got
  cut = dataclasses.replace(record, operations=record.operations[:-1])
  assert 'error' in {d.where for d in changed(sandboxes=(cut,))}
  more = dataclasses.replace(
    record, operations=(*record.operations, record.operations[-1])
  )
  (found,) = changed(sandboxes=(more,))
  assert found.where == 'calls that were not made again' and found.got == 1
  with pytest.raises(NotReplayable, match='takes no open_sandbox'):
    replayed(whole, IdEnvironment)


def test_a_diverged_replay_teaches_nothing(groups):
  """In training it would be masked like any failure of infrastructure."""
  assert issubclass(Diverged, InfraError)
  assert not Status.INFRA_FAILURE.train_on_tokens
  assert not Status.INFRA_FAILURE.reward_trustworthy


def lose(sandbox):
  """Ends a sandbox from outside, as a machine's failure would."""
  if sandbox.facts['backend'] == 'docker':
    command = ['docker', 'kill', sandbox.facts['container']]
    subprocess.run(command, check=True, capture_output=True)
  else:
    os.kill(sandbox.facts['pid'], signal.SIGKILL)


class Losing:
  """A sandbox that is killed in the middle of its n-th call."""

  def __init__(self, sandbox, n):
    self.spec, self.facts = sandbox.spec, sandbox.facts
    self.inner, self.n = sandbox, n

  def call(self, call):
    self.n -= 1
    if self.n == 0:
      # Its side effect is done, and the answer never comes back.
      self.inner.call(call)
      lose(self.inner)
    return self.inner.call(call)

  def close(self):
    self.inner.close()


def test_a_retry_runs_from_the_start_and_no_side_effect_twice(backend, groups):
  """The n-th call of every first attempt is lost; nothing shows of it."""
  for n in (1, 2):
    attempts, lost, stats = {}, [], CollectStats()

    def make(n=n, attempts=attempts, lost=lost):
      environment = maker(backend, open_sandbox=lambda: opened())()

      def opened():
        sandbox = open_sandbox(SPEC, backend)
        task_id = environment._task.id
        attempts[task_id] = attempts.get(task_id, 0) + 1
        if attempts[task_id] > 1:
          return sandbox
        lost.append(Losing(sandbox, n))
        return lost[-1]

      return environment

    # One at a time, so that the second opening of a task is the retry.
    again = collected(make, group_size=1, stats=stats)
    broke = sum(s.n <= 0 for s in lost)
    assert broke > 0 and stats.retries == broke and stats.infra_failures == 0
    for old, new in zip(groups, again, strict=True):
      a, b = old.trajectories[0], new.trajectories[0]
      np.testing.assert_array_equal(a.tokens(), b.tokens())
      np.testing.assert_array_equal(
        a.per_token('logprobs'), b.per_token('logprobs')
      )
      assert (a.status, a.reward) == (b.status, b.reward)
      assert (a.state_keys, a.turn_rewards) == (b.state_keys, b.turn_rewards)
      assert [len(r.operations) for r in a.sandboxes] == [
        len(r.operations) for r in b.sandboxes
      ]


def test_a_lost_episode_is_recorded_and_replayed_as_one(backend, tmp_path):
  def opened():
    return Losing(open_sandbox(SPEC, backend), 2)

  groups = collected(
    maker(backend, open_sandbox=opened), group_size=2, infra_retries=0
  )
  recorder.Recorder(tmp_path).trajectories(0, groups)
  back, _ = recorder.read_trajectories(tmp_path, 0)
  lost = [t for t in members(back) if t.status is Status.INFRA_FAILURE]
  assert lost
  for t in lost:
    assert t.reward is None
    *before, last = t.sandboxes[0].operations
    assert len(before) == 1 and before[0].result is not None
    assert last.result is None and last.error[0] == 'Died'
    assert 'code' in last.request  # for a person to read
  for t in members(back):
    assert [str(d) for d in replayed(t)] == []


def test_a_branch_is_replayed_with_its_past(backend, groups):
  from agentjax.rollout.branches import cut

  whole = next(
    t for t in members(groups) if len(t.turn_rewards) > 1 and t.sandboxes
  )
  past = cut(whole, 1, branch=1)
  assert past.sandboxes == ()
  place = next(i for i, g in enumerate(groups) if g.task is whole.task)
  prefixes = [[past] if i == place else [] for i in range(len(TASKS))]
  (branch,) = members(collected(maker(backend), prefixes=prefixes))
  assert branch.branch == 1 and branch.sandboxes
  assert [str(d) for d in replayed(branch)] == []


def test_an_environment_whose_record_fails_ends_nothing(caplog):
  class Broken(IdEnvironment):
    def sandbox_records(self):
      raise RuntimeError('no record')

  for t in members(collected(Broken)):
    assert t.sandboxes == () and t.status is not Status.ENVIRONMENT_ERROR
  assert 'no record' in caplog.text


def test_a_step_that_was_cut_off_is_not_there(groups, tmp_path, monkeypatch):
  """Killed before its lines are there, it is none, and is written again."""
  r = recorder.Recorder(tmp_path)
  r.trajectories(1, groups)
  for n in (1, 2, 3):  # arrays, blobs, lines
    left, real = [n], storage.write_bytes

    def killed(path, data, left=left, real=real):
      left[0] -= 1
      if not left[0]:
        raise KeyboardInterrupt
      real(path, data)

    with monkeypatch.context() as patched:
      patched.setattr(storage, 'write_bytes', killed)
      with pytest.raises(KeyboardInterrupt):
        r.trajectories(1, groups)
    assert recorder.trajectory_steps(tmp_path) == []
    r.trajectories(1, groups)
    back, _ = recorder.read_trajectories(tmp_path, 1)
    for a, b in zip(members(groups), members(back), strict=True):
      assert a.sandboxes == b.sandboxes


def test_blobs_on_disk(groups, tmp_path):
  """Stored once, whole or refused, and gone with their step."""
  big = next(t for t in members(groups) if t.sandboxes)
  record = big.sandboxes[0]
  assert record.blobs
  r = recorder.Recorder(tmp_path)
  path = tmp_path / 'trajectories/step_00000003.blobs.npz'
  r.trajectories(3, groups)
  distinct = {n for t in members(groups) for s in t.sandboxes for n in s.blobs}
  assert set(storage.read_npz(path)) == distinct
  arrays = storage.read_npz(path)
  name = next(iter(arrays))
  storage.write_npz(path, arrays | {name: np.arange(3, dtype=np.uint8)})
  with pytest.raises(storage.Unreadable, match=f'blob {name} were changed'):
    recorder.read_trajectories(tmp_path, 3)
  path.unlink()
  with pytest.raises(storage.Unreadable, match='blobs .* are missing'):
    recorder.read_trajectories(tmp_path, 3)
  r.trajectories(3, groups)
  r.trajectories(3, [])  # written again, without any sandbox
  assert not path.exists()
  r.trajectories(3, groups)
  r.forget_after(2)
  assert os.listdir(tmp_path / 'trajectories') == []


def test_the_command_replays_a_workdir(backend, groups, tmp_path, capsys):
  config = {
    'make_environment': {
      'function': 'agentjax.env.word_problems.environment',
      'max_failures': 9,
    },
    'chat': {'call': 'code_chat.CodeChat'},
    'limits': {
      'call': 'agentjax.rollout.episode.Limits',
      **dataclasses.asdict(LIMITS),
    },
  }
  workdir.write_config(tmp_path, config, 0)
  records = recorder.Recorder(tmp_path)
  for step in (1, 2):
    records.trajectories(step, groups)
  n = len(members(groups))
  assert command.main([f'--workdir={tmp_path}']) == 0
  assert capsys.readouterr().out == (
    f'{2 * n} trajectories replayed, {2 * n} byte-equal\n'
  )
  again = ['--step=1', '--verify', f'--backend={backend}']
  assert command.main([f'--workdir={tmp_path}', *again]) == 0
  said = capsys.readouterr().out
  total = sum(len(s.operations) for t in members(groups) for s in t.sandboxes)
  assert f'{total} operations run again, 0 differ (0.00%)\n' in said
  # From here on another environment: what it asks for is not in the record.
  config['make_environment']['timeout_s'] = 3
  workdir.write_config(tmp_path, config, 1)
  assert command.main([f'--workdir={tmp_path}', '--step=1']) == 0
  capsys.readouterr()
  assert command.main([f'--workdir={tmp_path}']) == 1
  said = capsys.readouterr().out
  assert 'step 2, 2/t1/0/0: status: ' in said and 'step 1,' not in said
  assert command.main([f'--workdir={tmp_path}', '--step=5']) == 1
  assert 'recorded are 1-2' in capsys.readouterr().err
  assert command.main([f'--workdir={tmp_path / "none"}']) == 1
  assert 'no trajectories' in capsys.readouterr().err
