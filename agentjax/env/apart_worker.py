"""The process in which `apart` runs a function: a request a line, an answer.

Floor 1, env. `python -m agentjax.env.apart_worker MODULE:NAME CPU_S BYTES
STARTING_S MODULE...`, where the last are imported first. The kernel ends it by
SIGXCPU when a call has used its processor seconds, whatever the code is in the
middle of. It ends by itself when nobody holds the other end of its input.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import sys
import traceback


def main() -> None:
  function, cpu_s, memory_bytes, starting_s, *imports = sys.argv[1:]
  # What the function prints must not stand among the answers.
  answers = os.fdopen(os.dup(1), 'w', encoding='ascii')
  os.dup2(2, 1)
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  _limit(resource.RLIMIT_AS, int(memory_bytes))
  allow_cpu(float(starting_s))
  module, _, name = function.partition(':')
  try:
    for imported in imports:
      importlib.import_module(imported)
    call = getattr(importlib.import_module(module), name)
    started = {}
  except Exception:
    started = {'error': traceback.format_exc()}
  # The first line says that calls may come, or why none can.
  answers.write(json.dumps(started) + '\n')
  answers.flush()
  if started:
    return
  for line in sys.stdin:
    allow_cpu(float(cpu_s))
    answers.write(json.dumps(_answer(call, json.loads(line))) + '\n')
    answers.flush()


def _answer(call, arguments: list) -> dict:
  try:
    return {'value': call(*arguments)}
  except MemoryError:
    return {'exhausted': 'the memory is used up'}
  except RecursionError:
    return {'exhausted': 'it is nested too deeply'}
  except Exception:
    return {'error': traceback.format_exc()}


def allow_cpu(seconds: float) -> None:
  """So many processor seconds from now on, in whole ones.

  For a function, too, whose work depends on what is judged in part alone.
  """
  usage = resource.getrusage(resource.RUSAGE_SELF)
  used = usage.ru_utime + usage.ru_stime
  _limit(resource.RLIMIT_CPU, math.ceil(used + seconds))


def _limit(what: int, amount: int) -> None:
  hard = resource.getrlimit(what)[1]
  if hard != resource.RLIM_INFINITY:
    amount = min(amount, hard)
  resource.setrlimit(what, (amount, hard))


if __name__ == '__main__':
  main()
