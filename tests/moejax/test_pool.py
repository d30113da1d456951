"""Pools: the drop rule against a NumPy statement of it, the plans' permutations, and the layer on every expert mesh.

S: senders, t: tokens of one, k: experts per token, n: destinations, e: experts of a destination.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.pool import PoolRule, level_caps, level_loads, make_pool_plan, measured_level_loads
from moejax.pool_cut import PoolCut, make_row_plans, order_plan
from moejax.router import Routing
from tests.moejax import grid

S, T, E, N, K = 4, 16, 8, 4, 3


def stated(expert, weight, valid, rule):
    """Loops over senders, destinations and tokens: which pairs are sent, and which of them are worked on."""
    own, place = E // N, {}
    for sender, dest in np.ndindex(len(expert), N):
        going = [[j for j in range(K) if expert[sender, i, j] // own == dest and valid[sender, i]] for i in range(T)]
        heaviest = [max((weight[sender, i, j] for j in going[i]), default=0) for i in range(T)]
        key = [(-len(going[i]), i if rule.drop_by == "position" else -heaviest[i]) for i in range(T)]
        for rank, i in enumerate(sorted((i for i in range(T) if going[i]), key=key.__getitem__)):
            for level, j in enumerate(sorted(going[i], key=lambda j: (-weight[sender, i, j], j))):
                if rank < rule.caps[level]:
                    place[sender, i, j] = (level, rank, sender)
    sent, worked = np.zeros(expert.shape, bool), np.zeros(expert.shape, bool)
    for dest in range(N):
        pairs = sorted((pair for pair in place if expert[pair] // own == dest), key=place.get)
        for count, pair in enumerate(pairs):
            sent[pair] = True
            worked[pair] = rule.max_rows is None or count < rule.max_rows
    return sent, worked


def draw(seed, skew):
    rng = np.random.default_rng(seed)
    scores = rng.random((S, T, E)) ** (1 + skew * np.arange(E))
    expert = np.argsort(-scores, -1)[..., :K].astype(np.int32)
    weight = np.take_along_axis(scores, expert, -1).astype(np.float32)
    order = rng.permuted(np.broadcast_to(np.arange(K), expert.shape), axis=-1)  # choices need not be sorted by weight
    expert, weight = (np.take_along_axis(part, order, -1) for part in (expert, weight))
    return expert, weight, rng.random((S, T)) < 0.8


@jax.jit(static_argnums=(3, 4))
def plans(expert, weight, valid, rule, num_parts=1):
    """The senders' plans, and each part's row plans, with leading axes of senders and destinations."""
    zeros, cut = jnp.zeros((S, T, E)), PoolCut(rule.caps, num_parts)
    one = lambda *sender: order_plan(make_pool_plan(Routing(*sender[:4]), sender[4], rule), cut)
    pools = jax.vmap(one)(expert, weight, zeros, zeros, valid)
    arrived = pools.local_expert.swapaxes(0, 1)  # [n, S, L]
    rows = jax.vmap(lambda mine: make_row_plans(mine, cut, num_experts=E // N, max_rows=rule.max_rows))(arrived)
    return pools, rows


RULES = {
    "roomy": PoolRule((T, T), None, N),
    "tight": PoolRule((8, 4), 20, N),
    "by_weight": PoolRule((6, 2), 24, N, "weight"),
}


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_drops_are_those_of_the_statement(name, num_parts):
    """However many parts the pools are cut into."""
    rule, lost = RULES[name], 0
    for seed in range(12):
        expert, weight, valid = draw(seed, seed % 3)
        pools, rows = jax.tree.map(np.asarray, plans(*map(jnp.asarray, (expert, weight, valid)), rule, num_parts))
        sent, worked = stated(expert, weight, valid, rule)
        np.testing.assert_array_equal(pools.cell < pools.pair.shape[1], sent)
        np.testing.assert_array_equal(pools.weight, np.where(sent, weight, 0))
        count = lambda chosen, expert=expert: np.bincount(expert[chosen], minlength=E)
        np.testing.assert_array_equal(pools.kept.sum(0), count(sent))
        np.testing.assert_array_equal(pools.routed.sum(0), count(np.broadcast_to(valid[..., None], sent.shape)))
        np.testing.assert_array_equal(sum(part.group_sizes for part in rows).reshape(-1), count(worked))
        lost += valid.sum() * K - worked.sum()
    assert (lost > 0) == (name != "roomy")


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_plans_are_permutations_both_ways(name, num_parts):
    """What each row reads is what says that it was read there, and a token visits a destination once."""
    rule = RULES[name]
    depth, width = rule.caps[0], sum(rule.caps)
    for seed in range(6):
        expert, weight, valid = draw(seed, seed % 3)
        pools, rows = jax.tree.map(np.asarray, plans(*map(jnp.asarray, (expert, weight, valid)), rule, num_parts))
        for sender in range(S):
            token, slot = pools.token[sender], pools.slot[sender]
            full = np.flatnonzero(token < T)
            visits = [(t, s) for t in range(T) for s in slot[t] if s < N * depth]
            assert sorted(visits) == sorted((token[row], row) for row in full)
            pair, cell = pools.pair[sender], pools.cell[sender].reshape(-1)
            assert {c: p for p, c in enumerate(cell) if c < N * width} == {c: p for c, p in enumerate(pair) if p < T * K}
        first = np.zeros(2, int)  # where the part begins among a pool's rows and pairs
        for caps, part in zip(PoolCut(rule.caps, num_parts).parts, rows, strict=True):
            for dest in range(N):
                check_rows(dest, part, pools, caps, first)
            first += caps[0], sum(caps)
        assert tuple(first) == (depth, width)


def check_rows(dest, plan, pools, caps, first):
    """One destination's plan of one part: its rows' pairs are the senders', and read the row that carries their token."""
    depth, width = caps[0], sum(caps)
    where = np.concatenate([level[dest] for level in plan.rows], 1)
    held = plan.cell[dest] < S * width
    assert held.sum() == plan.group_sizes[dest].sum()
    for row in np.flatnonzero(held):
        sender, position = divmod(plan.cell[dest][row], width)
        assert where[sender, position] == row
        assert plan.source[dest][row] // depth == sender
        place = N * first[0] + dest * depth + plan.source[dest][row] % depth
        pair = pools.pair[sender].reshape(N, -1)[dest, first[1] + position]
        assert pools.token[sender][place] == pair // K
        expert = pools.local_expert[sender, dest, first[1] + position]
        assert expert == np.searchsorted(np.cumsum(plan.group_sizes[dest]), row, side="right")


