"""Hierarchical, streamed, chunked and chosen exchanges: one answer, and in the compiled text what each promises."""

import dataclasses
import functools

import jax
import pytest

from layouts.hlo import read
from moejax import AxisRules, MoEConfig, make_mesh
from moejax.exchange.choose import choose_exchange
from tests.moejax import grid, hlo

BOTH = AxisRules(expert=("data", "expert"))
CASES = [
    ("odd", "data2_expert4", BOTH, {"exchange": "hierarchical"}),
    ("shared", "data2_expert4", BOTH, {"exchange": "hierarchical", "num_chunks": 2}),
    ("shared", "expert8", AxisRules(), {"exchange": "weight_stream"}),
    ("many_senders", "data2_expert4", BOTH, {"exchange": "weight_stream"}),
    ("every_expert", "fsdp2_expert2_tensor2", AxisRules(), {"exchange": "weight_stream"}),
    ("many_senders", "expert8", AxisRules(), {"num_chunks": 4}),
    ("every_expert", "fsdp2_expert2_tensor2", AxisRules(), {"num_chunks": 2}),
    ("shared", "data2_expert4", AxisRules(), {"exchange": "auto"}),
]


def _layer(name, changes):
    layer = grid.LAYERS[name]
    return dataclasses.replace(layer, cfg=dataclasses.replace(layer.cfg, **changes))


@pytest.mark.parametrize(("name", "mesh", "rules", "changes"), CASES)
def test_every_way_across_gives_the_reference_answer(name, mesh, rules, changes):
    layer, where = _layer(name, changes), dataclasses.replace(grid.place(mesh), rules=rules)
    plain = _layer(name, {})
    for seed, skew in enumerate(grid.SKEWS):
        inputs = grid.draw(layer, seed, skew, grid.PADDINGS[-1 - seed % len(grid.PADDINGS)])
        got, want = grid.run(layer, where, inputs.garbage()), grid.reference(plain, inputs)
        grid.assert_replicas_equal(got)
        stats = dataclasses.replace(got["stats"], token_straggler=want["stats"].token_straggler)
        grid.assert_close({**got, "stats": stats}, want)


@functools.cache
def _text(mesh, rules, **changes):
    layer, where = _layer("shared", changes), dataclasses.replace(grid.place(mesh), rules=rules)
    args = where.put(layer.cfg, grid.draw(layer, 0, "random", "none"))
    with jax.set_mesh(where.mesh):
        return jax.jit(functools.partial(grid.step, layer.cfg, rules)).lower(*args).compile().as_text()


def test_two_hops_are_eight_exchanges_of_small_groups():
    """Two hops each way, forward and backward: half over the slow axis of 2, half over the fast one of 4."""
    text = _text("data2_expert4", BOTH, exchange="hierarchical")
    exchanges = [c for c in read(text).collectives if c.kind == "all-to-all"]
    assert {(c.group_size, c.count) for c in exchanges} == {(2, 4), (4, 4)}


def test_streamed_weights_need_no_all_to_all():
    text = _text("expert8", AxisRules(), exchange="weight_stream")
    assert hlo.collectives(text, "all-to-all") == []
    assert hlo.collectives(text, "collective-permute")


def test_chunks_cross_apart():
    assert len(hlo.collectives(_text("expert8", AxisRules(), num_chunks=2), "all-to-all")) == 8


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "all_to_all"),
        ({"top_k": 32}, "all_gather"),  # a token goes to all devices anyway, four times to each
        ({"d_ff": 8}, "weight_stream"),  # the weights are smaller than the tokens
    ],
)
def test_auto_takes_the_fewest_bytes_and_says_why(changes, name):
    cfg = MoEConfig(**{"d_model": 64, "d_ff": 4096, "num_experts": 64, "top_k": 2, **changes})
    choice = choose_exchange(cfg, num_tokens=4096, num_senders=1, num_shards=8)
    assert choice.name == name
    assert choice.wire_bytes[name] == min(choice.wire_bytes.values())
    assert str(choice).startswith(f"exchange={name}: fewest bytes")


def test_auto_bytes_are_those_of_the_exchange():
    """One cell's rows each way, forward and backward, less the eighth that stays: what the compiled text sends."""
    cfg = MoEConfig(d_model=64, d_ff=4096, num_experts=64, top_k=2, dtype="float32")
    rows = 64 * cfg.cell_rows(4096)
    assert choose_exchange(cfg, 4096, 1, 8).wire_bytes["all_to_all"] == 4 * rows * 64 * 4 * 7 // 8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"num_chunks": 2, "exchange": "weight_stream"},
            "num_chunks=2: exchange='weight_stream' crosses whole; legal is 1, or one of 'all_to_all'",
        ),
        ({"num_chunks": 0}, "num_chunks=0: needs a whole number of at least 1"),
        ({"exchange": "hierarchic"}, r"exchange='hierarchic': legal values are .*did you mean 'hierarchical'\?"),
    ],
)
def test_impossible_ways_are_refused(changes, says):
    with pytest.raises(ValueError, match="^" + says):
        _layer("shared", changes)


def test_hierarchical_needs_two_axes_and_chunks_must_divide():
    inputs = grid.draw(_layer("shared", {}), 0, "random", "none")
    with pytest.raises(ValueError, match=r"^exchange='hierarchical': needs two expert axes .*\('expert',\)"):
        grid.run(_layer("shared", {"exchange": "hierarchical"}), grid.Place(make_mesh(expert=8)), inputs)
    with pytest.raises(ValueError, match=r"^num_chunks=4 does not divide the 6 tokens of a shard: legal are 1, 2, 3, 6"):
        grid.run(_layer("shared", {"num_chunks": 4}), grid.Place(make_mesh(expert=8)), inputs)
