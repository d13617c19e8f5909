"""Failing infrastructure changes nothing of what is learned; as zeros it would.

A bandit with the real engine, collector, learner and transformer. A turn is
one token, which chooses an arm: to call a tool (pays 1, and the tool's machine
may fail), to guess (pays 0.6, and cannot fail), or neither (pays 0). Calling is
best at any rate of failures. Paid 0 where its machine fails, at a rate of one
half it earns less than guessing, so that a policy learns to avoid its tool:
the control, with the mask taken off.
"""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_model
from fakes import IdChat, id_task

from agentjax.env.base import InfraError, Opening
from agentjax.learner import Learner
from agentjax.model import transformer
from agentjax.rl import advantages, draw_from
from agentjax.rl.batch import pack
from agentjax.rollout.collect import CollectStats, collect
from agentjax.rollout.episode import Limits
from agentjax.rollout.sampling import Sampling
from agentjax.types import Reward, Status, Step, Turn, Verdict

CALL, GUESS, NEITHER = range(3)
PAYS = (1.0, 0.6, 0.0)
LENGTH = 16
LIMITS = Limits(
  turns=1, turn_tokens=1, model_tokens=1, context=LENGTH, observation_tokens=4
)
TASKS = [id_task(f't{i}', [3 + i, 9, 3 + i]) for i in range(4)]


class OneTokenChat(IdChat):
  """Every turn is an answer, also one whose stop is not a turn's end."""

  def parse_turn(self, tokens, stop):
    return Turn(' '.join(map(str, tokens)), Verdict.ANSWER)


def arm(task_id: str, token: int) -> int:
  return (token + int(task_id[1:])) % 3


class Bandit:
  """Fails with probability `rate` where its tool is called."""

  def __init__(self, rate, rng):
    self.rate, self.rng = rate, rng

  def reset(self, task):
    self.task, self.chosen = task, NEITHER
    return Opening(task.messages)

  def step(self, turn):
    self.chosen = arm(self.task.id, int(turn.text))
    if self.chosen == CALL and self.rng.random() < self.rate:
      raise InfraError('the machine of the tool is gone')
    return Step(status=Status.DONE)

  def verify(self, status):
    del status
    return Reward(PAYS[self.chosen], self.chosen == CALL)

  def close(self):
    pass


@functools.cache
def parts():
  """Engine and learner, compiled once for all runs."""
  config = tiny_model.PLAIN
  engine = tiny_model.engine(
    stop_strings=[chr(97 + i) for i in range(26)], loaded=False,
    config=config, slots=16, context=LENGTH, chunk=1,
  )  # fmt: skip
  learner = Learner(
    config, optimizer=optax.adam(5e-3), rows=16, length=LENGTH, remat=False,
    unroll=True,
  )  # fmt: skip
  return engine, learner


def unmasked(groups):
  """What a collector does that takes a failure for a wrong answer."""

  def zero(t):
    if t.status is not Status.INFRA_FAILURE:
      return t
    return dataclasses.replace(t, status=Status.DONE, reward=Reward(0.0))

  return [
    dataclasses.replace(g, trajectories=tuple(map(zero, g.trajectories)))
    for g in groups
  ]


def learn(rate, *, seed=0, draws=24, retries=0, credit=lambda groups: groups):
  """Shares of the arms in the last quarter, by arm; and the stats of it all."""
  engine, learner = parts()
  rng = np.random.default_rng([seed, zlib.crc32(b'faults')])
  # As at init, nearly uniform: every arm is tried at first.
  params = transformer.init(jax.random.key(seed), tiny_model.PLAIN)
  state = learner.init(jax.tree.map(jnp.copy, params))
  chosen, stats = [], CollectStats()
  for draw in range(draws):
    engine.load(state.params, draw)
    groups = collect(
      TASKS, group_size=16, engine=engine, chat=OneTokenChat(),
      make_environment=lambda: Bandit(rate, rng), limits=LIMITS,
      sampling=Sampling(), seed=seed, draw=draw, tool_threads=1,
      infra_retries=retries, stats=stats,
    )  # fmt: skip
    rows = [t for g in credit(groups) for t in g.trajectories]
    chosen.append([arm(t.task.id, int(t.turns[0].tokens[0])) for t in rows])
    given = advantages.grpo(draw_from.groups(credit(groups)))
    batch = pack(rows, given, rows=16, length=LENGTH)
    for _ in range(2):
      state, _ = learner.update(state, batch)
  last = np.concatenate(chosen[-draws // 4 :])
  shares = np.bincount(last, minlength=3) / len(last)
  return shares, stats, chosen


def test_failures_do_not_teach_and_would_if_they_were_zeros():
  shares, stats, _ = learn(0.0)
  assert shares[CALL] > 0.9 and stats.infra_failures == 0  # seen: 0.99
  shares, stats, _ = learn(0.5)
  assert shares[CALL] > 0.85 and stats.infra_failures > 300  # 0.96
  shares, _, _ = learn(0.5, credit=unmasked)
  assert shares[CALL] < 0.4 < shares[GUESS]  # 0.25 and 0.74


def test_retried_often_enough_nothing_at_all_is_different():
  clean = learn(0.0, draws=4)[2]
  _, stats, retried = learn(0.5, draws=4, retries=40)
  assert stats.retries > 50 and stats.infra_failures == 0
  assert retried == clean


@pytest.mark.long
def test_the_learned_policy_is_the_same_at_every_rate():
  found = {
    rate: [learn(rate, seed=s)[0][CALL] for s in range(5)]
    for rate in (0.0, 0.05, 0.2, 0.5)
  }
  off = {
    rate: [learn(rate, seed=s, credit=unmasked)[0][CALL] for s in range(5)]
    for rate in (0.05, 0.2, 0.5)
  }
  for name, table in (('masked', found), ('as zeros', off)):
    for rate, shares in table.items():
      print(f'\n{name}, {rate:.0%}: calls {np.round(shares, 2)}', end='')
  clean = np.array(found[0.0])
  noise = max(clean.std(ddof=1), 0.02)
  for rate, shares in found.items():
    assert abs(np.mean(shares) - clean.mean()) < 3 * noise, rate
  assert np.mean(off[0.5]) < clean.mean() - 0.5
