"""Loading safetensors: complete, exact, in its shardings, in little memory."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from agentjax.model import checkpoint_names as names
from agentjax.model import hf_config, load, presets, transformer
from agentjax.model.tensors import WeightsError

DATA = pathlib.Path(__file__).parent / 'data'
FAMILIES = sorted(p.name for p in DATA.iterdir() if p.is_dir())


def same_trees(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def copied(tmp_path):
  """A directory like the llama fixture, with its tensors changed."""

  def copy(change):
    tensors = load_file(DATA / 'llama/model.safetensors')
    change(tensors)
    shutil.copy(DATA / 'llama/config.json', tmp_path)
    save_file(tensors, tmp_path / 'model.safetensors')
    return tmp_path

  return copy


# ---- what is loaded -------------------------------------------------------


@pytest.mark.parametrize('family', FAMILIES)
def test_the_tree_is_that_of_init(family):
  config = load.read_config(DATA / family)
  params = load.load_params(DATA / family, config, dtype=jnp.bfloat16)
  want = transformer.init_shapes(config, jnp.bfloat16)
  assert jax.tree.structure(params) == jax.tree.structure(want)
  have = jax.tree.map(lambda a: (a.shape, a.dtype), params)
  assert have == jax.tree.map(lambda a: (a.shape, a.dtype), want)


def test_arrays_hold_the_tensors_they_are_named_for():
  config = load.read_config(DATA / 'gemma2')
  params = load.load_params(DATA / 'gemma2', config)
  tensors = load_file(DATA / 'gemma2/model.safetensors')
  # Layers alternate: layer 3 is repetition 1 of position 1 ('global').
  block = jax.tree.map(lambda a: np.asarray(a)[1], params['stacks'][0]['1'])
  layer = 'model.layers.3.'
  q = tensors[layer + 'self_attn.q_proj.weight']  # [H * Q, D]
  np.testing.assert_array_equal(block['attn']['q'][:, 2, 5], q[2 * 8 + 5])
  o = tensors[layer + 'self_attn.o_proj.weight']  # [D, H * Q]
  np.testing.assert_array_equal(block['attn']['o'][2, 5], o[:, 2 * 8 + 5])
  for name, tensor in (
    ('attn_norm', 'input_layernorm'),
    ('attn_post_norm', 'post_attention_layernorm'),
    ('mlp_norm', 'pre_feedforward_layernorm'),
    ('mlp_post_norm', 'post_feedforward_layernorm'),
  ):
    np.testing.assert_array_equal(
      block[name]['scale'], tensors[f'{layer}{tensor}.weight']
    )


def test_a_padded_vocabulary_keeps_its_logits_and_masks_the_rest():
  path = DATA / 'llama_untied'
  plain = load.read_config(path)
  padded = load.read_config(path, vocab_multiple=64)
  assert (padded.vocab_size, padded.padded_vocab) == (96, 128)
  hidden = np.random.default_rng(0).normal(size=(2, plain.width))
  hidden = hidden.astype(np.float32)
  params = load.load_params(path, padded)
  assert not np.asarray(params['embed']['table'][96:]).any()
  have = transformer.logits(params, hidden, padded)
  want = transformer.logits(load.load_params(path, plain), hidden, plain)
  np.testing.assert_allclose(have[:, :96], want, rtol=1e-6)
  assert (have[:, 96:] < -1e29).all()


def test_ids_without_text_are_masked_and_their_rows_kept():
  config = load.read_config(DATA / 'qwen2', vocab_size=90, vocab_multiple=5)
  assert (config.vocab_size, config.padded_vocab) == (90, 100)
  params = load.load_params(DATA / 'qwen2', config)
  assert np.asarray(params['embed']['table'][90:96]).any()
  logits = transformer.logits(params, np.ones((1, 32), np.float32), config)
  assert (np.asarray(logits[:, 90:]) < -1e29).all()


def test_a_vocabulary_larger_than_the_table_is_refused():
  with pytest.raises(ValueError, match='vocab_size 97 with a table of 96'):
    load.read_config(DATA / 'qwen2', vocab_size=97)


def test_a_tied_head_that_repeats_the_table_is_accepted(copied):
  def repeat(tensors):
    tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'].copy()

  path = copied(repeat)
  config = load.read_config(path)
  plain = load.load_params(DATA / 'llama', config)
  same_trees(load.load_params(path, config), plain)


def test_a_tied_head_that_differs_is_refused(copied):
  def differ(tensors):
    tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'] + 1

  path = copied(differ)
  with pytest.raises(WeightsError, match='differs.*tied=False'):
    load.load_params(path, load.read_config(path))


@pytest.mark.parametrize(
  'text, tower',
  [
    ('language_model.model.', 'vision_tower.'),
    ('model.language_model.', 'model.vision_tower.'),
  ],
)
def test_the_text_model_of_a_multimodal_checkpoint(copied, text, tower):
  def rename(tensors):
    for name in list(tensors):
      new = text + name.removeprefix('model.')
      tensors[new] = tensors.pop(name)
    tensors[tower + 'patch.weight'] = np.ones((2, 2), np.float32)

  path = copied(rename)
  config = load.read_config(path)
  plain = load.load_params(DATA / 'llama', config)
  same_trees(load.load_params(path, config), plain)


# ---- what is refused ------------------------------------------------------

DOWN = 'model.layers.1.mlp.down_proj.weight'


def test_a_missing_tensor_is_named_with_its_shape(copied):
  path = copied(lambda tensors: tensors.pop(DOWN))
  with pytest.raises(WeightsError, match=rf'{DOWN}.*\(32, 48\)'):
    load.load_params(path, load.read_config(path))


def test_a_surplus_tensor_is_named_with_its_file(copied):
  bias = np.zeros(32, np.float32)
  path = copied(
    lambda t: t.update({'model.layers.0.self_attn.q_proj.bias': bias})
  )
  with pytest.raises(
    WeightsError, match=r'model\.safetensors holds.*q_proj\.bias.*\(32,\)'
  ):
    load.load_params(path, load.read_config(path))


@pytest.mark.parametrize('shape', [(48, 32), (32, 47), (32, 48, 1), (1536,)])
def test_a_misshapen_tensor_is_named_with_both_shapes(copied, shape):
  path = copied(lambda t: t.update({DOWN: np.zeros(shape, np.float32)}))
  with pytest.raises(WeightsError) as error:
    load.load_params(path, load.read_config(path))
  for part in (DOWN, 'model.safetensors', str(shape), '(32, 48)'):
    assert part in str(error.value)


@pytest.mark.parametrize('rows', [95, 97])
def test_a_table_of_other_rows_is_refused(copied, rows):
  table = np.zeros((rows, 32), np.float32)
  path = copied(lambda t: t.update({'model.embed_tokens.weight': table}))
  with pytest.raises(WeightsError, match=rf'\({rows}, 32\)'):
    load.load_params(path, load.read_config(path))


def test_quantised_tensors_are_refused(copied):
  path = copied(lambda t: t.update({DOWN: np.zeros((32, 48), np.int8)}))
  with pytest.raises(WeightsError, match=f'{DOWN}.*I8.*dequantise'):
    load.load_params(path, load.read_config(path))


def test_another_model_is_refused():
  config = dataclasses.replace(
    load.read_config(DATA / 'llama'), layers=((('global',), 2),)
  )
  with pytest.raises(WeightsError, match='9 tensors that the config has no'):
    load.load_params(DATA / 'llama', config)


def test_shardings_of_another_tree_are_refused():
  config = load.read_config(DATA / 'llama')
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  with pytest.raises(ValueError):
    load.load_params(DATA / 'llama', config, shardings={'embed': device})


@settings(max_examples=20, deadline=None)
@given(part=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_named_wherever_it_was_cut(tmp_path_factory, part):
  path = tmp_path_factory.mktemp('cut')
  whole = (DATA / 'llama/model.safetensors').read_bytes()
  (path / 'model.safetensors').write_bytes(whole[: int(part * len(whole))])
  shutil.copy(DATA / 'llama/config.json', path)
  with pytest.raises(WeightsError, match=f'{path}/model.* fetch it again'):
    load.load_params(path, load.read_config(path))


def test_an_index_and_its_shards_belong_together(tmp_path):
  path = tmp_path / 'model'
  shutil.copytree(DATA / 'llama_untied', path)
  config = load.read_config(path)
  index = path / 'model.safetensors.index.json'
  data = json.loads(index.read_text())
  data['weight_map'][DOWN] = 'model-00003-of-00003.safetensors'
  index.write_text(json.dumps(data))
  with pytest.raises(WeightsError, match=f'00003.safetensors lacks .{DOWN}'):
    load.load_params(path, config)
  (path / 'model-00002-of-00003.safetensors').unlink()
  with pytest.raises(WeightsError, match='00002-of-00003.*absent'):
    load.load_params(path, config)
  index.write_text('{"weight_map"')
  with pytest.raises(WeightsError, match='fetch it again'):
    load.load_params(path, config)


@pytest.mark.parametrize('data', [b'[1]', b'\xff\xfe', b'{', b'"x"', b''])
@pytest.mark.parametrize('name', ['config.json', 'index'])
def test_a_description_that_is_none_is_named(tmp_path, data, name):
  shutil.copytree(DATA / 'llama', tmp_path / 'model')
  path = tmp_path / 'model'
  if name == 'index':
    (path / 'model.safetensors').unlink()
    name = 'model.safetensors.index.json'
  config = load.read_config(path)
  (path / name).write_bytes(data)
  with pytest.raises(WeightsError, match=f'{path}/{name} is n.*fetch it again'):
    load.load_params(path, config) if 'index' in name else load.read_config(
      path
    )
  (path / name).unlink()
  (path / name).mkdir()
  with pytest.raises(WeightsError, match=str(path)):
    load.load_params(path, config) if 'index' in name else load.read_config(
      path
    )


def test_a_directory_without_a_model_is_named(tmp_path):
  with pytest.raises(WeightsError, match=f'{tmp_path} has no config.json'):
    load.read_config(tmp_path)
  with pytest.raises(WeightsError, match='neither model.safetensors'):
    load.load_params(tmp_path, presets.TINY_LLAMA)
  (tmp_path / 'config.json').write_text('{')
  with pytest.raises(WeightsError, match='is not JSON'):
    load.read_config(tmp_path)


# ---- memory and shardings -------------------------------------------------

_MEASURE = r"""
import re, sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update('jax_num_cpu_devices', 4)
from agentjax.model import load, mesh, transformer
path = sys.argv[1]
config = load.read_config(path)
grid = mesh.make_mesh(fsdp=2, tensor=2)
shapes = transformer.init_shapes(config)
shardings = mesh.shardings(mesh.param_axes(config), grid, shapes)
jnp.zeros(1).block_until_ready()
def peak():  # of this process alone: ru_maxrss starts at the parent's
  status = open('/proc/self/status').read()
  return int(re.search('VmHWM:\s+(\d+) kB', status)[1])
