"""Experts of several widths: one answer on every mesh and way across, equal shares of every device, two-level routing."""

import dataclasses

import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from moejax import AxisRules, MoEConfig, MoELayer, linen, make_mesh
from moejax.layer import param_shapes
from moejax.losses import group_loss
from moejax.routers import TwoLevel
from moejax.unlike_experts import slot_of_expert
from tests.moejax import grid, oracle, rules

E, SIZES = 8, (4, 16)
CFG = MoEConfig(
    d_model=8, d_ff=8, num_experts=E, top_k=2, router=TwoLevel(2), expert_sizes=SIZES, num_senders=8, dtype="float32",
    capacity_factor=None, aux_loss=0.5, extra_losses=(("group", 0.5),), num_shared_experts=1,
)  # fmt: skip
BOTH = AxisRules(expert=("data", "expert"))
SLOW = pytest.mark.slow
WAYS = [
    pytest.param("data2_expert4", AxisRules(), {}, marks=SLOW),
    ("fsdp2_expert2_tensor2", AxisRules(), {"capacity_factor": 0.5, "drop_by": "weight", "exchange_by": "expert"}),
    pytest.param("data2_expert4", AxisRules(), {"exchange": "ragged"}, marks=SLOW),
    ("fsdp2_expert2_tensor2", AxisRules(), {"capacity": "pool", "num_destinations": 2, "num_senders": 4}),
    pytest.param("data2_expert4", AxisRules(), {"exchange": "weight_stream"}, marks=SLOW),
    pytest.param("data2_expert4", AxisRules(), {"exchange": "all_gather"}, marks=SLOW),
    pytest.param("data2_expert4", AxisRules(), {"exchange": "weight_stream", "capacity_factor": 1.0}, marks=SLOW),
    pytest.param("data2_expert4", AxisRules(), {"capacity": "pool", "num_destinations": 4, "num_chunks": 2}, marks=SLOW),
    pytest.param("fsdp2_expert2_tensor2", AxisRules(), {"overlap": True, "capacity_factor": 1.0}, marks=SLOW),
]
logits_drawn = hnp.arrays(
    np.float32, (6, E), elements=st.sampled_from([-1e4, -80.0, -2.0, -0.5, 0.0, 0.0, 0.5, 2.0, 80.0, 1e4])
)


@pytest.mark.parametrize(("mesh", "axis_rules", "changes"), WAYS)
def test_every_way_across_gives_the_reference_answer(mesh, axis_rules, changes):
    cfg = dataclasses.replace(CFG, **changes)
    layer, where = grid.Layer(cfg, (4, 12)), dataclasses.replace(grid.place(mesh), rules=axis_rules)
    for seed, skew in enumerate(("random", "one_expert", "empty_experts")):
        inputs = grid.draw(layer, seed, skew, grid.PADDINGS[seed % 3])
        got, want = grid.run(layer, where, inputs.garbage()), grid.reference(layer, inputs)
        got["stats"] = dataclasses.replace(got["stats"], token_straggler=want["stats"].token_straggler)
        grid.assert_close(got, want)


@pytest.mark.parametrize("mesh", [pytest.param("data2_expert4", marks=SLOW), "fsdp2_expert2_tensor2"])
def test_in_bfloat16_tokens_go_where_they_did_and_the_rest_is_rounded(mesh):
    """Products and parameters in bfloat16: the same choices, since logits stay float32; all else within a few roundings."""
    inputs = grid.draw(grid.Layer(CFG, (4, 12)), 0, "random", "random")
    params = {name: value.astype(jnp.bfloat16) for name, value in inputs.params.items()}
    jax.tree.map(np.testing.assert_array_equal, params, inputs.params)  # multiples of 1/64: nothing is lost here
    narrow = dataclasses.replace(inputs.garbage(), params=params)
    got = grid.run(grid.Layer(dataclasses.replace(CFG, dtype="bfloat16"), (4, 12)), grid.place(mesh), narrow)
    want = grid.reference(grid.Layer(CFG, (4, 12)), inputs)
    assert {str(part.dtype) for part in jax.tree.leaves(got["d_params"])} == {"bfloat16"}
    got["stats"] = dataclasses.replace(got["stats"], token_straggler=want["stats"].token_straggler)
    grid.assert_close(got, want, 2.0**-5)
    assert not np.array_equal(got["y"], want["y"]), "nothing was rounded"


def test_the_reference_is_a_loop_over_tokens():
    layer = grid.Layer(CFG, (2, 12))
    inputs = grid.draw(layer, 0, "random", "random")
    got = grid.reference(layer, inputs)
    x, valid = inputs.x.reshape(-1, 8).astype(np.float64), inputs.valid.reshape(-1)
    want = np.zeros_like(x)
    for i in np.flatnonzero(valid):
        logits = x[i] @ inputs.params["router"]
        expert, weight = rules.two_level(logits, np.logaddexp.reduce(logits.reshape(2, 4), axis=1), 2, 1)
        for e, w in zip(expert, weight, strict=True):
            group, member = divmod(e, 4)
            want[i] += w * oracle.feed_forward(x[i], inputs.params, f"expert_{group}", member, CFG)
        want[i] += oracle.feed_forward(x[i], inputs.params, "shared", 0, CFG)
    np.testing.assert_allclose(np.asarray(got["y"]).reshape(-1, 8), want, rtol=1e-4, atol=1e-4)
    assert got["stats"].extra["group"] > 0


