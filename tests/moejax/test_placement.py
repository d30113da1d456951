"""Slots and replicas: the answer of the plain layer wherever experts are, sums over replicas, devices that go missing."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from moejax import AxisRules, ExpertPlacement, MoEConfig, MoELayer, RebalanceConfig, RoutingContext, linen, make_mesh, moe
from moejax.layer import param_shapes
from moejax.placement import choose_slots
from tests.moejax import grid

E, P, DEVICES = 8, 12, 4
PLAIN = MoEConfig(8, 8, E, 2, dtype="float32", capacity_factor=None, num_senders=8, aux_loss=0.5, z_loss=0.1)
CFG = dataclasses.replace(PLAIN, num_slots=P)
RULES = AxisRules()
BOTH = AxisRules(expert=("data", "expert"))
SLOW = pytest.mark.slow
WAYS = [
    ({"data": 2, "expert": 4}, RULES, {"capacity": "pool"}),
    ({"expert": 8}, RULES, {"exchange": "ragged", "num_slots": 16}),
    ({"data": 2, "expert": 4}, BOTH, {"capacity": "pool", "num_slots": 16, "rebalance": RebalanceConfig(dyn=2)}),
    pytest.param({"expert": 8}, RULES, {"exchange": "ragged", "num_slots": 16, "rebalance": RebalanceConfig()}, marks=SLOW),
    pytest.param({"data": 2, "expert": 4}, RULES, {"capacity": "pool", "rebalance": RebalanceConfig(move="whole")}, marks=SLOW),
    pytest.param({"data": 2, "expert": 4}, RULES, {}, marks=SLOW),
    pytest.param({"fsdp": 2, "expert": 2, "tensor": 2}, RULES, {}, marks=SLOW),
    pytest.param({"data": 2, "expert": 4}, BOTH, {"exchange": "hierarchical", "num_slots": 16}, marks=SLOW),
    pytest.param({"data": 2, "expert": 4}, RULES, {"exchange": "weight_stream"}, marks=SLOW),
    pytest.param({"data": 2, "expert": 4}, RULES, {"exchange": "all_gather"}, marks=SLOW),
    pytest.param({"data": 2, "expert": 4}, RULES, {"num_slots": E}, marks=SLOW),
]


@st.composite
def slots_drawn(draw, num_slots=P, dead=False):
    """What an ExpertPlacement is made of: every expert somewhere, the other slots empty or with any expert; dead slots."""
    more = draw(st.lists(st.integers(-1, E - 1), min_size=num_slots - E, max_size=num_slots - E))
    expert_of = draw(st.permutations([*range(E), *more]))
    gone = draw(st.frozensets(st.integers(0, num_slots - 1))) if dead else frozenset()
    return tuple(expert_of), gone


def in_slots(params, placement):
    """Parameters of the plain layer in the slots of a placement, what empty slots hold being noise."""
    index = np.array(placement.expert_of)
    put = lambda leaf: np.where((index >= 0).reshape(-1, 1, 1), leaf[index], np.float32(7))
    return {name: put(leaf) if name.startswith("expert_") else leaf for name, leaf in params.items()}


@functools.cache
def step(cfg, rules=RULES):
    def run(params, x, valid, dy, table):
        def loss(params, x):
            y, stats = moe(params, x, valid, None, cfg=cfg, rules=rules, context=RoutingContext(placement=table))
            return (y, stats.loss(cfg)), (y, stats)

        _, pull, (y, stats) = jax.vjp(loss, params, x, has_aux=True)
        return y, stats, *pull((dy, jnp.ones(())))

    return jax.jit(run)


@pytest.mark.parametrize(("axes", "rules", "changes"), WAYS, ids=str)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=5)
def test_placed_experts_give_the_plain_layers_answer(axes, rules, changes, data):
    """Outputs, losses, counts and all gradients; those of an expert's slots are the expert's, each."""
    cfg = dataclasses.replace(CFG, **changes)
    placement = ExpertPlacement(E, *data.draw(slots_drawn(cfg.num_slots)))
    inputs = grid.draw(
        grid.Layer(PLAIN, (4, 12)), data.draw(st.integers(0, 9)), data.draw(st.sampled_from(grid.SKEWS[:4])), "random"
    )
    dirty = inputs.garbage()
    want = step(PLAIN)(inputs.params, inputs.x, inputs.valid, inputs.dy, None)
    with jax.set_mesh(make_mesh(**axes)):
        got = step(cfg, rules)(in_slots(inputs.params, placement), dirty.x, dirty.valid, dirty.dy, placement.table())
    y, stats, d_params, d_x = jax.tree.map(np.asarray, got)
    index = np.array(placement.expert_of)
    for name, leaf in in_slots(jax.tree.map(np.asarray, want[2]), placement).items():
        mine = d_params[name][index >= 0] if name.startswith("expert_") else d_params[name]
        grid.assert_close(mine, leaf[index >= 0] if name.startswith("expert_") else leaf)
    assert (stats.rebalance is None) == (cfg.rebalance is None)
    stats = dataclasses.replace(stats, token_straggler=np.asarray(want[1].token_straggler), rebalance=None)
    grid.assert_close((y, stats, d_x), (want[0], want[1], want[3]))
    assert not stats.num_missing


@hypothesis.given(made=slots_drawn(dead=True), seed=st.integers(0, 9))
def test_replicas_take_turns(made, seed):
    """Live slots of the expert only; of one sender's pairs they get equally many, up to one."""
    placement = ExpertPlacement(E, *made)
    rng = np.random.default_rng(seed)
    expert = np.argsort(rng.random((24, E)) + (rng.random(E) < 0.3), 1)[:, :2].astype(np.int32)
    counted = rng.random((24, 2)) < 0.8
    slot, served = choose_slots(jnp.asarray(expert), jnp.asarray(counted), placement.table(), (3, 5))
    for e in range(E):
        live = placement.slots_of(e)
        assert (np.asarray(served)[expert == e] == bool(live)).all()
        for sender in range(3) if live else ():
            part = slice(8 * sender, 8 * sender + 8)
            mine = np.asarray(slot)[part][(expert[part] == e) & counted[part]]
            loads = np.bincount(mine, minlength=P)[list(live)]
            assert loads.sum() == len(mine)
            assert loads.max() - loads.min() <= 1


