"""What passed between an episode and one sandbox, as a value.

Floor 0, beside `types`: a trajectory carries these, `recorder` writes them, and
`env.sandbox.replay` makes and serves them. It knows no sandbox and opens no
file.

Requests and results are JSON-able. Bytes, and text longer than `INLINE`, stand
in them as a reference to a blob, which is named by its SHA-256 and so kept
once; short text stays where a person reads it. Mappings that a caller fills
(files by path) are lists of pairs, so that no name of theirs is taken for a
reference.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

SCHEMA_VERSION = 1
INLINE = 1024  # characters of text that need no blob
_BYTES, _TEXT = '$bytes', '$text'
_SURROGATE = re.compile('[\ud800-\udfff]').search


class NotKept(KeyError):
  """A blob was over the bound of its record: its hash alone is there."""

  def __str__(self) -> str:
    return self.args[0]


@dataclasses.dataclass(frozen=True)
class Operation:
  """One request, and what came of it.

  Attributes:
    name: 'call', 'put', 'session.run' and the like.
    chain: of the spec, all requests before and this one; see `link`.
    result: None where it raised, or has not come back.
    error: kind and text of what was raised.
    duration_s: by the host's clock; for information, never compared.
  """

  name: str
  request: Any
  chain: str
  result: Any = None
  error: tuple[str, str] | None = None
  duration_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class SandboxRecord:
  """All that was asked of a sandbox, in order.

  Attributes:
    spec: its limits, by name. facts: what the backend said of itself (engine,
      image and its digest, Python); for information, never compared.
    blobs: contents by SHA-256. One that is referred to and not here was over
      the bound.
  """

  spec: Mapping[str, Any]
  facts: Mapping[str, Any]
  operations: tuple[Operation, ...] = ()
  blobs: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


# ---- the chain --------------------------------------------------------------


def first_link(spec: Mapping[str, Any]) -> str:
  """The chain of a sandbox of which nothing has been asked yet."""
  return _hash(_canonical([SCHEMA_VERSION, spec]).encode())


def link(chain: str, name: str, request: Any) -> str:
  """The chain after one more request: equal if and only if all are."""
  return _hash(f'{chain} {_canonical([name, request])}'.encode())


# ---- blobs ------------------------------------------------------------------


class Blobs:
  """Takes contents in the order in which they come, up to a bound in all."""

  def __init__(self, max_bytes: int):
    self.kept: dict[str, bytes] = {}
    self._left = max_bytes

  def add(self, data: bytes) -> str:
    """The name of `data`, which is kept if there is still room for it."""
    name = _hash(data)
    if name not in self.kept and len(data) <= self._left:
      self.kept[name] = data
      self._left -= len(data)
    return name


def pack(value: Any, add: Callable[[bytes], str]) -> Any:
  """`value` as JSON, its bytes and long texts given to `add`."""
  if isinstance(value, (bytes, bytearray, memoryview)):
    data = bytes(value)
    return {_BYTES: add(data), 'size': len(data)}
  if isinstance(value, str):
    # Two lone surrogates would come back from JSON as one character.
    if len(value) <= INLINE and (value.isascii() or not _SURROGATE(value)):
      return value
    data = value.encode('utf-8', 'surrogatepass')
    return {_TEXT: add(data), 'size': len(data)}
  if isinstance(value, Mapping):
    return {key: pack(inner, add) for key, inner in value.items()}
  if isinstance(value, (list, tuple)):
    return [pack(inner, add) for inner in value]
  return value


def unpack(value: Any, blobs: Mapping[str, bytes]) -> Any:
  """Inverse of `pack`; tuples come back as lists.

  Raises:
    NotKept: a blob is not among `blobs`.
  """
  if isinstance(value, Mapping):
    for kind in (_BYTES, _TEXT):
      if kind in value:
        name, size = value[kind], value['size']
        if name not in blobs:
          raise NotKept(
            f'{size} bytes with SHA-256 {name[:12]} were over the bound of '
            'the record: record with a larger max_bytes'
          )
        data = blobs[name]
        return data.decode('utf-8', 'surrogatepass') if kind == _TEXT else data
    return {key: unpack(inner, blobs) for key, inner in value.items()}
  if isinstance(value, (list, tuple)):
    return [unpack(inner, blobs) for inner in value]
  return value


# ---- as it stands on disk ---------------------------------------------------


def to_json(record: SandboxRecord) -> dict[str, Any]:
  """Everything but the blobs, which are to be written beside it."""
  return {
    'schema': SCHEMA_VERSION,
    'spec': dict(record.spec),
    'facts': dict(record.facts),
    'blobs': sorted(record.blobs),
    'operations': [dataclasses.asdict(o) for o in record.operations],
  }


def from_json(
  data: Mapping[str, Any], blobs: Mapping[str, bytes]
) -> SandboxRecord:
  """Inverse of `to_json`; `blobs` may hold those of other records too.

  Raises:
    ValueError: another schema version, a chain that does not fit its requests,
      or a blob that is missing or not what its name says.
  """
  if data.get('schema') != SCHEMA_VERSION:
    raise ValueError(
      f'sandbox record has schema version {data.get("schema")!r}, this code '
      f'reads {SCHEMA_VERSION}: read it with the release that wrote it'
    )
  operations, chain = [], first_link(data['spec'])
  for i, row in enumerate(data['operations']):
    error = row['error']
    operation = Operation(
      **{**row, 'error': None if error is None else tuple(error)}
    )
    chain = link(chain, operation.name, operation.request)
    if chain != operation.chain:
      raise ValueError(f'request {i} of a sandbox record was changed')
    operations.append(operation)
  if missing := sorted(set(data['blobs']) - set(blobs)):
    raise ValueError(f'the contents of blobs {missing} are missing')
  mine = {name: blobs[name] for name in data['blobs']}
  for name, content in mine.items():
    if _hash(content) != name:
      raise ValueError(f'the contents of blob {name} were changed')
  return SandboxRecord(data['spec'], data['facts'], tuple(operations), mine)


def _canonical(value: Any) -> str:
  return json.dumps(value, sort_keys=True, separators=(',', ':'))


def _hash(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()
