"""Experts lent within a step: the layer's answer is the plain one's, and what is lent, sent and kept is what it says.

m: senders, t: tokens of one, E: experts, n: devices of a domain.
"""

import dataclasses
import functools
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from layouts import aot, hlo
from layouts.hlo.program import scope
from moejax import AxisRules, MoEConfig, RebalanceConfig, compiler_options, forecast
from moejax.lending import DEAL_BITS, _cuts, _draw
from moejax.rebalance import plan_loans
from tests.layouts.programs import layer as layer_program
from tests.layouts.test_aot import needs_compilers
from tests.moejax import grid, rules
from tests.moejax import hlo as texts

BOTH = AxisRules(expert=("data", "expert"))
MESHES = {
    "expert 8": ("expert8", AxisRules(), 8, 8),
    "data 2, expert 4": ("data2_expert4", AxisRules(), 4, 4),
    "two levels": ("data2_expert4", BOTH, 8, 4),
    "fsdp 2, expert 2, tensor 2": ("fsdp2_expert2_tensor2", AxisRules(), 2, 2),
}
WAYS = {"pool": {"capacity": "pool"}, "ragged": {"exchange": "ragged"}}
CASES = [
    ("expert 8", "pool", {"dyn": 1, "pick": "hot", "move": "divide"}),
    ("expert 8", "ragged", {"dyn": 4, "pick": "fixed", "move": "whole"}),
    ("data 2, expert 4", "ragged", {"dyn": 4, "pick": "hot", "move": "divide"}),
    ("two levels", "pool", {"dyn": 2, "pick": "fixed", "move": "divide"}),
]
RULES = [
    {"dyn": dyn, "pick": pick, "move": move}
    for dyn, pick, move in itertools.product((1, 2, 4), ("fixed", "hot"), ("whole", "divide"))
]
SLOW = [case for case in itertools.product(MESHES, WAYS, RULES) if case not in CASES]


def config(**changes) -> MoEConfig:
    """16 experts, three a token, nothing dropped unless a change says so."""
    base = {"d_model": 8, "d_ff": 8, "num_experts": 16, "top_k": 3, "dtype": "float32", "aux_loss": 0.5, "z_loss": 0.1}
    return MoEConfig(**{**base, "num_senders": 8, "capacity_factor": None, **changes})


def place(mesh: str) -> grid.Place:
    """Where the layer runs."""
    name, rules, *_ = MESHES[mesh]
    return dataclasses.replace(grid.place(name), rules=rules)


def senders(mesh: str) -> dict:
    """What a config says of that mesh's token shards and destinations."""
    where, devices = place(mesh), MESHES[mesh][2]
    return {"num_senders": where.token_shards, "num_destinations": devices}


def without(stats, *, like):
    """Stats as the reference has them: it knows no other device, and lends nothing unless told to."""
    stats = dataclasses.replace(stats, token_straggler=like.token_straggler)
    if stats.rebalance is None or like.rebalance is None:
        return dataclasses.replace(stats, rebalance=None)
    lent = dataclasses.replace(stats.rebalance, token_straggler_before=like.rebalance.token_straggler_before)
    return dataclasses.replace(stats, rebalance=lent)


@pytest.mark.parametrize(
    ("mesh", "way", "rule"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow, id="-".join(map(str, case))) for case in SLOW)],
)
def test_lending_changes_no_answer(mesh, way, rule):
    """Outputs and all gradients, against one device that keeps every expert at home."""
    activation = "gelu" if rule["dyn"] == 2 else "swiglu"
    known = senders(mesh) if way == "pool" else {"num_senders": senders(mesh)["num_senders"]}
    layer = grid.Layer(config(activation=activation, rebalance=RebalanceConfig(**rule), **WAYS[way], **known), (4, 16))
    plain = grid.Layer(config(activation=activation, num_senders=known["num_senders"]), (4, 16))
    moved, before, after = 0, 0.0, 0.0
    for seed, skew in enumerate(grid.SKEWS):
        inputs = grid.draw(layer, seed, skew, grid.PADDINGS[seed % len(grid.PADDINGS)])
        got, want = grid.run(layer, place(mesh), inputs.garbage()), grid.reference(plain, inputs)
        grid.assert_replicas_equal(got)
        stats = got["stats"]
        assert stats.num_dropped == stats.rebalance.num_dropped_before == 0
        moved += int(stats.rebalance.num_moved_rows)
        before, after = before + float(stats.rebalance.token_straggler_before), after + float(stats.token_straggler)
        grid.assert_close({**got, "stats": without(stats, like=want["stats"])}, {**want, "stats": want["stats"]})
    assert moved > 0
    assert after < before


