"""How much a step of training has to compute, counted by hand.

Floor 1, model/. The FLOPs that the model's definition asks for, whatever the
program does: over a step's seconds and the chip's FLOP/s this is the
utilisation (MFU) that papers report. Recomputation is not in it.

Letters: T tokens, D width, H query heads, K key/value heads, Q head size, V
vocabulary.
"""

from __future__ import annotations

from agentjax.model.config import ModelConfig


def of_step(
  config: ModelConfig, rows: int, length: int, loss_tokens: int
) -> float:
  """Forward and backward of `rows` full rows, one sequence each.

  A product of a weight and a token is 2 FLOPs forward and 4 backward; a query
  and a key that it sees, 4 and 8 for each number of their heads. Only the
  tokens that carry loss go through the head. Source: PaLM, arXiv:2204.02311,
  appendix B, with causal attention counted as it is: half.
  """
  D, Q = config.width, config.head_size
  heads = 2 * config.heads + 2 * config.kv_heads  # of q and o, of k and v
  layer = D * heads * Q + 3 * D * config.mlp
  seen = {
    'global': length * (length + 1) // 2,
    'local': sum(min(t + 1, config.window) for t in range(length)),
  }
  pairs = sum(seen[kind] for kind in config.layer_kinds)
  return 6.0 * (
    rows * length * layer * config.n_layers
    + 2 * rows * pairs * config.heads * Q
    + loss_tokens * D * config.padded_vocab
  )
