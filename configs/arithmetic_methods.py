"""The quickstart's task with the field's other algorithms: `:METHOD`.

Paper:    each method names its own below.
Command:  python -m experiments.main --config=configs/arithmetic_methods.py:dapo
          --workdir=runs/dapo
Hardware: any.
Expected: every method learns; on a task this easy they differ little.
Measured: none of them at full length yet; a test has each take two steps.

A method is what it changes in the quickstart's config. Each change can be made
on the command line as well (README, "An experiment is a config file"); here
they stand side by side.
"""

import ml_collections

from configs import quickstart

RL = 'agentjax.rl'


def named(name, **options):
  """A function of agentjax.rl with options."""
  return {'function': f'{RL}.{name}', **options}


def value(name):
  """The named thing itself."""
  return {'value': f'{RL}.{name}'}


def grpo():
  """arXiv:2402.03300, as in its equation: a mean of means over sequences."""
  return {
    'aggregation': value('aggregation.sequence_mean_token_mean'),
    'learner.loss': named('losses.ppo_clip', clip_low=0.2, clip_high=0.2),
  }


def dr_grpo():
  """arXiv:2503.20783: no std, no length in the divisor, no KL."""
  return {
    'advantages': named('advantages.dr_grpo'),
    'aggregation': named('aggregation.sequence_mean_token_sum_norm', length=48),
    'learner.kl_coef': 0.0,
  }


def dapo():
  """arXiv:2503.14476, without a refill of the batch."""
  return {
    'learner.loss': named('losses.ppo_clip', clip_low=0.2, clip_high=0.28),
    'learner.kl_coef': 0.0,
    'shape': named('shaping.overlong', limit=48, buffer=16),
    'select': value('shaping.informative'),
  }


def rloo():
  """arXiv:2402.14740."""
  return {
    'advantages': named('advantages.rloo', scores=value('seam.total')),
    'learner.loss': named('losses.reinforce'),
    'learner.kl_coef': 0.0,
    'reward_kl_coef': 0.01,
  }


def reinforce_plus_plus():
  """arXiv:2501.03262."""
  return {
    'advantages': named('advantages.reinforce_plus_plus'),
    'learner.kl_coef': 0.0,
    'reward_kl_coef': 0.01,
  }


def gspo():
  """arXiv:2507.18071."""
  return {
    'aggregation': value('aggregation.sequence_mean_token_mean'),
    'learner.loss': named('surrogates.gspo', clip_low=3e-4, clip_high=4e-4),
  }


def gspo_turn():
  """As gspo, with a ratio for each turn."""
  return {
    'aggregation': value('aggregation.turn_mean_token_mean'),
    'learner.loss': named(
      'surrogates.gspo', clip_low=3e-4, clip_high=4e-4,
      log_ratio=value('losses.turn_ratio'),
    ),
  }  # fmt: skip


def cispo():
  """MiniMax-M1, arXiv:2506.13585."""
  return {'learner.loss': named('losses.cispo', cap=1.28)}


def sapo():
  """arXiv:2511.20347."""
  return {'learner.loss': named('surrogates.sapo')}


def gmpo():
  """arXiv:2507.20673."""
  return {
    'aggregation': value('aggregation.sequence_mean_token_mean'),
    'learner.loss': named('surrogates.gmpo'),
  }


def dppo():
  """arXiv:2602.04879, total variation."""
  return {'learner.loss': named('surrogates.dppo_tv', low=0.2, high=0.28)}


def webrl():
  """arXiv:2411.02337, the paper's objective and its moving reference."""
  return {
    'advantages': named('advantages.dr_grpo'),
    'aggregation': value('aggregation.turn_mean_token_mean'),
    'learner.loss': named('regression.webrl', beta=0.5),
    'learner.kl_coef': 0.0,
    'move_reference': {'function': 'agentjax.references.renewed', 'every': 20},
  }


