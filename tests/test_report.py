"""The report finds what a person should look at, and links to its page."""

import html.parser
import time

import pytest
from fakes import trajectory

from agentjax import ledger, recorder, report, storage, tally, viewer
from agentjax.types import Group, Reward, Status

PARTS = [('p', [1, 2]), ('m', [3, 4])]


def made(task, reward, sample=0, **changes):
  """`reward` is a number, a Reward, or None."""
  if isinstance(reward, float):
    reward = Reward(reward, reward > 0)
  return trajectory(PARTS, task, sample=sample).append(reward=reward, **changes)


def record(workdir, *steps):
  """Each step is (number, {task: trajectories}); metrics have their mean."""
  r = recorder.Recorder(workdir)
  for step, groups in steps:
    members = [t for g in groups.values() for t in g]
    rewards = [t.reward.value for t in members if t.reward]
    r.metrics(step, {'reward': sum(rewards) / max(1, len(rewards))})
    r.trajectories(
      step, [Group(ts[0].task, step, tuple(ts)) for ts in groups.values()]
    )


@pytest.fixture
def run(tmp_path):
  flagged = Reward(0.0, False, {'tampered': 1.0, 'tampered: tests': 1.0})
  clean = Reward(0.25, False, {'tampered': 0.0, 'calls': 2.0})
  record(
    tmp_path,
    (1, {'a': [made('a', 0.0), made('a', 0.5, 1)], 'b': [made('b', 0.0)]}),
    (
      2,
      {
        'a': [made('a', clean), made('a', 0.25, 1)],
        'b': [made('b', 7.0), made('b', flagged, 1)],
        'c': [
          made('c', None, status=Status.INFRA_FAILURE, error='T\n  x\nGone: 1')
        ],
      },
    ),
    (4, {'a': [made('a', -9.0)], 'c': [made('c', 0.5)]}),
  )
  return tmp_path


class Links(html.parser.HTMLParser):
  def __init__(self, document):
    super().__init__()
    self.links, self.tags, self.text = [], [], ''
    self.feed(document)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.links += [v for k, v in attrs if k == 'href']

  def handle_data(self, data):
    self.text += data


def test_the_lists_hold_what_they_say(run):
  found = report.report(run)
  assert [(e.step, e.reward) for e in found.highest[:2]] == [(2, 7.0), (4, 0.5)]
  assert len(found.highest) == 9 and found.highest[-1].reward == -9.0
  # a: 0.25, 0.25, then -9; b: 0, then 3.5; c had no reward to jump from.
  assert [(e.step, e.id, e.why) for e in found.jumps] == [
    (4, '0/a/0/0', 'mean 0.250 at step 2, -9.000 at step 4'),
    (2, '0/b/0/0', 'mean 0.000 at step 1, 3.500 at step 2'),
  ]
  assert [(e.step, e.place, e.why) for e in found.flagged] == [
    (2, 3, 'tampered, tampered: tests')
  ]
  assert [(e.place, e.status, e.why) for e in found.failed] == [
    (4, 'infra_failure', 'Gone: 1')
  ]
  assert [s[1:3] for s in found.steps] == [(2, 4), (1, 2)]
  assert found.counts == {
    'trajectories': 10, 'steps': 3, 'flagged': 1, 'failed': 1,
  }  # fmt: skip


def test_lists_are_as_long_as_asked_and_counts_are_of_all(run):
  found = report.report(run, most=1)
  lists = (found.highest, found.jumps, found.steps, found.flagged)
  assert [len(x) for x in lists] == [1, 1, 1, 1]
  assert found.highest[0].reward == 7.0 and found.counts['trajectories'] == 10


def test_a_flag_in_the_info_is_one_too(tmp_path):
  record(tmp_path, (1, {'a': [made('a', 1.0, info={'tamper': ['tests']})]}))
  (entry,) = report.report(tmp_path).flagged
  assert entry.why == "tamper: ['tests']"


def test_metrics_count_what_was_tampered_with(run):
  groups, _ = recorder.read_trajectories(run, 2)
  found = tally.outcome([t for g in groups for t in g.trajectories])
  assert (found['tampered'], found['unscored']) == (1, 1)


def test_every_link_leads_to_the_page_of_that_trajectory(run, capsys):
  assert report.main([str(run)]) == 0
  out = capsys.readouterr().out
  page = run / 'pages/report.html'
  assert out.endswith(f'\n{page}\n')
  shown = Links(page.read_text())
  assert len(shown.links) == 9 + 2 + 1 + 1
  for link in shown.links:
    assert f'pages/{link}' in out
    target = Links((page.parent / link).read_text())
    step = int(link.split('/')[0].removeprefix('step_'))
    place = int(link.split('/')[1].removesuffix('.html'))
    groups, _ = recorder.read_trajectories(run, step)
    t = [t for g in groups for t in g.trajectories][place]
    assert t.id in target.text and t.id in shown.text
  written = {p.name for p in (run / 'pages').rglob('*.html')}
  assert 'index.html' not in written  # that is the viewer's
  for title in ('tampered with', 'highest rewards', 'largest jumps'):
    assert title in out and title in shown.text


def test_pages_that_the_viewer_wrote_stay(run):
  index = viewer.write_pages(run, 4)
  before = index.read_text()
  report.write(run, report.report(run))
  assert index.read_text() == before


EVIL = '<script>x</script>\x1b[31m"\' onload=1\u202e\nx'


def test_text_of_a_policy_is_never_markup_and_moves_no_cursor(tmp_path):
  reward = Reward(1.0, True, {f'tamper{EVIL}': 1.0})
  record(
    tmp_path,
    (1, {EVIL: [made(EVIL, reward)]}),
    (2, {EVIL: [made(EVIL, 0.0)]}),
  )
  found = report.report(tmp_path)
  document = report.as_page(found)
  assert 'script' not in Links(document).tags and '\x1b' not in document
  assert not set(report.as_text(found)) & set('\x1b\u202e')
  assert len(report.as_text(found).splitlines()) == 16


def test_a_run_ends_with_a_report_that_a_resumed_one_takes_back(run):
  ledger.end(run, {'steps': 4}, pages=True, method=len)
  page = run / 'pages/report.html'
  assert 'tampered with' in page.read_text()
  recorder.Recorder(run).forget_after(2)
  assert not page.exists()
  assert (run / 'pages/step_00000002').exists()


def test_what_is_missing_or_damaged_is_named(tmp_path, capsys):
  assert report.main([str(tmp_path)]) == 1
  assert 'no trajectories in' in capsys.readouterr().err
  assert report.main(['foo://a']) == 2
  assert 'name the workdir of a run' in capsys.readouterr().err
  record(tmp_path, (1, {'a': [made('a', 1.0)]}))
  path = tmp_path / 'trajectories/step_00000001.jsonl'
  row = storage.read_jsonl(path)[0]
  for change in ({'reward': 'x'}, {'id': None}, {'task': {}}, {'error': 3}):
    storage.write_jsonl(path, [row | change])
    assert report.main([str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert 'line 1 is no trajectory' in err and err.count('\n') == 1
  with pytest.raises(SystemExit):
    report.main([str(tmp_path), '--most', '0'])


def test_a_long_run_is_read_in_little_time(tmp_path):
  members = [made('a', i / 100, i) for i in range(100)]
  record(tmp_path, *((step, {'a': members}) for step in range(20)))
  began = time.process_time()
  found = report.report(tmp_path)
  assert found.counts['trajectories'] == 2000
  assert time.process_time() - began < 4
