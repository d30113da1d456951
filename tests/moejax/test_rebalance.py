"""Who lends which expert to whom: the greedy against loops in NumPy, the closed form against what it promises, the pay rule.

n: devices of a domain, e: experts that each owns.
"""

import functools
import logging
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from moejax import MoEConfig, RebalanceConfig, make_mesh
from moejax.rebalance import WIRE_COSTS, plan_loans, why_not
from tests.moejax import grid

N, OWN = 4, 6
RULES = {
    f"{move}, {pick}, dyn {dyn}, pair {pair}, {max_slots} slots, tau {tau}": RebalanceConfig(
        dyn=dyn, pair=pair, max_slots=max_slots, tau=tau, pick=pick, move=move
    )
    for move, pick, dyn, pair, max_slots, tau in (
        ("whole", "hot", 2, 1, 8, 1),
        ("whole", "fixed", 4, 2, 2, 1),
        ("whole", "hot", 6, 2, 3, 9),
        ("divide", "hot", 2, 1, 8, 1),
        ("divide", "fixed", 4, 2, 2, 1),
        ("divide", "hot", 6, 2, 3, 9),
        ("divide", "hot", 9, 9, 99, 1),
    )
}


@functools.cache
def planner(cfg: RebalanceConfig):
    """The plan of one domain, compiled."""
    return jax.jit(lambda load: plan_loans(load, cfg))


@st.composite
def loads(draw):
    """[n, e] rows, from all equal to all on one device."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    high = draw(st.sampled_from([0, 1, 3, 40, 30_000_000]))
    load = rng.integers(0, high + 1, (N, OWN))
    load[draw(st.integers(0, N - 1))] *= draw(st.sampled_from([1, 1, 3]))
    load[:, rng.permutation(OWN)[: draw(st.integers(0, OWN))]] = 0
    return load.astype(np.int32)


def lendable(load, cfg):
    """[n, e] which experts may be lent."""
    order = [sorted(range(OWN), key=lambda i, row=row: -row[i]) if cfg.pick == "hot" else range(OWN) for row in load]
    return np.array([[i in list(mine)[: cfg.dyn] for i in range(OWN)] for mine in order])


def stated(load, cfg):
    """FEPLB's greedy in loops: {(owner, expert): host}."""
    may, host_of, total = lendable(load, cfg), {}, load.sum(1).astype(np.int64)
    while True:
        src = int(total.argmax())
        lanes = lambda d, src=src: sum(host == d and owner == src for (owner, _), host in host_of.items())
        hosted = lambda d: sum(host == d for host in host_of.values())
        free = [d for d in range(N) if d != src and lanes(d) < cfg.pair and hosted(d) < cfg.max_slots]
        if not free:
            return host_of
        dst = min(free, key=lambda d: (total[d], d))
        fits = [
            i
            for i in range(OWN)
            if may[src, i] and (src, i) not in host_of and load[src, i] >= cfg.tau and total[dst] + load[src, i] < total[src]
        ]
        if not fits:
            return host_of
        best = max(fits, key=lambda i: (load[src, i], -i))
        host_of[src, best] = dst
        total[src] -= load[src, best]
        total[dst] += load[src, best]


def check_limits(load, loans, cfg):
    """What holds of any plan: no row is lost, lanes and slots suffice, only what may be lent is, and nobody gets fuller."""
    rows, lane = np.asarray(loans.rows), np.asarray(loans.lane)
    np.testing.assert_array_equal(rows.sum(2), load)
    assert (rows >= 0).all()
    lent = lane >= 0
    assert not lent[np.arange(N), :, np.arange(N)].any()
    away = rows * ~np.eye(N, dtype=bool)[:, None]
    np.testing.assert_array_equal(away > 0, lent)
    assert (away[lent] >= cfg.tau).all()
    assert not lent[~lendable(load, cfg)].any()
    assert (lent.sum((0, 1)) <= cfg.max_slots).all()
    for owner, host in np.ndindex(N, N):
        used = lane[owner, :, host][lent[owner, :, host]]
        assert sorted(used) == list(range(len(used)))
        assert len(used) <= cfg.pair
    assert rows.sum((0, 1)).max() <= load.sum(1).max()


@pytest.mark.parametrize("name", RULES)
@hypothesis.given(load=loads())
@hypothesis.settings(max_examples=40)
def test_plans_keep_their_limits(name, load):
    cfg = RULES[name]
    check_limits(load, planner(cfg)(load), cfg)


