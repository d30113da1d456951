"""Static batching as a Pallas kernel for NVIDIA GPUs (the Triton backend): one launch, tiles of any group's rows.

Each program reads its group and rows from the tile map, reads x through the token index in place, and leaves where its
tile is not in use. On the CPU it runs interpreted: right, and slow. B: tiles, G: groups.
"""

import functools
import itertools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Shaped

from moejax.kernels.rows import How, Rows, common, shape_like
from moejax.kernels.tile_map import tile_map

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
MOST_NUMBERS = 2**31  # in one array: Triton adds up places in it in int32
_PARAMS = plgpu.CompilerParams(num_warps=8, num_stages=3)


def product(
    x: Shaped[Array, "M _"],
    w: Shaped[Array, "G _ _"],
    rows: Rows,
    scale: Shaped[Array, "R"] | None,
    how: How,
    transpose: bool = False,
) -> Float[Array, "R _"]:
    """As `tiles.product`."""
    width = w.shape[1 if transpose else 2]
    return _forward((x,), (w,), rows, scale, how, transpose, (width,), lambda sums: sums)[0]


def joined(xs, weights, rows: Rows, how: How) -> Float[Array, "R K"]:
    """[R, K]: the sum of x[row] @ w[g].T over the pairs of xs [R, N] and weights [G, K, N], made in one pass."""
    return _forward(xs, weights, rows, None, how, True, weights[0].shape[1:2], lambda sums: sums)[0]


def glu(x, gate, up, rows, nonlinearity, how, keep):
    """act(x @ gate) * (x @ up) in one pass over x; with `keep` both products too: (result, gate's, up's)."""

    def finish(sums):
        result = nonlinearity(sums[0]) * sums[1]
        return (result, *sums) if keep else (result,)

    return _forward((x,), (gate, up), rows, None, how, False, (gate.shape[2],) * (3 if keep else 1), finish)


def outer(
    x: Shaped[Array, "M K"], g: Shaped[Array, "R N"], rows: Rows, scale: Shaped[Array, "R"] | None, how: How
) -> Float[Array, "G K N"]:
    """As `tiles.outer`."""
    _check(x, g)
    depth, width, num_groups = x.shape[1], g.shape[1], rows.sizes.shape[0]
    tile = _block(64, rows.num_rows), _block(128, depth), _block(128, width)
    kernel = functools.partial(_outer_kernel, tile=tile, sizes=(x.shape[0], depth, width), how=how)
    extras = {"index": rows.index, "scale": scale}
    _check_places((num_groups, depth, width))
    grid = (pl.cdiv(width, tile[2]), pl.cdiv(depth, tile[1]), num_groups)
    shape = shape_like((num_groups, depth, width), how.dtype, x)
    return _call(kernel, grid, [shape], extras, rows.start, rows.end, x, g)[0]


def _forward(xs, weights, rows, scale, how, transpose, widths, finish):
    """finish(the product of the only x with each of the weights), or of (the sum of each x's with its own)."""
    _check(*xs, *weights)
    height, x, num_operands = _height(rows), xs[0], (len(xs), len(weights))
    tile = height, _block(64, x.shape[1]), _block(128 if len(weights) == 1 else 64, widths[0])
    sizes = x.shape[0], x.shape[1], widths[0]
    kernel = functools.partial(
        _product_kernel, tile=tile, sizes=sizes, how=how, transpose=transpose, finish=finish, num_operands=num_operands
    )
    tiles = tile_map(rows, height, how.order)
    grid = (pl.cdiv(widths[0], tile[2]), tiles.group.shape[0])
    _check_places((rows.num_rows, max(widths)))
    shapes = [shape_like((rows.num_rows, width), how.dtype, x) for width in widths]
    extras = {"index": rows.index, "scale": scale}
    return _call(kernel, grid, shapes, extras, tiles.group, tiles.start, tiles.stop, *xs, *weights)


