"""Moving rows by index, with backwards that are gathers too: each function is told the permutation in both directions.

`index` says which row of x each output row reads; `columns` says, for each row of x, in which output rows it was read:
a tuple of index arrays, one for each time that it may have been, all of shape [..., n_j] over the leading dimensions
[..., n] of x with n_j <= n (what a column lacks past n_j was read no further time). An index past the end reads zeros;
under `clip`, some row of x, for one who uses that row nowhere: XLA:TPU makes a pass of its own of the zeros.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array


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


def spread(x, index, columns, clip=False) -> Array:
    """Rows of x, [..., n, *d] -> [*index, *d]: the leading dimensions of x count as one."""
    return _spread(x, index, columns, clip)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(x, index, columns, clip):
    return read(_flat(x, columns), index, clip)


_spread.defvjp(
    lambda x, index, columns, clip: (_spread(x, index, columns, clip), columns),
    lambda clip, columns, cotangent: (sum_columns(cotangent, columns), None, None),
)


def gather_sum(rows, index, columns, clip=False) -> Array:
    """The transpose of `spread`: [*index, *d] -> [..., n, *d], the sum over the columns. `clip` is for its backward."""
    return _gather_sum(rows, index, columns, clip)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gather_sum(rows, index, columns, clip):
    return sum_columns(rows, columns)


_gather_sum.defvjp(
    lambda rows, index, columns, clip: (sum_columns(rows, columns), (index, columns)),
    lambda clip, res, cotangent: (read(_flat(cotangent, res[1]), res[0], clip), None, None),
)


def _flat(x, columns):
    return x.reshape(-1, *x.shape[columns[0].ndim :])
