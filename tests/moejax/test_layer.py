"""The layer: one device against the independent statement of it, every mesh against one device."""

import dataclasses
import functools
import itertools

import hypothesis
import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from moejax import MoEConfig, MoELayer, moe, update_router
from moejax.layer import param_shapes
from tests.moejax import grid, oracle

drawn = st.tuples(st.integers(0, 2**20), st.sampled_from(grid.SKEWS), st.sampled_from(grid.PADDINGS))
EVERY = list(itertools.product(grid.SKEWS, grid.PADDINGS))

# (layer, mesh, exchange): each layer and mesh more than once, each of the two exchanges on every expert mesh.
CASES = [
    ("odd", "expert8", "all_to_all"),
    ("shared", "expert8", "all_gather"),
    ("many_senders", "expert8", "all_to_all"),
    ("every_expert", "expert8", "all_gather"),
    ("odd", "data8", "all_to_all"),
    ("shared", "data2_expert4", "all_to_all"),
    ("many_senders", "data2_expert4", "all_gather"),
    ("odd", "fsdp2_expert2_tensor2", "all_gather"),
    ("shared", "fsdp2_expert2_tensor2", "all_to_all"),
    ("every_expert", "fsdp2_expert2_tensor2", "all_to_all"),
    ("many_senders", "data2_fsdp2_tensor2", "all_to_all"),
    ("shared", "data2_fsdp2_tensor2", "all_to_all"),
]
REST = [case for case in itertools.product(grid.LAYERS, [*grid.MESHES][1:], ("all_to_all", "all_gather", "ragged"))
        if case not in CASES]  # fmt: skip


def _layer(name, exchange):
    layer = grid.LAYERS[name]
    return dataclasses.replace(layer, cfg=dataclasses.replace(layer.cfg, exchange=exchange))


def _check_sharded(layer, where, inputs):
    got, want = grid.run(layer, where, inputs.garbage()), grid.reference(layer, inputs)
    grid.assert_replicas_equal(got)
    straggler = float(got["stats"].token_straggler)
    without = lambda out: {**out, "stats": dataclasses.replace(out["stats"], token_straggler=0.0)}
    grid.assert_close(without(got), without(want))
    assert not np.asarray(got["y"])[~inputs.valid].any()
    assert not np.asarray(got["d_x"])[~inputs.valid].any()
    assert 0 <= straggler <= int(got["stats"].num_assignments)


@pytest.mark.parametrize(("name", "mesh", "exchange"), CASES)
def test_sharded_equals_one_device(name, mesh, exchange):
    layer, where = _layer(name, exchange), grid.place(mesh)
    for seed, (skew, padding) in enumerate(EVERY):
        _check_sharded(layer, where, grid.draw(layer, seed, skew, padding))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "exchange"), CASES + REST)
def test_sharded_equals_one_device_everywhere(name, mesh, exchange):
    layer, where = _layer(name, exchange), grid.place(mesh)

    @hypothesis.settings(max_examples=60)
    @hypothesis.given(drawn)
    def check(what):
        _check_sharded(layer, where, grid.draw(layer, *what))

    check()


@functools.cache
def _dense(cfg):
    return jax.jit(functools.partial(oracle.dense, cfg))


