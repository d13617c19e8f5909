"""Small episodes over a pool: what is lost, and what comes of it, is counted.

An episode is a few calls whose answers depend on its seed and on the calls
before, through a file; its reward is made of the answers. One that meets an
InfraError begins again with the same seed, as `collect` has it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections import deque

from agentjax.env.base import InfraError
from agentjax.env.sandbox import Call

STEP = """
import hashlib, os
before = open('state').read() if os.path.exists('state') else {seed!r}
now = hashlib.sha256((before + {turn!r}).encode()).hexdigest()
open('state', 'w').write(now)
print(now)
"""


def expected(seed: int, calls: int) -> float:
  """The reward of an episode that nothing happens to."""
  state = str(seed)
  for turn in range(calls):
    state = hashlib.sha256((state + str(turn)).encode()).hexdigest()
  return int(state[:8], 16) / 2**32


@dataclasses.dataclass
class Outcome:
  """Of a run: seed -> rewards given, and every failure with its seconds."""

  rewards: dict[int, list[float]] = dataclasses.field(default_factory=dict)
  failures: list[tuple[str, float]] = dataclasses.field(default_factory=list)
  masked: list[int] = dataclasses.field(default_factory=list)
  latencies: list[float] = dataclasses.field(default_factory=list)


def run(
  pool, seeds, *, calls=4, threads=4, retries=2, timeout_s=5.0, pause_s=0.0,
  on_sandbox=None,
) -> Outcome:  # fmt: skip
  """Runs an episode for each seed, `threads` at once.

  `on_sandbox` is told of each sandbox that an episode has got.
  """
  outcome, lock = Outcome(), threading.Lock()
  left = deque(seeds)

  def episode(seed: int) -> float:
    with pool.acquire(f'seed-{seed}') as sandbox:
      if on_sandbox is not None:
        on_sandbox(sandbox)
      for turn in range(calls):
        code = STEP.format(seed=str(seed), turn=str(turn))
        began = time.monotonic()
        try:
          said = sandbox.call(Call(code=code, timeout_s=timeout_s))
        except InfraError as error:
          took = time.monotonic() - began
          with lock:
            outcome.failures.append((type(error).__name__, took))
          raise
        with lock:
          outcome.latencies.append(time.monotonic() - began)
        time.sleep(pause_s)
      return int(said.stdout[:8], 16) / 2**32

  def work() -> None:
    while True:
      try:
        seed = left.popleft()
      except IndexError:
        return
      for _ in range(retries + 1):
        try:
          reward = episode(seed)
        except InfraError:
          continue
        with lock:
          outcome.rewards.setdefault(seed, []).append(reward)
        break
      else:
        with lock:
          outcome.masked.append(seed)

  workers = [threading.Thread(target=work) for _ in range(threads)]
  for worker in workers:
    worker.start()
  for worker in workers:
    worker.join()
  return outcome


def check(outcome: Outcome, seeds, calls=4) -> None:
  """None lost, none twice, each reward as if nothing had happened."""
  assert outcome.masked == []
  assert outcome.rewards == {seed: [expected(seed, calls)] for seed in seeds}