@hypothesis.given(made=slots_drawn(dead=True))
def test_a_table_says_what_its_placement_says(made):
    placement = ExpertPlacement(E, *made)
    table = jax.tree.map(np.asarray, placement.table())
    for e in range(E):
        live = placement.slots_of(e)
        assert tuple(table.slots[e, : table.count[e]]) == live
        assert (table.slots[e, table.count[e] :] == P).all()
        assert [table.primary[slot] for slot in live] == [slot == live[0] for slot in live]
        numbers = {int(table.shared[slot]) for slot in live}
        assert len(numbers) == (len(live) > 0)
        assert (numbers <= {P - E}) == (len(live) < 2)
    several = [table.shared[placement.slots_of(e)[0]] for e in range(E) if len(placement.slots_of(e)) > 1]
    assert len(set(several)) == len(several)
    assert ExpertPlacement.of_table(placement.table(), placement) == placement


def test_a_device_that_goes_missing_compiles_nothing_and_its_experts_are_served_elsewhere():
    """Without device 0: experts with a replica lose nothing; the others' pairs are missing, as if they were masked to zero."""
    placement = ExpertPlacement(E, (0, 1, 2, 3, 4, 5, 6, 7, 0, 3, 1, 4))
    inputs = grid.draw(grid.Layer(PLAIN, (4, 12)), 1, "random", "random")
    params = in_slots(inputs.params, placement)
    mesh = make_mesh(data=2, expert=4)
    run = functools.partial(answer, CFG, x=inputs.x, valid=inputs.valid)
    with jax.set_mesh(mesh):
        whole, _ = run(params, table=placement.table())
        compilations = compiled(CFG)._cache_size()
        for device, missing in ((0, (2,)), (1, (5,)), (3, ()), (2, (6, 7))):
            now = placement.without_devices([device], DEVICES)
            assert now.missing == missing
            dead = np.isin(np.arange(P), list(now.dead)).reshape(-1, 1, 1)
            lost = {k: np.where(dead, np.float32(7), v) if k.startswith("expert_") else v for k, v in params.items()}
            got, stats = run(lost, table=now.table())
            zeroed = {**inputs.params, "expert_down": inputs.params["expert_down"].copy()}
            zeroed["expert_down"][list(missing)] = 0
            want, plain = answer(PLAIN, zeroed, inputs.x, inputs.valid, None)
            grid.assert_close(got, want)
            assert stats.num_missing == plain.tokens_per_expert[np.array(missing, int)].sum()
            assert stats.num_dropped == stats.num_missing
            np.testing.assert_array_equal(stats.tokens_per_expert, plain.tokens_per_expert)
        back, _ = run(params, table=placement.table())
    np.testing.assert_array_equal(back, whole)
    assert compiled(CFG)._cache_size() == compilations == 1


@functools.cache
def compiled(cfg):
    def run(params, x, valid, table, mask):
        return moe(params, x, valid, None, cfg=cfg, context=RoutingContext(placement=table, expert_mask=mask))

    return jax.jit(run)


def answer(cfg, params, x, valid, table, mask=None):
    return compiled(cfg)(params, x, valid, table, mask)


def test_pairs_of_missing_experts_are_dropped_whether_or_not_experts_are_lent():
    cfg = dataclasses.replace(CFG, exchange="ragged", rebalance=RebalanceConfig())
    placement = ExpertPlacement.even(E, P).without_devices([1], DEVICES)
    inputs = grid.draw(grid.Layer(PLAIN, (4, 12)), 2, "random", "none")
    with jax.set_mesh(make_mesh(data=2, expert=4)):
        _, stats = answer(cfg, in_slots(inputs.params, placement), inputs.x, inputs.valid, placement.table())
    assert stats.num_dropped == stats.rebalance.num_dropped_before == stats.num_missing > 0