@pytest.mark.parametrize("name", [name for name in RULES if name.startswith("whole")])
@hypothesis.given(load=loads())
@hypothesis.settings(max_examples=40)
def test_whole_moves_are_the_papers(name, load):
    cfg = RULES[name]
    rows, moved = np.asarray(planner(cfg)(load).rows), stated(load, cfg)
    want = np.zeros_like(rows)
    for owner, expert in np.ndindex(N, OWN):
        want[owner, expert, moved.get((owner, expert), owner)] = load[owner, expert]
    np.testing.assert_array_equal(rows, want)


@hypothesis.given(load=loads())
@hypothesis.settings(max_examples=40)
def test_divided_experts_leave_nothing_over(load):
    """Where every expert may be lent and no lane is short, no device has more than the mean, rounded up."""
    rows = np.asarray(planner(RULES["divide, hot, dyn 9, pair 9, 99 slots, tau 1"])(load).rows)
    assert rows.sum((0, 1)).max() <= -(-load.sum(dtype=np.int64) // N)


def popularity(kind: str, num_experts: int, rng) -> np.ndarray:
    """Log-normal of deviation 0.8, or 1 / rank with the ranks in random order."""
    p = np.exp(rng.normal(0, 0.8, num_experts)) if kind == "log-normal" else rng.permutation(1 / np.arange(1, num_experts + 1))
    return p / p.sum()


@pytest.mark.parametrize(
    ("move", "pick", "kind", "least"),
    [
        ("divide", "hot", "log-normal", 0.97),
        ("divide", "hot", "zipf", 0.97),
        ("whole", "hot", "log-normal", 0.8),
        ("whole", "fixed", "log-normal", 0.6),
    ],
)
def test_how_much_of_the_straggler_is_removed(move, pick, kind, least):
    """128 experts over 8 devices, 8 of them a token, 4,096 tokens a device, 20 micro-batches (systems.md of the design)."""
    plan, rng, before, after = planner(RebalanceConfig(move=move, pick=pick)), np.random.default_rng(0), 0.0, 0.0
    for _ in range(20):
        load = rng.multinomial(8 * 4096 * 8, popularity(kind, 128, rng)).reshape(8, 16).astype(np.int32)
        rows = np.asarray(plan(load).rows).sum((0, 1))
        before, after = before + load.sum(1).max() - load.sum() / 8, after + rows.max() - load.sum() / 8
    assert 1 - after / before >= least


def test_alone_nobody_lends():
    load = jnp.arange(6, dtype=jnp.int32)[None]
    loans = plan_loans(load, RebalanceConfig())
    np.testing.assert_array_equal(loans.rows[..., 0], load)
    assert (np.asarray(loans.lane) == -1).all()


@pytest.mark.parametrize(
    ("rule", "sizes", "says"),
    [
        ({}, (8, 8, 32768, "gpu"), None),
        ({}, (8, 8, 512, "gpu"), r"14 lanes of weights take as long as the products of 18200 rows .*a device's own 512"),
        ({}, (8, 8, 512, "cpu"), None),
        ({"pair": 1}, (2, 2, 1000, "tpu"), r"1 lanes .* at most 1000 rows can be taken off"),
        ({"pair": 1}, (2, 2, 2000, "tpu"), None),
        ({}, (1, 8, 32768, "cpu"), "a domain of one device has nobody to lend to"),
        ({"tau": 5000}, (4, 4, 1000, "cpu"), "tau=5000 is more than all 4000 rows of the 4 devices"),
    ],
)
def test_the_pay_rule(rule, sizes, says):
    reason = why_not(RebalanceConfig(**rule), *sizes)
    assert (reason is None) == (says is None)
    assert says is None or re.search(says, reason)


def test_every_wire_cost_has_its_evidence():
    assert all(cost.evidence for cost in WIRE_COSTS.values())
    assert set(WIRE_COSTS) == {"cpu", "gpu", "tpu"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"axis": ""}, "rebalance axis='': needs the name of a mesh axis, or a tuple of them"),
        ({"axis": ()}, r"rebalance axis=\(\): needs the name of a mesh axis"),
        ({"dyn": 0}, "rebalance dyn=0: needs a whole number of at least 1"),
        ({"pair": 1.5}, "rebalance pair=1.5: needs a whole number"),
        ({"max_slots": True}, "rebalance max_slots=True: needs a whole number"),
        ({"tau": 0}, "rebalance tau=0: needs a whole number"),
        ({"num_devices": -1}, "rebalance num_devices=-1: needs a whole number"),
        ({"pick": "hottest"}, r"rebalance pick='hottest': legal values are 'fixed', 'hot'"),
        ({"move": "half"}, "rebalance move='half': legal values are 'whole', 'divide'"),
    ],
)
def test_impossible_rules_are_refused(changes, says, unchecked):
    with pytest.raises(ValueError, match="^" + says):
        RebalanceConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, r"rebalance with capacity='cell', capacity_factor=1.25, .*exchange='all_to_all': moving an expert lowers neither"),
        ({"exchange": "ragged"}, r"rebalance with capacity='cell', capacity_factor=1.25, .*exchange='ragged'.*legal are"),
        ({"exchange": "all_gather", "capacity_factor": None}, r"rebalance with capacity='cell'.*exchange='all_gather'"),
        ({"exchange": "ragged", "capacity_factor": None, "receive_factor": 1.1}, r"rebalance with .*receive_factor=1.1"),
        ({"capacity": "pool", "num_chunks": 2}, r"num_chunks=2: with rebalance .*legal is 1"),
        ({"capacity": "pool", "overlap": True}, r"overlap=True: with rebalance .*legal is False"),
        ({"capacity": "pool", "expert_sizes": (32, 64)}, r"expert_sizes=\(32, 64\): with rebalance .*legal is None"),
        ({"capacity": "pool", "router": "expert_choice"}, "router='expert_choice': even loads leave nothing to lend"),
        ({"capacity": "pool", "rebalance": "feplb"}, "rebalance='feplb': needs a RebalanceConfig, or None"),
    ],
)
def test_layers_that_lending_does_not_fit_are_refused(changes, says, unchecked):
    with pytest.raises(ValueError, match="^" + says):
        MoEConfig(16, 32, 8, 2, **{"rebalance": RebalanceConfig(), **changes})


