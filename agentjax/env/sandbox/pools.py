"""The pools of a process: one for each kind of sandbox that its episodes use.

Floor 1, env/sandbox, above `pool.py`. Environments are made anew for every
episode and ask here for the pool that they share; the run reads the numbers
of all, and closes them at its end.
"""

from __future__ import annotations

import operator
import threading

from agentjax.env.sandbox import owner
from agentjax.env.sandbox.pool import Pool
from agentjax.env.sandbox.spec import SandboxSpec

_shared: dict[tuple[str, str, int], Pool] = {}
_shared_lock = threading.Lock()


def shared(spec: SandboxSpec | None, backend: str, warm: int) -> Pool:
  """The pool of this process for these arguments; made at the first call."""
  spec = spec or SandboxSpec()
  key = owner.spec_hash(spec), backend, warm
  with _shared_lock:
    if key not in _shared:
      _shared[key] = Pool(spec, backend, warm=warm)
    return _shared[key]


def metrics() -> dict[str, float]:
  """Of the shared pools together, by name; empty if there are none.

  Of times the largest, else the sums.
  """
  with _shared_lock:
    pools = list(_shared.values())
  out: dict[str, float] = {}
  for pool in pools:
    for name, value in pool.stats().metrics().items():
      join = max if name.endswith('_s') else operator.add
      out[name] = join(out.get(name, 0), value)
  return out


def close() -> None:
  """Closes them; who asks for one afterwards gets a new one."""
  with _shared_lock:
    pools = list(_shared.values())
    _shared.clear()
  for pool in pools:
    pool.close()
