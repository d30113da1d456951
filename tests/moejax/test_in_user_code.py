"""The layer in somebody else's program: their mesh and axis names, their axis types, their shard_map, their model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax import AxisRules, MoEConfig, MoELayer, RouterState, SigmoidBias, Softmax, make_mesh, moe, update_router
from moejax.layer import param_shapes
from tests.moejax import grid, oracle

RULES = AxisRules(batch=("dp", "ep"), expert="ep", embed="dp", mlp="tp", heads="tp", vocab="tp", replicated=None)


def _mesh(axis_type=AxisType.Auto, names=("dp", "ep", "tp")):
    return jax.make_mesh((2, 2, 2), names, axis_types=(axis_type,) * 3)


def _layer(shape, **change):
    cfg = dataclasses.replace(grid.LAYERS["odd"].cfg, num_experts=8, loss_scope="sequence", **change)
    return grid.Layer(cfg, shape)


def _check(got, want):
    grid.assert_replicas_equal(got)
    same = lambda out: {**out, "stats": dataclasses.replace(out["stats"], token_straggler=0.0)}
    grid.assert_close(same(got), same(want))


def _draws(layer):
    return [grid.draw(layer, seed, skew, "random") for seed, skew in enumerate(("random", "one_expert", "ties"))]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("shape", [(8, 5), (3, 5)], ids=["divided", "by_nothing"])
def test_their_own_axis_names_under_either_axis_type(axis_type, shape):
    layer, where = _layer(shape, num_shared_experts=1), grid.Place(_mesh(axis_type), RULES)
    for inputs in _draws(layer):
        _check(grid.run(layer, where, inputs.garbage()), grid.reference(layer, inputs))


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("expert", [("dp", "ep"), ("ep", "dp")], ids="-".join)
def test_experts_folded_over_two_axes(expert, exchange):
    rules = dataclasses.replace(RULES, expert=expert, embed=None)
    layer = _layer((4, 6), exchange=exchange)
    for inputs in _draws(layer):
        _check(grid.run(layer, grid.Place(_mesh(), rules), inputs.garbage()), grid.reference(layer, inputs))


def test_repeating_the_work_on_an_axis_changes_nothing():
    rules = dataclasses.replace(RULES, mlp=None, heads=None, vocab=None, replicated="tp")
    layer = _layer((4, 6))
    for inputs in _draws(layer):
        _check(grid.run(layer, grid.Place(_mesh(), rules), inputs.garbage()), grid.reference(layer, inputs))


def _only(spec, names):
    """The part of a spec that speaks of these axes."""
    keep = lambda entry: tuple(name for name in (entry if isinstance(entry, tuple) else (entry,)) if name in names)
    return P(*(keep(entry) or None for entry in spec))


def _inside(cfg, mesh, names, check_vma, params, x, valid, state):
    """The layer inside a shard_map over `names`, its arguments split as the rules split them there."""
    batch = _only(RULES.spec(("batch",), mesh), names)
    split = {name: _only(RULES.spec(logical, mesh), names) for name, (_, logical) in param_shapes(cfg).items()}
    inside = lambda params, x, valid, state: moe(params, x, valid, state, cfg=cfg, rules=RULES)
    run = jax.shard_map(
        inside, mesh=mesh, in_specs=(split, batch, batch, P()), out_specs=(batch, P()),
        axis_names=set(names), check_vma=check_vma,
    )  # fmt: skip
    return run(params, x, valid, state)


def _manual_step(cfg, mesh, names, check_vma, params, x, valid, state, dy):
    def loss(params, x):
        y, stats = _inside(cfg, mesh, names, check_vma, params, x, valid, state)
        return (y, stats.loss(cfg)), stats

    (y, _), pull, stats = jax.vjp(loss, params, x, has_aux=True)
    d_params, d_x = pull((dy, jnp.ones(())))
    return {"y": y, "stats": stats, "d_params": d_params, "d_x": d_x, "norm": optax.tree.norm(d_params)}


MANUAL = [
    (("dp", "ep", "tp"), True, "all_to_all"),
    (("dp", "ep", "tp"), False, "all_to_all"),
    (("dp", "ep", "tp"), True, "all_gather"),
    (("dp",), True, "all_to_all"),
    (("ep",), True, "all_to_all"),
    (("dp",), True, "ragged"),
]


@pytest.mark.parametrize(("names", "check_vma", "exchange"), MANUAL, ids=str)
@pytest.mark.parametrize(
    ("shape", "change"),
    [((8, 4), {}), ((8, 3), {"capacity_factor": None, "num_senders": 16})],
    ids=["drops", "padded_shards"],
)
def test_inside_their_own_shard_map(names, check_vma, exchange, shape, change):
    """With padded shards: 6 tokens a device of 4 senders. Each device pads its own, so no drop depends on it here."""
    layer, where = _layer(shape, exchange=exchange, **change), grid.Place(_mesh(), RULES)
    run = jax.jit(functools.partial(_manual_step, layer.cfg, where.mesh, names, check_vma))
    for inputs in _draws(layer):
        with jax.set_mesh(where.mesh):
            got = run(*where.put(layer.cfg, inputs.garbage()))
        _check(got, grid.reference(layer, inputs))


@pytest.mark.parametrize(("names", "check_vma"), [(("dp", "ep", "tp"), True), (("dp", "ep", "tp"), False), (("ep",), True)])
def test_rings_inside_their_own_shard_map(names, check_vma):
    layer, where = _layer((8, 4), overlap=True, num_shared_experts=1), grid.Place(_mesh(), RULES)
    run = jax.jit(functools.partial(_manual_step, layer.cfg, where.mesh, names, check_vma))
    for inputs in _draws(layer):
        with jax.set_mesh(where.mesh):
            got = run(*where.put(layer.cfg, inputs.garbage()))
        _check(got, grid.reference(layer, inputs))


def test_rings_under_explicit_axes():
    layer, where = _layer((3, 5), overlap=True), grid.Place(_mesh(AxisType.Explicit), RULES)
    for inputs in _draws(layer):
        _check(grid.run(layer, where, inputs.garbage()), grid.reference(layer, inputs))


def test_no_mask_inside_their_shard_map_is_a_mask_of_ones():
    """Even where it is not all axes that are theirs: a mask made inside differs over as many as x does."""
    layer, mesh = _layer((8, 4)), _mesh()
    inputs = grid.draw(layer, 0, "random", "none")
    with jax.set_mesh(mesh):
        params, x, _, state, _ = grid.Place(mesh, RULES).put(layer.cfg, inputs)
        batch = P("dp")
        inside = lambda params, x: moe(params, x, None, state, cfg=layer.cfg, rules=RULES)[0]
        split = {name: _only(RULES.spec(logical, mesh), ("dp",)) for name, (_, logical) in param_shapes(layer.cfg).items()}
        y = jax.jit(jax.shard_map(inside, in_specs=(split, batch), out_specs=batch, axis_names={"dp"}))(params, x)
    grid.assert_close(y, grid.reference(layer, inputs)["y"])


@pytest.mark.parametrize("mesh", ["data8", "fsdp2_expert2_tensor2"])
def test_the_shard_scope_counts_within_each_shard(mesh):
    layer, where = _layer((4, 6)), grid.place(mesh)
    cfg = dataclasses.replace(layer.cfg, loss_scope="shard", capacity_factor=None)
    shards = where.token_shards
    for inputs in _draws(layer):
        x, valid = inputs.x.reshape(-1, 8).astype(np.float64), inputs.valid.ravel()
        router = inputs.params["router"].astype(np.float64)
        found = oracle.routes(cfg, router, x, valid, None, 8)
        want = oracle.losses(cfg, x @ router, valid, found, np.arange(len(x)) // (len(x) // shards))
        stats = grid.run(grid.Layer(cfg, layer.shape), where, inputs.garbage())["stats"]
        grid.assert_close((stats.aux_loss, stats.z_loss), want)


def test_senders_are_the_token_shards_unless_said_otherwise():
    layer, where = _layer((4, 6), capacity_factor=0.5), grid.place("data2_expert4")
    by_mesh = grid.Layer(dataclasses.replace(layer.cfg, num_senders=None), layer.shape)
    inputs = grid.draw(layer, 0, "random", "none")
    got, want = grid.run(by_mesh, where, inputs), grid.reference(layer, inputs)
    grid.assert_close(got["y"], want["y"])
    alone = grid.run(by_mesh, grid.Place(), inputs)
    assert int(alone["stats"].num_dropped) != int(got["stats"].num_dropped), "one sender drops other tokens than eight"


def test_the_straggler_is_the_fullest_expert_device_over_the_mean():
    layer, where = _layer((4, 6), capacity_factor=None), grid.place("data2_expert4")
    for inputs in _draws(layer):
        args = inputs.params["router"].astype(np.float64), inputs.x.reshape(-1, 8).astype(np.float64)
        found = oracle.routes(layer.cfg, *args, inputs.valid.ravel(), None, 8)
        rows = np.zeros((2, 4))  # by data shard (the first half of the tokens, the second) and expert device
        for i in np.flatnonzero(inputs.valid.ravel()):
            for e in found.expert[i]:
                rows[i // 12, e // 2] += 1
        got = grid.run(layer, where, inputs)["stats"].token_straggler
        np.testing.assert_allclose(got, rows.max() - rows.mean())


def test_bf16_parameters_and_products_route_as_float32_ones():
    layer = _layer((4, 6), dtype="bfloat16", param_dtype="bfloat16")
    exact = grid.Layer(dataclasses.replace(layer.cfg, dtype="float32", param_dtype="float32"), layer.shape)
    where = grid.place("fsdp2_expert2_tensor2")
    for inputs in _draws(layer):
        narrow = jax.tree.map(lambda value: value.astype(jnp.bfloat16), inputs.params)
        same = jax.tree.map(lambda value: np.asarray(value, np.float32), narrow)
        got = grid.run(layer, where, dataclasses.replace(inputs.garbage(), params=narrow))
        want = grid.reference(exact, dataclasses.replace(inputs, params=same))
        np.testing.assert_array_equal(got["stats"].tokens_per_expert, want["stats"].tokens_per_expert)
        np.testing.assert_array_equal(got["stats"].num_dropped, want["stats"].num_dropped)
        assert {grad.dtype for grad in got["d_params"].values()} == {jnp.dtype("bfloat16")}
        wide = jax.tree.map(lambda value: np.asarray(value, np.float32), {**got, "stats": want["stats"]})
        grid.assert_close(wide, want, 0.05)


class Block(nnx.Module):
    """Somebody's own residual block around the layer."""

    def __init__(self, cfg, rules, rngs):
        self.norm = nnx.LayerNorm(cfg.d_model, rngs=rngs)
        self.moe = MoELayer(cfg, rules=rules, rngs=rngs)
        self.head = nnx.Linear(cfg.d_model, 1, rngs=rngs)

    def __call__(self, x, valid):
        y, stats = self.moe(self.norm(x), valid)
        return self.head(x + y), stats


