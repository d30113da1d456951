"""The feed-forward of rows that stand one after another: as one pass over tiles it is the grouped products' composition."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import hlo
from moejax.experts import GATED
from moejax.flat_feed_forward import flat_feed_forward
from tests.moejax.grid import assert_close

# Heights of tiles go up to 512: room for a whole one and for what is left.
R, G, D, F = 700, 5, 3, 7


def _draw(gated, dtype="float32") -> tuple[Any, ...]:
    """Rows, the factors of outputs (some zero), the matrices, and the outputs' cotangent."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    weight = jnp.asarray(rng.random(R) * (np.arange(R) % 7 > 0), jnp.float32)
    return normal(R, D), weight, (normal(G, D, F) if gated else None, normal(G, D, F), normal(G, F, D)), normal(R, D)


def _of(activation, composed_of=None):
    """(rows, weight, matrices, cotangent, group sizes) -> the output and the gradients, compiled."""

    def run(rows, weight, matrices, cotangent, sizes):
        y, pull = jax.vjp(lambda *args: flat_feed_forward(args[0], sizes, *args[1:], activation), rows, weight, matrices)
        return y, pull(cotangent)

    if composed_of is None:
        return jax.jit(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("moejax.grouped_matmul"), "choose", lambda *_: composed_of)
        return jax.jit(run).lower(*_draw(activation in GATED), jnp.zeros(G, jnp.int32)).compile()


RUNS = {activation: (_of(activation), _of(activation, "ragged_dot")) for activation in ("swiglu", "relu2")}


@pytest.mark.parametrize("activation", RUNS)
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, R), min_size=G, max_size=G))
def test_outputs_and_gradients_are_the_composition_of_grouped_products(activation, cuts):
    ends = np.sort(cuts)
    sizes = jnp.asarray(np.diff(ends, prepend=0), jnp.int32)
    rows, *rest = _draw(activation in GATED)
    poisoned = rows.at[ends[-1] :].set(jnp.nan)
    tiled, composed = RUNS[activation]
    got, want = tiled(poisoned, *rest, sizes), composed(poisoned, *rest, sizes)
    assert_close(got, want)
    for matrix in jax.tree.leaves(got[1][2]):
        assert not np.asarray(matrix)[np.asarray(sizes) == 0].any(), "an expert without rows has a gradient of zeros"
    assert not np.asarray(got[0])[ends[-1] :].any()


@pytest.mark.parametrize("kernel", ["pallas_tpu", "pallas_gpu"])
@pytest.mark.parametrize("activation", RUNS)
def test_the_pallas_kernels_make_the_same(kernel, activation):
    rows, *rest = _draw(activation in GATED)
    sizes = jnp.asarray([R // 2, 0, 3, 100, 60], jnp.int32)
    poisoned = rows.at[R // 2 + 163 :].set(jnp.nan), rest[0].at[R // 2 + 163 :].set(jnp.nan)
    got, want = (run(*poisoned, *rest[1:], sizes) for run in (_of(activation, kernel), RUNS[activation][0]))
    assert_close(got, want)


def test_bfloat16_is_near_float32():
    rows, weight, matrices, cotangent = _draw(True, "bfloat16")
    sizes = jnp.asarray([R // 2, 0, 3, 100, 60], jnp.int32)
    wide = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
    got = wide(_of("swiglu")(rows, weight, matrices, cotangent, sizes))
    want = RUNS["swiglu"][0](*wide((rows, weight, matrices, cotangent)), sizes)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(np.asarray(a - b)).max() <= 0.03 * np.abs(np.asarray(b)).max()


def test_a_row_without_weight_adds_nothing_even_where_its_activation_overflows():
    rows, weight, matrices, cotangent = _draw(True)
    sizes = jnp.asarray([R // 2, 0, 3, 100, 60], jnp.int32)
    huge = jnp.where(weight[:, None] == 0, 1e38, rows)
    got, want = (
        RUNS["swiglu"][0](x, weight, matrices, cotangent, sizes) for x in (huge, jnp.where(weight[:, None] == 0, 0, rows))
    )
    assert_close((got[0], got[1][0], got[1][2]), (want[0], want[1][0], want[1][2]))


def test_nothing_of_the_experts_width_is_made_for_all_rows_but_what_is_kept():
    arguments = (*_draw(True), jnp.zeros(G, jnp.int32))
    text = jax.jit(lambda *args: _of("swiglu")(*args)).lower(*arguments).compile().as_text()
    entry = hlo.parse(text).computations[hlo.parse(text).entry]
    wide = [
        one for one in entry if one.type_text.startswith(f"f32[{R},{F}]") and one.op not in ("get-tuple-element", "bitcast")
    ]
    assert len(wide) == 2, [one.name for one in wide]
    forward = jax.jit(lambda x, w, m, s: flat_feed_forward(x, s, w, m, "swiglu")).lower(*arguments[:3], arguments[4])
    assert f"f32[{R},{F}]" not in str(forward.compile().as_text())