@pytest.mark.parametrize(
    ("mesh", "rule"),
    [
        pytest.param("expert 8", {"move": "divide"}, marks=pytest.mark.slow),
        pytest.param("data 2, expert 4", {"move": "whole", "dyn": 2}, marks=pytest.mark.slow),
        ("two levels", {"move": "divide", "pick": "fixed", "pair": 1}),
    ],
)
def test_tight_pools_drop_the_same_everywhere_and_less(mesh, rule):
    """Against one device that has as many destinations, in domains of as many, and against pools that lend nothing."""
    rule = RebalanceConfig(num_devices=MESHES[mesh][3], **rule)
    base = config(capacity="pool", capacity_factor=1.0, rebalance=rule, **senders(mesh))
    layer, dropped, before = grid.Layer(base, (8, 16)), 0, 0
    plain = grid.Layer(dataclasses.replace(base, rebalance=None), (8, 16))
    for seed, skew in enumerate(grid.SKEWS):
        inputs = grid.draw(layer, seed, skew, grid.PADDINGS[seed % 3])
        got, want = grid.run(layer, place(mesh), inputs.garbage()), grid.run(layer, grid.Place(), inputs)
        grid.assert_close({**got, "stats": without(got["stats"], like=want["stats"])}, want)
        lent = got["stats"].rebalance
        stays = grid.run(plain, place(mesh), inputs)["stats"]
        assert lent.num_dropped_before == stays.num_dropped
        np.testing.assert_allclose(lent.token_straggler_before, stays.token_straggler, rtol=1e-6)
        dropped, before = dropped + int(got["stats"].num_dropped), before + int(lent.num_dropped_before)
        if inputs.valid.all() and base.num_senders == base.num_destinations:
            check_forecast(forecast(chosen(layer, inputs), base), got["stats"])
    assert dropped < before


def chosen(layer: grid.Layer, inputs: grid.Inputs):
    """[senders, t, k] the router's choices, said again."""
    logits = inputs.x.reshape(-1, layer.cfg.d_model) @ inputs.params["router"]
    expert = np.stack([rules.best(row, layer.cfg.top_k) for row in logits])
    return jnp.asarray(expert.reshape(layer.cfg.num_senders, -1, layer.cfg.top_k), jnp.int32)


def check_forecast(found, stats):
    """It says of the routing what the layer says after it ran."""
    lent = stats.rebalance
    assert found.num_dropped_before == lent.num_dropped_before
    assert found.num_dropped_after == stats.num_dropped
    assert found.num_moved_experts == lent.num_moved_experts
    assert found.moved_bytes == lent.moved_bytes
    assert found.rows_before.sum() == found.rows_after.sum() == stats.num_assignments
    assert found.straggler_after <= found.straggler_before


@pytest.mark.parametrize(
    ("shape", "changes", "says"),
    [
        ((4, 8, 2), {}, r"expert of shape \(4, 8, 2\): needs \[N, t, top_k=3\]"),
        ((3, 8, 3), {}, r"expert of shape \(3, 8, 3\): .*N devices that divide num_experts=16"),
        ((8, 8, 3), {"rebalance": RebalanceConfig(num_devices=3)}, r"expert of shape .*domains of 3"),
        ((8, 8, 3), {"rebalance": None}, r"rebalance=None, capacity='pool': needs a RebalanceConfig and 'pool'"),
    ],
)
def test_forecasts_of_nothing_are_refused(shape, changes, says):
    with pytest.raises(ValueError, match="^" + says):
        forecast(jnp.zeros(shape, jnp.int32), config(**{"capacity": "pool", "rebalance": RebalanceConfig(), **changes}))


def test_counts_are_those_of_the_plan():
    """Weights of 8 x 8, three of them an expert, float32; rows are dealt to within two of each loan's."""
    rule = RebalanceConfig(**CASES[0][2])
    layer = grid.Layer(config(activation="swiglu", capacity="pool", rebalance=rule, **senders("expert 8")), (4, 16))
    for seed, skew in enumerate(grid.SKEWS):
        stats = grid.run(layer, place("expert 8"), grid.draw(layer, seed, skew, "none"))["stats"]
        load = np.asarray(stats.tokens_per_expert).reshape(8, 2)
        loans = plan_loans(jnp.asarray(load), rule)
        lanes, away = np.asarray(loans.lane) >= 0, np.asarray(loans.rows) * ~np.eye(8, dtype=bool)[:, None]
        assert stats.rebalance.num_moved_experts == lanes.sum()
        assert stats.rebalance.moved_bytes == lanes.sum() * 3 * 8 * 8 * 4
        assert abs(int(stats.rebalance.num_moved_rows) - away.sum()) <= 2 * lanes.sum()
        assert stats.rebalance.token_straggler_before == load.sum(1).max() - load.sum() / 8


