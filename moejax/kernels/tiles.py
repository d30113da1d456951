"""Static batching in XLA, on every backend: loops over the tiles that exist, nothing for the others.

For each group one slice of its weights, then as many tiles as its rows need, of several heights: the trip counts are
data, so the work follows the load whatever its skew, and no weights are gathered. (One loop over all tiles, each with
weights of its own, costs a copy of a weight matrix per tile; all tiles in one batched product, gathered weights.)
A tile that would reach past the last row starts earlier instead; rows outside its span keep what they hold.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from moejax.kernels.rows import How, Rows, common, dot, scaled, take, wide, zeros

# Whole tiles of the first height, then of the next for what is left, the last covering the rest: on XLA:CPU a 16-row
# product runs at 0.8 of a 256-row one's rate, so many small tiles beat one that is mostly padding.
PRODUCT_HEIGHTS = (512, 128, 32, 8)
# Here every tile costs a pass over a [K, N] sum, so what is left after the whole tiles goes into one that fits.
OUTER_HEIGHTS = (512, 384, 256, 192, 128, 96, 64, 32)


def product(
    x: Shaped[Array, "M _"],
    w: Shaped[Array, "G _ _"],
    rows: Rows,
    scale: Shaped[Array, "R"] | None,
    how: How,
    transpose: bool = False,
) -> Float[Array, "R _"]:
    """[R, N]: x[row] @ w[g] for each row of group g, times its scale; zeros for rows of no group.

    transpose: x[row] @ w[g].T, so x is [M, N] and the result [R, K].
    """
    return _forward(x, (w,), rows, scale, how, transpose, lambda sums: sums)[0]


def glu(x, gate, up, rows, nonlinearity, how, keep):
    """act(x @ gate) * (x @ up) in one pass over x; with `keep` both products too: (result, gate's, up's)."""

    def finish(sums):
        result = nonlinearity(sums[0]) * sums[1]
        return (result, *sums) if keep else (result,)

    return _forward(x, (gate, up), rows, None, how, False, finish, 3 if keep else 1)


def _forward(x, weights, rows, scale, how, transpose, finish, num_results=1):
    """finish(x @ each of the weights), tile by tile; as many results of one shape."""
    start, end = rows.start, rows.end
    contract = (((1,), (1 if transpose else 0,)), ((), ()))

    def group(g, results):
        mine = [lax.dynamic_index_in_dim(w, g, keepdims=False) for w in weights]

        def tile(row, height, whole, results):
            at, inside = span(row, end[g], height, whole, rows.num_rows)
            source = _tile(x, rows.index, at, height)
            factor = _factor(scale, at, height)
            parts = finish(tuple(scaled(dot(source, w, contract, how), factor) for w in mine))
            return tuple(put(y, part, inside, at) for y, part in zip(results, parts, strict=True))

        return greedy(start[g], end[g], heights(PRODUCT_HEIGHTS, rows.num_rows), tile, results)

    width = weights[0].shape[1 if transpose else 2]
    empty = tuple(zeros((rows.num_rows, width), how.dtype, x, which) for which in range(num_results))
    return over_groups(rows, group, empty)


def outer(
    x: Shaped[Array, "M K"], g: Shaped[Array, "R N"], rows: Rows, scale: Shaped[Array, "R"] | None, how: How
) -> Float[Array, "G K N"]:
    """[G, K, N]: the sum over each group's rows of x[row]^T (scale * g)[row]; zeros for an empty group."""
    start, end = rows.start, rows.end

    def group(_, i):
        def part(row, height, whole):
            at, inside = span(row, end[i], height, whole, rows.num_rows)
            left = only(inside, _tile(x, rows.index, at, height), 0)
            right = only(inside, scaled(cut(g, at, height), _factor(scale, at, height)), 0)
            return dot(left, right, (((0,), (0,)), ((), ())), how)

        def begin(row, height, whole, _):
            return part(row, height, whole)

        def add(row, height, whole, total):
            return total + part(row, height, whole)

        total = zeros((x.shape[1], g.shape[1]), wide(common(x.dtype, g.dtype)), g)
        if rows.num_rows:
            total = cover(start[i], end[i], heights(OUTER_HEIGHTS, rows.num_rows), begin, add, total)
        return None, total.astype(how.dtype)

    return lax.scan(group, None, jnp.arange(rows.sizes.shape[0]))[1]


def over_groups(rows, group, carry):
    """group(g, carry) for each group that has rows: the others cost nothing, not even a slice of their weights."""
    if not rows.num_rows:
        return carry
    empty = rows.start == rows.end
    full_first = jnp.argsort(empty)
    return lax.fori_loop(0, (~empty).sum(), lambda i, carry: group(full_first[i], carry), carry)


def heights(ladder, num_rows):
    """The heights that the rows have room for; one of them all where they have room for none."""
    return tuple(height for height in ladder if height <= num_rows) or (num_rows,)


def greedy(start, end, ladder, tile, carry):
    """tile(row, height, whole, carry) over [start, end): whole tiles of each height in turn, the last rounded up."""
    for height in ladder:
        left, whole = end - start, height != ladder[-1]
        turns = left // height if whole else -(-left // height)
        carry = _repeat(turns, start, height, whole, tile, carry)
        start = start + turns * height
    return carry


def cover(start, end, ladder, first, rest, carry):
    """`first` on one tile of the lowest height that leaves whole tiles of the tallest, then `rest` on each of those."""
    tall = ladder[0]
    turns = jnp.maximum(-(-(end - start) // tall) - 1, 0)
    row = start + turns * tall
    left = end - row
    for height, lower in zip(ladder, (*ladder[1:], 0), strict=True):
        fits = (left > lower) & (left <= height)
        carry = _repeat(fits.astype(jnp.int32), row, height, False, first, carry)
    return _repeat(turns, start, tall, True, rest, carry)


def _repeat(turns, start, height, whole, tile, carry):
    # The row must depend on the turn even where there is only one: XLA hoists an invariant body, and the product would
    # then be done whether or not the tile exists.
    return lax.fori_loop(0, turns, lambda turn, carry: tile(start + turn * height, height, whole, carry), carry)


def span(row, end, height, whole, num_rows):
    """Where a tile for [row, end) starts, and which rows are inside; None for all, of a tile known to be whole."""
    if whole:
        return row, None
    at = jnp.minimum(row, num_rows - height)
    place = at + jnp.arange(height, dtype=jnp.int32)
    return at, ((place >= row) & (place < end))[:, None]


def put(y, part, inside, at):
    """y with the part's rows from `at` on, those that are inside."""
    kept = only(inside, part.astype(y.dtype), cut(y, at, part.shape[0]))
    return lax.dynamic_update_slice_in_dim(y, kept, at, 0)


def only(inside, rows, others):
    return rows if inside is None else jnp.where(inside, rows, others)


def cut(values, at, height):
    return lax.dynamic_slice_in_dim(values, at, height)


def _factor(scale, at, height):
    return None if scale is None else cut(scale, at, height)


def _tile(x, index, at, height):
    return cut(x, at, height) if index is None else take(x, cut(index, at, height))
