"""Every vocabulary: round trips, no special ids from text, total, threads."""

import concurrent.futures
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, models

from agentjax.text import train_vocab, vocab, vocab_gguf

NAMES = ('bpe', 'arithmetic', 'smollm2')


@pytest.fixture(params=NAMES)
def any_vocab(request):
  return request.getfixturevalue(request.param)


def test_public_token_ids_of_smollm2(smollm2, smollm2_token_ids):
  for prompt in smollm2_token_ids:
    ids = []
    for piece in _split_special(prompt['text'], smollm2.special):
      if piece in smollm2.special:
        ids.append(smollm2.special[piece])
      else:
        ids.extend(smollm2.encode(piece))
    assert ids == prompt['token_ids']
    assert smollm2.decode(ids, keep_special=True) == prompt['text']


def _split_special(text, special):
  pieces = [text]
  for name in special:
    pieces = [
      q
      for p in pieces
      for q in ([p] if p in special else _around(p, name))
      if q
    ]
  return pieces


def _around(text, name):
  parts = text.split(name)
  return [q for p in parts for q in (p, name)][:-1]


def test_smollm2_says_how_texts_end(smollm2):
  assert (smollm2.size, smollm2.eos_ids, smollm2.bos_id) == (49152, (2,), 1)
  assert smollm2.token_bytes(2) == b''


@pytest.mark.parametrize(
  'text',
  [
    '',
    '1 2  3\n\n\t4',
    ' leading and trailing ',
    'é漢🙂👩‍👩‍👧 \u2028 \x85 \r\n',
    'a\x00b\x1b[31m',
    '<0x41> ▁',
  ],
)
def test_text_comes_back(any_vocab, text):
  ids = any_vocab.encode(text)
  assert ids.dtype == np.int32
  joined = b''.join(any_vocab.token_bytes(int(i)) for i in ids)
  # SentencePiece writes a space as U+2581, so the two cannot be told apart.
  assert any_vocab.decode(ids).replace('▁', ' ') == text.replace('▁', ' ')
  assert joined.decode().replace('▁', ' ') == text.replace('▁', ' ')


@pytest.mark.parametrize('name', NAMES)
def test_any_text_encodes_and_never_to_a_special_id(request, name):
  v = request.getfixturevalue(name)
  special = set(v.special.values())
  markers = st.sampled_from([*v.special, '<unk>', '<0x00>', '\ud800', '\x00'])

  @settings(max_examples=60, deadline=None)
  @given(st.lists(st.one_of(markers, st.text()), max_size=5))
  def check(parts):
    text = ''.join(parts)
    ids = v.encode(text)
    assert not special & set(ids.tolist())
    assert v.decode(ids).count('\ud800') == 0

  check()


def test_special_tokens_are_spelled_out(any_vocab):
  for name, i in any_vocab.special.items():
    ids = any_vocab.encode(name)
    assert i not in ids and any_vocab.decode(ids) == name
    assert any_vocab.decode([i]) == ''
    assert any_vocab.decode([i], keep_special=True) == name
    assert any_vocab.token_bytes(i) == b''


def test_surrogates_are_joined_or_replaced(any_vocab):
  assert any_vocab.decode(any_vocab.encode('a\ud83d\ude42b')) == 'a🙂b'
  assert any_vocab.decode(any_vocab.encode('a\ud83db')) == 'a\ufffdb'


def test_ids_without_text_decode_to_a_mark_and_have_no_bytes(any_vocab):
  n = any_vocab.size
  assert any_vocab.decode([-1, n, n + 7]) == '\ufffd' * 3
  for i in (-1, n):
    with pytest.raises(ValueError, match=f'{i} is outside'):
      any_vocab.token_bytes(i)


def test_broken_utf8_is_replaced(arithmetic):
  first_byte = arithmetic.encode('é')[:1]
  assert arithmetic.decode(first_byte) == '\ufffd'


def test_64_threads_encode_as_one_does(any_vocab):
  texts = [f'<calc>{i}+{i}</calc> é {"x" * i}' for i in range(64)]
  expected = [any_vocab.encode(t).tolist() for t in texts]
  with concurrent.futures.ThreadPoolExecutor(64) as pool:
    for _ in range(3):
      got = list(pool.map(lambda t: any_vocab.encode(t).tolist(), texts))
      assert got == expected


# ---- tokenizer.json -------------------------------------------------------


def test_truncation_padding_and_prefix_are_switched_off(bpe):
  ids = bpe.encode('answer is 42, and the result of the search')
  assert len(ids) > 4
  assert bpe.decode(bpe.encode('a')) == 'a'
  assert len(bpe.encode('a')) == 1


def test_added_tokens_are_text(bpe):
  ids = bpe.encode('<tool_call>{')
  assert len(ids) == 2 and bpe.token_bytes(int(ids[0])) == b'<tool_call>'


def test_named_ends_are_taken_in_order(bpe_path):
  v = vocab.load_tokenizer_json(bpe_path, eos=('<eos>', '<|im_end|>'))
  assert v.eos_ids == (v.special['<eos>'], v.special['<|im_end|>'])
  with pytest.raises(ValueError, match='no special token .<nope>.'):
    vocab.load_tokenizer_json(bpe_path, bos='<nope>')


