"""References that move: by how much, when, and without leaving their place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import references

OLD = {'a': jnp.float32([1.0, 2.0]), 'b': [jnp.bfloat16(4.0)]}
NEW = {'a': jnp.float32([3.0, -2.0]), 'b': [jnp.bfloat16(8.0)]}


def test_a_moving_average_goes_a_part_of_the_way():
  out = references.moving_average(OLD, NEW, 1, decay=0.75)
  np.testing.assert_allclose(out['a'], [1.5, 1.0])
  assert out['b'][0] == 5.0 and out['b'][0].dtype == jnp.bfloat16
  for decay, want in ((0.0, NEW), (1.0, OLD)):
    out = references.moving_average(OLD, NEW, 1, decay=decay)
    jax.tree.map(np.testing.assert_array_equal, out, want)


def test_a_phase_ends_at_every_nth_step():
  for step in range(1, 7):
    out = references.renewed(OLD, NEW, step, every=3)
    want = NEW if step in (3, 6) else OLD
    jax.tree.map(np.testing.assert_array_equal, out, want)


def test_the_compiled_form_is_the_same_and_gives_up_the_old_one():
  move = functools.partial(references.renewed, every=2)
  old = jax.tree.map(jnp.copy, OLD)
  program = references.compiled(move, old, NEW)
  out = program(old, NEW, np.int32(1))
  jax.tree.map(np.testing.assert_array_equal, out, OLD)
  out = program(out, NEW, np.int32(2))
  jax.tree.map(np.testing.assert_array_equal, out, NEW)


def test_bad_numbers_are_refused():
  with pytest.raises(ValueError, match='decay is 1.5'):
    references.moving_average(OLD, NEW, 1, decay=1.5)
  with pytest.raises(ValueError, match='every is 0'):
    references.renewed(OLD, NEW, 1, every=0)
