"""The right answer's likelihood before each turn, one state at a time."""

import dataclasses

import jax
import numpy as np
import pytest
from fakes import trajectory
from tiny_model import PLAIN as CONFIG
from tiny_model import params as tiny_params

from agentjax import gold
from agentjax.model import transformer
from agentjax.types import Task


class Says:
  """A chat whose answers are their own ids, behind a forced one."""

  def __init__(self, forced):
    self.forced = np.array(forced, np.int32)

  def render_turn(self, calls=(), answer=None):
    return np.array([int(x) for x in answer.split()], np.int32)


class Scores:
  """A learner of one row a call, by the forward pass itself."""

  rows, length, kept = 1, 16, 0

  def logprobs(self, params, batch):
    hidden = transformer.forward(
      params, batch.tokens, batch.positions, batch.pack_ids, CONFIG
    )
    z = jax.nn.log_softmax(transformer.logits(params, hidden, CONFIG), -1)
    out = np.zeros(batch.tokens.shape, np.float32)
    for row, t in np.argwhere(batch.weights > 0):
      out[row, t] = z[row, t - 1, batch.tokens[row, t]]
    return out


def prob(tokens, answer):
  """exp(mean log pi) of the answer behind these tokens, alone in a row."""
  ids = np.array([[*tokens, *answer]], np.int32)
  params, n = tiny_params(config=CONFIG), ids.shape[1]
  hidden = transformer.forward(
    params, ids, np.arange(n)[None], np.ones_like(ids), CONFIG
  )
  z = jax.nn.log_softmax(transformer.logits(params, hidden, CONFIG), -1)
  at = np.arange(n - len(answer), n)
  return np.exp(np.mean(np.asarray(z)[0, at - 1, ids[0, at]]))


@pytest.mark.parametrize('forced', [[], [5]])
def test_each_state_has_the_likelihood_of_the_answer_behind_it(forced):
  parts = [('p', [3, 4]), ('f', [5]), ('m', [6, 7]), ('o', [8]), ('f', [5]),
           ('m', [9])]  # fmt: skip
  if not forced:
    parts = [p for p in parts if p[0] != 'f']
  t = dataclasses.replace(
    trajectory(parts, 'a'), turn_rewards=(0.0, 0.0), state_keys=(None, None)
  )
  none = trajectory([('p', [3, 4])], 'b')
  long = trajectory([('p', [3] * 12), ('m', [1]), ('o', [2]), ('m', [1])], 'c')
  found = gold.answer_probs(
    [t, none, long], answer=lambda task: '11 12', chat=Says(forced),
    learner=Scores(), params=tiny_params(config=CONFIG), temperature=1.0,
  )  # fmt: skip
  first, second = [3, 4, *forced], [3, 4, *forced, 6, 7, 8, *forced]
  want = [prob(first, [11, 12]), prob(second, [11, 12])]
  np.testing.assert_allclose(found[0], want, rtol=1e-4)
  assert found[1].shape == (0,)
  # 12 + 2 + 2 tokens fit a row of 16; one forced more does not, and goes on.
  start = prob([3] * 12 + forced, [11, 12])
  after = prob([3] * 12 + [1, 2], [11, 12]) if not forced else start
  np.testing.assert_allclose(found[2], [start, after], rtol=1e-4)


def test_a_task_without_an_answer_is_told():
  assert gold.verified(Task('a', (), {'answer': 7})) == '7'
  with pytest.raises(ValueError, match="'a' has no answer in its verify"):
    gold.verified(Task('a', (), {'script': 7}))
