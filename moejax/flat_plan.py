"""FlatPlan: rows without padding, as many as there are pairs, one expert's after the next one's.

t: tokens on this shard, k: experts per token, E: experts in the layer, m: senders on this shard, R: rows.
Indices are int32; "out of range" (R or t*k) stands for "nothing here".
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.plan import Ranks
from moejax.pytree import pytree


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How many rows there can be, whatever the routing.

    Attributes:
      rows: R, of one shard: those of all its pairs that can be kept.
      pair_rows: from one shard to the experts of another.
      received: to the experts of one shard, from all shards together.
    """

    rows: int
    pair_rows: int
    received: int


@pytree
class FlatPlan:
    """A permutation between (token, choice) pairs and rows, in both directions; rows ordered by expert, sender, rank.

    Attributes:
      slot: [t, k] row of the pair; R where it is dropped or its token invalid.
      weight: [t, k] float32 combine weight; zero where dropped or invalid.
      source: [R] the pair (token * k + choice) in each row; t*k past the last row.
      routed: [E] pairs of valid tokens that chose each expert, before any drop.
      kept: [E] pairs of them that their sender has room for.
      group_sizes: [E] rows of each expert: the pairs that their destination has room for too.
      bounds: what the routing cannot exceed.
      rest: where nothing may be dropped and a destination has no room for all: the plan of the other pairs.
    """

    slot: Int[Array, "t k"]
    weight: Float[Array, "t k"]
    source: Int[Array, "R"]
    routed: Int[Array, "E"]
    kept: Int[Array, "E"]
    group_sizes: Int[Array, "E"]
    bounds: Bounds = dataclasses.field(metadata={"static": True})
    rest: "FlatPlan | None" = None


def place_flat(
    ranks: Ranks, weight: Float[Array, "t k"], kept: Int[Array, "E m"], taken: Int[Array, "E m"], bounds: Bounds
) -> FlatPlan:
    """The plan of the first `taken` pairs of each cell; arguments as in `moejax.plan.place_in_cells`."""
    return _place(ranks, weight, (kept, jnp.zeros_like(taken), taken), bounds)


def with_rest(plan: FlatPlan, ranks: Ranks, weight: Float[Array, "t k"], kept: Int[Array, "E m"], taken: Int[Array, "E m"]):
    """`plan` and, as its rest, the plan of the pairs that are kept but not taken: together they drop nothing more."""
    return dataclasses.replace(plan, rest=_place(ranks, weight, (kept, taken, kept), plan.bounds))


def _place(ranks, weight, cells, bounds):
    """A row for the pairs of each cell whose rank is in [low, high)."""
    kept, low, high = (part.reshape(-1) for part in cells)
    nowhere, sizes = ranks.order.shape[0], high - low
    end = jnp.cumsum(sizes)
    # From rank to row, for each cell; invalid tokens have one of their own, with no ranks.
    shift, low, high = (jnp.append(part, 0) for part in (end - sizes - low, low, high))
    here = (ranks.rank >= low[ranks.cell]) & (ranks.rank < high[ranks.cell])
    cell, place = expand(sizes, bounds.rows)
    pair = ranks.order.at[ranks.start[cell] + low[cell] + place].get(mode="fill", fill_value=nowhere)
    by_expert = lambda counts: counts.reshape(ranks.count.shape).sum(1)
    return FlatPlan(
        slot=jnp.where(here, shift[ranks.cell] + ranks.rank, bounds.rows),
        weight=jnp.where(here, weight, 0),
        source=jnp.where(jnp.arange(bounds.rows) < end[-1], pair, nowhere),
        routed=ranks.count.sum(1),
        kept=by_expert(kept),
        group_sizes=by_expert(sizes),
        bounds=bounds,
    )


def expand(sizes: Int[Array, "n"], num_rows: int) -> tuple[Int[Array, "rows"], Int[Array, "rows"]]:
    """Segments of these sizes one after another: for each row the segment that it is in, and its place there.

    Rows past the last segment count on in that one.
    """
    end, row = jnp.cumsum(sizes), jnp.arange(num_rows, dtype=jnp.int32)
    # Comparisons with all, as in `moejax.plan`: searchsorted fails where the mesh has axes not made manual.
    segment = jnp.minimum((row[:, None] >= end).sum(1, dtype=jnp.int32), sizes.shape[0] - 1)
    return segment, row - (end - sizes)[segment]
