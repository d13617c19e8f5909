"""Small functions in Python as problems: families, numbers, right answers.

Floor 1, env. A problem is a family with numbers in it: its text, the source of
a right solution, and how hidden inputs are made. The source serves as the
reference, on the host, and as what a scripted expert writes. Test problems
are of other families than training problems.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

from agentjax.env.judge import FunctionTask

FUNCTION = 'solve'
_LETTERS = 'abcdefghijklmnopqrstuvwxyz'


@dataclasses.dataclass(frozen=True)
class Family:
  """Problems that differ in their numbers.

  Attributes:
    text: what the function does, with the numbers' names in braces.
    arguments: of the function. body: its lines, with names in braces too.
    ranges: the lowest and highest value of each number.
    draw: a random input. edges: inputs that are always among the hidden ones;
      the first two are shown to the policy, as visible tests.
  """

  name: str
  text: str
  arguments: str
  body: tuple[str, ...]
  ranges: Mapping[str, tuple[int, int]]
  draw: Callable[[random.Random], tuple]
  edges: Sequence[tuple]

  def source(self, values: Mapping[str, int]) -> str:
    """A right solution."""
    lines = ''.join(f'  {line}\n' for line in self.body)
    for name, value in values.items():
      lines = lines.replace(f'{{{name}}}', str(value))
    return f'def {FUNCTION}({self.arguments}):\n{lines}'

  def question(self, values: Mapping[str, int]) -> str:
    """What the policy is asked."""
    return self.text.format(**values)

  def task(self, values: Mapping[str, int]) -> FunctionTask:
    """What a judge needs."""
    space: dict = {}
    exec(compile(self.source(values), f'<{self.name}>', 'exec'), space)
    return FunctionTask(FUNCTION, space[FUNCTION], self.edges, self.draw)


def _integers(rng: random.Random, least: int = 0) -> list[int]:
  length = rng.randint(least, 12)
  return [rng.randint(-99, 99) for _ in range(length)]


def _text(rng: random.Random) -> str:
  letters = _LETTERS + _LETTERS.upper() + ' .,'
  return ''.join(rng.choice(letters) for _ in range(rng.randint(0, 20)))


_LISTS = (([1, 2, 3, 4, 5],), ([-6, 0, 12, 7],), ([],), ([0],))

TRAIN = (
  Family(
    'weighted',
    'takes two integers a and b and returns {k} times a plus {m} times b',
    'a, b',
    ('return {k} * a + {m} * b',),
    {'k': (2, 40), 'm': (2, 40)},
    lambda rng: (rng.randint(-(10**12), 10**12), rng.randint(-999, 999)),
    ((1, 2), (-3, 10), (0, 0), (2**60, 1)),
  ),
  Family(
    'clamp',
    'takes an integer x and returns it, but at least {low} and at most {high}',
    'x',
    ('return max({low}, min({high}, x))',),
    {'low': (-60, 0), 'high': (1, 60)},
    lambda rng: (rng.randint(-90, 90),),
    ((5,), (1000,), (-1000,), (0,)),
  ),
  Family(
    'multiples',
    'takes a list of integers and returns how many of them {k} divides',
    'numbers',
    ('return sum(n % {k} == 0 for n in numbers)',),
    {'k': (2, 30)},
    lambda rng: (_integers(rng),),
    _LISTS,
  ),
  Family(
    'rotate',
    'takes a list and returns a new one, rotated left by {k} places',
    'items',
    (
      'if not items:',
      '  return []',
      'places = {k} % len(items)',
      'return items[places:] + items[:places]',
    ),
    {'k': (1, 30)},
    lambda rng: (_integers(rng),),
    _LISTS,
  ),
  Family(
    'shift',
    'takes a text and moves each small letter a to z on by {k} places in the '
    'alphabet, from z on with a; other characters stay as they are',
    'text',
    (
      "letters = 'abcdefghijklmnopqrstuvwxyz'",
      'moved = letters[{k}:] + letters[:{k}]',
      'return text.translate(str.maketrans(letters, moved))',
    ),
    {'k': (1, 25)},
    lambda rng: (_text(rng),),
    (('abc xyz',), ('Hello, World.',), ('',), (_LETTERS,)),
  ),
)
TEST = (
  Family(
    'digits',
    'takes an integer n that is not negative and returns the sum of its '
    'digits in base {k}',
    'n',
    (
      'total = 0',
      'while n:',
      '  total += n % {k}',
      '  n //= {k}',
      'return total',
    ),
    {'k': (2, 60)},
    lambda rng: (rng.randint(0, 10**9),),
    ((10,), (255,), (0,), (10**18,)),
  ),
  Family(
    'chunks',
    'takes a list and returns a list of its parts: each has {k} items, the '
    'last one may have fewer',
    'items',
    ('return [items[i : i + {k}] for i in range(0, len(items), {k})]',),
    {'k': (2, 30)},
    lambda rng: (_integers(rng),),
    _LISTS,
  ),
  Family(
    'every',
    'takes a list and returns every item number {k}, {k} + {m}, {k} + 2 * {m} '
    'and so on, where the first item has number 0',
    'items',
    ('return items[{k}::{m}]',),
    {'k': (0, 5), 'm': (2, 9)},
    lambda rng: (_integers(rng),),
    _LISTS,
  ),
)
FAMILIES = {family.name: family for family in (*TRAIN, *TEST)}
