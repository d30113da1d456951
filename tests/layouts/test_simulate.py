"""What transfers, gathers and unlike stages do to a schedule's times, by hand-made examples."""

import pytest

from layouts.schedules import Shape, make_schedule
from layouts.simulate import Costs, HeldBytes, simulate
from moejax.pipeline import Op, Placement, Schedule


def one(stages: int, microbatches: int = 1, **how):
    """GPipe with B and W apart, in time."""
    return simulate(make_schedule("gpipe", Shape(stages, microbatches, split=True)), Costs(**how))


def test_one_micro_batch_by_hand():
    found = one(2)
    assert {(e.stage, e.op.kind): (e.start, e.end) for e in found.events if e.op.kind in "FBW"} == {
        (0, "F"): (0, 1),
        (1, "F"): (1, 2),
        (1, "B"): (2, 3),
        (1, "W"): (3, 4),
        (0, "B"): (3, 4),
        (0, "W"): (4, 5),
    }
    assert found.makespan == 5
    assert found.bubble_makespan == pytest.approx(1 - 6 / 10)
    assert found.bubble_span == pytest.approx(1 - 3 / 5)  # stage 0; stage 1 spans 3 and works 3
    assert found.busy == (3, 3)


def test_transfers_take_time():
    found = one(3, send=0.5)
    assert found.makespan == 7 + 4 * 0.5
    assert [(m.op.kind, m.source, m.sent, m.arrived) for m in found.messages][:2] == [("F", 0, 1, 1.5), ("F", 1, 2.5, 3)]
    assert found.figures()["transfers"] == [1, 2, 1]


def test_a_blocking_stage_waits_while_it_sends():
    ends = {blocking: one(2, 2, send=0.5, blocking=blocking) for blocking in (False, True)}
    starts = {b: [e.start for e in s.events if e.stage == 0 and e.op.kind == "F"] for b, s in ends.items()}
    assert starts == {False: [0, 1], True: [0, 1.5]}
    sends = [e for e in ends[True].events if e.op.kind == "send"]
    assert [(e.stage, e.start, e.end) for e in sends if e.stage == 0] == [(0, 1, 1.5), (0, 2.5, 3)]


def test_gathers_and_reduces_that_block():
    found = one(1, gather=0.5, reduce=0.25, blocking=True)
    assert found.makespan == 3.75
    assert found.busy == (3,)
    assert found.figures()["gathers"] == found.figures()["reduces"] == [1]


def chunked() -> Schedule:
    """One stage, two chunks, one micro-batch."""
    ops = ["gather0", "F0", "gather1", "F1", "B1", "W1", "reduce1", "gather0", "B0", "W0", "reduce0"]
    row = tuple((Op(word[:-1], int(word[-1])),) for word in ops)
    return Schedule("two", 1, 1, Placement.loop(1, 2), (row,))


def test_gathers_run_beside_the_cell_before_them():
    # Gathers and reduces take 0.2 a chunk, ops 0.5: only the first gather and the last reduce are not hidden.
    found = simulate(chunked(), Costs(gather=0.4, reduce=0.4))
    assert found.makespan == pytest.approx(0.2 + 3 + 0.2)
    # 0.8 a chunk: the second gather runs from 0.8 on beside F0 (0.8 to 1.3) and ends at 1.6, when F1 starts.
    found = simulate(chunked(), Costs(gather=1.6))
    starts = {(e.op.kind, e.op.chunk): e.start for e in found.events}
    assert (starts["F", 0], starts["F", 1]) == pytest.approx((0.8, 1.6))
    blocked = simulate(chunked(), Costs(gather=0.4, reduce=0.4, blocking=True))
    assert blocked.makespan == pytest.approx(3 + 5 * 0.2)


def test_a_gather_in_the_cell_of_another_op():
    row = ((Op("gather", 0),), (Op("F", 0), Op("gather", 1)), *chunked().rows[0][3:])
    together = Schedule("two", 1, 1, Placement.loop(1, 2), (row,))
    found = simulate(together, Costs(gather=0.8, blocking=True))
    assert found.makespan == pytest.approx(0.4 + 0.5 + 4 * 0.5 + 0.4 + 0.5)


