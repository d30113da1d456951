"""A call's RoutingContext and the further routers and losses, through the whole layer: one answer on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax import MoEConfig, MoELayer, RoutingContext, linen, make_mesh, moe
from moejax.layer import param_shapes
from moejax.routers import ExpertChoice, Sinkhorn
from moejax.routers.sticky import switch_rate
from moejax.routing import PerSequence
from tests.moejax.grid import assert_close

B, S, D, E = 4, 6, 8, 8
BASE = {"d_model": D, "d_ff": 8, "num_experts": E, "top_k": 2, "num_senders": 8, "dtype": "float32", "aux_loss": 0.5}
EXTRA = (("importance", 0.5), ("entropy", 0.25), ("divergence", 0.5))
LAYERS = {
    "noisy": MoEConfig(**BASE, router="noisy", jitter=0.1, extra_losses=(*EXTRA, ("load", 0.5))),
    "top_p": MoEConfig(**BASE, router="top_p", capacity="pool", num_destinations=4, extra_losses=EXTRA),
    "sinkhorn": MoEConfig(**BASE, router="sinkhorn", capacity_factor=None),
    "sticky": MoEConfig(**BASE, router="sticky", exchange="all_gather"),
    "hash": MoEConfig(**BASE, router="hash", exchange="ragged"),
    "prototype": MoEConfig(**BASE, router="prototype", capacity_factor=0.5, drop_by="weight"),
    "grouped": MoEConfig(**BASE, router="grouped", exchange="weight_stream"),
    "queue": MoEConfig(**BASE, router="queue"),
    "expert_choice": MoEConfig(**BASE, router="expert_choice", capacity_factor=None, exchange="ragged"),
    "expert_choice in pools": MoEConfig(
        **{**BASE, "num_senders": 4}, router=ExpertChoice(causal=True), capacity="pool", num_destinations=4
    ),
}
QUICK = ("noisy", "top_p", "sticky")
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYERS]


def _inputs(cfg):
    rng = np.random.default_rng(0)
    grid = lambda *shape: jnp.asarray(rng.integers(-128, 129, shape) / 64, jnp.float32)
    params = {name: grid(*shape) for name, (shape, _) in param_shapes(cfg).items()}
    domain = jnp.asarray(rng.integers(0, 3, (B, S)), jnp.int32)
    context = RoutingContext(
        key=jax.random.key(7),
        token_ids=jnp.asarray(rng.integers(0, 99, (B, S)), jnp.int32),
        domain_ids=domain,
        num_domains=3,
        expert_mask=jnp.asarray(rng.random((3, E)) < 0.7)[domain],
        record=True,
    )
    return params, grid(B, S, D), jnp.asarray(rng.random((B, S)) < 0.8), grid(B, S, D), context


def _step(cfg):
    def loss(params, x, valid, dy, context):
        y, stats = moe(params, x, valid, cfg.router_rule.init_state(E), cfg=cfg, context=context)
        return (jnp.where(valid[..., None], y * dy, 0)).sum() + stats.loss(cfg), (y, stats)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("name", CASES)
def test_every_router_gives_one_answer_on_every_mesh(name):
    cfg = LAYERS[name]
    args = _inputs(cfg)
    want = _step(dataclasses.replace(cfg, exchange="all_to_all"))(*args)
    shards = {"expert": 4} if isinstance(cfg.router_rule, PerSequence) else {"data": 2, "expert": 4}
    with jax.set_mesh(make_mesh(**shards)):
        got = _step(cfg)(*args)
    ((_, (_, stats)), grads), ((_, (_, expected)), _) = got, want
    straggler = {"token_straggler": expected.token_straggler}  # what a device works on depends on the mesh
    got = ((got[0][0], (got[0][1][0], dataclasses.replace(stats, **straggler))), grads)
    assert_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want))
    assert set(stats.extra) == {name for name, _ in cfg.extra_losses}
    assert np.abs(grads[0]["router"]).max() > 0 or name == "hash"
    _check_record(stats, args[2], cfg)


def _check_record(stats, valid, cfg):
    """What is recorded is what was counted."""
    record = np.asarray(stats.expert)[np.asarray(valid)]
    np.testing.assert_array_equal(np.bincount(record[record >= 0], minlength=E), stats.tokens_per_expert)
    assert stats.num_tokens == valid.sum()
    if cfg.router == "sticky":
        np.testing.assert_allclose(stats.measured["switch_rate"], switch_rate(stats.expert, valid), rtol=1e-5)


def test_sequence_routers_refuse_sequences_that_shards_would_cut():
    cfg = LAYERS["sinkhorn"]
    params, x, valid, _, _ = _inputs(cfg)
    with jax.set_mesh(make_mesh(expert=8)), pytest.raises(ValueError, match=r"needs whole sequences on a shard, 3 tokens"):
        moe(params, x, valid, None, cfg=cfg)
    assert Sinkhorn.whole_sequences


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": jnp.zeros((B, S + 1), jnp.int32)}, r"context.token_ids of dtype int32 and shape \(4, 7\): needs"),
        ({"replay": jnp.zeros((B, S, 3), jnp.int32)}, r"context.replay of dtype int32 and shape \(4, 6, 3\): needs integers"),
        ({"expert_mask": jnp.ones((B, S, 3), bool)}, r"context.expert_mask of dtype bool and shape \(4, 6, 3\): needs bool"),
        ({"expert_mask": jnp.ones(E)}, r"context.expert_mask of dtype float32"),
        ({"domain_ids": jnp.zeros((B, S), jnp.int32)}, r"context.num_domains=None: needs a number with domain_ids"),
        ({"expert_budget": 1}, r"context.expert_budget=1: needs a whole number from top_k=2 to 8"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("unchecked")
def test_contexts_that_do_not_fit_are_refused(change, message):
    cfg = MoEConfig(**BASE)
    params, x, valid, _, _ = _inputs(cfg)
    with pytest.raises(ValueError, match=f"^{message}"):
        moe(params, x, valid, None, cfg=cfg, context=RoutingContext(**change))


def test_the_divergence_loss_asks_for_domains():
    cfg = MoEConfig(**BASE, extra_losses=(("divergence", 1.0),))
    params, x, valid, _, _ = _inputs(cfg)
    with pytest.raises(ValueError, match=r"context.domain_ids=None: extra loss 'divergence' needs"):
        jax.eval_shape(lambda x: moe(params, x, valid, None, cfg=cfg), x)


def test_layers_pass_their_context_on():
    """A mask of one expert alone: every token goes there, in nnx and in linen."""
    cfg, x = MoEConfig(**{**BASE, "top_k": 1, "capacity_factor": None}), jnp.ones((B, S, D))
    context = RoutingContext(expert_mask=jnp.arange(E) == 5)
    _, stats = MoELayer(cfg, rngs=nnx.Rngs(0))(x, context=context)
    layer = linen.MoELayer(cfg)
    (_, other), _ = layer.init_with_output(jax.random.key(0), x, context=context)
    for loads in (stats.tokens_per_expert, other.tokens_per_expert):
        np.testing.assert_array_equal(loads, B * S * np.eye(E)[5])
