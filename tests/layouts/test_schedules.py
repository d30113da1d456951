"""Every maker's tables are right for any P, V, U and M, and have the figures that its paper gives."""

import dataclasses
import itertools
import random

import pytest

from layouts.auto import lower_bound, search
from layouts.errors import InfeasibleError, InputError
from layouts.listing import Limits, Policy, list_schedule
from layouts.schedules import MAKERS, Shape, make_schedule
from layouts.simulate import Costs, Simulation, simulate
from layouts.tables import finish
from moejax.pipeline import COMPUTE, Placement

NAMES = [name for name in MAKERS if name != "auto"]


def run(name: str, stages: int, microbatches: int, chunks: int | None = None, **how) -> Simulation:
    """A maker's table in time, at F = B = W = 1."""
    return simulate(make_schedule(name, Shape(stages, microbatches, chunks, **how)))


@pytest.mark.parametrize(
    ("name", "chunks", "split", "at_4_8", "at_8_16"),
    [  # the issue's exact values; zb_v, dualpipe and dualpipe_v from their papers' bubbles
        ("gpipe", 1, False, 33, 69),
        ("1f1b", 1, False, 33, 69),
        ("interleaved", 2, False, 28.5, 58.5),
        ("interleaved", 4, False, 26.25, 53.25),
        ("zb_h1", 1, False, 27, 55),
        ("zb_h2", 1, False, 27, 55),
        ("gpipe", 1, True, 30, 62),
        ("1f1b", 1, True, 30, 62),
        ("interleaved", 2, True, 27, 55),
        ("zb_v", 2, False, 25.5, 51.5),
        ("dualpipe", 1, False, 26, 54),
        ("dualpipe_v", 2, False, 27, 55),
    ],
)
def test_makespans(name, chunks, split, at_4_8, at_8_16):
    assert run(name, 4, 8, chunks, split=split).makespan == at_4_8
    assert run(name, 8, 16, chunks, split=split).makespan == at_8_16


def test_zb_h2_never_pauses():
    found = run("zb_h2", 4, 8)
    assert [end - start for start, end in found.spans] == [24.0] * 4
    assert found.bubble_span == 0


@pytest.mark.parametrize(
    ("shape", "bubble", "gathers"),
    [((4, 2, 8, 16), 0.030, 5), ((4, 4, 8, 16), 0.015, 13), ((8, 2, 16, 32), 0.035, 5), ((4, 2, 4, 16), 0.111, 9)],
)
def test_zeropp(shape, bubble, gathers):
    stages, chunks, unit, microbatches = shape
    found = run("zeropp", stages, microbatches, chunks, unit=unit)
    assert round(found.bubble_makespan, 3) == bubble
    assert set(found.schedule.count("gather")) == {gathers}
    assert max(found.peak_activations) <= unit


@pytest.mark.parametrize(
    ("name", "chunks", "peaks"),
    [  # P = 4, M = 8, held until W; from an independent simulator
        ("gpipe", 1, [8, 8, 8, 8]),
        ("1f1b", 1, [4, 3, 2, 1]),
        ("interleaved", 2, [5.5, 4.5, 3.5, 2.5]),
        ("interleaved", 4, [4.75, 4.25, 3.75, 3.25]),
        ("zb_h1", 1, [4, 4, 4, 4]),
        ("zb_h2", 1, [7, 7, 7, 7]),
        ("dualpipe", 1, [5, 5, 5, 5]),
        ("dualpipe_v", 2, [4.5, 4.5, 4.5, 4.5]),
        ("zeropp", 2, [8, 8, 8, 8]),
        ("zb_v", 2, [4, 4, 4, 4]),
    ],
)
def test_peaks(name, chunks, peaks):
    found = run(name, 4, 8, chunks)
    assert list(found.peak_activations) == peaks
    assert list(found.schedule.peak_activations()) == peaks


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "costs", "makespan"),
    [  # from an independent simulator
        ("1f1b", 3, 7, (1.3, 0.7, 1.1), 27.9),
        ("zb_h1", 4, 9, (1, 1.2, 0.8), 31.2),
        ("zb_h2", 4, 9, (1.3, 0.7, 1.1), 31.8),
        ("dualpipe", 4, 8, (1, 1.2, 0.8), 26.4),
        ("dualpipe", 6, 14, (1.3, 0.7, 1.1), 48.6),
    ],
)
def test_other_costs(name, stages, microbatches, costs, makespan):
    schedule = make_schedule(name, Shape(stages, microbatches))
    assert simulate(schedule, Costs(*costs)).makespan == pytest.approx(makespan)