def test_uniform_loads_are_those_of_a_draw():
    rng = np.random.default_rng(0)
    expert = jnp.asarray(np.argsort(rng.random((20000, 16)), -1)[:, :4], jnp.int32)
    np.testing.assert_allclose(measured_level_loads(expert, 16, 4), level_loads(16, 4, 4), rtol=0.1, atol=2e-3)


def test_caps_do_not_increase_and_hold_what_is_expected():
    caps = level_caps(1000, level_loads(64, 8, 8), 1.25)
    assert list(caps) == sorted(caps, reverse=True)
    assert all(cap >= min(1000, 1.25 * 1000 * load) for cap, load in zip(caps, level_loads(64, 8, 8), strict=True))
    assert level_caps(1000, level_loads(64, 8, 8), None) == (1000,) * 8
    assert sum(caps) < 1.7 * 1000  # against 8 * 1000 pairs: levels are what keeps the static work small


def _num_senders(mesh):
    return math.prod(grid.MESHES[mesh].get(axis, 1) for axis in ("data", "fsdp", "expert"))


def _pool_layer(name, mesh, **changes):
    layer, destinations = grid.LAYERS[name], grid.MESHES[mesh].get("expert", 2)
    new = {"capacity": "pool", "num_senders": _num_senders(mesh), "num_destinations": destinations, **changes}
    return dataclasses.replace(layer, cfg=dataclasses.replace(layer.cfg, **new))


