"""What tells one decoder from another: data, never code.

Floor 1, model/. One decoder (`transformer.py`) serves the Llama, Qwen2/2.5,
Qwen3 and Gemma 2/3 families; everything in which they differ is a field here.
`presets.py` holds the values of released models.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Rotary scaling. `kind` is linear (positions / factor) or llama3.

  Llama 3.1 divides frequencies whose wavelength exceeds
  original_context / low_freq_factor by `factor`, keeps those below
  original_context / high_freq_factor, and interpolates in between.
  """

  kind: str
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_context: int = 8192


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape and options of a decoder.

  Attributes:
    vocab_size: ids that have text; ids from here to `padded_vocab` are masked
      alike in sampler, learner, KL and stops.
    padded_vocab: rows of the embedding table (0: vocab_size).
    width: D. heads: H. kv_heads: K. head_size: Q. mlp: hidden width.
    layers: list of (pattern, count): the pattern, a tuple of 'global' and
      'local', is repeated count times; local layers see `window` positions.
    rope_theta: of global layers; `rope_theta_local` of local ones.
    qk_norm: RMS norm on queries and keys (Qwen3, Gemma 3).
    qkv_bias: biases on query, key and value (Qwen2).
    attn_softcap, final_softcap: c * tanh(x / c) on scores and logits.
    query_scale: multiplies queries; None is head_size ** -0.5.
    post_norms: norms after attention and MLP too (Gemma 2, 3).
    norm_offset: weights of norms are 1 + w (Gemma).
    embed_scale: embeddings are multiplied by sqrt(width) (Gemma).
    activation: 'silu' or 'gelu_tanh'.
    tied: the head is the embedding table.
    context: positions that the model was made for.
  """

  vocab_size: int
  width: int
  layers: tuple[tuple[tuple[str, ...], int], ...]
  heads: int
  kv_heads: int
  head_size: int
  mlp: int
  context: int
  padded_vocab: int = 0
  rope_theta: float = 10_000.0
  rope_theta_local: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  window: int = 0
  norm_eps: float = 1e-6
  qk_norm: bool = False
  qkv_bias: bool = False
  attn_softcap: float = 0.0
  final_softcap: float = 0.0
  query_scale: float | None = None
  post_norms: bool = False
  norm_offset: bool = False
  embed_scale: bool = False
  activation: str = 'silu'
  tied: bool = True

  def __post_init__(self):
    self._check_sizes()
    if self.heads % self.kv_heads:
      raise ValueError(
        f'heads {self.heads} is not a multiple of kv_heads {self.kv_heads}'
      )
    if self.activation not in ('silu', 'gelu_tanh'):
      raise ValueError(
        f'activation {self.activation!r}: choose silu or gelu_tanh'
      )
    for entry in self.layers:
      if not isinstance(entry, (tuple, list)) or len(entry) != 2:
        raise ValueError(f'layers entry {entry!r} is no (pattern, count)')
      pattern, count = entry
      if (
        isinstance(pattern, str)
        or not pattern
        or set(pattern) - {'global', 'local'}
        or count < 1
      ):
        raise ValueError(
          f'layers entry {(pattern, count)}: a pattern is a non-empty tuple '
          "of 'global' and 'local', a count at least 1"
        )
      if 'local' in pattern and self.window < 1:
        raise ValueError('local layers need a window of at least 1')
    if self.padded_vocab == 0:
      object.__setattr__(self, 'padded_vocab', self.vocab_size)
    if self.padded_vocab < self.vocab_size:
      raise ValueError(
        f'padded_vocab {self.padded_vocab} is below vocab_size '
        f'{self.vocab_size}'
      )

  def _check_sizes(self) -> None:
    for name in ('vocab_size', 'width', 'heads', 'kv_heads', 'head_size',
                 'mlp', 'context'):  # fmt: skip
      if getattr(self, name) < 1:
        raise ValueError(f'{name} is {getattr(self, name)}: give at least 1')
    if self.head_size % 2:
      raise ValueError(
        f'head_size is {self.head_size}: rotary positions turn pairs, give an '
        'even number'
      )
    if not self.layers:
      raise ValueError(
        'layers is empty: give at least one (pattern, count), as in '
        "((('global',), 2),)"
      )
    for name in ('padded_vocab', 'window', 'attn_softcap', 'final_softcap'):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(f'{name} is {getattr(self, name)}: give 0 or more')
    for name in ('rope_theta', 'rope_theta_local', 'norm_eps'):
      if not 0 < getattr(self, name) < math.inf:
        raise ValueError(
          f'{name} is {getattr(self, name)}: give a finite number above 0'
        )

  @property
  def layer_kinds(self) -> tuple[str, ...]:
    """Kind of each layer, in order."""
    return tuple(k for p, n in self.layers for _ in range(n) for k in p)

  @property
  def n_layers(self) -> int:
    return len(self.layer_kinds)
