"""The rings as the compilers of TPU and GPU schedule them: every part travels while something is multiplied."""

import pytest

import moejax
from layouts import aot, hlo
from tests.layouts.test_aot import needs_compilers


def _check(target: str, axis: str, share: float) -> None:
    """`share`: of the parts, how many must have a product beside them."""
    needs_compilers(target)
    options = moejax.compiler_options(aot.Target.parse(target).kind)
    build = "tests.moejax.overlapped_programs:feed_forward"
    compiled = aot.compile_for(target, build, {"axis": axis}, compiler_options=options)
    module = hlo.parse(compiled.text)
    windows = hlo.windows(module.computations[module.entry], "collective-permute")
    hidden = [any(hlo.works(module, instruction) for instruction in window.between) for window in windows]
    assert compiled.alarms == ()
    assert {found.kind for found in hlo.read(compiled.text).collectives} == {"collective-permute"}
    assert len(windows) >= 4 * 7  # two products and their gradients, seven parts each
    assert sum(hidden) >= share * len(windows), hidden


@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_on_h100_parts_travel_beside_products(axis):
    _check("h100:1x8", axis, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_on_v5p_parts_travel_beside_products(axis):
    _check("v5p:2x2x2", axis, 0.85)  # all 35 over fsdp; over tensor 25 of 28
