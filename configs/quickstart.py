"""Two-call arithmetic with a calculator, from random weights, on a CPU.

Paper:    GRPO, arXiv:2402.03300, on a task of our own.
Command:  make quickstart
Hardware: any.
Expected: a policy that does what its imperfect demonstrations did succeeds on
          about half of the held-out tasks, and on nearly all after GRPO.
Measured: 0.52, 0.51, 0.46 before and 0.95, 0.94, 0.91 after GRPO for seeds
          0, 1, 2; 289 s on 2 cores (2026-11-30, experiments/LOG.md).
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  seed = 0
  layers = 2
  width = 128
  tasks = {
    'call': 'agentjax.env.arithmetic.tasks',
    'split': 'train',
    'n': 4096,
    'seed': seed,
    'least': 10,
    'most': 9999,
  }
  environment = {
    'function': 'agentjax.env.arithmetic.environment',
    'max_calls': 4,
    'max_failures': 2,
  }
  return ml_collections.ConfigDict(
    {
      'seed': seed,
      'policy': {
        'call': 'agentjax.training.Policy',
        'config': {
          'call': 'agentjax.model.config.ModelConfig',
          'vocab_size': 285,
          'padded_vocab': 288,
          'width': width,
          'layers': ((('global',), layers),),
          'heads': 4,
          'kv_heads': 4,
          'head_size': 32,
          'mlp': 384,
          'context': 128,
          'qk_norm': True,
        },
      },
      'chat': {
        'call': 'agentjax.text.chat.Chat',
        'vocab': {
          'call': 'agentjax.text.vocab.load_sentencepiece',
          'path': {'call': 'agentjax.text.train_vocab.arithmetic_model'},
        },
        'format': {'value': 'agentjax.text.formats.arithmetic'},
      },
      'make_environment': environment,
      'tasks': tasks,
      'limits': {
        'call': 'agentjax.rollout.episode.Limits',
        'turns': 5,
        'turn_tokens': 16,
        'model_tokens': 48,
        'context': 112,
        'observation_tokens': 32,
      },
      'sampling': {
        'call': 'agentjax.rollout.sampling.Sampling',
        'temperature': 1.0,
      },
      'engine': {
        'function': 'agentjax.rollout.engine.Engine',
        'slots': 64,
        'context': 112,
        'chunk': 16,
        'buckets': (8, 16, 32),
      },
      'learner': {
        'function': 'agentjax.learner.Learner',
        'loss': {
          'function': 'agentjax.rl.losses.ppo_clip',
          'clip_low': 0.2,
          'clip_high': 0.28,
        },
        'rows': 4,
        'length': 112,
        'shares': (0.5, 1.0),
        'kl_coef': 0.05,
        'unroll': True,
        'remat': False,
      },
      'optimizer': {
        'call': 'agentjax.optimizers.adamw',
        'learning_rate': 2e-4,
        'warmup_steps': 5,
      },
      'cold_start': {
        'call': 'agentjax.sft.ColdStart',
        'demonstrate': {
          'function': 'agentjax.sft.demonstrations',
          'tasks': tasks,
          'make_environment': environment,
          'expert': {
            'function': 'agentjax.env.arithmetic.expert',
            'flaws': 0.5,
            # Slips of a digit keep the policy from learning numbers by heart:
            # without them it copies only operands that it has seen.
            'kinds': (
              'answers_without_calling',
              'answers_first_result',
              'wrong_operand',
              'wrong_operator',
              'swapped_order',
              'whole_expression',
              'malformed_expression',
              'slip_in_answer',
            ),
          },
        },
        'steps': 800,
        'demonstrations': 16384,
        'per_step': 76,
      },
      'cold_start_optimizer': {
        'call': 'agentjax.optimizers.adamw',
        'learning_rate': 5e-3,
        'warmup_steps': 20,
        'decay_steps': 800,
        'weight_decay': 0.05,
      },
      'evaluation': {
        'call': 'agentjax.training.Evaluating',
        'tasks': tasks | {'split': 'test', 'n': 512},
        'samples': 2,
      },
      'advantages': {'function': 'agentjax.rl.advantages.grpo'},
      'aggregation': {'value': 'agentjax.rl.aggregation.token_mean'},
      'recompute_old': False,
      'reward_kl_coef': 0.0,
      'minibatches': 1,
      'mask_observations': True,
      'steps': 80,
      'groups': 32,
      'group_size': 8,
      'use_reference': True,
      'checkpoint_every': 50,
      'record_every': 10,
    }
  )
