"""Meshes and axis rules: what resolves to what, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from moejax import AxisRules, MoEConfig, MoELayer, make_mesh, moe
from moejax.axes import ShardAxes, mesh_size

CFG = MoEConfig(8, 8, 8, 2)


def test_make_mesh_orders_axes_and_takes_the_first_devices():
    mesh = make_mesh(expert=2, data=3)
    assert mesh.axis_names == ("data", "expert")
    assert dict(mesh.shape) == {"data": 3, "expert": 2}
    assert set(mesh.devices.ravel()) == set(jax.devices()[:6])
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert set(make_mesh(tensor=2, axis_type=AxisType.Explicit).axis_types) == {AxisType.Explicit}
    assert dict(make_mesh().shape) == {"data": 1}
    assert make_mesh(devices=jax.devices()[5:7], data=2).devices.tolist() == jax.devices()[5:7]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"exprt": 2}, r"mesh axis 'exprt': legal axes are data, .*did you mean 'expert'\?"),
        ({"expert": 0}, r"mesh axis expert=0: needs a whole number of at least 1"),
        ({"data": 2.0}, r"mesh axis data=2.0: needs a whole number of at least 1"),
        ({"data": 4, "expert": 4}, r"mesh of data 4 x expert 4 = 16 devices: there are 8"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_impossible_meshes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes)


def _mesh(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def test_rules_pass_over_axes_that_are_missing_or_of_one_device():
    rules = AxisRules()
    assert rules.resolve(_mesh(data=1, expert=4)) == ShardAxes(tokens=("expert",), expert=("expert",))
    assert rules.resolve(_mesh()) == ShardAxes()
    found = rules.resolve(_mesh(fsdp=2, expert=2, tensor=2))
    assert found == ShardAxes(("fsdp", "expert"), ("expert",), ("fsdp",), ("tensor",))
    assert found.all == ("fsdp", "expert", "tensor")
    assert mesh_size(_mesh(fsdp=2, expert=3), ("fsdp", "expert")) == 6


def test_rules_fold_and_rename():
    rules = AxisRules(batch=("dp", "ep"), expert=("dp", "ep"), embed=None, mlp="tp")
    mesh = _mesh(dp=2, ep=2, tp=2)
    assert rules.resolve(mesh) == ShardAxes(("dp", "ep"), ("dp", "ep"), (), ("tp",))
    assert rules.spec(("expert", "embed", "mlp"), mesh) == P(("dp", "ep"), None, "tp")
    assert rules.spec((None, "batch"), mesh) == P(None, ("dp", "ep"))


REFUSED = [
    (AxisRules(), {"dp": 2, "expert": 4}, r"mesh axis 'dp' of 2 devices: no rule names it"),
    (AxisRules(), {"context": 2}, r"mesh axis 'context' of 2 devices: no rule names it"),
    (
        AxisRules(batch="data"),
        {"data": 2, "expert": 4},
        r"expert axis 'expert': tokens must be sharded over it too; .* legal would be \('data', 'expert'\)",
    ),
    (
        AxisRules(batch=("data", "expert")),
        {"fsdp": 2, "expert": 4},
        r"embed axis 'fsdp': tokens must be sharded over it too; .* legal would be \('expert', 'fsdp'\)",
    ),
    (
        AxisRules(batch=("expert", "tensor")),
        {"expert": 2, "tensor": 4},
        r"mlp axis 'tensor': tokens must not be sharded over it; .* legal would be \('expert',\)",
    ),
    (
        AxisRules(embed="expert"),
        {"data": 2, "expert": 4},
        r"embed axis 'expert': experts are sharded over it; legal are \('data',\)",
    ),
]


@pytest.mark.parametrize(("rules", "sizes", "message"), REFUSED, ids=lambda part: str(part)[:40])
def test_rules_that_would_compute_something_else_are_refused(rules, sizes, message):
    with pytest.raises(ValueError, match=message):
        rules.resolve(_mesh(**sizes))


INDIVISIBLE = [
    ({"num_experts": 6}, {"expert": 4}, r"num_experts=6 is .* mesh axis expert of 4 .* 4 or 8, .* 1, 2, 3, 6 devices"),
    ({"d_model": 9}, {"fsdp": 2}, r"d_model=9 is not divisible by mesh axis fsdp of 2 .* nearest d_model 8 or 10"),
    ({"d_ff": 3}, {"tensor": 4}, r"d_ff=3 is not divisible by mesh axis tensor of 4 devices: nearest d_ff 4,"),
    ({"num_senders": 6}, {"data": 2, "expert": 2}, r"num_senders=6 is not divisible by mesh axis data\+expert of 4"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "sizes", "message"), INDIVISIBLE, ids=lambda part: str(part)[:30])
@pytest.mark.usefixtures("unchecked")
def test_meshes_that_do_not_divide_the_layer_are_refused_in_its_constructor(change, sizes, message):
    cfg = MoEConfig(**{"d_model": 8, "d_ff": 8, "num_experts": 8, "top_k": 2, **change})
    with jax.set_mesh(make_mesh(**sizes)), pytest.raises(ValueError, match=message):
        MoELayer(cfg, rngs=None)  # refused before a key is drawn


def test_an_unnamed_mesh_axis_is_refused_in_the_constructor_and_may_be_replicated_by_name():
    mesh = jax.make_mesh((2, 2), ("expert", "pod"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"mesh axis 'pod' of 2 devices.*replicated"):
            MoELayer(CFG, rngs=nnx.Rngs(0))
        layer = MoELayer(CFG, rules=AxisRules(replicated="pod"), rngs=nnx.Rngs(0))
    assert layer.expert_up[...].sharding.spec == P("expert", None, None)


@pytest.mark.parametrize(
    ("x", "valid", "message"),
    [
        ((2, 3, 9), None, r"x of shape \(2, 3, 9\): needs \[batch, seq, d_model=8\]"),
        ((3, 8), None, r"x of shape \(3, 8\): needs \[batch, seq, d_model=8\]"),
        ((2, 3, 8), (3, 2), r"valid of dtype bool and shape \(3, 2\): needs bool \[batch, seq\] of x, \(2, 3\)"),
        ((2, 3, 8), (2,), r"valid of dtype bool and shape \(2,\): needs bool \[batch, seq\] of x, \(2, 3\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_inputs_of_another_shape_are_refused(x, valid, message):
    with pytest.raises(ValueError, match=message):
        moe({}, jnp.zeros(x), None if valid is None else jnp.zeros(valid, bool), None, cfg=CFG)


def test_specs_follow_the_parameters():
    with jax.set_mesh(make_mesh(fsdp=2, expert=2, tensor=2)):
        layer = MoELayer(MoEConfig(8, 8, 8, 2, num_shared_experts=1), rngs=nnx.Rngs(0))
    assert layer.router[...].sharding.is_fully_replicated
    assert layer.expert_up[...].sharding.spec == P("expert", "fsdp", "tensor")
    assert layer.expert_down[...].sharding.spec == P("expert", "tensor", "fsdp")
    assert layer.shared_gate[...].sharding.spec == P(None, "fsdp", "tensor")
    for shard in layer.expert_up[...].addressable_shards:
        assert np.prod(shard.data.shape) == 8 * 8 * 8 // 8
