"""DispatchPlan: where each (token, choice) sits in the send buffer, who is dropped, and nothing of the payload.

t: tokens on this shard, k: experts per token, E: experts in the layer, m: senders on this shard, c: rows of a cell.
The send buffer has E*m*c rows: expert-major, then sender, then place, so a slice of it is one destination's share and
rows land grouped by expert. Indices are int32; "out of range" (t, t*k or E*m*c) stands for "nothing here".
"""

import dataclasses
import itertools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moejax.pytree import pytree
from moejax.router import Routing


@pytree
class DispatchPlan:
    """A permutation between (token, choice) pairs and rows of the send buffer, in both directions.

    Attributes:
      slot: [t, k] row of the send buffer; E*m*c where the pair is dropped or its token invalid.
      weight: [t, k] float32 combine weight; zero where dropped or invalid.
      source: [E*m*c] the pair (token * k + choice) that fills each row; t*k where the row is empty.
      routed: [E] pairs of valid tokens that chose each expert, before any drop.
      kept: [E] pairs of them that their sender has room for.
      group_sizes: [E] pairs of those that their destination has room for too: the ones that have a row.
    """

    slot: Int[Array, "t k"]
    weight: Float[Array, "t k"]
    source: Int[Array, "rows"]
    routed: Int[Array, "E"]
    kept: Int[Array, "E"]
    group_sizes: Int[Array, "E"]

    @property
    def num_experts(self) -> int:
        """Experts in the layer, over all devices."""
        return self.routed.shape[0]


@pytree
class Ranks:
    """Every pair's place in its (expert, sender) cell. Cells are numbered expert * m + sender; E*m holds the rest.

    Attributes:
      cell: [t, k] the pair's cell.
      rank: [t, k] its place there, by priority.
      order: [t*k] the pairs, by cell and rank.
      start: [E*m + 1] where each cell begins in `order`.
      count: [E, m] pairs of each cell.
    """

    cell: Int[Array, "t k"]
    rank: Int[Array, "t k"]
    order: Int[Array, "n"]
    start: Int[Array, "cells"]
    count: Int[Array, "E m"]


def make_plan(
    routing: Routing, valid: Bool[Array, "t"], *, cell_rows: int, num_senders: int = 1, drop_by: str = "position"
) -> DispatchPlan:
    """Ranks every pair within its (sender, expert) cell and keeps the first `cell_rows` of each cell.

    Two sorts of t*k integers and gathers: no array of tokens x experts x capacity, no scatter.

    Args:
      routing: the experts and weights of each token.
      valid: [t] which tokens count; the others take no capacity.
      cell_rows: c, the capacity of one cell.
      num_senders: m, equal blocks of consecutive tokens, each with cells of its own; divides t.
      drop_by: "position" ranks pairs by token, then choice; "weight" by routing weight, largest first.
    """
    ranks = rank_pairs(routing, valid, num_senders, drop_by)
    kept = jnp.minimum(ranks.count, cell_rows)
    return place_in_cells(ranks, routing.weight, kept, kept, cell_rows)


def rank_pairs(routing: Routing, valid: Bool[Array, "t"], num_senders: int, drop_by: str) -> Ranks:
    """Each pair's cell and its rank there; arguments as in `make_plan`."""
    (t, k), num_experts = routing.expert.shape, routing.num_places
    num_cells = num_experts * num_senders
    sender = jnp.arange(t, dtype=jnp.int32) // (t // num_senders)
    cell = jnp.where(routing.counted(valid), routing.expert * num_senders + sender[:, None], num_cells)
    order, by_cell = _order(cell.reshape(-1), routing.weight.reshape(-1), drop_by)
    # What searchsorted(method="compare_all") does; that one fails (jax 0.10.2) where the mesh has axes not made manual.
    start = (by_cell < jnp.arange(num_cells + 1, dtype=jnp.int32)[:, None]).sum(1, dtype=jnp.int32)
    rank = _inverse(order).reshape(t, k) - start[cell]
    return Ranks(cell, rank, order, start, jnp.diff(start).reshape(num_experts, num_senders))


