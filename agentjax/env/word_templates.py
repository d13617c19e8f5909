"""The templates of word problems: data, read by `word_problems.py` alone.

Floor 1, env. A template knows its sentence, the Python expression that solves
it, the first of its two steps, and the range of each number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from agentjax.env import integers

NAMES = ('Ada', 'Ben', 'Cleo', 'Dan', 'Eve', 'Finn', 'Gita', 'Hugo')
_TWO = (10, 99)
_THREE = (100, 999)
_FEW = (10, 30)
# Of the test split alone; the others are the training split's.
TEST = ('harvest', 'printer', 'choir', 'parcels', 'lamps', 'tiles')


@dataclasses.dataclass(frozen=True)
class Template:
  """Attributes: `expression` and `first` are formulas in a, b and c."""

  name: str
  text: str
  expression: str
  first: str
  ranges: Mapping[str, tuple[int, int]]

  def compute(self, **values: int) -> tuple[int, int]:
    """(result of the first step, result)."""
    return tuple(
      integers.evaluate(
        formula.format(**values), operators='+ - * // %', max_operations=2
      )
      for formula in (self.first, self.expression)
    )


TEMPLATES = (
  Template(
    'crates',
    '{name} packs {a} crates with {b} apples each and then adds {c} '
    'loose apples. How many apples are there?',
    '{a} * {b} + {c}',
    '{a} * {b}',
    {'a': _TWO, 'b': _TWO, 'c': _THREE},
  ),
  Template(
    'spoiled',
    'A shop gets {a} boxes of {b} eggs. {c} eggs are broken. How many '
    'eggs are whole?',
    '{a} * {b} - {c}',
    '{a} * {b}',
    {'a': _TWO, 'b': _TWO, 'c': _TWO},
  ),
  Template(
    'classes',
    'Two schools have {a} and {b} pupils. Each pupil gets {c} sheets of'
    ' paper. How many sheets are needed?',
    '({a} + {b}) * {c}',
    '{a} + {b}',
    {'a': _THREE, 'b': _THREE, 'c': _TWO},
  ),
  Template(
    'unsold',
    '{name} baked {a} rolls and kept {b} of them. The rest were sold '
    'for {c} cents each. How many cents came in?',
    '({a} - {b}) * {c}',
    '{a} - {b}',
    {'a': _THREE, 'b': _TWO, 'c': _TWO},
  ),
  Template(
    'bus',
    '{a} people sit in a train. At one stop {b} get off and {c} get on.'
    ' How many people are in the train now?',
    '{a} - {b} + {c}',
    '{a} - {b}',
    {'a': _THREE, 'b': _TWO, 'c': _TWO},
  ),
  Template(
    'savings',
    '{name} has {a} coins, finds {b} more and spends {c}. How many '
    'coins are left?',
    '{a} + {b} - {c}',
    '{a} + {b}',
    {'a': _THREE, 'b': _THREE, 'c': _TWO},
  ),
  Template(
    'distance',
    'A driver goes {a} km on each of {b} days, and {c} km on the last '
    'day. How many km is that in all?',
    '{a} * {b} + {c}',
    '{a} * {b}',
    {'a': _THREE, 'b': _TWO, 'c': _THREE},
  ),
  Template(
    'leftover',
    '{name} puts {a} red and {b} blue beads into bags of {c}. How many '
    'beads are left over when no more bag can be filled?',
    '({a} + {b}) % {c}',
    '{a} + {b}',
    {'a': _THREE, 'b': _THREE, 'c': _TWO},
  ),
  Template(
    'tank',
    'A tank holds {a} litres. {b} buckets of {c} litres are taken out. '
    'How many litres remain?',
    '{a} - {b} * {c}',
    '{b} * {c}',
    {'a': _THREE, 'b': _FEW, 'c': _FEW},
  ),
  Template(
    'seats',
    'A hall has {a} rows of {b} seats and a balcony with {c} seats. How'
    ' many seats has it?',
    '{a} * {b} + {c}',
    '{a} * {b}',
    {'a': _TWO, 'b': _TWO, 'c': _THREE},
  ),
  Template(
    'wages',
    '{name} earns {a} euros a week for {b} weeks and pays {c} euros of '
    'it for rent. How many euros are left?',
    '{a} * {b} - {c}',
    '{a} * {b}',
    {'a': _THREE, 'b': _TWO, 'c': _THREE},
  ),
  Template(
    'pages',
    'A book has {a} pages, another has {b}. {name} has read {c} pages '
    'of them. How many pages are still to be read?',
    '{a} + {b} - {c}',
    '{a} + {b}',
    {'a': _THREE, 'b': _THREE, 'c': _THREE},
  ),
  Template(
    'fence',
    'A field needs {a} posts on one side and {b} on the other. Each '
    'post takes {c} nails. How many nails are needed?',
    '({a} + {b}) * {c}',
    '{a} + {b}',
    {'a': _TWO, 'b': _TWO, 'c': _TWO},
  ),
  Template(
    'stamps',
    '{name} had {a} stamps, gave away {b}, and got {c} for a birthday. '
    'How many stamps are there now?',
    '{a} - {b} + {c}',
    '{a} - {b}',
    {'a': _THREE, 'b': _TWO, 'c': _THREE},
  ),
  Template(
    'chairs',
    '{a} chairs are set out. {b} tables take {c} chairs each. How many '
    'chairs stand at no table?',
    '{a} - {b} * {c}',
    '{b} * {c}',
    {'a': _THREE, 'b': _FEW, 'c': _FEW},
  ),
  Template(
    'tickets',
    '{a} adults and {b} children visit a museum, and {c} people were '
    'there before. How many people are there together?',
    '{a} + {b} + {c}',
    '{a} + {b}',
    {'a': _THREE, 'b': _THREE, 'c': _TWO},
  ),
  Template(
    'flowers',
    'A gardener plants {a} beds with {b} tulips and {c} roses each. How'
    ' many flowers are planted?',
    '{a} * ({b} + {c})',
    '{b} + {c}',
    {'a': _TWO, 'b': _TWO, 'c': _TWO},
  ),
  Template(
    'bottles',
    'A machine fills {a} bottles an hour. {b} of them are thrown out '
    'each hour. How many good bottles are there after {c} hours?',
    '({a} - {b}) * {c}',
    '{a} - {b}',
    {'a': _THREE, 'b': _TWO, 'c': _TWO},
  ),
  Template(
    'shelves',
    '{name} has {a} books and buys {b}. A shelf holds {c} books. How '
    'many shelves can be filled completely?',
    '({a} + {b}) // {c}',
    '{a} + {b}',
    {'a': _THREE, 'b': _THREE, 'c': _TWO},
  ),
  Template(
    'walk',
    '{name} walks {a} steps to the shop, {b} steps to the park and {c} '
    'steps home. How many steps is that?',
    '{a} + {b} + {c}',
    '{a} + {b}',
    {'a': _THREE, 'b': _THREE, 'c': _THREE},
  ),
  Template(
    'harvest',
    'A farmer fills {a} sacks with {b} potatoes. {c} potatoes do not '
    'fit and stay behind. How many potatoes did the farmer dig up?',
    '{a} * {b} + {c}',
    '{a} * {b}',
    {'a': _TWO, 'b': _TWO, 'c': _TWO},
  ),
  Template(
    'printer',
    'A printer had {a} sheets. {name} printed {b} copies of a text of '
    '{c} sheets. How many sheets are in it still?',
    '{a} - {b} * {c}',
    '{b} * {c}',
    {'a': _THREE, 'b': _FEW, 'c': _FEW},
  ),
  Template(
    'choir',
    'In a choir sing {a} women and {b} men, and every one of them pays '
    '{c} euros a year. How many euros is that each year?',
    '({a} + {b}) * {c}',
    '{a} + {b}',
    {'a': _TWO, 'b': _TWO, 'c': _TWO},
  ),
  Template(
    'parcels',
    'A van starts with {a} parcels, delivers {b} and picks up {c} on '
    'the way. How many parcels does it bring back?',
    '{a} - {b} + {c}',
    '{a} - {b}',
    {'a': _THREE, 'b': _TWO, 'c': _TWO},
  ),
  Template(
    'lamps',
    'A street has {a} lamps on the left and {b} on the right; {c} of '
    'them are dark. How many lamps give light?',
    '{a} + {b} - {c}',
    '{a} + {b}',
    {'a': _THREE, 'b': _THREE, 'c': _TWO},
  ),
  Template(
    'tiles',
    '{name} orders {a} packets of {b} tiles, and {c} tiles turn out to '
    'be too many. How many tiles were used?',
    '{a} * {b} - {c}',
    '{a} * {b}',
    {'a': _TWO, 'b': _TWO, 'c': _TWO},
  ),
)