def _train(place, cfg, num_steps=3):
    """A few optimizer steps; the losses of each, and the trained model."""
    x = jnp.asarray(grid.draw(grid.Layer(cfg, (8, 5)), 0, "random", "none").x)
    valid = jnp.asarray(np.arange(5) < 4) & jnp.ones((8, 1), bool)
    model = Block(cfg, place.rules, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer):
        def loss(model):
            out, stats = model(x, valid)
            square = jnp.square(out[..., 0] - x.sum(-1))
            return jnp.where(valid, square, 0).sum() / valid.sum() + stats.loss(cfg), stats

        (value, stats), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, grads)
        return value, stats

    losses = []
    for _ in range(num_steps):
        value, stats = train_step(model, optimizer)
        losses.append(float(value))
        state = model.moe.router_state
        state.set_value(update_router(state.get_value(), stats))
    return losses, model


@functools.cache
def _trained_alone(cfg):
    return _train(grid.Place(), cfg)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("router", [Softmax(), SigmoidBias(rate=0.5)], ids=repr)
def test_their_nnx_model_trains_the_same_on_their_mesh(axis_type, router):
    cfg = MoEConfig(8, 8, 8, 2, router=router, num_senders=8, dtype="float32", aux_loss=0.1, z_loss=0.1)
    losses, model = _trained_alone(cfg)
    where = grid.Place(_mesh(axis_type), RULES)
    with jax.set_mesh(where.mesh):
        sharded_losses, sharded = _train(where, cfg)
    np.testing.assert_allclose(sharded_losses, losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    want, got = (jax.device_get(nnx.to_pure_dict(nnx.state(m))) for m in (model, sharded))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got, want)
    assert sharded.moe.expert_up[...].sharding.spec == P("ep", "dp", "tp")


