"""GGUF files: both conventions undone, quantisation, refusals."""

import dataclasses
import pathlib

import gguf
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from agentjax.model import checkpoint_names as names
from agentjax.model import load, presets
from agentjax.model.tensors import WeightsError

DATA = pathlib.Path(__file__).parent / 'data'
FAMILIES = {
  'llama': 'llama',
  'llama_untied': 'llama',
  'qwen2': 'qwen2',
  'qwen2_untied': 'qwen2',
  'qwen3': 'qwen3',
  'gemma2': 'gemma2',
  'gemma3': 'gemma3',
}


def interleave(rows, heads):
  """Rows as converters to GGUF store llama's queries and keys."""
  halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
  return halves.swapaxes(1, 2).reshape(rows.shape)


def write(path, family, *, fields=(), tensors=(), quantise=None):
  """The fixture `family` as a GGUF file, with changes."""
  directory, arch = DATA / family, FAMILIES[family]
  config = load.read_config(directory)
  writer = gguf.GGUFWriter(path, arch)
  for name, value in (about(config, arch) | dict(fields)).items():
    if value is None:
      continue
    add = {
      str: writer.add_string,
      int: writer.add_uint32,
      float: writer.add_float32,
      list: writer.add_array,
    }[type(value)]
    add(name.format(arch=arch), value)
  source = {}
  for file in directory.glob('*.safetensors'):
    source |= load_file(file)
  hf = names.leaves(config, names.hf_names(config))
  for leaf, old in zip(
    names.leaves(config, names.gguf_names()), hf, strict=True
  ):
    for new_name, old_name in zip(leaf.tensors, old.tensors, strict=True):
      tensor = source[old_name]
      if arch == 'llama' and leaf.path[-1] in 'qk':
        heads = config.heads if leaf.path[-1] == 'q' else config.kv_heads
        tensor = interleave(tensor, heads)
      if arch.startswith('gemma') and 'norm' in new_name:
        tensor = tensor + 1
      kind = quantise if tensor.ndim == 2 else None
      if kind:
        tensor = gguf.quants.quantize(tensor, kind)
      writer.add_tensor(new_name, np.ascontiguousarray(tensor), raw_dtype=kind)
  for name, tensor in dict(tensors).items():
    writer.add_tensor(name, tensor)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def about(config, arch) -> dict:
  linear = config.rope_scaling is not None
  return {
    '{arch}.block_count': config.n_layers,
    '{arch}.context_length': config.context,
    '{arch}.embedding_length': config.width,
    '{arch}.feed_forward_length': config.mlp,
    '{arch}.attention.head_count': config.heads,
    '{arch}.attention.head_count_kv': config.kv_heads,
    '{arch}.attention.key_length': config.head_size,
    '{arch}.attention.layer_norm_rms_epsilon': config.norm_eps,
    '{arch}.attention.sliding_window': config.window or None,
    '{arch}.attn_logit_softcapping': config.attn_softcap or None,
    '{arch}.final_logit_softcapping': config.final_softcap or None,
    '{arch}.rope.freq_base': config.rope_theta,
    '{arch}.rope.scaling.type': 'linear' if linear else None,
    '{arch}.rope.scaling.factor': config.rope_scaling.factor
    if linear
    else None,
  }


@pytest.mark.parametrize('family', FAMILIES)
def test_a_gguf_file_is_the_model_that_it_was_made_from(tmp_path, family):
  path = write(tmp_path / 'model.gguf', family)
  want_config = load.read_config(DATA / family)
  config = load.read_config(path)
  # The files hold no query scale: it is that of all models but the 27B ones.
  assert config == dataclasses.replace(want_config, query_scale=None)
  want = load.load_params(DATA / family, want_config)
  have = load.load_params(path, config)
  # Adding 1 to Gemma's norms and taking it off again rounds.
  close = jax.tree.map(
    lambda a, b: np.allclose(a, b, rtol=0, atol=2e-7), have, want
  )
  assert all(jax.tree.leaves(close))
  if 'gemma' not in family:
    same = jax.tree.map(lambda a, b: bool((a == b).all()), have, want)
    assert all(jax.tree.leaves(same))


