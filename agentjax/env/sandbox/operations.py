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

from agentjax import sandbox_record
from agentjax.env.base import InfraError
from agentjax.env.sandbox import spec as spec_module
from agentjax.env.sandbox.snapshot import Entry, Snapshot
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
  if name == 'put_tar':
    return sandbox.put_tar(**request)
  if name == 'get_tar':
    return sandbox.get_tar(**request)
  if name == 'snapshot':
    return sandbox.snapshot(**request)
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
  if isinstance(result, Snapshot):
    return {
      'workdir': result.workdir,
      'entries': [dataclasses.astuple(entry) for entry in result.entries],
      'tar': result.tar,
      'refused': _pairs(result.refused),
    }
  data, refused = result  # of get_tar
  return {'data': data, 'refused': _pairs(refused)}


def from_json(name: str, data: Any, duration_s: float) -> Any:
  """Inverse of `to_json` for the result of the operation `name`."""
  if name == 'get':
    return Fetched(dict(data['files']), dict(data['refused']))
  if name == 'get_tar':
    return data['data'], dict(data['refused'])
  if name == 'snapshot':
    return snapshot_from_json(data)
  if name in ('call', 'put', 'put_tar', 'session.run'):
    known = data | {
      'status': CallStatus(data['status']),
      'truncated': tuple(data['truncated']),
    }
    return CallResult(duration_s=duration_s, **known)
  return data


def snapshot_from_json(data: Any) -> Snapshot:
  """Inverse of `to_json`."""
  entries = tuple(Entry(*entry) for entry in data['entries'])
  return Snapshot(data['workdir'], entries, data['tar'], dict(data['refused']))


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
  was: Any, now: Any, blobs: Mapping[str, bytes]
) -> Iterator[tuple[str, str, str]]:
  """(field, expected, got) of each field that differs, in short.

  Args:
    was, now: packed requests or results. blobs: of both, to be shown.
  """
  for field in sorted({*was, *now} - set(_NOT_COMPARED)):
    a, b = was.get(field), now.get(field)
    if a != b:
      yield field, *_short(_shown(a, blobs), _shown(b, blobs))


def _shown(value: Any, blobs: Mapping[str, bytes]) -> Any:
  """What a person can read of a packed value."""
  try:
    value = sandbox_record.unpack(value, blobs)
  except sandbox_record.NotKept as error:
    return str(error)
  return value.decode('utf-8', 'replace') if isinstance(value, bytes) else value


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
