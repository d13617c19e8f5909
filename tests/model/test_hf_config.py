"""config.json: what is read, and that nothing in it is ignored."""

import pytest

from agentjax.model.config import RopeScaling
from agentjax.model.hf_config import from_hf_config, to_hf_config

SMALL = {
  'vocab_size': 100,
  'hidden_size': 64,
  'num_hidden_layers': 4,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 128,
  'max_position_embeddings': 64,
}
LLAMA = SMALL | {'model_type': 'llama'}
QWEN2 = SMALL | {'model_type': 'qwen2'}
GEMMA2 = SMALL | {'model_type': 'gemma2'}
GEMMA3 = SMALL | {'model_type': 'gemma3_text'}
LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 32,
}
LINEAR = {'rope_type': 'linear', 'factor': 2.0}
HALF_WINDOWED = ['full_attention', 'sliding_attention'] * 2


def without(data, *names):
  return {k: v for k, v in data.items() if k not in names}


def check_refused(base, change, *named):
  with pytest.raises(ValueError) as error:
    from_hf_config(base | change)
  for part in named:
    assert part in str(error.value), (part, str(error.value))


@pytest.mark.parametrize(
  'scaling, named',
  [
    ({'factor': 4.0}, "{'factor': 4.0} has no rope_type"),
    ({'rope_type': None, 'factor': 4.0}, 'no rope_type'),
    (LINEAR | {'type': 'dynamic'}, "'linear' and 'dynamic'"),
    ({'rope_type': 'dynamic', 'factor': 2.0}, 'dynamic'),
    ({'type': 'longrope'}, 'longrope'),
    ({'type': ['linear']}, "['linear']"),
    ({'type': 'linear'}, "'factor'"),
    (LINEAR | {'factor': None}, "'factor'"),
    (LINEAR | {'factor': '2'}, "factor='2'"),
    (LINEAR | {'factor': 0}, 'factor=0'),
    (LINEAR | {'beta_fast': 32.0}, 'beta_fast'),
    (LINEAR | {'partial_rotary_factor': 0.5}, 'partial_rotary_factor'),
    ({'rope_type': 'default', 'factor': 4.0}, 'factor'),
    (LLAMA3 | {'attention_factor': 1.5}, 'attention_factor'),
    ([2.0], 'rope_scaling=[2.0]'),
    ([], 'rope_scaling=[]'),
    *(
      (without(LLAMA3, name), f"'{name}'")
      for name in LLAMA3
      if name != 'rope_type'
    ),
    *((LLAMA3 | {n: None}, f"'{n}'") for n in LLAMA3 if n != 'rope_type'),
  ],
)
@pytest.mark.parametrize('spelling', ['rope_scaling', 'rope_parameters'])
def test_a_scaling_that_cannot_be_read_is_refused(spelling, scaling, named):
  named = named.replace('rope_scaling', spelling)
  check_refused(LLAMA, {spelling: scaling}, named, spelling)


@pytest.mark.parametrize(
  'scaling, expected',
  [
    (None, None),
    ({}, None),
    ({'rope_type': 'default'}, None),
    ({'type': 'default', 'factor': 1.0}, None),
    ({'rope_theta': 10_000.0}, None),
    (LINEAR, RopeScaling('linear', 2.0)),
    ({'type': 'linear', 'factor': 2}, RopeScaling('linear', 2.0)),
    (LINEAR | {'type': 'linear'}, RopeScaling('linear', 2.0)),
    (LLAMA3, RopeScaling('llama3', 8.0, 1.0, 4.0, 32)),
  ],
)
def test_a_scaling_is_read_in_every_spelling(scaling, expected):
  for spelling in ('rope_scaling', 'rope_parameters'):
    config = from_hf_config(LLAMA | {spelling: scaling})
    assert (config.rope_scaling, config.rope_theta) == (expected, 10_000.0)


def test_two_spellings_must_agree():
  both = {'rope_scaling': LINEAR, 'rope_parameters': LINEAR}
  assert from_hf_config(LLAMA | both).rope_scaling.factor == 2.0
  both['rope_parameters'] = {'rope_type': 'default', 'rope_theta': 5e5}
  check_refused(LLAMA, both, 'rope_scaling', 'rope_parameters', '500000.0')
  theta = {'rope_theta': 1e6, 'rope_parameters': {'rope_theta': 5e5}}
  check_refused(LLAMA, theta, 'rope_theta', '1000000.0', '500000.0')
  theta['rope_theta'] = 500_000
  assert from_hf_config(LLAMA | theta).rope_theta == 5e5


@pytest.mark.parametrize('value', [None, '1e4', True, 0, float('nan')])
@pytest.mark.parametrize('name', ['rope_theta', 'rms_norm_eps'])
def test_a_number_is_a_number(name, value):
  check_refused(LLAMA, {name: value}, f'{name}={value!r}')


@pytest.mark.parametrize('value', [None, 'true', 1])
def test_tied_is_yes_or_no(value):
  for base in (LLAMA, GEMMA2):
    name = 'tie_word_embeddings'
    check_refused(base, {name: value}, f'{name}={value!r}')
    assert from_hf_config(base).tied is (base is GEMMA2)