def test_quantised_weights_are_dequantised(tmp_path):
  # Blocks are of 32 columns: every matrix of this model has a multiple.
  q8 = gguf.GGMLQuantizationType.Q8_0
  path = tmp_path / 'model.gguf'
  config = load.read_config(DATA / 'llama')
  random = np.random.default_rng(0)
  config = dataclasses.replace(config, mlp=64)
  writer = gguf.GGUFWriter(path, 'llama')
  for name, value in about(config, 'llama').items():
    if isinstance(value, float):
      writer.add_float32(name.format(arch='llama'), value)
    elif value is not None:
      writer.add_uint32(name.format(arch='llama'), value)
  sizes, raw = names.sizes(config), {}
  for leaf in names.leaves(config, names.gguf_names()):
    for name in leaf.tensors:
      raw[name] = random.normal(size=leaf.tensor_shape(sizes))
      raw[name] = raw[name].astype(np.float32)
      if raw[name].ndim == 2:
        quantised = gguf.quants.quantize(raw[name], q8)
        writer.add_tensor(name, quantised, raw_dtype=q8)
      else:
        writer.add_tensor(name, raw[name])
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  params = load.load_params(path, load.read_config(path))
  down = np.asarray(params['stacks'][0]['0']['mlp']['down'])[1]
  want = raw['blk.1.ffn_down.weight'].T
  assert 0 < np.abs(down - want).max() < 0.03
  k = np.asarray(params['stacks'][0]['0']['attn']['k'])[2]
  # Head 1, channel 5 of 8 is the second half's index 1: row 2 * 1 + 1.
  np.testing.assert_allclose(
    k[:, 1, 5], raw['blk.2.attn_k.weight'][8 + 3], atol=0.03
  )


def llama3_factors(factor):
  """As the converter of llama.cpp computes them, frequency by frequency."""
  out = []
  for i in range(4):
    length = 2 * np.pi * 500_000.0 ** (i / 4)
    if length < 8192 / 4:
      out.append(1.0)
    elif length > 8192:
      out.append(factor)
    else:
      smooth = (8192 / length - 1) / (4 - 1)
      out.append(1 / ((1 - smooth) / factor + smooth))
  return np.array(out, np.float32)


def test_llama_3_scaling_is_told_from_its_factors(tmp_path):
  theta = {'{arch}.rope.freq_base': 500_000.0}
  factors = {'rope_freqs.weight': llama3_factors(32.0)}
  path = write(tmp_path / 'a.gguf', 'llama', fields=theta, tensors=factors)
  config = load.read_config(path)
  assert config.rope_scaling == presets.LLAMA3_2_1B.rope_scaling
  load.load_params(path, config)
  factors['rope_freqs.weight'][1] *= 2
  path = write(tmp_path / 'b.gguf', 'llama', fields=theta, tensors=factors)
  with pytest.raises(ValueError, match='not the scaling of Llama 3.1'):
    load.read_config(path)


@pytest.mark.parametrize(
  'fields, named',
  [
    ({'{arch}.expert_count': 8}, 'expert_count=8'),
    ({'{arch}.rope.scaling.type': 'yarn'}, 'yarn'),
    ({'{arch}.rope.dimension_count': 4}, 'rope.dimension_count=4'),
    ({'{arch}.attention.value_length': 4}, 'attention.value_length=4'),
    ({'{arch}.attention.sliding_window': 8}, 'sliding_window=8'),
    ({'{arch}.attention.head_count_kv': [2, 1, 2]}, 'head_count_kv='),
    ({'{arch}.block_count': None}, 'block_count'),
    ({'split.count': 3}, 'one of 3 files'),
  ],
)
def test_what_is_not_supported_is_named(tmp_path, fields, named):
  path = write(tmp_path / 'model.gguf', 'llama', fields=fields)
  with pytest.raises(ValueError, match=named):
    load.read_config(path)


def test_an_unknown_architecture_is_named(tmp_path):
  path = tmp_path / 'model.gguf'
  writer = gguf.GGUFWriter(path, 'mamba')
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  with pytest.raises(ValueError, match="'mamba' is not supported.*gemma3"):
    load.read_config(path)


def test_a_pattern_in_the_file_overrides_the_default(tmp_path):
  pattern = [True, True, False, True] * 2
  field = {'{arch}.attention.sliding_window_pattern': pattern}
  path = write(tmp_path / 'model.gguf', 'gemma3', fields=field)
  config = load.read_config(path)
  assert config.layers == ((('local', 'local', 'global', 'local'), 2),)


def test_a_surplus_tensor_is_named(tmp_path):
  extra = {'blk.0.attn_q.bias': np.zeros(32, np.float32)}
  path = write(tmp_path / 'model.gguf', 'llama', tensors=extra)
  with pytest.raises(WeightsError, match=r'blk\.0\.attn_q\.bias.*\(32,\)'):
    load.load_params(path, load.read_config(path))


def test_a_file_that_is_absent_is_named(tmp_path):
  with pytest.raises(WeightsError, match='nothing.gguf does not exist'):
    load.read_config(tmp_path / 'nothing.gguf')


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  return write(tmp_path_factory.mktemp('gguf') / 'a.gguf', 'llama').read_bytes()


@settings(max_examples=20, deadline=None)
@given(part=st.floats(0, 0.999))
def test_a_truncated_file_is_named_wherever_it_was_cut(
  tmp_path_factory, whole, part
):
  path = tmp_path_factory.mktemp('cut') / 'model.gguf'
  path.write_bytes(whole[: int(part * len(whole))])
  with pytest.raises(WeightsError, match=f'{path} .* fetch it again'):
    load.read_config(path)
