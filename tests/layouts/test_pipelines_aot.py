"""Pipelined steps compiled ahead of time: they compile, and what they hold is what their tables say."""

import functools

import pytest

from layouts.aot import CompilersMissingError, Target, compile_for, interpreter
from layouts.schedules import make_schedule
from layouts.simulate import simulate
from layouts.tables import Shape
from moejax import StageLayers
from moejax.ticks import make_ticks

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
def held(schedule, microbatches=8):
    """(temporary bytes of a device, the fullest stage's peak by the simulator, micro-batches whose W waits, at most)."""
    shape = {"stages": 4, "microbatches": microbatches}
    table = make_schedule(schedule, Shape(**shape))
    waits = make_ticks(table, StageLayers.even(table.placement, (0,) * 4)).slots["stash"][0]
    return compiled(TARGET, schedule, shape), max(simulate(table).peak_activations), waits


def one_microbatch():
    """What gpipe's eight micro-batches take more than its four, a micro-batch."""
    return (held("gpipe")[0] - held("gpipe", 4)[0]) / 4


@pytest.mark.slow
def test_temporaries_of_fused_backwards_follow_the_simulators_peak():
    """Within 15%, and gpipe's are the most."""
    (most, all_of_them, _), (found, peak, waits) = held("gpipe"), held("1f1b")
    assert (all_of_them, waits) == (8, 1)
    assert found == pytest.approx(most - one_microbatch() * (8 - peak), rel=0.15)
    assert found < most


@pytest.mark.slow
def test_a_w_that_waits_holds_more_than_its_activations():
    """What B made for it, which the simulator does not count: from zb_h1's four the seven of zb_h2 follow, within 15%."""
    plain, _, once = held("1f1b")
    first, peak, waits = held("zb_h1")
    assert (peak, waits, once) == (4, 4, 1)
    one_wait = (first - plain) / (waits - once)
    found, peak, waits = held("zb_h2")
    assert found == pytest.approx(plain + one_microbatch() * (peak - 4) + one_wait * (waits - once), rel=0.15)


@pytest.mark.slow
def test_zeropp_compiles_with_gathers_over_fsdp():
    assert compiled(TARGET, "zeropp", {"stages": 4, "microbatches": 8, "chunks": 2, "unit": 4}, fsdp=2)


@pytest.mark.slow
def test_a_pipeline_compiles_for_tpus():
    assert compiled("v5p:2x2x2", "1f1b", {"stages": 4, "microbatches": 8})
