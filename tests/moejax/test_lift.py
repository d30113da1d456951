"""Users' modules as experts: the built-in experts' answer, sharded, trained, in nnx and in linen."""

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
from moejax import AxisRules, MoEConfig, as_experts, make_mesh

CFG = MoEConfig(d_model=16, d_ff=8, num_experts=8, top_k=2, dtype="float32", num_senders=8, num_shared_experts=1)
X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 6, 16)), jnp.float32)
VALID = jnp.asarray(np.random.default_rng(1).random((8, 6)) < 0.8)
WHOLE = AxisRules(mlp=None, heads=None, vocab=None)


class Gated(nnx.Module):
    """What "swiglu" experts are, as a user would write it."""

    def __init__(self, rngs):
        self.up, self.gate = (nnx.Linear(16, 8, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(8, 16, use_bias=False, rngs=rngs)

    def __call__(self, rows):
        return self.down(jax.nn.silu(self.gate(rows)) * self.up(rows))


class Biased(nn.Module):
    """Not zero for a zero row: what empty rows give must never be read."""

    @nn.compact
    def __call__(self, rows):
        return nn.Dense(16, bias_init=nn.initializers.ones)(jnp.tanh(nn.Dense(8, bias_init=nn.initializers.ones)(rows)))


def test_a_lifted_module_equals_the_experts_that_it_is():
    lifted, plain = as_experts(Gated, CFG, rngs=nnx.Rngs(0)), moejax.MoELayer(CFG, rngs=nnx.Rngs(0))
    for name in ("up", "gate", "down"):
        getattr(plain, f"expert_{name}")[...] = getattr(lifted.experts, name).kernel[...]
        getattr(plain, f"shared_{name}")[...] = getattr(lifted, f"shared_{name}")[...]
    plain.router[...] = lifted.router[...]
    for got, want in zip(jax.tree.leaves(lifted(X, VALID)), jax.tree.leaves(plain(X, VALID)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def gradient(lifted):
    graphdef, params, rest = nnx.split(lifted, nnx.Param, ...)

    def loss(params, x):
        y, stats = nnx.merge(graphdef, params, rest)(x, VALID)
        return jnp.square(y).mean() + stats.loss(CFG)

    return params, jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


@pytest.mark.parametrize(
    "changes",
    [{}, {"exchange": "weight_stream"}, {"weigh_at": "expert", "exchange_by": "expert"}, {"weigh_at": "expert"}],
    ids=str,
)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_nnx_experts_are_sharded_and_keep_their_gradients(axis_type, changes):
    params, run = gradient(as_experts(Gated, CFG, rngs=nnx.Rngs(0)))
    want = run(params, X)
    with jax.set_mesh(make_mesh(data=2, expert=4, axis_type=axis_type)):
        params, run = gradient(as_experts(Gated, dataclasses.replace(CFG, **changes), rngs=nnx.Rngs(0)))
        assert params["experts"]["up"]["kernel"].get_value().addressable_shards[0].data.shape == (2, 16, 8)
        got = run(params, X)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("weigh_at", ["token", "expert"])
def test_linen_experts_are_sharded_and_keep_their_gradients(weigh_at):
    layer = as_experts(Biased(), dataclasses.replace(CFG, weigh_at=weigh_at))
    variables = jax.jit(layer.init)(jax.random.key(0), X)
    poisoned = jnp.where(VALID[..., None], X, jnp.nan)

    def loss(variables, x):
        y, stats = layer.apply(variables, x, VALID)
        return jnp.square(y).mean() + stats.loss(CFG)

    run = jax.jit(jax.value_and_grad(loss))
    want = run(nn.meta.unbox(variables), X)
    with jax.set_mesh(make_mesh(data=2, expert=4)):
        spec = nn.get_partition_spec(variables := jax.jit(layer.init)(jax.random.key(0), X))
        assert spec["params"]["experts"]["Dense_0"]["kernel"] == jax.P("expert", None, None)
        got = run(nn.meta.unbox(variables), poisoned)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


def test_experts_start_out_different():
    lifted = as_experts(Gated, CFG, rngs=nnx.Rngs(0))
    kernel = np.asarray(lifted.experts.up.kernel[...])
    assert len({block.tobytes() for block in kernel}) == CFG.num_experts


def test_lifted_experts_train():
    params, run = gradient(as_experts(Gated, dataclasses.replace(CFG, aux_loss=0.0, z_loss=0.0), rngs=nnx.Rngs(0)))
    optimizer = optax.adam(1e-2)
    state, losses = optimizer.init(params), []
    for _ in range(20):
        loss, (grads, _) = run(params, X)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert all(np.abs(grad).max() > 0 for grad in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    ("module", "cfg", "rules", "says"),
    [
        (Gated, dataclasses.replace(CFG, capacity="pool"), WHOLE, "capacity='pool': lifted experts work on cells"),
        (
            Gated,
            dataclasses.replace(CFG, exchange="ragged"),
            WHOLE,
            "exchange='ragged': lifted experts work on cells",
        ),
        (Gated, CFG, AxisRules(), r"mlp axes \('tensor',\): a lifted expert is whole on its shard"),
    ],
)
def test_impossible_lifts_are_refused(module, cfg, rules, says):
    with jax.set_mesh(make_mesh(tensor=2)), pytest.raises(ValueError, match="^" + says):
        as_experts(module, cfg, rules=dataclasses.replace(rules, replicated=("stage", "tensor")), rngs=nnx.Rngs(0))


def test_experts_that_keep_more_than_parameters_are_refused():
    dropout = lambda rngs: nnx.Sequential(nnx.Linear(16, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    with pytest.raises(ValueError, match=r"^module keeps Rng.*: a lifted expert may keep nnx.Param only"):
        as_experts(dropout, CFG, rngs=nnx.Rngs(0))


def test_an_nnx_expert_needs_rngs():
    with pytest.raises(ValueError, match=r"^module=<class .*Gated'>, rngs=None: needs a linen module, or an nnx constructor"):
        as_experts(Gated, CFG)