def test_an_overlapped_pair_costs_what_is_said():
    schedule = make_schedule("dualpipe", Shape(4, 8))
    assert simulate(schedule, Costs(pair=3)).makespan == simulate(schedule).makespan == 26
    quick = simulate(schedule, Costs(pair=2.5))
    assert quick.makespan < 26
    pairs = [e for e in quick.events if e.lane == "upper"]
    assert {e.end - e.start for e in pairs} == {2.5}
    assert sum(e.end - e.start for e in quick.events if e.lane == "lower") == pytest.approx(2.5 * len(pairs))
    assert max(quick.busy) < 24


def test_unlike_stages():
    assert one(2, forward=(1, 3)).makespan == 1 + 3 + 1 + 1 + 1
    schedule = make_schedule("1f1b", Shape(2, 4))
    slow = simulate(schedule, Costs(forward=(1, 2), backward=(1, 2), weight=(1, 2)))
    assert slow.makespan == 1 + 4 * 6 + 2  # stage 1 works without a pause


def test_unlike_parts():
    schedule = make_schedule("1f1b", Shape(2, 4))
    found = simulate(schedule, Costs(part_sizes=(1, 3)))
    assert found.busy == (4 * 3 * 0.5, 4 * 3 * 1.5)
    assert found.peak_activations == (2 * 0.5, 1.5)


def test_what_waits_for_w_by_hand():
    """1f1b's W follows its B at once; two stages of zb_h2 hold 1 and 3 at M = 3 (F F F B W B W B W; F B F B F B W W W)."""
    assert simulate(make_schedule("1f1b", Shape(2, 3))).peak_waiting == (1, 1)
    found = simulate(make_schedule("zb_h2", Shape(2, 3)))
    assert (found.peak_activations, found.peak_waiting) == ((3, 3), (1, 3))
    assert found.peak_bytes(HeldBytes(10, 4)) == (3 * 10 + 4, 3 * 10 + 3 * 4)
    assert found.peak_bytes(HeldBytes(1, 0)) == found.peak_activations
    assert found.peak_bytes(HeldBytes(0, 1)) == found.peak_waiting


def test_the_fullest_moment_of_both_is_not_that_of_each():
    """One stage: three forwards and their fused backwards, then two forwards and Bs, then both Ws."""
    ops = ["F0", "F1", "F2", "B0", "W0", "B1", "W1", "B2", "W2", "F3", "F4", "B3", "B4", "W3", "W4"]
    table = Schedule("two heaps", 5, 5, Placement.loop(1, 1), (tuple((Op(word[0], 0, int(word[1])),) for word in ops),))
    found = simulate(table)
    assert (found.peak_activations, found.peak_waiting) == ((3,), (2,))
    assert found.peak_bytes(HeldBytes(10, 4)) == (3 * 10 + 4,)  # at B0
    assert found.peak_bytes(HeldBytes(10, 14)) == (2 * 10 + 2 * 14,)  # at B4


@pytest.mark.parametrize("held", [{"forward_bytes": -1, "backward_bytes": 1}, {"forward_bytes": 1, "backward_bytes": "1"}])
def test_bytes_that_are_none(held):
    with pytest.raises(ValueError, match=r"held (forward|backward)_bytes=('1'|-1): needs a number of at least 0"):
        HeldBytes(**held)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": -1}, "costs forward=-1: needs a number of at least 0"),
        ({"send": float("nan")}, "costs send=nan: needs a number of at least 0"),
        ({"backward": (1, 2, 3)}, r"costs backward=\(1, 2, 3\): needs one number, or 2, one a stage"),
        ({"part_sizes": (1, 2, 3)}, r"costs part_sizes=\(1, 2, 3\): needs 2 numbers, one a part"),
    ],
)
def test_costs_that_are_none(costs, message):
    with pytest.raises(ValueError, match=message):
        one(2, **costs)
