"""The rings at work: in the experts over embed axes, in the decoder's dense feed-forward over embed and mlp axes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moejax
from layouts.hlo import read
from moejax import AxisRules, Transformer, TransformerConfig
from moejax.experts import NONLINEARITY
from moejax.ring_feed_forward import feed_forward_over_mesh
from tests.moejax import grid

CASES = [
    ("odd", "data2_fsdp2_tensor2", {}),
    ("shared", "fsdp2_expert2_tensor2", {}),
    ("every_expert", "data2_fsdp2_tensor2", {"num_chunks": 2}),
    ("shared", "fsdp2_expert2_tensor2", {"exchange": "ragged"}),
    ("shared", "fsdp2_expert2_tensor2", {"capacity": "pool", "num_destinations": 2, "num_senders": 4}),
    ("odd", "fsdp2_expert2_tensor2", {"weigh_at": "expert", "exchange_by": "expert"}),
    ("every_expert", "fsdp2_expert2_tensor2", {"weigh_at": "expert", "exchange_by": "expert", "activation": "relu2"}),
    ("many_senders", "fsdp2_expert2_tensor2", {"exchange": "all_gather"}),
    ("odd", "data2_expert4", {}),  # neither axis: the plain products
]


def _layer(name, changes):
    layer = grid.LAYERS[name]
    return dataclasses.replace(layer, cfg=dataclasses.replace(layer.cfg, **changes))


@pytest.mark.parametrize(("name", "mesh", "changes"), CASES)
def test_the_layer_gives_the_reference_answer(name, mesh, changes):
    layer, where = _layer(name, {**changes, "overlap": True}), grid.place(mesh)
    for seed, skew in enumerate(grid.SKEWS):
        inputs = grid.draw(layer, seed, skew, grid.PADDINGS[-1 - seed % len(grid.PADDINGS)])
        got, want = grid.run(layer, where, inputs.garbage()), grid.reference(layer, inputs)
        grid.assert_replicas_equal(got)
        stats = dataclasses.replace(got["stats"], token_straggler=want["stats"].token_straggler)
        grid.assert_close({**got, "stats": stats}, want)


def _text(overlap, **changes):
    """Forward and backward over data 2, fsdp 4, lowered and compiled."""
    cfg = dataclasses.replace(grid.LAYERS["odd"].cfg, **{"d_model": 16, "overlap": overlap, **changes})
    layer = grid.Layer(cfg, (8, 4))
    where = grid.Place(moejax.make_mesh(data=2, fsdp=4))
    with jax.set_mesh(where.mesh):
        args = where.put(cfg, grid.draw(layer, 0, "random", "none"))
        lowered = jax.jit(functools.partial(grid.step, cfg, where.rules)).lower(*args)
        return lowered.as_text(), lowered.compile().as_text()


def _permuted(lowered):
    """The result types of the collective permutes in a lowered text, such as "16x4x16xf32"."""
    return [line.rsplit("tensor<", 1)[1].rstrip(">") for line in lowered.splitlines() if "collective_permute" in line]


def test_the_rings_move_what_gather_and_scatter_moved():
    """Weights twice (the backward lets them come by again) and their gradients once, instead of gathered and reduced whole.

    Where forward and backward are one program, a compiler may see that the second round brings what the first one brought:
    XLA:CPU of jax 0.10 leaves it out for all weights, of 0.12 for those of the first product.
    """
    (_, plain), (lowered, rings) = (_text(overlap) for overlap in (False, True))
    plain, rings = read(plain), read(rings)
    weights = 4 * 3 * 16 * 16 * 8  # bytes of three arrays of 16 experts, 16 x 8, in float32
    assert plain.of_kind("all-gather").payload_bytes == weights
    assert rings.of_kind("all-gather").count == rings.of_kind("reduce-scatter").count == 0
    asked = sum(4 * np.prod([int(n) for n in kind.split("x")[:-1]]) for kind in _permuted(lowered))
    assert asked == 3 * weights * 3 // 4
    assert asked - weights * 3 // 4 <= rings.of_kind("collective-permute").wire_bytes <= asked
    assert rings.dot_flops == plain.dot_flops


def test_gradients_go_round_in_float32():
    kinds = _permuted(_text(True, dtype="bfloat16")[0])
    assert {kind for kind in kinds if kind.endswith("xf32")} == {"16x4x16xf32", "16x8x4xf32"}
    assert {kind for kind in kinds if kind.endswith("bf16")} == {"16x4x16xbf16", "16x8x4xbf16"}


def _dense(rules, act, x, weights, dy):
    """The feed-forward and its gradients."""
    y, pull = jax.vjp(lambda x, weights: feed_forward_over_mesh(x, weights, act, rules), x, weights)
    return y, *pull(dy)


@pytest.mark.parametrize(("mesh", "activation"), [("data2_fsdp2_tensor2", "swiglu"), ("fsdp2_expert2_tensor2", "relu2")])
@pytest.mark.parametrize("shape", [(8, 6), (3, 5)], ids=["divided", "by_nothing"])
def test_the_dense_feed_forward_gives_the_answer_of_one_device(mesh, activation, shape):
    rng, where = np.random.default_rng(0), grid.place(mesh)
    make = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    weights = make(16, 24) if activation == "swiglu" else None, make(16, 24), make(24, 16)
    args = make(*shape, 16), weights, make(*shape, 16)
    run = functools.partial(_dense, where.rules, NONLINEARITY[activation])
    want = run(*args)
    with jax.set_mesh(where.mesh):
        got = jax.jit(run)(*args)
    grid.assert_close(got, want)
    gate, up, down = jax.tree.map(lambda part: np.asarray(part, np.float64), weights)
    wide = args[0].astype(np.float64)
    product = wide @ up
    hidden = np.maximum(product, 0) ** 2 if gate is None else product * (wide @ gate) / (1 + np.exp(-(wide @ gate)))
    grid.assert_close(got[0], hidden @ down)


CFG = TransformerConfig(
    vocab_size=32, num_layers=1, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24, dtype="float32", overlap=True
)  # fmt: skip


def _model(cfg):
    """Logits and every parameter's gradient, and the compiled text."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (8, 6)), jnp.int32)
    graphdef, params, rest = nnx.split(Transformer(cfg, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def loss(params):
        logits, _ = nnx.merge(graphdef, params, rest)(tokens)
        return jnp.square(logits).mean(), logits

    run = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params).compile()
    (_, logits), grads = run(params)
    return jax.device_get((logits, nnx.to_pure_dict(grads))), run.as_text()


def test_the_decoder_gives_the_answer_of_one_device():
    want, text = _model(CFG)
    assert "collective" not in text
    with jax.set_mesh(moejax.make_mesh(fsdp=2, tensor=2)):
        got, text = _model(CFG)
    grid.assert_close(got, want)
    assert read(text).of_kind("collective-permute").count > 0


def test_tokens_must_be_sharded_over_the_embed_axes():
    rules = AxisRules(batch="data")
    with (
        jax.set_mesh(moejax.make_mesh(data=2, fsdp=2)),
        pytest.raises(ValueError, match=r"^embed axis 'fsdp': tokens must be sharded over it too"),
    ):
        Transformer(CFG, rules=rules, rngs=nnx.Rngs(0))
