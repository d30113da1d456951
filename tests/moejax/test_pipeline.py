"""A table says exactly which op is wrong, and what follows from a right one: inputs, transfers, what is held."""

import dataclasses

import pytest

from moejax.pipeline import Op, Placement, Schedule


def row(words: str) -> tuple[tuple[Op, ...], ...]:
    """A row from words: F0, Bb1 (chunk b), B0W0 (one cell), ga (gather of chunk a), ra0 (reduce of chunk a, unit 0)."""
    return tuple(tuple(op(part) for part in word.split("+")) for word in words.split())


def op(word: str) -> Op:
    """One op of a word."""
    kind = {"g": "gather", "r": "reduce"}.get(word[0], word[0])
    rest = word[1:] if word[1:2].isalpha() else "a" + word[1:]
    return Op(kind, "abcdef".index(rest[0]), int(rest[1:] or 0))


FIRST = "F0 F1 B0 W0 B1 W1"
LAST = "F0 B0 W0 F1 B1 W1"


def table(*rows: str, placement: Placement | None = None, unit: int = 2, microbatches: int = 2) -> Schedule:
    """A table of these rows, by default of two stages with one chunk each."""
    return Schedule("mine", microbatches, unit, placement or Placement.loop(len(rows)), tuple(map(row, rows)))


def test_a_right_table():
    schedule = table(FIRST, LAST)
    assert schedule.peak_activations() == (2.0, 1.0)
    crossing = [(way.op.kind, way.op.index, way.source, way.target) for way in schedule.transfers]
    assert sorted(crossing) == [("B", 0, 1, 0), ("B", 1, 1, 0), ("F", 0, 0, 1), ("F", 1, 0, 1)]
    place = {cell: k for k, cell in enumerate(schedule.order)}
    assert len(place) == 12
    for stage, needs in enumerate(schedule.needs):
        assert all(place[need.stage, need.cell] < place[stage, k] for k, each in enumerate(needs) for need in each)


def test_units_round_up():
    assert table(FIRST + " F2 B2 W2", LAST + " F2 B2 W2", microbatches=3).num_units == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("F0 F1 B0 W0 B1", LAST), "stage 0: W of chunk 0, micro-batch 1 is missing"),
        (("F0 F1 B0 W0 B1 W1", ""), "stage 1: F of chunk 0, micro-batch 0 is missing"),
        (("F0 F1 B0 W0 B1 W1 W0", LAST), "stage 0, cell 6: W of chunk 0, micro-batch 0: for the second time, .* in cell 3"),
        (("F0 F1 B0 W0 B1 W1 F2", LAST), "stage 0, cell 6: F of chunk 0, micro-batch 2: legal micro-batches are 0 to 1"),
        (("F0 Fb1 B0 W0 B1 W1", LAST), "stage 0, cell 1: F of chunk 1, micro-batch 1: legal chunks are 0 to 0"),
        (("F0 F1 X0 W0 B1 W1", LAST), "stage 0, cell 2: op 'X': legal are F, B, W, gather, reduce"),
        (
            ("F0 F1 W0 B0 B1 W1", LAST),
            "stage 0, cell 2: W of chunk 0, micro-batch 0: comes before its input, the B .* which is in cell 3 of stage 0",
        ),
        (
            ("F0 B0 W0 F1 B1 W1", "F0 F1 B0 W0 B1 W1"),
            r"cell 1: B .*: comes before its input, the B .* cell 2 of stage 1; and that waits for stage 1, cell 1: F",
        ),
        (("F0+F1 B0+W0 B1 W1", "F0 B0+F1 W0 B1 W1+B1"), "stage 1, cell 4: B of chunk 0, micro-batch 1: for the second time"),
    ],
)
def test_what_is_wrong(rows, message):
    with pytest.raises(ValueError, match=message):
        table(*rows)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("F0 F1 B0 W0 B1 W1 ra0", "stage 0, cell 0: F of chunk 0, micro-batch 0: no gather of chunk 0 comes before it"),
        ("ga F0 ga ga F1 B0 W0 B1 W1 ra0", "stage 0, cell 3: gather of chunk 0: that of cell 2 has not been used yet"),
        ("ga F0 F1 B0 W0 B1 W1 ga ra0", "stage 0, cell 7: gather of chunk 0: no F or B uses it"),
        ("ga F0 F1 B0 W0 B1 W1", "stage 0: reduce of chunk 0, unit 0 is missing; its last W is in cell 6"),
        ("ga F0 F1 B0 W0 B1 ra0 W1", "stage 0, cell 7: W of chunk 0, micro-batch 1: comes after the reduce .* in cell 6"),
        ("ga F0 F1 B0 W0 B1 W1 ra0 ra0", "stage 0, cell 8: reduce of chunk 0, unit 0: for the second time"),
        ("ga F0 F1 B0 W0 B1 W1 ra0 ra1", "stage 0, cell 8: reduce of chunk 0, unit 1: legal units are 0 to 0"),
    ],
)
def test_what_is_wrong_with_gathers_and_reduces(first, message):
    last = "ga F0 B0 W0 F1 B1 W1 ra0"
    assert table("ga F0 F1 B0 W0 B1 W1 ra0", last).count("gather") == (1, 1)
    with pytest.raises(ValueError, match=message):
        table(first, last)