def test_every_device_holds_each_size_alike():
    shapes = {name: shape for name, (shape, _) in param_shapes(CFG).items()}
    assert (shapes["expert_0_up"], shapes["expert_1_down"]) == ((4, 8, 4), (4, 16, 8))
    with jax.set_mesh(make_mesh(expert=4)):
        layer = MoELayer(CFG, rngs=nnx.Rngs(0))
        y, stats = nnx.jit(lambda layer: layer(jnp.ones((4, 2, 8))))(layer)
    for name in ("expert_0_up", "expert_1_up"):
        assert {part.data.shape[0] for part in getattr(layer, name)[...].addressable_shards} == {1}
    module = linen.MoELayer(CFG)
    variables = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((4, 2, 8)))
    assert {name: leaf.value.shape for name, leaf in variables["params"].items()} == shapes
    assert stats.tokens_per_expert.sum() == 16
    assert y.shape == (4, 2, 8)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_places_are_by_shard_then_group(shards):
    place = slot_of_expert(np.arange(E), E, 2, shards)
    assert sorted(place) == list(range(E))
    by_place = np.argsort(place)
    for shard in by_place.reshape(shards, -1):
        groups, members = np.divmod(shard, E // 2)
        assert sorted(groups) == list(groups)
        assert np.bincount(groups).tolist() == [4 // shards] * 2
        assert (members // (4 // shards) == members[0] // (4 // shards)).all()


@pytest.mark.parametrize("router", [TwoLevel(2), TwoLevel(4, 2, renormalise=False, scale=2.5)], ids=repr)
@hypothesis.given(logits=logits_drawn)
def test_two_level_takes_groups_then_experts(router, logits):
    got = router(jnp.asarray(logits), 2)
    group_logits = np.asarray(jax.nn.logsumexp(logits.reshape(6, router.num_groups, -1), axis=-1))
    for i, row in enumerate(logits):
        expert, weight = rules.two_level(row, group_logits[i], 2, router.top_groups, router.renormalise)
        np.testing.assert_array_equal(got.expert[i], expert)
        np.testing.assert_allclose(got.weight[i], weight * router.scale, rtol=2e-6, atol=1e-30)


def test_the_group_loss_draws_tokens_to_small_experts():
    """Descent on it alone moves the load from the wide experts to the narrow ones."""
    logits, valid = jnp.asarray(np.random.default_rng(0).normal(size=(64, E)), jnp.float32), jnp.ones(64, bool)
    loss = jax.jit(lambda logits: group_loss(TwoLevel(2)(logits, 2), valid, SIZES))
    wide = lambda logits: int((TwoLevel(2)(logits, 2).expert >= 4).sum())
    after, slope = logits, jax.jit(jax.grad(loss))
    for _ in range(30):
        after -= 30 * slope(after)
    assert loss(after) < loss(logits)
    assert wide(after) < wide(logits) / 2


BAD = [
    ({"expert_sizes": (4, 8, 16)}, r"expert_sizes of 3 groups do not divide num_experts=8: legal are 1, 2, 4, 8"),
    ({"expert_sizes": [4, 8]}, r"expert_sizes=\[4, 8\]: needs a tuple of hidden widths"),
    ({"expert_sizes": (4, 0)}, r"expert_sizes=0: needs a whole number of at least 1"),
    ({"router": TwoLevel(4)}, r"expert_sizes=\(4, 16\): the router has num_groups=4; needs as many as sizes"),
    ({"receive_factor": 1.5, "num_destinations": 2}, r"receive_factor=1.5: with expert_sizes only None is legal"),
    ({"num_slots": 8}, r"num_slots=8: slots are alike; with expert_sizes only None is legal"),
    ({"expert_sizes": None}, r"extra_losses: 'group' with expert_sizes=None"),
    (lambda: TwoLevel(2, 3), r"top_groups=3: needs 1 to num_groups=2"),
    ({"router": TwoLevel(3), "expert_sizes": None, "extra_losses": ()}, r"num_groups=3 does not divide num_experts=8"),
    ({"router": TwoLevel(2), "top_k": 6}, r"top_k=6: needs a multiple of top_groups=1, 4 experts a group at most"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=lambda part: None if callable(part) else str(part)[:40])
@pytest.mark.usefixtures("unchecked")
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        changes() if callable(changes) else dataclasses.replace(CFG, **changes)


def test_a_mesh_must_divide_each_size():
    with jax.set_mesh(make_mesh(expert=8)), pytest.raises(ValueError, match="experts of each size=4 is not divisible"):
        MoELayer(CFG, rngs=nnx.Rngs(0))
