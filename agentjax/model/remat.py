"""What the backward pass keeps of a layer, and what it computes again.

Floor 1, model/. A policy is what `jax.checkpoint` takes for one: asked of each
value of a layer, it says whether the value is kept. A layer's values have
these names, each [B, T, ...] of one layer; bytes are for a token of Qwen2.5-7B
in bfloat16:

  block_in   what goes into it; the mesh's tensor axis splits it    7 kB
  qkv        queries, keys and values, rotated                      9 kB
  seen       what attention gives, before it is projected           7 kB
  mlp_in     gate and up, before they are multiplied               76 kB
  attn_out, mlp_out   what is added to the residual stream          7 kB each

`forward` is told one by the learner's `remat`: False or None keep everything,
True is `nothing`. Gradients are those of any other policy. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

Policy = Callable[..., Any]

_policies = jax.checkpoint_policies

# A layer's input alone: the least memory on the chip without a transfer.
nothing: Policy = _policies.nothing_saveable

# Attention runs once: what grows with the square of the length, and the kernel.
keep_attention: Policy = _policies.save_only_these_names('seen')

# All but the MLP, which is most of a layer's bytes.
keep_projections: Policy = _policies.save_only_these_names(
  'qkv', 'seen', 'attn_out'
)

# What products with weights give, and attention: norms, rotations, gates and
# scores are computed again, which costs next to nothing.
keep_products: Policy = _policies.save_only_these_names(
  'qkv', 'seen', 'attn_out', 'mlp_in'
)


def _offloaded(*names: str) -> Policy:
  return _policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=list(names),
    offload_src='device',
    offload_dst='pinned_host',
  )


# Inputs of layers wait in the host's memory: nothing on the chip grows with
# the number of layers but weights and gradients.
offload_blocks: Policy = _offloaded('block_in')

# So does what attention gives, which need not run again.
offload_attention: Policy = _offloaded('block_in', 'seen')


def recomputed(
  layer: Callable, policy: bool | Policy | None, unrolled: bool
) -> Callable:
  """A layer that keeps for its backward pass what the policy says.

  Args:
    policy: False or None for all, True for `nothing`.
    unrolled: the layer is not a loop's body, so that XLA must be kept from
      finding out that it computes everything twice.

  Raises:
    ValueError: the policy is none.
  """
  if policy is None or policy is False:
    return layer
  if policy is True:
    policy = nothing
  if not callable(policy):
    raise ValueError(
      f'remat is {policy!r}: give true, false, or a policy such as '
      "{'value': 'agentjax.model.remat.nothing'}"
    )
  return jax.checkpoint(layer, policy=policy, prevent_cse=unrolled)
