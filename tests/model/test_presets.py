"""Presets and config.json: the values of released models."""

import dataclasses

import pytest

from agentjax.model import hf_config, presets, transformer
from agentjax.model.config import ModelConfig, RopeScaling

PRESETS = {
  name: value
  for name, value in vars(presets).items()
  if isinstance(value, ModelConfig)
}


def unpadded(config: ModelConfig) -> ModelConfig:
  """As a config.json has it, which does not tell text from padding."""
  return dataclasses.replace(config, vocab_size=config.padded_vocab)


# As counted on the releases' pages; Gemma 3 4B less its vision tower
# (416,866,032) and projector (2,950,272).
@pytest.mark.parametrize(
  'name, count',
  [
    ('SMOLLM2_135M', 134_515_008),
    ('SMOLLM2_360M', 361_821_120),
    ('SMOLLM2_1_7B', 1_711_376_384),
    ('QWEN2_5_0_5B', 494_032_768),
    ('QWEN2_5_1_5B', 1_543_714_304),
    ('QWEN2_5_3B', 3_085_938_688),
    ('QWEN2_5_7B', 7_615_616_512),
    ('QWEN2_5_14B', 14_770_033_664),
    ('QWEN2_5_32B', 32_763_876_352),
    ('QWEN3_0_6B', 596_049_920),
    ('QWEN3_1_7B', 1_720_574_976),
    ('QWEN3_4B', 4_022_468_096),
    ('QWEN3_8B', 8_190_735_360),
    ('LLAMA3_2_1B', 1_235_814_400),
    ('LLAMA3_2_3B', 3_212_749_824),
    ('LLAMA3_1_8B', 8_030_261_248),
    ('GEMMA2_2B', 2_614_341_888),
    ('GEMMA2_9B', 9_241_705_984),
    ('GEMMA3_270M', 268_098_176),
    ('GEMMA3_1B', 999_885_952),
    ('GEMMA3_4B', 4_300_079_472 - 416_866_032 - 2_950_272),
  ],
)
def test_a_preset_has_the_released_number_of_parameters(name, count):
  assert transformer.n_params(PRESETS[name]) == count


def test_every_released_preset_is_counted():
  counted = test_a_preset_has_the_released_number_of_parameters.pytestmark[0]
  names = {name for name, _ in counted.args[1]}
  assert names == {name for name in PRESETS if not name.startswith('TINY')}


@pytest.mark.parametrize('name', PRESETS)
def test_a_preset_survives_its_config_json(name):
  config = unpadded(PRESETS[name])
  back = hf_config.from_hf_config(hf_config.to_hf_config(config))
  # Short patterns may come back grouped otherwise: the same layers.
  assert back.layer_kinds == config.layer_kinds
  if not name.startswith('TINY_GEMMA3'):
    assert back == config


QWEN2_5_0_5B_JSON = {
  'architectures': ['Qwen2ForCausalLM'],
  'attention_dropout': 0.0,
  'bos_token_id': 151643,
  'eos_token_id': 151645,
  'hidden_act': 'silu',
  'hidden_size': 896,
  'intermediate_size': 4864,
  'max_position_embeddings': 32768,
  'max_window_layers': 21,
  'model_type': 'qwen2',
  'num_attention_heads': 14,
  'num_hidden_layers': 24,
  'num_key_value_heads': 2,
  'rms_norm_eps': 1e-06,
  'rope_theta': 1000000.0,
  'sliding_window': 32768,
  'tie_word_embeddings': True,
  'torch_dtype': 'bfloat16',
  'use_cache': True,
  'use_sliding_window': False,
  'vocab_size': 151936,
}
LLAMA3_2_1B_JSON = {
  'architectures': ['LlamaForCausalLM'],
  'attention_bias': False,
  'head_dim': 64,
  'hidden_act': 'silu',
  'hidden_size': 2048,
  'intermediate_size': 8192,
  'max_position_embeddings': 131072,
  'mlp_bias': False,
  'model_type': 'llama',
  'num_attention_heads': 32,
  'num_hidden_layers': 16,
  'num_key_value_heads': 8,
  'pretraining_tp': 1,
  'rms_norm_eps': 1e-05,
  'rope_scaling': {
    'factor': 32.0,
    'high_freq_factor': 4.0,
    'low_freq_factor': 1.0,
    'original_max_position_embeddings': 8192,
    'rope_type': 'llama3',
  },
  'rope_theta': 500000.0,
  'tie_word_embeddings': True,
  'vocab_size': 128256,
}
# The release leaves out what transformers defaults to.
GEMMA3_4B_JSON = {
  'architectures': ['Gemma3ForConditionalGeneration'],
  'image_token_index': 262144,
  'model_type': 'gemma3',
  'text_config': {
    'hidden_size': 2560,
    'intermediate_size': 10240,
    'model_type': 'gemma3_text',
    'num_hidden_layers': 34,
    'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'},
    'sliding_window': 1024,
  },
  'vision_config': {'hidden_size': 1152},
}


