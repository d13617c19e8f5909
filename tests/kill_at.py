"""Runs the command line until a chosen moment, and dies there by SIGKILL.

  python tests/kill_at.py MOMENT N --config=... --workdir=...

A moment is the dotted name of a function of the package, with `:before` or
`:after` its N-th call, or `commit`: the N-th renaming of a checkpoint that is
written to its final name. Nothing of the process runs after that.
"""

import functools
import importlib
import os
import signal
import sys


def die():
  os.kill(os.getpid(), signal.SIGKILL)


def die_at_commit(n):
  seen = 0

  def hook(event, args):
    nonlocal seen
    if event == 'os.rename' and 'orbax-checkpoint-tmp' in str(args[0]):
      seen += 1
      if seen == n:
        die()

  sys.addaudithook(hook)


def die_at_call(moment, n):
  name, when = moment.split(':')
  *parts, last = name.split('.')
  # The module is the longest part of the name that can be imported.
  for i in range(len(parts), 0, -1):
    try:
      owner = importlib.import_module('.'.join(parts[:i]))
    except ModuleNotFoundError:
      continue
    break
  for part in parts[i:]:
    owner = getattr(owner, part)
  function, seen = getattr(owner, last), 0

  @functools.wraps(function)
  def counted(*args, **kwargs):
    nonlocal seen
    seen += 1
    if seen == n and when == 'before':
      die()
    result = function(*args, **kwargs)
    if seen == n:
      die()
    return result

  setattr(owner, last, counted)


if __name__ == '__main__':
  moment, n = sys.argv[1], int(sys.argv[2])
  if moment == 'commit':
    die_at_commit(n)
  else:
    die_at_call(moment, n)
  from experiments import main

  sys.exit(main.main(['main', *sys.argv[3:]]))
