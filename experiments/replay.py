"""Runs recorded trajectories again: `python -m experiments.replay --workdir=W`.

Floor 4. Every trajectory that a run has recorded is acted out once more, by
the environment that its config names, on the turns that the policy wrote and
with the sandboxes of the record; no engine is needed. What the policy read and
what it was paid must come out the same to the byte. Differences are listed,
and end with exit code 1.

  --workdir=DIRECTORY   of the run
  --step=N              this step alone
  --verify              runs what was asked of sandboxes again on a live one,
                        and lists what came out otherwise, with its share
  --backend=NAME        of it: docker, bwrap or auto

What `--verify` finds ends with exit code 0: it is for people to judge. What
sandboxes cannot fix is listed in `agentjax.env.sandbox.verification.VARIES`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from agentjax import recorder, storage, workdir
from agentjax.env.base import InfraError
from agentjax.env.sandbox import open_sandbox
from agentjax.env.sandbox.spec import SandboxSpec
from agentjax.env.sandbox.verification import Verified, verify
from agentjax.rollout.replay import NotReplayable, replay
from agentjax.training import ConfigError
from agentjax.types import Trajectory
from experiments import launch

REFUSALS = (FileNotFoundError, storage.Unreadable, InfraError, NotReplayable)


def main(argv: Sequence[str] | None = None) -> int:
  """The command line; returns the exit code."""
  parser = argparse.ArgumentParser(prog='python -m experiments.replay')
  parser.add_argument('--workdir', required=True, help='of the run')
  parser.add_argument('--step', type=int, help='this one alone')
  parser.add_argument('--verify', action='store_true', help='on a live sandbox')
  parser.add_argument('--backend', default='auto', help='docker, bwrap or auto')
  args = parser.parse_args(argv)
  try:
    with storage.unusable_named(args.workdir, 'name the workdir of a run'):
      steps = recorder.trajectory_steps(args.workdir)
    if args.step is not None:
      steps = [args.step]
    if not steps:
      print(f'{args.workdir}: no trajectories are recorded', file=sys.stderr)
      return 1
    counts = [_step(args, step) for step in steps]
  except (storage.Unusable, ConfigError) as error:
    print(error, file=sys.stderr)
    return 2
  except (
    FileNotFoundError,
    storage.Unreadable,
    InfraError,
    TypeError,
  ) as error:
    print(error, file=sys.stderr)
    return 1
  total, unequal, compared, differing = map(sum, zip(*counts, strict=True))
  print(f'{total} trajectories replayed, {total - unequal} byte-equal')
  if args.verify:
    share = differing / max(compared, 1)
    print(f'{compared} operations run again, {differing} differ ({share:.2%})')
  return int(unequal > 0)


def _step(args: argparse.Namespace, step: int) -> tuple[int, int, int, int]:
  """(trajectories, unequal ones, operations run again, differing ones)."""
  groups, _ = recorder.read_trajectories(args.workdir, step)
  made_with = launch.plain(workdir.read_config(args.workdir, step))
  make, chat, limits = (
    launch.build(made_with[key], f'config.{key}')
    for key in ('make_environment', 'chat', 'limits')
  )
  counts = [0, 0, 0, 0]
  for trajectory in (t for g in groups for t in g.trajectories):
    found = replay(trajectory, make, chat, limits)
    counts[0] += 1
    counts[1] += bool(found)
    _say(step, trajectory, found)
    if args.verify:
      for record in trajectory.sandboxes:
        again = _verified(record, args.backend)
        counts[2] += again.compared
        counts[3] += again.differing
        _say(step, trajectory, again.differences)
  return tuple(counts)


def _verified(record: Any, backend: str) -> Verified:
  def opened(spec: SandboxSpec, **options: Any):
    return open_sandbox(spec, backend, **options)

  return verify(record, opened)


def _say(step: int, trajectory: Trajectory, found: Sequence[Any]) -> None:
  for difference in found:
    print(f'step {step}, {trajectory.id}: {difference}')


if __name__ == '__main__':
  sys.exit(main())
