"""The rings: every product and gradient is the plain one's, with the bytes of the collective that each stands in for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from layouts.hlo import carriers, depends, parse, read
from moejax.overlapped import all_gather_matmul, apply, matmul_reduce_scatter, ring

SHAPE = E, R, K, N = 2, 24, 48, 72  # a leading dimension, rows, inner width, columns
FIRST, LAST = (None, "i"), (None, None, "i")
# How x, w and y are laid out in somebody's program, and what a shard does.
CASES = {
    "x_rows": (FIRST, LAST, LAST, all_gather_matmul),
    "x_inner": (LAST, LAST, LAST, functools.partial(all_gather_matmul, along="inner")),
    "w_inner": (FIRST, FIRST, FIRST, functools.partial(all_gather_matmul, gather="w", along="inner")),
    "w_columns": (FIRST, LAST, FIRST, functools.partial(all_gather_matmul, gather="w", along="columns")),
    "y_rows": (LAST, FIRST, FIRST, matmul_reduce_scatter),
    "y_columns": (LAST, FIRST, LAST, functools.partial(matmul_reduce_scatter, along="columns")),
}


def mesh_of(**sizes):
    """A mesh over the first devices."""
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices, axis_types=(AxisType.Auto,) * len(sizes))


def draw(num, *shape):
    """`num` arrays of normal numbers."""
    return list(np.random.default_rng(num).standard_normal((num, *shape)).astype(np.float32))


def program(mesh, axes, names=tuple(CASES)):
    """([x], [w], [dy]) -> ([y], [d_x], [d_w]), one of each for each named case."""

    def one(name, x, w):
        *specs, shard = CASES[name]
        of_x, of_w, of_y = (P(*(axes if part else None for part in spec)) for spec in specs)
        run = jax.shard_map(lambda x, w: shard(x, w, axes), mesh=mesh, in_specs=(of_x, of_w), out_specs=of_y)
        return run(x, w)

    def run(xs, ws, dys):
        ys, pull = jax.vjp(lambda xs, ws: [one(*case) for case in zip(names, xs, ws, strict=True)], xs, ws)
        return ys, *pull(dys)

    return jax.jit(run)


def inputs(num, dtypes=("float32", "float32")):
    """xs, ws and dys, as many of each."""
    shapes, (of_x, of_w) = ((E, R, K), (E, K, N), (E, R, N)), dtypes
    return [[jnp.asarray(a, dtype) for a in draw(num, *s)] for s, dtype in zip(shapes, (of_x, of_w, of_x), strict=True)]


def assert_plain(got, given, tolerance):
    """Products and both gradients, against float64."""
    for *results, x, w, dy in zip(*got, *given, strict=True):
        x, w, dy = (np.asarray(part, np.float64) for part in (x, w, dy))
        wants = x @ w, dy @ w.swapaxes(1, 2), x.swapaxes(1, 2) @ dy
        for result, want in zip(results, wants, strict=True):
            np.testing.assert_allclose(np.asarray(result, np.float64), want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_ring_is_the_plain_product(size):
    given = inputs(len(CASES))
    assert_plain(program(mesh_of(i=size), ("i",))(*given), given, 1e-5)


def test_rings_over_two_axes():
    """Counted first axis slowest, as specs do."""
    given = inputs(len(CASES))
    assert_plain(program(mesh_of(a=2, b=3), ("a", "b"))(*given), given, 1e-5)


def test_without_axes_and_under_vmap():
    given = inputs(1)
    (x,), (w,), (dy,) = given
    for axes in ((), None):
        y, pull = jax.vjp(lambda x, w, axes=axes: jax.vmap(lambda x, w: all_gather_matmul(x, w, axes))(x, w), x, w)
        assert_plain([[part] for part in (y, *pull(dy))], given, 1e-5)


def test_a_long_ring_is_a_loop(monkeypatch):
    """The same answer from turns that are not written out."""
    monkeypatch.setattr("moejax.overlapped.WRITTEN_OUT", 1)
    given = inputs(2)
    run = program(mesh_of(i=8), ("i",), ("w_inner", "y_rows"))
    assert_plain(run(*given), given, 1e-5)
    assert " while(" in run.lower(*given).compile().as_text()


def test_bf16_products_and_float32_gradients():
    """Operands and partial results travel as bf16, the gradient of float32 weights as float32; sums are float32."""
    given = inputs(len(CASES), ("bfloat16", "float32"))
    run = program(mesh_of(i=4), ("i",))
    ys, d_xs, d_ws = run(*given)
    assert {y.dtype for y in (*ys, *d_xs)} == {jnp.dtype("bfloat16")}
    assert {d_w.dtype for d_w in d_ws} == {jnp.dtype("float32")}
    given[1] = [w.astype("bfloat16") for w in given[1]]
    assert_plain((ys, d_xs, d_ws), given, 2**-7)
    text = run.lower(*given[:1], [w.astype("float32") for w in given[1]], given[2]).as_text()
    kinds = [line.rsplit("tensor<", 1)[1].rstrip(">") for line in text.splitlines() if "collective_permute" in line]
    assert {kind for kind in kinds if kind.endswith("f32")} == {f"{E}x{K // 4}x{N}xf32", f"{E}x{K}x{N // 4}xf32"}


@functools.cache
def _texts(name, size):
    """The compiled forward, and forward with backward, of one case."""
    run, given = program(mesh_of(i=size), ("i",), (name,)), inputs(1)
    both = run, jax.jit(lambda *given: run(*given)[0])
    return [wrapped.lower(*given).compile().as_text() for wrapped in both[::-1]]


NUMBERS = {"x": E * R * K, "w": E * K * N, "y": E * R * N}


@pytest.mark.parametrize("name", ["x_rows", "w_inner", "y_columns"])
def test_bytes_are_those_of_one_collective(name):
    """Each pass sends what an all-gather or a reduce-scatter would, in s - 1 permutes; products are of the true FLOPs."""
    for size in (3, 8):
        for passes, text in enumerate(_texts(name, size), start=1):
            found = read(text)
            (permutes,) = found.collectives
            assert (permutes.kind, permutes.count) == ("collective-permute", passes * (size - 1))
            assert permutes.wire_bytes == passes * NUMBERS[name[0]] * 4 * (size - 1) // size
            assert found.dot_flops == (1, 3)[passes - 1] * 2 * E * R * K * N // size


def _entry(text):
    module = parse(text)
    entry = module.computations[module.entry]
    return entry, *(carriers(module, entry, op=op) for op in ("dot", "collective-permute"))


@pytest.mark.parametrize("name", ["x_rows", "w_inner"])
def test_no_part_waits_for_a_product(name):
    entry, products, permutes = _entry(_texts(name, 8)[0])
    assert (len(products), len(permutes)) == (8, 7)
    assert not any(depends(entry, permute, products) for permute in permutes)
    assert not depends(entry, products[0], permutes), "its own part is here"


def test_no_product_waits_for_a_partial_sum():
    entry, products, permutes = _entry(_texts("y_columns", 8)[0])
    assert (len(products), len(permutes)) == (8, 7)
    assert not any(depends(entry, product, permutes) for product in products)
    assert all(depends(entry, permute, products) for permute in permutes)


def test_both_directions_carry_half():
    """Of seven parts four come from below and three from above; none is more than four turns on its way."""
    text = _texts("x_rows", 8)[0]
    assert [text.count(f"source_target_pairs={{{{0,{to}}}") for to in (1, 7)] == [4, 3]


def test_a_ring_within_a_ring_moves_nothing_twice():
    """x divided by rows over one axis, w by its inner width over another; then y by rows, w by columns."""
    mesh = mesh_of(a=2, b=4)

    def first(x, w):
        return apply(ring("a", "w", "inner", ring("b", "x", "rows")), x, w)

    def second(x, w):
        return apply(ring("a", "w", "columns", ring("b", "y", "rows")), x, w)

    def run(x, w, v, dy, dz):
        over = functools.partial(jax.shard_map, mesh=mesh)
        one = over(first, in_specs=(P(None, ("a", "b")), P(None, "a", "b")), out_specs=P(None, "a", "b"))
        two = over(second, in_specs=(P(None, "a", "b"), P(None, "b", "a")), out_specs=P(None, ("a", "b")))
        y, pull = jax.vjp(one, x, w)
        z, pull_second = jax.vjp(two, y, v)
        return (y, *pull(dy)), (z, *pull_second(dz))

    (x, w, dy), v, dz = (part[0] for part in inputs(1)), draw(1, E, N, K)[0], draw(1, E, R, K)[0]
    args = x, w, v, dy, dz
    one, two = jax.jit(run)(*args)
    assert_plain([[part] for part in one], ([x], [w], [dy]), 1e-5)
    assert_plain([[part] for part in two], ([one[0]], [v], [dz]), 1e-5)
    forward = read(jax.jit(lambda *args: run(*args)[1][0]).lower(*args).compile().as_text())
    over_a = 2 * (1 * E * K * N // 8)  # w and v: one part each
    over_b = 2 * (3 * E * (R // 2) * K // 4)  # x and y: three parts each
    assert forward.wire_bytes == 4 * (over_a + over_b)


@pytest.mark.parametrize("along", ["inner", "columns"])
def test_grouped_products(along):
    """Rows of several experts, one of them with none, and rows of none at the end."""
    mesh, sizes = mesh_of(i=2), jnp.asarray([7, 0, 12], jnp.int32)
    x, w, dy = (jnp.asarray(draw(1, *shape)[0]) for shape in ((R, K), (3, K, N), (R, N)))
    live = (np.arange(R) < 19)[:, None]
    x, dy = (jnp.where(live, part, 0) for part in (x, dy))
    of_w = P(None, "i") if along == "inner" else P(None, None, "i")

    def shard(x, w, sizes):
        return all_gather_matmul(x, w, "i", gather="w", along=along, group_sizes=sizes)

    def run(x, w):
        rows = lambda x, w, sizes: shard(x[0], w, sizes)[None]
        over = jax.shard_map(rows, mesh=mesh, in_specs=(P("i"), of_w, P()), out_specs=P("i"))
        return over(jnp.stack([x, 2 * x]), w, sizes)

    y, pull = jax.vjp(jax.jit(run), x, w)
    d_x, d_w = pull(jnp.stack([dy, dy]))
    group = np.repeat(np.arange(3), np.asarray(sizes)).tolist() + [0] * 5
    each = np.asarray(w, np.float64)[group]
    one = np.einsum("rk,rkn->rn", x, each)
    want = np.einsum("rn,rkn->rk", dy, each), np.zeros(w.shape)
    for r in range(19):
        want[1][group[r]] += np.outer(x[r], dy[r])
    for got, exact in ((y, np.stack([one, 2 * one])), (d_x, 3 * want[0]), (d_w, 3 * want[1])):
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


BAD = [
    (all_gather_matmul, {"gather": "y"}, "gather='y': legal values are 'x', 'w'"),
    (all_gather_matmul, {"along": "columns"}, "along, dimension of x,='columns': legal values are 'rows', 'inner'"),
    (all_gather_matmul, {"gather": "w", "along": "rows"}, "along, dimension of w,='rows': legal values are 'inner', 'columns'"),
    (all_gather_matmul, {"group_sizes": jnp.ones(2, jnp.int32)}, "gather='x' with group_sizes: .* legal is gather='w'"),
    (all_gather_matmul, {"along": "inner"}, r"x of shape .*: inner widths, with all parts, 192 and 48; need one"),
    (matmul_reduce_scatter, {"along": "inner"}, "along='inner': legal values are 'rows', 'columns'"),
    (matmul_reduce_scatter, {}, "rows=6 of the result: not divisible by the 4 devices of i; nearest 4 or 8"),
]


@pytest.mark.parametrize(("shard", "options", "says"), BAD)
@pytest.mark.usefixtures("unchecked")
def test_impossible_products_are_refused(shard, options, says):
    x, w = jnp.ones((E, 6, K)), jnp.ones((E, K, N))
    run = jax.shard_map(lambda x, w: shard(x, w, "i", **options), mesh=mesh_of(i=4), in_specs=(P(), P()), out_specs=P("i"))
    with pytest.raises(ValueError, match="^" + says) as caught:
        run(x, w)
    assert "\n" not in str(caught.value)