def _least_chunks(name, mesh):
    """The least number above one that divides the tokens of a shard."""
    tokens = -(-math.prod(grid.LAYERS[name].shape) // _num_senders(mesh))
    return min(n for n in range(2, tokens + 1) if tokens % n == 0)


CASES = [
    ("odd", "expert8", {}),
    ("shared", "data2_expert4", {"num_chunks": 3}),
    ("many_senders", "data2_expert4", {}),
    ("every_expert", "fsdp2_expert2_tensor2", {"capacity_factor": 0.4, "num_chunks": 2}),
    # Without expert axes a shard has both destinations, and the pools of two senders cross inside it.
    ("odd", "data2_fsdp2_tensor2", {"num_senders": 8}),
]
SLOW = [
    ("shared", "data8", {"num_senders": 16}),
    ("every_expert", "data2_fsdp2_tensor2", {"num_senders": 16, "capacity_factor": 0.4}),
    *(
        (name, mesh, {"capacity_factor": factor, "num_chunks": chunks})
        for name in grid.LAYERS
        for mesh in grid.MESHES
        if "expert" in grid.MESHES[mesh]
        for factor in (0.5, 1.0, None)
        for chunks in (1, _least_chunks(name, mesh))
    ),
]


@pytest.mark.parametrize(("name", "mesh", "changes"), [*CASES, *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)])
def test_pooled_layers_equal_one_device(name, mesh, changes):
    """Outputs, all gradients and all counts, on a mesh, in chunks, and on one device that has as many destinations."""
    layer, where, dropped = _pool_layer(name, mesh, **changes), grid.place(mesh), 0
    for seed, skew in enumerate(grid.SKEWS):
        inputs = grid.draw(layer, seed, skew, grid.PADDINGS[seed % len(grid.PADDINGS)])
        got, want = grid.run(layer, where, inputs.garbage()), grid.run(layer, grid.Place(), inputs)
        grid.assert_replicas_equal(got)
        stats = dataclasses.replace(got["stats"], token_straggler=want["stats"].token_straggler)
        grid.assert_close({**got, "stats": stats}, want)
        assert not np.asarray(got["y"])[~inputs.valid].any()
        dropped += int(got["stats"].num_dropped)
        assert 0 <= int(got["stats"].num_dropped_at_receiver) <= int(got["stats"].num_dropped)
    # Where every token goes to every expert the load is even, and a pool of the even load has room for it.
    factor, even = layer.cfg.capacity_factor, layer.cfg.top_k == layer.cfg.num_experts
    assert (dropped > 0) == (factor is not None and (factor < 1 or not even))


def test_roomy_pools_equal_roomy_cells():
    """With nothing dropped the capacity rule is no part of the answer."""
    layer = _pool_layer("shared", "expert8")
    cells = dataclasses.replace(layer, cfg=dataclasses.replace(layer.cfg, capacity="cell", num_destinations=None))
    inputs = grid.draw(layer, 0, "random", "random")
    grid.assert_close(grid.run(layer, grid.Place(), inputs), grid.reference(cells, inputs))


@pytest.mark.parametrize(
    ("mesh", "changes", "says"),
    [
        ("expert8", {"num_destinations": 4}, "num_destinations=4: the mesh has 8 expert shards"),
        ("expert8", {"num_senders": 16}, "num_senders=16: pools need one sender per token shard, 8"),
        ("data8", {"num_destinations": 4}, "num_senders=8 over 8 token shards: each needs a multiple of 4"),
        ("one", {"num_destinations": 3, "num_senders": 3}, "num_destinations=3 does not divide num_experts=8"),
    ],
)
def test_pools_that_a_mesh_cannot_serve_are_refused(mesh, changes, says):
    layer = grid.LAYERS["shared"]
    cfg = dataclasses.replace(layer.cfg, capacity="pool", **changes)
    with pytest.raises(ValueError, match="^" + says):
        grid.run(dataclasses.replace(layer, cfg=cfg), grid.place(mesh), grid.draw(layer, 0, "random", "none"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"exchange": "all_gather"}, "exchange of pools='all_gather': legal values are 'all_to_all', 'auto'"),
        ({"capacity": "cell", "num_destinations": 2}, "num_destinations=2: needs capacity='pool'"),
        ({"level_loads": (0.2, 0.5)}, r"level_loads=\(0.2, 0.5\): needs a tuple of shares above 0 and at most 1"),
    ],
)
def test_impossible_pools_are_refused(changes, says):
    with pytest.raises(ValueError, match="^" + says):
        dataclasses.replace(grid.LAYERS["shared"].cfg, **{"capacity": "pool", **changes})