@pytest.mark.parametrize(
    ("mesh", "rule", "says"),
    [
        ("expert8", {"axis": "exprt"}, r"rebalance axis='exprt': legal are the last of the expert axes \('expert',\)"),
        ("data2_expert4", {"axis": "data"}, r"rebalance axis='data': legal are the last of the expert axes"),
        ("expert8", {"num_devices": 4}, r"rebalance num_devices=4: the mesh has 8 along \('expert',\)"),
        ("one", {"num_devices": 3}, "rebalance num_devices=3 does not divide num_destinations=8"),
    ],
)
def test_domains_that_a_mesh_has_not(mesh, rule, says):
    base = {"capacity": "pool", "num_destinations": {"data2_expert4": 4}.get(mesh, 8), "num_senders": 8}
    layer = grid.Layer(MoEConfig(8, 8, 8, 2, rebalance=RebalanceConfig(**rule), **base), (4, 12))
    with pytest.raises(ValueError, match="^" + says):
        grid.run(layer, grid.place(mesh), grid.draw(layer, 0, "random", "none"))


def test_where_it_cannot_gain_it_is_left_out_and_says_so(monkeypatch, caplog):
    """Few rows, and a wire that costs something: the layer is the plain one."""
    cfg = MoEConfig(8, 8, 8, 2, capacity="pool", rebalance=RebalanceConfig())
    plain = MoEConfig(8, 8, 8, 2, capacity="pool")
    monkeypatch.setattr("moejax.rebalance.WIRE_COSTS", {"cpu": WIRE_COSTS["gpu"]})
    shapes = {}
    with caplog.at_level(logging.INFO, "moejax.line"), jax.set_mesh(make_mesh(expert=8)):
        for name, config in {"lent": cfg, "plain": plain}.items():
            layer = grid.Layer(config, (8, 4))
            args = grid.Place(make_mesh(expert=8)).put(config, grid.draw(layer, 0, "random", "none"))
            shapes[name] = str(jax.make_jaxpr(functools.partial(grid.step, config, grid.AxisRules()))(*args))
    assert shapes["lent"] == shapes["plain"]
    assert "rebalance left out: 14 lanes of weights take as long" in caplog.text
