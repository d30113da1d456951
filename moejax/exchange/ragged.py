"""The ragged all-to-all: each pair's row travels once, and nothing but true rows.

Every shard knows how many rows everyone has for each expert, so a sender knows where its rows belong at the receiver: they
land grouped by expert, with nothing to sort or move after it. A row's weight travels beside it and is applied by the
experts, whose outputs no backward then needs.

t: tokens on this shard, d: model width, E: experts in the layer, e: experts on this shard, S: shards along the expert axes,
R: rows of this shard's tokens, M: rows that this shard's experts take.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Int

from moejax import axes as ax
from moejax.codec import CODECS, through
from moejax.exchange.flat import flat, home, outgoing
from moejax.exchange.weight_stream import overflow
from moejax.exchange.wire import Wire
from moejax.pytree import pytree
from moejax.ragged_all_to_all import ragged_all_to_all


@pytree
class Route:
    """One direction of the exchange: the arguments of `moejax.ragged_all_to_all` on this shard.

    Attributes:
      input_offsets: [S*e].
      send_sizes: [S*e].
      output_offsets: [S*e].
      recv_sizes: [S*e].
      num_rows: of the result.
      pair_rows: from one shard to another, at most.
    """

    input_offsets: Int[Array, "S_e"]
    send_sizes: Int[Array, "S_e"]
    output_offsets: Int[Array, "S_e"]
    recv_sizes: Int[Array, "S_e"]
    num_rows: int = dataclasses.field(metadata={"static": True})
    pair_rows: int = dataclasses.field(metadata={"static": True})


def ragged(x, plan, experts, wire: Wire):
    """x [t, d] -> (y [t, d], rows worked on here). `plan` is a FlatPlan."""
    if not wire.axes:
        return flat(x, plan, experts, wire)
    with jax.named_scope("moe/dispatch"):
        there, back, group_sizes = routes(plan, wire.axes)
        rows, weight = outgoing(x, plan)
        landed = checkpoint_name(_cross(rows, there, back, wire.axes, wire.codecs), "moe/dispatch")  # [M, d]
        row_weight = checkpoint_name(_cross(weight, there, back, wire.axes, ("plain", "plain")), "moe/dispatch")
    with jax.named_scope("moe/experts"):
        out = checkpoint_name(experts.flat(landed, group_sizes, row_weight), "moe/experts")
    with jax.named_scope("moe/combine"):
        returned = checkpoint_name(_cross(out, back, there, wire.axes, wire.codecs), "moe/combine")  # [R, d]
        y, num_rows = home(returned, plan), group_sizes.sum()
    if plan.rest is None:
        return y, num_rows
    more, num_more = overflow(x, plan.rest, experts, wire)
    return y + more, num_rows + num_more


def routes(plan, axes) -> tuple[Route, Route, Int[Array, "e"]]:
    """There and back, and how many rows each expert of this shard takes."""
    table, me = checkpoint_name(lax.all_gather(plan.group_sizes, axes), "moe/dispatch"), ax.axis_index(axes)  # [S, E]
    shards = table.shape[0]
    by_owner = table.reshape(shards, shards, -1)  # sender, owner, its expert
    sent_at = (jnp.cumsum(table, 1) - table).reshape(by_owner.shape)
    landing = by_owner.transpose(1, 2, 0)  # owner, its expert, sender: the order in which rows land
    end = jnp.cumsum(landing.reshape(shards, -1), 1).reshape(landing.shape)
    landed_at = (end - landing).transpose(2, 0, 1)
    mine = lambda part: part[me].reshape(-1)  # from here, by owner and expert
    here = lambda part: part[:, me].reshape(-1)  # to here, by sender and expert
    bounds = plan.bounds
    there = Route(mine(sent_at), mine(by_owner), mine(landed_at), here(by_owner), bounds.received, bounds.pair_rows)
    back = Route(here(landed_at), here(by_owner), here(sent_at), mine(by_owner), bounds.rows, bounds.pair_rows)
    return there, back, landing[me].sum(1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _cross(rows, there, back, axes, codecs):
    """[N, ...] -> [M, ...] along `there`; past the last row of the result stands anything. Gradients come along `back`."""
    return through(rows, functools.partial(_move, there, axes), CODECS[codecs[0]][0])


def _cross_bwd(axes, codecs, ways, cotangent):
    return through(cotangent, functools.partial(_move, ways[1], axes), CODECS[codecs[1]][1]), None, None


_cross.defvjp(lambda rows, there, back, axes, codecs: (_cross(rows, there, back, axes, codecs), (there, back)), _cross_bwd)


def _move(route, axes, operand):
    # Memory as it is found, where the backend has that: the rows that are read are all written before.
    output = ax.vary_over(lax.empty((route.num_rows, *operand.shape[1:]), operand.dtype), sorted(ax.varying(operand)))
    sizes = (route.input_offsets, route.send_sizes, route.output_offsets, route.recv_sizes)
    return ragged_all_to_all(operand, output, *sizes, axis_name=axes, pair_rows=route.pair_rows)