@functools.cache
def _dealt():
    def dealt(rows, rank, sender):
        return (_draw(rank, sender, 8)[..., None] >= _cuts(rows)).sum(-1)

    return jax.jit(dealt)


@hypothesis.given(
    rows=st.lists(st.sampled_from([0, 0, 1, 2, 5, 100, 30_000, 50_000_000]), min_size=4, max_size=4),
    num_rows=st.sampled_from([1, 7, 64, 500]),
)
@hypothesis.settings(max_examples=60)
def test_rows_are_dealt_in_proportion_by_every_sender(rows, num_rows):
    """To within four rows of every share, whatever the sender has; and where a share is nothing or all, exactly."""
    rows = np.array(rows, np.int32)
    rank = np.broadcast_to(np.arange(num_rows, dtype=np.int32), (8, num_rows))
    place = np.asarray(_dealt()(jnp.asarray(rows), jnp.asarray(rank), jnp.arange(8, dtype=jnp.int32)))
    share = rows / max(rows.sum(), 1)
    for sender in place:
        count = np.bincount(sender, minlength=4)
        assert count.sum() == num_rows
        if rows.any():
            assert (np.abs(count - share * num_rows) <= 4).all()
            assert not count[rows == 0].any()
    assert 0 <= int(_draw(jnp.full((1, 1), 2**31 - 1), jnp.full(1, 7), 8)[0, 0]) < 2**DEAL_BITS


SMALL = {"d_model": 16, "d_ff": 32, "num_experts": 16, "top_k": 2, "dtype": "float32", "capacity": "pool"}


def test_lent_weights_cross_once_forward_and_twice_backward_and_are_not_kept():
    """There, there again, and their gradients home; beside what pools send anyway."""
    found = {}
    for name, rule in {"plain": None, "lent": RebalanceConfig()}.items():
        text = layer_program(jax.devices(), rebalance=rule, **SMALL).compile().as_text()
        module = hlo.parse(text)
        crossing = [i for where in module.computations.values() for i in where if i.base_op == "all-to-all"]
        found[name] = [scope(i) for i in crossing if "moe/lanes" in scope(i)]
        found[f"{name}, all"] = len(texts.collectives(text, "all-to-all"))
    assert found["plain"] == []
    assert [name.startswith("~") for name in sorted(found["lent"])] == [False, True, True]
    assert found["lent, all"] == found["plain, all"] + 3


PRODUCTS = ("dot", "convolution", "custom-call")


def _own_products(module: hlo.Module, where: hlo.Computation, sign: str) -> set[str]:
    """The instructions that do an own expert's product, forward ("") or backward ("~")."""

    def does(instruction):
        inner = (i for name in instruction.called for i in module.computations[name])
        mine = instruction.base_op in PRODUCTS and scope(instruction).startswith(f"{sign}moe/experts/moe/own")
        # A gather may stand there as a custom call too.
        return (mine and hlo.works(module, instruction)) or any(map(does, inner))

    return {i.name for i in where if does(i)}


def check_hidden(target: str, tmp_path) -> None:
    """The weights' exchange, its repetition and their gradients' way home, each beside products of the own experts."""
    needs_compilers(target)
    arguments = {"rebalance": {"pair": 1}, "capacity": "pool", "d_model": 1024, "d_ff": 2048, "num_experts": 32, "tokens": 2048}
    compiled = aot.compile_for(
        target,
        "tests.moejax.rebalance_programs:lending_layer",
        arguments,
        compiler_options=compiler_options(aot.Target.parse(target).kind),
        out=tmp_path,
    )
    module = hlo.parse(compiled.text)
    assert compiled.alarms == ()
    (where,) = [
        c for c in module.computations.values() if any("moe/lanes" in scope(w.start) for w in hlo.windows(c, "all-to-all"))
    ]
    windows = [w for w in hlo.windows(where, "all-to-all") if "moe/lanes" in scope(w.start)]
    beside = [{i.name for i in window.between} for window in windows]
    forward, backward = _own_products(module, where, ""), _own_products(module, where, "~")
    assert len(windows) == 3
    assert forward <= beside[0], "all of the own experts' products, forward"
    assert beside[1] & backward, "while the weights come again"
    assert {i.name for i in where if i.name in backward and "grouped_outer" in scope(i)} <= beside[2], "while gradients go home"
    order = [i.name for i in where]
    start, done = order.index(windows[1].start.name), order.index(windows[2].done.name)
    assert backward <= set(order[start:done]), "all of the own experts' products, backward"


def test_gpu_lends_beside_the_own_experts(tmp_path):
    check_hidden("h100:1x8", tmp_path)


@pytest.mark.slow
def test_tpu_lends_beside_the_own_experts(tmp_path):
    check_hidden("v5p:2x2x2", tmp_path)
