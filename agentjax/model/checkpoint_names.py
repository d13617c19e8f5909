"""Which tensors of a released checkpoint make which arrays of the tree.

Floor 1, model/. The parameter tree (an on-disk format, see
`transformer.init`) stacks layers and splits heads; checkpoints hold one
matrix a layer. This file is the table between them, used by the loaders and
by `save`. It opens no files and knows no numbers.

Letters: V vocabulary, D width, H query heads, K key/value heads, Q head size,
F hidden width of the MLP.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from agentjax.model.config import ModelConfig

# Leaf of a block -> (dimensions of the tensor, axes of the array). A dimension
# of two letters is a product: 'HQ' has H * Q rows, Q running fastest.
_BLOCK_AXES = {
  'attn_norm.scale': ('D', 'D'),
  'mlp_norm.scale': ('D', 'D'),
  'attn_post_norm.scale': ('D', 'D'),
  'mlp_post_norm.scale': ('D', 'D'),
  'attn.q': ('HQ D', 'DHQ'),
  'attn.k': ('KQ D', 'DKQ'),
  'attn.v': ('KQ D', 'DKQ'),
  'attn.o': ('D HQ', 'HQD'),
  'attn.q_bias': ('HQ', 'HQ'),
  'attn.k_bias': ('KQ', 'KQ'),
  'attn.v_bias': ('KQ', 'KQ'),
  'attn.q_norm': ('Q', 'Q'),
  'attn.k_norm': ('Q', 'Q'),
  'mlp.gate': ('F D', 'DF'),
  'mlp.up': ('F D', 'DF'),
  'mlp.down': ('D F', 'FD'),
}
_OUTER_AXES = {
  'embed.table': ('V D', 'VD'),
  'final_norm.scale': ('D', 'D'),
  'head.kernel': ('V D', 'DV'),
}


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One array of the tree and where it comes from.

  Attributes:
    path: keys into the tree, for instance ('stacks', 0, '1', 'attn', 'q').
    tensors: names of its tensors; where stacked, one for each index of the
      leading axis, else exactly one.
    stacked: there is a leading axis of layers.
    source: letters of the tensor's dimensions. target: letters of the array's
      axes, without the layers.
  """

  path: tuple[str | int, ...]
  tensors: tuple[str, ...]
  stacked: bool
  source: tuple[str, ...]
  target: str

  def tensor_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[c] for c in dim) for dim in self.source)

  def array_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
    layers = (len(self.tensors),) if self.stacked else ()
    return layers + tuple(sizes[c] for c in self.target)


def sizes(config: ModelConfig) -> dict[str, int]:
  """Size of each letter; V is the padded vocabulary."""
  return {
    'V': config.padded_vocab,
    'D': config.width,
    'H': config.heads,
    'K': config.kv_heads,
    'Q': config.head_size,
    'F': config.mlp,
  }


def leaves(config: ModelConfig, names: Mapping[str, str]) -> list[Leaf]:
  """Every array of `config`'s tree.

  Args:
    names: leaf -> name of its tensor, `{n}` standing for the layer; from
      `hf_names` or `gguf_names`.
  """
  out = []

  def add(prefix, leaf, axes, layers=None):
    source, target = axes
    name = names[leaf]
    stacked = layers is not None
    tensors = tuple(name.format(n=n) for n in layers) if stacked else (name,)
    path = (*prefix, *leaf.split('.'))
    out.append(Leaf(path, tensors, stacked, tuple(source.split()), target))

  for leaf, axes in _OUTER_AXES.items():
    if leaf != 'head.kernel' or not config.tied:
      add((), leaf, axes)
  for stack, position, layers in _stacks(config):
    for leaf in _block_leaves(config):
      prefix = ('stacks', stack, str(position))
      add(prefix, leaf, _BLOCK_AXES[leaf], layers)
  return out


def _stacks(config: ModelConfig) -> Iterator[tuple[int, int, range]]:
  """(stack, position in its pattern, its layers), over all stacks."""
  first = 0
  for stack, (pattern, count) in enumerate(config.layers):
    last = first + len(pattern) * count
    for position in range(len(pattern)):
      yield stack, position, range(first + position, last, len(pattern))
    first = last


