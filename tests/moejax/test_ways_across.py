"""Hierarchical, streamed, chunked and chosen exchanges: one answer, and in the compiled text what each promises."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from layouts.hlo import read
from moejax import AxisRules, MoEConfig, make_mesh
from moejax.exchange.choose import choose_exchange
from moejax.exchange.form import MAX_APART, TABLE, choose_form
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
    ("shared", "expert8", AxisRules(), {"exchange": "ragged"}),
    ("odd", "data2_expert4", BOTH, {"exchange": "ragged"}),
    ("many_senders", "data2_expert4", AxisRules(), {"exchange": "ragged"}),
    ("every_expert", "fsdp2_expert2_tensor2", AxisRules(), {"exchange": "ragged"}),
    # In other forms: weights inside the experts, an exchange for each of 2, 1, 4 and 8 local experts.
    ("odd", "data2_expert4", BOTH, {"exchange": "hierarchical", "weigh_at": "expert", "exchange_by": "expert"}),
    ("odd", "data2_expert4", BOTH, {"exchange": "hierarchical", "weigh_at": "expert", "num_chunks": 2}),
    ("many_senders", "expert8", AxisRules(), {"weigh_at": "expert", "exchange_by": "expert"}),
    ("shared", "expert8", AxisRules(), {"weigh_at": "expert", "num_chunks": 2}),
    ("every_expert", "fsdp2_expert2_tensor2", AxisRules(), {"weigh_at": "expert", "exchange_by": "expert"}),
    ("shared", "data2_expert4", AxisRules(), {"weigh_at": "token", "exchange_by": "expert"}),
    ("every_expert", "one", AxisRules(), {"weigh_at": "expert", "exchange_by": "expert"}),
]
# What a device takes is bounded: every exchange drops the same, or nothing.
BOUNDED = [
    ("shared", "data2_expert4", BOTH, {"exchange": "ragged", "num_destinations": 8, "receive_factor": 1.0}),
    ("shared", "data2_expert4", AxisRules(), {"exchange": "all_gather", "num_destinations": 4, "receive_factor": 1.1}),
    ("shared", "expert8", AxisRules(), {"exchange": "weight_stream", "num_destinations": 8, "receive_factor": 1.0}),
    ("shared", "expert8", AxisRules(), {"exchange": "all_to_all", "num_destinations": 8, "receive_factor": 1.0}),
    ("shared", "data8", AxisRules(), {"num_senders": 16, "num_destinations": 2, "receive_factor": 1.0}),
    (
        "odd",
        "fsdp2_expert2_tensor2",
        AxisRules(),
        {"exchange": "ragged", "num_destinations": 2, "num_senders": 4, "receive_factor": 1.0, "capacity_factor": 4.0},
    ),
]
STAYING = {"exchange": "ragged", "receive_factor": 1.0, "overflow": "fallback", "capacity_factor": None}
FALLING_BACK = [("shared", "data2_expert4", 2), ("odd", "fsdp2_expert2_tensor2", 2)]  # and the groups there


def _layer(name, changes):
    layer = grid.LAYERS[name]
    return dataclasses.replace(layer, cfg=dataclasses.replace(layer.cfg, **changes))


@pytest.mark.parametrize(("name", "mesh", "rules", "changes"), CASES)
def test_every_way_across_gives_the_reference_answer(name, mesh, rules, changes):
    layer, where = _layer(name, changes), dataclasses.replace(grid.place(mesh), rules=rules)
    plain = _layer(name, {})
    for seed, skew in enumerate(grid.SKEWS):
        inputs = grid.draw(layer, seed, skew, grid.PADDINGS[-1 - seed % len(grid.PADDINGS)])
        _check(grid.run(layer, where, inputs.garbage()), grid.reference(plain, inputs))


def _check(got, want):
    grid.assert_replicas_equal(got)
    stats = dataclasses.replace(got["stats"], token_straggler=want["stats"].token_straggler)
    grid.assert_close({**got, "stats": stats}, want)


@pytest.mark.parametrize(("name", "mesh", "rules", "changes"), BOUNDED)
def test_a_bound_on_what_a_device_takes_is_the_same_for_all(name, mesh, rules, changes):
    layer, where = _layer(name, changes), dataclasses.replace(grid.place(mesh), rules=rules)
    dropped = 0
    for seed, skew in enumerate(grid.SKEWS):
        inputs = grid.draw(layer, seed, skew, grid.PADDINGS[seed % 3])
        got, want = grid.run(layer, where, inputs.garbage()), grid.reference(layer, inputs)
        _check(got, want)
        dropped += int(got["stats"].num_dropped_at_receiver)
    assert dropped


@pytest.mark.parametrize(("name", "mesh", "groups"), FALLING_BACK)
def test_what_a_device_does_not_take_can_stay(name, mesh, groups):
    """Two senders a shard where the mesh has four shards; and a bound that is exceeded, else the test says nothing."""
    layer, where, exceeded = _layer(name, STAYING), grid.place(mesh), False
    shards, plain = where.token_shards, _layer(name, {"capacity_factor": None})
    room = -(-layer.shape[0] * layer.shape[1] // shards) * layer.cfg.top_k
    for seed, skew in enumerate(grid.SKEWS):
        inputs = grid.draw(layer, seed, skew, grid.PADDINGS[seed % 3])
        got = grid.run(layer, where, inputs.garbage())
        _check(got, grid.reference(plain, inputs))
        came = np.asarray(got["stats"].tokens_per_expert).reshape(shards // groups, -1).sum(1)
        exceeded |= came.max() > groups * room
        assert got["stats"].num_dropped == 0
    assert exceeded


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


@pytest.mark.parametrize(("exchange_by", "count"), [("device", 6), ("expert", 10)])
def test_weights_cross_by_themselves(exchange_by, count):
    """Forward and backward: one small exchange of weights each, and of rows two each, for each of two local experts."""
    text = _text("data2_expert4", AxisRules(), weigh_at="expert", exchange_by=exchange_by)
    assert len(hlo.collectives(text, "all-to-all")) == count


@pytest.mark.parametrize(
    ("platform", "num_local", "changes", "form"),
    [
        ("cpu", 1, {}, ("token", "device")),
        ("tpu", MAX_APART, {}, ("expert", "expert")),
        ("tpu", MAX_APART + 1, {}, ("expert", "device")),
        ("tpu", 1, {"num_chunks": 2}, ("expert", "device")),
        ("tpu", 1, {"weigh_at": "token"}, ("token", "expert")),
        ("gpu", 1, {}, ("expert", "device")),
        ("gpu", 64, {"exchange_by": "expert"}, ("expert", "expert")),
        ("tpu", 1, {"exchange": "weight_stream"}, ("token", "device")),
        ("tpu", 1, {"capacity": "pool"}, ("token", "device")),
    ],
)
def test_the_form_is_the_configs_or_the_hardwares(platform, num_local, changes, form):
    cfg = _layer("odd", changes).cfg
    found = choose_form(cfg, cfg.capacity, cfg.exchange, platform, num_local)
    assert (found.weigh_at, found.exchange_by) == form


def test_every_line_of_the_forms_has_its_evidence():
    assert all(form.evidence for form in TABLE.values())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "all_to_all"),
        ({"top_k": 32}, "all_gather"),  # a token goes to all devices anyway, four times to each
        ({"d_ff": 8}, "weight_stream"),  # the weights are smaller than the tokens
        ({"capacity_factor": None}, "all_gather"),  # cells would hold all tokens for each expert
    ],
)
def test_auto_takes_the_fewest_bytes_and_says_why(changes, name):
    cfg = MoEConfig(**{"d_model": 64, "d_ff": 4096, "num_experts": 64, "top_k": 2, **changes})
    choice = choose_exchange(cfg, num_tokens=4096, num_senders=1, num_shards=8)
    assert choice.name == name
    assert choice.wire_bytes[name] == min(choice.wire_bytes.values())
    assert str(choice).startswith(f"exchange={name}: fewest bytes")


def test_auto_counts_true_rows_where_the_hardware_sends_them(monkeypatch):
    cfg = MoEConfig(d_model=64, d_ff=4096, num_experts=64, top_k=2, dtype="float32")
    here = choose_exchange(cfg, 4096, 1, 8).wire_bytes
    monkeypatch.setattr("moejax.exchange.choose.platform", lambda: "tpu")
    there = choose_exchange(cfg, 4096, 1, 8)
    assert there.name == "ragged"
    assert there.wire_bytes == {**here, "ragged": 4 * 4096 * 2 * 64 * 4 * 7 // 8}
    assert here["ragged"] == here["all_to_all"]
    assert choose_exchange(dataclasses.replace(cfg, capacity_factor=None), 4096, 1, 8).name == "ragged"
    assert "ragged" not in choose_exchange(cfg, 4096, 1, 8, lifted=True).wire_bytes


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
        ({"num_chunks": 2, "exchange": "ragged"}, "num_chunks=2: exchange='ragged' crosses whole; legal is 1, or one of"),
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


@pytest.mark.parametrize(
    ("mesh", "changes", "says"),
    [
        ("expert8", {"num_destinations": 4}, "num_destinations=4: the mesh has 8 expert shards"),
        ("expert8", {"num_senders": 16}, "num_senders=16: receivers with a bound need one sender per token shard, 8"),
        ("data8", {"num_destinations": 4}, "num_senders=8 over 8 token shards: each needs a multiple of 4 destinations"),
    ],
)
def test_bounds_that_the_mesh_cannot_keep(mesh, changes, says):
    layer = _layer("shared", {"receive_factor": 1.0, **changes})
    with pytest.raises(ValueError, match="^" + says):
        grid.run(layer, grid.place(mesh), grid.draw(layer, 0, "random", "none"))