def shapes(count: int, seed: int) -> list[tuple[str, Shape]]:
    """Random shapes, each for a maker that takes it."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        name = draw.choice(NAMES)
        stages, microbatches = draw.randint(1, 5), draw.randint(1, 8)
        chunks, unit = draw.randint(1, 4), draw.randint(1, 10)
        maker = MAKERS[name]
        shape = Shape(
            stages, microbatches, chunks, unit if maker.takes_unit else None, maker.takes_split and draw.random() < 0.5
        )
        try:
            maker.check(name, shape)
        except InputError:
            continue
        found.append((name, shape))
    return found


def check_invariants(name: str, shape: Shape) -> None:
    """What holds of any table; that each op is there once and after its inputs is checked where it is made."""
    found = simulate(make_schedule(name, shape))
    schedule, place = found.schedule, found.schedule.placement
    assert sum(map(sum, map(schedule.count, COMPUTE))) == 3 * shape.microbatches * place.num_parts
    assert sum(found.busy) == pytest.approx(3 * shape.microbatches * shape.stages)
    bound = lower_bound(place, shape.microbatches, Costs()) if max(place.pipes) == 0 else 3 * shape.microbatches
    assert found.makespan >= bound - 1e-9
    assert found.peak_activations == pytest.approx(schedule.peak_activations())
    assert min(found.peak_activations) >= place.chunk_share - 1e-9
    assert max(found.peak_activations) <= shape.microbatches
    assert 0 <= found.bubble_span <= found.bubble_makespan + 1e-9
    ways = {(way.op.kind, way.source, way.target) for way in schedule.transfers}
    assert all(abs(a - b) in (1, shape.stages - 1) for _, a, b in ways)
    check_times(found)


def check_times(found: Simulation) -> None:
    """No op starts before the results that it needs, and no two overlap on a stage."""
    ends = {(event.stage, event.op): event.end for event in found.events}
    for event in found.events:
        needed = found.schedule.placement.inputs(event.stage, event.op) if event.op.kind in COMPUTE else ()
        assert all(ends[stage, op] <= event.start + 1e-9 or event.op.kind == "W" for stage, op in needed)
    for stage in range(found.schedule.num_stages):
        mine = sorted((e.start, e.end) for e in found.events if e.stage == stage and e.lane in ("compute", "upper"))
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(mine))


def test_a_thousand_random_shapes():
    drawn = shapes(1000, seed=0)
    assert {name for name, _ in drawn} == set(NAMES)
    for name, shape in drawn:
        try:
            check_invariants(name, shape)
        except Exception as error:
            raise AssertionError(f"{name} {shape}") from error


def test_zeropp_for_any_shape():
    draw = random.Random(1)
    for _ in range(60):
        stages, chunks, unit, microbatches = (draw.randint(1, most) for most in (5, 4, 12, 18))
        found = run("zeropp", stages, microbatches, chunks, unit=unit)
        units = -(-microbatches // min(unit, microbatches))
        assert set(found.schedule.count("gather")) == {(2 * chunks - 2) * units + 1}
        assert set(found.schedule.count("reduce")) == {chunks * units}
        assert max(found.peak_activations) <= min(unit, microbatches) + 1e-9
        if (microbatches % unit or unit) >= 2 * stages:
            assert found.makespan == pytest.approx(3 * microbatches + (stages - 1) / chunks)


def test_zb_v_is_as_short_as_can_be():
    for stages, microbatches in itertools.product((1, 2, 3, 5, 6), (12, 13, 15)):
        found = run("zb_v", stages, microbatches)
        assert found.makespan == 3 * microbatches + (stages - 1) / 2
        assert max(found.peak_activations) <= stages


def test_interleaved_where_stages_do_not_divide_micro_batches():
    assert [run("interleaved", 4, m, 2).makespan for m in (5, 6, 7, 9)] == [3 * m + 4.5 for m in (5, 6, 7, 9)]


def test_waves_and_both_ways_beat_one_way():
    for stages, microbatches in ((4, 8), (6, 12)):
        plain = run("1f1b", stages, microbatches).makespan
        waves = [run("hanayo", stages, microbatches, chunks).makespan for chunks in (2, 4)]
        assert plain > waves[0] > waves[1] > run("bitpipe", stages, microbatches, 4).makespan
        assert max(run("bitpipe", stages, microbatches).peak_activations) <= stages


def auto(stages: int, microbatches: int, chunks: int | None = None, **how) -> Simulation:
    """What `auto` finds."""
    shape = Shape(stages, microbatches, chunks, **how)
    return simulate(make_schedule("auto", shape), shape.costs)


def test_auto_reaches_the_bound_where_memory_is_no_limit():
    assert auto(4, 8).makespan == 25.5
    assert auto(4, 8, 1).makespan == 27


def test_auto_gets_shorter_with_memory_and_keeps_within_it():
    found = {cap: auto(3, 6, 2, max_activations=cap) for cap in (1, 1.5, 2, 3)}
    spans = [one.makespan for one in found.values()]
    assert spans == sorted(spans, reverse=True)
    assert len(set(spans)) == 4
    assert all(max(one.peak_activations) <= cap for cap, one in found.items())
    assert spans[-1] == 3 * 6 + 1


@pytest.mark.parametrize(
    "costs",
    [
        Costs(1, 1.2, 0.8, send=0.1),
        Costs(1, 1.1, 0.9, send=0.2, gather=0.3, reduce=0.2, blocking=True),
        Costs((1, 2, 1), (1, 2, 1.2), (1, 1.5, 0.8), send=0.05),
        Costs(part_sizes=(0.7, 1.3, 1.0), send=0.1),
    ],
)
def test_auto_is_not_beaten(costs):
    """By no table that is known and fits, on stages that are alike or not; and it says how far it is from the bound."""
    shape = Shape(3, 6, 1, costs=costs, max_activations=3)
    best = simulate(make_schedule("auto", shape), costs)
    assert max(best.peak_activations) <= 3
    for name in ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zeropp"):
        split = MAKERS[name].takes_split
        other = simulate(make_schedule(name, Shape(3, 6, 1, split=split)), costs)
        assert best.makespan <= other.makespan + 1e-9 or max(other.peak_activations) > 3
    bound = lower_bound(best.schedule.placement, 6, costs)
    assert bound <= best.makespan <= 1.25 * bound


def test_auto_cuts_where_the_sizes_say():
    sizes = (1.0, 1.5, 0.5, 1.0)
    assert auto(2, 4, costs=Costs(part_sizes=sizes)).schedule.placement.num_parts == 4


def test_the_search_says_what_it_found():
    found = search("auto", Shape(2, 3, 1, max_activations=2), [])
    assert found.schedule.name == "auto"
    assert found.bound == found.simulation.makespan == 10
    assert found.num_tables >= 1


def test_every_cap_of_one_micro_batch_has_a_table():
    """Whatever the policy prefers: list scheduling cannot block itself, on loops, zigzags and both ways."""
    draw = random.Random(2)
    for seed in range(60):
        stages, microbatches, chunks = draw.randint(1, 4), 2 * draw.randint(1, 3), draw.choice((1, 2))
        placement = draw.choice((Placement.loop, Placement.zigzag))(stages, chunks)
        placement = placement.both_ways() if draw.random() < 0.3 else placement
        caps = [draw.choice((1, 1.5, 2)) for _ in range(stages)]
        policy = Policy(draw.choice("FB"), draw.choice(("depth", "breadth", "group")), draw.random(), seed % 2 == 0, 0.5, seed)
        costs = Costs(*(draw.random() for _ in range(3)), send=draw.random())
        rows = list_schedule(Limits(placement, microbatches, costs, caps), policy)
        finish("listed", Shape(stages, microbatches), placement, rows).check_memory(caps)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("1f1bb", {}, r"schedule '1f1bb': legal are gpipe, 1f1b, .* \(did you mean 1f1b\?\)"),
        ("gpipe", {"chunks": 2}, "gpipe with chunks=2: legal chunks a stage are 1"),
        ("zb_v", {"chunks": 3}, "zb_v with chunks=3: legal chunks a stage are 2"),
        ("hanayo", {"chunks": 3}, "hanayo with chunks=3: legal chunks a stage are even numbers"),
        ("dualpipe", {"stages": 3}, "dualpipe with stages=3: needs an even number"),
        ("dualpipe", {"microbatches": 6}, "stages=4, microbatches=6: legal are even numbers from 8 on"),
        ("dualpipe_v", {"microbatches": 7}, "stages=4, microbatches=7: legal are whole numbers from 8 on"),
        ("bitpipe", {"microbatches": 7}, "bitpipe with microbatches=7: needs an even number"),
        ("bitpipe", {"stages": 5}, "bitpipe with stages=5: needs an even number"),
        ("1f1b", {"unit": 4}, "1f1b with unit=4: only zeropp takes a unit"),
        ("zb_h1", {"split": True}, "zb_h1 with split=True: only gpipe, 1f1b, interleaved takes a split"),
        ("gpipe", {"stages": 0}, "stages=0: needs a whole number of at least 1"),
        ("zeropp", {"unit": 0}, "unit=0: needs a whole number of at least 1"),
        ("auto", {"max_activations": [1, 1]}, r"max_activations=\[1, 1\]: needs one number, or 4, one a stage"),
        ("auto", {"costs": Costs(part_sizes=(1, 2))}, "costs part_sizes of 2 parts: with stages=4 legal are 4 or 8"),
        ("auto", {"max_activations": -1}, "max_activations=-1: needs numbers above 0"),
    ],
)
def test_bad_input(name, shape, message):
    with pytest.raises(InputError, match=message):
        make_schedule(name, Shape(**{"stages": 4, "microbatches": 8} | shape))


def test_caps_that_nothing_meets():
    shape = Shape(4, 8, max_activations=0.5)
    with pytest.raises(InfeasibleError, match=r"no table fits, stage 0 holds 1 micro-batches .* legal are numbers from 1 on"):
        make_schedule("auto", shape)
    with pytest.raises(
        InfeasibleError, match=r"1f1b with max_activations=3: stage 0 holds 4 .* legal are numbers from 4 on, or auto"
    ):
        make_schedule("1f1b", dataclasses.replace(shape, max_activations=3))
    assert make_schedule("1f1b", dataclasses.replace(shape, max_activations=4)).name == "1f1b"
