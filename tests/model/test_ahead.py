"""What is read out of a compiled program's text, and FLOPs by hand."""

import dataclasses

from tiny_model import PLAIN

from agentjax.model import flops
from agentjax.model.ahead import Collective, collectives

# A loop of 28 layers with a gather in two pieces, in which stands a loop of
# 3; a scatter as XLA:TPU writes it; a started collective beside its operand.
PROGRAM = """
HloModule jit_add, is_scheduled=true

%first (p: bf16[4,2]) -> bf16[4,8] {
  ROOT %g.1 = bf16[4,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, x=1
}

%second (p: bf16[4,2]) -> bf16[4,8] {
  ROOT %g.2 = bf16[4,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, x=1
}

%inner_condition (p: (s32[])) -> pred[] {
  %three = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[] compare(%i, %three), direction=LT
}

%inner (p: (s32[])) -> (s32[]) {
  %s = (f32[5]{0}, /*index=1*/f32[]) all-reduce(%a, %b), channel_id=8
}

%condition (p: (s32[])) -> pred[] {
  %n = s32[]{:T(128)} constant(28)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (p: (s32[])) -> (s32[]) {
  %f = bf16[4,8]{1,0} fusion(%p), kind=kCustom, calls=%first
  %h = bf16[4,8]{1,0} fusion(%p), kind=kCustom, calls=%second
  %w = (s32[]) while(%t), condition=%inner_condition, body=%inner
}

%all-reduce-scatter.1 (input: f32[16,8]) -> f32[4,8] {
  %r = f32[16,8]{1,0} all-reduce(%input), channel_id=9
}

ENTRY %main (p: s32[]) -> s32[] {
  %w.1 = (s32[]) while(%t), condition=%condition, body=%body
  %x = f32[4,8]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  %c = (pred[8]{0}, pred[8]{0}, u32[]) collective-permute-start(%z)
}
"""


def test_collectives_count_as_often_as_their_loops_run():
  found = collectives(PROGRAM)
  assert [dataclasses.replace(c, shape='') for c in found] == [
    Collective('all-gather', '', 4 * 8 * 2, 28),
    Collective('all-reduce', '', 4 * (5 + 1), 28 * 3),
    Collective('reduce-scatter', '', 4 * 16 * 8, 1),
    Collective('collective-permute', '', 8, 1),
  ]


def test_flops_of_a_step_are_those_counted_by_hand():
  # 2 layers, width 32, 4 heads over 2 of 8, MLP 64, 48 rows of the table.
  weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
  scores = 2 * (10 * 11 / 2) * 4 * 8 * 2
  want = 6 * (3 * 10 * weights + 3 * scores + 7 * 32 * 48)
  assert flops.of_step(PLAIN, 3, 10, 7) == want


def test_a_window_bounds_what_a_query_sees():
  config = dataclasses.replace(PLAIN, layers=((('local',), 1),), window=3)
  wider = dataclasses.replace(config, window=4)
  more = flops.of_step(wider, 1, 10, 0) - flops.of_step(config, 1, 10, 0)
  assert more == 6 * 2 * (10 - 3) * 4 * 8