def place_in_cells(
    ranks: Ranks, weight: Float[Array, "t k"], kept: Int[Array, "E m"], taken: Int[Array, "E m"], cell_rows: int
) -> DispatchPlan:
    """The plan of a send buffer with `cell_rows` rows for every cell.

    Args:
      ranks: of the pairs.
      weight: their combine weights.
      kept: how many of each cell its sender has room for.
      taken: how many of those its destination has room for; they get a row.
      cell_rows: c.
    """
    nowhere, num_rows = ranks.order.shape[0], taken.size * cell_rows
    fits = ranks.rank < jnp.append(taken.reshape(-1), 0)[ranks.cell]
    place = jnp.arange(cell_rows, dtype=jnp.int32)
    pair = ranks.order.at[ranks.start[:-1, None] + place].get(mode="fill", fill_value=nowhere)
    return DispatchPlan(
        slot=jnp.where(fits, ranks.cell * cell_rows + ranks.rank, num_rows),
        weight=jnp.where(fits, weight, 0),
        source=jnp.where(place < taken.reshape(-1, 1), pair, nowhere).reshape(-1),
        routed=ranks.count.sum(1),
        kept=kept.sum(1),
        group_sizes=taken.sum(1),
    )


def by_chunk(plan: DispatchPlan, num_chunks: int) -> tuple[DispatchPlan, tuple[Int[Array, "_"], ...]]:
    """The plan with every expert's rows cut into as many chunks, or into single rows where it has fewer.

    Args:
      plan: as `make_plan` gives it.
      num_chunks: at least 1.

    Returns:
      (the plan of a send buffer that is chunk-major, its `source` by chunk: each, [E * r'], expert-major for itself).
    """
    if num_chunks == 1:
        return plan, (plan.source,)
    source = plan.source.reshape(plan.num_experts, -1)
    r = source.shape[1]
    # Even, and none of them empty: the first ones have a row more.
    width, wider = divmod(r, min(num_chunks, r))
    bounds = [i * width + min(i, wider) for i in range(min(num_chunks, r) + 1)]
    parts = tuple(source[:, low:high].reshape(-1) for low, high in itertools.pairwise(bounds))
    expert, place = plan.slot // r, plan.slot % r
    slot = expert * bounds[1] + place  # in the first chunk
    for low, high in itertools.pairwise(bounds[1:]):
        slot = jnp.where(place >= low, plan.num_experts * low + expert * (high - low) + place - low, slot)
    return _reordered(plan, slot, parts)


def by_expert(plan: DispatchPlan, num_shards: int) -> tuple[DispatchPlan, tuple[Int[Array, "_"], ...]]:
    """The plan with the rows of each shard's first expert together, then those of its second, and so on.

    Args:
      plan: as `make_plan` gives it.
      num_shards: s, along the expert axes; e = E/s.

    Returns:
      (the plan of a send buffer [e, s, r], its `source` by local expert: each, [s * r], by shard).
    """
    source = plan.source.reshape(num_shards, plan.num_experts // num_shards, -1)
    local, r = source.shape[1:]
    expert, place = plan.slot // r, plan.slot % r
    slot = (expert % local * num_shards + expert // local) * r + place
    return _reordered(plan, slot, tuple(source[:, i].reshape(-1) for i in range(local)))


def _reordered(plan, slot, parts):
    num_rows = plan.source.shape[0]
    slot = jnp.where(plan.slot < num_rows, slot, num_rows)
    return dataclasses.replace(plan, slot=slot, source=jnp.concatenate(parts)), parts


def _order(cell: Int[Array, "n"], weight: Float[Array, "n"], drop_by: str) -> tuple[Int[Array, "n"], Int[Array, "n"]]:
    """The pairs by cell and priority, and the cell of each in that order."""
    index = jnp.arange(cell.shape[0], dtype=jnp.int32)
    if drop_by == "weight":
        by_cell, _, order = lax.sort((cell, -lax.stop_gradient(weight), index), num_keys=2, is_stable=True)
    else:
        by_cell, order = lax.sort((cell, index), num_keys=1, is_stable=True)
    return order, by_cell


def _inverse(order: Int[Array, "n"]) -> Int[Array, "n"]:
    index = jnp.arange(order.shape[0], dtype=jnp.int32)
    return lax.sort((order, index), num_keys=1)[1]
