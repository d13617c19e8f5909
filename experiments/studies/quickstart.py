"""The quickstart over seeds, beside three controls."""

import pathlib

from agentjax import recorder, storage

CLAIM = (
  'GRPO takes the quickstart from at most 0.6 to at least 0.9 on held-out '
  'tasks; shuffled rewards, or the same seconds of cold start, do not.'
)
CONFIG = 'configs/quickstart.py'
SEEDS = (0, 1, 2)


def same_seconds_of_cold_start(first: pathlib.Path) -> list[str]:
  """More supervised steps, for as long as reinforcement took in `first`."""
  rows = recorder.read_metrics(first)
  cold = [r['seconds'] for r in rows if r['phase'] == 'cold_start']
  steps = storage.read_json(first / 'summary.json')['cold_start_steps']
  reinforcement = sum(
    r['seconds'] for r in rows if r['phase'] == 'reinforcement'
  )
  # The first step of a process reads demonstrations and is not like others.
  typical = sorted(cold)[len(cold) // 2]
  more = round(reinforcement / typical)
  return ['steps=0', f'cold_start.steps={steps + more}']


ARMS = {
  'grpo': [],
  'rewards_shuffled': [
    'advantages.function=agentjax.rl.advantages.grpo_shuffled'
  ],
  'cold_start_continued': same_seconds_of_cold_start,
  'observations_not_masked': ['mask_observations=False'],
}