def _product_kernel(refs, index, scale, *, tile, sizes, how, transpose, finish, num_operands):
    group_ref, start_ref, stop_ref, *rest = refs
    ends = itertools.accumulate(num_operands)
    x_refs, w_refs, y_refs = (rest[start:stop] for start, stop in itertools.pairwise((0, *ends, len(rest))))
    (height, deep, broad), (num_x, depth, width) = tile, sizes
    block = pl.program_id(1)
    start, stop, group = (plgpu.load(ref.at[block]) for ref in (start_ref, stop_ref, group_ref))
    column = pl.program_id(0) * broad + jnp.arange(broad)
    num_groups = w_refs[0].shape[0]

    @pl.when(start < stop)
    def _():
        row = start + jnp.arange(height)
        inside = row < stop
        source, present = _source(row, inside, index, num_x)

        def step(i, sums):
            at = i * deep + jnp.arange(deep)
            sums = list(sums)
            spots = (group, column, at) if transpose else (group, at, column)
            masks = _below(at, depth, deep), _below(column, width, broad)
            masks = masks[::-1] if transpose else masks
            for i, ref in enumerate(w_refs):
                if i < len(x_refs):
                    a = _load(x_refs[i], (source, at), (present, _below(at, depth, deep)))
                sums[i % len(sums)] += _dot(a, _load(ref, spots, masks), how, trans_b=transpose)
            return tuple(sums)

        # Rows of no group take no turn: they get the zeros that the sums start from.
        turns = jnp.where(group < num_groups, jnp.int32(pl.cdiv(depth, deep)), jnp.int32(0))
        empty = jnp.zeros((height, broad), jnp.float32)
        sums = lax.fori_loop(jnp.int32(0), turns, step, (empty,) * (len(w_refs) // len(x_refs)))
        if scale is not None:
            factor = plgpu.load(scale.at[row], mask=inside & (group < num_groups), other=0)
            sums = tuple(total * factor.astype(total.dtype)[:, None] for total in sums)
        for ref, value in zip(y_refs, finish(sums), strict=True):
            _store(ref, (row, column), value, (inside, _below(column, width, broad)))


def _outer_kernel(refs, index, scale, *, tile, sizes, how):
    start_ref, stop_ref, x_ref, g_ref, y_ref = refs
    (height, deep, broad), (num_x, depth, width) = tile, sizes
    group = pl.program_id(2)
    start, stop = plgpu.load(start_ref.at[group]), plgpu.load(stop_ref.at[group])
    column = pl.program_id(0) * broad + jnp.arange(broad)
    at = pl.program_id(1) * deep + jnp.arange(deep)

    def step(i, total):
        row = start + i * height + jnp.arange(height)
        inside = row < stop
        source, present = _source(row, inside, index, num_x)
        a = _load(x_ref, (source, at), (present, _below(at, depth, deep)))
        b = _load(g_ref, (row, column), (inside, _below(column, width, broad)))
        if scale is not None:
            factor = plgpu.load(scale.at[row], mask=inside, other=0)
            b = (b.astype(jnp.float32) * factor.astype(jnp.float32)[:, None]).astype(b.dtype)
        return total + _dot(a, b, how, trans_a=True)

    total = lax.fori_loop(jnp.int32(0), pl.cdiv(stop - start, height), step, jnp.zeros((deep, broad), jnp.float32))
    _store(y_ref, (group, at, column), total, (_below(at, depth, deep), _below(column, width, broad)))


def _source(row, inside, index, num_x):
    """The row of x that each row reads, and whether there is one."""
    if index is None:
        return row, inside
    source = plgpu.load(index.at[row], mask=inside, other=num_x)
    present = (source >= 0) & (source < num_x)
    return jnp.where(present, source, 0), present


def _spot(ref, spots):
    """The part of a reference at a scalar, or at the rows and columns given: [r], [c] -> [r, c]."""
    *lead, row, column = spots
    return ref.at[(*lead, row[:, None], column[None, :])]


def _below(at, size, block):
    """Which places are there; None, no question, where blocks divide the size: a mask costs registers in every load."""
    return at < size if size % block else None


def _mask(row_mask, column_mask):
    row_mask = None if row_mask is None else row_mask[:, None]
    column_mask = None if column_mask is None else column_mask[None, :]
    if row_mask is None or column_mask is None:
        return column_mask if row_mask is None else row_mask
    return row_mask & column_mask


def _load(ref, spots, masks):
    spot, mask = _spot(ref, spots), _mask(*masks)
    if mask is None:
        return plgpu.load(spot)
    return plgpu.load(spot, mask=jnp.broadcast_to(mask, (spots[-2].size, spots[-1].size)), other=0.0)


def _store(ref, spots, value, masks):
    mask = _mask(*masks)
    mask = None if mask is None else jnp.broadcast_to(mask, value.shape)
    plgpu.store(_spot(ref, spots), value.astype(ref.dtype), mask=mask)


def _dot(a, b, how, **transposed):
    dtype = common(a.dtype, b.dtype)
    return plgpu.dot(a.astype(dtype), b.astype(dtype), precision=how.precision, **transposed).astype(jnp.float32)


def _call(kernel, grid, shapes, extras, *args):
    """The kernel over the grid: compiled on CUDA, interpreted on the CPU."""
    names = [name for name, value in extras.items() if value is not None]

    def body(*refs):
        found = dict(zip(names, refs[len(args) :], strict=False))
        kernel((*refs[: len(args)], *refs[len(args) + len(names) :]), found.get("index"), found.get("scale"))

    def run(*operands, interpret):
        call = pl.pallas_call(body, out_shape=shapes, grid=grid, interpret=interpret, compiler_params=_PARAMS)
        return call(*operands)

    operands = (*args, *(extras[name] for name in names))
    return lax.platform_dependent(
        *operands, cuda=functools.partial(run, interpret=False), cpu=functools.partial(run, interpret=True)
    )


def _height(rows: Rows) -> int:
    """Rows a tile: as many as a group has on average, so that most groups take one tile or whole ones."""
    return _block(128, -(-rows.num_rows // rows.sizes.shape[0]))


def _block(largest: int, size: int) -> int:
    """A power of two of at least 16, which tensor cores need, and no more than what covers `size`."""
    return max(16, min(largest, pl.next_power_of_2(size)))


def _check(*operands: Array) -> None:
    """Raises NotImplementedError for dtypes that the kernel has no product for."""
    for operand in operands:
        if str(operand.dtype) not in DTYPES:
            raise NotImplementedError(f"'pallas_gpu' has no product of {operand.dtype}: it takes {', '.join(DTYPES)}")
    _check_places(*(operand.shape for operand in operands))
    shapes = [operand.shape for operand in operands]
    if not all(operand.size for operand in operands):
        raise NotImplementedError(f"'pallas_gpu' with operands of {shapes}: one is empty")


def _check_places(*shapes: tuple[int, ...]) -> None:
    """Raises NotImplementedError for arrays with more places than int32 can count: reads would come from elsewhere."""
    for shape in shapes:
        if math.prod(shape) > MOST_NUMBERS:
            raise NotImplementedError(
                f"'pallas_gpu' with an array of {shape}: {math.prod(shape)} numbers, it addresses {MOST_NUMBERS} at most; "
                f"'tiles' takes more"
            )
