"""Every exchange compiled ahead of time for TPUs and for H100: it compiles, forward and backward, sends what it promises and
nothing else, and where it crosses in parts none waits for another one's experts, so that products run while rows cross.
"""

import collections
import functools
import tempfile
from pathlib import Path

import pytest

import moejax
from layouts import aot, hlo
from layouts.hlo.program import continues, walk
from tests.layouts.test_aot import needs_compilers
from tests.moejax.crossings import Crossings, check_independence

TWO_LEVELS = {"mesh": {"data": 2, "expert": 4}, "expert": ["data", "expert"]}
SMALL = {"tokens": 64, "d_model": 128, "d_ff": 128, "num_experts": 8, "activation": "gelu"}
EXCHANGES = {
    "cells": {"num_chunks": 2},
    "by_expert": {"weigh_at": "expert", "exchange_by": "expert", "num_experts": 16},
    "pools": {"capacity": "pool", "num_chunks": 2},
    "ragged": {"exchange": "ragged"},
    "two_hops": {"exchange": "hierarchical", "num_chunks": 2, **TWO_LEVELS},
    "shares": {"exchange": "hierarchical", "num_chunks": 2, "mesh": {"expert": 4, "tensor": 2}},
    "all_gather": {"exchange": "all_gather"},
    "weight_stream": {"exchange": "weight_stream"},
    "rings": {"overlap": True, "num_experts": 2, "top_k": 1, "mesh": {"fsdp": 2, "expert": 2, "tensor": 2}},
}
# Arrays that cross, loops multiplied out; a compiler may send several in one collective. Rows four ways, there and back,
# forward and backward; beside them, where they are, what is small: weights there and their gradients back, numbers, counts.
PROMISED = {
    "cells": {"all-to-all": 4 * 2 + 2},
    "by_expert": {"all-to-all": 4 * 2 + 2},
    "pools": {"all-to-all": 4 * 2 + 3},
    "ragged": {"ragged-all-to-all": 4 + 2, "all-gather": 1},
    "two_hops": {"all-to-all": 2 * (4 * 2 + 2)},
    # What is gathered over the tensor axis, and what is summed there.
    "shares": {"all-to-all": 4 * 2 + 2 + 2 * 2 + 1, "all-gather": 2 * 2 + 1},
    # Tokens, the plan's three arrays, cotangents; outputs, gradients of tokens and of weights.
    "all_gather": {"all-gather": 1 + 3 + 1, "reduce-scatter": 1 + 1 + 1},
    # Both matrices round 8 shards, and again with their gradients.
    "weight_stream": {"collective-permute": (2 + 4) * 8},
    # Outputs come back in two parts by columns. Once round a ring of two: both matrices, the second in its parts, forward and
    # backward but for the first, which is still there; their gradients; a part's sum, and the gather after it.
    "rings": {"all-to-all": 2 * (1 + 2) + 2, "collective-permute": 3 + 2 + 3 + 1, "all-gather": 1},
}
# A TPU's compiler makes all-reduces of small ones: the counts of what each shard sends, the gradients of weights.
ON_TPU = {"ragged": {"ragged-all-to-all": 4 + 2}, "all_gather": {"all-gather": 1 + 3 + 1, "reduce-scatter": 1 + 1}}
# A v5p's of all reduce-scatters over its eight chips (libtpu 0.0.42 and 0.0.46).
ON_V5P = ON_TPU | {"all_gather": {"all-gather": 1 + 3 + 1}}
# In parts, and the devices that exchange with each other.
IN_PARTS = [("cells", 8), ("pools", 8), ("two_hops", 2), ("two_hops", 4)]
SHARES = ("shares", 4)
# So large that an exchange is worth hiding.
LARGE = {"num_chunks": 2, "d_model": 1024, "d_ff": 4096, "num_experts": 8, "tokens": 1024}
STEP = {"d_model": 1024, "d_ff": 4096, "seq": 256}
QUICK = ("v5e:2x4", "h100:1x8")
TARGETS = [*QUICK, *(pytest.param(target, marks=pytest.mark.slow) for target in ("v5p:2x2x2", "v6e:2x4"))]


