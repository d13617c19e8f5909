"""A run that takes seconds: a config file, and the parts that it names.

`experiments.main --config=tests/tiny_run.py` runs it, with `tests` on the
import path; tests in this process build it with `training`.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import ml_collections

from agentjax.env import arithmetic
from agentjax.types import Reward
from experiments import launch, overrides

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Graded:
  """Arithmetic whose reward tells bad turns apart, so that all groups learn.

  A policy of a few hundred updates never calculates; what it wrote still
  differs, and so do these rewards.
  """

  def __init__(self, **options):
    self._inner = arithmetic.environment(**options)
    self._said = 0
    self.reset = self._inner.reset
    self.close = self._inner.close

  def step(self, turn):
    self._said += len(turn.text)
    return self._inner.step(turn)

  def verify(self, status):
    reward = self._inner.verify(status)
    return Reward(reward.value + self._said % 5 / 10, self._said % 5 > 2)


def get_config() -> ml_collections.ConfigDict:
  tasks = {
    'call': 'agentjax.env.arithmetic.tasks',
    'split': 'train',
    'n': 16,
  }
  environment = {'function': 'tiny_run.Graded', 'max_calls': 3}
  return ml_collections.ConfigDict(
    {
      'policy': {
        'call': 'agentjax.training.Policy',
        'config': {
          'call': 'agentjax.model.config.ModelConfig',
          'vocab_size': 285,
          'padded_vocab': 288,
          'width': 32,
          'layers': ((('global',), 1),),
          'heads': 2,
          'kv_heads': 2,
          'head_size': 16,
          'mlp': 32,
          'context': 112,
        },
      },
      'chat': {
        'call': 'agentjax.text.chat.Chat',
        'vocab': {
          'call': 'agentjax.text.vocab.load_sentencepiece',
          'path': {'call': 'agentjax.text.train_vocab.arithmetic_model'},
        },
        'format': {'value': 'agentjax.text.formats.arithmetic'},
      },
      'make_environment': environment,
      'tasks': tasks,
      'limits': {
        'call': 'agentjax.rollout.episode.Limits',
        'turns': 4,
        'turn_tokens': 16,
        'model_tokens': 48,
        'context': 112,
        'observation_tokens': 24,
      },
      'engine': {
        'function': 'agentjax.rollout.engine.Engine',
        'slots': 6,
        'context': 112,
        'chunk': 8,
        'buckets': (8, 24),
      },
      'learner': {
        'function': 'agentjax.learner.Learner',
        'rows': 4,
        'length': 112,
        'unroll': True,
        'remat': False,
      },
      'optimizer': {
        'call': 'agentjax.optimizers.adamw',
        'learning_rate': 1e-3,
        'warmup_steps': 3,
      },
      'cold_start': {
        'call': 'agentjax.sft.ColdStart',
        'demonstrate': {
          'function': 'agentjax.sft.demonstrations',
          'tasks': tasks,
          'make_environment': environment,
          'expert': {'function': 'agentjax.env.arithmetic.expert'},
        },
        'steps': 40,
        'demonstrations': 60,
        'per_step': 12,
      },
      'cold_start_optimizer': {
        'call': 'agentjax.optimizers.adamw',
        'learning_rate': 2e-2,
        'decay_steps': 60,
      },
      'evaluation': {
        'call': 'agentjax.training.Evaluating',
        'tasks': tasks | {'split': 'test', 'n': 4},
        'samples': 2,
      },
      'steps': 5,
      'groups': 3,
      'group_size': 4,
      'minibatches': 2,
      'use_reference': True,
      'seed': 0,
      'checkpoint_every': 2,
      'record_every': 1,
      'pages': True,
    }
  )


def config(*changes: str) -> ml_collections.ConfigDict:
  """With overrides such as 'steps=3', as the command line applies them."""
  out = get_config()
  overrides.apply(out, [tuple(c.split('=', 1)) for c in changes])
  return out


def training(*changes: str):
  return launch.training(launch.plain(config(*changes)))


def command(workdir, *changes: str) -> list[str]:
  """The command line of a run in `workdir`."""
  return [
    sys.executable,
    '-m',
    'experiments.main',
    f'--config={ROOT}/tests/tiny_run.py',
    f'--workdir={workdir}',
    *(f'--config.{c}' for c in changes),
  ]


def environment(**more: str) -> dict[str, str]:
  """Variables of a process that finds the clone and these tests."""
  path = os.pathsep.join(map(str, (ROOT, ROOT / 'tests')))
  return {**os.environ, 'PYTHONPATH': path, **more}


def start(workdir, *changes: str) -> subprocess.Popen:
  return subprocess.Popen(
    command(workdir, *changes),
    env=environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def run(workdir, *changes: str) -> tuple[int, str, str]:
  """Exit code, stdout, stderr of a run to its end."""
  process = start(workdir, *changes)
  out, err = process.communicate(timeout=240)
  return process.returncode, out, err
