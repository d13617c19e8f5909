"""google-tunix's GRPO step, as a worker of the benchmark.

Runs in its own virtual environment (see `peers`). The model is its Llama, as
its config has it by default (no remat); the trainer is its `rl.trainer.Trainer`
with what its agentic `GRPOLearner` gives it: the loss registered as `grpo` over
a `TrainExample`, whose completion mask tells sampled tokens from observations.
A step is the trainer's own jitted one, made and called as its `train` does,
until the new weights are there; sampling, rewards and `train`'s logs are left
out. KL is off (beta 0), the loss a mean over all sampled tokens (token-mean).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl import function_registry, trainer
from tunix.rl.agentic import agentic_grpo_learner as grpo
from tunix.sft import peft_trainer

from benchmarks import learner_work, worker, worker_memory

PAD = 0  # an id that no token of the batch has

_step: Any = None


def load(directory: str, config: dict, work: str, settings: dict) -> dict:
  """Loads the model and the batch; `config` are `ModelConfig` fields."""
  global _step
  model = llama_params.create_model_from_safe_tensors(
    directory, llama.ModelConfig(**config), dtype=jnp.float32
  )
  optimizer = optax.chain(
    optax.clip_by_global_norm(settings['max_grad_norm']),
    optax.adamw(
      settings['learning_rate'],
      settings['b1'],
      settings['b2'],
      settings['eps'],
      weight_decay=settings['weight_decay'],
    ),
  )
  algorithm = grpo.GRPOConfig(
    num_generations=learner_work.ROWS,
    beta=0.0,
    epsilon=settings['clip'],
    epsilon_high=settings['clip'],
    loss_agg_mode='token-mean',
  )
  algorithm.temperature = 1.0
  policy_loss = function_registry.get_policy_loss_fn(algorithm.policy_loss_fn)
  made = trainer.Trainer(
    model,
    optimizer,
    peft_trainer.TrainingConfig(eval_every_n_steps=10**9),
    lambda: {},
  )
  made.with_loss_fn(
    lambda model, train_example, algo_config: policy_loss(
      model, train_example, algo_config=algorithm, pad_id=PAD, eos_id=PAD
    ),
    has_aux=True,
  )
  made.with_gen_model_input_fn(
    lambda x: {'train_example': x, 'algo_config': algorithm}
  )
  train_step, _ = made.jit_train_and_eval_step(cache_nnx_graph=True)
  example = _example(learner_work.read(work))

  def step() -> dict[str, float]:
    loss, _, norm = train_step(example)
    jax.block_until_ready(nnx.state(model))
    return {'loss': float(loss), 'grad_norm': float(norm)}

  _step = step
  return {}


def _example(given: learner_work.Work) -> grpo.TrainExample:
  start = learner_work.PROMPT
  tokens = jnp.asarray(given.tokens)
  return grpo.TrainExample(
    prompt_ids=tokens[:, :start],
    prompt_mask=tokens[:, :start] != PAD,
    completion_ids=tokens[:, start:],
    completion_mask=jnp.asarray(given.mask[:, start:], jnp.int32),
    advantages=jnp.asarray(given.advantages),
    ref_per_token_logps=None,
    old_per_token_logps=jnp.asarray(given.logprobs[:, start:]),
  )


def step() -> dict[str, Any]:
  """One optimizer step on the batch."""
  return worker_memory.measured(_step)


if __name__ == '__main__':
  worker.serve({'load': load, 'step': step}, ('google-tunix', 'jax', 'flax'))
