"""The vocabulary inside a GGUF model file.

Floor 1, text/, beside `vocab.py`, which it stands on. A GGUF file carries the
tokens of its model but not their tokenizer; it is rebuilt here for the
library that defines it, so that no tokenizer is written anew: byte-level BPE
as a description for `tokenizers`, 'llama' vocabularies as a SentencePiece
model. This file knows nothing of the weights in the same file.
"""

from __future__ import annotations

import os
from typing import Any

from agentjax.text import vocab

# How byte-level vocabularies cut text before merging, by the name under which
# GGUF files carry it: the pattern (None: GPT-2's own), digits one by one,
# unicode normalisation, and whether whole pieces win over merges.
_LLAMA3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
  r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_QWEN2 = _LLAMA3.replace(r'\p{N}{1,3}', r'\p{N}')
_PRE = {
  'gpt-2': (None, False, None, False),
  'smollm': (None, True, None, False),
  'llama-bpe': (_LLAMA3, False, None, True),
  'qwen2': (_QWEN2, False, 'NFC', False),
}


def load_gguf(path: str | os.PathLike) -> vocab.Vocab:
  """Reads the vocabulary that a GGUF model file carries.

  Byte-level BPE ('gpt2') and SentencePiece ('llama') vocabularies are rebuilt
  for the libraries that define them.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is not a whole GGUF file, or its vocabulary is of a kind
      that is not known here.
  """
  import gguf

  if not os.path.isfile(path):
    raise FileNotFoundError(
      f'no GGUF file at {path}: give the path of the file itself'
    )
  try:
    reader = gguf.GGUFReader(os.fspath(path))
    fields = {
      key.removeprefix('tokenizer.ggml.'): field.contents()
      for key, field in reader.fields.items()
      if key.startswith('tokenizer.ggml.')
    }
    kind, _ = fields['model'], fields['tokens']
  except Exception as e:  # the reader indexes into a file of any content
    raise vocab.foreign(path, 'GGUF file with a vocabulary', repr(e)) from e
  if kind == 'gpt2':
    return _gguf_bpe(fields, path)
  if kind == 'llama':
    return _gguf_sentencepiece(fields, path)
  raise ValueError(
    f'{path} carries a vocabulary of kind {kind!r}, known are gpt2 and llama: '
    'load the tokenizer.json that belongs to the model'
  )


def _gguf_bpe(fields: dict[str, Any], path) -> vocab.Vocab:
  pre = fields.get('pre', 'gpt-2')
  if pre not in _PRE:
    raise ValueError(
      f'{path} cuts text by {pre!r}, known are {sorted(_PRE)}: load the '
      'tokenizer.json that belongs to the model'
    )
  pattern, digits, normal_form, whole_first = _PRE[pre]
  byte_level = {
    'type': 'ByteLevel',
    'add_prefix_space': False,
    'trim_offsets': True,
    'use_regex': pattern is None,
  }
  cuts = [byte_level]
  if digits:
    cuts.insert(0, {'type': 'Digits', 'individual_digits': True})
  if pattern:
    split = {'type': 'Split', 'pattern': {'Regex': pattern}}
    cuts.insert(0, {**split, 'behavior': 'Isolated', 'invert': False})
  tokens, kinds = fields['tokens'], fields['token_type']
  plain = {'single_word': False, 'lstrip': False, 'rstrip': False}
  spec = {
    'version': '1.0',
    'added_tokens': [
      {
        'id': i,
        'content': t,
        'normalized': False,
        'special': kind == vocab.CONTROL,
      }
      | plain
      for i, (t, kind) in enumerate(zip(tokens, kinds, strict=True))
      if kind in (vocab.CONTROL, vocab.USER_DEFINED)
    ],
    'normalizer': {'type': normal_form} if normal_form else None,
    'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': cuts},
    'decoder': byte_level,
    'model': {
      'type': 'BPE',
      'vocab': {t: i for i, t in enumerate(tokens)},
      'merges': list(fields['merges']),
      'ignore_merges': whole_first,
    },
  }
  eos = [int(fields[k]) for k in _EOS_KEYS if k in fields]
  names = tuple(dict.fromkeys(tokens[i] for i in eos))
  bos = fields.get('bos_token_id')
  try:
    return vocab.from_spec(
      spec, names, None if bos is None else tokens[int(bos)]
    )
  except Exception as e:  # the Rust library raises bare Exceptions
    raise vocab.foreign(path, 'GGUF vocabulary', e) from e


_EOS_KEYS = ('eos_token_id', 'eot_token_id', 'eom_token_id')


def _gguf_sentencepiece(fields: dict[str, Any], path) -> vocab.Vocab:
  from sentencepiece import sentencepiece_model_pb2

  proto = sentencepiece_model_pb2.ModelProto()
  columns = (fields['tokens'], fields['scores'], fields['token_type'])
  for token, score, kind in zip(*columns, strict=True):
    piece = proto.pieces.add()
    piece.piece, piece.score, piece.type = token, float(score), int(kind)
  trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
  trainer.model_type = trainer.BPE
  trainer.byte_fallback = vocab.BYTE in fields['token_type']
  for name in ('unk', 'bos', 'eos', 'pad'):
    key = {'unk': 'unknown', 'pad': 'padding'}.get(name, name) + '_token_id'
    i = int(fields.get(key, -1))
    setattr(trainer, f'{name}_id', i)
    if i >= 0:
      setattr(trainer, f'{name}_piece', fields['tokens'][i])
  normalizer.name = 'identity'
  normalizer.remove_extra_whitespaces = False
  normalizer.escape_whitespaces = True
  return vocab.from_proto(proto, path)
