"""The quickstart's vocabulary: a SentencePiece model of arithmetic text.

Floor 1, text/. A model that is trained from scratch in minutes wants a tiny
vocabulary: one piece a digit, so that numbers are read place by place, one
piece a tag, so that a turn's glue costs few tokens, and bytes for everything
else, so that any text encodes. `python -m agentjax.text.train_vocab PATH`
writes it; the copy in `data/arithmetic.model` was written so, and a test
trains it again and compares.
"""

from __future__ import annotations

import io
import pathlib
import sys
from importlib import resources

import sentencepiece

TAGS = (
  '<calc>',
  '</calc>',
  '<result>',
  '</result>',
  '<answer>',
  '</answer>',
)


def arithmetic_text() -> list[str]:
  """Lines in which every character of the task occurs, equally often."""
  digits = '0123456789'
  return [f'{d}{d}+(-{d}*{d})/{d}.{d}= {d}' for d in digits]


def train() -> bytes:
  """The serialized model: pad, bos, eos, unk, six tags, bytes, characters.

  Deterministic. Nothing is normalised and no space is put in front, so that
  decoding gives back every text.
  """
  out = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(arithmetic_text()),
    model_writer=out,
    model_type='char',
    vocab_size=512,
    hard_vocab_limit=False,
    character_coverage=1.0,
    byte_fallback=True,
    normalization_rule_name='identity',
    add_dummy_prefix=False,
    remove_extra_whitespaces=False,
    user_defined_symbols=list(TAGS),
    pad_id=0,
    bos_id=1,
    eos_id=2,
    unk_id=3,
    num_threads=1,
    minloglevel=2,
  )
  return out.getvalue()


def arithmetic_model() -> pathlib.Path:
  """Where the shipped model lies, for `vocab.load_sentencepiece`."""
  return pathlib.Path(
    str(resources.files('agentjax.text') / 'data' / 'arithmetic.model')
  )


if __name__ == '__main__':
  if len(sys.argv) != 2:
    sys.exit('usage: python -m agentjax.text.train_vocab PATH')
  pathlib.Path(sys.argv[1]).write_bytes(train())
