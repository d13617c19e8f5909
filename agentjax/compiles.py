"""Counts XLA compilations, so that a steady state can be shown to have none.

Floor 0. Every program that the process compiles, or loads from the persistent
cache, counts: both stall a step.
"""

from __future__ import annotations

import jax

_EVENT = '/jax/core/compile/backend_compile_duration'
_count = 0


def _listen(event: str, seconds: float, **unused) -> None:
  global _count
  if event == _EVENT:
    _count += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def count() -> int:
  """Programs compiled by this process since this module was imported."""
  return _count
