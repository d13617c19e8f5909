"""Saving: what is written comes back, and nothing is lost silently."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from agentjax.model import load, presets, save, transformer

TINY = [name for name in vars(presets) if name.startswith('TINY')]


@pytest.mark.parametrize('name', TINY)
@pytest.mark.parametrize('shard', [10**9, 20_000])
def test_a_model_comes_back_to_the_bit(tmp_path, name, shard):
  config = getattr(presets, name)
  shapes = transformer.init_shapes(config, jnp.bfloat16)
  leaves, structure = jax.tree.flatten(shapes)
  random = np.random.default_rng(0)
  params = structure.unflatten(
    [jnp.asarray(random.normal(size=s.shape), s.dtype) for s in leaves]
  )
  save.save_params(tmp_path, params, config, max_shard_bytes=shard)
  files = sorted(tmp_path.glob('*.safetensors'))
  assert (len(files) > 1) == (shard == 20_000)
  assert all(f.stat().st_size < shard + 8000 for f in files)
  back = load.load_params(tmp_path, config, dtype=jnp.bfloat16)
  for a, b in zip(jax.tree.leaves(back), leaves, strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
  same = jax.tree.map(lambda a, b: bool((a == b).all()), back, params)
  assert all(jax.tree.leaves(same))
  read = load.read_config(tmp_path)
  assert read.layer_kinds == config.layer_kinds
  assert dataclasses.replace(read, layers=config.layers) == config


def test_padding_is_not_written(tmp_path):
  config = presets.tiny(vocab_size=90, padded_vocab=96, tied=False)
  params = transformer.init(jax.random.key(0), config)
  save.save_params(tmp_path, params, config)
  tensors = load_file(tmp_path / 'model.safetensors')
  assert tensors['model.embed_tokens.weight'].shape == (90, 32)
  assert tensors['lm_head.weight'].shape == (90, 32)
  assert json.loads((tmp_path / 'config.json').read_text())['vocab_size'] == 90
  back = load.load_params(
    tmp_path, load.read_config(tmp_path, vocab_multiple=48)
  )
  assert back['embed']['table'].shape == (96, 32)
  np.testing.assert_array_equal(
    back['head']['kernel'][:, :90], params['head']['kernel'][:, :90]
  )


def test_a_dtype_for_the_files(tmp_path):
  params = transformer.init(jax.random.key(0), presets.TINY_LLAMA)
  save.save_params(tmp_path, params, presets.TINY_LLAMA, dtype=jnp.bfloat16)
  tensors = load_file(tmp_path / 'model.safetensors')
  assert {str(t.dtype) for t in tensors.values()} == {'bfloat16'}
  config = json.loads((tmp_path / 'config.json').read_text())
  assert config['torch_dtype'] == 'bfloat16'


def test_a_second_save_leaves_nothing_of_the_first(tmp_path):
  params = transformer.init(jax.random.key(0), presets.TINY_LLAMA)
  (tmp_path / 'tokenizer.json').write_text('{}')
  save.save_params(tmp_path, params, presets.TINY_LLAMA, max_shard_bytes=20_000)
  save.save_params(tmp_path, params, presets.TINY_LLAMA)
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    'config.json',
    'model.safetensors',
    'tokenizer.json',
  ]


def test_parameters_of_another_shape_are_refused(tmp_path):
  params = transformer.init(jax.random.key(0), presets.TINY_LLAMA)
  with pytest.raises(ValueError, match=r'stacks/0/0/mlp/gate.*\(3, 32, 64\)'):
    save.save_params(tmp_path, params, presets.tiny(mlp=48))
  assert not list(tmp_path.iterdir())
