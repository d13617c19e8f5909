"""Sizes and options that no decoder has are refused where they are given."""

import dataclasses

import pytest
from tiny_model import PLAIN as CONFIG


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    *(
      ({name: n}, f'{name} is {n}: give at least 1')
      for name in ('vocab_size', 'width', 'heads', 'kv_heads', 'head_size',
                   'mlp', 'context')
      for n in (0, -1)
    ),
    ({'head_size': 7}, 'head_size is 7: rotary positions turn pairs'),
    ({'heads': 4, 'kv_heads': 3}, 'heads 4 is not a multiple of kv_heads 3'),
    ({'layers': ()}, 'layers is empty'),
    ({'layers': (('global', 2),)}, r"layers entry \('global', 2\): a pattern"),
    ({'layers': ('global',)}, r"layers entry 'global' is no \(pattern, count"),
    ({'layers': ((('global',), 0),)}, 'a count at least 1'),
    ({'layers': (((), 1),)}, 'a pattern is a non-empty tuple'),
    ({'padded_vocab': -1}, 'padded_vocab is -1'),
    ({'window': -1}, 'window is -1'),
    ({'rope_theta': 0.0}, 'rope_theta is 0.0'),
    ({'norm_eps': float('nan')}, 'norm_eps is nan'),
    ({'final_softcap': -1.0}, 'final_softcap is -1.0'),
    ({'activation': 'relu'}, "activation 'relu': choose"),
  ],
)  # fmt: skip
def test_what_no_decoder_has_is_refused(change, said):
  with pytest.raises(ValueError, match=said):
    dataclasses.replace(CONFIG, **change)
