"""Products with a divided operand or result: its parts travel round a ring of devices while others are multiplied.

y = x @ w, for x [..., r, k], w [..., k, n], y [..., r, n]; r: rows, k: inner width, n: columns.
s: devices of the ring; i: one of them, the owner of part i.

Per-shard code: functions take mesh axis names, one or several (counted first axis slowest); none, or axes of one device,
make the plain product. Every part goes the shorter way round, so both directions of each link carry half of the bytes:
together those of an all-gather, or of a reduce-scatter. No product waits for the part that travels beside it.

Sources: FLUX (2406.06858), T3 (2401.16677), and Wang et al. (ASPLOS 2023), "Overlap communication with dependent
computation via decomposition in large deep learning models".
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moejax import axes as ax
from moejax.axes import Axis
from moejax.checks import one_of
from moejax.grouped_matmul import grouped_matmul, grouped_outer
from moejax.kernels.rows import wide

# For each dimension of the product, the two of x, w and y that have it, and where.
DIMENSIONS = {"rows": {"x": -2, "y": -2}, "inner": {"x": -1, "w": -2}, "columns": {"w": -1, "y": -1}}
# Each of the three from the other two.
FORMS = {"y": ("x", "w", "...rk,...kn->...rn"), "x": ("y", "w", "...rn,...kn->...rk"), "w": ("x", "y", "...rk,...rn->...kn")}
# Turns of a ring that are written out; more become a loop, so that programs do not grow with the ring.
WRITTEN_OUT = 8
Dtypes = dict[str, Any]
# x, w and y by name, as far as they are given; "group_sizes"; "travel", the dtypes that parts of each are summed in on the way.
Given = dict[str, Any]
Arrays = dict[str, Array]


def all_gather_matmul(
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    axes: Axis,
    *,
    gather: str = "x",
    along: str = "rows",
    group_sizes: Int[Array, "G"] | None = None,
) -> Float[Array, "..."]:
    """x @ w, where this shard has only its part of x or of w.

    The backward is again of rings: the divided operand's gradient is a matmul-reduce-scatter; for the other's the parts
    come by once more.

    Args:
      x: [..., r, k]; under gather="x" this shard's part of it.
      w: [..., k, n]; under gather="w" this shard's part of it. It is multiplied, and travels, in the dtype of x; its
        gradient is summed, and travels, in its own.
      axes: the mesh axes that the operand is divided over, in equal parts.
      gather: which operand, "x" or "w".
      along: which dimension of it, "rows" or "inner" of x, "inner" or "columns" of w.
      group_sizes: [G] rows of each group of a grouped product, x [R, k] and w [G, k, n], as in `moejax.grouped_matmul`;
        with gather="w" only.

    Returns:
      [..., r, n], r and n whole, in the dtype of x, summed in float32.

    Raises:
      ValueError: for shapes that do not fit, an operand or a dimension that is none of these.
    """
    one_of("gather", gather, ("x", "w"))
    one_of(f"along, dimension of {gather},", along, [name for name, places in DIMENSIONS.items() if gather in places])
    if group_sizes is not None and gather == "x":
        raise ValueError("gather='x' with group_sizes: the rows of a group must be whole; legal is gather='w'")
    return apply(ring(axes, gather, along, DOT if group_sizes is None else GROUPED), x, w, group_sizes)


def matmul_reduce_scatter(
    x: Float[Array, "..."], w: Float[Array, "..."], axes: Axis, *, along: str = "rows"
) -> Float[Array, "..."]:
    """This shard's part of the sum of all shards' x @ w. Partial sums are added in float32 and travel in the dtype of x.

    The backward gathers the cotangent round a ring, once for both gradients.

    Args:
      x: [..., r, k].
      w: [..., k, n]. It is multiplied in the dtype of x.
      axes: the mesh axes to sum over; the result is divided over them.
      along: which of its dimensions, "rows" or "columns".

    Returns:
      [..., r / s, n] or [..., r, n / s], in the dtype of x.

    Raises:
      ValueError: for shapes that do not fit, another dimension, or one that the devices do not divide.
    """
    one_of("along", along, ("rows", "columns"))
    return apply(ring(axes, "y", along), x, w)


@dataclasses.dataclass(frozen=True)
class Dot:
    """The plain product: what is wanted of x, w and y (dtypes, by name) from the other two."""

    def __call__(self, wanted: Dtypes, given: Given) -> Arrays:
        found = {}
        for name, dtype in wanted.items():
            one, other, form = FORMS[name]
            sums = wide(given[one].dtype)
            found[name] = jnp.einsum(form, given[one], given[other], preferred_element_type=sums).astype(dtype)
        return found


@dataclasses.dataclass(frozen=True)
class Grouped:
    """The same with the rows of each group by its own matrix; given also "group_sizes"."""

    def __call__(self, wanted: Dtypes, given: Given) -> Arrays:
        sizes = given["group_sizes"]
        forms = {
            "y": lambda dtype: grouped_matmul(given["x"], given["w"], sizes, None, dtype),
            "x": lambda dtype: grouped_matmul(given["y"], given["w"].swapaxes(1, 2), sizes, None, dtype),
            "w": lambda dtype: grouped_outer(given["x"], given["y"], sizes, dtype),
        }
        return {name: forms[name](dtype) for name, dtype in wanted.items()}


@dataclasses.dataclass(frozen=True)
class Ring:
    """A product of which each shard has, or gets, only its part of one of the three.

    Attributes:
      axes: the mesh axes that it is divided over.
      divided: "x", "w" or "y".
      along: a name from `DIMENSIONS`. The other one that has this dimension is `whole`.
      inner: the product of one part: `Dot`, or another Ring, whose axes are not among these. What an outer ring's part
        does not touch an inner ring does not move, so that nothing travels twice.
    """

    axes: tuple[str, ...]
    divided: str
    along: str
    inner: "Dot | Grouped | Ring"

    @property
    def whole(self) -> str:
        (name,) = DIMENSIONS[self.along].keys() - {self.divided}
        return name

    def __call__(self, wanted: Dtypes, given: Given) -> Arrays:
        rest = {name: dtype for name, dtype in wanted.items() if name != self.divided}
        found = self._gather(rest, given) if rest else {}
        if self.divided in wanted:
            found[self.divided] = self._scatter(wanted[self.divided], given)
        return found

    def _gather(self, wanted: Dtypes, given: Given) -> Arrays:
        """Meets every shard's part: what is wanted is whole, and then put together, or a sum over the parts."""
        size = ax.axis_size(self.axes)
        part_dtypes = {name: dtype if name == self.whole else wide(dtype) for name, dtype in wanted.items()}

        def visit(found, part, owner):
            parts = self.inner(part_dtypes, self._cut({**given, self.divided: part}, owner))
            if self.whole in parts:
                place = DIMENSIONS[self.along][self.whole]
                parts[self.whole] = _put(found.get(self.whole), parts[self.whole], place, owner, size)
            sums = {name: found[name] + part for name, part in parts.items() if found and name != self.whole}
            return {**parts, **sums}

        found = _visit_all(given[self.divided], self.axes, visit)
        return {name: found[name].astype(dtype) for name, dtype in wanted.items()}

    def _scatter(self, dtype, given: Given) -> Array:
        """The sum over shards of their products, at the owner of each part of it."""
        wanted = {self.divided: wide(dtype)}
        contribution = lambda owner: self.inner(wanted, self._cut(given, owner))[self.divided]
        return _sum_home(contribution, self.axes, given["travel"][self.divided]).astype(dtype)

    def _cut(self, given: Given, owner) -> Arrays:
        """What goes with the owner's part: its part of the whole one."""
        if self.whole not in given:
            return given
        whole, size = given[self.whole], ax.axis_size(self.axes)
        place = whole.ndim + DIMENSIONS[self.along][self.whole]
        length = whole.shape[place] // size
        return {**given, self.whole: lax.dynamic_slice_in_dim(whole, owner * length, length, place)}