def test_an_unknown_token_stands_for_text(tmp_path):
  spec = json.loads(
    Tokenizer(models.WordLevel({'<unk>': 0, 'a': 1}, '<unk>')).to_str()
  )
  spec['added_tokens'] = [
    {
      'id': 0,
      'content': '<unk>',
      'special': True,
      'single_word': False,
      'lstrip': False,
      'rstrip': False,
      'normalized': False,
    }
  ]
  path = tmp_path / 'tokenizer.json'
  path.write_text(json.dumps(spec))
  v = vocab.load_tokenizer_json(path)
  assert v.special == {} and v.decode(v.encode('zebra')) == '\ufffd'


# ---- SentencePiece --------------------------------------------------------


def test_a_dummy_space_is_not_put_in_front(tmp_path):
  proto = sentencepiece_model_pb2.ModelProto()
  proto.ParseFromString(train_vocab.train())
  proto.normalizer_spec.add_dummy_prefix = True
  path = tmp_path / 'prefix.model'
  path.write_bytes(proto.SerializeToString())
  assert vocab.load_sentencepiece(path).encode('7').size == 1


def test_turn_markers_are_special_however_they_are_shipped(tmp_path):
  proto = sentencepiece_model_pb2.ModelProto()
  proto.ParseFromString(train_vocab.train())
  proto.pieces[4].piece = '<end_of_turn>'  # a user-defined piece
  path = tmp_path / 'markers.model'
  path.write_bytes(proto.SerializeToString())
  v = vocab.load_sentencepiece(path)
  assert v.special['<end_of_turn>'] == 4 and v.eos_ids == (2, 4)
  assert 4 not in v.encode('<end_of_turn>')


# ---- GGUF -----------------------------------------------------------------


def _write_gguf(path, **fields):
  import gguf

  writer = gguf.GGUFWriter(str(path), 'llama')
  for key, value in fields.items():
    getattr(writer, f'add_{key}')(value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def test_a_sentencepiece_vocabulary_in_a_gguf_file(tmp_path, arithmetic):
  proto = sentencepiece_model_pb2.ModelProto()
  proto.ParseFromString(train_vocab.train())
  path = tmp_path / 'sp.gguf'
  _write_gguf(
    path,
    tokenizer_model='llama',
    token_list=[p.piece for p in proto.pieces],
    token_scores=[p.score for p in proto.pieces],
    token_types=[p.type for p in proto.pieces],
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    unk_token_id=3,
  )
  v = vocab_gguf.load_gguf(path)
  text = '<calc>(12+7)*3 é\x00</calc>'
  assert v.encode(text).tolist() == arithmetic.encode(text).tolist()
  assert (v.eos_ids, v.bos_id, v.special) == (
    arithmetic.eos_ids,
    arithmetic.bos_id,
    arithmetic.special,
  )


@pytest.mark.parametrize(
  ('fields', 'match'),
  [
    ({'tokenizer_model': 'bert'}, "kind 'bert'.*tokenizer.json"),
    (
      {'tokenizer_model': 'gpt2', 'tokenizer_pre': 'nobody'},
      "'nobody', known are",
    ),
  ],
)
def test_an_unknown_kind_of_gguf_vocabulary(tmp_path, fields, match):
  path = tmp_path / 'other.gguf'
  _write_gguf(path, token_list=['a', 'b'], token_types=[1, 1], **fields)
  with pytest.raises(ValueError, match=match):
    vocab_gguf.load_gguf(path)


# ---- files that are not what they should be -------------------------------

LOADERS = (
  vocab.load_sentencepiece,
  vocab.load_tokenizer_json,
  vocab_gguf.load_gguf,
)


@pytest.mark.parametrize('load', LOADERS)
@pytest.mark.parametrize(
  'data', [b'', b'GGUF', b'{"model": 3}', b'\x00\xff' * 9]
)
def test_a_foreign_file_is_named(tmp_path, load, data):
  path = tmp_path / 'foreign'
  path.write_bytes(data)
  with pytest.raises(ValueError, match='foreign is not a whole .*again'):
    load(path)


@pytest.mark.parametrize('load', LOADERS)
def test_a_missing_file_is_named(tmp_path, load):
  with pytest.raises(FileNotFoundError, match='nowhere.*give the path'):
    load(tmp_path / 'nowhere')


def test_truncated_files_are_named(tmp_path, bpe_path, smollm2_path):
  path = tmp_path / 'cut'
  model = train_vocab.arithmetic_model().read_bytes()
  with open(smollm2_path, 'rb') as f:
    header = f.read(400_000)
  for load, data in (
    (vocab.load_sentencepiece, model[: len(model) // 2]),
    (vocab.load_tokenizer_json, bpe_path.read_bytes()[:-100]),
    (vocab_gguf.load_gguf, header),
  ):
    path.write_bytes(data)
    with pytest.raises(ValueError, match='cut is not a whole'):
      load(str(path))
