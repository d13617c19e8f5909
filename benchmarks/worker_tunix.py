"""google-tunix's vanilla sampler and agentic collection, as a worker.

Runs in its own virtual environment (see `peers`). Single-turn rows call
`tunix.generate.sampler.Sampler` with one batch of prompts. Multi-turn rows go
the way of its agentic learner: `RolloutOrchestrator` over
`TrajectoryCollectEngine`, whose model call renders the whole conversation and
gives it to `VanillaRollout.generate`, one conversation a call. The trainer
around it is left out, which only saves it time. Text is ids in decimal, so
that its tokenization costs next to nothing and loses nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import Any

import jax.numpy as jnp
from tunix.generate import sampler as sampler_lib
from tunix.generate import tokenizer_adapter
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl.agentic import utils as agentic_utils
from tunix.rl.agentic.agents import model_agent
from tunix.rl.agentic.environments import base_environment
from tunix.rl.agentic.pipeline import rollout_orchestrator
from tunix.rl.rollout import base_rollout, vanilla_rollout

from benchmarks import worker


class Ids:
  """A tokenizer, and a chat parser, over ids in decimal."""

  def encode(self, text, **_):
    return [int(word) for word in text.split()]

  def decode(self, ids, **_):
    return ' '.join(map(str, ids))

  def bos_id(self):
    return 0

  def eos_id(self):
    return 0

  def pad_id(self):
    return 0

  def parse(self, messages, **_):
    return ' '.join(m['content'] for m in messages if m['content'])


class Observations(base_environment.BaseTaskEnv):
  """Answers turn after turn with what `task` holds."""

  def _initial_observation(self):
    return self.task['prompt']

  def _step_impl(self, action):
    done = self.step_count >= self.max_steps
    text = None if done else self.task['observations'][self.step_count - 1]
    return base_environment.EnvStepResult(text, 0.0, done, {})


_model: Any = None
_samplers: dict[int, Any] = {}
_rollouts: dict[int, Any] = {}


def load(directory: str, config: dict[str, Any]) -> dict[str, Any]:
  """Loads a Llama-type model; `config` are its `ModelConfig` fields."""
  global _model
  # Of the former model nothing may stay in memory.
  _model = None
  _samplers.clear()
  _rollouts.clear()
  _model = llama_params.create_model_from_safe_tensors(
    directory, llama.ModelConfig(**config), dtype=jnp.float32
  )
  return {}


def _cache_config(size: int, kind):
  config = _model.config
  return kind(
    cache_size=size,
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
  )


def _sampler(size: int):
  if size not in _samplers:
    _samplers[size] = sampler_lib.Sampler(
      _model, Ids(), _cache_config(size, sampler_lib.CacheConfig)
    )
  return _samplers[size]


def _nothing_stops() -> list[int]:
  return [_model.config.vocab_size]  # an id that no token has


def decode(prompts: list[list[int]], new_tokens: int, seed: int) -> dict:
  """Samples `new_tokens` after every prompt, at temperature 1.

  The cache is as short as it may be. No log-probs are asked for.
  """
  length = len(prompts[0])
  sample = _sampler(length + new_tokens)
  texts = [Ids().decode(p) for p in prompts]
  clock = worker.Clock()
  out = sample(
    texts,
    max_generation_steps=new_tokens,
    max_prompt_length=length,
    temperature=1.0,
    top_p=1.0,
    eos_tokens=_nothing_stops(),
    seed=seed,
  )
  return {**clock.read(), 'tokens': sum(len(t) for t in out.tokens)}


def first_tokens(prompts: list[list[int]]) -> dict:
  """The likeliest next token of every prompt, to compare weights by."""
  out = _sampler(len(prompts[0]) + 1)(
    [Ids().decode(p) for p in prompts],
    max_generation_steps=1,
    max_prompt_length=len(prompts[0]),
    eos_tokens=_nothing_stops(),
  )
  return {'tokens': [int(t[0]) for t in out.tokens]}


def multiturn(
  prompts: list[list[int]],
  observations: list[list[list[int]]],
  turn_tokens: int,
  cache_size: int,
  seed: int,
) -> dict:
  """All trajectories at once, each turn of `turn_tokens` tokens.

  Args:
    observations: per trajectory those between its turns, one less than turns.
    cache_size: of the sampler; every step attends over all of it.

  Returns:
    with `prefilled_tokens`: prompt tokens that went through the model, its
    padding to powers of two included, over `calls` of the sampler.
  """
  if cache_size not in _rollouts:
    _rollouts[cache_size] = vanilla_rollout.VanillaRollout(
      _model, Ids(), _cache_config(cache_size, base_rollout.CacheConfig)
    )
  rollout = _rollouts[cache_size]
  config = base_rollout.RolloutConfig(
    max_tokens_to_generate=turn_tokens,
    temperature=1.0,
    top_p=1.0,
    max_prompt_length=1,  # then a call pads to the next power of two
    kv_cache_size=cache_size,
    eos_tokens=_nothing_stops(),
    return_logprobs=True,  # its agentic learner asks for them
    seed=seed,
  )
  counts = {'calls': 0, 'prefilled_tokens': 0, 'tokens': 0}
  lock, ids = threading.Lock(), Ids()

  def model_call(chat, env=None, max_generation_steps=None):
    out = rollout.generate([ids.parse(chat)], config)
    with lock:
      counts['calls'] += 1
      counts['prefilled_tokens'] += out.left_padded_prompt_tokens.size
      counts['tokens'] += len(out.tokens[0])
    return out

  tasks = [
    {
      'prompt': ids.decode(prompt),
      'observations': [ids.decode(o) for o in between],
    }
    for prompt, between in zip(prompts, observations, strict=True)
  ]
  clock = worker.Clock()
  n = asyncio.run(_collect(tasks, model_call, ids, len(observations[0]) + 1))
  if n != len(tasks):
    raise RuntimeError(f'{n} trajectories came back of {len(tasks)}')
  return {**clock.read(), **counts}


async def _collect(tasks, model_call, ids, turns: int) -> int:
  """Runs all episodes at once, as `AgenticRLLearner` would; their number."""
  asyncio.get_running_loop().set_default_executor(
    concurrent.futures.ThreadPoolExecutor(len(tasks) + 1)
  )
  orchestrator = rollout_orchestrator.RolloutOrchestrator(
    rollout_sync_lock=agentic_utils.RolloutSyncLock(),
    engine_kwargs={
      'model_call': model_call,
      'tokenizer': tokenizer_adapter.TokenizerAdapter(ids),
      'chat_parser': ids,
    },
    max_concurrency=len(tasks),
  )
  pairs = [
    (
      model_agent.ModelAgent(''),
      Observations(task, max_steps=turns, group_id=i, pair_index=i),
    )
    for i, task in enumerate(tasks)
  ]
  producer = asyncio.create_task(
    orchestrator.run_producers_from_stream(
      iter(pairs),
      group_size=1,
      group_key_fn=lambda i, env, trajectory: env.extra_kwargs['group_id'],
      collect_mode='Token',
    )
  )
  await asyncio.sleep(0)
  n = 0
  async for group in orchestrator.yield_batches(batch_size=1):
    n += len(group)
  await producer
  return n


if __name__ == '__main__':
  worker.serve(
    {
      'load': load,
      'decode': decode,
      'first_tokens': first_tokens,
      'multiturn': multiturn,
    },
    ('google-tunix', 'jax', 'flax'),
  )
