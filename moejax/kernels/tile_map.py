"""The compressed map of static batching: from the number of a tile to its group and rows (arXiv 2501.16103).

The grid is static, as many tiles as any sizes can need; the map is data. Tiles past the last one in use have no rows.
G: groups, R: rows, B: tiles.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.kernels.rows import Rows
from moejax.pytree import pytree

ORDERS = ("natural", "desc", "interleave")


@pytree
class TileMap:
    """Tiles by number.

    Attributes:
      group: [B] the group of each tile; G or more where its rows belong to none (they are zeros).
      start: [B] its first row.
      stop: [B] the row after its last; `start` for a tile that is not in use.
    """

    group: Int[Array, "B"]
    start: Int[Array, "B"]
    stop: Int[Array, "B"]


@pytree
class Visits:
    """Aligned tiles by visit: one that several groups share is visited by each of them, one after another.

    Attributes:
      group: [B] the group that visits; G for the rows of none, G + 1 for those before the first group.
      tile: [B] the tile, rows [tile * height, (tile + 1) * height).
      start: [G + 1] each group's first row; [G + 2] where there may be rows before the first group.
      stop: [G + 1] the row after its last; [G + 2].
      num_visits: [1] how many visits there are; the others repeat the last one's tile and group.
    """

    group: Int[Array, "B"]
    tile: Int[Array, "B"]
    start: Int[Array, "G_more"]
    stop: Int[Array, "G_more"]
    num_visits: Int[Array, "1"]


def tile_map(rows: Rows, height: int, order: str = "natural") -> TileMap:
    """Tiles of `height` rows that start where their group does: each row of 0..R in exactly one.

    order: "natural"; "desc", the fullest groups first, so that none of them is left for the end; "interleave", a full
    and an empty one in turn, so that tiles bound by arithmetic run beside those that are bound by reading weights.
    """
    start, stop = _segments(rows)
    counts = -(-(stop - start) // height)
    num_groups, num_segments = rows.sizes.shape[0], start.shape[0]
    visit = jnp.append(_order(rows.sizes, order), jnp.arange(num_groups, num_segments)).astype(jnp.int32)
    place, inside = _expand(counts[visit], max_tiles(rows, height) + num_segments - num_groups)
    group = visit[place]
    first = start[group] + inside * height
    return TileMap(group, first, jnp.clip(stop[group], first, first + height))


def visits(rows: Rows, height: int, *, every_group: bool = False) -> Visits:
    """Visits of groups to tiles of `height` rows aligned to it, in the order of the rows.

    every_group: a group without rows visits a tile too, and the rows of no group are not visited.
    """
    start, stop = _segments(rows)
    first = jnp.minimum(start, rows.num_rows - 1) // height
    counts = jnp.where(stop > start, (stop - 1) // height - first + 1, 0)
    num_groups, num_segments = rows.sizes.shape[0], start.shape[0]
    if every_group:
        counts = jnp.maximum(counts, 1).at[num_groups:].set(0)
    total = counts.sum()
    num_slots = max_tiles(rows, height) + (0 if every_group else num_segments - num_groups)
    # In the order of the rows: those before the first group come first.
    walk = jnp.roll(jnp.arange(num_segments), num_segments - num_groups - 1)
    place, inside = _expand(counts[walk], num_slots)
    group = walk[place].astype(jnp.int32)
    tile = first[group] + inside
    last = jnp.minimum(jnp.arange(num_slots), total - 1)
    return Visits(group[last], tile[last], start, stop, total[None])


def max_tiles(rows: Rows, height: int) -> int:
    """Tiles of `height` rows that G groups of together R rows can need at most."""
    return -(-rows.num_rows // height) + rows.sizes.shape[0]


def _segments(rows: Rows) -> tuple[Int[Array, "G_more"], Int[Array, "G_more"]]:
    """First row and end of each group, of the rows after the last one and, where there may be any, of those before."""
    start, end = jnp.append(rows.start, rows.end[-1]), jnp.append(rows.end, jnp.int32(rows.num_rows))
    if rows.first is None:
        return start, end
    return jnp.append(start, jnp.int32(0)), jnp.append(end, jnp.minimum(rows.first, rows.num_rows))


def _expand(counts: Int[Array, "n"], num_slots: int) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """For each slot whose it is, when item i takes counts[i] of them in turn, and its number among those."""
    ends = jnp.cumsum(counts)
    slot = jnp.arange(num_slots, dtype=jnp.int32)
    # Comparing with all of them: the default is a loop of gathers.
    item = jnp.searchsorted(ends, slot, side="right", method="compare_all").astype(jnp.int32)
    item = jnp.minimum(item, counts.shape[0] - 1)
    return item, slot - (ends - counts)[item]


def _order(sizes: Int[Array, "G"], order: str) -> Int[Array, "G"]:
    if order == "natural":
        return jnp.arange(sizes.shape[0])
    fullest = jnp.argsort(-sizes)
    if order == "desc":
        return fullest
    half = -(-sizes.shape[0] // 2)
    return jnp.zeros_like(fullest).at[::2].set(fullest[:half]).at[1::2].set(fullest[half:][::-1])
