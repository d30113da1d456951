"""Pipelined steps compiled ahead of time: they compile, and what they hold is what the simulator says the table holds."""

import functools

import pytest

from layouts.aot import CompilersMissingError, Target, compile_for, interpreter
from layouts.schedules import make_schedule
from layouts.simulate import simulate
from layouts.tables import Shape

BUILD = "tests.layouts.programs:pipelined_step"
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zb_h2")
TARGETS = ("h100:1x8", "v5p:2x2x2")


@functools.cache
def compiled(target, schedule, microbatches=8, **more):
    """Temporary bytes of a device, and the peak that the simulator has for the fullest stage."""
    try:
        interpreter(Target.parse(target))
    except CompilersMissingError as error:
        pytest.skip(str(error))
    shape = {"stages": 4, "microbatches": microbatches, **more}
    found = compile_for(target, BUILD, {"schedule": schedule, "shape": shape}, timeout_seconds=900)
    assert found.memory is not None
    assert found.alarms == ()
    return found.memory.temp_bytes, max(simulate(make_schedule(schedule, Shape(**shape))).peak_activations)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_temporaries_are_what_the_simulator_says(target):
    """From gpipe with 8 and with 4 micro-batches: what one costs. All others follow from their peaks, within 15%."""
    (most, _), (less, _) = compiled(target, "gpipe"), compiled(target, "gpipe", 4)
    one = (most - less) / 4
    for schedule in SCHEDULES:
        temporaries, peak = compiled(target, schedule)
        assert temporaries == pytest.approx(most - one * (8 - peak), rel=0.15), schedule


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_temporaries_rank_schedules_as_the_simulator_does(target):
    found = [compiled(target, schedule) for schedule in SCHEDULES]
    assert max(found) == found[0], "gpipe holds most"
    by_peak = sorted(range(len(found)), key=lambda i: (found[i][1], found[i][0]))
    assert by_peak == sorted(range(len(found)), key=lambda i: found[i][0])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100:1x8", "v5p:4x4x4"])
def test_zeropp_compiles(target):
    """With gathers and reduces of the table's, a V's worth of chunks, experts and fsdp on one mesh."""
    try:
        interpreter(Target.parse(target))
    except CompilersMissingError as error:
        pytest.skip(str(error))
    arguments = {"schedule": "zeropp", "shape": {"stages": 4, "microbatches": 8, "chunks": 2, "unit": 4}, "fsdp": 2}
    assert compile_for(target, BUILD, arguments, timeout_seconds=900).memory is not None
