"""Maps: advantages of trajectories, normalisation, shaping of rewards.

B2 row 3: most systems give a group of one its raw reward. Ours is 0; the maps
use the switch `raw_singletons` where the public function does the other.
"""

import functools

import numpy as np

from agentjax.rl import advantages as ours
from agentjax.rl import draw_from, kl, shaping
from agentjax.rl.draw import drop_unsampled
from agentjax.rl.normalize import moments, normalize, together, whiten
from agentjax.rl.returns import carry, reset, returns
from agentjax.rl.token_baseline import otb, tir_otb

from . import CannotMap, Result, check

# ---- verl -------------------------------------------------------------------

VERL = ('token_level_rewards', 'response_mask', 'index')


def verl_draw(case, **others):
  """Rewards of all slots are the outcome: verl sums them before the mask."""
  rewards = np.asarray(case.inputs['token_level_rewards'], np.float64)
  return draw_from.arrays(
    case.inputs['response_mask'],
    rewards_B=rewards.sum(-1),
    groups_B=case.inputs.get('index'),
    **others,
  )


def dense_draw(case, **others):
  """Rewards by token; those under the mask are dropped, as verl does."""
  return draw_from.arrays(
    case.inputs['response_mask'],
    groups_B=case.inputs.get('index'),
    token_rewards=case.inputs['token_level_rewards'],
    place=drop_unsampled,
    **others,
  )


def by_mask(mask, **outputs):
  """Rows of equal length as arrays, compared where the policy sampled."""
  mask = np.asarray(mask).astype(bool)
  return Result(
    {k: np.reshape(np.array(v), mask.shape) for k, v in outputs.items()},
    dict.fromkeys(outputs, mask),
  )


def same_returns(case, tokens):
  """Many functions give their advantages out as returns too."""
  mask = case.inputs['response_mask']
  return by_mask(mask, advantages=tokens, returns=tokens)


def scale_of(case):
  by_std = case.args.get('norm_adv_by_std_in_grpo', True)
  return ours.group_std if by_std else ours.no_std


def config_of(case, *known):
  config = dict(case.args.get('config') or {})
  if surplus := sorted(set(config) - set(known)):
    raise CannotMap(f'{case.function} with config {surplus}')
  return config


def grpo(case):
  check(case, ('norm_adv_by_std_in_grpo', 'epsilon', 'config'), VERL)
  config_of(case, 'norm_adv_by_std_in_grpo')
  tokens = ours.grpo(
    verl_draw(case),
    scale=scale_of(case),
    eps=case.args.get('epsilon', 1e-6),
    raw_singletons=True,
  )
  return same_returns(case, tokens)


def grpo_vectorized(case):
  """B2 row 2: the older form floors the variance at epsilon."""
  check(case, ('norm_adv_by_std_in_grpo', 'epsilon', 'config'), VERL)
  config_of(case, 'norm_adv_by_std_in_grpo')
  eps, scale = case.args.get('epsilon', 1e-6), scale_of(case)
  if case.source.startswith('volcengine') and scale is ours.group_std:
    scale = functools.partial(scale, least=np.sqrt(eps))
  tokens = ours.grpo(verl_draw(case), scale=scale, eps=eps, raw_singletons=True)
  return same_returns(case, tokens)


def pass_at_k(case):
  check(case, ('epsilon', 'config', 'norm_adv_by_std_in_grpo'), VERL)
  config = config_of(case, 'norm_adv_by_std_in_grpo')
  by_std = config.get('norm_adv_by_std_in_grpo', True)
  tokens = ours.pass_at_k(
    verl_draw(case),
    scale=ours.group_std if by_std else ours.no_std,
    eps=case.args.get('epsilon', 1e-6),
  )
  return same_returns(case, tokens)


def simple(estimator, **options):
  """Of the outcome alone; epsilon has no part in it."""

  def run(case):
    check(case, ('epsilon', 'config'), VERL)
    config_of(case)
    return same_returns(case, estimator(verl_draw(case), **options))

  return run


def gpg(case):
  """Its `alpha` is overwritten before it is used."""
  check(case, ('epsilon', 'f_norm', 'alpha', 'config'), VERL)
  tokens = ours.gpg(
    verl_draw(case),
    divisor=case.args.get('f_norm', 1.0),
    raw_singletons=True,
  )
  return same_returns(case, tokens)


