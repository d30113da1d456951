"""An exchange waits for no expert product but its own part's. What compilers make of that: test_exchanges_aot.py."""

import jax
import pytest

import moejax
from tests.layouts.programs import layer, train_step
from tests.moejax.crossings import Crossings, check_independence

SMALL = {"num_chunks": 2, "d_model": 16, "d_ff": 32, "activation": "gelu", "dtype": "float32"}


@pytest.mark.parametrize("capacity", ["cell", "pool"])
def test_a_part_waits_for_no_other_parts_experts(capacity):
    check_independence(layer(jax.devices(), **SMALL, capacity=capacity).compile().as_text(), 2)


def test_whole_exchanges_wait_for_all_experts():
    """What the check above must tell from chunks: without them every product stands before the way back."""
    found = check_independence(layer(jax.devices(), **SMALL | {"num_chunks": 1}).compile().as_text(), 1)
    (home,) = found.by_scope["moe/combine"]
    assert found.waits_for(home, "") == {i.name for i in found.products[""]}
    with pytest.raises(AssertionError):
        check_independence(layer(jax.devices(), **SMALL | {"num_chunks": 1}).compile().as_text(), 2)


@pytest.mark.parametrize("remat", ["none", "exchange"])
def test_micro_batches_that_walk_together_wait_for_nothing_of_each_other(remat):
    """In the body of the layers' loop, forward and backward, whatever one sends needs only its own attention and experts."""
    passes = Crossings.of(train_step(jax.devices(), remat=remat).compile().as_text())
    assert sorted(map(sorted, (found.by_scope for found in passes))) == [
        ["moe/combine", "moe/dispatch"],
        ["~moe/combine", "~moe/dispatch"],
    ]
    for found in passes:
        waits = [[found.waits_for(exchange, "all") for exchange in pair] for pair in found.by_scope.values()]
        assert any(map(any, waits))
        for first, second in waits:
            assert not first & second


def test_options_of_no_platform():
    with pytest.raises(ValueError, match=r"^platform='cuda': legal values are 'cpu', 'gpu', 'tpu'"):
        moejax.compiler_options("cuda")
