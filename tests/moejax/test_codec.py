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


@hypothesis.given(hnp.arrays(np.float32, (3, 4), elements=floats))
def test_plain_is_exact_and_bf16_within_its_bound(rows):
    there = {
        name: codec.decode(codec.encode(jnp.asarray(rows)), jnp.dtype("float32")) for name, codec in CODECS.items()
    }
    np.testing.assert_array_equal(there["plain"], rows)
    assert (np.abs(there["bf16"] - rows) <= 2.0**-8 * np.abs(rows)).all()
    assert there["bf16"].dtype == jnp.float32


def test_encoded_rows_are_integers_of_two_bytes():
    (wire,) = CODECS["bf16"].encode(jnp.ones((2, 3)))
    assert (wire.dtype, wire.shape) == (jnp.uint16, (2, 3))


def _crossing(codecs):
    swap = functools.partial(lax.all_to_all, axis_name="ep", tiled=True)
    there = functools.partial(swap, split_axis=0, concat_axis=1)
    back = functools.partial(swap, split_axis=1, concat_axis=0)
    cross = lambda rows: carry(rows, there, back, codecs)
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Auto,))
    return jax.shard_map(cross, mesh=mesh, in_specs=P(None, "ep"), out_specs=P("ep"))


def _rounded(value, name):
    return value if name == "plain" else value.astype(jnp.bfloat16).astype(jnp.float32)


@pytest.mark.parametrize("forward", CODECS)
@pytest.mark.parametrize("backward", CODECS)
def test_each_direction_uses_its_own(forward, backward):
    rng = np.random.default_rng(0)
    rows, cotangent = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 4, 3), (8, 4, 3)))
    exact, exact_pull = jax.vjp(_crossing(("plain", "plain")), rows)
    got, pull = jax.vjp(_crossing((forward, backward)), rows)
    np.testing.assert_array_equal(got, _rounded(exact, forward))
    np.testing.assert_array_equal(pull(cotangent)[0], _rounded(exact_pull(cotangent)[0], backward))


@functools.cache
def _layer(exchange, codec):
    layer = grid.LAYERS["shared"]
    return dataclasses.replace(layer, cfg=dataclasses.replace(layer.cfg, exchange=exchange, codec=codec))


def _worst(got, want):
    return np.abs(np.asarray(got) - np.asarray(want)).max() / np.abs(np.asarray(want)).max()


CODED = [
    ("all_to_all", ("plain", "bf16")),
    ("all_to_all", ("bf16", "plain")),
    ("all_gather", ("plain", "bf16")),
    ("all_gather", "bf16"),
]


@pytest.mark.parametrize(("exchange", "codec"), CODED)
def test_a_layer_under_a_codec_is_the_plain_one_rounded(exchange, codec):
    where = grid.place("data2_expert4")
    layer, inputs = _layer(exchange, codec), grid.draw(_layer(exchange, codec), 5, "random", "random")
    got, want = grid.run(layer, where, inputs.garbage()), grid.reference(_layer("all_to_all", "plain"), inputs)
    forward, backward = layer.cfg.codecs
    grid.assert_replicas_equal(got)
    grid.assert_close(got, {**want, "stats": got["stats"]}, 2.0**-5)  # a rounded row passes through a product of three
    np.testing.assert_array_equal(got["stats"].tokens_per_expert, want["stats"].tokens_per_expert)
    assert (_worst(got["y"], want["y"]) <= grid.TOLERANCE) == (forward == "plain")
    assert (_worst(got["d_x"], want["d_x"]) > 1e-4) == ("bf16" in (forward, backward))


@pytest.mark.parametrize(
    ("codec", "dtypes"),
    [("plain", {"f32": 4}), (("plain", "bf16"), {"f32": 2, "u16": 2}), ("bf16", {"u16": 4})],
    ids=str,
)
def test_encoded_rows_cross_as_two_bytes(codec, dtypes):
    layer, where = _layer("all_to_all", codec), grid.place("expert8")
    args = where.put(layer.cfg, grid.draw(layer, 0, "random", "none"))
    with jax.set_mesh(where.mesh):
        text = jax.jit(functools.partial(grid.step, layer.cfg, where.rules)).lower(*args).compile().as_text()
    crossed = hlo.collectives(text, "all-to-all")
    assert {name: crossed.count(name) for name in set(crossed)} == dtypes
