"""Codecs: how exact they are, that forward and backward each use their own, and what really crosses the wire."""

import dataclasses
import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moejax.codec import CODECS, carry
from tests.moejax import grid, hlo

floats = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


# Each codec's promise: error of a number at most this share of it, plus this share of its row's largest.
BOUNDS = {
    "plain": ((0.0, 0.0), (0.0, 0.0)),
    "bf16": ((2.0**-8, 0.0), (2.0**-8, 0.0)),
    "int8": ((2.0**-20, 1 / 254), (2.0**-20, 1 / 254)),
    "fp8": ((2.0**-4, 2.0**-19), (2.0**-3, 2.0**-32)),
}
DIRECTIONS = {"forward": 0, "backward": 1}


def _recoded(rows, name, direction):
    codec = CODECS[name][DIRECTIONS[direction]]
    return codec.decode(codec.encode(jnp.asarray(rows)), jnp.dtype("float32"))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_errors_are_within_the_stated_bounds(name, direction):
    own, row = BOUNDS[name][DIRECTIONS[direction]]

    @hypothesis.given(hnp.arrays(np.float32, (3, 4), elements=floats))
    def check(rows):
        got = _recoded(rows, name, direction)
        assert got.dtype == jnp.float32
        assert (np.abs(got - rows) <= (own * np.abs(rows) + row * np.abs(rows).max(1, keepdims=True)) * (1 + 1e-6)).all()

    check()


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_zeros_and_garbage_stays_in_its_row(name):
    rows = np.array([[0, 0, 0], [1, 2, -4], [np.nan, 1, 2]], np.float32)
    got = np.asarray(_recoded(rows, name, "forward"))
    assert not got[0].any()
    np.testing.assert_allclose(got[1], rows[1], rtol=2.0**-4, atol=4 / 254)
    assert np.isnan(got[2, 0])


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("size", [1e-34, 1e-37])
def test_tiny_rows_are_no_garbage(name, direction, size):
    """A confident router makes cotangents this small; their scale must not round to zero."""
    got = np.asarray(_recoded(np.array([[size, -size / 2]], np.float32), name, direction))
    assert (np.abs(got) <= 1.1 * size).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_bytes_of_a_row_are_those_that_travel(name, direction):
    codec = CODECS[name][DIRECTIONS[direction]]
    wire = codec.encode(jnp.ones((5, 64)))
    assert sum(part.nbytes for part in wire) == 5 * codec.row_bytes(64, jnp.dtype("float32"))
    assert name == "plain" or jnp.issubdtype(wire[0].dtype, jnp.integer)


def _crossing(codecs):
    swap = functools.partial(lax.all_to_all, axis_name="ep", tiled=True)
    there = functools.partial(swap, split_axis=0, concat_axis=1)
    back = functools.partial(swap, split_axis=1, concat_axis=0)
    cross = lambda rows: carry(rows, there, back, codecs)
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Auto,))
    return jax.shard_map(cross, mesh=mesh, in_specs=P(None, "ep"), out_specs=P("ep"))


def _rounded(value, name, direction):
    """What a row is after a crossing: every row crosses once, so the order of rows does not matter."""
    return _recoded(value, name, direction)


@pytest.mark.parametrize(("forward", "backward"), [("plain", "fp8"), ("bf16", "int8"), ("int8", "plain"), ("fp8", "bf16")])
def test_each_direction_uses_its_own(forward, backward):
    rng = np.random.default_rng(0)
    rows, cotangent = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 4, 3), (8, 4, 3)))
    exact, exact_pull = jax.vjp(_crossing(("plain", "plain")), rows)
    got, pull = jax.vjp(_crossing((forward, backward)), rows)
    np.testing.assert_array_equal(got, _rounded(exact, forward, "forward"))
    np.testing.assert_array_equal(pull(cotangent)[0], _rounded(exact_pull(cotangent)[0], backward, "backward"))


@functools.cache
def _layer(exchange, codec, **form):
    layer = grid.LAYERS["shared"]
    return dataclasses.replace(layer, cfg=dataclasses.replace(layer.cfg, exchange=exchange, codec=codec, **form))


def _worst(got, want):
    return np.abs(np.asarray(got) - np.asarray(want)).max() / np.abs(np.asarray(want)).max()


CODED = [
    ("all_to_all", "int8"),
    ("all_to_all", "fp8"),
    ("all_to_all", ("plain", "bf16")),
    ("all_to_all", ("bf16", "plain")),
    ("all_gather", ("plain", "bf16")),
    ("all_gather", "bf16"),
    ("ragged", ("int8", "fp8")),
]
APART = {"weigh_at": "expert", "exchange_by": "expert"}


# Of a layer's largest entry: a rounded row passes through a product of three.
TOLERANCE = {"plain": grid.TOLERANCE, "bf16": 2.0**-5, "int8": 2.0**-4, "fp8": 2.0**-1}


@pytest.mark.parametrize(("exchange", "codec", "form"), [*((*coded, {}) for coded in CODED), ("all_to_all", "int8", APART)])
def test_a_layer_under_a_codec_is_the_plain_one_rounded(exchange, codec, form):
    where, layer = grid.place("data2_expert4"), _layer(exchange, codec, **form)
    inputs = grid.draw(layer, 5, "random", "random")
    got, want = grid.run(layer, where, inputs.garbage()), grid.reference(_layer("all_to_all", "plain"), inputs)
    forward, backward = layer.cfg.codecs
    grid.assert_replicas_equal(got)
    grid.assert_close(got, {**want, "stats": got["stats"]}, TOLERANCE[max(layer.cfg.codecs, key=TOLERANCE.get)])
    np.testing.assert_array_equal(got["stats"].tokens_per_expert, want["stats"].tokens_per_expert)
    assert (_worst(got["y"], want["y"]) <= grid.TOLERANCE) == (forward == "plain")
    assert (_worst(got["d_x"], want["d_x"]) > 1e-4) == ((forward, backward) != ("plain", "plain"))


@pytest.mark.parametrize(
    ("codec", "form", "dtypes"),
    [
        ("plain", {}, {"f32": 4}),
        (("plain", "bf16"), {}, {"f32": 2, "u16": 2}),
        ("bf16", {}, {"u16": 4}),
        ("bf16", {"weigh_at": "expert"}, {"u16": 4, "f32": 2}),  # weights are not rounded
        ("int8", {}, {"s8": 4, "f32": 4}),
    ],
    ids=str,
)
def test_encoded_rows_cross_as_integers(codec, form, dtypes):
    layer, where = _layer("all_to_all", codec, **form), grid.place("expert8")
    args = where.put(layer.cfg, grid.draw(layer, 0, "random", "none"))
    with jax.set_mesh(where.mesh):
        text = jax.jit(functools.partial(grid.step, layer.cfg, where.rules)).lower(*args).compile().as_text()
    crossed = hlo.collectives(text, "all-to-all")
    assert {name: crossed.count(name) for name in set(crossed)} == dtypes