before = peak()
params = load.load_params(path, config, shardings=shardings)
grown = (peak() - before) * 1024
size = sum(a.nbytes for a in jax.tree.leaves(params))
whole = load.load_params(path, config)
same = jax.tree.map(
  lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), params, whole
)
assert all(jax.tree.leaves(same)), same
q = params['stacks'][0]['0']['attn']['q']
assert q.addressable_shards[0].data.shape == (12, 256, 4, 64), q.sharding
print(size, grown)
"""


def test_shards_are_read_without_a_second_copy_of_the_model(tmp_path):
  """218 MB in 4 files onto 4 devices; two copies would be a ratio of 2."""
  config = presets.tiny(
    vocab_size=8000,
    width=512,
    layers=((('global',), 12),),
    heads=8,
    kv_heads=8,
    head_size=64,
    mlp=2048,
  )
  random = np.random.default_rng(0)
  weight_map, sizes = {}, names.sizes(config)
  leaves = names.leaves(config, names.hf_names(config))
  for n in range(4):
    file = f'model-{n}.safetensors'
    shard = {
      name: random.standard_normal(leaf.tensor_shape(sizes), dtype=np.float32)
      for leaf in leaves
      for name in leaf.tensors[n::4]
    }
    save_file(shard, tmp_path / file)
    weight_map |= dict.fromkeys(shard, file)
  index = json.dumps({'weight_map': weight_map})
  (tmp_path / 'model.safetensors.index.json').write_text(index)
  description = json.dumps(hf_config.to_hf_config(config))
  (tmp_path / 'config.json').write_text(description)
  run = subprocess.run(
    [sys.executable, '-c', _MEASURE, tmp_path],
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
  )
  assert run.returncode == 0, run.stderr
  size, grown = map(int, run.stdout.split())
  assert size > 200e6
  assert size <= grown < 1.6 * size
