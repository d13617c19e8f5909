"""Parity with transformers, live: random models of every family, new seeds.

  python tests/live_parity.py [--seeds 100 101]

where torch and transformers are installed beside this package's own needs.
For each family and seed: our logits of the checkpoint that transformers wrote,
and transformers' logits of the checkpoint that we wrote from it, against those
of the model that both came from. Prints `N passed, M failed`. The test suite
itself needs no torch: it reads fixtures (`make_model_fixtures.py`).
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from make_model_fixtures import MODELS, build, expected

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from agentjax.model import load, save, transformer  # noqa: E402

TOLERANCE = 1e-4


def ours(directory: pathlib.Path, tokens: np.ndarray):
  """(config, parameters, logits) of a checkpoint."""
  config = load.read_config(directory)
  params = load.load_params(directory, config)
  positions = jnp.arange(tokens.shape[1])[None]
  hidden = transformer.forward(
    params, tokens, positions, jnp.ones_like(tokens), config
  )
  return config, params, np.asarray(transformer.logits(params, hidden, config))


def theirs(directory: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
  """Logits of transformers, every tensor of the directory being used."""
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    directory,
    attn_implementation='eager',
    dtype=torch.float32,
    output_loading_info=True,
  )
  unused = {name: keys for name, keys in info.items() if keys}
  if unused:
    raise AssertionError(f'transformers reports {unused} for {directory}')
  with torch.no_grad():
    ids = torch.from_numpy(tokens.astype(np.int64))
    return model.eval()(ids, use_cache=False).logits.numpy()


def check(name: str, seed: int, directory: pathlib.Path) -> dict[str, float]:
  """Largest gap of logits, by what was compared."""
  model = build(name, seed)
  want = expected(model, seed)
  tokens, logits = want['tokens'], want['logits']
  written, saved = directory / 'theirs', directory / 'ours'
  model.save_pretrained(written)
  config, params, have = ours(written, tokens)
  save.save_params(saved, params, config, max_shard_bytes=60_000)
  return {
    'their checkpoint, our logits': float(np.abs(have - logits).max()),
    'our checkpoint, their logits': float(
      np.abs(theirs(saved, tokens) - logits).max()
    ),
  }


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--seeds', type=int, nargs='+', default=[100, 101])
  passed = failed = 0
  for seed in parser.parse_args().seeds:
    for name in MODELS:
      with tempfile.TemporaryDirectory() as directory:
        gaps = check(name, seed, pathlib.Path(directory))
      for what, gap in gaps.items():
        good = gap <= TOLERANCE
        passed, failed = passed + good, failed + (not good)
        print(f'{"ok" if good else "FAIL":4} {name} {seed}: {what} {gap:.1e}')
  print(f'{passed} passed, {failed} failed')
  return 1 if failed else 0


if __name__ == '__main__':
  sys.exit(main())
