"""The whole feed-forward of grouped rows, tile by tile: nothing of the expert's width is made but what is kept.

As products apart, each of the steps between them is a pass over arrays that have room for every row that might come, most
of them empty under skew. Here a step sees the rows of a tile, while they are still in the cache, and no others.

G: groups (experts), R: rows, K: model width, N: expert width. Helpers of tiles: `moejax.kernels.tiles`.
"""

import functools
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jaxtyping import Array, Float, Shaped

from moejax.kernels.rows import How, Rows, common, dot, weighed, wide, zeros
from moejax.kernels.tiles import OUTER_HEIGHTS, PRODUCT_HEIGHTS, cover, cut, greedy, heights, only, over_groups, put, span

Act = Callable[..., Array]
ROWS = (((1,), (0,)), ((), ()))  # a @ b
TRANSPOSED = (((1,), (1,)), ((), ()))  # a @ b.T
OUTER = (((0,), (0,)), ((), ()))  # a.T @ b


def forward(
    x: Shaped[Array, "R K"],
    into: Sequence[Shaped[Array, "G K N"]],
    down: Shaped[Array, "G N K"],
    rows: Rows,
    scale: Float[Array, "R"],
    act: Act,
    how: How,
    keep: bool,
) -> tuple[Float[Array, "R _"], ...]:
    """(scale * act(x @ into[0][g], ...)) @ down[g] for each row of group g, zeros for rows of no group.

    Args:
      x: rows in the groups' order.
      into: the weights before the activation, each a product for it.
      down: the weights after it.
      rows: the groups; without an index.
      scale: a factor for each row.
      act: elementwise, of as many products as `into` has.
      how: the results' dtype.
      keep: whether the products are results too, one after another, for `backward`.
    """

    def group(g, results):
        *first, last = [lax.dynamic_index_in_dim(w, g, keepdims=False) for w in (*into, down)]

        def tile(row, height, whole, results):
            at, inside = span(row, rows.end[g], height, whole, rows.num_rows)
            source = cut(x, at, height)
            products = tuple(dot(source, w, ROWS, how).astype(how.dtype) for w in first)
            hidden = weighed(act(*map(_wide, products)), cut(scale, at, height)).astype(how.dtype)
            parts = (dot(hidden, last, ROWS, how), *products)[: len(results)]
            return tuple(put(y, part, inside, at) for y, part in zip(results, parts, strict=True))

        return greedy(rows.start[g], rows.end[g], heights(PRODUCT_HEIGHTS, rows.num_rows), tile, results)

    widths = (down.shape[2], *(w.shape[2] for w in into if keep))
    return over_groups(rows, group, tuple(zeros((rows.num_rows, n), how.dtype, x, i) for i, n in enumerate(widths)))


def backward(
    x: Shaped[Array, "R K"],
    weights: tuple[tuple[Shaped[Array, "G K N"], ...], Shaped[Array, "G N K"]],
    rows: Rows,
    scale: Float[Array, "R"],
    products: tuple[Shaped[Array, "R N"], ...],
    dy: Shaped[Array, "R K"],
    act: Act,
    how: How,
):
    """The gradients of x, (into, down) and scale, in their dtypes; zeros for rows of no group and for groups without rows.

    Args:
      x: this and the others as for `forward`.
      weights: (into, down).
      products: as `forward` gave them.
      dy: the gradient of its result.
    """
    into, down = weights

    def group(g, carry):
        *first, last = [lax.dynamic_index_in_dim(w, g, keepdims=False) for w in (*into, down)]

        def tile(row, height, whole, carry, put_sums):
            at, inside = span(row, rows.end[g], height, whole, rows.num_rows)
            here = lambda values: only(inside, cut(values, at, height), 0)
            parts, sums = _tile_gradients(here, x, (first, last), (scale, products, dy), act, how)
            return tuple(put(y, part, inside, at) for y, part in zip(carry[0], parts, strict=True)), put_sums(carry[1], sums)

        both = lambda totals, sums: tuple(a + b for a, b in zip(totals, sums, strict=True))
        begin = functools.partial(tile, put_sums=lambda _, sums: sums)
        add = functools.partial(tile, put_sums=both)
        gradients, totals = carry
        own = tuple(zeros(w.shape, wide(common(x.dtype, dy.dtype)), dy, 1) for w in (*first, last))
        here = heights(OUTER_HEIGHTS, rows.num_rows)
        gradients, own = cover(rows.start[g], rows.end[g], here, begin, add, (gradients, own))
        at_group = lambda total, part: lax.dynamic_update_index_in_dim(total, part.astype(total.dtype), g, 0)
        return gradients, tuple(map(at_group, totals, own))

    empty = (zeros(x.shape, x.dtype, dy), zeros((rows.num_rows, 1), scale.dtype, dy, 1))
    like = [zeros(w.shape, w.dtype, dy, 2) for w in (*into, down)]
    (dx, d_scale), (*d_into, d_down) = over_groups(rows, group, (empty, tuple(like)))
    return dx, (tuple(d_into), d_down), d_scale[:, 0]


def _tile_gradients(here, x, weights, kept, act, how):
    """Of one tile: (those of its rows of x and of scale, the parts of those of the weights)."""
    (first, last), (scale, products, dy) = weights, kept
    source, factor, out = here(x), here(scale[:, None])[:, 0], here(dy)
    plain, pull = jax.vjp(act, *(_wide(here(product)) for product in products))
    hidden = weighed(plain, factor).astype(how.dtype)
    d_hidden = dot(out, last, TRANSPOSED, how)
    d_products = tuple(weighed(part, factor).astype(how.dtype) for part in pull(d_hidden))
    dx = sum(dot(part, w, TRANSPOSED, how) for part, w in zip(d_products, first, strict=True))
    sums = (*(dot(source, part, OUTER, how) for part in d_products), dot(hidden, out, OUTER, how))
    return (dx, (plain * d_hidden).sum(1, keepdims=True)), sums


def _wide(x):
    return x.astype(wide(x.dtype))
