"""SplitLayer: F, B and W together are the layer's vjp; B multiplies no weight's gradient, W nothing that B made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from moejax.feed_forward import feed_forward
from moejax.remat import REMAT_POLICIES
from moejax.split import SplitLayer


def dense(params, given, x):
    """A feed-forward whose backward is a rule of its own, with barriers around gradients of both kinds."""
    y = feed_forward(x, None, params["gate"], params["up"], params["down"], "swiglu")
    loss = jnp.square(x @ params["router"]).mean()
    return x + y * given["mask"][:, None], loss, {"loss": loss, "rows": jnp.int32(len(x))}


def scanned(params, given, x):
    """A loop over two products: one equation, so its weights' gradients are computed with its input's."""
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["both"])[0], None, None


def arrays(names, shape):
    keys = dict(zip(names, jax.random.split(jax.random.key(0), len(names)), strict=True))
    return {name: jax.random.normal(key, shape[name]) * 0.3 for name, key in keys.items()}


SHAPES = {"gate": (8, 12), "up": (8, 12), "down": (12, 8), "router": (8, 4), "both": (2, 8, 8)}
X = jax.random.normal(jax.random.key(1), (6, 8))
GIVEN = {"mask": jnp.array([1.0, 1, 0, 1, 1, 0])}
LAYERS = {"dense": (dense, ("gate", "up", "down", "router")), "scanned": (scanned, ("both",))}


def cut(name, remat="none"):
    layer, names = LAYERS[name]
    layer = layer if remat == "none" else jax.checkpoint(layer, policy=REMAT_POLICIES[remat], prevent_cse=False)
    params = arrays(names, SHAPES)
    return layer, params, SplitLayer(layer, params, GIVEN, X, 0.25)


def run(split, params, x, dy):
    y, stats, keep_b, keep_w = split.forward(params, GIVEN, x)
    dx, stash = split.backward(params, GIVEN, keep_b, keep_w, dy)
    return y, stats, dx, split.weight(params, GIVEN, keep_w, stash)


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_sections_together_are_the_vjp(name, remat):
    layer, params, split = cut(name, remat)
    x, dy = X * 0.7, jnp.cos(X)
    (y, loss), pull, stats = jax.vjp(lambda p, x: ((out := layer(p, GIVEN, x))[:2], out[2]), params, x, has_aux=True)
    dp, dx = pull((dy, None if loss is None else jnp.float32(0.25)))
    got = jax.jit(lambda *args: run(split, *args))(params, x, dy)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves((y, stats, dx, dp)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def num_products(function, *args):
    return str(jax.make_jaxpr(function)(*args)).count("dot_general")


def test_b_multiplies_no_weights_gradient_and_w_nothing_else():
    """Four products forward; four for the input's gradient (one of them the router's), four for the weights'."""
    _, params, split = cut("dense")
    _, _, keep_b, keep_w = split.forward(params, GIVEN, X)
    _, stash = split.backward(params, GIVEN, keep_b, keep_w, X)
    assert num_products(split.forward, params, GIVEN, X) == 4
    assert num_products(split.backward, params, GIVEN, keep_b, keep_w, X) == 4
    assert num_products(split.weight, params, GIVEN, keep_w, stash) == 4
    assert split.weight_reads() == [False] * 4


def test_recomputing_keeps_the_input_alone_until_b():
    split = cut("dense", "full")[2]
    kept = split.kept()
    assert [v.shape for v in kept["keep_b"] + kept["keep_w"]] == [X.shape]
    assert sum(np.prod(v.shape) for v in cut("dense")[2].kept()["keep_w"]) > X.size


def test_a_loop_in_the_layer_is_not_cut_and_still_right():
    split = cut("scanned")[2]
    assert split.kept()["stash"]


def test_what_depends_on_parameters_alone_is_not_kept():
    """Casts of weights are made again in each section."""

    def cast(params, given, x):
        return x + (x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)).astype(x.dtype), None, None

    split = SplitLayer(cast, {"w": jnp.ones((8, 8))}, {}, X, 1.0)
    assert all(v.shape == X.shape for kept in split.kept().values() for v in kept)


def test_an_output_unlike_the_input_is_refused():
    with pytest.raises(ValueError, match=r"layer output bfloat16\[6, 8\].*must be like its input, float32\[6, 8\]"):
        SplitLayer(lambda p, g, x: (x.astype(jnp.bfloat16) * p["w"].astype(jnp.bfloat16), None, None), {"w": X}, {}, X, 1.0)
