"""Which rows belong to which group, and what every implementation of the grouped product needs to know of them.

G: groups, R: rows of the product, M: rows of x (R, unless a token index says which of them row r reads).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from moejax import axes as ax
from moejax.pytree import pytree


@dataclasses.dataclass(frozen=True)
class How:
    """What is static about one grouped product.

    Attributes:
      dtype: of the result; sums are kept in float32 (float64 for float64) before.
      precision: of every product, as in `jax.lax.dot_general`.
      max_group_size: a bound on the rows of a group, for the implementation that pads to it.
      order: in which order kernels with a grid visit the groups, a name from `ORDERS`.
    """

    dtype: Any
    precision: Any = None
    max_group_size: int | None = None
    order: str = "natural"


@pytree
class Rows:
    """Rows of a grouped product: those of group g follow those of group g - 1; the rest belong to none.

    Attributes:
      sizes: [G] rows of each group, adding up to at most R.
      index: [R] the row of x that row r reads; one past the end (M) for an empty row. None: row r reads row r.
      num_rows: R.
      first: where group 0 begins; None: with row 0. Rows before it belong to no group.
    """

    sizes: Int[Array, "G"]
    index: Int[Array, "R"] | None
    num_rows: int = dataclasses.field(metadata={"static": True})
    first: Int[Array, ""] | None = None

    @property
    def end(self) -> Int[Array, "G"]:
        """The row after each group's last; never past R, whatever the sizes."""
        end = jnp.cumsum(self.sizes.astype(jnp.int32))
        return jnp.minimum(end if self.first is None else self.first + end, self.num_rows)

    @property
    def start(self) -> Int[Array, "G"]:
        """Each group's first row."""
        first = jnp.zeros_like(self.end[:1]) if self.first is None else self.first[None]
        return jnp.concatenate([first, self.end[:-1]])

    @property
    def live(self) -> Shaped[Array, "R"]:
        """Whether each row belongs to a group."""
        row = jnp.arange(self.num_rows, dtype=jnp.int32)
        return row < self.end[-1] if self.first is None else (row >= self.first) & (row < self.end[-1])

    def read(self, x: Shaped[Array, "M k"]) -> Shaped[Array, "R k"]:
        """The row of x that each row reads, zeros for empty rows and for those of no group, whatever they hold."""
        return jnp.where(self.live[:, None], x if self.index is None else take(x, self.index), 0)


def take(x: Shaped[Array, "M k"], index: Int[Array, "*r"]) -> Shaped[Array, "*r k"]:
    """Rows of x; zeros where the index is none of its rows."""
    return x.at[jnp.where(index < 0, x.shape[0], index)].get(mode="fill", fill_value=0)


def sum_into(rows: Float[Array, "R k"], index: Int[Array, "R"], num_rows: int) -> Float[Array, "M k"]:
    """The transpose of `take`: each row added to the row that it was read from, in float32 at least."""
    total = jnp.zeros((num_rows, rows.shape[1]), wide(rows.dtype))
    return total.at[jnp.where(index < 0, num_rows, index)].add(rows.astype(total.dtype), mode="drop")


def wide(dtype: Any) -> Any:
    """The dtype that sums of products of this dtype are kept in."""
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def zeros(shape: tuple[int, ...], dtype: Any, like: Shaped[Array, "r c"], which: int = 0) -> Array:
    """Zeros that a loop can carry: as different over manual mesh axes as `like`, which will be put in.

    They are no constant, and those of another `like` or another `which` (0, 1 or 2) are other zeros: XLA makes equal
    constants one, and then needs a copy of it for every loop that writes (a quarter more scratch where it was seen).
    """
    if not like.size:
        return ax.vary_over(jnp.zeros(shape, dtype), sorted(ax.varying(like)))
    number = like[(0, 0, -1)[which], (0, -1, -1)[which]].astype(jnp.float32)
    never = number < -jnp.inf if which else number > jnp.inf
    return jnp.broadcast_to(never.astype(dtype), shape)


def shape_like(shape: tuple[int, ...], dtype: Any, like: Array) -> jax.ShapeDtypeStruct:
    """The shape of a kernel's result: as different over manual mesh axes as `like`, which it is made from."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def scaled(rows: Shaped[Array, "R n"], scale: Float[Array, "R"] | None) -> Shaped[Array, "R n"]:
    """Rows times their factors, in their own dtype; the rows themselves for None."""
    if scale is None:
        return rows
    dtype = wide(rows.dtype)
    return (rows.astype(dtype) * scale[:, None].astype(dtype)).astype(rows.dtype)


def weighed(x: Float[Array, "*r d"], weight: Float[Array, "*r"] | None) -> Float[Array, "*r d"]:
    """Rows times their weights in float32; zeros for weight zero, whatever the row holds; the rows for None."""
    if weight is None:
        return x
    weight = weight[..., None]
    return jnp.where(weight == 0, 0, x.astype(wide(x.dtype)) * weight).astype(x.dtype)


def common(a: Any, b: Any) -> Any:
    """The dtype in which operands of two dtypes are multiplied: the wider; float32 for two unlike ones of one width."""
    a, b = jnp.dtype(a), jnp.dtype(b)
    if a == b:
        return a
    return jnp.dtype(jnp.float32) if a.itemsize == b.itemsize else max(a, b, key=lambda dtype: dtype.itemsize)


def dot(a: Shaped[Array, "..."], b: Shaped[Array, "..."], dims: tuple, how: How) -> Float[Array, "..."]:
    """`jax.lax.dot_general` of operands of any two dtypes, summed in the wide one."""
    dtype = common(a.dtype, b.dtype)
    return jax.lax.dot_general(
        a.astype(dtype), b.astype(dtype), dims, precision=how.precision, preferred_element_type=wide(dtype)
    )