@pytest.mark.parametrize(
  'name, value, neutral',
  [
    ('clip_qkv', 8.0, None),
    ('rotary_pct', 0.5, 1.0),
    ('partial_rotary_factor', 0.5, 1.0),
    ('residual_multiplier', 0.2, 1.0),
    ('embedding_multiplier', 12.0, 1.0),
    ('attention_multiplier', 0.1, None),
    ('logits_scaling', 8.0, 1.0),
    ('logit_scale', 0.0625, 1.0),
    ('scale_emb', 12, 1),
    ('scale_depth', 1.4, None),
    ('use_qk_norm', True, False),
    ('qk_layernorm', True, False),
    ('use_parallel_residual', True, False),
    ('alibi', True, False),
    ('num_local_experts', 8, 0),
    ('n_routed_experts', 64, None),
    ('no_rope_layers', [1, 0, 1, 1], None),
    ('attention_chunk_size', 8192, None),
    ('attn_logit_softcapping', 50.0, None),
    ('final_logit_softcapping', 30.0, None),
    ('query_pre_attn_scalar', 7, None),
    ('sliding_window', 16, None),
    ('use_sliding_window', True, False),
    ('sliding_window_pattern', 2, None),
    ('rope_local_base_freq', 1e4, None),
    ('layer_types', HALF_WINDOWED, ['full_attention'] * 4),
    ('hidden_activation', 'gelu_pytorch_tanh', 'silu'),
  ],
)
def test_what_a_llama_does_not_compute_is_refused_by_name(name, value, neutral):
  check_refused(LLAMA, {name: value}, 'llama', name)
  plain = from_hf_config(LLAMA)
  assert from_hf_config(LLAMA | {name: neutral}) == plain
  assert from_hf_config(LLAMA | {name: None}) == plain


def test_options_are_refused_where_another_family_reads_them():
  # Gemma 3's attention has no softcap, whatever its config says.
  check_refused(GEMMA3, {'attn_logit_softcapping': 50.0}, 'attn_logit_soft')
  assert from_hf_config(GEMMA2).attn_softcap == 50.0
  check_refused(GEMMA2, {'sliding_window_pattern': 3}, 'sliding_window_pattern')
  pattern = {'sliding_window_pattern': 2}
  assert from_hf_config(GEMMA2 | pattern) == from_hf_config(GEMMA2)
  check_refused(GEMMA2, {'rope_local_base_freq': 1e4}, 'rope_local_base_freq')
  check_refused(GEMMA2, {'query_pre_attn_scalar': None}, 'query_pre_attn')
  check_refused(GEMMA2, {'hidden_activation': None}, 'hidden_activation')
  check_refused(GEMMA3, {'rope_local_base_freq': None}, 'rope_local_base_freq')


def test_windows_need_their_width():
  on = {'use_sliding_window': True, 'layer_types': HALF_WINDOWED}
  check_refused(QWEN2, on, "'sliding_window'")
  check_refused(QWEN2, on | {'sliding_window': None}, "'sliding_window'")
  for base in (GEMMA2, GEMMA3):
    check_refused(base, {'sliding_window': None}, "'sliding_window'")
  config = from_hf_config(QWEN2 | on | {'sliding_window': 16})
  assert (config.window, config.layer_kinds.count('local')) == (16, 2)
  # Qwen's code takes the width away where this is not set.
  off = on | {'use_sliding_window': False, 'sliding_window': 16}
  check_refused(QWEN2, off, 'use_sliding_window', 'layer_types')
  from_layer = {'use_sliding_window': True, 'sliding_window': 16}
  check_refused(QWEN2, from_layer | {'max_window_layers': None}, 'max_window')
  assert 'local' not in from_hf_config(QWEN2 | {'sliding_window': 16}).layers


def test_local_layers_have_rotations_of_their_own_in_gemma3_alone():
  by_kind = {
    'full_attention': LINEAR | {'rope_theta': 1e6},
    'sliding_attention': {'rope_type': 'default', 'rope_theta': 2e4},
  }
  long = GEMMA3 | {'num_hidden_layers': 6}
  config = from_hf_config(long | {'rope_parameters': by_kind})
  assert config.rope_scaling == RopeScaling('linear', 2.0)
  assert (config.rope_theta, config.rope_theta_local) == (1e6, 2e4)
  check_refused(LLAMA, {'rope_parameters': by_kind}, 'full_attention')
  scaled = by_kind | {'sliding_attention': LINEAR}
  check_refused(long, {'rope_parameters': scaled}, 'sliding_attention')
  freq = {'rope_parameters': by_kind, 'rope_local_base_freq': 3e4}
  check_refused(long, freq, 'rope_local_base_freq', '30000.0', '20000.0')
  other = by_kind | {'chunked_attention': {}}
  check_refused(long, {'rope_parameters': other}, 'chunked_attention')


def test_the_quantization_of_a_multimodal_file_is_seen():
  data = {
    'model_type': 'gemma3',
    'text_config': GEMMA3,
    'quantization_config': {'bits': 4},
  }
  with pytest.raises(ValueError, match='quantization_config'):
    from_hf_config(data)
  del data['quantization_config']
  assert from_hf_config(data) == from_hf_config(GEMMA3)


@pytest.mark.parametrize('base', [LLAMA, QWEN2, GEMMA2, GEMMA3])
def test_what_is_written_is_read_back(base):
  config = from_hf_config(base)
  assert from_hf_config(to_hf_config(config)) == config