def _check_reference(layer, inputs):
    cfg, (batch, seq) = layer.cfg, layer.shape
    wide = lambda value: np.asarray(value, np.float64)
    params = {name: wide(value) for name, value in inputs.params.items()}
    x, dy, valid = (
        wide(inputs.x).reshape(batch * seq, -1),
        wide(inputs.dy).reshape(batch * seq, -1),
        inputs.valid.ravel(),
    )
    found = oracle.routes(cfg, params["router"], x, valid, inputs.bias, cfg.num_senders)
    group = np.arange(batch * seq) // seq if cfg.loss_scope == "sequence" else np.zeros(batch * seq, int)
    balance, z = oracle.losses(cfg, x @ params["router"], valid, found, group)
    with jax.enable_x64(True):
        member = (np.arange(group.max() + 1)[:, None] == group) * valid.astype(np.float64)
        args = (params, x, dy, valid, inputs.bias, found.expert, found.kept, member)
        y, d_params, d_x = jax.device_get(_dense(cfg)(*args))
    got = grid.reference(layer, inputs.garbage())
    np.testing.assert_allclose(y, oracle.outputs(cfg, params, x, valid, found), rtol=1e-9, atol=1e-9 * np.abs(y).max())
    want = {"y": y.reshape(inputs.x.shape), "d_params": d_params, "d_x": d_x.reshape(inputs.x.shape)}
    grid.assert_close({name: got[name] for name in want}, want)
    stats, chose = got["stats"], np.bincount(found.expert[valid].ravel(), minlength=cfg.num_experts)
    grid.assert_close((stats.aux_loss, stats.z_loss), (balance, z))
    np.testing.assert_array_equal(stats.tokens_per_expert, chose)
    assert stats.num_assignments == valid.sum() * cfg.top_k
    assert stats.num_dropped == valid.sum() * cfg.top_k - found.kept.sum()
    assert stats.token_straggler == 0


@pytest.mark.parametrize("name", grid.LAYERS)
def test_one_device_equals_the_statement(name):
    layer = grid.LAYERS[name]
    for seed, (skew, padding) in enumerate(EVERY):
        _check_reference(layer, grid.draw(layer, seed, skew, padding))


@pytest.mark.slow
@pytest.mark.parametrize("name", grid.LAYERS)
def test_one_device_equals_the_statement_everywhere(name):
    layer = grid.LAYERS[name]

    @hypothesis.settings(max_examples=200)
    @hypothesis.given(drawn)
    def check(what):
        _check_reference(layer, grid.draw(layer, *what))

    check()


CALLS = [
    ({"x": np.ones((2, 4, 8), np.int32)}, "x of dtype int32"),
    ({"x": np.ones((0, 4, 8), np.float32)}, "x of dtype float32 and shape"),
    ({"valid": np.ones((2, 4), np.int32)}, "valid of dtype int32"),  # segment ids are no mask: 2 & True is 0
    ({"valid": np.ones((4, 2), bool)}, "valid of dtype bool and shape"),
    ({"router": np.ones((8, 4), np.float32)}, r"params\['router'\] of shape \(8, 4\): the config's is \(8, 8\)"),
    ({"extra": np.ones(3, np.float32)}, r"params\['extra'\] of shape \(3,\): the config's is None"),
]


@pytest.mark.parametrize(("change", "says"), CALLS)
@pytest.mark.usefixtures("unchecked")
def test_impossible_calls_are_refused(change, says):
    cfg = MoEConfig(8, 8, 8, 2, dtype="float32")
    params = {name: np.ones(shape, np.float32) for name, (shape, _) in param_shapes(cfg).items()}
    given = {"x": np.ones((2, 4, 8), np.float32), "valid": None, **change}
    x, valid = given.pop("x"), given.pop("valid")
    with pytest.raises(ValueError, match="^" + says) as caught:
        moe({**params, **given}, x, valid, None, cfg=cfg)
    assert "\n" not in str(caught.value)


def test_router_states_are_updated_in_whatever_holds_them():
    layer = MoELayer(MoEConfig(8, 8, 8, 2, dtype="float32", router="sigmoid_bias"), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 4, 8))
    stats = layer(x)[1]
    bare = layer.router_state.get_value()
    want = update_router(bare, stats).bias
    assert np.asarray(want).any()
    layer.router_state = update_router(layer.router_state, stats)
    np.testing.assert_array_equal(layer.router_state.get_value().bias, want)
    np.testing.assert_array_equal(update_router({"state": bare}, stats)["state"].bias, want)
    stateless = MoELayer(MoEConfig(8, 8, 8, 2, dtype="float32"), rngs=nnx.Rngs(0))
    assert update_router(stateless.router_state, stats).get_value() is None