def test_a_memory_cap():
    schedule = table(FIRST, LAST)
    schedule.check_memory((2, 1))
    message = (
        "stage 0, cell 1: F of chunk 0, micro-batch 1: with it 2 micro-batches of a full stage are held, over the cap of 1.5; "
        "this table needs 2"
    )
    with pytest.raises(ValueError, match=message):
        schedule.check_memory(1.5)
    with pytest.raises(ValueError, match=r"max_activations=\[1\]: needs one number, or 2"):
        schedule.check_memory([1])


def test_a_fused_cell_sends_at_its_end_and_holds_until_then():
    schedule = table("F0 F1 B0+W0 B1+W1", "F0 B0+W0 F1 B1+W1")
    assert schedule.peak_activations() == (2.0, 1.0)
    assert schedule.needs[1][1] == ((1, 0, Op("F", 0, 0)),)


def test_placements():
    assert Placement.loop(3, 2).parts == ((0, 3), (1, 4), (2, 5))
    assert Placement.zigzag(3, 2).parts == ((0, 5), (1, 4), (2, 3))
    both = Placement.loop(2).both_ways()
    assert (both.parts, both.pipes, both.chunk_share) == (((0, 1), (1, 0)), (0, 1), 1.0)
    assert Placement.zigzag(2).both_ways().chunk_share == 0.5


def test_at_the_turn_of_a_v_nothing_crosses():
    rows = "Fa0 Fb0 Bb0 Wb0 Ba0 Wa0"
    schedule = table(rows, rows, placement=Placement.zigzag(2), microbatches=1, unit=1)
    assert [(way.op, way.source) for way in schedule.transfers if way.op.kind == "F"] == [
        (Op("F", 1, 0), 1),
        (Op("F", 0, 0), 0),
    ]


def test_a_micro_batch_stays_in_its_pipe():
    both = Placement.loop(2).both_ways()
    right = table("Fa0 Ba0 Wa0 Fb1 Bb1 Wb1", "Fa0 Ba0 Wa0 Fb1 Bb1 Wb1", placement=both)
    assert right.placement.num_parts == 2
    with pytest.raises(ValueError, match="micro-batch 0: is of pipe 1, but the micro-batch is in pipe 0"):
        table("Fa0 Ba0 Wa0 Fb1 Bb1 Wb1", "Fb0 Ba0 Wa0 Fb1 Bb1 Wb1", placement=both)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement(((0, 1), (2, 2)), (0, 0)), r"pipe 0 holds parts \[0, 1, 2, 2\]; needs each of 0 to 2 once"),
        (lambda: Placement(((0,), (1, 2)), (0,)), "needs a part for each chunk of each stage"),
        (lambda: table(FIRST, placement=Placement.loop(2)), "schedule of 1 rows: the placement has 2 stages"),
        (lambda: dataclasses.replace(table(FIRST, LAST), unit=0), "schedule unit=0: needs a whole number of at least 1"),
        (lambda: Schedule("mine", 1, 1, Placement.loop(1), (((),),)), "stage 0, cell 0: holds no op; leave the cell out"),
    ],
)
def test_placements_and_schedules_that_are_none(make, message):
    with pytest.raises(ValueError, match=message):
        make()
