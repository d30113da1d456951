"""Sums over shards of results that come part by part: each part's partial sums are under way before the next is there.

s: shards to sum over; g, c: a row's columns are g groups of s * c, and part j is the j-th c of each group.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from moejax import axes as ax
from moejax.kernels.rows import wide
from moejax.overlapped import pass_on

Names = tuple[str, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def split_round(whole: Float[Array, "... n"], axes: Names) -> tuple[Float[Array, "... c"], ...]:
    """Its s parts by columns, in the order in which `sum_round` needs them: the farthest shards' first, this shard's last."""
    return _parts(whole, axes)


def _join(axes: Names, _, parts):
    width = parts[0].shape[-1]
    whole = ax.vary_over(jnp.zeros((*parts[0].shape[:-1], len(parts) * width), parts[0].dtype), sorted(ax.varying(parts[0])))
    for owner, part in zip(_owners(axes), parts, strict=True):
        whole = lax.dynamic_update_slice_in_dim(whole, part, owner * width, whole.ndim - 1)
    return (whole,)


split_round.defvjp(lambda whole, axes: (_parts(whole, axes), None), _join)


def sum_round(parts: tuple[Float[Array, "t n"], ...], axes: Names, num_groups: int) -> Float[Array, "t d"]:
    """The sum over shards, the same on all of them: a reduce-scatter and an all-gather, the bytes of one all-reduce.

    Partial sums go round a ring both ways, added in float32, each part's as soon as this shard has its own: products that
    make the other parts run beside it. The backward moves nothing.

    Args:
      parts: s of [t, g * c], in the order of `split_round`; they travel in their dtype.
      axes: the mesh axes to sum over.
      num_groups: g.

    Returns:
      [t, g * s * c].
    """
    parts = tuple(part.reshape(part.shape[0], num_groups, -1) for part in parts)
    # Without jax's own account of what varies (check_vma=False) a cotangent is a part of a sum here, and must be added up.
    accounted = set(axes) <= ax.varying(lax.axis_index(axes))
    if accounted:
        return jnp.reshape(_sum(parts, axes), (parts[0].shape[0], -1))
    return lax.all_gather(_own_sum(parts, axes), axes, axis=2, tiled=True).reshape(parts[0].shape[0], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum(parts, axes: Names):
    return lax.all_gather(_own_sum(parts, axes), axes, axis=2, tiled=True, to="invarying")


_sum.defvjp(lambda parts, axes: (_sum(parts, axes), None), lambda axes, _, cotangent: (_parts(cotangent, axes),))


def _own_sum(parts, axes: Names):
    """This shard's part, summed over shards."""
    *others, own = parts
    add = lambda part, partial: part if partial is None else (_wide(part) + _wide(partial)).astype(part.dtype)
    going_up = going_down = None
    if len(parts) % 2 == 0:
        going_up = pass_on(others.pop(0), axes, 1)
    for above, below in zip(others[::2], others[1::2], strict=True):
        going_up, going_down = pass_on(add(above, going_up), axes, 1), pass_on(add(below, going_down), axes, -1)
    total = sum(_wide(partial) for partial in (own, going_up, going_down) if partial is not None)
    return jnp.asarray(total, own.dtype)


def _parts(whole, axes: Names):
    width = whole.shape[-1] // ax.axis_size(axes)
    return tuple(lax.dynamic_slice_in_dim(whole, owner * width, width, whole.ndim - 1) for owner in _owners(axes))


def _owners(axes: Names) -> list[Any]:
    """Whose part goes first: that of the shard half way round, then those ever nearer above and below, then one's own."""
    size, me = ax.axis_size(axes), ax.axis_index(axes)
    far = [size // 2] if size % 2 == 0 else []
    near = [step for distance in range((size - 1) // 2, 0, -1) for step in (distance, -distance)]
    return [(me + step) % size for step in (*far, *near, 0)]


def _wide(part):
    return part.astype(wide(part.dtype))
