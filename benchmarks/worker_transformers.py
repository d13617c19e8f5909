"""`transformers.generate` on PyTorch CPU, as a worker of the benchmark.

Runs in its own virtual environment (see `peers`). Settings are the fastest of
its plain ones: float32, SDPA attention, the default cache, no logits
processor (temperature 1, no truncation), no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks import worker

_model: Any = None


def load(directory: str, threads: int) -> dict[str, Any]:
  """Loads a model; `threads` is what PyTorch may use."""
  global _model
  torch.set_num_threads(threads)
  _model = transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32, attn_implementation='sdpa'
  ).eval()
  for config in (_model.config, _model.generation_config):
    config.bos_token_id = config.eos_token_id = None
    config.pad_token_id = 0
  return {'parameters': sum(p.numel() for p in _model.parameters())}


@torch.inference_mode()
def decode(prompts: list[list[int]], new_tokens: int, seed: int) -> dict:
  """Samples `new_tokens` after every prompt, at temperature 1."""
  torch.manual_seed(seed)
  clock = worker.Clock()
  tokens = torch.tensor(prompts)
  out = _model.generate(
    tokens,
    attention_mask=torch.ones_like(tokens),
    do_sample=True,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    max_new_tokens=new_tokens,
  )
  made = out[:, tokens.shape[1] :].numpy()
  return {**clock.read(), 'tokens': int(made.size)}


@torch.inference_mode()
def first_tokens(prompts: list[list[int]]) -> dict:
  """The likeliest next token of every prompt, to compare weights by."""
  logits = _model(torch.tensor(prompts)).logits[:, -1]
  return {'tokens': logits.argmax(-1).tolist()}


if __name__ == '__main__':
  worker.serve(
    {'load': load, 'decode': decode, 'first_tokens': first_tokens},
    ('torch', 'transformers'),
  )