@pytest.mark.parametrize(
  'data, preset',
  [
    (QWEN2_5_0_5B_JSON, presets.QWEN2_5_0_5B),
    (LLAMA3_2_1B_JSON, presets.LLAMA3_2_1B),
    (GEMMA3_4B_JSON, presets.GEMMA3_4B),
  ],
)
def test_a_released_config_json_is_its_preset(data, preset):
  assert hf_config.from_hf_config(data) == unpadded(preset)


def test_the_spelling_of_transformers_5_is_read_too():
  data = dict(LLAMA3_2_1B_JSON)
  theta = data.pop('rope_theta')
  scaling = data.pop('rope_scaling')
  data['rope_parameters'] = {**scaling, 'rope_theta': theta}
  assert hf_config.from_hf_config(data) == presets.LLAMA3_2_1B


@pytest.mark.parametrize(
  'change, named',
  [
    ({'model_type': 'mixtral'}, 'mixtral'),
    ({'attention_bias': True}, 'attention_bias'),
    ({'mlp_bias': True}, 'mlp_bias'),
    ({'hidden_act': 'relu'}, 'relu'),
    ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor'),
    ({'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0}}, 'yarn'),
    ({'quantization_config': {'bits': 4}}, 'quantization_config'),
    ({'layer_types': ['chunked_attention'] * 16}, 'chunked_attention'),
    ({'layer_types': ['full_attention']}, 'num_hidden_layers=16'),
    ({'hidden_size': None}, 'hidden_size'),
    (
      {
        'model_type': 'qwen2',
        'use_sliding_window': True,
        'layer_types': ['sliding_attention'] * 16,
        'sliding_window': 8,
      },
      'llama3',
    ),
  ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(change, named):
  with pytest.raises(ValueError, match=named):
    hf_config.from_hf_config(LLAMA3_2_1B_JSON | change)


def test_a_missing_key_is_named():
  data = {k: v for k, v in LLAMA3_2_1B_JSON.items() if k != 'vocab_size'}
  with pytest.raises(ValueError, match="llama lacks 'vocab_size'"):
    hf_config.from_hf_config(data)


def test_windows_that_start_at_a_layer():
  data = QWEN2_5_0_5B_JSON | {'use_sliding_window': True}
  config = hf_config.from_hf_config(data)
  assert config.layers == ((('global',), 21), (('local',), 3))
  assert config.window == 32768
  assert config.rope_theta_local == 1_000_000.0


@pytest.mark.parametrize('softcap', [None, 20.0])
def test_an_explicit_softcap_overrides_the_default(softcap):
  data = hf_config.to_hf_config(presets.GEMMA2_2B)
  del data['attn_logit_softcapping']
  assert hf_config.from_hf_config(data).attn_softcap == 50.0
  data['attn_logit_softcapping'] = softcap
  assert hf_config.from_hf_config(data).attn_softcap == (softcap or 0.0)


@pytest.mark.parametrize(
  'change, lost',
  [
    ({'attn_softcap': 50.0}, 'attn_softcap'),
    ({'norm_offset': True}, 'norm_offset'),
    ({'activation': 'gelu_tanh'}, 'activation'),
    ({'query_scale': 0.5}, 'query_scale'),
    (
      {'layers': ((('local',), 3),), 'window': 8},
      'layers',
    ),
    ({'rope_scaling': RopeScaling('yarn', 2.0)}, 'yarn'),
  ],
)
def test_a_config_that_no_architecture_computes_is_not_written(change, lost):
  with pytest.raises(ValueError, match=lost):
    hf_config.to_hf_config(presets.tiny(**change))


@pytest.mark.parametrize(
  'kinds, layers',
  [
    ('gggg', ((('global',), 4),)),
    ('lglg', ((('local', 'global'), 2),)),
    ('lglgl', ((('local', 'global'), 2), (('local',), 1))),
    ('llgllgll', ((('local', 'local', 'global'), 2), (('local',), 2))),
    ('gggl', ((('global',), 3), (('local',), 1))),
    ('l', ((('local',), 1),)),
  ],
)
def test_layers_are_grouped(kinds, layers):
  names = [{'g': 'global', 'l': 'local'}[k] for k in kinds]
  assert hf_config.group_layers(names) == layers


def test_tiny_takes_changes_and_no_others():
  assert presets.tiny(heads=8).heads == 8
  assert presets.tiny(vocab_size=200).padded_vocab == 200
  with pytest.raises(TypeError, match='depth'):
    presets.tiny(depth=2)
