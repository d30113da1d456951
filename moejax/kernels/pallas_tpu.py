"""Static batching as a Pallas kernel for TPUs (Mosaic): a scalar-prefetched map from grid step to group and rows.

A tile of rows is aligned, as TPU memory wants it, so one that several groups share is visited by each of them in turn,
while its result stays on the chip; each writes its own rows. With the whole depth in one block, a group's weights are
read once for all its tiles. On the CPU it runs interpreted: right, and slow. G: groups.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Shaped

from moejax.kernels.rows import How, Rows, dot, shape_like
from moejax.kernels.tile_map import visits

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# Both buffers of every block and the sums must fit: 16 MiB of the 64 or more that a core has, beyond the default limit.
_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "arbitrary", "arbitrary"),
    vmem_limit_bytes=64 * 2**20,
)
_LANES = 128


def product(
    x: Shaped[Array, "M _"],
    w: Shaped[Array, "G _ _"],
    rows: Rows,
    scale: Shaped[Array, "R"] | None,
    how: How,
    transpose: bool = False,
) -> Float[Array, "R _"]:
    """As `tiles.product`. Rows read through an index are gathered before the kernel: TPUs have no gather inside one."""
    return _forward((x,), (w,), rows, scale, how, transpose, 1, lambda sums: sums)[0]


def joined(xs, weights, rows: Rows, how: How) -> Float[Array, "R K"]:
    """[R, K]: the sum of x[row] @ w[g].T over the pairs of xs [R, N] and weights [G, K, N], made in one pass."""
    return _forward(xs, weights, rows, None, how, True, 1, lambda sums: sums)[0]


def glu(x, gate, up, rows, nonlinearity, how, keep):
    """act(x @ gate) * (x @ up) in one pass over x; with `keep` both products too: (result, gate's, up's)."""

    def finish(sums):
        result = nonlinearity(sums[0]) * sums[1]
        return (result, *sums) if keep else (result,)

    return _forward((x,), (gate, up), rows, None, how, False, 3 if keep else 1, finish)


def outer(
    x: Shaped[Array, "M K"], g: Shaped[Array, "R N"], rows: Rows, scale: Shaped[Array, "R"] | None, how: How
) -> Float[Array, "G K N"]:
    """As `tiles.outer`."""
    _check(x, g)
    source = x if rows.index is None else rows.read(x)
    depth, width, num_groups = x.shape[1], g.shape[1], rows.sizes.shape[0]
    height, deep, broad = _height(rows), _block(512, depth), _block(1024, width)
    plan = visits(rows, height, every_group=True)
    specs = [
        pl.BlockSpec((height, deep), lambda k, n, b, group, tile, *_: (tile[b], k)),
        pl.BlockSpec((height, broad), lambda k, n, b, group, tile, *_: (tile[b], n)),
    ]
    operands = [source, g]
    if scale is not None:
        specs.append(pl.BlockSpec((height, 1), lambda k, n, b, group, tile, *_: (tile[b], 0)))
        operands.append(scale[:, None])
    kernel = functools.partial(_outer_kernel, height=height, scaled=scale is not None, how=how)
    out = pl.BlockSpec((1, deep, broad), lambda k, n, b, group, *_: (group[b], k, n))
    grid = (pl.cdiv(depth, deep), pl.cdiv(width, broad), plan.group.shape[0])
    scratch = [pltpu.VMEM((deep, broad), jnp.float32)]
    shape = shape_like((num_groups, depth, width), how.dtype, x)
    products = 2 * rows.num_rows * depth * width
    return _call(kernel, grid, specs, [out], scratch, [shape], plan, operands, products)[0]


def _forward(xs, weights, rows, scale, how, transpose, num_results, finish):
    """finish(the product of the only x with each of the weights), or of (the sum of each x's with its own)."""
    _check(*xs, *weights)
    sources = xs if rows.index is None else tuple(map(rows.read, xs))
    depth, width, num_groups = xs[0].shape[1], weights[0].shape[1 if transpose else 2], weights[0].shape[0]
    height, deep, broad = _height(rows), _block(2048, depth), _block(1024 // len(weights), width)
    plan = visits(rows, height)

    def weight_block(n, b, k, group, *_):
        which = jnp.minimum(group[b], num_groups - 1)
        return (which, n, k) if transpose else (which, k, n)

    specs = [pl.BlockSpec((height, deep), lambda n, b, k, group, tile, *_: (tile[b], k))] * len(xs)
    specs += [pl.BlockSpec((1, broad, deep) if transpose else (1, deep, broad), weight_block)] * len(weights)
    operands = [*sources, *weights]
    if scale is not None:
        specs.append(pl.BlockSpec((height, 1), lambda n, b, k, group, tile, *_: (tile[b], 0)))
        operands.append(scale[:, None])
    kernel = functools.partial(
        _product_kernel,
        num_operands=(len(xs), len(weights)),
        scaled=scale is not None,
        sizes=(height, deep, depth, num_groups),
        transpose=transpose,
        finish=finish,
        how=how,
    )
    out = pl.BlockSpec((height, broad), lambda n, b, k, group, tile, *_: (tile[b], n))
    grid = (pl.cdiv(width, broad), plan.group.shape[0], pl.cdiv(depth, deep))
    scratch = [pltpu.VMEM((height, broad), jnp.float32)] * (len(weights) // len(xs))
    shapes = [shape_like((rows.num_rows, width), how.dtype, xs[0])] * num_results
    products = 2 * rows.num_rows * depth * width * len(weights)
    return _call(kernel, grid, specs, [out] * num_results, scratch, shapes, plan, operands, products)


def _product_kernel(group, tile, start, stop, num_visits, *refs, num_operands, scaled, sizes, transpose, finish, how):
    height, deep, depth, num_groups = sizes
    num_x, num_weights = num_operands
    x_refs, w_refs, rest = refs[:num_x], refs[num_x : num_x + num_weights], refs[num_x + num_weights :]
    scale_ref, rest = (rest[0], rest[1:]) if scaled else (None, rest)
    num_sums = num_weights // num_x
    y_refs, sums = rest[:-num_sums], rest[-num_sums:]
    b, k = pl.program_id(1), pl.program_id(2)
    used = b < num_visits[0]

    @pl.when(used & (k == 0))
    def _():
        for total in sums:
            total[...] = jnp.zeros_like(total)

    @pl.when(used & (group[b] < num_groups))
    def _():
        for i, w_ref in enumerate(w_refs):
            a = _present(x_refs[i % num_x][...], k, deep, depth, 1)
            weights = _present(w_ref[0], k, deep, depth, 1 if transpose else 0)
            sums[i % len(sums)][...] += dot(a, weights, (((1,), (1 if transpose else 0,)), ((), ())), how)

    @pl.when(used & (k == pl.num_programs(2) - 1))
    def _():
        mine = _mine(b, group, tile, start, stop, height) & (group[b] < num_groups)
        values = [total[...] for total in sums]
        if scale_ref is not None:
            values = [value * scale_ref[...].astype(jnp.float32) for value in values]
        visited = _mine(b, group, tile, start, stop, height)
        for ref, value in zip(y_refs, finish(tuple(values)), strict=True):
            ref[...] = jnp.where(mine, value.astype(ref.dtype), jnp.where(visited, jnp.zeros_like(ref), ref[...]))


def _outer_kernel(group, tile, start, stop, num_visits, *refs, height, scaled, how):
    x_ref, g_ref, *rest = refs
    scale_ref, (y_ref, total) = (rest[0], rest[1:]) if scaled else (None, rest)
    b = pl.program_id(2)
    used = b < num_visits[0]
    first = (b == 0) | (group[jnp.maximum(b - 1, 0)] != group[b])
    last = (b == num_visits[0] - 1) | (group[jnp.minimum(b + 1, pl.num_programs(2) - 1)] != group[b])

    @pl.when(used & first)
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(used)
    def _():
        mine = _mine(b, group, tile, start, stop, height)
        left = jnp.where(mine, x_ref[...], jnp.zeros_like(x_ref))
        right = g_ref[...]
        if scale_ref is not None:
            right = (right.astype(jnp.float32) * scale_ref[...].astype(jnp.float32)).astype(right.dtype)
        right = jnp.where(mine, right, jnp.zeros_like(right))
        total[...] += dot(left, right, (((0,), (0,)), ((), ())), how)

    @pl.when(used & last)
    def _():
        y_ref[0] = total[...].astype(y_ref.dtype)


def _mine(b, group, tile, start, stop, height):
    """[height, 1]: which rows of the visited tile are the visiting group's."""
    row = tile[b] * height + lax.broadcasted_iota(jnp.int32, (height, 1), 0)
    return (row >= start[group[b]]) & (row < stop[group[b]])


def _present(block, k, deep, depth, axis):
    """The block with zeros for what lies past the depth: the last block may reach over it."""
    if depth % deep == 0:
        return block
    place = k * deep + lax.broadcasted_iota(jnp.int32, block.shape, axis)
    return jnp.where(place < depth, block, jnp.zeros_like(block))


def _call(kernel, grid, in_specs, out_specs, scratch, shapes, plan, operands, flops):
    """The kernel over the grid: compiled on TPU, interpreted on the CPU. The FLOPs, of all R rows, are for XLA's scheduler."""
    moved = sum(array.size * array.dtype.itemsize for array in (*operands, *shapes))
    cost = pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=moved)

    def run(*args, interpret):
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5, grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch
        )
        call = pl.pallas_call(kernel, shapes, grid_spec=spec, interpret=interpret, compiler_params=_PARAMS, cost_estimate=cost)
        return call(*args)

    args = (plan.group, plan.tile, plan.start, plan.stop, plan.num_visits, *operands)
    return lax.platform_dependent(
        *args, tpu=functools.partial(run, interpret=False), cpu=functools.partial(run, interpret=True)
    )


def _height(rows: Rows) -> int:
    """Rows a tile: about as many as a group has on average; a multiple of 32, as rows of one-byte numbers come."""
    mean = -(-rows.num_rows // rows.sizes.shape[0])
    return max(32, min(512, pl.next_power_of_2(mean)))


def _block(largest: int, size: int) -> int:
    """The whole dimension where that is small enough, else a multiple of the lanes, one that divides it if there is."""
    if size <= largest:
        return size
    divisors = [block for block in range(_LANES, largest + 1, _LANES) if size % block == 0]
    return divisors[-1] if divisors and divisors[-1] * 2 >= largest else largest


def _check(*operands: Array) -> None:
    """Raises NotImplementedError for what the kernel cannot serve."""
    for operand in operands:
        if str(operand.dtype) not in DTYPES:
            raise NotImplementedError(f"'pallas_tpu' has no product of {operand.dtype}: it takes {', '.join(DTYPES)}")
    shapes = [operand.shape for operand in operands]
    if not all(operand.size for operand in operands):
        raise NotImplementedError(f"'pallas_tpu' with operands of {shapes}: one is empty")
