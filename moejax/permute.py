"""Moving rows by index, with backwards that are gathers too: each function is told the permutation in both directions.

`index` says which row of x each output row reads: an array, or a tuple of arrays where the output is to be in parts.
`columns` says, for each row of x, in which output rows (of all parts, one after the other) it was read:
a tuple of index arrays, one for each time that it may have been, all of shape [..., n_j] over the leading dimensions
[..., n] of x with n_j <= n (what a column lacks past n_j was read no further time). An index past the end reads zeros;
under `clip`, some row of x, whatever it holds, for one who gives that row no weight: XLA makes a pass of its own of the zeros.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def read(x, index, clip=False):
    """x[index] along the first dimension; an index past the end reads zeros, or under `clip` the last row."""
    return x.at[index].get(mode="clip") if clip else x.at[index].get(mode="fill", fill_value=0)


def sum_columns(rows, columns):
    """sum_j rows[columns[j]], added up in float32: one gather a column, each as long as the column."""
    if len(columns) == 1:
        return read(rows, columns[0])
    total = read(rows, columns[0]).astype(jnp.float32)
    for column in columns[1:]:
        part = read(rows, column).astype(jnp.float32)
        short = columns[0].shape[-1] - column.shape[-1]
        axis = column.ndim - 1
        total += jnp.pad(part, [(0, short if i == axis else 0) for i in range(part.ndim)]) if short else part
    return total.astype(rows.dtype)


def spread(x, index, columns, clip=False) -> Any:
    """Rows of x, [..., n, *d] -> [*index, *d], a tuple of them for a tuple; the leading dimensions of x count as one."""
    return _spread(clip, x, index, columns)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(clip, x, index, columns):
    return _read_parts(x, index, columns, clip)


_spread.defvjp(
    lambda clip, x, index, columns: (_read_parts(x, index, columns, clip), columns),
    lambda clip, columns, cotangent: (sum_columns(_joined(cotangent), columns), None, None),
)


def gather_sum(rows, index, columns, clip=False) -> Any:
    """The transpose of `spread`: [*index, *d] -> [..., n, *d], the sum over the columns. `clip` is for its backward."""
    return _gather_sum(clip, rows, index, columns)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_sum(clip, rows, index, columns):
    return sum_columns(_joined(rows), columns)


_gather_sum.defvjp(
    lambda clip, rows, index, columns: (sum_columns(_joined(rows), columns), (index, columns)),
    lambda clip, kept, cotangent: (_read_parts(cotangent, kept[0], kept[1], clip), None, None),
)


@jax.custom_vjp
def unstack(tree):
    """The slices of a tree's leaves along their first dimension, as a list of trees. jax's own backward adds padded parts."""
    return _slices(tree)


def _stack(_, parts):
    return (jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts),)


unstack.defvjp(lambda tree: (_slices(tree), None), _stack)


def _slices(tree):
    num = jax.tree.leaves(tree)[0].shape[0]
    return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(num)]


def _read_parts(x, index, columns, clip):
    flat = x.reshape(-1, *x.shape[columns[0].ndim :])
    return jax.tree.map(lambda part: read(flat, part, clip), index)


def _joined(parts):
    return jnp.concatenate(parts) if isinstance(parts, tuple) else parts
