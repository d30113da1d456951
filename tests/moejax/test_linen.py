"""The layer for flax.linen: the nnx layer's numbers, boxed layouts, and a user's model that trains."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import moejax

CFG = moejax.MoEConfig(
    d_model=16, d_ff=8, num_experts=8, top_k=2, dtype="float32", num_senders=8, router="sigmoid_bias", num_shared_experts=1
)
X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 6, 16)).astype(np.float32))
VALID = jnp.asarray(np.random.default_rng(1).random((8, 6)) < 0.8)


def test_linen_equals_nnx():
    layer = moejax.MoELayer(CFG, rngs=nnx.Rngs(0))
    params = {name: getattr(layer, name)[...] for name in ("router", "expert_up", "expert_gate", "expert_down")}
    params |= {f"shared_{name}": getattr(layer, f"shared_{name}")[...] for name in ("up", "gate", "down")}
    state = moejax.BiasState(jnp.arange(8.0) / 100, 1e-3)
    layer.router_state.set_value(state)
    variables = {"params": params, "router_state": {"state": state}}
    want, got = layer(X, VALID), moejax.linen.MoELayer(CFG).apply(variables, X, VALID)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_variables_are_boxed_with_their_layout(axis_type):
    layer = moejax.linen.MoELayer(CFG)
    alone = nn.meta.unbox(jax.jit(layer.init)(jax.random.key(0), X))
    want, _ = layer.apply(alone, X, VALID)
    with jax.set_mesh(moejax.make_mesh(fsdp=2, expert=2, tensor=2, axis_type=axis_type)):
        variables = jax.jit(layer.init)(jax.random.key(0), X)
        spec = nn.get_partition_spec(variables)["params"]
        got, _ = jax.jit(layer.apply)(variables, X, VALID)
    assert spec["expert_up"] == jax.P("expert", "fsdp", "tensor")
    assert spec["expert_down"] == jax.P("expert", "tensor", "fsdp")
    assert variables["params"]["expert_up"].value.addressable_shards[0].data.shape == (4, 8, 4)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_router_without_state_has_no_collection():
    layer = moejax.linen.MoELayer(dataclasses.replace(CFG, router="softmax"))
    variables = jax.jit(layer.init)(jax.random.key(0), X)
    assert list(variables) == ["params"]
    layer.apply({"params": variables["params"]}, X)


class Model(nn.Module):
    """A user's model: a MoE layer between two dense ones."""

    cfg: moejax.MoEConfig
    rules: moejax.AxisRules

    @nn.compact
    def __call__(self, x):
        y, stats = moejax.linen.MoELayer(self.cfg, self.rules)(nn.Dense(16)(x))
        return nn.Dense(1)(y), stats


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_users_linen_model_trains_under_its_own_axis_names(axis_type):
    """Losses reach the optimizer: with only the auxiliary loss, the router moves and the load evens out."""
    rules = moejax.AxisRules(batch=("dp", "ep"), expert="ep", embed=None, mlp=None, heads=None, vocab=None)
    cfg = dataclasses.replace(CFG, router="softmax", num_shared_experts=0)
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(axis_type, axis_type))
    model, optimizer = Model(cfg, rules), optax.adam(1e-2)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.P(("dp", "ep")))
        params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), x))["params"]
        params["MoELayer_0"]["router"] = params["MoELayer_0"]["router"].at[:, 0].add(2.0)

        def loss(params):
            y, stats = model.apply({"params": params}, x)
            return jnp.square(y - 1).mean() + stats.loss(cfg), stats

        @jax.jit
        def step(params, opt_state):
            (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value, stats, grads

        opt_state, values = optimizer.init(params), []
        for _ in range(30):
            params, opt_state, value, stats, grads = step(params, opt_state)
            values.append(float(value))
    assert values[-1] < 0.2 * values[0]
    assert all(np.abs(grad).max() > 0 for grad in jax.tree.leaves(grads["MoELayer_0"]))
    assert int(stats.num_assignments) == 8 * 6 * 2