def test_tokens_can_be_kept_from_missing_experts():
    """With the survivors as expert_mask nothing is missing: the answer is the plain layer's under that mask."""
    placement = ExpertPlacement.even(E, P).without_devices([1], DEVICES)
    assert placement.missing == (4, 5)
    inputs = grid.draw(grid.Layer(PLAIN, (4, 12)), 2, "random", "none")
    mask = jnp.asarray([e not in placement.missing for e in range(E)])
    got, stats = answer(CFG, in_slots(inputs.params, placement), inputs.x, inputs.valid, placement.table(), mask)
    want, _ = answer(PLAIN, inputs.params, inputs.x, inputs.valid, None, mask)
    grid.assert_close(got, want)
    assert stats.num_missing == 0


def test_replicas_lower_drops_and_the_straggler():
    """An expert that takes a quarter of all tokens, with four slots on four devices."""
    cfg = dataclasses.replace(CFG, capacity_factor=1.0)
    inputs = grid.draw(grid.Layer(PLAIN, (4, 48)), 0, "one_expert", "none")
    hot = int(np.argmax(answer(PLAIN, inputs.params, inputs.x, inputs.valid, None)[1].tokens_per_expert))
    others = [e for e in range(E) if e != hot]
    spread = ExpertPlacement(E, (hot, *others[:2], hot, *others[2:4], hot, *others[4:6], hot, others[6], -1))
    with jax.set_mesh(make_mesh(data=2, expert=4)):
        alone, better = (
            answer(cfg, in_slots(inputs.params, p), inputs.x, inputs.valid, p.table())[1]
            for p in (ExpertPlacement(E, (*range(E), *[-1] * 4)), spread)
        )
    assert better.num_dropped < alone.num_dropped
    assert better.token_straggler < alone.token_straggler


def test_layers_begin_with_replicas_alike_and_keep_their_table():
    layer = MoELayer(CFG, rngs=nnx.Rngs(0))
    assert layer.expert_up[...].shape == (P, 8, 8)
    np.testing.assert_array_equal(layer.expert_up[...][E:], layer.expert_up[...][: P - E])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 8)), jnp.float32)
    call = nnx.jit(lambda layer: layer(x))
    y, _ = call(layer)
    module = linen.MoELayer(CFG)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    assert variables["router_state"]["placement"].slots.shape == (E, P - E + 1)
    params = {name: getattr(layer, name)[...] for name in param_shapes(CFG)}
    again, _ = jax.jit(module.apply)({**variables, "params": params}, x)
    np.testing.assert_array_equal(again, y)
    layer.placement.set_value(ExpertPlacement.even(E, P).swap(0, 3).table())
    moved, _ = call(layer)
    assert np.abs(moved - y).max() > 1e-3, "the table is read"


BAD = [
    (lambda: ExpertPlacement(2, (0, 2)), r"expert_of holds 2: needs experts 0 to 1, or -1 for none"),
    (lambda: ExpertPlacement(2, (0, 0, -1)), r"expert_of=\(0, 0, -1\): expert 1 has no slot; every expert needs one"),
    (lambda: ExpertPlacement(2, (0, 1), frozenset({2})), r"dead slot 2: needs slots 0 to 1"),
    (lambda: ExpertPlacement.even(2, 4).without_devices([2], 2), r"device 2: needs 0 to 1"),
    (lambda: ExpertPlacement.even(2, 3).device_loads([1, 1], 2), r"num_slots=3 is not divisible by 2 expert shards"),
    (lambda: dataclasses.replace(CFG, num_slots=4), r"num_slots=4: needs num_experts=8 at least, or None"),
    (lambda: run_with(CFG, None), r"context.placement=None: num_slots=12; needs a table with slots, and only then"),
    (lambda: run_with(PLAIN, ExpertPlacement.even(E, P).table()), r"context.placement=a table: num_slots=None; needs"),
    (lambda: run_with(CFG, ExpertPlacement.even(E, E).table()), r"context.placement of shape \(8, 1\): num_slots=12 needs"),
]


def run_with(cfg, table):
    params = {name: jnp.zeros(shape) for name, (shape, _) in param_shapes(cfg).items()}
    return moe(params, jnp.zeros((1, 2, 8)), None, None, cfg=cfg, context=RoutingContext(placement=table))


@pytest.mark.parametrize(("make", "message"), BAD, ids=range(len(BAD)))
@pytest.mark.usefixtures("unchecked")
def test_impossible_placements_are_refused(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


def test_a_mesh_must_divide_the_slots():
    with jax.set_mesh(make_mesh(expert=8)), pytest.raises(ValueError, match="num_slots=12 is not divisible"):
        MoELayer(CFG, rngs=nnx.Rngs(0))