def test_the_losses_alone_train_the_router():
    """With an output that is not used, aux and z loss still reach the router, and nothing else."""
    cfg = MoEConfig(8, 8, 8, 2, dtype="float32", aux_loss=1.0)
    x = jnp.asarray(grid.draw(grid.Layer(cfg, (8, 5)), 0, "one_expert", "none").x)
    with jax.set_mesh(make_mesh(data=2, expert=4)):
        layer = MoELayer(cfg, rngs=nnx.Rngs(0))
        for weights in ((1.0, 0.0), (0.0, 1.0)):
            scored = dataclasses.replace(cfg, aux_loss=weights[0], z_loss=weights[1])
            grads = nnx.jit(nnx.grad(lambda layer, cfg=scored: layer(x)[1].loss(cfg)))(layer)
            assert np.abs(grads.router[...]).max() > 1e-4
            assert not np.asarray(grads.expert_up[...]).any()


def test_router_state_is_no_parameter_and_no_forward_changes_it():
    cfg = MoEConfig(8, 8, 8, 2, router=SigmoidBias(rate=0.25), dtype="float32")
    layer = MoELayer(cfg, rngs=nnx.Rngs(0))
    params, state, rest = nnx.state(layer, nnx.Param, RouterState, ...)
    assert set(nnx.to_pure_dict(params)) == {"router", "expert_up", "expert_gate", "expert_down"}
    assert set(nnx.to_pure_dict(state)) == {"router_state"}
    assert not jax.tree.leaves(rest)
    x = jax.random.normal(jax.random.key(0), (2, 6, 8))
    forward = nnx.jit(lambda layer: layer(x)[1])
    stats = forward(layer)
    assert not np.asarray(layer.router_state.get_value().bias).any()
    layer.router_state.set_value(update_router(layer.router_state.get_value(), stats))
    loads = np.asarray(stats.tokens_per_expert)
    np.testing.assert_array_equal(layer.router_state.get_value().bias, 0.25 * np.sign(loads.mean() - loads))
    assert (forward(layer).tokens_per_expert != stats.tokens_per_expert).any(), "the bias should move tokens"


def test_parameters_are_the_same_on_every_mesh():
    cfg = MoEConfig(8, 8, 8, 2, num_shared_experts=1)
    alone = nnx.to_pure_dict(nnx.state(MoELayer(cfg, rngs=nnx.Rngs(3)), nnx.Param))
    with jax.set_mesh(_mesh()):
        sharded = nnx.to_pure_dict(nnx.state(MoELayer(cfg, rules=RULES, rngs=nnx.Rngs(3)), nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(sharded), jax.device_get(alone))
    np.testing.assert_allclose(np.std(alone["expert_up"]), 8**-0.5, rtol=0.1)


def test_a_committed_batch_keeps_its_layout():
    layer, where = _layer((8, 5), num_shared_experts=1), grid.Place(_mesh(), RULES)
    out = grid.run(layer, where, grid.draw(layer, 0, "random", "none"))
    want = NamedSharding(where.mesh, P(("dp", "ep")))
    assert out["y"].sharding.is_equivalent_to(want, 3)
    assert out["d_params"]["expert_up"].sharding.spec == P("ep", "dp", "tp")
