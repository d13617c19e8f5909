"""A plain GRPO step of PyTorch on CPU, as a worker of the benchmark.

Runs in the virtual environment of `peers`' hf. The model is Hugging Face's,
with SDPA attention and without gradient checkpointing; the loss is the clipped
one over the sampled tokens' log-probs, by log_softmax of all logits and gather.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks import learner_work, worker, worker_memory

_step: Any = None


def load(directory: str, threads: int, work: str, settings: dict) -> dict:
  """Loads the model and the batch; `threads` is what PyTorch may use."""
  global _step
  torch.set_num_threads(threads)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32, attn_implementation='sdpa'
  ).train()
  optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=settings['learning_rate'],
    betas=(settings['b1'], settings['b2']),
    eps=settings['eps'],
    weight_decay=settings['weight_decay'],
  )
  given = learner_work.read(work)
  tokens = torch.from_numpy(given.tokens).long()
  # By the label: entry t belongs to token t + 1.
  mask, old = (
    torch.from_numpy(x)[:, 1:].float() for x in (given.mask, given.logprobs)
  )
  advantages = torch.from_numpy(given.advantages)[:, None]
  clip = settings['clip']

  def step() -> dict[str, float]:
    logits = model(tokens, use_cache=False).logits[:, :-1]
    logprobs = torch.log_softmax(logits, -1)
    logprobs = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1 - clip, 1 + clip)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    loss = (loss * mask).sum() / mask.sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(
      model.parameters(), settings['max_grad_norm']
    )
    optimizer.step()
    optimizer.zero_grad()
    return {'loss': loss.item(), 'grad_norm': norm.item()}

  _step = step
  return {'parameters': sum(p.numel() for p in model.parameters())}


def step() -> dict[str, Any]:
  """One optimizer step on the batch, timed."""
  return worker_memory.timed(_step)


def memory() -> dict[str, Any]:
  """One optimizer step on the batch, and the memory that it held."""
  return worker_memory.held(_step)


if __name__ == '__main__':
  worker.serve(
    {'load': load, 'step': step, 'memory': memory},
    ('torch', 'transformers'),
  )