def gdpo(case):
  known = ('norm_adv_by_std_in_grpo', 'epsilon', 'config')
  config = config_of(
    case, 'gdpo_reward_keys', 'gdpo_reward_weights', 'norm_adv_by_std_in_grpo'
  )
  keys = list(config.get('gdpo_reward_keys') or [])
  check(case, known, (*VERL, *keys))
  weights = config.get('gdpo_reward_weights') or [1.0] * max(len(keys), 1)
  draw = verl_draw(case, parts={k: case.inputs[k] for k in keys})
  tokens = ours.gdpo(
    draw,
    weights=dict(zip(keys or ['outcome'], weights, strict=True)),
    scale=scale_of(case),
    eps=case.args.get('epsilon', 1e-6),
    raw_singletons=True,
  )
  return same_returns(case, tokens)


def reinforce_plus_plus(case):
  """B2 row 6: before August 2026 verl forgot the return at each observation."""
  check(case, ('config', 'gamma'), VERL)
  gamma = config_of(case, 'gamma').get('gamma', case.args.get('gamma', 1.0))
  cross = reset if case.source.startswith('volcengine') else carry
  draw, mask = dense_draw(case), case.inputs['response_mask']
  return by_mask(
    mask,
    advantages=ours.reinforce_plus_plus(draw, gamma=gamma, cross=cross),
    returns=returns(draw, gamma=gamma, cross=cross),
  )


def remax(case):
  check(case, ('config',), (*VERL, 'reward_baselines'))
  draw = dense_draw(case, baselines_N=case.inputs['reward_baselines'])
  mask = case.inputs['response_mask']
  return by_mask(mask, advantages=ours.remax(draw), returns=returns(draw))


def token_baseline(estimator):
  def run(case):
    check(
      case,
      ('handle_zero_tail', 'epsilon'),
      (*VERL, 'old_log_probs', 'sum_pi_squared', 'rollout_is_weights'),
    )
    draw = dense_draw(
      case,
      logprobs=case.inputs['old_log_probs'],
      sum_squares=case.inputs['sum_pi_squared'],
    )
    tokens = estimator(
      draw,
      importance=case.inputs.get('rollout_is_weights'),
      raw_tail=case.args.get('handle_zero_tail', True),
      raw_singletons=True,
      eps=case.args.get('epsilon', 1e-8),
    )
    mask = case.inputs['response_mask']
    return by_mask(mask, advantages=tokens, returns=returns(draw))

  return run


def masked_whiten(case):
  check(case, (), ('values', 'mask'))
  values = case.inputs['values']
  mask = case.inputs['mask'].astype(bool)
  mean, variance = moments(values, mask)
  return Result(
    {
      'whitened': whiten(values, mask),
      'whitened_noshift': whiten(values, mask, keep_mean=True),
      'mean': mean,
      'var': variance,
    },
    {'whitened': mask, 'whitened_noshift': mask},
  )


# ---- TRL, tunix -------------------------------------------------------------


def in_rows(rewards, size):
  """Groups of `size` that stand one after the other; NaN is unscorable."""
  rewards = np.asarray(rewards, np.float64)
  if rewards.ndim != 1 or len(rewards) % size:
    raise CannotMap(f'rewards of shape {rewards.shape} in groups of {size}')
  return draw_from.arrays(
    np.ones((len(rewards), 1)),
    rewards_B=rewards,
    groups_B=np.arange(len(rewards)) // size,
    valid=np.isfinite(rewards),
  )


def trl(case):
  """B2 row 2: eps 1e-4. `batch` is the std of the rewards themselves."""
  check(case, ('scale_rewards', 'num_generations'), ('rewards',))
  scales = {
    'group': ours.group_std,
    True: ours.group_std,
    'batch': ours.batch_std,
    'none': ours.no_std,
    False: ours.no_std,
  }
  name = case.args.get('scale_rewards', 'group')
  if name not in scales:
    raise CannotMap(f'scale_rewards {name!r}')
  draw = in_rows(case.inputs['rewards'], case.args['num_generations'])
  tokens = ours.grpo(draw, scale=scales[name], eps=1e-4)
  return Result({'advantages': np.ravel(tokens)})


def tunix(estimator):
  def run(case):
    check(case, ('num_generations',), ('rewards',))
    draw = in_rows(case.inputs['rewards'], case.args['num_generations'])
    return Result({'advantages': np.ravel(estimator(draw))})

  return run


# ---- AReaL ------------------------------------------------------------------

LEVELS = ('group', 'batch', None)


