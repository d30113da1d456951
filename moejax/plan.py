"""DispatchPlan: where each (token, choice) sits in the send buffer, who is dropped, and nothing of the payload.

t: tokens on this shard, k: experts per token, E: experts in the layer, m: senders on this shard, c: rows of a cell.
The send buffer has E*m*c rows: expert-major, then sender, then place, so a slice of it is one destination's share and
rows land grouped by expert. Indices are int32; "out of range" (t, t*k or E*m*c) stands for "nothing here".
"""

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
      kept: [E] pairs of them that have a row.
    """

    slot: Int[Array, "t k"]
    weight: Float[Array, "t k"]
    source: Int[Array, "rows"]
    routed: Int[Array, "E"]
    kept: Int[Array, "E"]

    @property
    def num_experts(self) -> int:
        """Experts in the layer, over all devices."""
        return self.routed.shape[0]


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
    (t, k), num_experts = routing.expert.shape, routing.logits.shape[-1]
    num_cells = num_experts * num_senders
    sender = jnp.arange(t, dtype=jnp.int32) // (t // num_senders)
    cell = jnp.where(valid[:, None], routing.expert * num_senders + sender[:, None], num_cells)
    order, by_cell = _order(cell.reshape(-1), routing.weight.reshape(-1), drop_by)
    # What searchsorted(method="compare_all") does; that one fails (jax 0.10.2) where the mesh has axes not made manual.
    start = (by_cell < jnp.arange(num_cells + 1, dtype=jnp.int32)[:, None]).sum(1, dtype=jnp.int32)
    count = jnp.diff(start)
    rank = _inverse(order).reshape(t, k) - start[cell]
    fits = valid[:, None] & (rank < cell_rows)
    place = jnp.arange(cell_rows, dtype=jnp.int32)
    pair = order.at[start[:-1, None] + place].get(mode="fill", fill_value=t * k)
    source = jnp.where(place < count[:, None], pair, t * k)
    return DispatchPlan(
        slot=jnp.where(fits, cell * cell_rows + rank, num_cells * cell_rows),
        weight=jnp.where(fits, routing.weight, 0),
        source=source.reshape(-1),
        routed=count.reshape(num_experts, num_senders).sum(1),
        kept=jnp.minimum(count, cell_rows).reshape(num_experts, num_senders).sum(1),
    )


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
