"""grouped_matmul against a float64 loop over groups: every implementation, forward and both gradients."""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.grouped_matmul import IMPLEMENTATIONS, grouped_glu, grouped_matmul, grouped_outer, grouped_part
from moejax.kernels import tile_map
from moejax.kernels.choice import TABLE, choose
from moejax.kernels.rows import Rows

CAPACITY = 7  # some groups are larger in every load but "even": both ways of "capacity" are walked
# M rows, K, N: nothing that a tile divides; fewer rows than the lowest tile; a tile and one row more; more than one
# tile of "pallas_gpu" in every direction.
SHAPES = {"odd": (37, 5, 11), "few": (3, 8, 4), "over": (65, 16, 24), "broad": (50, 130, 140)}
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


def _sizes(load, num_rows):
    """Rows of five groups: `tail` leaves rows that belong to none."""
    return {
        "even": [num_rows // 5] * 5,
        "all": [0, 0, num_rows, 0, 0],
        "one": [1, 0, num_rows - 2, 1, 0],
        "tail": [num_rows // 3, 0, 1, num_rows // 4, 0],
        "none": [0] * 5,
    }[load]


def _case(shape, load, dtype, *, indexed=False, scaled=False):
    """Arguments with poisoned tails, the cotangent poisoned too."""
    num_rows, k, n = SHAPES[shape]
    rng = np.random.default_rng(0)
    sizes = np.asarray(_sizes(load, num_rows), np.int32)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    x, w, dy = draw(num_rows, k), draw(5, k, n) / np.sqrt(k), draw(num_rows, n)
    index = scale = None
    if indexed:
        # Tokens are read several times, some never; one past the end is an empty row.
        index = rng.integers(0, num_rows // 2 + 1, num_rows).astype(np.int32)
        x = x[: num_rows // 2]
    else:
        x[sizes.sum() :] = np.nan
    dy[sizes.sum() :] = np.nan
    if scaled:
        scale = draw(num_rows)
        scale[sizes.sum() :] = np.nan
    cast = lambda a: None if a is None else jnp.asarray(a, dtype if a.dtype.kind == "f" else None)
    return [cast(a) for a in (x, w, sizes, index, scale, dy)]


def _loop(x, w, sizes, index, scale, dy):
    """(y, dx, dw, dscale) in float64, a group at a time, a row at a time where rows are read by index."""
    x, w, scale, dy = (None if a is None else np.asarray(a, np.float64) for a in (x, w, scale, dy))
    index = np.arange(len(dy)) if index is None else np.asarray(index)
    factor = np.ones(len(dy)) if scale is None else scale
    y, dx, dw, dscale = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w), np.zeros(len(dy))
    row = 0
    for group, size in enumerate(np.asarray(sizes)):
        for r in range(row, row + size):
            if index[r] == len(x):
                continue
            plain = x[index[r]] @ w[group]
            y[r] = factor[r] * plain
            dx[index[r]] += factor[r] * (w[group] @ dy[r])
            dw[group] += factor[r] * np.outer(x[index[r]], dy[r])
            dscale[r] = plain @ dy[r]
        row += size
    return y, dx, dw, dscale


def _options(implementation):
    if implementation == "tokamax":
        pytest.importorskip("tokamax", reason="the extra 'tokamax' is not installed")
    return {"implementation": implementation} | ({"max_group_size": CAPACITY} if implementation == "capacity" else {})


def _both(case, **options):
    """(y, dx, dw, dscale) of grouped_matmul, group sizes traced."""

    @jax.jit
    def run(x, w, sizes, index, scale, dy):
        call = lambda x, w, scale: grouped_matmul(x, w, sizes, token_index=index, row_scale=scale, **options)
        y, pull = jax.vjp(call, x, w, scale)
        return y, *pull(dy.astype(y.dtype))

    return run(*case)


def _assert_close(got, want, tolerance):
    for name, a, b in zip(("y", "dx", "dw", "dscale"), got, want, strict=True):
        if a is not None:
            a = np.asarray(a, np.float64)
            np.testing.assert_array_less(abs(a - b).max(), tolerance * max(1, abs(b).max()), name)


def _check(implementation, shape, load, dtype, **kind):
    case = _case(shape, load, dtype, **kind)
    got, want = _both(case, **_options(implementation)), _loop(*case)
    assert {a.dtype for a in got[:3]} == {jnp.dtype(dtype)}
    _assert_close(got, want, TOLERANCE[dtype])
    assert not np.asarray(got[2], np.float32)[np.asarray(case[2]) == 0].any(), "an empty group's gradient is zero"


@pytest.mark.parametrize("load", ["even", "all", "one", "tail", "none"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_loads(implementation, load):
    _check(implementation, "odd", load, "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("shape", "kind"), [("few", {}), ("broad", {"indexed": True, "scaled": True})])
def test_shapes(implementation, shape, kind):
    _check(implementation, shape, "tail", "float32", **kind)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16(implementation):
    _check(implementation, "odd", "one", "bfloat16", indexed=True)


@pytest.mark.parametrize("implementation", ["tiles", "pallas_gpu", "pallas_tpu"])
def test_float8(implementation):
    """Operands of one byte, sums in float32: the result is exact for rounded operands; gradients round to a byte."""
    case = _case("odd", "one", "float8_e4m3fn")
    got, want = _both(case, preferred_element_type=jnp.float32, **_options(implementation)), _loop(*case)
    _assert_close((got[0], None, None, None), want, 2e-6)
    _assert_close((None, *got[1:]), want, 2**-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, {"indexed": True}, {"scaled": True}, {"indexed": True, "scaled": True}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("load", ["even", "all", "one", "tail", "none"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_grid(implementation, shape, load, dtype, kind):
    _check(implementation, shape, load, dtype, **kind)


@given(st.lists(st.integers(0, 30), min_size=5, max_size=5), st.integers(0, 60))
def test_any_sizes(sizes, cut):
    """Whatever the sizes, rows beyond them included; one compilation for all."""
    num_rows = 65
    ends = np.minimum(np.cumsum(sizes), num_rows - cut)
    sizes = np.diff(ends, prepend=0).astype(np.int32)
    case = _case("over", "none", "float32", indexed=True, scaled=True)
    case[2] = jnp.asarray(sizes)
    case[4], case[5] = jnp.nan_to_num(case[4], nan=0.5), jnp.nan_to_num(case[5], nan=-0.25)
    _assert_close(_run_any(*case), _loop(*case), 2e-6)


@pytest.mark.parametrize("implementation", ["tiles", "pallas_gpu", "pallas_tpu"])
def test_glu(implementation):
    """In one pass or in two products: the same, gradients included."""
    x, gate, sizes, index, _, dy = _case("odd", "tail", "float32", indexed=True)
    up = jnp.asarray(np.random.default_rng(1).normal(size=gate.shape), jnp.float32)

    def run(x, gate, up, implementation):
        call = lambda *a: grouped_glu(*a, sizes, jax.nn.gelu, token_index=index, implementation=implementation)
        y, pull = jax.vjp(call, x, gate, up)
        return y, call(x, gate, up), *pull(jnp.nan_to_num(dy) if implementation == "reference" else dy)

    run = jax.jit(run, static_argnums=3)
    for got, want in zip(run(x, gate, up, implementation), run(x, gate, up, "reference"), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


MAPPED_ROWS, HEIGHT = 65, 16


@given(st.lists(st.integers(0, 40), min_size=5, max_size=5), st.integers(0, 60))
def test_maps_cover_each_row_once(sizes, cut):
    """(group, row) pairs: each of the true ones exactly once, and no other."""
    ends = np.minimum(np.cumsum(sizes), MAPPED_ROWS - cut)
    sizes = np.diff(ends, prepend=0).astype(np.int32)
    want = [(group, row) for row, group in enumerate(np.repeat(np.arange(6), [*sizes, MAPPED_ROWS - sizes.sum()]))]
    tiles, plan, every = jax.device_get(_maps(jnp.asarray(sizes)))
    for tile in tiles:
        assert (tile.stop - tile.start <= HEIGHT).all()
        pairs = zip(tile.group, tile.start, tile.stop, strict=True)
        assert sorted((g, r) for g, start, stop in pairs for r in range(start, stop)) == sorted(want)
    assert _visited(plan) == want
    assert _visited(every) == [pair for pair in want if pair[0] < 5]
    assert set(every.group[: every.num_visits[0]]) == set(range(5)), "a group without rows is visited too"


@jax.jit
def _maps(sizes):
    rows = Rows(sizes, None, MAPPED_ROWS)
    tiles = [tile_map.tile_map(rows, HEIGHT, order) for order in tile_map.ORDERS]
    return tiles, tile_map.visits(rows, HEIGHT), tile_map.visits(rows, HEIGHT, every_group=True)


def _visited(plan):
    visits = list(zip(plan.group, plan.tile, strict=True))[: plan.num_visits[0]]
    rows = lambda group, tile: range(
        max(plan.start[group], tile * HEIGHT), min(plan.stop[group], (tile + 1) * HEIGHT, MAPPED_ROWS)
    )
    return [(group, row) for group, tile in visits for row in rows(group, tile)]


def test_a_bound_may_be_far_off():
    """With no implementation named it is a hint: where padding to it would be most of the work, none is done."""
    x, w, sizes, *_ = _case("odd", "one", "float32")
    lowered = lambda bound: jax.jit(lambda x, w, n: grouped_matmul(x, w, n, max_group_size=bound)).lower(x, w, sizes)
    assert "f32[5,37," not in lowered(37).as_text("hlo")
    assert "f32[5,8," in lowered(8).as_text("hlo")


def test_orders():
    """Fullest first; fullest and emptiest in turn; the rows of no group last."""
    rows = Rows(jnp.asarray([1, 5, 0, 3, 4]), None, 20)
    first = lambda order: tile_map.tile_map(rows, HEIGHT, order).group[:5].tolist()
    assert first("natural") == [0, 1, 3, 4, 5]
    assert first("desc") == [1, 4, 3, 0, 5]
    assert first("interleave") == [1, 4, 0, 3, 5]


def test_orders_give_one_answer():
    x, w, sizes, *_ = _case("odd", "one", "float32")
    call = lambda order: grouped_matmul(x, w, sizes, implementation="pallas_gpu", group_order=order)
    for order in tile_map.ORDERS[1:]:
        np.testing.assert_array_equal(jax.jit(call, static_argnums=0)(order), call("natural"))


def test_choice():
    """No table line is ragged_dot's dense product; kernels only get what they take."""
    ask = lambda platform, dtype="bfloat16", size=8, padding=None: choose(platform, (dtype, dtype), (size, 8), padding)
    assert (ask("cpu"), ask("gpu"), ask("tpu")) == ("tiles", "pallas_gpu", "pallas_tpu")
    assert ask("gpu", "float64") == ask("tpu", "float16") == ask("gpu", size=0) == "tiles"
    assert (ask("gpu", size=2**31), ask("gpu", size=2**31 + 1)) == ("pallas_gpu", "tiles")
    assert (ask("cpu", padding=1.2), ask("cpu", padding=8.0)) == ("capacity", "tiles")
    assert {line.implementation for line in TABLE} <= set(IMPLEMENTATIONS) - {"reference", "ragged_dot", "tokamax"}


@pytest.mark.parametrize("implementation", ["pallas_gpu", "pallas_tpu"])
def test_kernels_decline(implementation):
    call = lambda x, w: grouped_matmul(x, w, jnp.zeros(2, jnp.int32), implementation=implementation)
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="has no product of float64"):
        call(jnp.zeros((4, 2), jnp.float64), jnp.zeros((2, 2, 2), jnp.float64))
    with pytest.raises(NotImplementedError, match="one is empty"):
        call(jnp.zeros((0, 2)), jnp.zeros((2, 2, 2)))


# More places than int32 counts: in x, in w, in the result, in the gradient of the rows that few rows of x are read as.
HUGE = [
    ((2**21, 2048), (2, 2048, 8), None),
    ((8, 2**16), (2**9, 2**16, 128), None),
    ((2**20, 16), (1, 16, 4096), None),
    ((8, 2049), (1, 2049, 4), 2**20),
]


@pytest.mark.parametrize(("x", "w", "num_rows"), HUGE)
def test_gpu_kernel_declines_what_it_cannot_address(x, w, num_rows):
    """Before anything is compiled; with none named, the table has other means."""
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in (x, w))
    whole = lambda *shape: jax.ShapeDtypeStruct(shape, "int32")
    index = None if num_rows is None else whole(num_rows)

    def run(x, w, sizes, index):
        call = lambda x, w: grouped_matmul(x, w, sizes, token_index=index, implementation="pallas_gpu")
        y, pull = jax.vjp(call, x, w)
        return pull(y)

    with pytest.raises(NotImplementedError, match=r"'pallas_gpu' with an array of .* numbers, it addresses 2147483648 at most"):
        jax.eval_shape(run, x, w, whole(w.shape[0]), index)


@pytest.mark.skipif(importlib.util.find_spec("tokamax") is not None, reason="it is installed")
def test_tokamax_declines_where_it_is_not_installed():
    with pytest.raises(NotImplementedError, match=r"^'tokamax' is not installed: pip install 'moejax\[tokamax\]'"):
        grouped_matmul(jnp.ones((4, 2)), jnp.ones((2, 2, 3)), jnp.asarray([1, 2]), implementation="tokamax")


def test_tokamax_declines_what_it_cannot_compile(monkeypatch):
    """It has kernels for the devices of this process only; ahead of time that is another platform's mesh."""
    _options("tokamax")
    monkeypatch.setattr("moejax.axes.platform", lambda: "gpu")
    with pytest.raises(NotImplementedError, match=r"^'tokamax' has no kernel for \(4, 2\) and \(2, 2, 3\) on gpu: "):
        grouped_matmul(jnp.ones((4, 2)), jnp.ones((2, 2, 3)), jnp.asarray([1, 2]), implementation="tokamax")


@jax.jit
def _run_any(x, w, sizes, index, scale, dy):
    call = lambda x, w, scale: grouped_matmul(x, w, sizes, token_index=index, row_scale=scale, implementation="tiles")
    y, pull = jax.vjp(call, x, w, scale)
    return y, *pull(dy)


def test_inside_shard_map():
    """Rows differ over shards and weights do not: their gradients add up over the shards."""
    x, w, sizes, index, scale, dy = _case("odd", "all", "float32", scaled=True)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    two = lambda a: jnp.concatenate([a, a])

    def loss(x, w, scale):
        y = grouped_matmul(x, w, sizes, row_scale=scale, implementation="tiles")
        return jax.lax.psum((y * dy).sum(), "data")

    split = jax.P("data")
    run = jax.shard_map(
        jax.grad(loss, argnums=(0, 1, 2)),
        mesh=mesh,
        in_specs=(split, jax.P(), split),
        out_specs=(split, jax.P(), split),
    )
    dx, dw, dscale = jax.jit(run)(two(x), w, two(scale))
    _, want_dx, want_dw, want_dscale = _loop(x, w, sizes, index, scale, dy)
    want = None, np.concatenate([want_dx] * 2), 2 * want_dw, np.concatenate([want_dscale] * 2)
    _assert_close((None, dx, dw, dscale), want, 2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "tile"}, "did you mean 'tiles'"),
        ({"group_sizes": jnp.asarray([20, 18, 0, 0, 0])}, "add up to 38: needs at most the 37 rows"),
        ({"group_sizes": np.asarray([20, -1, 0, 0, 0])}, "has -1 for group 1"),
        ({"group_sizes": jnp.zeros(5)}, "group_sizes float32"),
        ({"group_sizes": jnp.zeros(4, jnp.int32)}, r"needs integers of shape \(5,\)"),
        ({"token_index": jnp.zeros(3)}, "token_index float32"),
        ({"row_scale": jnp.zeros(3)}, r"row_scale float32\(3,\): needs floating point of shape \(37,\)"),
        ({"w": jnp.zeros((5, 6, 2))}, r"needs \[M, K\] and \[G, K, N\]"),
        ({"x": jnp.zeros((37, 5), jnp.int32), "implementation": "tiles"}, "x of dtype int32"),
        ({"max_group_size": 4, "implementation": "tiles"}, "max_group_size=4 with 'tiles'"),
        ({"implementation": "capacity"}, "max_group_size=None with 'capacity'"),
        ({"max_group_size": 0}, "max_group_size=0"),
        ({"implementation": "pallas_gpu", "group_order": "descending"}, "group_order='descending'"),
        ({"implementation": "tiles", "group_order": "desc"}, "only 'pallas_gpu'"),
    ],
)
def test_refuses(change, message):
    case = {"x": jnp.zeros((37, 5)), "w": jnp.zeros((5, 5, 2)), "group_sizes": jnp.zeros(5, jnp.int32)}
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**(case | change))


def test_like_ragged_dot():
    """The same call: positional precision, the result's dtype, integers where only the plain way is asked for."""
    x, w, sizes = jnp.ones((6, 2), jnp.bfloat16), jnp.ones((2, 2, 3), jnp.bfloat16), jnp.asarray([2, 4])
    got = grouped_matmul(x, w, sizes, "highest", jnp.float32)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, jax.lax.ragged_dot(x, w, sizes, "highest", jnp.float32))
    whole = grouped_matmul(x.astype(int), w.astype(int), sizes, implementation="reference")
    np.testing.assert_array_equal(whole, np.full((6, 3), 2))


@pytest.mark.parametrize("implementation", ["tiles", "pallas_gpu", "pallas_tpu"])
def test_groups_may_begin_later(implementation, monkeypatch):
    """Rows before the first group belong to none, as those after the last one: zeros, whatever they hold."""
    monkeypatch.setattr(sys.modules["moejax.grouped_matmul"], "choose", lambda *_: implementation)
    rng = np.random.default_rng(0)
    num_rows, depth, width, groups = 40, 16, 24, 3
    x, dy, weights = (
        rng.normal(size=shape).astype(np.float32) for shape in ((num_rows, depth), (num_rows, width), (groups, depth, width))
    )

    @jax.jit
    def parts(x, dy, sizes, first):
        w = jnp.asarray(weights)
        back = grouped_part(dy, w, sizes, first, transpose=True)
        return grouped_part(x, w, sizes, first), back, grouped_outer(x, dy, sizes, first=first)

    for first, sizes in ((0, (5, 0, 9)), (7, (0, 20, 3)), (26, (14, 0, 0)), (40, (0, 0, 0))):
        end = first + np.cumsum(sizes)
        group = np.searchsorted(end, np.arange(num_rows), side="right")
        live = (np.arange(num_rows) >= first) & (np.arange(num_rows) < end[-1])
        dirty = [np.where(live[:, None], part, np.nan) for part in (x, dy)]
        got = parts(*map(jnp.asarray, dirty), jnp.asarray(sizes, jnp.int32), jnp.int32(first))
        want = np.zeros((num_rows, width)), np.zeros((num_rows, depth)), np.zeros((groups, depth, width))
        for row in np.flatnonzero(live):
            want[0][row], want[1][row] = x[row] @ weights[group[row]], dy[row] @ weights[group[row]].T
            want[2][group[row]] += np.outer(x[row], dy[row])
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