DOT, GROUPED = Dot(), Grouped()


def ring(axes: Axis, divided: str, along: str, inner: Dot | Grouped | Ring = DOT) -> Dot | Grouped | Ring:
    """The Ring, or just its inner product where no axis has more than one device."""
    names = tuple(name for name in ax.as_tuple(axes) if lax.axis_size(name) > 1)
    return Ring(names, divided, along, inner) if names else inner


def apply(
    rings: Dot | Grouped | Ring,
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    group_sizes: Int[Array, "G"] | None = None,
) -> Float[Array, "..."]:
    """y, in the dtype of x, with the gradients that the rings give.

    Args:
      rings: how x, w and y are divided.
      x: [..., r, k], or this shard's part of it.
      w: [..., k, n], or this shard's part of it.
      group_sizes: for `Grouped`.

    Raises:
      ValueError: for shapes that do not fit.
    """
    _check(rings, x, w, grouped=group_sizes is not None)
    # A custom backward needs operands that vary over the same axes; gradients are summed over those marked here.
    axes = {name for ring in _nested(rings) for name in ring.axes}.union(*map(ax.varying, jax.tree.leaves((x, w, group_sizes))))
    return _apply(rings, *ax.vary_over((x, w, group_sizes), sorted(axes)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(rings, x, w, group_sizes):
    return rings({"y": x.dtype}, _given(x, w, group_sizes))["y"]


def _apply_bwd(rings, kept, dy):
    x, w, _ = kept
    found = rings({"x": x.dtype, "w": w.dtype}, {**_given(*kept), "y": dy})
    return found["x"], found["w"], None


_apply.defvjp(lambda rings, *operands: (_apply(rings, *operands), operands), _apply_bwd)


def _given(x, w, group_sizes) -> Given:
    travel = {"x": x.dtype, "y": x.dtype, "w": w.dtype}
    return {"x": x, "w": w.astype(x.dtype), "group_sizes": group_sizes, "travel": travel}


def _nested(rings) -> list[Ring]:
    return [rings, *_nested(rings.inner)] if isinstance(rings, Ring) else []


def _check(rings, x, w, grouped: bool) -> None:
    """Raises ValueError unless the parts make a product, and the devices divide a result that is to be divided."""
    if x.ndim < 2 or x.ndim + grouped != w.ndim:
        raise ValueError(f"x of shape {x.shape}, w of shape {w.shape}: needs [..., r, k] and [..., k, n]")
    inner = {"x": x.shape[-1], "w": w.shape[-2]}
    for ring in _nested(rings):
        size = ax.axis_size(ring.axes)
        if ring.along == "inner":
            inner[ring.divided] *= size
        if ring.divided == "y":
            _check_result(ring.along, {"rows": x.shape[-2], "columns": w.shape[-1]}[ring.along], ring.axes, size)
    if inner["x"] != inner["w"]:
        raise ValueError(
            f"x of shape {x.shape}, w of shape {w.shape}: inner widths, with all parts, {inner['x']} and {inner['w']}; need one"
        )


def _check_result(along, length, axes, size) -> None:
    if length % size:
        near = sorted({max(size, length // size * size), (length // size + 1) * size})
        raise ValueError(
            f"{along}={length} of the result: not divisible by the {size} devices of {'+'.join(axes)}; "
            f"nearest {' or '.join(map(str, near))}"
        )


def _visit_all(own: Array, axes: tuple[str, ...], visit: Callable[[Any, Array, Any], Any]):
    """Folds found = visit(found, part, owner) over all shards' parts: its own, then the nearest from either side."""
    size, me = ax.axis_size(axes), ax.axis_index(axes)

    def turn(carry, distance):
        found, from_below, from_above = carry
        from_below, from_above = pass_on(from_below, axes, 1), pass_on(from_above, axes, -1)
        found = visit(found, from_below, (me - distance) % size)
        return (visit(found, from_above, (me + distance) % size), from_below, from_above), None

    start = (visit({}, own, me), own, own)
    (found, from_below, _), _ = lax.scan(turn, start, jnp.arange(1, (size + 1) // 2), unroll=WRITTEN_OUT)
    if size % 2:
        return found
    return visit(found, pass_on(from_below, axes, 1), (me + size // 2) % size)


def _sum_home(contribution: Callable[[Any], Array], axes: tuple[str, ...], travel) -> Array:
    """This shard's part of a sum over shards: each adds to a partial sum what it has for the owner, and passes it on."""
    size, me = ax.axis_size(axes), ax.axis_index(axes)
    own = contribution(me)
    add = lambda partial, owner: (partial.astype(own.dtype) + contribution(owner % size)).astype(travel)

    def turn(carry, distance):
        going_up, going_down = add(carry[0], me + distance), add(carry[1], me - distance)
        return (pass_on(going_up, axes, 1), pass_on(going_down, axes, -1)), None

    none = ax.vary_over(jnp.zeros(own.shape, travel), sorted(ax.varying(own)))
    going_up = none if size % 2 else pass_on(add(none, me + size // 2), axes, 1)
    partial, _ = lax.scan(turn, (going_up, none), jnp.arange((size - 1) // 2, 0, -1), unroll=WRITTEN_OUT)
    return own + sum(part.astype(own.dtype) for part in partial)


def pass_on(part: Array, axes: tuple[str, ...], step: int) -> Array:
    """The part of the shard `step` places below this one on the ring."""
    size = ax.axis_size(axes)
    return lax.ppermute(part, axes, [(i, (i + step) % size) for i in range(size)])


def _put(whole: Array | None, part: Array, place: int, owner, size: int) -> Array:
    """The owner's part at its place; in zeros at first."""
    axis = part.ndim + place
    into = _room(part, axis, size) if whole is None else whole
    return lax.dynamic_update_slice_in_dim(into, part, owner * part.shape[axis], axis)


def _room(part: Array, axis: int, size: int) -> Array:
    """Zeros for the parts of all shards."""
    shape = [length * (size if i == axis else 1) for i, length in enumerate(part.shape)]
    return ax.vary_over(jnp.zeros(shape, part.dtype), sorted(ax.varying(part)))
