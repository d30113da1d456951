"""Pipelined steps compiled ahead of time: they compile, and what they hold is what their tables say."""

import functools

import pytest

from layouts.aot import CompilersMissingError, Target, compile_for, interpreter
from layouts.schedules import make_schedule
from layouts.simulate import HeldBytes, simulate
from layouts.tables import Shape

BUILD = "tests.layouts.programs:pipelined_step"
TARGET = "h100:1x8"


def compiled(target, schedule, shape, **more):
    """The compiled step; skips where there is no compiler."""
    try:
        interpreter(Target.parse(target))
    except CompilersMissingError as error:
        pytest.skip(str(error))
    found = compile_for(target, BUILD, {"schedule": schedule, "shape": shape, **more}, timeout_seconds=900)
    assert found.memory is not None
    assert found.alarms == ()
    return found.memory.temp_bytes


@functools.cache
def held(target, schedule, microbatches=8):
    """(temporary bytes of a device, the schedule in time)."""
    shape = {"stages": 4, "microbatches": microbatches}
    return compiled(target, schedule, shape), simulate(make_schedule(schedule, Shape(**shape)))


@functools.cache
def sizes(target):
    """(what a micro-batch holds, what is there besides), out of three programs: gpipe's at two lengths, and zb_h1's."""
    most, fewer, first = held(target, "gpipe")[0], held(target, "gpipe", 4)[0], held(target, "zb_h1")[0]
    forward = (most - fewer) / 4
    # gpipe holds all 8, of which one waits; zb_h1 holds 4, which all wait on its last stage.
    backward = (first - most + 4 * forward) / 3
    return HeldBytes(forward, backward), most - 8 * forward - backward


def predicted(target, simulation):
    """The fullest stage's bytes by the simulator, with what every table holds."""
    each, rest = sizes(target)
    return rest + max(simulation.peak_bytes(each))


@pytest.mark.slow
@pytest.mark.parametrize("target", [TARGET, "v5p:4x4x4"])
def test_temporaries_are_what_the_simulator_says_is_held(target):
    """Of schedules that had no part in the sizes, within 15%; in its order too, where gpipe has the most but for zb_h2."""
    assert held(target, "zb_h1")[1].peak_waiting == (1, 2, 3, 4)
    found = {name: held(target, name) for name in ("gpipe", "1f1b", "zb_h1", "zb_h2")}
    said = {name: predicted(target, simulation) for name, (_, simulation) in found.items()}
    for name in ("1f1b", "zb_h2"):
        assert found[name][0] == pytest.approx(said[name], rel=0.15), name
    by_bytes = sorted(found, key=lambda name: found[name][0])
    assert by_bytes == sorted(said, key=said.get) == ["1f1b", "zb_h1", "gpipe", "zb_h2"]


@pytest.mark.slow
def test_zeropp_compiles_with_gathers_over_fsdp():
    assert compiled(TARGET, "zeropp", {"stages": 4, "microbatches": 8, "chunks": 2, "unit": 4}, fsdp=2)


@pytest.mark.slow
def test_a_pipeline_compiles_for_tpus():
    assert compiled("v5p:2x2x2", "1f1b", {"stages": 4, "microbatches": 8})


@pytest.mark.slow
def test_a_pipeline_compiles_for_a_cube_of_64_tpus():
    """4 stages with 4 shards of parameters and 4 of experts each."""
    assert compiled("v5p:4x4x4", "zeropp", {"stages": 4, "microbatches": 8, "chunks": 2, "unit": 4}, fsdp=4)
