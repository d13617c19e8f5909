"""Shapes of a Qwen2.5-7B policy, to see whether a TPU slice holds it.

A config of four sections and no run: `compile_check` lowers the real learner
and the real engine for chips that are not there.

Paper:    Qwen2.5, arXiv:2412.15115.
Command:  in an environment with `pip install '.[tpu]'`
          python -m experiments.compile_check \
            --config=configs/qwen2_5_7b_shapes.py \
          then one of
            --topology=v5p:2x2x2
            --topology=v5e:4x4 --mesh=fsdp=4,tensor=4 \
              --config.learner.rows=4 --config.learner.length=8192 \
              --engine-topology=v5e:2x2 --engine-mesh=tensor=4 \
              --config.engine.context=8192
            --topology=v5p:4x4x4 --mesh=fsdp=16,tensor=4 \
              --config.learner.rows=32
Hardware: a CPU and 3 GB of memory; minutes, more where others use it.
Expected: all programs fit.
Measured: 2026-11-30, JAX 0.10.2, GB a chip. `add` is one micro-batch; beside it
          stand the optimizer's moments: `all` counts them too.
          topology     mesh         rows      add: given + temporaries = all
          v5p:2x2x2    fsdp 8       8 x 16k   7.62 + 23.22          38.46
          v5e:4x4      fsdp 4, t 4  4 x 8k    3.81 +  5.89          13.51
          v5p:4x4x4    fsdp 16, t 4 32 x 16k  0.95 +  8.24          10.14
          `apply`: 15.23 + 3.81, 7.62 + 1.94 and 1.90 + 0.49. Compiling `add`
          took 344, 472 and 305 s on 2 cores that eight others used, and 84 s
          while they were less busy. The engine: 22.98 on v5p; on v5e 7.62 for a
          chunk and 7.71 for an extension. All of v5e again on 2026-12-01: the
          same, in 496 s on 2 cores that others used.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      'policy': {
        'call': 'agentjax.training.Policy',
        'config': {'value': 'agentjax.model.presets.QWEN2_5_7B'},
      },
      'optimizer': {
        'call': 'agentjax.optimizers.adamw',
        'learning_rate': 1e-6,
      },
      'learner': {
        'function': 'agentjax.learner.Learner',
        'loss': {
          'function': 'agentjax.rl.losses.ppo_clip',
          'clip_low': 0.2,
          'clip_high': 0.28,
        },
        'rows': 8,
        'length': 16_384,
        'dtype': 'bfloat16',
        'remat': {'value': 'agentjax.model.remat.nothing'},
      },
      'engine': {
        'function': 'agentjax.rollout.engine.Engine',
        'slots': 32,
        'context': 16_384,
        'chunk': 16,
        'buckets': (256,),
        'dtype': 'bfloat16',
      },
    }
  )
