"""Ticks: played through in plain Python, every op of every schedule finds what it needs where the table says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layouts.errors import LayoutsError
from layouts.schedules import MAKERS, make_schedule
from layouts.simulate import simulate
from layouts.tables import Shape
from moejax.pipeline import Op, Placement
from moejax.stage_layers import StageLayers
from moejax.ticks import KINDS, LAYER_BUFFERS, color, make_ticks

NAMES = [name for name in MAKERS if name != "auto"]


class Player:
    """Runs a table with names in place of arrays; whatever an op reads that is not what it needs is an error."""

    def __init__(self, schedule, layers, ticks, backward=True):
        self.schedule, self.layers, self.ticks, self.backward = schedule, layers, ticks, backward
        stages = schedule.num_stages
        self.inbox = [[None] * (ticks.inbox + 1) for _ in range(stages)]
        self.out = [[None, None] for _ in range(stages)]
        slots = {name: ticks.slots[name] for name in LAYER_BUFFERS}
        self.held = [{name: [[None] * n for n in slots[name]] for name in LAYER_BUFFERS} for _ in range(stages)]
        self.order = [[] for _ in range(stages)]
        self.gathers = [0] * stages

    def play(self):
        for tick in range(self.ticks.num_ticks):
            for stage in range(self.schedule.num_stages):
                self.stage_tick(stage, {name: column[tick, stage] for name, column in self.ticks.columns.items()})
            self.send(tick)
        return self

    def stage_tick(self, stage, row):
        self.move(stage, row, "gather", lambda layer: ("whole", layer), "gathered")
        kind, chunk, mb = KINDS[row["op"]], row["chunk"], row["mb"]
        if kind != "idle":
            self.order[stage].append(Op(kind, int(chunk), int(mb)))
            part, last = self.schedule.placement.parts[stage][chunk], self.schedule.placement.num_parts - 1
            assert (row["first"], row["last"]) == (part == 0, part == last)
            {"F": self.forward, "B": self.backward_op, "W": self.weight}[kind](stage, row, part, last)
        self.move(stage, row, "reduce", lambda layer: None, "sums")

    def layers_of(self, stage, row):
        chunk = self.layers.chunks[stage][row["chunk"]]
        assert row["count"] == len(chunk)
        for j, (kind, slot) in enumerate(chunk):
            assert (row["kind"][j], row["slot"][j]) == (kind, slot)
            yield j, kind, (kind, slot)

    def forward(self, stage, row, part, last):
        if part:
            assert self.inbox[stage][row["input"]] == ("y", part - 1, row["mb"])
        for j, kind, layer in self.layers_of(stage, row):
            self.read_gathered(stage, row, j, kind, layer)
            for name in ("keep_b", "keep_w") if self.backward else ():
                self.held[stage][name][kind][row[name][j]] = (name, layer, row["mb"])
        self.out[stage][0] = ("dy", last, row["mb"]) if part == last else ("y", part, row["mb"])

    def backward_op(self, stage, row, part, last):
        needed = ("dy", last, row["mb"]) if part == last else ("dx", part + 1, row["mb"])
        assert self.inbox[stage][row["input"]] == needed
        for j, kind, layer in self.layers_of(stage, row):
            self.read_gathered(stage, row, j, kind, layer)
            for name in ("keep_b", "keep_w"):
                assert self.held[stage][name][kind][row[name][j]] == (name, layer, row["mb"])
            self.held[stage]["stash"][kind][row["stash"][j]] = ("stash", layer, row["mb"])
        self.out[stage][1] = ("dx", part, row["mb"])

    def weight(self, stage, row, part, last):
        for j, kind, layer in self.layers_of(stage, row):
            for name in ("keep_w", "stash"):
                assert self.held[stage][name][kind][row[name][j]] == (name, layer, row["mb"])
            sums, unit = self.held[stage]["sums"][kind], row["mb"] // self.schedule.unit
            so_far = [] if row["fresh"] else sums[row["sums"][j]][2]
            sums[row["sums"][j]] = (layer, unit, [*so_far, int(row["mb"])])
            assert row["fresh"] or sums[row["sums"][j]][:2] == (layer, unit)

    def read_gathered(self, stage, row, j, kind, layer):
        if any(self.schedule.count("gather")):
            assert self.held[stage]["gathered"][kind][row["gathered"][j]] == ("whole", layer)

    def move(self, stage, row, name, make, buffer):
        for i in range(row.get(f"num_{name}", 0)):
            kind, slot, at = (row[f"{name}_{field}"][i] for field in ("kind", "slot", "at"))
            stored = self.held[stage][buffer][kind]
            if name == "gather":
                self.gathers[stage] += 1
            else:
                layer, unit, summed = stored[at]
                assert (layer, unit) == ((kind, slot), row["reduce_index"][i])
                pipe = self.schedule.placement.pipes[row["reduce_chunk"][i]]
                of_unit = [m for m in self.microbatches_of(pipe) if m // self.schedule.unit == unit]
                assert sorted(summed) == of_unit
            stored[at] = make((kind, slot))

    def microbatches_of(self, pipe):
        chunk_pipes = self.schedule.placement.pipes
        return sorted({op.index for row in self.schedule.rows for cell in row for op in cell
                       if op.kind == "F" and chunk_pipes[op.chunk] == pipe})  # fmt: skip

    def send(self, tick):
        arrived = []
        for i, shift in enumerate(self.ticks.channels):
            for stage in range(self.schedule.num_stages):
                target = (stage + shift) % self.schedule.num_stages
                what = self.out[stage][self.ticks.columns[f"sends_{i}"][tick, stage]]
                arrived.append((target, self.ticks.columns[f"takes_{i}"][tick, target], what))
        for target, slot, what in arrived:
            self.inbox[target][slot] = what


def order_of(schedule, kinds=("F", "B", "W")):
    return [[op for cell in row for op in cell if op.kind in kinds] for row in schedule.rows]


shapes = st.tuples(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 9), st.integers(1, 3), st.integers(1, 4))


@given(shapes, st.integers(0, 5), st.randoms(use_true_random=False))
def test_every_op_finds_what_it_needs(shape, more, random):
    """Any schedule, layers of two kinds cut anywhere, parts without layers among them."""
    name, stages, microbatches, chunks, unit = shape
    extra = {"chunks": chunks} if name in ("interleaved", "zeropp") else {}
    extra |= {"unit": unit} if name == "zeropp" else {}
    try:
        schedule = make_schedule(name, Shape(stages, microbatches, **extra))
    except LayoutsError:
        return
    parts = schedule.placement.num_parts
    cuts = [0] * parts
    for _ in range(parts + more):
        cuts[random.randrange(parts)] += 1
    order = tuple(random.randrange(2) for _ in range(parts + more))
    layers = StageLayers(schedule.placement, tuple(k if 1 in order else 0 for k in order), tuple(cuts))
    player = Player(schedule, layers, make_ticks(schedule, layers)).play()
    assert player.order == order_of(schedule)
    forwards = Player(schedule, layers, make_ticks(schedule, layers, backward=False), backward=False).play()
    assert forwards.order == order_of(schedule, ("F",))


@pytest.mark.parametrize("name", NAMES)
def test_ticks_and_slots_are_the_simulators(name):
    """At unit costs a table takes as many ticks as its makespan, and holds as many activations as its peak."""
    schedule = make_schedule(name, Shape(4, 8))
    layers = StageLayers.even(schedule.placement, (0,) * schedule.placement.num_parts)
    ticks, simulation = make_ticks(schedule, layers), simulate(schedule)
    share = schedule.placement.chunk_share
    assert ticks.num_ticks * share == pytest.approx(simulation.makespan)
    assert ticks.slots["keep_w"][0] * share == pytest.approx(max(simulation.peak_activations))


def test_zeropp_gathers_as_often_as_its_paper_says():
    schedule = make_schedule("zeropp", Shape(4, 16, chunks=2, unit=8))
    layers = StageLayers.even(schedule.placement, (0,) * 8)
    assert set(Player(schedule, layers, make_ticks(schedule, layers)).play().gathers) == {(2 * 2 - 2) * 2 + 1}


def test_slots_are_as_few_as_the_peak():
    slots, size = color({"a": (0, 3), "b": (1, 2), "c": (2, 4), "d": (3, 5)})
    assert size == 2
    assert slots["c"] == slots["b"]
    assert slots["d"] == slots["a"]


# ------------------------------------------------------------------------------------------------------------ StageLayers


def test_parameters_move_to_stage_order_and_back():
    layers = StageLayers(Placement.zigzag(2), (0, 1, 0, 0, 1), (2, 1, 1, 1))
    assert layers.held == (((0,), (1, 4)), ((2, 3), ()))
    assert layers.slots == (2, 2)
    first = np.arange(1, 4)[:, None]
    staged = layers.to_stages(0, first)
    np.testing.assert_array_equal(staged[:, 0], [1, 0, 2, 3])
    np.testing.assert_array_equal(layers.to_model(0, staged), first)


def test_a_mirrored_pipe_holds_the_layers_of_its_source():
    layers = StageLayers.even(Placement.loop(4).both_ways(), (0,) * 6)
    assert layers.mirrors == {1: (3, 2, 1, 0)}
    assert layers.held[3] == ((5,),)
    assert layers.chunks[0] == (((0, 0), (0, 1)), ((0, 2),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StageLayers(Placement.loop(2), (0, 0, 0), (1, 1)), "add up to 2, the model has 3 layers"),
        (lambda: StageLayers(Placement.loop(2), (0, 0), (1, 1, 0)), "needs 2 whole numbers of layers"),
        (lambda: StageLayers(Placement.loop(2), (0, 0), (3, -1)), "needs 2 whole numbers"),
        (lambda: StageLayers.even(Placement.loop(2, 2), (0, 0, 0)), "4 parts of 3 layers.*legal are up to 3 parts"),
        (
            lambda: StageLayers.even(Placement(((0, 1, 0, 3), (2, 3, 1, 2)), (0, 0, 1, 1)), (0,) * 4),
            "pipe 1 must be those of one stage of pipe 0",
        ),
    ],
)
def test_layers_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