def compiled(target: str, programs: dict[str, tuple[str, dict]]) -> dict[str, str]:
    """The text of each program, under every option there is for that platform: an unknown one would be refused."""
    needs_compilers(target)
    options = moejax.compiler_options(aot.Target.parse(target).kind, deterministic=True)
    build = "tests.layouts.programs:{}".format
    jobs = {name: aot.Job(build(function), arguments, options) for name, (function, arguments) in programs.items()}
    with tempfile.TemporaryDirectory() as folder:
        found = aot.compile_all(target, jobs, out=Path(folder))
        assert not any(program.alarms for program in found.values())
        return {name: program.text for name, program in found.items()}


@functools.cache
def texts(target: str) -> dict[str, str]:
    """Every exchange, all in one child."""
    large = {"large": ("layer", LARGE)} if target.startswith("h100") else {}
    return compiled(target, {name: ("layer", SMALL | changes) for name, changes in EXCHANGES.items()} | large)


def arrays_sent(text: str) -> dict[str, int]:
    """By kind of collective but the all-reduce, in which counts, losses and gradients of what is replicated are summed."""
    sent = collections.Counter()
    for visit in walk(hlo.parse(text)):
        kind = visit.instruction.base_op
        if kind in hlo.COLLECTIVES and kind != "all-reduce" and not continues(visit.instruction):
            sent[kind] += visit.times * (1 if kind == "ragged-all-to-all" else len(visit.instruction.operands))
    return dict(sent)


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("target", TARGETS)
def test_exchanges_send_what_they_promise(target, name):
    family = aot.Target.parse(target).family
    promised = PROMISED | {"h100": {}, "v5p": ON_V5P}.get(family, ON_TPU)
    assert arrays_sent(texts(target)[name]) == promised[name]


@pytest.mark.parametrize(("name", "group_size"), IN_PARTS)
@pytest.mark.parametrize("target", TARGETS)
def test_parts_wait_for_no_other_parts_experts(target, name, group_size):
    check_independence(texts(target)[name], 2, group_size)


@pytest.mark.parametrize("target", TARGETS)
def test_shares_of_a_part_wait_for_no_later_parts_experts(target):
    """A TPU fuses the steps of a part's gather with the products of the part before, so that one waits for the other there."""
    name, group_size = SHARES
    if aot.Target.parse(target).kind == "gpu":
        check_independence(texts(target)[name], 2, group_size)
    (found,) = Crossings.of(texts(target)[name], group_size)
    assert not any(found.waits_for(exchange, "") for exchange in found.by_scope["moe/dispatch"])
    assert not any(found.waits_for(exchange, "~") for exchange in found.by_scope["~moe/combine"])
    for name, sign in (("moe/combine", ""), ("~moe/dispatch", "~")):
        first, last = sorted((found.waits_for(exchange, sign) for exchange in found.by_scope[name]), key=len)
        assert last - first, name


def check_schedule(text: str):
    """Products run while rows cross, forward and backward."""
    found = check_independence(text, 2)
    assert found.hidden("moe/dispatch") | found.hidden("moe/combine")
    assert found.hidden("~moe/combine") | found.hidden("~moe/dispatch")


def test_gpu_runs_products_beside_exchanges():
    check_schedule(texts("h100:1x8")["large"])


@pytest.mark.slow
@pytest.mark.parametrize(("target", "capacity"), [("v5p:2x2x2", "cell"), ("h100:1x8", "pool")])
def test_products_run_beside_exchanges(target, capacity):
    check_schedule(compiled(target, {"large": ("layer", LARGE | {"capacity": capacity})})["large"])


@pytest.mark.slow
def test_gpu_runs_a_micro_batch_beside_another_ones_exchanges():
    for found in Crossings.of(compiled("h100:1x8", {"step": ("train_step", STEP)})["step"]):
        assert any(found.hidden(name) for name in found.by_scope)