def decoupled():
  """AReaL, arXiv:2505.24298: several steps a draw, weights of old / mu."""
  return {
    'learner.loss': named(
      'correction.decoupled',
      loss=named('losses.ppo_clip'),
      weigh=named('correction.truncated', high=2.0),
    ),
    'recompute_old': True,
    'minibatches': 2,
  }


def icepop():
  """Ring-1T, arXiv:2510.18855: weights outside of a range are 0."""
  return decoupled() | {
    'learner.loss': named(
      'correction.decoupled',
      loss=named('losses.ppo_clip'),
      weigh=named('correction.icepop', low=0.5, high=5.0),
    )
  }


def _critic(**options):
  return {
    'call': 'agentjax.update.Critic',
    'optimizer': {'call': 'agentjax.optimizers.adamw', 'learning_rate': 1e-3},
    **options,
  }


def ppo():
  """arXiv:1707.06347 over turns, GAE that skips observations; KL in the reward.

  No group is needed: each trajectory is of a task of its own.
  """
  return {
    'advantages': named('returns.gae', lam=0.95),
    'value_targets': named('returns.value_targets', lam=1.0),
    'learner.critic': _critic(warmup=4),
    'learner.kl_coef': 0.0,
    'reward_kl_coef': 0.01,
    'groups': 256,
    'group_size': 1,
  }


def turn_ppo():
  """Turn-wise GAE, a critic of its own that is read at the ends of turns."""
  return {
    'advantages': named('turns.turn_gae'),
    'value_targets': named('turns.turn_value_targets'),
    'learner.critic': _critic(own_trunk=True, turn_ends=True, warmup=4),
    'groups': 256,
    'group_size': 1,
  }


def bi_level_ppo():
  """Bi-level GAE: turns first, then tokens within each."""
  return {
    'advantages': named('turns.bi_level_gae'),
    'value_targets': named('turns.bi_level_value_targets'),
    'learner.critic': _critic(own_trunk=True, warmup=4),
    'groups': 256,
    'group_size': 1,
  }


def remax():
  """arXiv:2310.10505: the greedy answer's reward is the baseline."""
  return {
    'advantages': named('advantages.remax'),
    'branch': {'value': 'agentjax.rollout.branches.greedy_answers'},
  }


def igpo():
  """arXiv:2510.14967: what a turn adds to the right answer's likelihood."""
  return {
    'advantages': named('turns.igpo'),
    'gold_answer': {'value': 'agentjax.gold.verified'},
  }


def gigpo():
  """arXiv:2505.10978: groups of the same state, beside those of the task."""
  return {'advantages': named('anchors.gigpo')}


def tree_grpo():
  """arXiv:2509.21240: leaves forked at turns; what they share stands once."""
  return {
    'advantages': named('trees.tree_grpo'),
    'branch': {'function': 'agentjax.rollout.branches.grow', 'forks': 1},
    'group_size': 4,
    'learner.trees': True,
    'learner.length': 320,
    'learner.rows': 1,
    'prefix_weight': value('trees.shared_once'),
  }


def vineppo():
  """arXiv:2410.01679: values of states by continuing from them."""
  return {
    'advantages': named('trees.vineppo'),
    'branch': {
      'function': 'agentjax.rollout.branches.state_values',
      'continuations': 4,
    },
    'groups': 64,
    'group_size': 1,
  }


METHODS = {
  f.__name__: f
  for f in (
    grpo, dr_grpo, dapo, rloo, reinforce_plus_plus, gspo, gspo_turn, cispo,
    sapo, gmpo, dppo, webrl, decoupled, icepop, ppo, turn_ppo, bi_level_ppo,
    remax, igpo, gigpo, tree_grpo, vineppo,
  )
}  # fmt: skip


def get_config(method: str = 'grpo') -> ml_collections.ConfigDict:
  if method not in METHODS:
    raise ValueError(f'no method {method!r}: there are {", ".join(METHODS)}')
  config = quickstart.get_config().to_dict()
  for key, changed in METHODS[method]().items():
    *path, last = key.split('.')
    section = config
    for part in path:
      section = section[part]
    section[last] = changed
  return ml_collections.ConfigDict(config)
