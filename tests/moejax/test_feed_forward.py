"""The experts' feed-forward: its own backward is that of jax, it keeps what it says, and rows without weight are nothing."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import axes as ax
from moejax.experts import GATED
from moejax.feed_forward import NONLINEARITY, feed_forward
from tests.moejax.grid import assert_close
from tests.moejax.oracle import JAX_ACT

E, R, D, F = 3, 5, 4, 6


def _draw(activation, experts=(E,), seed=0) -> tuple[Any, ...]:
    """Rows, their weights (the last one's zero), and the matrices by name."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=(*experts, *shape)), jnp.float32)
    weight = jnp.abs(normal(R)).at[..., -1].set(0)
    gate = normal(D, F) if activation in GATED else None
    return normal(R, D), weight, gate, normal(D, F), normal(F, D)


def _plainly(rows, weight, gate, up, down, activation):
    act, hidden = JAX_ACT[activation], jnp.matmul(rows, up)
    hidden = act(hidden) if gate is None else act(jnp.matmul(rows, gate)) * hidden
    return jnp.matmul(hidden, down) * (1 if weight is None else weight[..., None])


def _out_and_gradients(function, arguments, activation):
    y, pull = jax.vjp(functools.partial(function, activation=activation), *arguments)
    return y, pull(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype))


@pytest.mark.parametrize("activation", NONLINEARITY)
@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("experts", [(), (E,)], ids=["one", "many"])
def test_outputs_and_gradients_are_those_of_the_plain_formula(activation, weigh, experts):
    rows, weight, *matrices = _draw(activation, experts)
    arguments = (rows, weight if weigh else None, *matrices)
    got, want = (_out_and_gradients(function, arguments, activation) for function in (feed_forward, _plainly))
    assert_close(got, want)
    assert (got[1][1] is None) != weigh


def test_all_orders_of_the_backward_give_one_answer(monkeypatch):
    """Hardware and shape choose: here experts that are more wide than long."""
    arguments = _draw("swiglu")
    run = lambda: _out_and_gradients(feed_forward, arguments, "swiglu")
    found, texts = {}, {}
    for platform in ("cpu", "tpu", "gpu"):
        monkeypatch.setattr(ax, "platform", lambda platform=platform: platform)
        found[platform] = run()
        texts[platform] = str(jax.make_jaxpr(lambda: run())())  # of its own: jax keeps what it traced of a function
    assert_close(found["cpu"], found["tpu"])
    assert_close(found["gpu"], found["tpu"])
    assert {name: text.count("optimization_barrier") for name, text in texts.items()} == {"cpu": 5, "tpu": 5, "gpu": 4}
    assert {name: "scan[" in text for name, text in texts.items()} == {"cpu": True, "tpu": False, "gpu": False}


@pytest.mark.parametrize("activation", NONLINEARITY)
def test_a_row_without_weight_adds_nothing_even_where_its_activation_overflows(activation):
    rows, weight, *matrices = _draw(activation)
    huge = rows.at[:, -1].set(1e38)
    assert not np.isfinite(np.asarray(huge @ matrices[1])).all()
    y, (d_rows, d_weight, *d_matrices) = _out_and_gradients(feed_forward, (huge, weight, *matrices), activation)
    assert not np.asarray(y[:, -1]).any()
    assert not np.asarray(d_rows[:, -1]).any()
    short = tuple(part[:, :-1] for part in (rows, weight))
    ended = lambda *given, activation: jnp.pad(feed_forward(*given, activation), ((0, 0), (0, 1), (0, 0)))
    want = _out_and_gradients(ended, (*short, *matrices), activation)
    assert_close((y, d_rows[:, :-1], d_weight[:, :-1], d_matrices), (want[0], *want[1][:2], list(want[1][2:])))


@pytest.mark.parametrize("activation", NONLINEARITY)
def test_neither_activation_nor_output_is_kept(activation):
    """Rows, weights, matrices and a product for each matrix into the hidden width."""
    arguments = _draw(activation)
    _, pull = jax.vjp(functools.partial(feed_forward, activation=activation), *arguments)
    num_products = 2 if activation in GATED else 1
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(pull))
    assert shapes == sorted([(E, R, D), (E, R), (E, F, D)] + [(E, D, F), (E, R, F)] * num_products)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_floats_keep_their_dtype(dtype):
    rows, weight, *matrices = _draw("swiglu")
    small = (rows.astype(dtype), weight, *(part.astype(dtype) for part in matrices))
    got, want = (_out_and_gradients(feed_forward, given, "swiglu") for given in (small, (rows, weight, *matrices)))
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [jnp.dtype(dtype)] * 2 + [jnp.float32] + [jnp.dtype(dtype)] * 3
    assert_close(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), got), want, 2.0**-5)
