"""The engine as the README shows it: the lines there are run here."""

import pathlib
import re

README = pathlib.Path(__file__).resolve().parents[2] / 'README.md'


def snippet():
  text = README.read_text('utf-8')
  section = text.split('## The engine by hand')[1].split('\n## ')[0]
  (code,) = re.findall(r'```python\n(.*?)```', section, re.DOTALL)
  return code


def test_the_engine_of_the_readme_runs(capsys):
  space = {'__name__': 'readme'}
  exec(snippet(), space)
  first, second, handle, counts = capsys.readouterr().out.splitlines()
  for line in (first, second):
    assert re.match(r'\[[\d ]+\] -\d+\.\d+ Stop\.[A-Z_]+$', line)
  assert first != second
  assert handle.startswith("Handle(versions=((0, 0),), digest='")
  # A prompt of 20 tokens once, and two observations of 3.
  prefilled, sampled = map(int, counts.split())
  assert prefilled == 20 + 2 * 3
  engine, slots = space['engine'], space['slots']
  held = sum(engine.length(s) for s in slots)
  assert sampled == held - 2 * 20 - 2 * 3
  for slot, turn in zip(slots, space['again'], strict=True):
    assert len(turn) <= 8
    assert set(turn.versions) == {0} and turn.kv_versions == ((0, 0),)
    assert engine.handle(slot).length == engine.length(slot)


def test_what_the_readme_names_is_there():
  text = README.read_text('utf-8').split('## The engine by hand')[1]
  engine = __import__('agentjax.rollout.engine', fromlist=['Engine']).Engine
  for name in ('fork', 'mark', 'park', 'unpark', 'load', 'stats'):
    assert f'`{name}' in text or f'engine.{name}' in text
    assert hasattr(engine, name)