def normalization(case):
  """Its groups stand one after the other; ours of one number need care.

  B2 row 3: with `mean_leave1out` a group of one keeps its numbers, also where
  it is one row of many tokens.
  """
  names = ('mean_level', 'std_level', 'mean_leave1out', 'std_unbiased',
           'group_size', 'eps')  # fmt: skip
  check(case, names, ('x', 'loss_mask'))
  mean, std, loo, unbiased, size, eps = (
    case.args.get(n, d)
    for n, d in zip(names, ('batch', 'batch', False, True, 1, 1e-5),
                    strict=True)
  )  # fmt: skip
  if mean not in LEVELS or std not in LEVELS:
    raise CannotMap(f'levels {mean!r} and {std!r}')
  x = np.asarray(case.inputs['x'], np.float64)
  mask = np.asarray(case.inputs.get('loss_mask', np.ones(x.shape))) > 0
  if 'group' in (mean, std) and len(x) % size:
    raise CannotMap(f'{len(x)} rows in groups of {size}')
  rows = np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) // size
  label = {
    'group': np.where(mask, rows, -1),
    'batch': together(mask),
    None: None,
  }
  mean_label, std_label = label[mean], label[std]
  if mean == 'group' and size == 1 and loo:
    mean_label = None
  if std == 'group' and size == 1 and unbiased:
    # Each number for itself: its spread is 1.
    std_label = np.where(mask, np.arange(x.size).reshape(x.shape), -1)
  y = normalize(
    x,
    mean_label,
    std_label,
    leave_one_out=bool(loo),
    raw_singletons=bool(loo),
    ddof=int(unbiased),
    eps=eps,
  )
  return Result({'y': y}, {'y': mask})


def reward_overlong_penalty(case):
  check(
    case,
    ('overlong_tokens', 'overlong_penalty_factor', 'max_response_length'),
    ('rewards', 'loss_mask'),
  )
  draw = draw_from.arrays(case.inputs['loss_mask'])
  penalty = shaping.overlong_penalty(
    shaping.policy_tokens(draw),
    limit=case.args['max_response_length'],
    buffer=case.args['overlong_tokens'],
    factor=case.args['overlong_penalty_factor'],
  )
  return Result({'rewards': case.inputs['rewards'] + penalty})


KL_VALUES = {'k1': kl.k1, 'k2': kl.k2, 'k3': kl.k3}


def areal_kl(case, logprobs, ref, mask):
  """B2 row 18: clipped to +-10, whatever the estimator."""
  name = case.args.get('kl_estimator', 'k1')
  if name not in KL_VALUES:
    raise CannotMap(f'kl_estimator {name!r}')
  value = kl.bounded(KL_VALUES[name](logprobs, ref, mask), 10.0)
  coef = case.args.get('kl_ctl', 0.0)
  return kl.in_reward(np.zeros(mask.shape), value, mask, coef)


# ---- OpenRLHF ---------------------------------------------------------------


def masked_normalize(case):
  """B2 row 23: variance with ddof 0 of each row, at least eps."""
  check(case, ('dim', 'eps'), ('tensor', 'mask'))
  dim, eps = case.args.get('dim', 1), case.args.get('eps', 1e-8)
  x, mask = case.inputs['tensor'], case.inputs['mask'].astype(bool)
  if dim not in (0, 1, -1, None):
    raise CannotMap(f'dim {dim!r}')
  run = functools.partial(whiten, ddof=0, eps=0.0, least=eps)
  if dim is None:
    y = run(x, mask)
  elif dim == 0:
    y = np.stack([run(*c) for c in zip(x.T, mask.T, strict=True)], 1)
  else:
    y = np.stack([run(*r) for r in zip(x, mask, strict=True)])
  return Result({'y': y}, {'y': mask})


FUNCTIONS = {
  'compute_grpo_outcome_advantage': grpo,
  'compute_grpo_vectorized_outcome_advantage': grpo_vectorized,
  'compute_grpo_passk_outcome_advantage': pass_at_k,
  'compute_rloo_outcome_advantage': simple(ours.rloo, raw_singletons=True),
  'compute_rloo_vectorized_outcome_advantage': simple(ours.rloo),
  'compute_opo_outcome_advantage': simple(ours.opo, raw_singletons=True),
  'compute_reinforce_plus_plus_baseline_outcome_advantage': simple(
    ours.reinforce_plus_plus_baseline, raw_singletons=True
  ),
  'compute_reinforce_plus_plus_outcome_advantage': reinforce_plus_plus,
  'compute_gdpo_outcome_advantage': gdpo,
  'compute_gpg_outcome_advantage': gpg,
  'compute_remax_outcome_advantage': remax,
  'compute_optimal_token_baseline_advantage': token_baseline(otb),
  'compute_multi_turn_optimal_token_baseline_advantage': token_baseline(
    tir_otb
  ),
  'masked_whiten': masked_whiten,
  'GRPOTrainer advantage block': trl,
  'compute_advantages': tunix(ours.grpo),
  'compute_rloo_advantages': tunix(ours.rloo),
  'compute_drgrpo_advantages': tunix(ours.dr_grpo),
  'Normalization': normalization,
  'reward_overlong_penalty': reward_overlong_penalty,
  'masked_normalize': masked_normalize,
}
