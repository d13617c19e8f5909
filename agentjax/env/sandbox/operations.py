"""What a sandbox is asked for, as data: operations by name, and back.

Floor 1, env/sandbox, under `replay`. Each method of `Sandbox` and of `Session`
is one operation: its arguments as a request, its result as JSON, and
`perform`, which asks a sandbox for it. Contents stay bytes and text here;
`sandbox_record.pack` makes references of them. Nothing here records or serves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentjax.env.base import InfraError
from agentjax.env.sandbox import spec as spec_module
from agentjax.env.sandbox.spec import (
  Call,
  CallResult,
  CallStatus,
  Fetched,
  Sandbox,
  Session,
)

_SHOWN = 60  # characters around the place where two texts part


# ---- requests ---------------------------------------------------------------


def call(call: Call) -> dict[str, Any]:
  # As it goes over the wire: lone surrogates are replaced there too.
  code = call.code
  if code is not None:
    code = code.encode('utf-8', 'replace').decode()
  return {
    'argv': None if call.argv is None else list(call.argv),
    'code': code,
    'stdin': call.stdin,
    'timeout_s': call.timeout_s,
  }


def put(files: Mapping[str, bytes], mode: int) -> dict[str, Any]:
  return {'files': _pairs(files), 'mode': mode}


def get(paths: Sequence[str], max_bytes: int) -> dict[str, Any]:
  return {'paths': list(paths), 'max_bytes': max_bytes}


def session_run(number: int, text: str, timeout_s: float) -> dict[str, Any]:
  text = text.encode('utf-8', 'replace').decode()
  return {'session': number, 'text': text, 'timeout_s': timeout_s}


def perform(
  sandbox: Sandbox, sessions: list[Session], name: str, request: Any
) -> Any:
  """Asks `sandbox` for a recorded operation; what it returns.

  `sessions`: what operations before have opened; a new one is added.
  """
  if name == 'call':
    return sandbox.call(Call(**request))
  if name == 'session':
    sessions.append(sandbox.session(**request))
    return None
  if name == 'session.run':
    number = request['session']
    return sessions[number].run(request['text'], request['timeout_s'])
  if name == 'session.close':
    return sessions[request['session']].close()
  if name == 'put':
    return sandbox.put(dict(request['files']), request['mode'])
  if name == 'get':
    return sandbox.get(**request)
  raise ValueError(f'no such operation: {name!r}')


# ---- results ----------------------------------------------------------------


def to_json(result: Any) -> Any:
  """What an operation returned, without its duration."""
  if isinstance(result, CallResult):
    data = dataclasses.asdict(result)
    del data['duration_s']
    return data | {'status': result.status.value}
  if isinstance(result, Fetched):
    return {'files': _pairs(result.files), 'refused': _pairs(result.refused)}
  raise TypeError(f'a sandbox returned {result!r}')


def from_json(name: str, data: Any, duration_s: float) -> Any:
  """Inverse of `to_json` for the result of the operation `name`."""
  if name == 'get':
    return Fetched(dict(data['files']), dict(data['refused']))
  if name not in ('call', 'put', 'session.run'):
    return data
  known = data | {
    'status': CallStatus(data['status']),
    'truncated': tuple(data['truncated']),
  }
  return CallResult(duration_s=duration_s, **known)


def raised(kind: str, text: str) -> Exception:
  """What a recorded operation raised, as the same class where it is ours."""
  found = getattr(spec_module, kind, None)
  ours = (InfraError, spec_module.SandboxBug)
  if isinstance(found, type) and issubclass(found, ours):
    return found(text)
  return InfraError(f'{kind}: {text}')


# ---- two of them beside one another ----------------------------------------

# Beside the duration, which is no part of a result here.
_NOT_COMPARED = ('reaped',)


def differences(
  was: Any, now: Any, show: Any = lambda value: value
) -> Iterator[tuple[str, str, str]]:
  """(field, expected, got) of each top field that differs, in short.

  Args:
    show: what there is to see of a field's value, such as a blob's contents.
  """
  if not (isinstance(was, Mapping) and isinstance(now, Mapping)):
    if was != now:
      yield 'result', *_short(show(was), show(now))
    return
  for field in sorted({*was, *now} - set(_NOT_COMPARED)):
    a, b = was.get(field), now.get(field)
    if a != b:
      yield field, *_short(show(a), show(b))


def _short(a: Any, b: Any) -> tuple[str, str]:
  """Both as text, from a little before the place where they part."""
  both = [v if isinstance(v, str) else repr(v) for v in (a, b)]
  at = next(
    (i for i, (x, y) in enumerate(zip(*both, strict=False)) if x != y),
    min(map(len, both)),
  )
  start = max(0, at - _SHOWN // 3)
  cut = [text[start : start + _SHOWN] for text in both]
  if not isinstance(a, str) and not isinstance(b, str):
    return cut[0], cut[1]
  return repr(cut[0]), repr(cut[1])


def _pairs(mapping: Mapping[str, Any]) -> list[list[Any]]:
  return [[key, value] for key, value in mapping.items()]
