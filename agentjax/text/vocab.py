"""Vocabularies: text to token ids and back, one protocol over three sources.

Floor 1, text/. Everything above speaks to a `Vocab`; where it was read from
(a SentencePiece model or a Hugging Face tokenizer.json here, a GGUF file in
`vocab_gguf.py`) is decided once, by the loader that is called. This file
knows no chat format: it turns text into ids of text, and nothing that an
environment or a user writes can become a special id here (only `chat.py`
places those, by name).

Token ids are appended and never re-encoded (design promise 1), so text is
encoded in runs that stand in the middle of a sequence. Options of a tokenizer
that only make sense at the start of a text (a dummy space, an automatic BOS)
or that change lengths (truncation, padding) are therefore switched off.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

_REPLACEMENT = '\ufffd'.encode()


class Vocab(Protocol):
  """Token ids and their text. Immutable; safe to use from many threads.

  Attributes:
    size: ids below it have text; the rows of a padded model above it do not.
    special: special tokens by name. No text encodes to one of them.
    eos_ids: ids that end a text, the usual one first.
    bos_id: id that begins a text, or None.
  """

  size: int
  special: Mapping[str, int]
  eos_ids: tuple[int, ...]
  bos_id: int | None

  def encode(self, text: str) -> np.ndarray:
    """int32[n], never a special id. Lone surrogates read as U+FFFD."""

  def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
    """Text of `ids`; total.

    Special tokens are left out unless `keep_special`. Invalid UTF-8, and ids
    outside of the vocabulary, become U+FFFD.
    """

  def token_bytes(self, id: int) -> bytes:
    """The bytes that `id` adds to a text; b'' for special tokens.

    Raises:
      ValueError: `id` is outside of the vocabulary.
    """


class _Vocab:
  """Ids as a table of bytes and one function that encodes clean text."""

  def __init__(
    self,
    encode: Callable[[str], Sequence[int]],
    table: Sequence[bytes],
    special: Mapping[str, int],
    eos_ids: tuple[int, ...],
    bos_id: int | None,
  ):
    self._encode = encode
    self._table = tuple(table)
    self._names = {i: name for name, i in special.items()}
    self._is_special = np.zeros(len(table), bool)
    self._is_special[list(self._names)] = True
    self.size = len(table)
    self.special = dict(special)
    self.eos_ids = eos_ids
    self.bos_id = bos_id

  def encode(self, text: str) -> np.ndarray:
    ids = np.asarray(self._encode(_clean(text)), np.int32)
    # The libraries are set up to keep special tokens out of text; this holds
    # the promise for vocabularies that reach one of them by a merge.
    return ids[~self._is_special[ids]]

  def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
    parts = []
    for i in map(int, ids):
      if not 0 <= i < self.size:
        parts.append(_REPLACEMENT)
      elif i in self._names:
        parts.append(self._names[i].encode() if keep_special else b'')
      else:
        parts.append(self._table[i])
    return b''.join(parts).decode('utf-8', 'replace')

  def token_bytes(self, id: int) -> bytes:
    if not 0 <= id < self.size:
      raise ValueError(
        f'token id {id} is outside of the vocabulary of {self.size} ids'
      )
    return self._table[id]


def _clean(text: str) -> str:
  """Valid unicode: surrogate pairs are joined, lone ones become U+FFFD."""
  try:
    text.encode()
    return text
  except UnicodeEncodeError:
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


def _read(path: str | os.PathLike) -> bytes:
  """Bytes of a local path, or of a path object of another file system."""
  opened = pathlib.Path(path) if isinstance(path, str) else path
  try:
    return opened.read_bytes()
  except (FileNotFoundError, IsADirectoryError) as e:
    raise FileNotFoundError(
      f'no vocabulary file at {path}: give the path of the file itself'
    ) from e


# ---- bytes ----------------------------------------------------------------


def byte_vocab(
  special: Sequence[str] = ('<|endoftext|>', '<|im_start|>', '<|im_end|>'),
) -> Vocab:
  """An id for each byte and, behind them, the special tokens: no file needed.

  The first of `special` ends a text.
  """
  table = [bytes([i]) for i in range(256)] + [b''] * len(special)
  names = {name: 256 + i for i, name in enumerate(special)}
  return _Vocab(lambda text: list(text.encode()), table, names, (256,), None)


# ---- SentencePiece --------------------------------------------------------

# Types of a piece, in SentencePiece models and in GGUF files alike.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6


# Turn markers that some public models ship as user-defined pieces: left so,
# anybody's text could open a turn.
TURN_MARKERS = ('<start_of_turn>', '<end_of_turn>')


def load_sentencepiece(
  path: str | os.PathLike, special: Sequence[str] = TURN_MARKERS
) -> Vocab:
  """Reads a SentencePiece model file (.model).

  User-defined pieces are text, except for those in `special`; control pieces
  (BOS, EOS, padding) are special. The dummy space in front of every text is
  switched off.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is not a whole SentencePiece model.
  """
  from google.protobuf.message import DecodeError
  from sentencepiece import sentencepiece_model_pb2

  data = _read(path)
  proto = sentencepiece_model_pb2.ModelProto()
  try:
    proto.ParseFromString(data)
  except DecodeError as e:
    raise foreign(path, 'SentencePiece model', e) from e
  for piece in proto.pieces:
    if piece.type == USER_DEFINED and piece.piece in special:
      piece.type = CONTROL
  return from_proto(proto, path)


def from_proto(proto, path: str | os.PathLike) -> Vocab:
  import sentencepiece

  proto.normalizer_spec.add_dummy_prefix = False
  try:
    processor = sentencepiece.SentencePieceProcessor(
      model_proto=proto.SerializeToString()
    )
    n = processor.get_piece_size()
  except RuntimeError as e:
    raise foreign(path, 'SentencePiece model', e) from e
  if n == 0:
    raise foreign(path, 'SentencePiece model', 'it holds no pieces')
  table, special = [], {}
  for i, piece in enumerate(proto.pieces):
    if piece.type in (CONTROL, UNUSED):
      special[piece.piece] = i
      table.append(b'')
    elif piece.type == BYTE:
      table.append(_byte_piece(piece.piece))
    elif piece.type == UNKNOWN:
      table.append(_REPLACEMENT)
    else:
      table.append(piece.piece.replace('\u2581', ' ').encode())
  eos, bos = processor.eos_id(), processor.bos_id()
  eos_ids = tuple(i for i in (eos, special.get('<end_of_turn>', -1)) if i >= 0)
  return _Vocab(
    processor.encode, table, special, eos_ids, bos if bos >= 0 else None
  )


def _byte_piece(piece: str) -> bytes:
  return bytes([int(piece[3:5], 16)])


def foreign(path, kind: str, reason) -> ValueError:
  return ValueError(
    f'{path} is not a whole {kind} ({reason}): fetch the file again, or use '
    'the loader of its own kind (vocab.load_sentencepiece, '
    'vocab.load_tokenizer_json, vocab_gguf.load_gguf)'
  )


# ---- Hugging Face tokenizer.json ------------------------------------------


def load_tokenizer_json(
  path: str | os.PathLike,
  eos: Sequence[str] = (),
  bos: str | None = None,
) -> Vocab:
  """Reads a tokenizer.json of the library `tokenizers`.

  That file does not say which token ends or begins a text: `eos` and `bos`
  name them. Where `eos` is empty, the special tokens that are known to end a
  text or a turn in public models are taken.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is not a whole tokenizer.json, or has no token of a name
      that was given.
  """
  data = _read(path)
  try:
    spec = json.loads(data)
    return from_spec(spec, tuple(eos), bos)
  except Unnamed as e:
    raise ValueError(f'{path} {e}') from e
  except Exception as e:  # the Rust library raises bare Exceptions
    raise foreign(path, 'tokenizer.json', e) from e


class Unnamed(Exception):
  """A special token that the caller named is not in the file."""


_KNOWN_EOS = (
  '<|im_end|>',
  '<|eot_id|>',
  '<|eom_id|>',
  '<end_of_turn>',
  '<|end_of_text|>',
  '<|endoftext|>',
  '<eos>',
  '</s>',
)
_KNOWN_BOS = ('<|begin_of_text|>', '<bos>', '<s>')


def from_spec(
  spec: dict[str, Any], eos: tuple[str, ...], bos: str | None
) -> Vocab:
  """Builds the vocabulary that a parsed tokenizer.json describes."""
  from tokenizers import Tokenizer

  spec = _appendable(spec)
  tokenizer = Tokenizer.from_str(json.dumps(spec))
  tokenizer.encode_special_tokens = True  # their names in a text are text

  added = {t['id']: t for t in spec.get('added_tokens') or ()}
  special = {t['content']: i for i, t in added.items() if t['special']}
  text = json.dumps([spec.get('pre_tokenizer'), spec.get('decoder')])
  byte_level = '"ByteLevel"' in text
  unk = spec['model'].get('unk_token')
  if unk and not byte_level and not spec['model'].get('byte_fallback'):
    special.pop(unk, None)  # text can reach it, so it stands for text

  vocab = tokenizer.get_vocab(with_added_tokens=True)
  table = [b''] * (max(vocab.values()) + 1)
  for token, i in vocab.items():
    if i in added:
      table[i] = b'' if token in special else token.encode()
    else:
      table[i] = _piece_bytes(token, byte_level)
    if token == unk and token not in special:
      table[i] = _REPLACEMENT

  for name in (*eos, *([bos] if bos else ())):
    if name not in special:
      raise Unnamed(
        f'has no special token {name!r}: it has {sorted(special)[:20]}'
      )
  names = eos or [n for n in _KNOWN_EOS if n in special]
  bos = bos or next((n for n in _KNOWN_BOS if n in special), None)
  return _Vocab(
    lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
    table,
    special,
    tuple(special[n] for n in names),
    special[bos] if bos else None,
  )


def _appendable(spec: dict[str, Any]) -> dict[str, Any]:
  """`spec` without what a run in the middle of a sequence must not have."""
  spec = dict(spec, truncation=None, padding=None, post_processor=None)
  for part in ('normalizer', 'pre_tokenizer'):
    spec[part] = _without_prefix(spec.get(part))
  return spec


def _without_prefix(node):
  if not node:
    return node
  node = dict(node)
  for steps in ('normalizers', 'pretokenizers'):
    if steps in node:
      kept = [_without_prefix(n) for n in node[steps]]
      node[steps] = [n for n in kept if n]
  if node.get('type') == 'Prepend':
    return None
  if 'add_prefix_space' in node:
    node['add_prefix_space'] = False
  if 'prepend_scheme' in node:
    node['prepend_scheme'] = 'never'
  return node


def _byte_alphabet() -> dict[str, int]:
  """The characters under which byte-level BPE writes the 256 bytes.

  Printable bytes of Latin-1 stand for themselves, the others for the
  characters from U+0100 on, in order.
  """
  own = [*range(33, 127), *range(161, 173), *range(174, 256)]
  moved = [b for b in range(256) if b not in own]
  return {chr(b): b for b in own} | {
    chr(256 + k): b for k, b in enumerate(moved)
  }


_ALPHABET = _byte_alphabet()
_BYTE_PIECE = re.compile(r'<0x[0-9A-Fa-f]{2}>')


def _piece_bytes(token: str, byte_level: bool) -> bytes:
  if byte_level and all(c in _ALPHABET for c in token):
    return bytes(_ALPHABET[c] for c in token)
  if not byte_level and _BYTE_PIECE.fullmatch(token):
    return _byte_piece(token)
  return token.replace('\u2581', ' ').encode()