def _block_leaves(config: ModelConfig) -> list[str]:
  absent = set()
  if not config.post_norms:
    absent |= {'attn_post_norm.scale', 'mlp_post_norm.scale'}
  if not config.qkv_bias:
    absent |= {'attn.q_bias', 'attn.k_bias', 'attn.v_bias'}
  if not config.qk_norm:
    absent |= {'attn.q_norm', 'attn.k_norm'}
  return [leaf for leaf in _BLOCK_AXES if leaf not in absent]


def hf_names(config: ModelConfig, prefix: str = 'model.') -> dict[str, str]:
  """Names in safetensors of Hugging Face.

  `prefix` stands before embed_tokens and layers; multimodal checkpoints have
  a longer one.
  """
  layer = prefix + 'layers.{n}.'
  mlp_norm, attn_post_norm = 'post_attention_layernorm', 'unused'
  if config.post_norms:
    mlp_norm = 'pre_feedforward_layernorm'
    attn_post_norm = 'post_attention_layernorm'
  block = {
    'attn_norm.scale': 'input_layernorm.weight',
    'mlp_norm.scale': f'{mlp_norm}.weight',
    'attn_post_norm.scale': f'{attn_post_norm}.weight',
    'mlp_post_norm.scale': 'post_feedforward_layernorm.weight',
    'attn.q': 'self_attn.q_proj.weight',
    'attn.k': 'self_attn.k_proj.weight',
    'attn.v': 'self_attn.v_proj.weight',
    'attn.o': 'self_attn.o_proj.weight',
    'attn.q_bias': 'self_attn.q_proj.bias',
    'attn.k_bias': 'self_attn.k_proj.bias',
    'attn.v_bias': 'self_attn.v_proj.bias',
    'attn.q_norm': 'self_attn.q_norm.weight',
    'attn.k_norm': 'self_attn.k_norm.weight',
    'mlp.gate': 'mlp.gate_proj.weight',
    'mlp.up': 'mlp.up_proj.weight',
    'mlp.down': 'mlp.down_proj.weight',
  }
  return {leaf: layer + name for leaf, name in block.items()} | {
    'embed.table': f'{prefix}embed_tokens.weight',
    'final_norm.scale': f'{prefix}norm.weight',
    'head.kernel': 'lm_head.weight',
  }


def gguf_names() -> dict[str, str]:
  """Names in GGUF files of the llama, qwen and gemma architectures."""
  block = {
    'attn_norm.scale': 'attn_norm.weight',
    'mlp_norm.scale': 'ffn_norm.weight',
    'attn_post_norm.scale': 'post_attention_norm.weight',
    'mlp_post_norm.scale': 'post_ffw_norm.weight',
    'attn.q': 'attn_q.weight',
    'attn.k': 'attn_k.weight',
    'attn.v': 'attn_v.weight',
    'attn.o': 'attn_output.weight',
    'attn.q_bias': 'attn_q.bias',
    'attn.k_bias': 'attn_k.bias',
    'attn.v_bias': 'attn_v.bias',
    'attn.q_norm': 'attn_q_norm.weight',
    'attn.k_norm': 'attn_k_norm.weight',
    'mlp.gate': 'ffn_gate.weight',
    'mlp.up': 'ffn_up.weight',
    'mlp.down': 'ffn_down.weight',
  }
  return {leaf: 'blk.{n}.' + name for leaf, name in block.items()} | {
    'embed.table': 'token_embd.weight',
    'final_norm.scale': 'output_norm.weight',
    'head.kernel': 'output.weight',
  }


def nest(items: Mapping[tuple[str | int, ...], Any]) -> dict[str, Any]:
  """The tree with `items` at their paths; integer keys make lists."""
  tree: dict[str, Any] = {}
  for path, value in items.items():
    node: Any = tree
    for key, after in zip(path[:-1], path[1:], strict=True):
      empty: Any = [] if isinstance(after, int) else {}
      if isinstance(node, list):
        if key == len(node):
          node.append(empty)
        node = node[key]
      else:
        node = node.setdefault(key, empty)
    node[path[-1]] = value
  return tree
